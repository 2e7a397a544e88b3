"""The head's choice with a guide: the token that the whole table gives, for half of its bytes.

A guide is the table in 8 bits, and for each of its rows how far the 8 bits are from the row. By Cauchy's inequality a logit is no further
from its product with the guide than that distance times the length of the hidden state. So one pass over the guide gives an interval for
each logit. Only tokens whose interval reaches above the largest lower end can be the best; their logits are computed from the table.
A few tokens of a row are such, of 262,144. (Screening by bounds is old: Auvolat et al., "Clustering is efficient for approximate maximum
inner product search", 2015, and others after it prune with such bounds.)

One kernel finds the largest ends in blocks of tokens. A second one computes, block by block, the logits that matter, the likeliest first,
and stops where no token of the block can be better any more.

Where the k largest logits are wanted, they are among those whose interval reaches above the k-th largest lower end.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.choice import best, capped
from pallas_kernels.dialect import call, pl, plgpu
from pallas_kernels.linear import partials
from pallas_kernels.lm_head.triton import TABLE_DTYPES, too_many
from pallas_kernels.noise import perturbed
from pallas_kernels.packed import BLOCK, Packed, abstract, pack, tile, values_of
from pallas_kernels.packed.matrix import rounded
from pallas_kernels.top_candidates.triton import WIDEST, ordered, padded_size, unordered, warps

MOST_ROWS = 48  # of hidden states: with more, intervals of all logits take as long as half of the table
TOKENS = 1024  # of a block
TILE = 64  # tokens of which the largest lower end is one of those among which the k-th largest is sought
DEPTH = 1024  # columns of the table that are multiplied at a time
# Where each row has many logits that matter: the most rows, since together they soon have most of the table; tokens of a program, rows and
# columns of the table that are multiplied at a time, and steps that are loaded ahead, by a single warp.
MOST_LIKELY_ROWS, SPAN, AT_ONCE, LIKELY_DEPTH, STAGES = 8, 256, 16, 128, 4
WARPS = 4
LARGEST = 127  # of the guide's codes
CHUNK = 8192  # rows of the table that a guide is made of at a time
# What float32 sums of products may differ by, as a share of the lengths of both factors, and values as a share of themselves.
SUMS, VALUES = 2.0**-13, 2.0**-20


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "distance"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Guide:
    """What is known of a table [V, H] at a glance. Its fields may be arrays or ShapeDtypeStructs."""

    codes: Packed
    """[V, H] of "int8", with a scale for each row."""
    distance: Any
    """[V] float32: how far a product with a row of `codes` may be from that with the row, for a hidden state of length 1."""


def unguided(table: Any) -> str | None:
    """Why a table has no guide, or None. table: an array or its shape."""
    if isinstance(table, Packed):
        return f"the table has {table.kind} already"
    if table.dtype.name not in TABLE_DTYPES:
        return f"the table is {table.dtype.name}; a guide is made of {', '.join(TABLE_DTYPES)}"
    if table.shape[0] % BLOCK or table.shape[1] % BLOCK:
        return f"the table is {list(table.shape)}; a guide needs multiples of {BLOCK}"
    return None


def abstract_guide(table: Any) -> Guide:
    """The guide of a table as ShapeDtypeStructs. table: an array or its shape."""
    codes = abstract(table.shape, "int8", group=None, scale_dtype=table.dtype)
    return Guide(codes, jax.ShapeDtypeStruct(table.shape[:1], jnp.float32))


@jax.jit
def guide_of(table: jax.Array) -> Guide:
    """The guide of a table [V, H], which `unguided` must not refuse."""
    size, rows = table.shape[0], min(CHUNK, table.shape[0])

    def fill(i: jax.Array, guide: Guide) -> Guide:
        start = jnp.minimum(i * rows, size - rows)
        part = _of_rows(jax.lax.dynamic_slice_in_dim(table, start, rows))
        at = (start // BLOCK, start // BLOCK, start)  # of words, scales and distances
        leaves = zip(*map(jax.tree.leaves, (guide, part)), at, strict=True)
        filled = [jax.lax.dynamic_update_slice_in_dim(whole, some, at, 0) for whole, some, at in leaves]
        return jax.tree.unflatten(jax.tree.structure(guide), filled)

    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_guide(table))
    return jax.lax.fori_loop(0, pl.cdiv(size, rows), fill, empty)


def _of_rows(table: jax.Array) -> Guide:
    wide = table.astype(jnp.float32)
    scale = (jnp.max(jnp.abs(wide), axis=1, keepdims=True) / LARGEST).astype(table.dtype)
    scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    whole = jnp.clip(jnp.round(wide / scale.astype(jnp.float32)), -LARGEST - 1, LARGEST).astype(jnp.int8)
    codes = jax.lax.bitcast_convert_type(whole, jnp.uint8)
    near = rounded(values_of(codes, "int8") * scale.astype(jnp.float32), table.dtype)
    distance = jnp.linalg.norm(wide - near, axis=1) * (1 + 2.0**-10) + jnp.linalg.norm(wide, axis=1) * SUMS
    return Guide(pack(codes, scale, kind="int8"), distance)


def unsupported(hidden: Any, guide: Guide, suppressed: tuple[int, ...] = ()) -> str | None:
    """Why the kernels cannot serve this, or None. hidden: hidden states [N, H] or their shape."""
    return tile.unsupported(guide.codes, hidden.dtype) or too_many(suppressed)


def lm_head(
    hidden: jax.Array,
    table: jax.Array,
    guide: Guide,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    suppressed: tuple[int, ...],
    first_id: jax.Array | None,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.lm_head.lm_head`. implementation: as for `linear.partials`, of the products with the guide."""
    rows, size = hidden.shape[0], table.shape[0]
    near = partials(hidden, guide.codes, splits=1, launch_dependents=True, implementation=implementation).reshape(rows, size)
    length = jnp.linalg.norm(hidden.astype(jnp.float32), axis=1)
    first = (jnp.int32(0) if first_id is None else first_id).reshape(1)
    blocks = pl.cdiv(size, TOKENS)
    settings = {"softcap": softcap, "suppressed": suppressed}
    run = {"grid": (rows, blocks), "num_warps": WARPS, "num_stages": 1, "interpret": implementation == "triton-interpret"}
    of_blocks = jax.ShapeDtypeStruct((rows, blocks), jnp.float32)
    rest = near, guide.distance, length, keys, temperature, first
    highest, lowest = call(
        functools.partial(ends_kernel, **settings), name="head_ends", out_shape=(of_blocks, of_blocks), launch_dependents=True, **run
    )(*rest)
    ids = jax.ShapeDtypeStruct((rows, blocks), jnp.int32)
    values, ids = call(functools.partial(choose_kernel, **settings), name="head_choice", out_shape=(of_blocks, ids), **run)(
        hidden, table, highest, lowest, *rest
    )
    return best(values, ids)


