"""Every import of a Pallas dialect, in one place, and the choice between kernels and XLA.

Kernels are written in the Triton dialect; `device` says where that runs. JAX warns of its deprecation whenever such a kernel is
lowered; whoever calls a kernel can do nothing about that, so the warning is silenced here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.device import obstacle, shared_memory

# "triton-interpret" runs the same kernel step by step on any device: slow, for tests.
IMPLEMENTATIONS = ("xla", "triton", "triton-interpret")

warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


def select(implementation: str, unsupported: str | None = None) -> str:
    """The implementation that serves: "xla", "triton" or "triton-interpret".

    implementation: one of those, which then serves or raises, or "auto": "triton" where the device runs it and the shapes allow
    it, else "xla". unsupported: why a kernel cannot serve these shapes, or None.

    Raises ValueError for an unknown name, or if a kernel is asked for that cannot serve.
    """
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"implementation is {implementation!r}; expected 'auto' or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    if implementation == "auto":
        return "xla" if unsupported or obstacle() else "triton"
    if implementation != "xla" and unsupported:
        raise ValueError(f"implementation {implementation!r} cannot serve this: {unsupported}")
    return implementation


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: Sequence[int],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Any,
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """`pl.pallas_call` in the Triton dialect. name: as it appears in the lowered program."""
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=tuple(grid),
        in_specs=list(in_specs),
        out_specs=out_specs,
        input_output_aliases=dict(input_output_aliases or {}),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )


__all__ = ["IMPLEMENTATIONS", "call", "obstacle", "pl", "plgpu", "select", "shared_memory"]
