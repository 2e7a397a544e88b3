"""The product that makes a layer's heads, and what `qkv` does with them, in the Mosaic GPU dialect, for Hopper.

A cluster of eight programs has a head. Each has a block of 64 of its numbers, with a part of the inputs if the head has fewer than eight
blocks, and each of its warpgroups has an equal run of these inputs. As much of the weights as fits shared memory is copied there while the
kernel before still runs. Then every program gets the sums of every eighth row from all others: so one of its warpgroups has a whole row of
the head, which it norms, rotates and stores. What would be two kernels is one exchange within a cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, read_once
from pallas_kernels.clusters import Mail
from pallas_kernels.dialect import pl
from pallas_kernels.packed import Packed
from pallas_kernels.qkv.exchange import PROGRAMS, TILE, put, send_rows, total

BLOCK = 64  # numbers of a head that a program multiplies
WIDTHS = (256, 512)  # of heads
MOST_HEADS = 12  # as many clusters as surely run at once
MOST_ROWS = 40
SINCE = (0, 12)  # of JAX: before, a CUDA graph launches such a kernel after the end of the one before
WARPGROUPS = (4, 3, 2, 1)
STEPS = (3, 2, 1)  # blocks of inputs that are copied together
SHARED_MEMORY = 226 << 10  # of a program, without its barriers


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the inputs of a program are cut."""

    warpgroups: int
    step: int  # inputs that are copied together: a multiple of 64
    steps: int  # of a warpgroup
    stages: int  # steps of a warpgroup in shared memory


def unsupported(x: Any, w: Any, pages: Any, key_dims: int, owned: bool, dtype: Any) -> str | None:
    """Why the kernel cannot serve these arrays, or None. x: [N, H], w: [..., D, H]; owned: whether there are keys and values. Of all arrays
    the shapes are enough."""
    if reason := dialect.mosaic_obstacle():
        return reason
    if isinstance(w, Packed):
        return "the matrix is packed; the kernel needs it in bfloat16"
    pools = () if pages is None else (pages.k, pages.v)
    dtypes = {jnp.dtype(d).name for d in (x.dtype, w.dtype, dtype, *(pool.dtype for pool in pools))}
    if dtypes != {"bfloat16"}:
        return f"the arrays are {', '.join(sorted(dtypes))}; the kernel needs bfloat16"
    (*heads, dim, width), rows = w.shape, x.shape[0]
    if dim not in WIDTHS:
        return f"heads have {dim} numbers; the kernel takes {' and '.join(map(str, WIDTHS))}"
    if width % (BLOCK * _splits(dim)):
        return f"the matrix has {width} inputs; the kernel takes multiples of {BLOCK * _splits(dim)}"
    if math.prod(heads) > MOST_HEADS:
        return f"the matrix has {math.prod(heads)} heads; the kernel takes at most {MOST_HEADS}"
    if owned and key_dims != dim:
        return f"keys keep {key_dims} of {dim} numbers; the kernel stores them whole"
    if rows > MOST_ROWS or rows > TILE and rows % TILE:
        return f"x has {rows} rows; the kernel takes at most {TILE}, or multiples of {TILE} up to {MOST_ROWS}"
    return None


def _splits(dim: int) -> int:
    """How many programs share the sums of a block."""
    return PROGRAMS * BLOCK // dim


def choose_cut(rows: int, dim: int, width: int) -> Cut:
    """How to cut the inputs, for so many padded rows: so that as much as possible of them is in shared memory at once."""
    inputs, tiles = width // _splits(dim) // BLOCK, rows // TILE

    def cuts() -> Iterator[Cut]:
        for warpgroups, step in itertools.product(WARPGROUPS, STEPS):
            if inputs % (warpgroups * step) == 0:
                others = (warpgroups * rows * BLOCK * 4, tiles * PROGRAMS * BLOCK * 4, 1024, 1024)
                left = SHARED_MEMORY - sum(pl.cdiv(size, 1024) * 1024 for size in others)
                steps = inputs // (warpgroups * step)
                stages = left // (warpgroups * step * BLOCK * (BLOCK + rows) * 2)
                yield Cut(warpgroups, step * BLOCK, steps, min(steps, stages))

    return max(cuts(), key=lambda cut: (min(cut.warpgroups, 2), cut.stages * cut.step * cut.warpgroups))


