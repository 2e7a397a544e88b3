"""The pocket models on an NVIDIA GPU: the same tokens by XLA and by kernels for any K; a loop that copies neither cache nor weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from pocket_pair import assert_same, drafter_of, put, target, texts

from jaxspec import decode, released
from jaxspec.compile_check.check import GRAPH, loop_commands
from jaxspec.drafters import NoDraft
from jaxspec.engine.buckets import Buckets, prefill_rows
from jaxspec.engine.memory import sizes_of
from jaxspec.model import gemma4
from jaxspec.model.layer_spec import SLIDING
from jaxspec.targets import abstract_target, asked_quantisation
from pallas_kernels import dialect

pytestmark = pytest.mark.gpu

MAX_LEN = 512
prefill = jax.jit(decode.prefill, static_argnames=("chunk", "round"), donate_argnums=2)
decode_loop = jax.jit(decode.decode_loop, static_argnames="round", donate_argnums=2)


def decoded(target, drafter, sequences, *, num_draft_tokens, attention, temperature, rows=None, parts=False):
    """The finished sequences. rows: of a round. parts: whether the first call for prompts computes several parts of them."""
    if attention == "triton" and (reason := dialect.obstacle()):
        pytest.skip(reason)
    state = decode.init_state(target, drafter, slots=len(sequences), max_len=MAX_LEN, num_draft_tokens=7, page_size=32)
    slots = jnp.arange(len(sequences), dtype=jnp.int32)
    state = put(state, sequences, [MAX_LEN] * len(sequences), temperature=temperature)
    compute = functools.partial(prefill, round=decode.Round(0, attention=attention))
    if parts:
        ring, chunk = state.cache.tables[SLIDING].shape[1] * 32, 32
        entries = [(slot, at) for slot, ids in enumerate(sequences) for at in range(0, min(len(ids), ring), chunk)]
        assert len(entries) > 2 * len(sequences)
        some, offset = jnp.asarray(entries, jnp.int32).T
        state = compute(target, drafter, state, some, jnp.full_like(some, MAX_LEN), offset, chunk=chunk)
    for _ in range(-(-max(map(len, sequences)) // 80)):
        state = compute(target, drafter, state, slots, chunk=32 if parts else 80)
    state = decode_loop(target, drafter, state, slots, 10_000, round=decode.Round(num_draft_tokens, attention=attention, rows=rows))
    return [np.asarray(row[:n]) for row, n in zip(state.tokens, state.length, strict=True)]


@pytest.fixture(scope="module")
def sequences():
    return [ids[:n] for ids, n in zip(texts(), [1, 3, 40, 63, 64, 127, 129, 220], strict=False)]


@pytest.fixture(scope="module")
def plain(sequences):
    """By temperature: what XLA decodes without drafts."""
    run = functools.partial(decoded, target(), NoDraft(), sequences, num_draft_tokens=0, attention="xla")
    return {temperature: run(temperature=temperature) for temperature in (0.0, 0.8)}


def test_it_runs_on_the_gpu():
    assert jax.default_backend() == "gpu"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("attention", ["xla", "triton"])
def test_the_same_tokens_by_xla_and_by_kernels_for_any_k(sequences, plain, attention, temperature):
    compared, ties = 0, 0
    for k, rows in ((4, None), (7, 24)) if attention == "xla" else ((0, None), (1, None), (4, None), (7, None), (7, 24)):
        guessing = drafter_of("mtp") if k else NoDraft()
        found = decoded(target(), guessing, sequences, num_draft_tokens=k, attention=attention, temperature=temperature, rows=rows)
        for seed, (f, e) in enumerate(zip(found, plain[temperature], strict=True)):
            ties += assert_same(f, e, temperature, seed)
            compared += len(e)
    assert ties <= 1 + compared // 10_000


@pytest.mark.parametrize("attention", ["xla", "triton"])
@pytest.mark.parametrize("name", ["mtp", "dflash", "eagle3"])
def test_parts_of_prompts_side_by_side_give_the_same_tokens(sequences, plain, attention, name):
    found = decoded(target(), drafter_of(name), sequences, num_draft_tokens=4, attention=attention, temperature=0.8, parts=True)
    ties = sum(assert_same(f, e, 0.8, seed) for seed, (f, e) in enumerate(zip(found, plain[0.8], strict=True)))
    assert ties <= 1


def halved(tree):
    """The same weights in bfloat16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree)


def divergences(found, expected, prompts):
    """How many sequences differ, and how many new tokens they have up to there."""
    ends = [int(np.argmin(f[: len(e)] == e[: len(f)])) if not np.array_equal(f, e) else None for f, e in zip(found, expected, strict=True)]
    tokens = [(len(e) if end is None else end + 1) - len(p) for end, e, p in zip(ends, expected, prompts, strict=True)]
    return sum(end is not None for end in ends), sum(tokens)


