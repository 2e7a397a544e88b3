"""Checks sums and gathers over all GPUs of the host against `jax.lax` and times them: `python -m pallas_kernels.bench_devices`."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import add_norm, all_reduce

AXIS = "tensor"
SHAPES = ((1, 256), (1, 1024), (5, 5376), (40, 5376), (160, 5376), (256, 5376), (3, 600), (64, 600))
ROUNDS = 1000  # of each shape
UNROLLED = 10  # sums of a loop's body: XLA makes no graph of few kernels
TRIPS, SAMPLES = 20, 9


def over_devices(mesh: Mesh, function: Callable[..., Any], mail: np.ndarray | None = None) -> Any:
    """A jitted function that runs `function` on every device and stacks the results.

    function: takes the device's table of mailboxes, its number, and other arguments. mail: the tables of all devices, or None.
    """
    spec = PartitionSpec(AXIS)

    def local(mail: Any, rank: Any, *args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(None if mail is None else mail[0], rank[0], *args))

    def run(*args: Any) -> Any:
        specs = (None if mail is None else spec, spec, *[PartitionSpec()] * len(args))
        ranks = jnp.arange(mesh.size, dtype=jnp.int32)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)(mail, ranks, *args)

    # Without this option XLA may leave out a rounding between operations that it fuses.
    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})


def rows_of(seed: Any, rank: Any, shape: tuple[int, int]) -> jax.Array:
    """Random rows of a device, bfloat16, whose sums are exact in float32 in whatever order."""
    key = jax.random.fold_in(jax.random.key(seed), rank)
    return (jnp.round(32 * jax.random.normal(key, shape, jnp.float32)) / 32).astype(jnp.bfloat16)


def errors(shape: tuple[int, int], mail: Any, rank: Any, seed: Any) -> jax.Array:
    """How many numbers differ from those of `jax.lax` in ROUNDS sums, sums with norms, and gathers: [3] int32."""

    def once(i: Any, wrong: jax.Array) -> jax.Array:
        x = rows_of(seed + i, rank, shape)
        expected = jax.lax.psum(x.astype(jnp.float32), AXIS).astype(x.dtype)
        found = all_reduce.all_reduce(x, AXIS, mail)
        # What is added to is the same on all devices.
        stream, weight = rows_of(seed + i, jnp.int32(1000), shape), jnp.ones(shape[1:], x.dtype)
        parts, others = jnp.stack([x.astype(jnp.float32), jnp.zeros(shape, jnp.float32)]), (weight, None, (weight,), 1e-6)
        sums = add_norm.triton.add_norm(stream, all_reduce.Unsummed(parts, mail), *others)
        # With as many threads, for the order in which they add up a row's squares.
        two_steps = all_reduce.triton.in_two_steps(shape[0], jax.lax.axis_size(AXIS))
        plain = add_norm.triton.add_norm(stream, expected, *others, num_warps=all_reduce.triton.num_warps(shape[1], two_steps))
        words = jax.lax.bitcast_convert_type(x.reshape(-1)[:20].reshape(2, 5, 2), jnp.int32)
        every = all_reduce.all_gather(words, AXIS, mail)
        counts = [
            jnp.sum(found != expected),
            sum(jnp.sum(a != b) for a, b in zip(sums, plain, strict=True)),
            jnp.sum(every != jax.lax.all_gather(words, AXIS)),
        ]
        return wrong + jnp.stack([jnp.asarray(count, jnp.int32) for count in counts])

    return jax.lax.fori_loop(0, ROUNDS, once, jnp.zeros(3, jnp.int32))


def chain(shape: tuple[int, int], trips: int, summed: Callable[..., Any], mail: Any, rank: Any) -> jax.Array:
    """UNROLLED * trips sums one after the other, with another kernel between two of them. Every number must end as it began."""
    x = jnp.broadcast_to((jnp.arange(shape[1]) % 128).astype(jnp.bfloat16), shape)
    apart = jnp.where(rank % 2 == 0, 1, -1).astype(x.dtype)

    def once(_: Any, x: jax.Array) -> jax.Array:
        for _ in range(UNROLLED):
            x = summed(x + apart, mail) / jax.lax.axis_size(AXIS)
        return x

    return jax.lax.fori_loop(0, trips, once, x)


def by_kernel(x: jax.Array, mail: Any) -> jax.Array:
    """A sum by the kernel."""
    return all_reduce.all_reduce(x, AXIS, mail)


def by_xla(x: jax.Array, mail: Any) -> jax.Array:
    """A sum by `jax.lax`."""
    return jax.lax.psum(x, AXIS)


def alone(x: jax.Array, mail: Any) -> jax.Array:
    """The work between two sums of a chain, without the sum."""
    return x + x


def microseconds(run: Any) -> float:
    """The time of one sum. run: runs a chain of TRIPS * UNROLLED sums."""
    times = []
    for _ in range(3 + SAMPLES):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times[3:]) / (TRIPS * UNROLLED)


def main() -> None:
    mesh = Mesh(np.asarray(jax.devices()), (AXIS,))
    tables = all_reduce.mailbox_tables([jax.devices()])
    if tables is None:
        raise SystemExit("these devices have no mailboxes: they are no GPUs of one process that reach each other's memory")
    mail = jax.device_put(tables[0], NamedSharding(mesh, PartitionSpec(AXIS)))
    low, high = tables[0, 0, 0].view(np.uint32).tolist()
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, mailbox of the first at {high << 32 | low:#x}", flush=True)
    for shape in SHAPES:
        ended = np.asarray(over_devices(mesh, functools.partial(chain, shape, 2000, by_kernel), mail)(), np.float32)
        broken = (ended != np.arange(shape[1], dtype=np.float32) % 128).sum()
        wrong = np.asarray(over_devices(mesh, functools.partial(errors, shape), mail)(np.int32(7)))
        print(
            f"{shape}: {broken} numbers of a long chain are wrong; in {ROUNDS} sums, sums with norms, gathers: {wrong.tolist()}", flush=True
        )
    for shape in SHAPES:
        us = [microseconds(over_devices(mesh, functools.partial(chain, shape, TRIPS, f), mail)) for f in (by_kernel, by_xla, alone)]
        print(f"{shape}: {us[0]:.2f} us with the kernel, {us[1]:.2f} with jax.lax.psum, {us[2]:.2f} with a sum of one device", flush=True)


if __name__ == "__main__":
    main()