@jax.jit(static_argnames=("group", "batch", "eps", "value_norm", "launch_dependents", "interpret"))
def projected(x, w, cos, sin, q_weight, k_weight, pages, *, group, batch, eps, value_norm, launch_dependents=False, interpret: Any = False):
    """See `pallas_kernels.qkv.projected`. x: [N, H] of `batch` sequences, w: [KV, P, D, H], cos and sin: [N, D / 2]. Returns arrays of rows
    [N, heads, D], or pools."""
    mosaic, rows, (kv_heads, members, dim, width) = dialect.mosaic(), x.shape[0], w.shape
    padded = pl.cdiv(rows, TILE) * TILE
    cut, tiles = choose_cut(padded, dim, width), padded // TILE
    if interpret and rows < padded:
        x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    read = {"x": x, "w": w.reshape(-1, width), "q_weight": q_weight}
    written = {"q": jax.ShapeDtypeStruct((rows, kv_heads * group, dim), x.dtype)}
    pools = {}
    if k_weight is not None:
        read["k_weight"] = k_weight
        if pages is None:
            written |= {name: jax.ShapeDtypeStruct((rows, kv_heads, dim), x.dtype) for name in ("k", "v")}
        else:
            read |= {"table": pages.table, "start": pages.start, "count": pages.count}
            pools = {"k": jax.new_ref(pages.k), "v": jax.new_ref(pages.v)}
    read |= {"cos": cos, "sin": sin}
    transforms = mosaic.TilingTransform((8, BLOCK)), mosaic.SwizzleTransform(128)
    scratch = {
        "weights": mosaic.SMEM((cut.warpgroups, cut.stages, BLOCK, cut.step), w.dtype, transforms=transforms),
        "rows": mosaic.SMEM((cut.warpgroups, cut.stages, padded, cut.step), x.dtype, transforms=transforms),
        "products": mosaic.SMEM((cut.warpgroups, padded, BLOCK), jnp.float32),
        "head": mosaic.SMEM((tiles, PROGRAMS * BLOCK), jnp.float32),
        "squares": mosaic.SMEM((tiles, 4), jnp.float32),
        "mail": mosaic.SMEM((2,), jnp.int32),
        "there": mosaic.Barrier(num_arrivals=2, num_barriers=cut.warpgroups * cut.stages),
        "read": mosaic.Barrier(num_barriers=cut.warpgroups),
        "multiplied": mosaic.Barrier(num_arrivals=cut.warpgroups),
    }
    if interpret:  # the interpreter does not know how programs send each other numbers
        written["sums"] = jax.ShapeDtypeStruct((kv_heads * members, padded, PROGRAMS * BLOCK), jnp.float32)
        scratch["exchanged"] = mosaic.ClusterBarrier(collective_axes=("member",), num_arrivals=min(tiles, cut.warpgroups))
    names, name = (*read, *pools, *written), "q_product" if k_weight is None else "qkv_product"
    settings = {"cut": cut, "rows": rows, "batch": batch, "members": members, "group": group, "eps": eps, "value_norm": value_norm}
    wait = None if interpret else functools.partial(dialect.mosaic_wait, launch_dependents)

    def body(*refs):
        def scoped(**scratch):
            _serve(mosaic, dict(zip(names, refs, strict=True)) | scratch, wait=wait, **settings)

        pl.run_scoped(scoped, collective_axes="warpgroup", **scratch)

    # Not `mosaic.kernel`, which takes no pools that it writes to before JAX 0.12.
    mesh = mosaic.Mesh(
        grid=(kv_heads * members,),
        grid_names=("head",),
        cluster=(PROGRAMS,),
        cluster_names=("member",),
        num_threads=cut.warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
    )
    # Around copies and stores JAX has barriers, of which this kernel needs none but its own.
    parameters = {"approx_math": True, "lowering_semantics": mosaic.LoweringSemantics.Lane, "reduction_scratch_bytes": 0}
    parameters |= {"unsafe_no_auto_barriers": True}
    kernel: Any = pl.kernel(
        body,
        out_type=list(written.values()),
        mesh=mesh,
        compiler_params=mosaic.CompilerParams(**parameters),
        name=name,
        interpret=interpret,
    )
    found = dict(zip(written, kernel(*read.values(), *pools.values()), strict=True)) | {name: pool[...] for name, pool in pools.items()}
    return found["q"], found.get("k"), found.get("v")


