"""The target against transformers, in float32, on tiny random models of every member of the family.

From a norm over a layer to logits, then the paged cache: however a sequence is cut into calls, every row's logits are those of one
pass over the whole sequence.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
from definitions import relative_error
from transformers.models.gemma4 import modeling_gemma4 as reference

from jaxspec import checkpoint
from jaxspec.model import gemma4, gemma4_layer, layers
from jaxspec.model import paged_kv as paged
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.moe import Router
from jaxspec.model.rows import Inserted, Rows

pytestmark = pytest.mark.usefixtures("unoptimised")
# E4B has what E2B has, and 31B what 12B has.
MEMBERS = [pytest.param(name, marks=pytest.mark.slow) if name in ("E4B", "31B") else name for name in oracle.MEMBERS]
LIMIT = 1e-4  # of the largest expected value
LENGTH = 31
CHUNK, BLOCK, PAGE, SLOTS = 17, 5, 4, 4  # the sliding ring holds 12 positions, fewer than a chunk
SLOT_IDS = jnp.asarray([2, 0, SLOTS], jnp.int32)  # the third row of every call is nobody's


@functools.cache
def load(member: str) -> gemma4.Gemma4:
    _, folder = oracle.target(member)
    abstract = gemma4.abstract(Gemma4Config.from_hf(checkpoint.read_config(folder)), jnp.float32)
    return checkpoint.load_weights(folder, abstract, prefixes=gemma4.CHECKPOINT_PREFIXES, skip=gemma4.TOWERS, progress=False)


@functools.cache
def expected(member: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Two sequences [2, LENGTH], the reference's logits of them and its hidden states."""
    ids = np.random.default_rng(1).integers(0, oracle.BASE["vocab_size"], (2, LENGTH))
    return ids, *oracle.run(oracle.target(member)[0], ids)


def close(found, wanted) -> None:
    assert relative_error(found, wanted) <= LIMIT


def whole(ids) -> Rows:
    """Rows that are whole sequences."""
    batch, length = ids.shape
    zero = jnp.zeros(batch, jnp.int32)
    return Rows(jnp.asarray(ids, jnp.int32), zero, zero + length, jnp.arange(batch, dtype=jnp.int32))


def empty_cache(config: Gemma4Config) -> paged.PagedKV:
    """A cache whose sliding pages are dealt to the slots in no order; full pages come as sequences grow, so theirs mix too."""
    cache = gemma4.init_cache(config, slots=SLOTS, max_len=LENGTH + 1, num_draft_tokens=BLOCK - 1, page_size=PAGE, dtype=jnp.float32)
    table = cache.tables[SLIDING]
    pages = np.random.default_rng(2).permutation(table.size).astype(np.int32).reshape(table.shape)
    return cache.replace(tables={**cache.tables, SLIDING: jnp.asarray(pages)})


@jax.jit
def step(target, cache, ids, start, count):
    """A call of a block of rows for SLOT_IDS. Returns logits [3, T, V], the cache, and whether there were pages."""
    cache, ok = paged.reserve(cache, SLOT_IDS, jnp.where(count > 0, start + count, 0), ids.shape[1])
    out, cache = target(Rows(ids, start, count, SLOT_IDS), cache)
    return target.unembed(out.hidden), cache, ok


def call(target, cache, ids, start, count, width, rejected=None):
    """Runs count[b] rows of sequence b from start[b] in blocks of `width`; rows past the real ones hold `rejected` or a stray id."""
    block = np.full((3, width), 7)
    for b in range(2):
        block[b, : count[b]] = ids[b, start[b] : start[b] + count[b]]
    if rejected is not None:
        block[:2] = np.where(np.arange(width)[None] < np.asarray(count)[:, None], block[:2], rejected)
        count = [width, width]
    start, count = (jnp.asarray([*x, 0], jnp.int32) for x in (start, count))
    logits, cache, ok = step(target, cache, jnp.asarray(block, jnp.int32), start, count)
    assert ok
    return np.asarray(logits), cache


