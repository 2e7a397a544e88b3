"""Timing on this machine's device, for the `bench.py` of every kernel."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

L2_BYTES = 50 * 2**20  # an H200's; other GPUs have less
CALLS, TRIPS = 8, 16  # calls in the loop's body, and runs of that: one dispatch is CALLS * TRIPS calls
WARM_UPS, SAMPLES, SAMPLE_SECONDS = 3, 9, 0.02


def time_us(fn: Callable[..., Any], *args: Any, variants: Sequence[tuple[Any, ...]] = ()) -> float:
    """Microseconds of one call of fn(*args) on the device, the median of several samples.

    The calls run one after the other in a jitted loop, so that neither dispatch nor launches count. args: arrays or trees of arrays; fn
    closes over all else. variants: further tuples of arguments, of the same shapes. Calls take them in turn, so that a call does not
    find its inputs in the L2 cache. Without any we copy args as often as that takes, at most CALLS - 1 times. fn must not donate.
    """
    turns = [args, *variants]
    size = sum(x.nbytes for x in jax.tree.leaves(args))
    if not variants and size < 4 * L2_BYTES:
        turns += [jax.tree.map(jnp.copy, args) for _ in range(min(CALLS, math.ceil(4 * L2_BYTES / size)) - 1)]
    turns = [turns[i % len(turns)] for i in range(max(CALLS, len(turns)))]

    return loop_us(loop(fn), turns)


def loop(fn: Callable[..., Any]) -> Any:
    """A jitted function of a list of argument tuples. It calls fn with each in turn, TRIPS times over, and returns the last results."""

    def body(_: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        turns, results = carry
        done, last = [], results[-1]
        for turn in turns:
            # A call's inputs depend on the call before, so that XLA neither hoists it out of the loop nor fuses it with another. We
            # keep every result: XLA drops a call whose result nobody reads.
            turn, _ = jax.lax.optimization_barrier((turn, last))
            last = fn(*turn)
            done.append(last)
        return turns, tuple(done)

    def repeated(turns: Any) -> Any:
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tuple(jax.eval_shape(fn, *turn) for turn in turns))
        return jax.lax.fori_loop(0, TRIPS, body, (turns, empty))[1]

    # A CUDA graph must not run calls side by side either.
    options = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"} if jax.default_backend() == "gpu" else None
    return jax.jit(repeated, compiler_options=options)


def loop_us(run: Callable[..., Any], turns: Sequence[tuple[Any, ...]]) -> float:
    """Microseconds of one call within a loop. run: from `loop`, or compiled from that. turns: its argument tuples."""

    def seconds(dispatches: int) -> float:
        start = time.perf_counter()
        for _ in range(dispatches):
            results = run(turns)
        jax.block_until_ready(results)
        return time.perf_counter() - start

    for _ in range(WARM_UPS):
        once = seconds(1)
    dispatches = max(1, min(64, math.ceil(SAMPLE_SECONDS / once)))
    return statistics.median(seconds(dispatches) for _ in range(SAMPLES)) / (dispatches * TRIPS * len(turns)) * 1e6


def copy_bandwidth() -> float:
    """GB/s of an elementwise operation on an array far larger than the L2 cache, where bytes read and bytes written both count."""
    x = jnp.zeros(2**26, jnp.float32)
    return 2 * x.nbytes / time_us(lambda x: x + jnp.float32(1), x) / 1e3


def begin() -> float:
    """Prints the device's name and its copy bandwidth, and returns that: GB/s."""
    bandwidth = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: a copy moves {bandwidth:.0f} GB/s", flush=True)
    return bandwidth


def show(name: str, us: float, size: int, bandwidth: float, reference_us: float | None = None) -> None:
    """Prints a line: the time, GB/s for the `size` bytes that must be moved, the share of `bandwidth` (GB/s), and the reference's time."""
    speed = size / us / 1e3
    beside = "" if reference_us is None else f"   reference {reference_us:9.1f} us ({reference_us / us:.2f}x)"
    print(f"{name:32s} {us:9.1f} us {speed:8.0f} GB/s {speed / bandwidth:6.1%} of copy{beside}", flush=True)