def test_how_often_bfloat16_diverges(sequences, record_property):
    """A measurement: in bfloat16 ties are frequent. It is printed with `pytest -s`, and kept by `--junit-xml`."""
    half, draft = halved(target()), halved(drafter_of("mtp"))
    for temperature in (0.0, 0.8):
        run = functools.partial(decoded, sequences=sequences, temperature=temperature)
        plain = run(half, NoDraft(), num_draft_tokens=0, attention="xla")
        kernels = run(half, NoDraft(), num_draft_tokens=0, attention="triton")
        drafted = run(half, draft, num_draft_tokens=4, attention="triton")
        for name, found, expected in (("kernels against XLA", kernels, plain), ("K = 4 against K = 0, by kernels", drafted, kernels)):
            count, tokens = divergences(found, expected, sequences)
            assert tokens > 100, "sequences that end or differ at once are no text"
            text = f"{count} of {len(sequences)} sequences diverge, in {tokens} tokens"
            print(f"bfloat16, temperature {temperature}, {name}: {text}")
            record_property(f"{name}, temperature {temperature}", text)


@pytest.fixture(scope="module")
def loop():
    """`decode_loop` with pools that are large beside all else, and what the largest of them takes."""
    half, draft = halved(target()), halved(drafter_of("mtp"))
    state = jax.eval_shape(lambda: decode.init_state(half, draft, slots=64, max_len=4096, num_draft_tokens=4, full_pages=20_000))
    pool = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return decode_loop.lower(half, draft, state, jnp.zeros(1, jnp.int32), 100, round=decode.Round(4)), pool


def test_nothing_large_is_copied_in_the_loop(loop):
    """XLA reports the bytes of temporaries: a copied pool or weight matrix would be among them."""
    lowered, pool = loop
    assert pool > 300e6
    assert lowered.compile().memory_analysis().temp_size_in_bytes < pool / 4


@pytest.mark.parametrize("name", ["31b", "12b", "26b", "e4b"])
def test_calls_that_compute_prompts_take_what_is_planned(name):
    """Of several prompts too, whose keys and values XLA once kept of all layers until the last had run: 858 MiB of the 31B, not 70. It may
    keep those of a few: with 8 x 64 rows of 32 slots those of the 31B's five layers between two of full attention, 166 MiB."""
    model = gemma4.abstract(released.target_config(name), jnp.bfloat16)
    rows = prefill_rows(model, kernels=True)
    planned = sizes_of(model, NoDraft(), max_len=4096, num_draft_tokens=0).prefill
    calls = [bucket for bucket in Buckets(32, 4096, rows).prefill if bucket[0] * bucket[1] == rows]
    assert len(calls) >= 3
    state = jax.eval_shape(lambda: decode.init_state(model, NoDraft(), slots=32, max_len=4096, num_draft_tokens=0))
    for sequences, chunk in calls:
        lowered = prefill.lower(model, NoDraft(), state, jax.ShapeDtypeStruct((sequences,), jnp.int32), chunk=chunk, round=decode.Round(0))
        assert lowered.compile().memory_analysis().temp_size_in_bytes < 3 * planned


def test_kept_sequences_are_copied_layer_by_layer():
    """XLA once read the pages of all layers before it wrote any: 3,128 MiB for eight of the 31B's sequences, not 68."""
    model = gemma4.abstract(released.target_config("31b"), jnp.bfloat16)
    state = jax.eval_shape(lambda: decode.init_state(model, NoDraft(), slots=32, max_len=4096, num_draft_tokens=0))
    ring, eight = state.cache.tables[SLIDING].shape[1], jax.ShapeDtypeStruct((8,), jnp.int32)
    most = max(pool.size * pool.dtype.itemsize // len(pool) for layer in state.cache.layers if layer for pool in (layer.k, layer.v))
    compiled = jax.jit(decode.fork, donate_argnums=0).lower(state, eight, eight, eight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 8 * ring * most


def test_matrices_of_layers_are_unpacked_one_after_the_other():
    """For more rows than kernels multiply. XLA once unpacked those of many layers in one operation: 1,050 MiB. The largest takes 225."""
    config = released.target_config("12b")
    model = abstract_target(config, jnp.bfloat16, asked_quantisation(config, jnp.bfloat16, "int4"))
    sizes = sizes_of(model, NoDraft(), max_len=4096, num_draft_tokens=0)
    state = jax.eval_shape(lambda: decode.init_state(model, NoDraft(), slots=1, max_len=4096, num_draft_tokens=0))
    slots = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = prefill.lower(model, NoDraft(), state, slots, chunk=1024, round=decode.Round(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * (sizes.prefill + sizes.unpacking)


@pytest.fixture
def uncached():
    """What was compiled before is compiled again: only then does XLA dump anything."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("uncached")
def test_a_round_is_one_cuda_graph(loop, tmp_path):
    """XLA tells, among what it dumps, what it runs one after another: the loop's body has to be one command buffer."""
    lowered, _ = loop
    lowered.compile({"xla_dump_to": str(tmp_path)})
    (dumped,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    assert loop_commands(dumped.read_text()) == [GRAPH]
