"""The mixture of experts in the Triton dialect: the kernels route, group, gate_up and down.

`route` picks the experts of each row. `group` lists the pairs (row, choice) of each expert; with few rows `route` does that itself. A
tile is a few pairs of one expert.

`gate_up` and `down` run over (tiles, blocks of output columns). The grid has as many tiles as the worst spread of pairs needs. A program
finds its tile's expert from the counts, and ends at once if it is past the last tile. Tiles are the grid's first axis, so those of one
expert run side by side, and what one reads from memory the others find in the L2 cache. Each pair's output has its own place, so no two
programs write to the same one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, read_once
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.moe.reference import TINY, Choices

SCORES = 8192  # most scores that a program of `route` holds
ALONE = 16  # up to so many rows, one program of `route` serves all of them and makes the groups
TOGETHER = 4  # rows of a program otherwise
PAIRS = 2048  # pairs that a program of `group` looks at in a step


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the programs of one kernel are cut."""

    columns: int  # output columns of a program
    depth: int  # columns of its input in a step
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut."""

    rows: int  # pairs of a tile
    gate_up: Blocks
    down: Blocks


# By rows of a tile. Tiles of few rows are for many bytes in flight, tiles of many rows for fast products.
TILES = {
    16: Tiles(16, Blocks(32, 128, 4, 4), Blocks(64, 128, 4, 4)),
    32: Tiles(32, Blocks(64, 128, 4, 3), Blocks(64, 128, 4, 4)),
    64: Tiles(64, Blocks(64, 64, 4, 4), Blocks(128, 64, 4, 4)),
    128: Tiles(128, Blocks(64, 64, 8, 3), Blocks(128, 64, 8, 3)),
}
FLOAT32 = Tiles(16, Blocks(32, 64, 4, 3), Blocks(64, 64, 4, 3))


def choose_tiles(pairs: int, experts: int, itemsize: int) -> Tiles:
    """The tiles for this many pairs. An expert's pairs should fit in few tiles and fill them. itemsize: bytes of a weight."""
    if itemsize > 2:
        return FLOAT32
    share = pairs / experts
    return TILES[16 if share <= 4 else 32 if share <= 16 else 64 if share <= 192 else 128]


def unsupported(x: jax.Array, gate_up_proj: jax.Array, down_proj: jax.Array) -> str | None:
    """Why the kernels cannot serve these arrays, or None."""
    dtypes = [a.dtype.name for a in (x, gate_up_proj, down_proj)]
    if len(set(dtypes)) > 1:
        return f"x, gate_up_proj and down_proj are {', '.join(dtypes)}; the kernel needs one dtype"
    if dtypes[0] not in ("bfloat16", "float16", "float32"):
        return f"x is {dtypes[0]}; the kernel takes bfloat16, float16 and float32"
    return None