def likely_obstacle(hidden: Any, table: Any, guide: Guide) -> str | None:
    """Why the kernels of `likely_logits` cannot serve this, or None."""
    if padded_size(table.shape[0] // TILE) > WIDEST:
        return f"the table has {table.shape[0]} rows; the kernel takes at most {WIDEST * TILE}"
    return unsupported(hidden, guide)


def likely_logits(hidden: jax.Array, table: jax.Array, guide: Guide, most: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """See `pallas_kernels.lm_head.likely_logits`. implementation: as for `linear.partials`, of the products with the guide."""
    rows, size = hidden.shape[0], table.shape[0]
    interpret = implementation == "triton-interpret"
    run = {"num_stages": 1, "interpret": interpret}
    near = partials(hidden, guide.codes, splits=1, launch_dependents=True, implementation=implementation).reshape(rows, size)
    length = jnp.linalg.norm(hidden.astype(jnp.float32), axis=1)
    lowest = call(
        lower_ends_kernel,
        name="head_lower_ends",
        grid=(rows, pl.cdiv(size, TOKENS)),
        out_shape=jax.ShapeDtypeStruct((rows, size // TILE), jnp.float32),
        num_warps=WARPS,
        launch_dependents=True,
        **run,
    )(near, guide.distance, length)
    bound = call(
        bound_kernel,
        name="head_bound",
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        num_warps=warps(padded_size(size // TILE)),
        launch_dependents=True,
        **run,
    )(lowest, most)
    return call(
        likely_kernel,
        name="head_likely",
        grid=(pl.cdiv(size, SPAN),),
        out_shape=jax.ShapeDtypeStruct((rows, size), jnp.float32),
        num_warps=1,
        num_stages=STAGES,
        input_output_aliases={0: 0},
        interpret=interpret,
    )(near, guide.distance, length, bound, hidden, table)


def lower_ends_kernel(near_ref: Any, distance_ref: Any, length_ref: Any, lowest_ref: Any) -> None:
    """Program (i, j): the largest lower end of row i's logits in each tile of block j."""
    row, place = pl.program_id(0), pl.program_id(1) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    real = place < near_ref.shape[1]
    near = plgpu.load(near_ref.at[jnp.full_like(place, row), place], mask=real, other=-np.inf)
    reach = _reach(near, length_ref[row], plgpu.load(distance_ref.at[place], mask=real, other=0.0))
    lower = jnp.max(jnp.where(near < np.inf, near - reach, -np.inf).reshape(TOKENS // TILE, TILE), axis=1)
    tile = pl.program_id(1) * (TOKENS // TILE) + jnp.arange(TOKENS // TILE, dtype=jnp.int32)
    plgpu.store(lowest_ref.at[jnp.full_like(tile, row), tile], lower, mask=tile < lowest_ref.shape[1])


def bound_kernel(lowest_ref: Any, most_ref: Any, bound_ref: Any) -> None:
    """Program i: a number that `most` tiles of row i reach with their largest lower ends, and hardly any others; -inf if there are not so
    many. It is found by bisection on the values' bits."""
    row, tiles = pl.program_id(0), lowest_ref.shape[1]
    at, most = jnp.arange(padded_size(tiles), dtype=jnp.int32), most_ref[row]
    real = at < tiles
    keys = ordered(plgpu.load(lowest_ref.at[jnp.full_like(at, row), at], mask=real, other=-np.inf))

    def undecided(found: tuple[jax.Array, ...]) -> jax.Array:
        low, high, count = found
        return (low < high) & (count != most)

    def halve(found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:  # at least `most` keys reach low, and fewer reach high + 1
        low, high, count = found
        middle = (low | high) - ((low ^ high) >> np.int32(1))
        reached = jnp.sum((real & (keys >= middle)).astype(jnp.int32), dtype=jnp.int32)
        enough = reached >= most
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1), jnp.where(enough, reached, count)

    low, _, _ = jax.lax.while_loop(undecided, halve, (jnp.min(keys), jnp.max(keys), jnp.int32(tiles)))
    bound_ref[row] = jnp.where(most > tiles, -np.inf, unordered(low))


def likely_kernel(near_ref: Any, distance_ref: Any, length_ref: Any, bound_ref: Any, hidden_ref: Any, table_ref: Any, out_ref: Any) -> None:
    """Program i: of SPAN tokens, those that matter to some row get the logits of all rows."""
    count, width = hidden_ref.shape
    lane, row = (jnp.arange(n, dtype=jnp.int32) for n in (SPAN, padded_size(count)))
    place, inside = pl.program_id(0) * SPAN + lane, row < count
    real = place < table_ref.shape[0]
    near = plgpu.load(near_ref.at[row[:, None], place[None, :]], mask=inside[:, None] & real[None, :], other=-np.inf)
    length = plgpu.load(length_ref.at[row], mask=inside, other=0.0)
    bound = plgpu.load(bound_ref.at[row], mask=inside, other=np.inf)
    reach = _reach(near, length[:, None], plgpu.load(distance_ref.at[place], mask=real, other=0.0)[None, :])
    matters = jnp.max((near + reach >= bound[:, None]).astype(jnp.int32), axis=0)
    order, wanted = jax.lax.cumsum(matters, axis=0) - matters, jnp.sum(matters, dtype=jnp.int32)
    column, row = (jnp.arange(n, dtype=jnp.int32) for n in (LIKELY_DEPTH, max(AT_ONCE, padded_size(count))))
    inside = row < count
    precision = "highest" if table_ref.dtype == jnp.float32 else None

    def some(n: jax.Array, _: None) -> None:
        slot = n * AT_ONCE + jnp.arange(AT_ONCE, dtype=jnp.int32)
        live = slot < wanted
        same = (order[None, :] == slot[:, None]) & (matters[None, :] > 0)
        token = jnp.sum(jnp.where(same, place[None, :], 0), axis=1)

        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            def load(ref: Any, at: jax.Array, mask: jax.Array) -> jax.Array:
                where, mask = i * LIKELY_DEPTH + column[None, :], jnp.broadcast_to(mask[:, None], (len(at), LIKELY_DEPTH))
                mask = mask if width % LIKELY_DEPTH == 0 else mask & (where < width)
                return plgpu.load(ref.at[at[:, None], where], mask=mask, other=jnp.zeros((), ref.dtype))

            weights, numbers = load(table_ref, token, live), load(hidden_ref, row, inside)
            return total + plgpu.dot(weights, numbers, trans_b=True, precision=precision)

        found = jax.lax.fori_loop(0, pl.cdiv(width, LIKELY_DEPTH), step, jnp.zeros((AT_ONCE, len(row)), jnp.float32))
        plgpu.store(out_ref.at[row[None, :], token[:, None]], found, mask=live[:, None] & inside[None, :])

    jax.lax.fori_loop(0, pl.cdiv(wanted, AT_ONCE), some, None)


def _reach(near: jax.Array, length: jax.Array, distance: jax.Array) -> jax.Array:
    """How far logits may be from these."""
    return length * distance + jnp.where(near > -np.inf, jnp.abs(near) * VALUES, 0.0)


def ends_kernel(*refs: Any, softcap: float | None, suppressed: tuple[int, ...]) -> None:
    """Program (i, j): the largest upper and the largest lower end of row i's values in block j; NaN if a value is NaN or infinite."""
    *inputs, highest_ref, lowest_ref = refs
    row, block = pl.program_id(0), pl.program_id(1)
    _, value, reach = _block(inputs, row, block, softcap, suppressed)
    broken = jnp.max(jnp.where(value < np.inf, 0, 1)) > 0
    highest_ref[row, block] = jnp.where(broken, np.nan, jnp.max(value + reach))
    lowest_ref[row, block] = jnp.max(jnp.where(value < np.inf, value - reach, -np.inf))


def choose_kernel(
    hidden_ref: Any,
    table_ref: Any,
    highest_ref: Any,
    lowest_ref: Any,
    *refs: Any,
    softcap: float | None,
    suppressed: tuple[int, ...],
) -> None:
    """Program (i, j): the best token of row i in block j, if it can be the best of the row; else -inf, or NaN, and any token."""
    *inputs, values_ref, ids_ref = refs
    _, _, _, keys_ref, temperature_ref, first_id_ref = inputs
    row, block = pl.program_id(0), pl.program_id(1)
    width, blocks = table_ref.shape[1], lowest_ref.shape[1]
    at = jnp.arange(1 << (blocks - 1).bit_length(), dtype=jnp.int32)
    least = jnp.max(plgpu.load(lowest_ref.at[jnp.full_like(at, row), at], mask=at < blocks, other=-np.inf))
    start = block * TOKENS + first_id_ref[0]

    def product(place: jax.Array) -> jax.Array:
        """The product of the table's row with the hidden state."""

        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            column = i * DEPTH + jnp.arange(DEPTH, dtype=jnp.int32)
            real = column < width
            weights = plgpu.load(table_ref.at[jnp.full_like(column, place), column], mask=real, other=0.0)
            numbers = plgpu.load(hidden_ref.at[jnp.full_like(column, row), column], mask=real, other=0.0)
            return total + weights.astype(jnp.float32) * numbers.astype(jnp.float32)

        return jnp.sum(jax.lax.fori_loop(0, pl.cdiv(width, DEPTH), step, jnp.zeros(DEPTH, jnp.float32)))

    def search() -> tuple[jax.Array, jax.Array]:
        place, value, reach = _block(inputs, row, block, softcap, suppressed)
        temperature, first, second = temperature_ref[row], keys_ref[row, 0], keys_ref[row, 1]

        def open_(found: tuple[jax.Array, ...]) -> jax.Array:
            upper, least, _, _ = found
            most = jnp.max(upper)
            return (most >= least) & (most > -np.inf)

        def compute(found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            upper, least, value, token = found
            chosen = jnp.argmax(upper).astype(jnp.int32)
            candidate = block * TOKENS + chosen
            other = candidate + first_id_ref[0]
            logit = capped(product(candidate), other, softcap, ())
            other_value = perturbed(logit, temperature, first, second, other)
            wins = (other_value > value) | ((other_value == value) & (other < token))
            value, token = jnp.where(wins, other_value, value), jnp.where(wins, other, token)
            upper = jnp.where(place == candidate, -np.inf, upper)
            return upper, jnp.maximum(least, value), value, token

        _, _, chosen_value, token = jax.lax.while_loop(
            open_, compute, (value + reach, least, jnp.float32(-np.inf), start + jnp.int32(TOKENS))
        )
        return chosen_value, jnp.where(chosen_value > -np.inf, token, start)

    highest = highest_ref[row, block]
    none = jnp.where(jnp.isnan(highest), highest, -np.inf)  # the lowering takes no constant for a branch's result
    found, token = jax.lax.cond(highest >= least, search, lambda: (none, start))
    values_ref[row, block], ids_ref[row, block] = found, token


def _block(refs: Any, row: Any, block: Any, softcap: float | None, suppressed: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a block's tokens: their rows of the table, about what the choice maximises, and how far that may be off. [TOKENS] each."""
    near_ref, distance_ref, length_ref, keys_ref, temperature_ref, first_id_ref = refs
    size = near_ref.shape[1]
    place = block * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    real, token = place < size, place + first_id_ref[0]
    near = plgpu.load(near_ref.at[jnp.full_like(place, row), place], mask=real, other=-np.inf)
    distance = plgpu.load(distance_ref.at[place], mask=real, other=0.0)
    temperature, first, second = temperature_ref[row], keys_ref[row, 0], keys_ref[row, 1]
    logits = capped(near, token, softcap, suppressed)
    logits = jnp.where(real, logits, -np.inf)
    value = jax.lax.cond(temperature > 0, lambda: perturbed(logits, temperature, first, second, token), lambda: logits)
    reach = length_ref[row] * distance
    reach = jnp.where(temperature > 0, reach / jnp.maximum(temperature, 1e-30), reach)
    return place, value, reach + jnp.where(value > -np.inf, jnp.abs(value) * VALUES, 0.0)
