"""The MTP assistant against transformers: stored vectors, and whole rounds on tiny random targets.

The vectors in tests/golden were made with transformers 5.23's Gemma4AssistantForCausalLM. Its forward pass is the reference, given the
position, keys and hidden states that a drafter has; its generation loop is not, as it lets the assistant see keys of rejected drafts.
"""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import real_configs
import torch
from definitions import relative_error
from flax import struct
from safetensors.numpy import load_file, save_file

from jaxspec import decode, drafters, targets
from jaxspec.decode import accept
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters.assistant import Gemma4MTP
from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.model import gemma4
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.layers import Embedding
from jaxspec.model.rows import Keys
from jaxspec.sampling import choice as sampling
from jaxspec.sampling.choice import Sampling
from pallas_kernels.noise import gumbel, row_keys

pytestmark = pytest.mark.usefixtures("unoptimised")
GOLDEN = Path(__file__).parent.parent / "golden"
CASES = ("long", "short")  # the rows of a batch; the first is past the window
PAGE, K, MAX_LEN = 4, 4, 48  # with the window of 8, sliding rings hold 12 positions
LIMIT = 1e-4


def drawn(drafter: Gemma4MTP, out: jax.Array, at: jax.Array, how: Sampling) -> jax.Array:
    """The drafts at positions `at` from outputs of the assistant."""
    logits, ids = drafter.candidates(out)
    return sampling.choose(logits, at, how, ids)


choose = jax.jit(drawn)


@struct.dataclass
class Golden:
    """Stored vectors, the assistant that they are of, and a target with its table and geometry."""

    tensors: dict[str, np.ndarray]
    drafter: Gemma4MTP
    target: Gemma4

    def rows(self, name: str) -> jax.Array:
        """Tensors of both cases as a batch: "input.{}.position_ids"."""
        value = jnp.concatenate([self.tensors[name.format(case)] for case in CASES])
        return value.astype(jnp.int32) if value.dtype.kind == "i" else value

    def keys_values(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """K and V of positions 0 .. P, then K that nobody may see, then NaN: [2, T, KV, D]."""
        out = []
        for name in ("key", "value"):
            stored = [
                self.tensors.get(f"input.{case}.cache_all.{kind}.{name}", self.tensors[f"input.{case}.shared_kv.{kind}.{name}"])[0]
                for case in CASES
            ]
            batch = np.full((len(CASES), MAX_LEN, stored[0].shape[0], stored[0].shape[2]), np.nan, np.float32)
            for row, value in zip(batch, stored, strict=True):
                length = value.shape[1]
                row[:length] = value.transpose(1, 0, 2)
                row[length : length + K] = 10 * np.random.default_rng(4).normal(size=row[:K].shape)
            out.append(batch)
        return out[0], out[1]

    @property
    def length(self) -> jax.Array:
        return self.rows("input.{}.position_ids")[:, 0] + 1

    def fresh(self) -> dict[str, Keys]:
        """The keys as rows that are in no page."""
        zero = np.zeros_like(self.length)
        return {
            kind: Keys(None, None, zero, jax.tree.map(jnp.asarray, self.keys_values(kind)), self.length, None) for kind in (SLIDING, FULL)
        }

    def cached(self) -> Target:
        """The keys in pages that lie in no order, the long case's sliding ring having wrapped, with the stale rows behind them. Every
        other place holds NaN. A third row is nobody's."""
        config, rng, slots = self.target.config, np.random.default_rng(5), np.asarray([3, 1, 4], np.int32)
        make = functools.partial(gemma4.init_cache, config, slots=4, max_len=MAX_LEN, num_draft_tokens=K, page_size=PAGE)
        cache = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(functools.partial(make, dtype=jnp.float32)))
        pools = jax.tree.map(lambda pool: np.full_like(pool, np.nan), cache.layers)
        for kind, table in cache.tables.items():
            table[:] = rng.permutation(table.size).reshape(table.shape)
            pool = pools[config.last_owner(kind)]
            for row, length in enumerate(np.asarray(self.length)):
                for at in range(length + K):
                    page = table[slots[row], at // PAGE % table.shape[1]]
                    for values, batch in zip((pool.k, pool.v), self.keys_values(kind), strict=True):
                        values[page, at % PAGE] = batch[row, at]
        cache = jax.tree.map(jnp.asarray, cache.replace(layers=pools))
        anchor = jnp.pad(self.rows("input.{}.step1.token_id")[:, 0], (0, 1))
        return Target(self.target, cache, jnp.asarray(slots), anchor, jnp.pad(self.length, (0, 1)))

    def observed(self, slots: jax.Array) -> Any:
        """The drafter's state after the target's last row of each case."""
        hidden = jnp.pad(self.rows("input.{}.step1.hidden")[:, 0], ((0, 1), (0, 0)))
        none = jnp.zeros((3, 1), jnp.int32)
        observed = Observed(self.target, slots, none, none, hidden, (), jnp.asarray([1, 1, 0], jnp.int32), none[:, 0])
        return self.drafter.observe(self.drafter.init(4, MAX_LEN, K), observed)


@pytest.fixture(scope="module", params=["dense", "centroid"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    name = f"assistant_{request.param}"
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    config = json.loads((GOLDEN / f"{name}.json").read_text())["config"]
    # A target whose last layer of each type has the stored K and V; the layers before them stay full of NaN.
    backbone = config["backbone_hidden_size"]
    kinds = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 0}
    target_config = Gemma4Config.from_hf({**config["text_config"], **kinds, "hidden_size": backbone})
    # The stored keys are no function of the stored values, so the cache has to hold them whole.
    layers = tuple(dataclasses.replace(spec, k_eq_v=False) for spec in target_config.layers)
    target_config = dataclasses.replace(target_config, layers=layers)
    target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), gemma4.abstract(target_config, jnp.float32))
    target = target.replace(embed_tokens=Embedding(jnp.asarray(tensors["target.embed_tokens.weight"]), backbone**0.5))

    folder = tmp_path_factory.mktemp(name)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {key.removeprefix("checkpoint."): value for key, value in tensors.items() if key.startswith("checkpoint.")}
    save_file(weights, folder / "model.safetensors")
    drafter = drafters.load_drafter(folder, target_config, jnp.float32, progress=False)
    assert isinstance(drafter, Gemma4MTP)
    return Golden(tensors, drafter, target)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=LIMIT, atol=LIMIT)


