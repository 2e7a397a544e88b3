"""What each kind of drafter guesses along a known text, from many places of it at once, by the very modules that run at inference.

Of a place P of a text the drafter has seen the rows 0 .. P of the target; token P + 1 is the anchor. Draft step k, from 1 on, guesses
token P + k + 1, and the text's own tokens stand for the guesses before it, which they are for as long as those are accepted. What is
differentiated runs in plain XLA: the kernels have no derivative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafters import eagle3
from jaxspec.drafters.assistant import Gemma4MTP
from jaxspec.drafters.base import Target
from jaxspec.drafters.dflash import DFlash, DFlashState
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.mtp_modules import MTPModules
from jaxspec.model import paged_kv as paged
from jaxspec.model.config import FULL, SLIDING, LayerSpec
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.layers import Linear
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.model.rows import Hidden, Keys, Rows, take_row

XLA = "xla"


@struct.dataclass
class Guess:
    """One draft step. logits: [B, A, C] float32. ids: [C] int32, the tokens that they belong to; None if candidate i is token i.
    centroids: [B, A, centroids] float32, of a centroid head, whose logits then are of all tokens; else None."""

    logits: jax.Array
    ids: jax.Array | None = None
    centroids: jax.Array | None = None


def whole_rows(ids: jax.Array) -> Rows:
    """Every row of a batch of whole sequences. ids: [B, T] int32."""
    batch, length = ids.shape
    zero = jnp.zeros((batch,), jnp.int32)
    return Rows(ids, zero, zero + length, jnp.arange(batch, dtype=jnp.int32))


def pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of each sequence. x: [B, T, ...], index: [B, A] int32 -> [B, A, ...]; indices past the end give the last row."""
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1, mode="clip")


