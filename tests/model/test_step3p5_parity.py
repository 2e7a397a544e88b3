"""The Step-3.5 target against the golden vectors of transformers' class, and a sequence cut into calls against the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step3p5_files as files
from definitions import relative_error

from jaxspec.model import paged_kv as paged
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.rows import Rows
from jaxspec.targets import abstract_target, load_target, read_target

pytestmark = pytest.mark.usefixtures("unoptimised")
LIMIT, PAGE, SLOTS = 1e-4, 4, 3
CASE = "step3p5_target"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    meta, weights, _ = files.golden(CASE)
    config, _ = read_target(folder := files.write(tmp_path_factory.mktemp("golden"), meta["config"], weights))
    return load_target(folder, abstract_target(config, jnp.float32), progress=False)


@functools.partial(jax.jit, static_argnames="taps")
def step(target, cache, ids, start, count, taps=()):
    slots = jnp.asarray([1, SLOTS], jnp.int32)  # the second row is nobody's
    cache, _ = paged.reserve(cache, slots, start + count, ids.shape[1])
    out, cache = target(Rows(ids, start, count, slots), cache, taps=taps)
    return out, target.unembed(out.hidden), cache


@functools.partial(jax.jit, static_argnames="wanted")
def whole(target, rows, wanted="all"):
    return target(rows, None, wanted=wanted)


def call(target, cache, ids, start, count=None, taps=()):
    """A block of rows [T] at `start`, of which `count` are real."""
    block = jnp.asarray(np.stack([ids, np.zeros_like(ids)]), jnp.int32)
    count = len(ids) if count is None else count
    return step(target, cache, block, jnp.asarray([start, 0], jnp.int32), jnp.asarray([count, 0], jnp.int32), taps)


def empty(target, length, drafts=3):
    return target.init_cache(slots=SLOTS, max_len=length, num_draft_tokens=drafts, page_size=PAGE, dtype=jnp.float32)


def test_golden_chunks(target):
    """Every hidden state, the last before and after the norm, and the logits, of a prompt and of rows on the cache."""
    _, _, tensors = files.golden(CASE)
    count = target.config.num_hidden_layers
    taps, start = tuple(range(count + 1)), 0
    chunks = [name for name in ("prompt", "step1", "step2", "step3") if f"input.{name}.token_ids" in tensors]
    cache = empty(target, sum(tensors[f"input.{name}.token_ids"].shape[1] for name in chunks))
    for name in chunks:
        ids = tensors[f"input.{name}.token_ids"][0]
        out, logits, cache = call(target, cache, ids, start, taps=taps)
        for i, wanted in enumerate(tensors[f"expected.{name}.hidden_states"]):
            assert relative_error(out.taps[i][0], wanted) < LIMIT, (name, i)
        np.testing.assert_allclose(out.hidden[0], tensors[f"expected.{name}.final_hidden"][0], rtol=LIMIT, atol=LIMIT)
        np.testing.assert_allclose(logits[0], tensors[f"expected.{name}.logits"][0], rtol=LIMIT, atol=LIMIT)
        np.testing.assert_array_equal(target.feature(out.taps[count]), out.taps[count])
        start += len(ids)


def test_golden_keys(target):
    """Keys lie in the order of `Step3p5LayerSpec.order`, values as they are."""
    _, _, tensors = files.golden(CASE)
    ids = np.concatenate([tensors[f"input.{name}.token_ids"][0] for name in ("prompt", "step1", "step2")])
    zero = jnp.zeros(1, jnp.int32)
    out, _ = whole(target, Rows(jnp.asarray(ids[None], jnp.int32), zero, zero + len(ids), zero))
    layers = [i for i in range(len(target.layers)) if f"debug.layers.{i}.key" in tensors]
    assert {target.config.layers[i].kind for i in layers} == {FULL, SLIDING}
    for i in layers:
        key, value = (np.moveaxis(np.asarray(x[0]), 1, 0) for x in out.keys[i].fresh)
        order = target.config.layers[i].order
        key = key if order is None else key[..., list(order)]
        np.testing.assert_allclose(key, tensors[f"debug.layers.{i}.key"][0], rtol=LIMIT, atol=LIMIT)
        np.testing.assert_allclose(value, tensors[f"debug.layers.{i}.value"][0], rtol=LIMIT, atol=LIMIT)


# With (4,) rows are rejected, and a chunk of 17 is longer than the window.
@pytest.mark.parametrize("widths", [(4,), (17, 5, 4), *(pytest.param(w, marks=pytest.mark.slow) for w in ((1,), (3, 7)))], ids=str)
def test_however_a_sequence_is_cut(target, widths):
    """Steps of one row, chunks longer than the ring's spare places, and verify blocks of which a part is rejected, against the whole."""
    ids = np.random.default_rng(0).integers(0, target.config.vocab_size, 33)
    zero = jnp.zeros(1, jnp.int32)
    out, _ = whole(target, Rows(jnp.asarray(ids[None], jnp.int32), zero, zero + len(ids), zero))
    wanted = np.asarray(target.unembed(out.hidden))[0]
    cache, at, turn = empty(target, 40), 0, 0
    while at < len(ids):
        width, rejected = widths[turn % len(widths)], turn % 2 and widths == (4,)
        block = np.full(width, 5)
        real = min(width, len(ids) - at)
        block[:real] = ids[at : at + real]
        kept = real
        if rejected:  # its last rows are other tokens, which the next block writes over
            kept = max(real - 2, 1)
            block[kept:] = 7
        _, logits, cache = call(target, cache, block, at, real)
        assert relative_error(logits[0, :kept], wanted[at : at + kept]) < LIMIT, (widths, at)
        at, turn = at + kept, turn + 1


