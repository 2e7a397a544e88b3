"""Every import of a Pallas dialect, in one place, and the choice between kernels and XLA.

Kernels are written in the Triton dialect; `device` says where that runs. JAX warns of its deprecation whenever such a kernel is
lowered; whoever calls a kernel can do nothing about that, so the warning is silenced here. Where that is worth it, a kernel has a
second implementation in the Mosaic GPU dialect, for Hopper alone.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.device import capability, current, obstacle, shared_memory

# "triton-interpret" runs the same kernel step by step on any device: slow, for tests.
IMPLEMENTATIONS = ("xla", "triton", "triton-interpret")
HOPPER = 9.0
MULTIPROCESSORS = 132  # of an H100 or H200; for programs that are lowered where no GPU is, too

warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


def select(implementation: str, unsupported: str | None = None, further: tuple[str, ...] = ()) -> str:
    """The implementation that serves: "xla", "triton" or "triton-interpret".

    implementation: one of those, which then serves or raises, or "auto": "triton" where the device runs it and the shapes allow
    it, else "xla". unsupported: why a kernel cannot serve these shapes, or None. further: names of what else the caller offers.

    Raises ValueError for an unknown name, or if a kernel is asked for that cannot serve.
    """
    if implementation not in ("auto", *IMPLEMENTATIONS):
        offered = ", ".join(map(repr, (*IMPLEMENTATIONS, *further)))
        raise ValueError(f"implementation is {implementation!r}; expected 'auto' or one of {offered}")
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


def mosaic_obstacle() -> str | None:
    """Why kernels in the Mosaic GPU dialect do not run on the current device, or None if they do."""
    device, found = current(), capability()
    if found is None:
        return f"the device is a {device.platform.upper()}; the kernel needs a Hopper GPU"
    if found != HOPPER:
        return f"the {device.device_kind} has compute capability {found}; the kernel needs {HOPPER}"
    return None


@functools.cache
def mosaic() -> Any:
    """The Mosaic GPU dialect. Its import takes a second, which only its kernels' users shall wait for."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def mosaic_load(ref: Any, layout: Any) -> jax.Array:
    """What a reference to global memory holds, in registers with this layout."""
    index = () if jax.__version_info__ >= (0, 11) else ((),)
    return mosaic().load(ref, *index, layout=layout, optimized=False)


def mosaic_transposed(ref: Any) -> Any:
    """A reference to a matrix in shared memory, transposed."""
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else mosaic().transpose_ref(ref, (1, 0))


__all__ = [
    "HOPPER",
    "IMPLEMENTATIONS",
    "MULTIPROCESSORS",
    "call",
    "mosaic",
    "mosaic_load",
    "mosaic_obstacle",
    "mosaic_transposed",
    "obstacle",
    "pl",
    "plgpu",
    "select",
    "shared_memory",
]
