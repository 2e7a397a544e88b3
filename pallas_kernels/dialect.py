"""Every import of a Pallas dialect, in one place, and the one decision of which kernels a device runs.

Kernels are written in the Triton dialect, which runs on NVIDIA GPUs of compute capability 8.0 and newer. JAX warns of its
deprecation whenever such a kernel is lowered; whoever calls a kernel can do nothing about that, so the warning is silenced here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# "triton-interpret" runs the same kernel step by step on any device: slow, for tests.
IMPLEMENTATIONS = ("xla", "triton", "triton-interpret")
LEAST_CAPABILITY = 8.0

warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


def obstacle(device: Any = None) -> str | None:
    """Why kernels in the Triton dialect do not run on a device (by default the first), or None if they do."""
    device = jax.devices()[0] if device is None else device
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}; kernels need an NVIDIA GPU"
    capability = float(getattr(device, "compute_capability", "0"))
    if capability < LEAST_CAPABILITY:
        return f"the {device.device_kind} has compute capability {capability}; kernels need at least {LEAST_CAPABILITY}"
    return None


def shared_memory() -> int:
    """Bytes of shared memory that a program may use on the first device; on one without kernels, what A100 and H200 both have."""
    capability = getattr(jax.devices()[0], "compute_capability", "8.0")
    return 166_912 if capability in ("8.0", "9.0", "10.0") else 101_376


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
