"""Selection of the k largest values of a row without sorting it, and the top candidates by means of that.

One program holds a row in its registers. It finds the k-th largest value by bisection on the values' bits. Each round counts the values
above; the rounds end when exactly k are above, after about ten for logits. A choice needs no order: one program has a row's k largest
values, and keeps, perturbs and compares them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dialect import call, pl, plgpu
from pallas_kernels.noise import key_words, perturbed
from pallas_kernels.top_candidates.reference import min_p_floor, tile_maxima, tile_width, weight, with_softcap

WIDEST = 16_384  # most values that a program can hold: 32 a thread
MOST = 128  # most candidates that a program can put in order
LOWEST, HIGHEST = np.int32(-(2**31)), np.int32(2**31 - 1)


def unsupported(vocab: int, k: int) -> str | None:
    """Why the kernels cannot serve these shapes, or None."""
    if k > MOST:
        return f"k is {k}; the kernel gives at most {MOST}"
    width = tile_width(vocab, k)
    widest = max(padded_size(-(-vocab // width)), padded_size(k * width))
    if widest > WIDEST:
        return f"k = {k} of {vocab} values makes a stage of {widest}; the kernel holds at most {WIDEST}"
    return None


def padded_size(size: int) -> int:
    """The power of two at or above `size`, since a kernel's arrays have such sizes."""
    return 1 << max(0, size - 1).bit_length()