def check_candidates(logits: np.ndarray, ids: np.ndarray | None, wanted: np.ndarray, selected: np.ndarray | None) -> None:
    """One row's logits [C] of ids [C] against the reference's [V], of which those of `selected` are real."""
    if ids is None:
        assert selected is None
        close(logits, wanted)
    else:
        np.testing.assert_array_equal(np.sort(ids), selected)
        close(logits, wanted[ids])


@pytest.mark.parametrize("where", ["pages", "fresh"])
def test_golden_steps(golden: Golden, where: str) -> None:
    """Both steps at the constant position P; the second takes our own feedback and draft."""
    if where == "pages":
        view = golden.cached()
        rows = (view.slots[:2], view.length[:2], jnp.zeros(2, jnp.int32))
        keys = {kind: view.model.cached_keys(view.cache, golden.target.config.last_owner(kind), *rows) for kind in (SLIDING, FULL)}
    else:
        keys = golden.fresh()
    step, candidates = jax.jit(Gemma4MTP.step), jax.jit(Gemma4MTP.candidates)
    token, hidden = golden.rows("input.{}.step1.token_id"), golden.rows("input.{}.step1.hidden")
    for k in (1, 2):
        embedded = golden.target.embed(token)
        close(jnp.concatenate([embedded, hidden], axis=-1), golden.rows(f"input.{{}}.step{k}.inputs_embeds"))
        out, hidden = step(golden.drafter, embedded, hidden, golden.rows("input.{}.position_ids"), keys)
        close(out, golden.rows(f"debug.{{}}.step{k}.norm_output"))
        close(hidden, golden.rows(f"expected.{{}}.step{k}.last_hidden_state"))
        logits, ids = candidates(golden.drafter, out)
        for row, case in enumerate(CASES):
            selected = golden.tensors.get(f"expected.{case}.step{k}.selected_ids")
            found = None if ids is None else np.asarray(ids)[row, 0]
            wanted = golden.tensors[f"expected.{case}.step{k}.logits"][0, 0]
            check_candidates(np.asarray(logits)[row, 0], found, wanted, None if selected is None else selected[0])
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        token = best if ids is None else jnp.take_along_axis(ids, best[..., None], axis=-1)[..., 0]
        np.testing.assert_array_equal(token[:, 0], golden.rows("expected.{}.draft_ids")[:, k - 1])


