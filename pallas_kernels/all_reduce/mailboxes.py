"""Mailboxes: memory of each GPU of a group that the group's other GPUs can write to. JAX does not manage it."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.all_reduce.triton import LEAST_IN_TWO_STEPS, LEAST_WIDTH, MOST_DEVICES, all_gather, all_reduce, mailbox_bytes
from pallas_kernels.device import obstacle

MAPPED_PAGE = 2**21  # bytes: GPU memory is mapped in multiples of this
TRIALS, FEW = 100, 2  # sums, in one step and in two, and gathers that test a group's kernels; rows of the first and the last
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", ctypes.c_int),
        ("device", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


def mailbox_tables(groups: Iterable[Iterable[Any]]) -> np.ndarray | None:
    """What the kernels of `all_reduce` need to know, for D devices in each of G groups: [G, D, D + 1, 2] int32.

    Row 0 of a device's table has the two halves of its mailbox's address, row d those of the d-th device after it in its group, and row D
    its number in the group.

    Returns None if the devices are not GPUs of this process that run kernels and reach each other's memory, or if XLA was told to run the
    kernels of a graph side by side. It also returns None, with a warning, if the kernels' results are wrong.

    Do not call it while a function is traced: the first call for a group runs programs on its GPUs.
    """
    if "COMMAND_BUFFER_SCHEDULING_MODE=CONCURRENT" in os.environ.get("XLA_FLAGS", "").upper():
        return None
    found = [_tried(tuple(group)) for group in groups]
    served = [of_one for of_one in found if of_one is not None]
    return np.stack(served) if len(served) == len(found) else None


def mailbox_table(addresses: Sequence[int]) -> np.ndarray:
    """The tables of one group, [D, D + 1, 2] int32. addresses: of its D mailboxes."""
    count = len(addresses)
    halves = np.array([divmod(address, 2**32)[::-1] for address in addresses], np.uint64).astype(np.uint32).view(np.int32)
    rows = [[*(halves[(rank + d) % count] for d in range(count)), np.array([rank, 0], np.int32)] for rank in range(count)]
    return np.array(rows, np.int32)


@functools.cache
def _tried(devices: tuple[Any, ...]) -> np.ndarray | None:
    """A group's part of `mailbox_tables`, or None."""
    begins = addresses(devices)
    if begins is None:
        return None
    mail = mailbox_table(begins)
    try:
        wrong = f"{_wrong(devices, mail)} of {TRIALS} sums or gathers are wrong"
    except jax.errors.JaxRuntimeError as error:
        wrong = str(error).splitlines()[0]
    if wrong.startswith("0 "):
        return mail
    warnings.warn(f"GPUs {[device.id for device in devices]} add up by jax.lax, as the kernel fails: {wrong}", stacklevel=2)
    return None


def _wrong(devices: tuple[Any, ...], mail: np.ndarray) -> int:
    """How many of TRIALS sums and gathers by the kernels, one after the other, are wrong on some device. XLA sums nothing here: where it
    cannot, the kernels may."""
    axis, spec = "devices", PartitionSpec("devices")

    def local(mail: jax.Array) -> jax.Array:
        def once(i: jax.Array, wrong: jax.Array) -> jax.Array:
            place = jnp.arange(LEAST_IN_TWO_STEPS * LEAST_WIDTH, dtype=jnp.int32).reshape(LEAST_IN_TWO_STEPS, -1)
            ranks = jnp.arange(len(devices), dtype=jnp.int32)[:, None, None]
            each = (((place + i) % 32)[None] + ranks).astype(jnp.bfloat16)  # exact, and so is their sum
            total = jnp.sum(each.astype(jnp.float32), axis=0).astype(each.dtype)
            every = jax.lax.bitcast_convert_type(each, jnp.uint16)
            own, halves = (jnp.take(numbers, jax.lax.axis_index(axis), axis=0) for numbers in (each, every))
            pairs = [(all_reduce(own[:rows], mail[0]), total[:rows]) for rows in (FEW, LEAST_IN_TWO_STEPS)]
            pairs.append((all_gather(halves[:FEW], mail[0]), every[:, :FEW]))
            return wrong + functools.reduce(operator.or_, [jnp.any(found != wanted) for found, wanted in pairs]).astype(jnp.int32)

        return jax.lax.fori_loop(0, TRIALS, once, jnp.int32(0))[None]

    mesh = Mesh(np.asarray(devices), (axis,))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return int(np.asarray(run(mail)).max())


@functools.cache
def addresses(devices: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The addresses of these devices' mailboxes, None if there can be none. The first call makes the mailboxes and zeroes them."""
    here = all(device.process_index == jax.process_index() for device in devices)
    if not 1 < len(devices) <= MOST_DEVICES or not here or any(obstacle(device) for device in devices):
        return None
    try:
        return _mapped([device.local_hardware_id for device in devices])
    except OSError:
        return None


def _mapped(ordinals: Sequence[int]) -> tuple[int, ...]:
    """Maps a mailbox on each GPU, zeroes it, and returns the addresses. Raises OSError if CUDA refuses a call."""
    cuda, count = ctypes.CDLL("libcuda.so.1"), len(ordinals)
    room = -(-mailbox_bytes(count) // MAPPED_PAGE) * MAPPED_PAGE

    def call(name: str, *args: Any) -> None:
        if error := getattr(cuda, name)(*args):
            raise OSError(f"{name} returned {error}")

    def number(value: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(value)

    call("cuInit", 0)
    for a in ordinals:
        for b in ordinals:
            reached = ctypes.c_int(1)
            if a != b:
                call("cuDeviceCanAccessPeer", ctypes.byref(reached), a, b)
            if not reached.value:
                raise OSError(f"GPU {a} does not reach the memory of GPU {b}")
    begin = ctypes.c_uint64()
    call("cuMemAddressReserve", ctypes.byref(begin), number(count * room), *[number(0)] * 3)
    mailboxes = tuple(begin.value + i * room for i in range(count))
    for mailbox, ordinal in zip(mailboxes, ordinals, strict=True):
        handle, properties = ctypes.c_uint64(), _Properties(type=PINNED, location=ON_DEVICE, device=ordinal)
        call("cuMemCreate", ctypes.byref(handle), number(room), ctypes.byref(properties), number(0))
        call("cuMemMap", number(mailbox), number(room), number(0), handle, number(0))
    access = (_Access * count)(*(_Access(ON_DEVICE, ordinal, READ_WRITE) for ordinal in ordinals))
    call("cuMemSetAccess", begin, number(count * room), access, number(count))
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinals[0])
    call("cuCtxPushCurrent_v2", context)
    try:
        call("cuMemsetD8_v2", begin, ctypes.c_ubyte(0), number(count * room))
        call("cuCtxSynchronize")
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    return mailboxes
