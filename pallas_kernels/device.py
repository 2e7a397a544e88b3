"""What a device can run. Nothing else decides that.

| device | attention, products, heads | weights, cache and residual stream by default |
|---|---|---|
| CPU | XLA | float32 |
| sm_75 (T4) | XLA: the Triton dialect needs 8.0 | the checkpoint's, float32 or bfloat16, which XLA widens to float32 for every product |
| sm_80 (A100), sm_89 (L4), sm_90 (H100, H200), newer | kernels in the Triton dialect | the checkpoint's |

We never offer float16: its largest number is 65,504, which Gemma's residual stream exceeds. bfloat16 has the range of float32. An sm_75
has no units for it, so widening costs time, but E2B, 19 GB in float32, then takes 9.5 GB of a T4's 15. A float16 checkpoint is read as
float32.

If a device cannot run what was asked for, that is refused with the reason; "auto" never chooses it. Decisions are for the first device,
or within `described_as` for a GPU that this machine need not have, for programs that are compiled and not run.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

LEAST_CAPABILITY = 8.0  # that the Triton dialect needs
FLOAT8_CAPABILITY = 8.9  # from which on a GPU multiplies float8
# Most bytes of shared memory for a program, by compute capability (CUDA's programming guide, table of technical specifications).
SHARED_MEMORY = {"7.5": 65_536, "8.0": 166_912, "8.6": 101_376, "8.9": 101_376, "9.0": 232_448, "10.0": 232_448, "12.0": 101_376}


@dataclasses.dataclass(frozen=True)
class Described:
    """A device that this machine need not have. Its fields have the names that JAX's devices use."""

    device_kind: str
    compute_capability: str  # such as "8.9"
    platform: str = "gpu"


_described: contextvars.ContextVar[Described | None] = contextvars.ContextVar("described", default=None)


@contextlib.contextmanager
def described_as(device: Described) -> Iterator[None]:
    """A context in which decisions are for this device. A function that was traced outside keeps the decisions made there."""
    token = _described.set(device)
    try:
        yield
    finally:
        _described.reset(token)


def current() -> Any:
    """The device that decisions are for: the described one, or else JAX's first."""
    return _described.get() or jax.devices()[0]


def capability(device: Any = None) -> float | None:
    """The compute capability of a GPU, None for any other device. device: by default the current one."""
    device = current() if device is None else device
    return float(getattr(device, "compute_capability", "0")) if device.platform == "gpu" else None


def obstacle(device: Any = None) -> str | None:
    """Why kernels in the Triton dialect do not run on a device, None if they do. device: by default the current one."""
    device = current() if device is None else device
    found = capability(device)
    if found is None:
        return f"the device is a {device.platform.upper()}; kernels need an NVIDIA GPU"
    if found < LEAST_CAPABILITY:
        return f"the {device.device_kind} has compute capability {found}; kernels need at least {LEAST_CAPABILITY}"
    return None


def float_dtype(checkpoint_dtype: str) -> str:
    """The default dtype of weights, cache and residual stream: "float32" or "bfloat16". checkpoint_dtype: the name in the config."""
    return "bfloat16" if checkpoint_dtype == "bfloat16" and capability() is not None else "float32"


def shared_memory() -> int:
    """Bytes of shared memory that kernels may use: the current GPU's, but at most an A100's, which is also the answer without a GPU.

    Tiles were measured for A100 and H200, so no kernel needs more than both have.
    """
    most = SHARED_MEMORY["8.0"]
    return min(most, SHARED_MEMORY.get(getattr(current(), "compute_capability", "8.0"), 101_376))