def play(member: str, cache: paged.PagedKV, schedule) -> tuple[np.ndarray, paged.PagedKV]:
    """Runs a schedule of (width, counts) and returns the logits of all rows, [2, LENGTH, V], NaN where no row was run."""
    target, ids = load(member), expected(member)[0]
    logits = np.full((2, LENGTH, oracle.BASE["vocab_size"]), np.nan)
    start = [0, 0]
    for width, count in schedule:
        out, cache = call(target, cache, ids, start, count, width)
        for b in range(2):
            logits[b, start[b] : start[b] + count[b]] = out[b, : count[b]]
            start[b] += count[b]
    assert start == [LENGTH, LENGTH]
    return logits, cache


# Chunks of prefill, then steps of 1 to 5 rows, in which the two sequences never stand at the same position until the end.
RAGGED = [
    (CHUNK, (17, 6)),
    (CHUNK, (2, 13)),
    *((BLOCK, counts) for counts in [(5, 1), (1, 0), (0, 4), (3, 1), (1, 1), (2, 5)]),
]


def test_rms_norm() -> None:
    x = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    norm = reference.Gemma4RMSNorm(32, eps=1e-6)
    oracle.randomise(torch.nn.ModuleDict({"norm": norm}), 0)
    close(layers.RMSNorm(jnp.asarray(norm.weight.detach().numpy()), 1e-6)(jnp.asarray(x)), norm(torch.tensor(x)).detach().numpy())
    bare = reference.Gemma4RMSNorm(32, eps=1e-6, with_scale=False)
    close(layers.rms(jnp.asarray(x), 1e-6), bare(torch.tensor(x)).numpy())


@pytest.mark.parametrize("kind", [SLIDING, FULL])
def test_rope(kind: str) -> None:
    """At the head sizes of the released models: 64 of 256 pairs of a full layer rotate, with exponents over all 512 dimensions."""
    text = oracle.text_config("12B", head_dim=256, global_head_dim=512)
    spec = next(s for s in Gemma4Config.from_hf(text).layers if s.kind == kind)
    x = np.random.default_rng(0).normal(size=(2, 3, 2, spec.head_dim)).astype(np.float32)
    positions = np.asarray([[0, 1, 5], [63, 200, 511]])
    rotary = reference.Gemma4TextRotaryEmbedding(oracle.build(text).config)
    cos, sin = rotary(torch.tensor(x), torch.tensor(positions), kind)
    wanted = reference.apply_rotary_pos_emb(torch.tensor(x), cos, sin, unsqueeze_dim=2).numpy()
    close(layers.rope(jnp.asarray(x), jnp.asarray(positions, jnp.int32), spec.rope_theta, spec.rotary_angles), wanted)
    frequencies = layers.rope_frequencies(spec.head_dim, spec.rope_theta, spec.rotary_angles)
    np.testing.assert_allclose(frequencies, getattr(rotary, f"{kind}_inv_freq").numpy(), rtol=1e-6)
    assert np.count_nonzero(frequencies) == (64 if kind == FULL else 128)


@pytest.mark.parametrize("member", MEMBERS)
def test_every_layer_and_the_logits(member: str) -> None:
    """Tap i is the reference's hidden state i. The reference norms its last one; ours is the last layer's output as it is."""
    target, (ids, logits, states) = load(member), expected(member)
    count = target.config.num_hidden_layers
    out, cache = jax.jit(functools.partial(gemma4.Gemma4.__call__, cache=None, taps=tuple(range(count + 1))))(target, whole(ids))
    assert cache is None
    for tap, state in zip(out.taps, states[:-1], strict=False):
        close(tap, state)
    close(target.norm(out.taps[count]), states[count])
    close(out.hidden, states[count])
    close(target.unembed(out.hidden), logits)