def warps(size: int) -> int:
    """Warps of a program that holds `size` values: 16 values a thread, up to 32 if there are many."""
    return max(1, min(16, size // 512))


def ordered(values: jax.Array) -> jax.Array:
    """float32 values as int32 keys with the same order."""
    return _flipped(jax.lax.bitcast_convert_type(values, jnp.int32))


def unordered(keys: jax.Array) -> jax.Array:
    """The inverse of `ordered`: int32 keys as float32 values."""
    return jax.lax.bitcast_convert_type(_flipped(keys), jnp.float32)


def _flipped(bits: jax.Array) -> jax.Array:
    """Reverses the order of negative numbers, whose bits count downwards in a float. Its own inverse."""
    return bits ^ ((bits >> np.int32(31)) & HIGHEST)


def places(keys: jax.Array, real: jax.Array, k: int) -> jax.Array:
    """The place of each value of a row among its k largest, which keep the row's order; k for the other values. [n] int32.

    keys: [n] int32. real: [n] bool: the keys that count, at least k. Of equal keys the first ones are taken.
    """
    keys = jnp.where(real, keys, LOWEST)
    # `count` <= k keys are larger than `above`; at least k keys are larger than `below`.
    below = jnp.maximum(jnp.min(jnp.where(real, keys, HIGHEST)), LOWEST + np.int32(1)) - np.int32(1)

    def undecided(bounds: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        below, above, count = bounds
        return (count < k) & (below + np.int32(1) < above)

    def halve(bounds: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        below, above, count = bounds
        middle = (below >> np.int32(1)) + (above >> np.int32(1)) + (below & above & np.int32(1))
        more = jnp.sum((keys > middle).astype(jnp.int32), dtype=jnp.int32)
        few = more <= k
        return jnp.where(few, below, middle), jnp.where(few, middle, above), jnp.where(few, more, count)

    _, above, count = jax.lax.while_loop(undecided, halve, (below, jnp.max(keys), jnp.int32(0)))
    larger, equal = real & (keys > above), real & (keys == above)
    # One scan counts larger and equal keys up to each place, in the two halves of a word.
    counts = jax.lax.cumsum(larger.astype(jnp.int32) * np.int32(1 << 16) + equal.astype(jnp.int32), axis=0)
    larger_so_far, equal_so_far, wanted = counts >> np.int32(16), counts & np.int32(0xFFFF), np.int32(k) - count
    taken = larger | (equal & (equal_so_far <= wanted))
    return jnp.where(taken, larger_so_far + jnp.minimum(equal_so_far, wanted) - np.int32(1), np.int32(k))


def select_kernel(values_ref: Any, indices_ref: Any, *, size: int, k: int) -> None:
    """Program i: the indices of the k largest values of row i."""
    row, at = pl.program_id(0), jnp.arange(padded_size(size), dtype=jnp.int32)
    rows, real = jnp.full_like(at, row), at < size
    place = places(ordered(plgpu.load(values_ref.at[rows, at], mask=real, other=0.0)), real, k)
    plgpu.store(indices_ref.at[rows, place], at, mask=place < k)


def tokens_kernel(logits_ref: Any, tiles_ref: Any, values_ref: Any, ids_ref: Any, *, vocab: int, width: int, tiles: int, k: int) -> None:
    """Program i: the k largest values in row i's chosen tiles and their ids, by ascending id."""
    row, at = pl.program_id(0), jnp.arange(padded_size(tiles * width), dtype=jnp.int32)
    rows, inside = jnp.full_like(at, row), at < tiles * width
    tile = plgpu.load(tiles_ref.at[rows, at // width], mask=inside, other=0)
    ids = tile * width + at % width
    real = inside & (ids < vocab)
    keys = ordered(plgpu.load(logits_ref.at[rows, ids], mask=real, other=0.0))
    place = places(keys, real, k)
    plgpu.store(values_ref.at[rows, place], unordered(keys), mask=place < k)
    plgpu.store(ids_ref.at[rows, place], ids, mask=place < k)


def order_kernel(values_ref: Any, ids_ref: Any, sorted_values_ref: Any, sorted_ids_ref: Any, *, k: int) -> None:
    """Program i: sorts row i, which comes by ascending id, by descending value. Each value counts those that come before it."""
    row, at = pl.program_id(0), jnp.arange(padded_size(k), dtype=jnp.int32)
    rows, real = jnp.full_like(at, row), at < k
    values = plgpu.load(values_ref.at[rows, at], mask=real, other=0.0)
    ids = plgpu.load(ids_ref.at[rows, at], mask=real, other=0)
    keys = ordered(values)
    earlier = (keys[None, :] > keys[:, None]) | ((keys[None, :] == keys[:, None]) & (at[None, :] < at[:, None]))
    place = jnp.sum((earlier & real[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    place = jnp.where(real, place, np.int32(k))
    plgpu.store(sorted_values_ref.at[rows, place], values, mask=real)
    plgpu.store(sorted_ids_ref.at[rows, place], ids, mask=real)


def choice_kernel(*refs: Any, k: int, each: int, softcap: float | None, named: bool) -> None:
    """Program i: the choice among row i's k largest logits, in any order, under its request's filters. each: rows of a request. named:
    whether places have token ids, which then are the third array; else they are the ids.

    A value's rank is how many are larger, and its share of a nucleus is theirs, so that equal ones are kept or dropped together."""
    values_ref, places_ref, *ids_ref = refs[: 2 + named]
    positions_ref, seed_ref, temperature_ref, top_k_ref, top_p_ref, min_p_ref, chosen_ref, largest_ref = refs[2 + named :]
    row, at = pl.program_id(0), jnp.arange(padded_size(k), dtype=jnp.int32)
    rows, real = jnp.full_like(at, row), at < k
    request = row // each
    ids = plgpu.load(places_ref.at[rows, at], mask=real, other=0)
    if named:
        ids = plgpu.load(ids_ref[0].at[rows, ids], mask=real, other=0)
    values = with_softcap(plgpu.load(values_ref.at[rows, at], mask=real, other=-jnp.inf), softcap)
    temperature, top_k, top_p, min_p = (plgpu.load(x.at[request]) for x in (temperature_ref, top_k_ref, top_p_ref, min_p_ref))

    larger, most = values[None, :] > values[:, None], jnp.max(values)
    rank = jnp.sum(larger.astype(jnp.int32), axis=1, dtype=jnp.int32)
    kept = (rank < jnp.maximum(top_k, 1)) & (values >= min_p_floor(most, temperature, min_p))
    weights = jnp.where(kept & real, weight(values, most, temperature), 0.0)
    before = jnp.sum(jnp.where(larger, weights[None, :], 0.0), axis=1)
    kept = (kept & ((before < top_p * jnp.sum(weights)) | (top_p >= 1))) | (values == most)

    low, high = (plgpu.load(seed_ref.at[request, np.int32(word)]) for word in range(2))
    first, second = key_words(low, high, plgpu.load(positions_ref.at[row]))
    scores = perturbed(values, temperature, first, second, ids)
    scores = jnp.where(real & kept & (scores == scores), scores, -jnp.inf)  # without NaN, so that one of the ids is chosen
    plgpu.store(chosen_ref.at[row], jnp.min(jnp.where(real & (scores == jnp.max(scores)), ids, HIGHEST)))
    plgpu.store(largest_ref.at[row], most)


def select_largest(values: jax.Array, k: int, *, interpret: bool) -> jax.Array:
    """The indices of the k largest values of each row, ascending. [N, n] float32 -> [N, k] int32; n is at most WIDEST.

    They are those of `jax.lax.top_k`: of equal values the lower index is taken. Only kernels may read them: see `dialect.launching`.
    """
    rows, size = values.shape
    return call(
        functools.partial(select_kernel, size=size, k=k),
        name="select",
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        num_warps=warps(padded_size(size)),
        num_stages=1,
        interpret=interpret,
        launch_dependents=True,
    )(values)


def unsorted_candidates(logits: jax.Array, k: int, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The k largest values of each row and their ids, by ascending id. Only kernels may read them: see `dialect.launching`."""
    rows, vocab = logits.shape
    width = tile_width(vocab, k)
    tiles = min(k, math.ceil(vocab / width))
    chosen = select_largest(tile_maxima(logits, width), tiles, interpret=interpret)
    return call(
        functools.partial(tokens_kernel, vocab=vocab, width=width, tiles=tiles, k=k),
        name="top_candidates",
        grid=(rows,),
        out_shape=(jax.ShapeDtypeStruct((rows, k), jnp.float32), jax.ShapeDtypeStruct((rows, k), jnp.int32)),
        num_warps=warps(padded_size(tiles * width)),
        num_stages=1,
        interpret=interpret,
        launch_dependents=True,
    )(logits, chosen)


def top_candidates(logits: jax.Array, k: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.top_candidates.top_candidates`."""
    values, ids = unsorted_candidates(logits, k, interpret=interpret)
    return call(
        functools.partial(order_kernel, k=k),
        name="order",
        grid=(logits.shape[0],),
        out_shape=(jax.ShapeDtypeStruct(values.shape, jnp.float32), jax.ShapeDtypeStruct(ids.shape, jnp.int32)),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(values, ids)


def choose(
    logits: jax.Array,
    ids: jax.Array | None,
    positions: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    filters: tuple[jax.Array, jax.Array, jax.Array],
    k: int,
    softcap: float | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.top_candidates.choose`."""
    rows = positions.size
    found = unsorted_candidates(logits.reshape(rows, -1), k, interpret=interpret)
    names = [] if ids is None else [ids.reshape(rows, -1)]
    chosen, largest = call(
        functools.partial(choice_kernel, k=k, each=positions.shape[1], softcap=softcap, named=ids is not None),
        name="filtered_choice",
        grid=(rows,),
        out_shape=(jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(*found, *names, positions.reshape(rows), seed, temperature, *filters)
    return chosen.reshape(positions.shape), largest.reshape(positions.shape)
