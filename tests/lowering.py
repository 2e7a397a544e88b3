"""Programs as they are lowered for CUDA, on a machine that need not have it."""

import contextlib

import jax


def for_cuda(function, *args, **static):
    """The text of a jitted function's program. args: arrays or their shapes; static: its static arguments."""
    device = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 11):  # from here on, a kernel is lowered for a GPU that is named
        kind = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        device = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind))
    with device:
        return function.trace(*args, **static).lower(lowering_platforms=("cuda",)).as_text()
