"""What the tests of DFlash and EAGLE-3 share: decoder formulas in NumPy, stored vectors, and the rounds of `rounds` seen from a drafter."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rounds
import tiny
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint import layout
from jaxspec.decode import Round
from jaxspec.drafters.base import Observed, Target
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.layers import Embedding
from jaxspec.model.rows import Rows
from jaxspec.sampling.choice import Sampling
from pallas_kernels.noise import gumbel, row_keys

GOLDEN = Path(__file__).parent.parent / "golden"
LIMIT = 1e-4


def close(found, wanted) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=LIMIT, atol=LIMIT)


def greedy(batch: int) -> Sampling:
    return Sampling(jnp.zeros((batch, 2), jnp.uint32), jnp.zeros(batch, jnp.float32))


def rms(x, weight, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, at, theta, angles=None):
    """x: [T, heads, D]; at: [T]; angles: of D / 2 pairs, how many turn."""
    half = x.shape[-1] // 2
    speed = theta ** (-np.arange(half) / half) * (np.arange(half) < (half if angles is None else angles))
    angle = at[:, None, None] * speed
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], axis=-1)


def attend(q, k, v, visible, scale):
    """q: [T, heads, D]; k, v: [S, KV heads, D]; visible: [T, S] -> [T, heads * D]"""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.where(visible[None], np.einsum("thd,shd->hts", q, k) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def layer_tensors(w, layer):
    """The tensors of one layer, without their beginning."""
    start = f"layers.{layer}."
    return {key.removeprefix(start): value for key, value in w.items() if key.startswith(start)}


def mlp(w, x, act):
    return (act(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def golden(name: str):
    """Stored vectors, their config, the weights under the checkpoint's keys, and a target of which only the table is there."""
    tensors, meta = load_file(GOLDEN / f"{name}.safetensors"), json.loads((GOLDEN / f"{name}.json").read_text())
    weights = {key.removeprefix("checkpoint."): value for key, value in tensors.items() if key.startswith("checkpoint.")}
    table, states = tensors["target.embed_tokens.weight"], tensors.get("input.round1.target_hidden_states")
    layers = 8 if states is None else len(states) - 1
    text = {
        **tiny.TEXT,
        "vocab_size": len(table),
        "hidden_size": table.shape[1],
        "num_hidden_layers": layers,
        "layer_types": [FULL] * layers,
    }
    config = Gemma4Config.from_hf({**text, "hidden_size_per_layer_input": 0})
    empty = dataclasses.replace(gemma4.abstract(config, jnp.float32), layers=())
    target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), empty)
    target = dataclasses.replace(target, embed_tokens=Embedding(jnp.asarray(table), table.shape[1] ** 0.5))
    return tensors, meta["config"], weights, target


def nan_state(drafter, *sizes):
    """A state whose pages hold NaN wherever nothing was written."""
    state = jax.jit(lambda: drafter.init(*sizes))()
    layers = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), state.cache.layers)
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))


def observed(target, slots, start: int, ids, taps, anchor: int, width: int) -> Observed:
    """Rows from position `start` on, the same for each slot, with rejected rows of NaN behind them. ids: [n]; taps: [taps, n, H]."""
    batch, count = len(slots), taps.shape[1]
    taps = np.pad(taps, ((0, 0), (0, width - count), (0, 0)), constant_values=np.nan)
    ids = np.pad(ids, (0, width - count), constant_values=1)

    def each(x, dtype=jnp.int32):
        return jnp.asarray(np.repeat(np.asarray(x)[None], batch, axis=0), dtype)

    positions = each(start + np.arange(width))
    rows = tuple(each(tap, jnp.float32) for tap in taps)
    return Observed(target, slots, each(ids), positions, jnp.zeros((batch, taps.shape[2])), rows, each(count), each(anchor))


def golden_rounds(tensors, model, target, drafts: int):
    """The two stored rounds of a drafter that guesses a block: of each its number, its state when the context is observed, in chunks with
    rejected rows of NaN behind them, the view of the target, and the block's ids. The second row of all is nobody's. model: of which a
    page holds 5 positions. At the end the pages are looked at, as far as they are stored."""
    observe, slots, at, chunk = rounds.compiled(type(model).observe), jnp.asarray([1, 3], jnp.int32), 0, 4
    state = nan_state(model, 3, 40, drafts)
    for number in (1, 2):
        hidden = tensors[f"input.round{number}.target_hidden_states"][list(model.taps)]
        for first in range(0, hidden.shape[1], chunk):
            taps = hidden[:, first : first + chunk]
            count = taps.shape[1]
            state = observe(model, state, observed(target, slots, at, np.ones(count, int), taps, 1, chunk))
            at += count
        ids = jnp.asarray(np.repeat(tensors[f"input.round{number}.block_token_ids"], 2, axis=0), jnp.int32)
        yield number, state, Target(target, None, slots, ids[:, 0], jnp.asarray([at, 0], jnp.int32)), ids
    for layer, spec in enumerate(model.config.layers):
        names = [f"debug.cache.layers.{layer}.{kind}" for kind in ("key", "value")]
        key, value = (tensors[name][0].transpose(1, 0, 2) if name in tensors else None for name in names)
        check_pages(state.cache, 1, layer, spec, at, key, value)


