"""Every import of a Pallas dialect, in one place, and the choice between kernels and XLA.

Kernels are written in the Triton dialect; `device` says where that runs. JAX warns of its deprecation whenever such a kernel is
lowered; whoever calls a kernel can do nothing about that, so the warning is silenced here. Where that is worth it, a kernel has a
second implementation in the Mosaic GPU dialect, for Hopper alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
    """`pl.pallas_call` in the Triton dialect. name: as it appears in the lowered program. Offsets have 64 bits where an array needs them;
    NotImplementedError is raised where this JAX cannot be made to compute them."""
    made = pl.pallas_call(
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

    def checked(*args: Any) -> Any:
        for array in (*args, *jax.tree.leaves(out_shape)):
            if _miscounted(array) and not interpret and not widen_offsets():
                raise NotImplementedError(
                    f"an array of the kernel {name!r} has {math.prod(array.shape):,} elements of one byte, which need offsets of 64 bits; "
                    f"JAX {jax.__version__} is not known to compute them. A smaller max_slots or max_len, another kv_dtype, or "
                    "attention='xla' needs none"
                )
        return made(*args)

    return checked


@functools.cache
def widen_offsets() -> bool:
    """From now on, kernels' offsets into arrays of more than 2**31 elements have 64 bits. Returns whether that could be had.

    JAX (0.10 to 0.12) counts bytes, and takes 64 bits for more than 2**32 of them. Of numbers of one byte (float8) so many are twice what
    signed offsets of 32 bits reach; the offsets wrap. No setting changes that, so the function that counts is told of numbers of two bytes.
    """
    try:
        lowering: Any = importlib.import_module("jax._src.pallas.triton.lowering")
        narrow = lowering._compute_offsets_from_indices
    except (ImportError, AttributeError):
        return False

    @functools.wraps(narrow)
    def wide(block_info: Any, *args: Any, **kwargs: Any) -> Any:
        if _miscounted(array := block_info.full_shape_dtype):
            # Of the dtype, nothing but its size is asked for.
            block_info = dataclasses.replace(block_info, full_shape_dtype=jax.ShapeDtypeStruct(array.shape, jnp.uint16))
        return narrow(block_info, *args, **kwargs)

    lowering._compute_offsets_from_indices = wide
    return True


def _miscounted(array: Any) -> bool:
    """Whether an array has more than 2**31 elements, but no more than 2**32 bytes."""
    return 2**31 < math.prod(array.shape) <= 2**32 // array.dtype.itemsize


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