def route(
    scores: jax.Array,
    per_expert: jax.Array,
    top_k: int,
    scale: float | None = None,
    dtype: Any = jnp.float32,
    *,
    launch_dependents: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, Any]:
    """See `pallas_kernels.moe.route`; the groups come as (counts, pairs) or None."""
    *_, rows, experts = scores.shape
    width = pl.next_power_of_2(experts)
    alone = rows <= min(ALONE, SCORES // width)
    block = pl.next_power_of_2(rows) if alone else max(1, min(TOGETHER, SCORES // width))
    out_shape = [jax.ShapeDtypeStruct((rows, top_k), jnp.float32), jax.ShapeDtypeStruct((rows, top_k), jnp.int32)]
    if alone:
        out_shape += [jax.ShapeDtypeStruct((experts,), jnp.int32), jax.ShapeDtypeStruct((experts, rows), jnp.int32)]
    weights, ids, *groups = dialect.call(
        functools.partial(_route, top_k=top_k, scale=scale, dtype=jnp.dtype(dtype), block=block),
        name="moe_route",
        grid=(pl.cdiv(rows, block),),
        out_shape=out_shape,
        launch_dependents=launch_dependents,
        num_warps=8 if block * width > 2048 else 4,
        num_stages=1,
        interpret=interpret,
    )(scores, per_expert)
    return weights, ids, tuple(groups) or None


def _route(scores_ref, per_expert_ref, weights_ref, ids_ref, *group_refs, top_k, scale, dtype, block):
    *parts, rows, experts = scores_ref.shape
    row = numbers(0, block)
    column = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
    real = row < rows
    inside = real[:, None] & (column < experts)[None, :]
    index = [(part,) for part in range(*parts)] if parts else [()]
    places = [scores_ref.at[*part, row[:, None], column[None, :]] for part in index]
    found = [plgpu.load(place, mask=inside, other=jnp.array(-jnp.inf, scores_ref.dtype)).astype(jnp.float32) for place in places]
    left = functools.reduce(jnp.add, found).astype(dtype).astype(jnp.float32)
    if scale is not None:
        shares = 1 / (1 + jnp.exp(-left))
        bias = plgpu.load(per_expert_ref.at[column], mask=column < experts, other=jnp.zeros((), per_expert_ref.dtype)).astype(jnp.float32)
        left = jnp.where(inside, shares + bias[None, :], -jnp.inf)
    # The choice that took a column; top_k if none did.
    choice = jnp.full(left.shape, top_k, jnp.int32)
    tops, ids = [], []
    for k in range(top_k):
        top = jnp.max(left, axis=1)
        free = (left == top[:, None]) & (choice == top_k)
        best = jnp.min(jnp.where(free, column[None, :], experts), axis=1)
        taken = column[None, :] == best[:, None]
        choice = jnp.where(taken, k, choice)
        left = jnp.where(taken, -jnp.inf, left)
        tops.append(top if scale is None else jnp.where(best < experts, jnp.sum(jnp.where(taken, shares, 0), axis=1), jnp.nan))
        ids.append(best)
    parts = tops if scale is not None else [jnp.exp(top - tops[0]) for top in tops]
    total = functools.reduce(jnp.add, parts)
    total = total if scale is None else jnp.maximum(total, TINY)
    for k, (part, best) in enumerate(zip(parts, ids, strict=True)):
        if scale is None:
            own = plgpu.load(per_expert_ref.at[best], mask=best < experts, other=jnp.zeros((), per_expert_ref.dtype)).astype(jnp.float32)
            weight = part / total * own
        else:
            weight = scale * part / total
        plgpu.store(weights_ref.at[row, k], weight, mask=real)
        plgpu.store(ids_ref.at[row, k], best, mask=real)
    if group_refs:
        counts_ref, pairs_ref = group_refs
        member = (choice < top_k) & inside
        ones = member.astype(jnp.int32)
        # Where there is nothing to store, the index is outside the array: the interpreter drops such an index but ignores the mask.
        rank = jnp.where(member, jnp.cumsum(ones, axis=0) - ones, rows)
        plgpu.store(pairs_ref.at[column[None, :], rank], row[:, None] * top_k + choice, mask=member)
        plgpu.store(counts_ref.at[column], jnp.sum(ones, axis=0), mask=column < experts)


def group(ids: jax.Array, experts: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """The counts and pairs of `pallas_kernels.moe.Groups`, with pairs [E, N * top_k]. ids: [N, top_k] int32. An expert has one program."""
    pairs = ids.size
    return dialect.call(
        functools.partial(_group, block=min(PAIRS, pl.next_power_of_2(pairs))),
        name="moe_group",
        grid=(experts,),
        out_shape=[jax.ShapeDtypeStruct((experts,), jnp.int32), jax.ShapeDtypeStruct((experts, pairs), jnp.int32)],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        launch_dependents=True,
    )(ids.reshape(-1))


def _group(ids_ref, counts_ref, pairs_ref, *, block):
    expert, (pairs,) = pl.program_id(0), ids_ref.shape

    def step(i, count):
        pair = i * block + jnp.arange(block, dtype=jnp.int32)
        mine = plgpu.load(ids_ref.at[pair], mask=pair < pairs, other=jnp.int32(-1)) == expert
        ones = mine.astype(jnp.int32)
        rank = jnp.where(mine, count + jnp.cumsum(ones) - ones, pairs)
        plgpu.store(pairs_ref.at[expert, rank], pair, mask=mine)
        return count + jnp.sum(ones)

    counts_ref[expert] = jax.lax.fori_loop(0, pl.cdiv(pairs, block), step, jnp.int32(0))


def outputs(
    x, gate_up_proj, down_proj, weights, ids, groups=None, *, activation=GELU, launch_dependents=False, interpret=False, tiles=None
):
    """See `pallas_kernels.moe.outputs`."""
    count, _, inner, hidden = gate_up_proj.shape
    pairs, top_k = ids.size, ids.shape[1]
    counts, lists = groups or group(ids, count, interpret=interpret)
    tiles = tiles or choose_tiles(pairs, count, x.dtype.itemsize)
    # At worst, every chosen expert has one tile that is not full.
    most = (pairs + min(pairs, count) * (tiles.rows - 1)) // tiles.rows

    def call(kernel, name, blocks, columns, rows, launch_dependents, *arguments):
        return dialect.call(
            functools.partial(kernel, rows=tiles.rows, top_k=top_k, columns=blocks.columns, depth=blocks.depth),
            name=name,
            grid=(most, pl.cdiv(columns, blocks.columns)),
            out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            interpret=interpret,
            launch_dependents=launch_dependents,
        )(counts, lists, *arguments)

    gate_up = functools.partial(_gate_up, activation=activation)
    act = call(gate_up, "moe_gate_up", tiles.gate_up, inner, most * tiles.rows, True, x, gate_up_proj)
    out = call(_down, "moe_down", tiles.down, hidden, pairs, launch_dependents, act, down_proj)
    return Choices(out, weights, ids, count)


def numbers(axis, block):
    """The indices of a program's block along an axis of the grid: [block] int32."""
    return pl.program_id(axis) * block + jnp.arange(block, dtype=jnp.int32)


def members(counts_ref, pairs_ref, rows):
    """A program's expert, [], and the pairs of its tile, [rows]. Without an expert it is E or more; without a pair, a number past all."""
    tile, (experts,) = pl.program_id(0), counts_ref.shape
    lane = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
    counts = plgpu.load(counts_ref.at[lane], mask=lane < experts, other=jnp.int32(0))
    tiles = pl.cdiv(counts, rows)
    before = jnp.cumsum(tiles) <= tile  # experts whose tiles all come before this one
    expert = jnp.sum(before.astype(jnp.int32))
    first = (tile - jnp.sum(jnp.where(before, tiles, 0))) * rows
    count = jnp.sum(jnp.where(lane == expert, counts, 0))
    rank = first + jnp.arange(rows, dtype=jnp.int32)
    return expert, plgpu.load(pairs_ref.at[expert, rank], mask=rank < count, other=jnp.int32(2**30))


def _load(ref, index, row, column, kept, policy=None):
    """Rows `row` and columns `column` of the matrix ref[*index]. Zeros where a row is not kept (None keeps all) or a column is outside."""
    mask = None if kept is None else kept[:, None]
    columns = ref.shape[-1]
    if columns % column.shape[0]:
        inside = (column < columns)[None, :]
        mask = inside if mask is None else mask & inside
    if mask is not None:
        mask = jnp.broadcast_to(mask, (row.shape[0], column.shape[0]))
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return plgpu.load(ref.at[*index, row[:, None], column[None, :]], mask=mask, other=other, eviction_policy=policy)


def _products(x_ref, row, kept, w_ref, indices, column, depth):
    """The products of rows of x with columns of each w[*index]: [rows, columns] float32 each."""
    width = x_ref.shape[1]
    inside = None if w_ref.shape[-2] % column.shape[0] == 0 else column < w_ref.shape[-2]
    precision = "highest" if x_ref.dtype == jnp.float32 else None

    def step(i, sums):
        at = i * depth + jnp.arange(depth, dtype=jnp.int32)
        x = _load(x_ref, (), row, at, kept)
        tiles = [_load(w_ref, index, column, at, inside, read_once.POLICY) for index in indices]
        return tuple(s + plgpu.dot(x, w, trans_b=True, precision=precision) for s, w in zip(sums, tiles, strict=True))

    zero = jnp.zeros((row.shape[0], column.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(width, depth), step, (zero,) * len(indices))


def _gate_up(counts_ref, pairs_ref, x_ref, w_ref, act_ref, *, activation, rows, top_k, columns, depth):
    expert, pair = members(counts_ref, pairs_ref, rows)
    place, column = numbers(0, rows), numbers(1, columns)

    @pl.when(expert < w_ref.shape[0])
    def _():
        row = pair // top_k
        gate, up = _products(x_ref, row, row < x_ref.shape[0], w_ref, [(expert, 0), (expert, 1)], column, depth)
        act = activation(gate, up).astype(act_ref.dtype)
        inside = jnp.broadcast_to((column < act_ref.shape[1])[None, :], act.shape)
        plgpu.store(act_ref.at[place[:, None], column[None, :]], act, mask=inside)


def _down(counts_ref, pairs_ref, act_ref, w_ref, out_ref, *, rows, top_k, columns, depth):
    del top_k
    expert, pair = members(counts_ref, pairs_ref, rows)
    place, column = numbers(0, rows), numbers(1, columns)

    @pl.when(expert < w_ref.shape[0])
    def _():
        (out,) = _products(act_ref, place, None, w_ref, [(expert,)], column, depth)
        kept = (pair < out_ref.shape[0])[:, None] & (column < out_ref.shape[1])[None, :]
        plgpu.store(out_ref.at[pair[:, None], column[None, :]], out.astype(out_ref.dtype), mask=kept)