def check_pages(cache, slot: int, layer: int, spec, length: int, key, value) -> None:
    """A layer's pages hold K and V of positions 0 .. length - 1 of one slot, as far as its ring keeps them, and NaN everywhere else."""
    table, pool = np.asarray(cache.tables[spec.kind])[slot], cache.layers[layer]
    for pages, wanted in ((pool.k, key), (pool.v, value)):
        pages = np.asarray(pages)
        ring = pages[table].reshape(-1, *pages.shape[2:])
        first = max(length - len(ring), 0)
        if wanted is not None:
            close(ring[np.arange(first, length) % len(ring)], wanted[first:])
        assert np.isnan(np.delete(pages, table, axis=0)).all()
        assert np.isnan(ring).all(axis=(1, 2)).sum() == np.isnan(ring).any(axis=(1, 2)).sum() == max(len(ring) - length, 0)


def same(left, right) -> None:
    """Two states are the same, bit by bit."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for old, new in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def convolved(w, name, side, x, by):
    """DFlash2's convolution of a block's rows, one number at a time. x, by: [T, h], what is convolved and the rows that make the kernel."""
    base, projection = w[f"{name}.base_kernel"], w[f"{name}.kernel_projection.weight"]
    _, taps, hidden = base.shape
    own = (by @ projection.T).reshape(len(by), 2, taps, -1)
    group, out = hidden // own.shape[-1], np.zeros(x.shape)
    for row, tap, channel in np.ndindex(len(x), taps, hidden):
        if row >= tap:
            out[row, channel] += (base[side, tap, channel] + own[row, side, tap, channel // group]) * x[row - tap, channel]
    return out


def block_rows(w, inner, causal, context, embedded):
    """The outputs of all rows of a block of Qwen3's layers, or of Gemma 4's where the tensors have its norms, behind a context, by the
    formulas of DFlash, DFlash2 (where the tensors have its convolutions) and DSpark.

    w: the checkpoint's tensors. inner: the decoder's config. causal: of each layer, whether a row sees the block up to itself alone.
    context: [n, taps, H], the target's hidden states. embedded: [T, h]."""
    gemma, n, t = "layers.0.layer_scalar" in w, len(context), len(embedded)
    context = rms(context.reshape(n, -1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, at, key_at = embedded.astype(np.float64), n + np.arange(t), np.arange(n + t)
    if gemma:
        dim, angles, theta = inner["global_head_dim"], inner["global_head_dim"] // 8, 1e6  # a quarter of each head rotates
    else:
        dim, angles, theta = inner["head_dim"], None, inner.get("rope_theta") or inner["rope_parameters"]["rope_theta"]
    for layer, kind in enumerate(inner["layer_types"]):
        own = layer_tensors(w, layer)

        def heads(rows, name, own=own):
            return (rows @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, dim)

        def around(name, part, x, own=own):
            """A part of the layer, with its convolutions."""
            if f"{name}.base_kernel" not in own:
                return part(x)
            return convolved(own, name, 1, part(convolved(own, name, 0, x, x)), x)

        def attended(normed, layer=layer, kind=kind, own=own, heads=heads):
            both = np.concatenate([context, normed])
            q = rotate(rms(heads(normed, "q"), own["self_attn.q_norm.weight"]), at, theta, angles)
            k = rotate(rms(heads(both, "k"), own["self_attn.k_norm.weight"]), key_at, theta, angles)
            v = rms(heads(both, "k"), 1.0) if gemma else heads(both, "v")
            visible = np.ones((t, n + t), bool)
            if kind == SLIDING:
                visible &= at[:, None] - key_at[None] < inner["sliding_window"]
            if causal[layer]:
                visible &= key_at[None] <= at[:, None]
            return attend(q, k, v, visible, 1.0 if gemma else dim**-0.5) @ own["self_attn.o_proj.weight"].T

        if gemma:
            x = x + rms(attended(rms(x, own["input_layernorm.weight"])), own["post_attention_layernorm.weight"])
            fed = mlp(own, rms(x, own["pre_feedforward_layernorm.weight"]), gelu)
            x = (x + rms(fed, own["post_feedforward_layernorm.weight"])) * own["layer_scalar"]
        else:
            x = x + around("attention_conv", attended, rms(x, own["input_layernorm.weight"]))
            x = x + around("mlp_conv", lambda rows, own=own: mlp(own, rows, silu), rms(x, own["post_attention_layernorm.weight"]))
    return rms(x, w["norm.weight"])


def softcap(logits, cap):
    return cap * np.tanh(logits / cap) if cap else logits


@functools.partial(rounds.compiled, static_argnames="k")
def guesses(target, drafter, state, k):
    """What the next round would draft, and the drafter's state after it."""
    slots = jnp.asarray(rounds.SLOT_IDS)
    length, seed, temperature = (x.at[slots].get(mode="clip") for x in (state.computed, state.seed, state.temperature))
    view = Target(target, state.cache, slots, state.tokens.at[slots, length].get(mode="clip"), length)
    return drafter.draft(state.drafter, view, Sampling(seed, temperature), k)


def chosen(logits: np.ndarray, ids: np.ndarray, row: int, length: int) -> np.ndarray:
    """The drafts that a sequence of `rounds` takes from these logits, of candidates `ids`, the first at position `length`."""
    temperature, at = rounds.TEMPERATURE[row], jnp.arange(length, length + len(logits), dtype=jnp.int32)
    if temperature == 0:
        return ids[np.argmax(logits, axis=1)]
    keys = row_keys(jnp.tile(jnp.asarray([[row, 0]], jnp.uint32), (len(logits), 1)), at)
    noise = gumbel(keys, jnp.tile(jnp.asarray(ids, jnp.int32)[None], (len(logits), 1)))
    return ids[np.argmax(logits / temperature + np.asarray(noise), axis=1)]


@functools.cache
def hidden_states() -> np.ndarray:
    """The target's hidden states over all texts of `rounds`: [5, layers + 1, MAX_LEN, H]."""
    ids = jnp.asarray(rounds.texts())
    rows = Rows(ids, *(jnp.full(len(ids), value, jnp.int32) for value in (0, ids.shape[1], 0)))
    out = rounds.compiled(functools.partial(gemma4.Gemma4.__call__, taps=(0, 1, 2, 3)))(rounds.target(), rows, None)[0]
    return np.stack(out.taps, axis=1)


def check_rejection(drafter) -> None:
    """After a round of seven wrong drafts the drafter's state is, bit by bit, what other wrong drafts leave, and what a round without
    drafts leaves, unwritten places included."""
    state = rounds.started(drafter)
    after = []
    for shift in (1, 2):
        wrong = rounds.told(drafter, state, [0] * 5)
        wrong = dataclasses.replace(wrong, guesses=(wrong.guesses + shift) % rounds.VOCAB)
        after.append(rounds.spec_step(rounds.target(), wrong, state, rounds.SLOT_IDS, round=Round(7)))
    np.testing.assert_array_equal(rounds.lengths(after[0]), rounds.lengths(state) + 1)
    same(after[0].drafter, after[1].drafter)
    plain = rounds.spec_step(rounds.target(), drafter, state, rounds.SLOT_IDS, round=Round(0))
    for old, new in zip(jax.tree.leaves(plain.drafter), jax.tree.leaves(after[0].drafter), strict=True):
        close(new, old)


def checkpoint_shapes(model) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this drafter: key and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    return {part.key: part.shape for path in shapes for part in layout.layouts_of(model)(path, shapes)[0]}


def check_round(model, target: Gemma4Config, k: int) -> None:
    """By shapes alone: drafts come out as a rule wants them, and every call gives back the state that it took."""
    batch, hidden = 8, target.hidden_size

    def array(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    state = jax.eval_shape(functools.partial(model.init, batch, 8192, k))
    each, block = array(batch), array(batch, k + 1)
    taps = tuple(array(batch, k + 1, hidden, dtype=jnp.bfloat16) for _ in model.taps)
    verifier = gemma4.abstract(target)
    rows = Observed(verifier, each, block, block, array(batch, hidden, dtype=jnp.bfloat16), taps, each, each)
    how = jax.eval_shape(lambda: greedy(batch))
    view = Target(verifier, None, each, each, each)  # pyright: ignore[reportArgumentType]
    drafts, drafted = jax.eval_shape(lambda d, s, t, g: d.draft(s, t, g, k), model, state, view, how)
    size = getattr(model.config, "selector_top_k", model.config.draft_vocab_size)
    assert (drafts.tokens.shape, drafts.logits.shape, drafts.logits.dtype) == ((batch, k), (batch, k, size), jnp.float32)
    assert (drafts.ids is None) == (size == target.vocab_size)
    for after in (jax.eval_shape(type(model).observe, model, state, rows), drafted):
        assert jax.tree.structure(after) == jax.tree.structure(state)
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            assert (old.shape, old.dtype, old.weak_type) == (new.shape, new.dtype, new.weak_type)