def guesses(drafter: Any, target: Gemma4, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
    """The guesses of draft steps 1 .. steps. out: of the target for all rows, with the drafter's taps. ids: [B, T] int32. at: [B, A]
    int32, the places P. Rows past the text's end read its last token: whoever uses them leaves those out."""
    return KINDS[type(drafter)](drafter, target, out, ids, at, steps)


def _assistant(drafter: Gemma4MTP, target: Gemma4, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
    keys = {spec.kind: out.keys[spec.kv_source] for spec in drafter.config.text.layers if spec.kv_source is not None}
    hidden = pick(out.hidden, at)
    drafter = dataclasses.replace(drafter, suppress_tokens=())  # a guess of zero probability would be infinitely far
    for k in range(1, steps + 1):
        y, hidden = drafter.step(target.embed(pick(ids, at + k)), hidden, at, keys, XLA)
        if drafter.masked_embedding is None:
            yield Guess(drafter.candidates(y, XLA)[0])
        else:  # all tokens, so that those of centroids which were not chosen learn too
            logits = Linear(drafter.model.embed_tokens.weight)(y, dtype=jnp.float32)
            yield Guess(logits, centroids=drafter.masked_embedding.centroids(y, dtype=jnp.float32))


def _dflash(drafter: DFlash, target: Gemma4, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
    batch, length = ids.shape
    cache = _whole(drafter.config.layers, drafter.context(out.taps, jnp.arange(length, dtype=jnp.int32)[None, :]))
    masks = jnp.full((batch, steps), drafter.config.mask_token_id, jnp.int32)

    def block(at: jax.Array) -> jax.Array:
        anchor = pick(ids, at[:, None] + 1)
        view = Target(target, cache, jnp.arange(batch, dtype=jnp.int32), anchor[:, 0], at + 1, XLA, XLA)
        return drafter.block(DFlashState(cache), view, jnp.concatenate([anchor, masks], axis=1))[:, 1:]

    blocks = jax.vmap(block, in_axes=1, out_axes=1)(at)  # [B, A, K, h]
    for k in range(steps):
        logits, tokens = drafter.candidates(target, blocks[:, :, k])
        yield Guess(logits, None if tokens is None else tokens[0, 0])


def _eagle3(drafter: Eagle3, target: Gemma4, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
    """The training-time test: a first pass over all rows, then rows of their own for every place, which see the first pass's keys up to
    the place and their own after it."""
    batch, length = ids.shape
    slots, zero = jnp.arange(batch, dtype=jnp.int32), jnp.zeros((batch,), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], ids.shape)
    dtype = drafter.fc.weight.dtype
    layers = drafter.config.layers
    none = _whole(layers, [(jnp.zeros((batch, 1, spec.num_kv_heads, spec.head_dim), dtype),) * 2 for spec in layers])
    following = drafter.embed(target, jnp.roll(ids, -1, axis=1))
    every = eagle3.Rows(positions, none, slots, zero, None, zero + length)
    x, keys = drafter.run(following, drafter.features(out.taps), every, XLA)
    cache, x, fresh = _whole(layers, keys), pick(x, at), None
    for k in range(1, steps + 1):
        logits, tokens = drafter.candidates(target, x)
        yield Guess(logits, None if tokens is None else tokens[0, 0])
        if k == steps:
            return

        def row(at: jax.Array, x: jax.Array, fresh: Any, k: int = k) -> tuple[jax.Array, Any]:
            feature = x[:, None] if not drafter.config.norm_output else drafter.norm(x[:, None])
            rows = eagle3.Rows(at[:, None] + k, cache, slots, at + 1, fresh, zero + k)
            x, fresh = drafter.run(drafter.embed(target, pick(ids, at[:, None] + k + 1)), feature, rows, XLA)
            return x[:, 0], fresh

        x, fresh = jax.vmap(row, in_axes=1, out_axes=1)(at, x, fresh)


def _modules(drafter: MTPModules, target: Gemma4, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
    """The first M steps run their modules over all rows; each later one runs the last M rows up to every place again, over the keys that
    its module made before them."""
    batch, length = ids.shape
    slots, zero = jnp.arange(batch, dtype=jnp.int32), jnp.zeros((batch,), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], ids.shape)
    x, made, count = out.hidden, [], len(drafter.modules)
    for s, module in enumerate(drafter.modules[:steps]):
        keys = Keys(None, None, zero, None, zero + length, module.mtp_block.self_attn.key_weight)
        x, keys = module(target.embed(jnp.roll(ids, -1 - s, axis=1)), x, positions, keys, XLA)
        assert keys.fresh is not None
        made.append(LayerKV(*keys.fresh))
        yield Guess(drafter.logits(s, pick(x, at)))
    base = jnp.maximum(at + 1 - count, 0)
    last = jnp.arange(count, dtype=jnp.int32)
    again = pick(x, (base[:, :, None] + last[None, None, :]).reshape(batch, -1)).reshape(*at.shape, count, -1)
    for s in range(count, steps):

        def rows(at: jax.Array, base: jax.Array, x: jax.Array, s: int = s) -> tuple[jax.Array, jax.Array]:
            module, places = drafter.modules[s % count], base[:, None] + last[None, :]
            weight = module.mtp_block.self_attn.key_weight
            keys = Keys(made[s % count], slots[:, None], base, None, jnp.minimum(at + 1, count), weight)
            x, _ = module(target.embed(pick(ids, places + s + 1)), x, places, keys, XLA)
            return x, take_row(x, at - base)[:, 0]

        again, x = jax.vmap(rows, in_axes=1, out_axes=1)(at, base, again)
        yield Guess(drafter.logits(s, x))


def _draft_model(drafter: DraftModel, target: Gemma4, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
    own, _ = drafter.model(whole_rows(ids), None, attention=XLA)
    for k in range(1, steps + 1):
        yield Guess(drafter.model.unembed(pick(own.hidden, at + k)))


KINDS: dict[type, Callable[..., Iterator[Guess]]] = {
    Gemma4MTP: _assistant,
    DFlash: _dflash,
    Eagle3: _eagle3,
    MTPModules: _modules,
    DraftModel: _draft_model,
}


def _whole(layers: tuple[LayerSpec, ...], keys: Any) -> PagedKV:
    """A cache of whole sequences, each of which is one page. keys: of each layer K and V, [B, T, KV, D]."""
    batch, length = keys[0][0].shape[:2]
    table = jnp.arange(batch, dtype=jnp.int32)[:, None]
    empty = paged.fixed(layers, slots=batch, max_len=length, num_draft_tokens=0, page_size=length, dtype=keys[0][0].dtype)
    return dataclasses.replace(empty, layers=tuple(LayerKV(*pair) for pair in keys), tables={SLIDING: table, FULL: table})
