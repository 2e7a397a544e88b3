"""A quantised target: with every kind of drafter its texts are those without drafts, and not those of its float weights."""

import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import quantised_files as files
import rounds
import tiny
from safetensors.numpy import load_file

import jaxspec
from jaxspec import SamplingParams, checkpoint, targets
from jaxspec.drafters.base import NoDraft

pytestmark = pytest.mark.usefixtures("unoptimised")
K = 3


def few(kind_names, often):
    return [kind if kind in often else pytest.param(kind, marks=pytest.mark.slow) for kind in kind_names]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The target of `rounds` in int4 with zero points, 16 inputs to a scale."""
    root = tmp_path_factory.mktemp("quantised")
    checkpoint.save_weights(root / "float", rounds.target(), rounds.TEXT, prefix="model.")
    settings = files.compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False)
    tensors, write = load_file(root / "float" / "model.safetensors"), files.pack_quantized(4, 16, zeros=True)
    files.write_folder(root / "int4", {**rounds.TEXT, "quantization_config": settings}, tensors, write)
    config, _ = targets.read_target(root / "int4")
    quantisation = targets.read_quantisation(root / "int4")
    return targets.load_target(root / "int4", targets.abstract_target(config, jnp.float32, quantisation), quantisation, progress=False)


@pytest.fixture(scope="module")
def texts(target):
    """Every sequence to its end, one token at a time."""
    return rounds.tokens(rounds.ended(target, NoDraft(), rounds.started(NoDraft(), target), 0))


def test_texts_are_not_those_of_float_weights(texts) -> None:
    assert (texts != rounds.texts()).any()


@pytest.mark.parametrize("kind", few(kinds.KINDS, ("assistant",)))
def test_texts_are_those_without_drafts(kind: str, target, texts) -> None:
    drafter = kinds.drafter(kind)
    after = rounds.ended(target, drafter, rounds.started(drafter, target), K)
    np.testing.assert_array_equal(rounds.tokens(after), texts)


@pytest.fixture(scope="module")
def with_int8_embedding(tmp_path_factory):
    """The target of `rounds` with its embedding, which is its head too, in int8."""
    folder = tmp_path_factory.mktemp("embedding")
    checkpoint.save_weights(folder, rounds.target(), rounds.TEXT, prefix="model.")
    config, _ = targets.read_target(folder)
    quantisation = targets.quantisation_of(folder, config, jnp.float32, None, "int8")
    return targets.load_target(folder, targets.abstract_target(config, jnp.float32, quantisation), quantisation, progress=False)


@pytest.mark.parametrize("kind", few(("assistant", "dflash", "eagle3", "modules"), ("dflash",)))
def test_texts_of_a_quantised_embedding_are_those_without_drafts(kind: str, with_int8_embedding) -> None:
    """Drafters that embed with the target's table, or guess by its head, read it packed. DFlash does both."""
    target, drafter = with_int8_embedding, kinds.drafter(kind)
    alone = rounds.tokens(rounds.ended(target, NoDraft(), rounds.started(NoDraft(), target), 0))
    assert (alone != rounds.texts()).any()
    np.testing.assert_array_equal(rounds.tokens(rounds.ended(target, drafter, rounds.started(drafter, target), K)), alone)


@pytest.mark.slow  # tests/test_quantize.py reads such scales, tests/decode/test_decode_loop.py has drafts over such a cache
def test_load_takes_scales_of_a_float8_cache(tmp_path) -> None:
    """From a folder to texts, and the assistant reads the cache with the same scales: it has none of its own."""
    folder, assistant = tiny.tiny_target(tmp_path / "float"), tiny.tiny_assistant(tmp_path / "assistant")
    scales = {
        f"model.language_model.layers.{i}.self_attn.{name}_scale": np.full(1, 0.25 * (i + 1), np.float32) for i in (0, 1) for name in "kv"
    }
    config = {**tiny.TARGET, "quantization_config": files.compressed("float-quantized", type="float")}
    files.write_folder(folder, config, load_file(folder / "model.safetensors"), files.float8("channel"), more=scales)
    with_drafts = jaxspec.load(folder, assistant, kv_dtype="fp8", max_slots=2, max_len=48, progress=False)
    assert with_drafts.target.layers[0].mlp.down_proj.weight.kind == "fp8"
    asked = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    [text] = with_drafts.generate([[5, 6, 7]], SamplingParams(**asked))
    pools = with_drafts._runner.programs.state.cache.layers
    assert [layer.scales.tolist() for layer in pools] == [[0.25, 0.25], [0.5, 0.5]]
    alone = jaxspec.load(folder, kv_dtype="fp8", max_slots=2, max_len=48, progress=False)
    assert alone.generate([[5, 6, 7]], SamplingParams(**asked))[0].token_ids == text.token_ids
