"""What a step has to move and a prefill has to compute, counted from shapes alone, and how fast the device does either.

A step reads every weight that it uses once and the visible K and V of every sequence once, for the target's pass and for each pass of
the drafter: see `model.traffic` for the one, and the drafters' `bytes_read` for the other.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafters.base import bytes_read
from jaxspec.interrupts import compiled
from jaxspec.model import traffic
from jaxspec.model.target import TargetModel, last_row_layer


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that a step reads: weights and K and V, of the target's pass and of all passes of the drafter."""

    target: float
    target_kv: float
    drafter: float
    drafter_kv: float

    @property
    def total(self) -> float:
        return self.target + self.target_kv + self.drafter + self.drafter_kv

    def over(self, devices: int) -> StepBytes:
        """Those that each of several devices reads, if nothing is read twice."""
        return StepBytes(*(size / devices for size in dataclasses.astuple(self)))


def step_bytes(
    target: TargetModel, drafter: Any, *, batch: int, num_draft_tokens: int, context: float, rows: int | None = None
) -> StepBytes:
    """What one step of `batch` sequences with `context` cached positions each has to read.

    target, drafter: weights or their shapes. rows: of the target's pass, None for one of each draft and anchor. Of experts those are
    counted that random routing of all rows is expected to choose, and of a centroid head the same.
    """
    rows = batch * (num_draft_tokens + 1) if rows is None else rows
    kv = traffic.visible_kv((spec for spec in target.config.layers if spec.owns_kv), target.dtype, context)
    drafted = bytes_read(drafter, target, batch=batch, num_draft_tokens=num_draft_tokens, context=context)
    return StepBytes(target.weights_read(rows), batch * kv, *drafted)


def prefill_flops(target: TargetModel, length: int, taps: tuple[int, ...] = ()) -> float:
    """Floating-point operations that a prompt of `length` tokens needs: two for each weight of a matrix and row, and those of attention
    over the keys that each row sees. Once all K and V are there, only the last row goes on (see `last_row_layer`), and into the head."""
    config = target.config
    cut = last_row_layer(config, taps)
    flops = 2.0 * target.head[0].size
    if cut < config.num_hidden_layers:
        last = config.layers[cut]
        flops += 2.0 * (length - 1) * last.hidden_size * last.num_kv_heads * last.head_dim * (1 if last.k_eq_v else 2)
    before, of_layers = target.weights_multiplied()
    flops += 2.0 * length * before
    for i, (spec, weights) in enumerate(zip(config.layers, of_layers, strict=True)):
        rows, seen = (length, _seen(length, spec.window)) if i < cut else (1, min(length, spec.window or length))
        flops += 2.0 * rows * weights + 4.0 * spec.num_heads * spec.head_dim * seen
    return flops


def step_flops(target: TargetModel, *, batch: int, num_draft_tokens: int, context: float, rows: int | None = None) -> float:
    """Floating-point operations of the target's pass of a step, counted as those of a prompt. A drafter needs some percent of that, which
    are left out. rows: as for `step_bytes`."""
    before, of_layers = target.weights_multiplied()
    flops = 2.0 * (target.head[0].size + before)
    for spec, weights in zip(target.config.layers, of_layers, strict=True):
        flops += 2.0 * weights + 4.0 * spec.num_heads * spec.head_dim * min(context, spec.window or context)
    return (batch * (num_draft_tokens + 1) if rows is None else rows) * flops


def _seen(length: int, window: int | None) -> int:
    """Keys that all rows of a sequence see together."""
    ramp = min(length, window or length)
    return ramp * (ramp + 1) // 2 + (length - ramp) * ramp


def copy_bandwidth(size: int) -> float:
    """Bytes a second, read and written counted both, of an elementwise operation on an array of `size` bytes."""
    add = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)
    return 2 * size / _seconds(add, jnp.zeros(size // 4, jnp.float32))


def matmul_rate(width: int, dtype: Any) -> float:
    """Floating-point operations a second of a product of two square random matrices."""
    # Deviation 1/sqrt(width) keeps the products as large as the factor: a device may run faster on zeros.
    factor = (jax.random.normal(jax.random.key(0), (width, width), jnp.float32) * width**-0.5).astype(dtype)
    multiply = compiled(jax.jit(jnp.matmul), factor, factor)  # on a GPU, XLA tries kernels out, which takes long
    return 2 * width**3 / _seconds(lambda x: multiply(x, factor), factor)


def _seconds(fn: Callable[[jax.Array], jax.Array], x: jax.Array, calls: int = 10, samples: int = 5) -> float:
    """Seconds of one call, the median of samples of several calls in a row, each on what the call before gave."""
    times = []
    for _ in range(1 + samples):
        begun = time.perf_counter()
        for _ in range(calls):
            x = fn(x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - begun) / calls)
    return statistics.median(times[1:])
