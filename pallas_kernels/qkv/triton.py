"""Heads of a layer as one kernel in the Triton dialect: a program norms, rotates and stores all heads of one row and one KV head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl, plgpu

ANY = pl.BlockSpec(memory_space=pl.ANY)


def qkv(projected, cos, sin, q_weight, k_weight, pages, *, group, key_dims, eps, interpret=False):
    """See `pallas_kernels.qkv.qkv`."""
    batch, rows, kv_heads, heads, dim = projected.shape
    inputs = {"projected": projected, "cos": cos, "sin": sin, "q_weight": q_weight}
    outputs = {"q": jax.ShapeDtypeStruct((batch, rows, kv_heads, group, dim), projected.dtype)}
    aliases = {}
    if k_weight is not None:
        inputs["k_weight"] = k_weight
        leading = (batch, rows, kv_heads)
        if pages is None:
            outputs |= {n: jax.ShapeDtypeStruct((*leading, d), projected.dtype) for n, d in (("k", key_dims), ("v", dim))}
        else:
            inputs |= {"table": pages.table, "start": pages.start, "count": pages.count, "old_k": pages.k, "old_v": pages.v}
            aliases = {len(inputs) - 2: 1, len(inputs) - 1: 2}
            outputs |= {"k": jax.ShapeDtypeStruct(pages.k.shape, pages.k.dtype), "v": jax.ShapeDtypeStruct(pages.v.shape, pages.v.dtype)}
    tile = pl.next_power_of_2(heads)
    out = dialect.call(
        functools.partial(_heads, names=(*inputs, *outputs), group=group, key_dims=key_dims, eps=eps),
        name="qkv",
        grid=(batch * rows, kv_heads),
        in_specs=[ANY] * len(inputs),
        out_specs=[ANY] * len(outputs),
        out_shape=list(outputs.values()),
        num_warps=8 if tile * dim > 4096 else 4,
        num_stages=1,
        interpret=interpret,
        input_output_aliases=aliases,
    )(*inputs.values())
    return (*out, None, None) if k_weight is None else tuple(out)


def _heads(*refs, names, group, key_dims, eps):
    refs = dict(zip(names, refs, strict=True))
    _, rows, _, heads, dim = refs["projected"].shape
    dtype, half = refs["projected"].dtype, dim // 2
    b, t, head = pl.program_id(0) // rows, pl.program_id(0) % rows, pl.program_id(1)
    member = jnp.arange(pl.next_power_of_2(heads), dtype=jnp.int32)
    column = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
    inside = column < half
    mask = (member < heads)[:, None] & inside[None, :]

    def halves(load):
        return load(column).astype(jnp.float32), load(column + half).astype(jnp.float32)

    def weights(name):
        ref = refs[name]
        return halves(lambda at: plgpu.load(ref.at[at], mask=inside, other=jnp.zeros((), ref.dtype)))

    projected = refs["projected"]
    low, high = halves(lambda at: plgpu.load(projected.at[b, t, head, member[:, None], at[None, :]], mask=mask, other=jnp.zeros((), dtype)))
    cos, sin = (plgpu.load(refs[name].at[b, t, column], mask=inside, other=jnp.float32(0))[None, :] for name in ("cos", "sin"))
    scale = jax.lax.rsqrt((jnp.sum(low * low, axis=1) + jnp.sum(high * high, axis=1)) / dim + eps)[:, None]
    low, high = low * scale, high * scale

    def turned(low_weight, high_weight):
        """Rounded after the norm and after the rotation."""
        a = (low * low_weight).astype(dtype).astype(jnp.float32)
        b = (high * high_weight).astype(dtype).astype(jnp.float32)
        return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)

    low_weight, high_weight = (w[None, :] for w in weights("q_weight"))
    is_query = (member < group)[:, None]
    if "k" in refs:
        low_key, high_key = (w[None, :] for w in weights("k_weight"))
        low_weight, high_weight = jnp.where(is_query, low_weight, low_key), jnp.where(is_query, high_weight, high_key)
    low_turned, high_turned = turned(low_weight, high_weight)
    for part, shift in ((low_turned, 0), (high_turned, half)):
        plgpu.store(refs["q"].at[b, t, head, member[:, None], (column + shift)[None, :]], part, mask=is_query & inside[None, :])
    if "k" not in refs:
        return

    kept = True
    where: tuple = (b, t)
    if "table" in refs:
        page, places = refs["old_k"].shape[1], refs["table"].shape[1]
        position = refs["start"][b] + t
        kept = t < refs["count"][b]
        where = (refs["table"][b, (position // page) % places], position % page)

    def row(part, which):
        """One of the tile's rows, as the pools have it. [P, D / 2] -> [D / 2]."""
        return jnp.sum(jnp.where((member == which)[:, None], part.astype(jnp.float32), 0.0), axis=0).astype(dtype)

    key_half = key_dims // 2
    for part, shift in ((low_turned, 0), (high_turned, key_half)):
        stored = row(part, group).astype(refs["k"].dtype)
        plgpu.store(refs["k"].at[(*where, head, column + shift)], stored, mask=(column < key_half) & kept)
    for part, shift in ((low, 0), (high, half)):
        stored = row(part, heads - 1).astype(refs["v"].dtype)
        plgpu.store(refs["v"].at[(*where, head, column + shift)], stored, mask=inside & kept)