@pytest.mark.parametrize("member", MEMBERS)
def test_prefill_decode_and_verify_blocks_agree(member: str) -> None:
    """Rows of any split, past the window and across pages, beside a sequence that stands elsewhere, in slots out of order."""
    logits, _ = play(member, empty_cache(load(member).config), RAGGED)
    close(logits, expected(member)[1])


def test_layers_that_end_with_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU, where one kernel adds the feed-forward and the per-layer input."""
    ended = []
    monkeypatch.setattr(gemma4_layer, "serves", lambda x, *_: ended.append(x.shape) or True)
    jax.clear_caches()
    target, (ids, logits, _) = load("E2B"), expected("E2B")
    out, _ = jax.jit(functools.partial(gemma4.Gemma4.__call__, cache=None))(target, whole(ids))
    jax.clear_caches()
    close(target.unembed(out.hidden), logits)
    assert ended


def test_one_row_at_a_time() -> None:
    ids, logits, _ = expected("E2B")
    target = load("E2B")
    cache = empty_cache(target.config)
    for at in range(LENGTH):
        found, cache = call(target, cache, ids, [at, at], [1, 1], 1)
        close(found[:2, 0], logits[:, at])


@pytest.mark.parametrize("member", MEMBERS)
def test_rejected_rows_leave_no_trace(member: str) -> None:
    """Every block's tail is rejected: its rows were written, and the next block starts below them. The sliding ring wraps twice."""
    target, (ids, logits, _) = load(member), expected(member)
    out, cache = call(target, empty_cache(target.config), ids, [0, 0], [9, 6], CHUNK)
    close(out[0, :9], logits[0, :9])
    start, noise = [9, 6], np.random.default_rng(3)
    for accepted in [(1, 1), (2, 1), (1, 4), (5, 1), (1, 2), (3, 3), (1, 5), (2, 1), (2, 3)]:
        found, cache = call(target, cache, ids, start, accepted, BLOCK, rejected=noise.integers(0, 131, (2, BLOCK)))
        for b in range(2):
            close(found[b, : accepted[b]], logits[b, start[b] : start[b] + accepted[b]])
            start[b] += accepted[b]
    assert start == [27, 27]