@pytest.mark.slow  # the kernels have tests of their own, and golden_chunks is of the model
@pytest.mark.parametrize("prefill", ["xla", "triton-interpret"])
def test_kernels_give_the_same(target, prefill):
    """The kernels, interpreted, over a verify block, and over a prefill."""
    ids = np.random.default_rng(3).integers(0, target.config.vocab_size, (1, 9)).astype(np.int32)
    zero = jnp.zeros(1, jnp.int32)

    @functools.partial(jax.jit, static_argnames=("prefill", "attention"))
    def run(target, prefill, attention):
        cache, _ = paged.reserve(
            target.init_cache(slots=1, max_len=12, num_draft_tokens=3, page_size=16, dtype=jnp.float32), zero, zero + 9, 9
        )
        out, cache = target(Rows(jnp.asarray(ids[:, :5]), zero, zero + 5, zero), cache, attention=prefill)
        more, _ = target(Rows(jnp.asarray(ids[:, 5:]), zero + 5, zero + 4, zero), cache, attention=attention)
        return jnp.concatenate([target.unembed(out.hidden), target.unembed(more.hidden)], axis=1)

    assert relative_error(run(target, prefill, "triton-interpret"), run(target, "xla", "xla")) < LIMIT


def test_the_last_row_alone(target):
    ids = np.random.default_rng(4).integers(0, target.config.vocab_size, (2, 6)).astype(np.int32)
    count, slots = jnp.asarray([6, 3], jnp.int32), jnp.arange(2, dtype=jnp.int32)
    rows = Rows(jnp.asarray(ids), jnp.zeros(2, jnp.int32), count, slots)
    every, last, none = (whole(target, rows, wanted)[0] for wanted in ("all", "last", "none"))
    np.testing.assert_allclose(last.hidden[:, 0], np.asarray(every.hidden)[[0, 1], [5, 2]], rtol=1e-5, atol=1e-5)
    for i, keys in every.keys.items():
        for other in (last, none):
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), other.keys[i].fresh, keys.fresh)


def test_a_tap_that_there_is_not(target):
    count = target.config.num_hidden_layers
    rows = Rows(jnp.zeros((1, 1), jnp.int32), *[jnp.zeros(1, jnp.int32)] * 3)
    with pytest.raises(ValueError, match=rf"taps \[{count + 1}\] are outside 0 .. {count}"):
        target(rows, None, taps=(count + 1,))


def test_norms_keep_what_bfloat16_would_lose(tmp_path):
    """The norms' 1 + w is float32 beside weights of bfloat16."""
    config = files.tiny_config()
    folder = files.write(tmp_path, config, files.random_tensors(config, dtype=jnp.bfloat16))
    read, _ = read_target(folder)
    target = load_target(folder, abstract_target(read, jnp.bfloat16), progress=False)
    weight = target.layers[0].input_layernorm.weight
    assert weight.dtype == jnp.float32 and target.dtype == target.layers[0].self_attn.qkv_proj.weight.dtype == jnp.bfloat16
    assert (np.asarray(weight) != np.asarray(weight.astype(jnp.bfloat16), np.float32)).any()
    assert target.layers[3].moe.router_bias.dtype == jnp.float32
    zero = jnp.zeros(1, jnp.int32)
    out, _ = whole(target, Rows(jnp.ones((1, 4), jnp.int32), zero, zero + 4, zero))
    assert out.hidden.dtype == jnp.bfloat16 and out.keys[0].fresh[0].dtype == jnp.bfloat16
