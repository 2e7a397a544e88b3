"""CUDA graphs, into which XLA puts a program's kernels: options and memory that keep the host's part of a call short."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np

from jaxspec.xla_options import known
from pallas_kernels.device import capability

# With these options a loop is recorded as one graph, so that its call returns at once and the next call waits on the device. By default XLA
# records the loop's body only, and asks on the host before each round whether to go on. The last two kinds of commands are the loop itself,
# the others are what a round consists of. Sums over devices that XLA makes itself are not among them: a loop with one runs as by default.
WHOLE_LOOP = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
# With this one too, kernels of a graph wait only for those whose results they read or whose memory they overwrite; by default each waits
# for the one before. Not for several devices: there each device must come to its sums with the others in the same order. Texts and times
# were compared with this JAX and newer.
CONCURRENT, CONCURRENT_SINCE = WHOLE_LOOP | {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}, (0, 12)
# With these the host launches each kernel, so that a profiler sees all of them; of a loop that is a graph it does not see every round. And
# no kernel is launched before the end of the one before, so that the time that it waits for that is not taken for its own.
ONE_BY_ONE = {"xla_gpu_enable_command_buffer": "", "xla_gpu_enable_pdl": False}
HOPPER = 9.0  # compute capability; on older GPUs WHOLE_LOOP was not measured

# Bytes of a gap -> how many gaps: for slot ids and counts; small reports; requests to admit and reports of many sequences.
GAPS = {256: 64, 4096: 32, 2**16: 16, 2**20: 8}
SMALLEST = 256  # bytes that any array takes


def compiled(lowered: Any, devices: Collection[Any]) -> Any:
    """Compiles a lowered program with a loop. devices: those that it runs on; if all are Hopper GPUs or newer and of this process, the
    program gets WHOLE_LOOP, or with a newer JAX and one GPU CONCURRENT, provided that XLA knows these options. Raises what the compiler
    raises."""
    if not _whole(devices):
        return lowered.compile()
    options = CONCURRENT if len(devices) == 1 and jax.__version_info__ >= CONCURRENT_SINCE else WHOLE_LOOP
    return lowered.compile(compiler_options=known(options))


def _whole(devices: Iterable[Any]) -> bool:
    return all(device.process_index == jax.process_index() and (capability(device) or 0.0) >= HOPPER for device in devices)


def loops_return(devices: Collection[Any]) -> bool:
    """Whether a call of a compiled loop on these devices returns before its rounds are over, provided that a loop on several GPUs has no
    sums of XLA's own."""
    return _whole(devices) or not used_on(devices)


def used_on(devices: Iterable[Any]) -> bool:
    """Whether XLA puts programs for these devices into CUDA graphs."""
    return any(device.platform == "gpu" for device in devices)


def without(lowered: Any, devices: Collection[Any]) -> Any:
    """Compiles a lowered program without CUDA graphs and launches ahead of time, for a profiler. It runs the same kernels, and takes
    longer."""
    return lowered.compile(compiler_options=known(ONE_BY_ONE))


def keep_apart(devices: Iterable[Any]) -> list[jax.Array]:
    """Leaves gaps for small arrays in the memory of each device that is a GPU of this process, so that the large temporary arrays of a call
    get the same addresses every time. Returns the arrays between the gaps; the gaps last as long as these are held.

    If an address has changed, XLA records the kernels that use it anew before the call: 2 to 4 ms for a round of a large model on an H200.
    Weights and state do not move. XLA's allocator puts temporary arrays at the beginning of the smallest free block that is large enough.
    The call's small arguments are allocated first. Without gaps they would take the beginning of that block, and shift the temporary
    arrays by an amount that depends on whatever else happens to be alive.
    """
    walls = list[jax.Array]()
    for device in devices:
        if device.platform != "gpu" or device.process_index != jax.process_index():
            continue
        sizes = [size for size, count in GAPS.items() for _ in range(count)]
        pairs = [[jax.device_put(np.zeros(nbytes, np.uint8), device) for nbytes in (size, SMALLEST)] for size in sizes]
        walls += [wall for _, wall in jax.block_until_ready(pairs)]
    return walls
