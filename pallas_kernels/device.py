"""What a device can run: the one place that decides it.

| device | attention, products, heads | weights, cache and residual stream by default |
|---|---|---|
| CPU | XLA | float32 |
| sm_75 (T4) | XLA: the Triton dialect needs 8.0 | the checkpoint's, float32 or bfloat16, which XLA widens to float32 for every product |
| sm_80 (A100), sm_89 (L4), sm_90 (H100, H200), newer | kernels in the Triton dialect | the checkpoint's |

float16 is offered nowhere: it ends at 65,504, which Gemma's residual stream exceeds. bfloat16 reaches as far as float32. An sm_75 has no
units for it and pays for the widening with time, but E2B, 19 GB in float32, then takes 9.5 GB of a T4's 15. Checkpoints in float16 are
read as float32.

A choice that a device cannot run is refused with the reason where it was asked for, and "auto" never makes it. Decisions are about the
first device, or about one that is only described: `described_as` makes them for a GPU that is not there, for programs that are compiled
and not run.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

LEAST_CAPABILITY = 8.0  # of the Triton dialect
# Bytes of shared memory that a program may use at most (CUDA's programming guide, table of technical specifications).
SHARED_MEMORY = {"7.5": 65_536, "8.0": 166_912, "8.6": 101_376, "8.9": 101_376, "9.0": 232_448, "10.0": 232_448, "12.0": 101_376}


@dataclasses.dataclass(frozen=True)
class Described:
    """A device that need not be there, under the names that JAX's devices have. compute_capability: such as "8.9"."""

    device_kind: str
    compute_capability: str
    platform: str = "gpu"


_described: contextvars.ContextVar[Described | None] = contextvars.ContextVar("described", default=None)


@contextlib.contextmanager
def described_as(device: Described) -> Iterator[None]:
    """Decisions within are made for this device. Functions that were traced outside keep what was decided there."""
    token = _described.set(device)
    try:
        yield
    finally:
        _described.reset(token)


def current() -> Any:
    """The device that decisions are made for: the one described, else JAX's first."""
    return _described.get() or jax.devices()[0]


def capability(device: Any = None) -> float | None:
    """The compute capability of a GPU (by default of the current device), or None for another device."""
    device = current() if device is None else device
    return float(getattr(device, "compute_capability", "0")) if device.platform == "gpu" else None


def obstacle(device: Any = None) -> str | None:
    """Why kernels in the Triton dialect do not run on a device (by default the current one), or None if they do."""
    device = current() if device is None else device
    found = capability(device)
    if found is None:
        return f"the device is a {device.platform.upper()}; kernels need an NVIDIA GPU"
    if found < LEAST_CAPABILITY:
        return f"the {device.device_kind} has compute capability {found}; kernels need at least {LEAST_CAPABILITY}"
    return None


def float_dtype(checkpoint_dtype: str) -> str:
    """The dtype of weights, cache and residual stream where nobody chose one: "float32" or "bfloat16"."""
    return "bfloat16" if checkpoint_dtype == "bfloat16" and capability() is not None else "float32"


def shared_memory() -> int:
    """Bytes of shared memory that kernels may count on: the current GPU's, but not more than both A100 and H200 have, for which their
    tiles were measured; that also where there is no GPU."""
    most = SHARED_MEMORY["8.0"]
    return min(most, SHARED_MEMORY.get(getattr(current(), "compute_capability", "8.0"), 101_376))
