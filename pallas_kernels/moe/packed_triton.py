"""The mixture of packed experts in the Triton dialect: the kernels gate_up and down of `triton.py` with weights as the left operand.

Weights go from memory to the matrix unit's registers as in `pallas_kernels.packed.tile`; the rows of a tile's pairs are the right operand.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.moe.reference import Choices
from pallas_kernels.moe.triton import Blocks, Tiles, group, members, numbers
from pallas_kernels.packed import BLOCK, Packed, tile

# By rows of a tile; columns and depth are multiples of 64.
TILES = {
    16: Tiles(16, Blocks(64, 128, 4, 3), Blocks(64, 64, 4, 4)),
    32: Tiles(32, Blocks(64, 128, 4, 3), Blocks(64, 64, 4, 4)),
    64: Tiles(64, Blocks(64, 128, 4, 3), Blocks(128, 128, 8, 3)),
    128: Tiles(128, Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3)),
}


def choose_tiles(pairs: int, experts: int) -> Tiles:
    """The tiles for this many pairs. An expert's pairs should fit in few tiles and fill them."""
    share = pairs / experts
    return TILES[16 if share <= 12 else 32 if share <= 24 else 64 if share <= 64 else 128]


def unsupported(x: jax.Array, gate_up_proj: Packed, down_proj: Packed) -> str | None:
    """Why the kernels cannot serve these arrays, or None."""
    return tile.unsupported(gate_up_proj, x.dtype) or tile.unsupported(down_proj, x.dtype)


def outputs(
    x, gate_up_proj, down_proj, weights, ids, groups=None, *, activation=GELU, launch_dependents=False, interpret=False, tiles=None
):
    """See `pallas_kernels.moe.outputs`."""
    count, _, inner, hidden = gate_up_proj.shape
    pairs, top_k = ids.size, ids.shape[1]
    counts, lists = groups or group(ids, count, interpret=interpret)
    tiles = tiles or choose_tiles(pairs, count)
    # At worst, every chosen expert has one tile that is not full.
    most = (pairs + min(pairs, count) * (tiles.rows - 1)) // tiles.rows

    def call(kernel, name, blocks, rows, w, columns, launch_dependents, x):
        form, arrays = tile.form(w, interpret), tile.arrays(w)
        return dialect.call(
            functools.partial(kernel, rows=tiles.rows, top_k=top_k, blocks=blocks, form=form),
            name=name,
            grid=(most, pl.cdiv(columns, blocks.columns)),
            out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            interpret=interpret,
            launch_dependents=launch_dependents,
        )(counts, lists, x, *arrays)

    gate_up = functools.partial(_gate_up, activation=activation)
    act = call(gate_up, "packed_moe_gate_up", tiles.gate_up, most * tiles.rows, gate_up_proj, inner, True, x)
    out = call(_down, "packed_moe_down", tiles.down, pairs, down_proj, hidden, launch_dependents, act)
    return Choices(out, weights, ids, count)


def _products(x_ref, row, kept, w_refs, indices, block, blocks, form):
    """The products of rows of x with the outputs of blocks `block` of each w[*index]: [columns, rows] float32.

    row, kept: [rows], a row's number and whether to load it, or None to load all."""

    def load(start):
        return [tile.load_rows(x_ref, row, kept, start, depth, form)]

    depth, steps = blocks.depth // BLOCK, (0, pl.cdiv(form.width, blocks.depth))
    return [total for (total,) in tile.products(load, (len(row),), w_refs, indices, block, steps, depth, form)]


def _gate_up(counts_ref, pairs_ref, x_ref, *refs, activation, rows, top_k, blocks, form):
    *w_refs, act_ref = refs
    expert, pair = members(counts_ref, pairs_ref, rows)
    place, block, column = numbers(0, rows), numbers(1, blocks.columns // BLOCK), numbers(1, blocks.columns)

    @pl.when(expert < counts_ref.shape[0])
    def _():
        row, indices = pair // top_k, [(expert, 0), (expert, 1)]
        gate, up = _products(x_ref, row, row < x_ref.shape[0], w_refs, indices, block, blocks, form)
        act = activation(gate, up).astype(act_ref.dtype)
        inside = jnp.broadcast_to((column < form.columns)[:, None], act.shape)
        plgpu.store(act_ref.at[place[None, :], column[:, None]], act, mask=inside)


def _down(counts_ref, pairs_ref, act_ref, *refs, rows, top_k, blocks, form):
    del top_k
    *w_refs, out_ref = refs
    expert, pair = members(counts_ref, pairs_ref, rows)
    place, block, column = numbers(0, rows), numbers(1, blocks.columns // BLOCK), numbers(1, blocks.columns)

    @pl.when(expert < counts_ref.shape[0])
    def _():
        (out,) = _products(act_ref, place, None, w_refs, [(expert,)], block, blocks, form)
        kept = (column < form.columns)[:, None] & (pair < out_ref.shape[0])[None, :]
        plgpu.store(out_ref.at[pair[None, :], column[:, None]], out.astype(out_ref.dtype), mask=kept)
