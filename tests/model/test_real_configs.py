"""The five released models and their assistants, by shape alone: nothing here has a weight."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
import real_configs
from real_configs import ASSISTANTS, FULL, SLIDING, TARGETS

from jaxspec import decode
from jaxspec.checkpoint import layout
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config
from jaxspec.model.rows import Rows

MODELS = list(TARGETS)


def count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def keys(tree, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this model: key and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    return {prefix + part.key: part.shape for path in shapes for part in layout.layouts_of(tree)(path, shapes)[0]}


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name: str) -> None:
    target = gemma4.abstract(Gemma4Config.from_hf(TARGETS[name]))
    assert count(target) == real_configs.TARGET_PARAMETERS[name]
    assert sum(math.prod(shape) for shape in keys(target).values()) == real_configs.TARGET_PARAMETERS[name]
    assistant = gemma4_mtp.abstract(AssistantConfig.from_hf(ASSISTANTS[name]))
    assert count(assistant) == real_configs.ASSISTANT_ELEMENTS[name]
    assert len(keys(assistant)) == real_configs.ASSISTANT_TENSORS[name]


@pytest.mark.parametrize(
    ("name", "key", "shape"),
    [
        ("31B", "layers.0.self_attn.q_proj.weight", (8192, 5376)),
        ("31B", "layers.0.self_attn.k_proj.weight", (4096, 5376)),
        ("31B", "layers.0.self_attn.v_proj.weight", (4096, 5376)),
        ("31B", "layers.0.self_attn.o_proj.weight", (5376, 8192)),
        ("31B", "layers.5.self_attn.q_proj.weight", (16_384, 5376)),
        ("31B", "layers.5.self_attn.k_proj.weight", (2048, 5376)),
        ("31B", "layers.5.self_attn.v_proj.weight", None),
        ("31B", "layers.5.self_attn.o_proj.weight", (5376, 16_384)),
        ("31B", "layers.5.self_attn.k_norm.weight", (512,)),
        ("26B-A4B", "layers.0.experts.gate_up_proj", (128, 1408, 2816)),
        ("26B-A4B", "layers.0.experts.down_proj", (128, 2816, 704)),
        ("26B-A4B", "layers.29.router.proj.weight", (128, 2816)),
        ("E2B", "embed_tokens_per_layer.weight", (262_144, 8960)),
        ("E2B", "layers.14.mlp.gate_proj.weight", (6144, 1536)),
        ("E2B", "layers.15.mlp.gate_proj.weight", (12_288, 1536)),
        ("E2B", "layers.15.self_attn.k_proj.weight", None),
    ],
)
def test_tensors(name: str, key: str, shape: tuple[int, ...] | None) -> None:
    target = gemma4.abstract(Gemma4Config.from_hf(TARGETS[name]))
    assert keys(target, "model.language_model.").get(f"model.language_model.{key}") == shape


@pytest.mark.parametrize("name", MODELS)
def test_cache(name: str) -> None:
    """Bytes a position, and sliding pools that hold no more than the window and a block of every slot. Where K and V come from one
    projection, a full layer stores 512 + 128 numbers instead of 1,024."""
    config = Gemma4Config.from_hf(TARGETS[name])
    settings = {"slots": 4, "max_len": 8192, "num_draft_tokens": 7, "page_size": 64}
    cache = jax.eval_shape(functools.partial(gemma4.init_cache, config, **settings))
    for kind, positions in ((SLIDING, config.sliding_window + 64), (FULL, 8192)):
        pools = [pool for spec, pool in zip(config.layers, cache.layers, strict=True) if pool is not None and spec.kind == kind]
        stored = 640 if kind == FULL and name in ("12B", "26B-A4B", "31B") else 1024
        assert 2 * count(pools) == 4 * positions * real_configs.KV_BYTES[name][kind] * stored // 1024


@pytest.mark.parametrize("name", MODELS)
def test_prefill(name: str) -> None:
    config = Gemma4Config.from_hf(TARGETS[name])
    target = gemma4.abstract(config)
    cache = jax.eval_shape(functools.partial(gemma4.init_cache, config, slots=4, max_len=4096, num_draft_tokens=4))
    batch, chunk = 2, 512
    column = jax.ShapeDtypeStruct((batch,), jnp.int32)
    rows = Rows(jax.ShapeDtypeStruct((batch, chunk), jnp.int32), column, column, column)
    taps = (0, config.first_shared_layer)
    out, after = jax.eval_shape(functools.partial(gemma4.Gemma4.__call__, taps=taps, wanted="last"), target, rows, cache)
    assert (out.hidden.shape, out.hidden.dtype) == ((batch, 1, config.hidden_size), jnp.bfloat16)
    assert [tap.shape for tap in out.taps] == [(batch, chunk, config.hidden_size)] * 2
    assert jax.tree.all(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), cache, after))
    logits = jax.eval_shape(gemma4.Gemma4.unembed, target, out.hidden)
    assert (logits.shape, logits.dtype) == ((batch, 1, 262_144), jnp.float32)


@pytest.mark.parametrize("name", MODELS)
def test_the_assistant_reads_the_last_layers_that_own_keys(name: str) -> None:
    sources = {"E2B": (13, 14), "E4B": (22, 23), "12B": (46, 47), "26B-A4B": (28, 29), "31B": (58, 59)}[name]
    bound = gemma4_mtp.bind(AssistantConfig.from_hf(ASSISTANTS[name]), Gemma4Config.from_hf(TARGETS[name]))
    assert [spec.kv_source for spec in bound.text.layers] == [sources[0]] * 3 + [sources[1]]


@functools.cache
def pair(name: str) -> tuple[gemma4.Gemma4, gemma4_mtp.Gemma4MTP]:
    """A released target and its assistant, as shapes."""
    config = Gemma4Config.from_hf(TARGETS[name])
    return gemma4.abstract(config), gemma4_mtp.abstract(gemma4_mtp.bind(AssistantConfig.from_hf(ASSISTANTS[name]), config))


@pytest.mark.parametrize("name", MODELS)
def test_every_call_returns_the_state_that_it_was_given(name: str) -> None:
    """The same tree, shapes and dtypes, weak types included: what donation, while_loop and one compiled program need."""
    slots, max_len, k = 8, 8192, 3 if name == "E2B" else 4
    target, drafter = pair(name)
    settings = {"slots": slots, "max_len": max_len, "num_draft_tokens": k}
    state = jax.eval_shape(functools.partial(decode.init_state, **settings), target, drafter)

    def array(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    each = array(slots)
    seed, temperature = array(slots, 2, dtype=jnp.uint32), array(slots, dtype=jnp.float32)
    requests = decode.Requests(array(slots, max_len), each, each, each, array(slots, 16), seed, temperature)
    calls = {
        "admit": lambda: jax.eval_shape(decode.admit, state, each, requests),
        "prefill": lambda: jax.eval_shape(functools.partial(decode.prefill, chunk=512), target, drafter, state, each),
        "spec_step": lambda: jax.eval_shape(functools.partial(decode.spec_step, round=decode.Round(k)), target, drafter, state, each),
        "release": lambda: jax.eval_shape(decode.release, state, each),
    }
    for call, run in calls.items():
        after = run()
        assert jax.tree.structure(after) == jax.tree.structure(state), call
        for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True):
            assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, old.weak_type), (call, path)
            assert not new.weak_type, (call, path)