def test_inactive_rows_change_nothing() -> None:
    """Rows of count 0, in a slot that holds a sequence and in none, leave every pool as it was, to the bit."""
    ids = expected("E2B")[0]
    target = load("E2B")
    _, cache = call(target, empty_cache(target.config), ids, [0, 0], [17, 6], CHUNK)
    _, after = call(target, cache, ids, [17, 6], [0, 0], BLOCK)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), cache, after))
    _, after = call(target, cache, ids, [17, 6], [0, 1], BLOCK)
    full = {kind: np.asarray(table) for kind, table in after.tables.items()}
    for spec, old, new in zip(target.config.layers, cache.layers, after.layers, strict=True):
        if old is None or new is None:
            assert old is None and new is None
            continue
        changed = np.argwhere(np.any(np.asarray(old.k != new.k) | np.asarray(old.v != new.v), axis=(2, 3)))
        page = full[spec.kind][0, (6 // PAGE) % full[spec.kind].shape[1]]
        np.testing.assert_array_equal(changed, [[page, 6 % PAGE]])  # the one new row of slot 0


@pytest.mark.parametrize("member", ["E2B", "26B"])
def test_what_nobody_wrote_may_be_nan(member: str) -> None:
    config = load(member).config
    cache = empty_cache(config)
    clean, _ = play(member, cache, RAGGED)
    poisoned = cache.replace(layers=jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache.layers))
    found, _ = play(member, poisoned, RAGGED)
    np.testing.assert_array_equal(found, clean)


@pytest.mark.parametrize("taps", [(), (0, 3), (3, 4), (7,)], ids=str)
def test_a_prefill_of_which_the_last_row_is_wanted(taps: tuple[int, ...]) -> None:
    """Layer 3 is the last that makes K and V. A tap above its input needs every row there; the last row is the same either way."""
    target, (ids, _, states) = load("E2B"), expected("E2B")
    assert target.config.first_shared_layer == 4
    cache = empty_cache(target.config)
    rows = Rows(jnp.asarray(ids[:, :CHUNK], jnp.int32), jnp.zeros(2, jnp.int32), jnp.asarray([CHUNK, 6], jnp.int32), SLOT_IDS[:2])
    cache, _ = paged.reserve(cache, rows.slots, rows.count, CHUNK)
    last, kept = jax.jit(functools.partial(gemma4.Gemma4.__call__, taps=taps, wanted="last"))(target, rows, cache)
    assert last.hidden.shape == (2, 1, target.config.hidden_size)
    close(last.hidden[0, 0], states[-1][0, CHUNK - 1])
    close(last.hidden[1, 0], states[-1][1, 5])
    for index, tap in zip(taps, last.taps, strict=True):
        wanted = states[index] if index < 7 else None
        if wanted is not None:
            close(tap[0], wanted[0, :CHUNK])
            close(tap[1, :6], wanted[1, :6])
        else:
            close(target.norm(tap)[0], states[-1][0, :CHUNK])
    full, stored = step(target, cache, jnp.pad(rows.ids, ((0, 1), (0, 0))), *(jnp.pad(x, (0, 1)) for x in (rows.start, rows.count)))[:2]
    for a, b in zip(jax.tree.leaves(kept.layers), jax.tree.leaves(stored.layers), strict=True):
        close(a, np.asarray(b))
    close(target.unembed(last.hidden)[0, 0], np.asarray(full[0, CHUNK - 1]))
    without, same = jax.jit(functools.partial(gemma4.Gemma4.__call__, taps=taps, wanted="none"))(target, rows, cache)
    for a, b in zip(jax.tree.leaves((same, without.taps)), jax.tree.leaves((kept, last.taps)), strict=True):
        close(a, np.asarray(b))


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(
    ("images", "wanted"),
    [(False, "none"), (True, "last"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, "last"), (True, "none")))],
)
def test_what_is_computed_of_the_last_row_alone(member: str, images: bool, wanted: str) -> None:
    """The second of two calls of rows, of which one is nobody's: its last rows and all its K and V are those of a call for all rows. With
    images, whose rows see one another, one ends with the rows and one before them."""
    target, ids = load(member), expected(member)[0]
    if images:
        target = dataclasses.replace(target, config=dataclasses.replace(target.config, use_bidirectional_attention="vision"))
    _, cache = call(target, empty_cache(target.config), ids, (0, 0), (CHUNK, 6), CHUNK)
    start, count = jnp.asarray([CHUNK, 6, 0], jnp.int32), jnp.asarray([LENGTH - CHUNK, CHUNK, 0], jnp.int32)
    block = jnp.stack([jnp.asarray(np.resize(ids[b, start[b] :], CHUNK), jnp.int32) for b in (0, 1, 0)])
    cache, _ = paged.reserve(cache, SLOT_IDS, start + count, CHUNK)
    drawn = jnp.asarray(np.random.default_rng(3).normal(size=(3, 6, target.config.hidden_size)), jnp.float32)
    places = (x[:, None] for x in (start + count - jnp.asarray([5, 8, 0]), jnp.asarray([5, 6, 0]), jnp.ones(3, bool)))
    inserted = Inserted(drawn, *places) if images else None
    run, rows = jax.jit(gemma4.Gemma4.__call__, static_argnames="wanted"), Rows(block, start, count, SLOT_IDS, inserted=inserted)
    (out, every), (found, kept) = (run(target, rows, cache, wanted=of) for of in ("all", wanted))
    if wanted == "last":
        close(found.hidden[:2, 0], np.stack([out.hidden[b, count[b] - 1] for b in (0, 1)]))
    for pool, theirs in zip(jax.tree.leaves(kept.layers), jax.tree.leaves(every.layers), strict=True):
        close(pool, np.asarray(theirs))


