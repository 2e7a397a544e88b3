"""What keeps calls short on a GPU: XLA puts a program's kernels into CUDA graphs, which take long to record and to ask about."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np

from pallas_kernels.device import capability

# A loop is recorded whole, so that its calls return at once and what is to run next waits on the device. By default XLA records the body
# alone and asks before each round, on the host, whether to go on. The kinds of commands before the last two are those of a round. Sums
# that XLA makes itself are none of them: a loop that has one runs as it would without.
WHOLE_LOOP = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
# The host launches each kernel, so that a profiler sees all of them. It does not see those of all rounds where a loop is a graph.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
HOPPER = 9.0  # compute capability of the first GPUs that it was measured on

# Bytes of a gap, and how many of them: slot ids and counts; small reports; requests to admit and reports of many sequences.
GAPS = {256: 64, 4096: 32, 2**16: 16, 2**20: 8}
SMALLEST = 256  # bytes that any array takes


def compiled(lowered: Any, devices: Collection[Any]) -> Any:
    """A lowered program with a loop, compiled. devices: those that it runs on. Hopper GPUs or newer, all of this process, get WHOLE_LOOP,
    where XLA knows it; raises what the compiler raises."""
    ready = all(device.process_index == jax.process_index() and (capability(device) or 0.0) >= HOPPER for device in devices)
    return _compiled(lowered, WHOLE_LOOP if ready else None)


def used_on(devices: Iterable[Any]) -> bool:
    """Whether programs are put into CUDA graphs there."""
    return any(device.platform == "gpu" for device in devices)


def without(lowered: Any, devices: Collection[Any]) -> Any:
    """The same program without CUDA graphs, for a profiler. It computes the same with the same kernels, and takes longer."""
    return _compiled(lowered, NO_GRAPHS)


def _compiled(lowered: Any, options: dict[str, Any] | None) -> Any:
    if options is not None:
        try:
            return lowered.compile(compiler_options=options)
        except Exception as error:  # of many kinds, from one version of XLA to the next
            if not any(option in str(error) for option in options):
                raise
            # This XLA knows the options by other names, or other kinds of commands. Without them a loop is slower, not wrong.
    return lowered.compile()


def keep_apart(devices: Iterable[Any]) -> list[jax.Array]:
    """Leaves gaps for small arrays in the memory of those devices that are GPUs of this process, so that large ones lie where they lay in
    the call before. They are there as long as what is returned, which holds them apart.

    Before a call XLA records anew each kernel of a graph that works on an address that moved: 2 to 4 ms for a round of a large model on an
    H200. Weights and state stay where they are. A call's temporary arrays lie where XLA's allocator finds room, at the beginning of the
    smallest free block that will do. The call's small arguments, which come first, would take the beginning of that same block if no
    smaller one were free, and whatever else is alive by chance would decide how far it then shifts.
    """
    walls = list[jax.Array]()
    for device in devices:
        if device.platform != "gpu" or device.process_index != jax.process_index():
            continue
        sizes = [size for size, count in GAPS.items() for _ in range(count)]
        pairs = [[jax.device_put(np.zeros(nbytes, np.uint8), device) for nbytes in (size, SMALLEST)] for size in sizes]
        walls += [wall for _, wall in jax.block_until_ready(pairs)]
    return walls
