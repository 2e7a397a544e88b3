"""All imports of Pallas dialects, and the choice between kernels and XLA.

Kernels are written in the Triton dialect; `device` says where that runs. JAX warns at every lowering that the dialect is deprecated. A
caller can do nothing about that, so we silence the warning here. Where it pays, a kernel has a second implementation in the Mosaic GPU
dialect, for Hopper alone.
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
MULTIPROCESSORS = 132  # an H100's or H200's; also taken where programs are lowered without a GPU

warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


def select(implementation: str, unsupported: str | None = None, further: tuple[str, ...] = ()) -> str:
    """The implementation to use: "xla", "triton" or "triton-interpret".

    implementation: one of these, or "auto", which is "triton" if the device and the shapes allow it, and "xla" otherwise. unsupported:
    why a kernel cannot serve these shapes, or None. further: other names that the caller offers, for the error.

    Raises ValueError for an unknown name, or if a kernel was asked for that cannot serve.
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
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    input_output_aliases: Mapping[int, int] | None = None,
    launch_dependents: bool = False,
) -> Callable[..., Any]:
    """`pl.pallas_call` in the Triton dialect. name: the kernel's, in the lowered program. launch_dependents: whether the kernels that come
    next may be launched while this one runs: see `launching`. Other arguments are those of `pallas_call`; every program gets the whole of
    all arrays. Settings of a kernel that is a `functools.partial` must be hashable.

    Offsets have 64 bits if an array needs them. The returned function raises NotImplementedError if this JAX cannot compute such offsets.
    """
    arrays, tree = jax.tree.flatten(out_shape)
    launches = launch_dependents and not interpret and (capability() or 0.0) >= HOPPER
    settings = num_warps, num_stages, interpret, tuple((input_output_aliases or {}).items()), launches

    def checked(*args: Any) -> Any:
        for array in (*args, *arrays):
            if _miscounted(array) and not interpret and not widen_offsets():
                raise NotImplementedError(
                    f"an array of the kernel {name!r} has {math.prod(array.shape):,} elements of one byte, which need offsets of 64 bits; "
                    f"JAX {jax.__version__} is not known to compute them. A smaller max_slots or max_len, another kv_dtype, or "
                    "attention='xla' needs none"
                )
        return _program(_Kernel.of(kernel), name, tuple(grid), len(args), tuple(arrays), tree, *settings)(*args)

    return checked


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel and the settings that it is given. Two with equal ones are equal, as `functools.partial` is not."""

    function: Callable[..., None]
    settings: frozenset[tuple[str, Any]] = frozenset()

    @classmethod
    def of(cls, kernel: Callable[..., None]) -> _Kernel:
        if not isinstance(kernel, functools.partial) or kernel.args:
            return cls(kernel)
        inner = cls.of(kernel.func)
        return cls(inner.function, frozenset((dict(inner.settings) | kernel.keywords).items()))

    def __call__(self, *refs: Any) -> None:
        self.function(*refs, **dict(self.settings))


@functools.lru_cache(maxsize=1024)
def _program(kernel, name, grid, inputs, arrays, tree, num_warps, num_stages, interpret, aliases, launch_dependents) -> Any:
    """The kernel as a function of `inputs` arrays. For equal arguments it is the same function, so a program with several calls of it, in
    layers and draft steps, traces and lowers it once. arrays, tree: the results' shapes. Other arguments as for `call`."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return jax.jit(
        pl.pallas_call(
            launching(kernel) if launch_dependents else kernel,
            out_shape=tree.unflatten(arrays),
            grid=grid,
            in_specs=[anywhere] * inputs,
            out_specs=tree.unflatten([anywhere] * len(arrays)),
            input_output_aliases=dict(aliases),
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )
    )


def launching(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel, which begins by allowing the GPU to launch the kernels that come next. These wait for its end before they read anything,
    but the launch is over by then. NVIDIA calls this programmatic dependent launch; GPUs before Hopper do not have it.

    XLA has every kernel of its own and of this dialect begin with that wait, so that all kernels before this one have ended too. But the
    compiler may move a load of XLA's own kernels ahead of the wait, since they read operands as constants. So no operation of XLA may read
    the results of such a kernel: only kernels of this dialect, whose loads stay where they are, and of the Mosaic GPU dialect, which wait
    themselves (`mosaic_wait`) or are launched after its end.
    """

    def begun(*refs: Any) -> None:
        out, zero = jax.tree.leaves(refs)[-1], jnp.zeros((1,), jnp.int32)
        (found,) = plgpu.elementwise_inline_asm(
            "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
            args=[zero],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(zero.shape, zero.dtype)],
        )
        # A store that never happens keeps the instruction, whose result it needs, from being optimised away.
        plgpu.store(out.at[(zero,) * len(out.shape)], jnp.zeros(zero.shape, out.dtype), mask=found != 0)
        kernel(*refs)

    return begun


@functools.cache
def widen_offsets() -> bool:
    """Makes kernels compute 64-bit offsets into arrays of more than 2**31 elements from now on. Returns whether that worked.

    JAX (0.10 to 0.12) takes 64-bit offsets for arrays of more than 2**32 bytes. With one-byte elements (float8) that is too late: signed
    32-bit offsets reach only 2**31 elements, then they wrap. No setting changes this, so we tell the function that decides that the
    elements have two bytes.
    """
    try:
        lowering: Any = importlib.import_module("jax._src.pallas.triton.lowering")
        narrow = lowering._compute_offsets_from_indices
    except (ImportError, AttributeError):
        return False

    @functools.wraps(narrow)
    def wide(block_info: Any, *args: Any, **kwargs: Any) -> Any:
        if _miscounted(array := block_info.full_shape_dtype):
            # The function looks only at the dtype's size.
            block_info = dataclasses.replace(block_info, full_shape_dtype=jax.ShapeDtypeStruct(array.shape, jnp.uint16))
        return narrow(block_info, *args, **kwargs)

    lowering._compute_offsets_from_indices = wide
    return True


def _miscounted(array: Any) -> bool:
    """Whether JAX takes 32-bit offsets that are too short: more than 2**31 elements in no more than 2**32 bytes."""
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
    """The Mosaic GPU dialect. The import takes a second, so only the kernels that need it do it."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def mosaic_wait(launch_dependents: bool = False) -> None:
    """In a kernel of the Mosaic GPU dialect: waits for the end of the kernels before it. A kernel that does so may be launched while the
    one before still runs, and may read what no kernel writes until it waits. launch_dependents: whether the next ones may then be
    launched too: see `launching`.

    In CUDA graphs that holds since JAX 0.12; before, a graph launches such a kernel after the end of the one before.
    """
    mosaic().griddepcontrol_wait()
    if launch_dependents:
        mosaic().griddepcontrol_launch_dependents()


def mosaic_load(ref: Any, layout: Any) -> jax.Array:
    """Loads what a reference to global memory holds into registers with this layout."""
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
    "mosaic_wait",
    "obstacle",
    "pl",
    "plgpu",
    "select",
    "shared_memory",
]