def greedy(batch: int) -> Sampling:
    return Sampling(jnp.zeros((batch, 2), jnp.uint32), jnp.zeros(batch, jnp.float32))


def test_golden_drafts_and_nothing_is_written(golden: Golden) -> None:
    view = golden.cached()
    before = [np.array(leaf) for leaf in jax.tree.leaves(view)]
    state = golden.observed(view.slots)
    drafts, after = jax.jit(Gemma4MTP.draft, static_argnums=4)(golden.drafter, state, view, greedy(3), 2)
    np.testing.assert_array_equal(drafts.tokens[:2], golden.rows("expected.{}.draft_ids"))
    for leaf, old in zip(jax.tree.leaves(view), before, strict=True):
        assert np.asarray(leaf).tobytes() == old.tobytes()
    np.testing.assert_array_equal(after.hidden, state.hidden)
    jaxpr = jax.make_jaxpr(Gemma4MTP.draft, static_argnums=4)(golden.drafter, state, view, greedy(3), 2).jaxpr
    written = {eqn.primitive.name for eqn in equations(jaxpr)} & {"scatter", "scatter-add", "dynamic_update_slice"}
    assert not written


def test_a_sampled_draft_shares_the_targets_noise(golden: Golden) -> None:
    """The draft is the best of logits / T + noise, the noise being of the token's id whichever candidates the head offers."""
    wanted = golden.tensors["expected.long.step1.logits"][0, 0]
    selected = golden.tensors.get("expected.long.step1.selected_ids")
    logits = wanted if selected is None else np.where(np.isin(np.arange(wanted.size), selected), wanted, -np.inf)
    out = jnp.broadcast_to(golden.tensors["debug.long.step1.norm_output"], (1, 64, golden.drafter.config.text.hidden_size))
    at, how = jnp.arange(64, dtype=jnp.int32)[None], Sampling(jnp.asarray([[7, 9]], jnp.uint32), jnp.full(1, 2.0, jnp.float32))
    found = np.asarray(choose(golden.drafter, out, at, how))[0]
    noise = np.asarray(jax.jit(gumbel)(row_keys(jnp.broadcast_to(how.seed[:, None], (1, 64, 2)), at), jnp.arange(wanted.size)[None, None]))[
        0
    ]
    scores = logits / 2 + noise
    best, second = np.sort(scores, axis=1)[:, :-3:-1].T
    assert len(set(found)) > 5 and np.min(best - second) > LIMIT
    np.testing.assert_array_equal(found, np.argmax(scores, axis=1))


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_suppressed_tokens_are_never_drafted(golden: Golden, temperature: float) -> None:
    """All that would be drafted otherwise is suppressed; what is drafted then is the best of the rest."""
    wanted = golden.tensors["expected.short.step1.logits"][0, 0]
    out = jnp.broadcast_to(golden.tensors["debug.short.step1.norm_output"], (1, 64, golden.drafter.config.text.hidden_size))
    at, how = jnp.arange(64, dtype=jnp.int32)[None], Sampling(jnp.asarray([[7, 9]], jnp.uint32), jnp.full(1, temperature, jnp.float32))
    free = set(np.asarray(choose(golden.drafter, out, at, how)).ravel().tolist())
    assert (len(free) > 5) == (temperature > 0)
    drafter = golden.drafter.replace(suppress_tokens=tuple(free))
    found = set(np.asarray(choose(drafter, out, at, how)).ravel().tolist())
    assert not found & free
    if temperature == 0:
        wanted[list(free)] = -np.inf
        assert found == {int(np.argmax(wanted))}