def test_a_prefill_leaves_out_rows_that_nobody_reads() -> None:
    target, ids = load("E2B"), expected("E2B")[0]

    def flops(**settings) -> float:
        run = jax.jit(functools.partial(gemma4.Gemma4.__call__, cache=None, **settings))
        return run.lower(target, whole(ids)).cost_analysis()["flops"]

    everything = flops()
    last = flops(wanted="last")
    assert last < 0.5 * everything  # 3 of 7 layers share KV, and their MLPs are twice as wide; another needs all rows for its K and V alone
    assert flops(wanted="last", taps=(3,)) == pytest.approx(last, rel=0.01)
    assert flops(wanted="none") < 0.99 * last
    assert flops(wanted="last", taps=(4,)) == pytest.approx(everything, rel=0.01)


@pytest.mark.parametrize("taps", [(-1,), (0, 8)])
def test_taps_outside_the_model(taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"outside 0 \.\. 7"):
        load("E2B")(whole(np.zeros((1, 2), int)), None, taps=taps)


def bfloat16(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.tensor(scale * np.random.default_rng(seed).normal(size=shape), dtype=torch.bfloat16)


def ours(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.float().numpy(), jnp.bfloat16)


@torch.no_grad()
def test_a_router_in_bfloat16() -> None:
    """At a width whose root bfloat16 has a quarter of a percent too small, as it has the released one's: weights tell by a twentieth."""
    width, experts = 44, 6
    config = oracle.build(oracle.text_config("26B", hidden_size=width, num_experts=experts, top_k_experts=3)).config
    theirs = reference.Gemma4TextRouter(config).to(torch.bfloat16)
    theirs.proj.weight.copy_(bfloat16(experts, width, scale=3))
    theirs.scale.copy_(bfloat16(width, scale=3, seed=1))
    x = bfloat16(200, width, seed=2)
    _, wanted, ids = theirs(x)
    router = Router(layers.Linear(ours(theirs.proj.weight)), ours(theirs.scale), ours(theirs.per_expert_scale), 3)
    weights, found, _ = router(router.norm(ours(x), config.rms_norm_eps))
    assert np.mean(np.asarray(found) == ids.numpy()) > 0.99
    error = np.abs(np.asarray(weights, np.float32) - wanted.float().numpy())
    assert np.max(error) < 0.004 < np.max(wanted.float().numpy())


@torch.no_grad()
def test_per_layer_inputs_in_bfloat16() -> None:
    """Bit by bit those of transformers, which rounds no constant but a table's own."""
    text = oracle.text_config("E2B", vocab_size=64, vocab_size_per_layer_input=64)
    model = oracle.build(text).to(torch.bfloat16).model
    ids = torch.arange(64)[None]
    embedded = model.embed_tokens(ids)
    wanted = model.project_per_layer_inputs(embedded, model.get_per_layer_inputs(ids, embedded))
    config = Gemma4Config.from_hf(text)
    abstract = gemma4.abstract(config, jnp.bfloat16)
    tables = {"embed_tokens": config.hidden_size, "embed_tokens_per_layer": config.hidden_size_per_layer_input}
    target = abstract.replace(
        **{name: layers.Embedding(ours(getattr(model, name).weight), width**0.5) for name, width in tables.items()},
        per_layer_model_projection=layers.Linear(ours(model.per_layer_model_projection.weight)),
        per_layer_projection_norm=layers.RMSNorm(ours(model.per_layer_projection_norm.weight), config.rms_norm_eps),
    )
    at = jnp.asarray(ids.numpy(), jnp.int32)
    np.testing.assert_array_equal(np.asarray(target.embed(at), np.float32), embedded.float().numpy())
    found = target.per_layer_inputs(at, target.embed(at))
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted.float().numpy())
