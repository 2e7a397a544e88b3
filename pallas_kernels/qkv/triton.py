"""Kernels in the Triton dialect: one norms, rotates and stores the heads of a layer, and one only stores keys and values.

A program serves one row, and in the first kernel some of its KV heads.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl, plgpu

HEADS = 16  # heads of a program, if there are many rows
MANY_ROWS = 32  # of all sequences; with fewer rows each KV head has a program, to keep the GPU busy


def qkv(
    projected, cos, sin, q_weight, k_weight, pages, *, group, key_dims, eps, value_norm, dtype, launch_dependents=False, interpret=False
):  # fmt: skip
    """See `pallas_kernels.qkv.qkv`."""
    if projected.ndim == 5:
        projected = projected[None]
    _, batch, rows, kv_heads, heads, dim = projected.shape
    inputs = {"projected": projected, "cos": cos, "sin": sin, "q_weight": q_weight}
    outputs = {"q": jax.ShapeDtypeStruct((batch, rows, kv_heads, group, dim), dtype)}
    aliases = {}
    if k_weight is not None:
        inputs["k_weight"] = k_weight
        leading = (batch, rows, kv_heads)
        if pages is None:
            outputs |= {n: jax.ShapeDtypeStruct((*leading, d), dtype) for n, d in (("k", key_dims), ("v", dim))}
        else:
            inputs |= {"table": pages.table, "start": pages.start, "count": pages.count, "old_k": pages.k, "old_v": pages.v}
            aliases = {len(inputs) - 2: 1, len(inputs) - 1: 2}
            outputs |= {"k": jax.ShapeDtypeStruct(pages.k.shape, pages.k.dtype), "v": jax.ShapeDtypeStruct(pages.v.shape, pages.v.dtype)}
    tile = pl.next_power_of_2(heads)
    together = max(1, min(pl.next_power_of_2(kv_heads), HEADS // tile)) if batch * rows >= MANY_ROWS else 1
    out = dialect.call(
        functools.partial(
            _heads, names=(*inputs, *outputs), together=together, group=group, key_dims=key_dims, eps=eps, value_norm=value_norm
        ),
        name="qkv",
        grid=(batch * rows, pl.cdiv(kv_heads, together)),
        out_shape=list(outputs.values()),
        num_warps=8 if together * tile * dim > 4096 else 4,
        num_stages=1,
        interpret=interpret,
        input_output_aliases=aliases,
        launch_dependents=launch_dependents,
    )(*inputs.values())
    return (*out, None, None) if k_weight is None else tuple(out)


def _heads(*refs, names, together, group, key_dims, eps, value_norm):
    refs = dict(zip(names, refs, strict=True))
    parts, _, rows, kv_heads, heads, dim = refs["projected"].shape
    dtype, half, tile = refs["q"].dtype, dim // 2, pl.next_power_of_2(heads)
    b, t = pl.program_id(0) // rows, pl.program_id(0) % rows
    lane = jnp.arange(together * tile, dtype=jnp.int32)
    head, member = pl.program_id(1) * together + lane // tile, lane % tile
    real = (head < kv_heads) & (member < heads)
    column = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
    inside = column < half

    def halves(load):
        return load(column).astype(jnp.float32), load(column + half).astype(jnp.float32)

    def weights(name):
        ref = refs[name]
        low, high = halves(lambda at: plgpu.load(ref.at[at], mask=inside, other=jnp.zeros((), ref.dtype)))
        return low[None, :], high[None, :]

    def store(name, leading, which, part, shift, width):
        """Stores the numbers of the heads `which` at leading + (head, ..., columns from shift on). Other heads point outside the array."""
        ref = refs[name]
        place = [jnp.where(which, head, kv_heads)[:, None], *([jnp.where(which, member, group)[:, None]] if name == "q" else [])]
        where = ref.at[(*leading, *place, (column + shift)[None, :])]
        plgpu.store(where, part.astype(dtype).astype(ref.dtype), mask=which[:, None] & (column < width)[None, :])

    projected = refs["projected"]

    def load(at):
        places = [projected.at[part, b, t, head[:, None], member[:, None], at[None, :]] for part in range(parts)]
        mask, other = real[:, None] & inside[None, :], jnp.zeros((), projected.dtype)
        return functools.reduce(operator.add, [plgpu.load(place, mask=mask, other=other) for place in places]).astype(dtype)

    low, high = halves(load)
    cos, sin = (plgpu.load(refs[name].at[b, t, column], mask=inside, other=jnp.float32(0))[None, :] for name in ("cos", "sin"))
    scale = jax.lax.rsqrt((jnp.sum(low * low, axis=1) + jnp.sum(high * high, axis=1)) / dim + eps)[:, None]
    values = low, high
    low, high = low * scale, high * scale
    if value_norm:
        values = low, high

    low_weight, high_weight = weights("q_weight")
    is_query = real & (member < group)
    if "k" in refs:
        low_key, high_key = weights("k_weight")
        query = is_query[:, None]
        low_weight, high_weight = jnp.where(query, low_weight, low_key), jnp.where(query, high_weight, high_key)
    # Rounded after the norm and after the rotation.
    even, odd = ((part * weight).astype(dtype).astype(jnp.float32) for part, weight in ((low, low_weight), (high, high_weight)))
    low_turned, high_turned = even * cos - odd * sin, odd * cos + even * sin
    store("q", (b, t), is_query, low_turned, 0, half)
    store("q", (b, t), is_query, high_turned, half, half)
    if "k" not in refs:
        return

    kept = real
    where: tuple = (b, t)
    if "table" in refs:
        page, places = refs["old_k"].shape[1], refs["table"].shape[1]
        position = refs["start"][b] + t
        kept = real & (t < refs["count"][b])
        where = (refs["table"][b, (position // page) % places], position % page)
    is_key, is_value = kept & (member == group), kept & (member == heads - 1)
    store("k", where, is_key, low_turned, 0, key_dims // 2)
    store("k", where, is_key, high_turned, key_dims // 2, key_dims // 2)
    store("v", where, is_value, values[0], 0, half)
    store("v", where, is_value, values[1], half, half)


def write(pages, k, v, path=None, after=None, *, interpret=False):
    """See `pallas_kernels.qkv.write`."""
    # The kernel does not read `after`. To XLA it is an argument like others, so it is there before.
    chosen = {name: array for name, array in (("path", path), ("after", after)) if array is not None}
    inputs = {"table": pages.table, "start": pages.start, "count": pages.count, **chosen, "rows_k": k, "rows_v": v}
    inputs |= {"old_k": pages.k, "old_v": pages.v}
    return dialect.call(
        functools.partial(_write, names=(*inputs, "k", "v")),
        name="write_pages",
        grid=(k if path is None else path).shape[:2],
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (pages.k, pages.v)],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        input_output_aliases={len(inputs) - 2: 0, len(inputs) - 1: 1},
    )(*inputs.values())


def _write(*refs, names):
    refs = dict(zip(names, refs, strict=True))
    page, places = refs["old_k"].shape[1], refs["table"].shape[1]
    b, t = pl.program_id(0), pl.program_id(1)
    position, count = refs["start"][b] + t, refs["count"][b]
    row = refs["path"][b, t] if "path" in refs else t
    kept = (t < count) & (t >= count - page * places)
    where = refs["table"][b, (position // page) % places], position % page
    for name in ("k", "v"):
        source, pool = refs[f"rows_{name}"], refs[name]
        head, column = (jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32) for size in source.shape[2:])
        inside = (head < source.shape[2])[:, None] & (column < source.shape[3])[None, :] & kept
        head, column = jnp.minimum(head, source.shape[2] - 1)[:, None], jnp.minimum(column, source.shape[3] - 1)[None, :]
        values = plgpu.load(source.at[b, row, head, column], mask=inside, other=jnp.zeros((), source.dtype))
        plgpu.store(pool.at[(*where, head, column)], values, mask=inside)