def equations(jaxpr: Any) -> Any:
    """All equations of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(("name", "sparse"), [("E2B", True), ("E4B", True), ("31B", False)])
def test_a_centroid_head_never_makes_a_row_of_the_vocabulary(name: str, sparse: bool) -> None:
    """From the output to the draft, noise and suppressed tokens included, at the sizes of the released models."""
    drafter = gemma4_mtp.abstract(AssistantConfig.from_hf(real_configs.ASSISTANTS[name]), suppress_tokens=(5, 6))
    out = jax.ShapeDtypeStruct((8, 1, drafter.config.text.hidden_size), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(drawn)(drafter, out, jax.ShapeDtypeStruct((8, 1), jnp.int32), jax.eval_shape(lambda: greedy(8)))
    shapes = [var.aval.shape for eqn in equations(jaxpr.jaxpr) for var in eqn.outvars]
    assert any(262_144 in shape for shape in shapes) != sparse
    logits, _ = jax.eval_shape(Gemma4MTP.candidates, drafter, out)
    assert (logits.shape, logits.dtype) == ((8, 1, 32 * 128 if sparse else 262_144), jnp.float32)


# Two small members of the family: the last layers share KV and the head has centroids; K = V and the head is dense.
MEMBERS = {
    "E2B": ({"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2}, True),
    "12B": ({"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}, False),
}
VOCAB, CENTROIDS, TOP = 136, 34, 6
SLOTS, CHUNK, WINDOW = 4, 7, oracle.WINDOW
SLOT_IDS = jnp.asarray([2, 0, 3, SLOTS], jnp.int32)  # the last row of every call is nobody's
PROMPTS = (3, 10, 20)
ROUNDS = ((0, 2, 4), (4, 1, 0), (1, 3, 2))  # drafts of each sequence that are accepted


@struct.dataclass
class Told:
    """The assistant, except that it drafts what it is told."""

    drafter: Gemma4MTP
    drafts: jax.Array
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def init(self, slots, max_len, num_draft_tokens):
        return self.drafter.init(slots, max_len, num_draft_tokens)

    def observe(self, state, rows):
        return self.drafter.observe(state, rows)

    def draft(self, state, target, sampling, num_draft_tokens):
        return Drafts(self.drafts), state


@functools.cache
def models(member: str) -> tuple[Any, Any, Gemma4, Gemma4MTP]:
    """A random target and assistant in transformers, and ours from what transformers saved."""
    layers, ordered = MEMBERS[member]
    text = oracle.text_config(member, vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB, **layers)
    head = {"use_ordered_embeddings": ordered, "num_centroids": CENTROIDS, "centroid_intermediate_top_k": TOP}
    theirs = oracle.build(text, seed=1), oracle.build(oracle.assistant_config(text, **head), seed=2)
    with tempfile.TemporaryDirectory() as folder:
        for name, model in zip(("target", "assistant"), theirs, strict=True):
            model.save_pretrained(f"{folder}/{name}")
        config, _ = targets.read_target(Path(folder) / "target")
        target = targets.load_target(Path(folder) / "target", gemma4.abstract(config, jnp.float32), progress=False)
        drafter = drafters.load_drafter(Path(folder) / "assistant", config, jnp.float32, progress=False)
    assert isinstance(drafter, Gemma4MTP)
    return *theirs, target, drafter


@torch.no_grad()
def continuations(target: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], Any]:
    """Each prompt with `count` greedy tokens of the reference target, and its output for all of them, padded at the right."""
    texts = [list(prompt) for prompt in prompts]
    for left in range(count, -1, -1):
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        out = target.model(ids, use_cache=False, return_shared_kv_states=True)
        for row, text in enumerate(texts if left else ()):
            text.append(int(target.lm_head(out.last_hidden_state[row, len(text) - 1]).argmax()))
    return texts, out


@torch.no_grad()
def reference_drafts(target: Any, assistant: Any, computed: Any, row: int, known: list[int]) -> tuple[list[int], list[np.ndarray]]:
    """K drafts after the known tokens, the last of which is the anchor, and the logits of each.

    The assistant stands at position P, the row before the anchor, and sees the target's keys 0 .. P, of sliding layers the last WINDOW.
    """
    length, token = len(known) - 1, known[-1]
    first = {FULL: 0, SLIDING: max(length - WINDOW, 0)}
    keys = {kind: tuple(x[row : row + 1, :, first[kind] : length] for x in computed.shared_kv_states[kind]) for kind in (SLIDING, FULL)}
    hidden, position = computed.last_hidden_state[row : row + 1, length - 1 : length], torch.tensor([[length - 1]])
    drafts, logits = [], []
    for _ in range(K):
        embedded = target.model.embed_tokens(torch.tensor([[token]]))
        out = assistant(inputs_embeds=torch.cat([embedded, hidden], dim=-1), position_ids=position, shared_kv_states=keys)
        hidden, token = out.last_hidden_state, int(out.logits.argmax())
        drafts.append(token)
        logits.append(out.logits[0, 0].numpy())
    return drafts, logits


@jax.jit
def draft(target: Gemma4, drafter: Gemma4MTP, state: decode.DecodeState) -> tuple[jax.Array, list[Any]]:
    """The drafts of the next round, and (logits, positions, ids) that each was chosen from."""
    seen = []

    def watched(logits, positions, how, ids=None):
        seen.append((logits, positions, ids))
        return sampling.choose(logits, positions, how, ids)

    at = jnp.minimum(SLOT_IDS, SLOTS - 1)
    view = Target(target, state.cache, SLOT_IDS, state.tokens[at, state.computed[at]], state.computed[at])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemma4_mtp, "choose", watched)
        drafts = drafter.draft(state.drafter, view, greedy(len(SLOT_IDS)), K)[0].tokens
    return drafts, seen


prefill = jax.jit(decode.prefill, static_argnames="chunk")
spec_step = jax.jit(decode.spec_step, static_argnames="round")


def known_tokens(state: decode.DecodeState) -> list[list[int]]:
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [tokens[slot, : length[slot]].tolist() for slot in np.asarray(SLOT_IDS[:3])]


@pytest.mark.parametrize("member", MEMBERS)
def test_drafts_of_whole_rounds(member: str) -> None:
    """After a prompt and after every round, three sequences of unlike lengths get the drafts that the reference gives them.

    The rounds accept 0 to 4 drafts, so that K and V of rejected ones lie behind each length, in the window and past it.
    """
    their_target, their_assistant, target, drafter = models(member)
    prompts = np.random.default_rng(3).integers(3, VOCAB, (len(SLOT_IDS), max(PROMPTS)))
    emitted = np.sum(np.asarray(ROUNDS) + 1, axis=0).max() + 1
    texts, computed = continuations(their_target, [ids[:n].tolist() for ids, n in zip(prompts, PROMPTS, strict=False)], emitted + K)

    def check(state: decode.DecodeState) -> None:
        drafts, seen = draft(target, drafter, state)
        for row, known in enumerate(known_tokens(state)):
            assert known == texts[row][: len(known)]
            wanted, all_logits = reference_drafts(their_target, their_assistant, computed, row, known)
            assert np.asarray(drafts)[row].tolist() == wanted, (row, len(known))
            for k, (logits, positions, ids) in enumerate(seen):
                assert positions[row, 0] == len(known) + k  # of the token that is chosen, which is what its noise is keyed by
                of_ids = all_logits[k] if ids is None else all_logits[k][np.asarray(ids)[row, 0]]
                assert relative_error(np.asarray(logits)[row, 0], of_ids) <= LIMIT
                if ids is not None:
                    rest = np.setdiff1d(np.arange(VOCAB), np.asarray(ids)[row, 0])
                    assert len(rest) == VOCAB - TOP * VOCAB // CENTROIDS and np.all(all_logits[k][rest] < np.min(of_ids))

    column = jnp.asarray([*PROMPTS, 1], jnp.int32)
    requests = decode.Requests(
        tokens=jnp.asarray(prompts, jnp.int32),
        length=column,
        prompt=column,
        limit=jnp.full_like(column, MAX_LEN),
        stop_ids=jnp.full((len(SLOT_IDS), 16), -1, jnp.int32),
        seed=jnp.zeros((len(SLOT_IDS), 2), jnp.uint32),
        temperature=jnp.zeros(len(SLOT_IDS), jnp.float32),
    )
    state = jax.jit(lambda: decode.init_state(target, drafter, slots=SLOTS, max_len=MAX_LEN, num_draft_tokens=K, page_size=PAGE))()
    state = jax.jit(decode.admit)(state, SLOT_IDS, requests)
    for _ in range(-(-max(PROMPTS) // CHUNK)):
        state = prefill(target, drafter, state, SLOT_IDS, chunk=CHUNK)
    check(state)
    for accepted in ROUNDS:
        known = known_tokens(state)
        told = np.zeros((len(SLOT_IDS), K), np.int32)
        for row, count in enumerate(accepted):
            told[row] = texts[row][len(known[row]) :][:K]
            told[row, count:] = (told[row, count:] + 1) % VOCAB
        state = spec_step(target, Told(drafter, jnp.asarray(told)), state, SLOT_IDS, round=decode.Round(K))
        grown = [len(new) - len(old) for new, old in zip(known_tokens(state), known, strict=True)]
        assert grown == [count + 1 for count in accepted]
        check(state)


TARGET = oracle.text_config("31B")


@pytest.mark.parametrize(
    ("inner", "outer", "target", "message"),
    [
        ({}, {"backbone_hidden_size": 48}, {}, "hidden_size 48, this target has 32"),
        ({"vocab_size": 132}, {}, {}, "vocab_size 132, the target 131; expected at most as many"),
        ({"num_key_value_heads": 2}, {}, {}, r"layer 0 \(sliding_attention\) has num_kv_heads 2, target layer 4, .* has 4"),
        ({"num_global_key_value_heads": 4}, {}, {}, r"layer 3 \(full_attention\) has num_kv_heads 4, target layer 5, .* has 2"),
        ({"head_dim": 16}, {}, {}, r"layer 0 \(sliding_attention\) has head_dim 16, .* has 8"),
        ({"global_head_dim": 32}, {}, {}, r"layer 3 \(full_attention\) has head_dim 32, .* has 16"),
        ({"sliding_window": 4}, {}, {}, r"layer 0 \(sliding_attention\) has window 4, .* has 8"),
        (
            {"rope_parameters": {**oracle.BASE["rope_parameters"], SLIDING: {"rope_theta": 5e3}}},
            {},
            {},
            r"has rope_theta 5000.0, .* has 10000.0",
        ),
        ({}, {}, {"layer_types": [FULL] * 6}, "layer 0 is of type 'sliding_attention'; the target has no layer of that type"),
    ],
    ids=lambda value: next(iter(value), "-") if isinstance(value, dict) else "",
)
def test_an_assistant_of_another_target(inner: dict, outer: dict, target: dict, message: str) -> None:
    config = oracle.assistant_config(TARGET, **outer)
    config["text_config"].update(inner)
    with pytest.raises(ValueError, match=message):
        gemma4_mtp.bind(AssistantConfig.from_hf(config), Gemma4Config.from_hf({**TARGET, **target}))


def test_layers_read_the_last_owner_of_their_type() -> None:
    bound = gemma4_mtp.bind(AssistantConfig.from_hf(oracle.assistant_config(TARGET)), Gemma4Config.from_hf(TARGET))
    assert [spec.kv_source for spec in bound.text.layers] == [4, 4, 4, 5]


@pytest.mark.parametrize(("name", "fused"), [("E2B", "choose"), ("31B", "choose_by_head")])
def test_the_head_is_read_once_whatever_the_rule(name: str, fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that weighs drafts needs their logits, and chooses from them; any other reads the head in a kernel that chooses too."""
    drafter = gemma4_mtp.abstract(AssistantConfig.from_hf(real_configs.ASSISTANTS[name]))
    out = jax.ShapeDtypeStruct((2, 1, drafter.config.text.hidden_size), jnp.bfloat16)

    def fail(*args, **kwargs):
        raise LookupError("fused")

    monkeypatch.setattr(gemma4_mtp.centroid_head if fused == "choose" else gemma4_mtp, fused, fail)

    def chosen(rule: str) -> Any:
        def run(drafter: Gemma4MTP, out: jax.Array, at: jax.Array) -> jax.Array:
            how = accept.Rule(rule).drafting(greedy(2), jnp.zeros(2, jnp.int32))
            return drafter.choose(out, drafter.candidates(out), at, how)

        return jax.eval_shape(run, drafter, out, jax.ShapeDtypeStruct((2, 1), jnp.int32))

    for rule in ("standard", "block"):
        assert chosen(rule).shape == (2, 1)
    for rule in ("coupled", "synthetic"):
        with pytest.raises(LookupError, match="fused"):
            chosen(rule)