def _serve(mosaic, refs, *, cut, rows, batch, members, group, eps, value_norm, wait):
    warpgroup, member, head = (jax.lax.axis_index(name) for name in ("warpgroup", "member", "head"))
    dtype, width, dim, interpret = refs["q"].dtype, refs["x"].shape[1], refs["q"].shape[-1], wait is None
    half, splits, padded = dim // 2, _splits(dim), refs["rows"].shape[2]
    block, split = jax.lax.div(member, splits), jax.lax.rem(member, splits)
    first = split * (width // splits) + warpgroup * (cut.steps * cut.step)  # input of the warpgroup
    layout = mosaic.Layout.WG_STRIDED((half,), vec_size=half // 128)
    tiles, of_tile, mail = padded // TILE, min(rows, TILE), Mail(mosaic, refs["mail"])

    def there(step):
        return refs["there"].at[warpgroup * cut.stages + step % cut.stages]

    def copy_weights(step):
        source = refs["w"].at[pl.ds(head * dim + block * BLOCK, BLOCK), pl.ds(first + step * cut.step, cut.step)]
        read_once.copy(mosaic, source, refs["weights"].at[warpgroup, step % cut.stages], there(step), interpret=interpret)

    def copy_rows(step):
        # Rows past the last are copied as zeros, but JAX 0.12 refuses a slice that it knows to end there.
        source = refs["x"].at[pl.ds(jnp.minimum(warpgroup, 0), padded), pl.ds(first + step * cut.step, cut.step)]
        mosaic.copy_gmem_to_smem(source, refs["rows"].at[warpgroup, step % cut.stages], there(step))

    def halves(ref, *place):
        """Both halves of as many numbers as a head has. The last index of the place is the first of them."""
        *others, at = place
        return [dialect.mosaic_load(ref.at[(*others, pl.ds(at + n * half, half))], layout) for n in range(2)]

    # All that no kernel writes is read before the kernel waits for the one before.
    for step in range(cut.stages):
        copy_weights(step)
    weights = {name: halves(refs[name], 0) for name in ("q_weight", "k_weight") if name in refs}
    if not interpret:
        mail.begin(tiles * PROGRAMS * BLOCK * 4)
        wait()
    for step in range(cut.stages):
        copy_rows(step)

    def finisher(tile):
        """A function that finishes the program's row of a tile. What it needs beside the sums is loaded at once."""
        row = jnp.minimum(TILE * tile + member, rows - 1)
        cos, sin = (dialect.mosaic_load(refs[name].at[row], layout) for name in ("cos", "sin"))
        kv, which = jax.lax.div(head, members), jax.lax.rem(head, members)
        kept, where = True, (row, kv)
        if "table" in refs:
            sequence, at = jax.lax.div(row, rows // batch), jax.lax.rem(row, rows // batch)
            page, table = refs["k"].shape[1], refs["table"]
            position, kept = refs["start"][sequence] + at, at < refs["count"][sequence]
            where = (table[sequence, jax.lax.rem(jax.lax.div(position, page), table.shape[1])], jax.lax.rem(position, page), kv)

        def finish():
            sums = (refs["sums"], head, row) if interpret else (refs["head"], tile)
            parts = zip(*(halves(*sums, n * dim) for n in range(splits)), strict=True)
            values = [functools.reduce(operator.add, part).astype(dtype).astype(jnp.float32) for part in parts]
            squares = values[0] * values[0] + values[1] * values[1]
            scale = jax.lax.rsqrt(total(mosaic, squares, refs["squares"], tile, interpret=interpret) / dim + eps)
            normed = [part * scale for part in values]

            def store(name, place, low, high):
                for n, part in enumerate((low, high)):
                    refs[name][(*place, pl.ds(n * half, half))] = part.astype(dtype)

            def turned(name):
                # Rounded after the norm and after the rotation.
                pairs = zip(normed, weights[name], strict=True)
                low, high = ((part * weight.astype(jnp.float32)).astype(dtype).astype(jnp.float32) for part, weight in pairs)
                return low * cos - high * sin, high * cos + low * sin

            pl.when(which < group)(lambda: store("q", (row, kv * group + which), *turned("q_weight")))
            if "k" in refs:
                pl.when((which == group) & kept)(lambda: store("k", where, *turned("k_weight")))
                pl.when((which == members - 1) & kept)(lambda: store("v", where, *(normed if value_norm else values)))

        return finish

    mine = [warpgroup + n * cut.warpgroups for n in range(pl.cdiv(tiles, cut.warpgroups))]  # tiles of the warpgroup, if there are so many
    finishers = [finisher(tile) for tile in mine]

    def multiply(accumulator):
        for step in range(cut.steps):
            mosaic.barrier_wait(there(step))
            for k in range(0, cut.step, BLOCK):
                left, right = (refs[name].at[warpgroup, step % cut.stages, :, pl.ds(k, BLOCK)] for name in ("weights", "rows"))
                mosaic.wgmma(accumulator, left, dialect.mosaic_transposed(right))
            if step + cut.stages < cut.steps:
                mosaic.wgmma_wait(0)
                mosaic.barrier_arrive(refs["read"].at[warpgroup])  # by all threads, of which one copies
                mosaic.barrier_wait(refs["read"].at[warpgroup])
                copy_weights(step + cut.stages)
                copy_rows(step + cut.stages)
        return accumulator[...]

    product = pl.run_scoped(multiply, mosaic.ACC((BLOCK, padded), jnp.float32))
    put(mosaic, product, refs["products"], warpgroup, interpret=interpret)
    mosaic.barrier_arrive(refs["multiplied"])
    place = split * dim + block * BLOCK

    def exchange(tile):
        if not interpret:
            send_rows(mosaic, refs["products"], refs["head"], mail, tile, place, of_tile)
            return
        at = pl.ds(tile * TILE, TILE)
        refs["sums"][head, at, pl.ds(place, BLOCK)] = jnp.sum(refs["products"][:, at], axis=0)

    def for_each(do):
        for n, tile in enumerate(mine):
            pl.when(tile < tiles)(functools.partial(do, n, tile))

    @pl.when(warpgroup < tiles)
    def _end():
        mosaic.barrier_wait(refs["multiplied"])
        for_each(lambda _, tile: exchange(tile))
        if interpret:
            mosaic.barrier_arrive(refs["exchanged"])
            mosaic.barrier_wait(refs["exchanged"])

        @pl.when(member < of_tile)
        def _finish():
            if not interpret:
                mail.wait(0)
            for_each(lambda n, _: finishers[n]())
