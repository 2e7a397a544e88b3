"""A target that a fine-tune gave more tokens than its drafter has: texts are the target's, and the drafts that can be right are."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import checkpoint, cli
from jaxspec.collectives import TENSOR, Shard, over_vocabulary
from jaxspec.sampling.choice import Sampling, choose

SIZE, MORE = 4096, 64
PROMPTS = ["def f(", "class Stack:\n    def", "import os\nimport"]
SETTINGS = {"max_len": 96, "max_slots": 3, "progress": False}
GREEDY = jaxspec.SamplingParams(max_tokens=24, temperature=0)
pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(scope="module")
def often():
    """Two ids that the target writes often."""
    with jaxspec.load("pocket", **SETTINGS) as llm:
        ids = np.concatenate([made.token_ids for made in llm.generate(PROMPTS, GREEDY)])
    return np.argsort(-np.bincount(ids, minlength=SIZE), kind="stable")[2:4]


@pytest.fixture(scope="module")
def enlarged(often, tmp_path_factory):
    """pocket with 64 tokens more, of which two come where it wrote those two."""
    folder, source = tmp_path_factory.mktemp("enlarged"), checkpoint.resolve("pocket")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        assert config[name] == SIZE
        config[name] += MORE
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for key in [key for key in tensors if "embed_tokens" in key and tensors[key].shape[0] == SIZE]:
        new = np.zeros((MORE, tensors[key].shape[1]), tensors[key].dtype)
        new[: len(often)] = tensors[key][often] * np.asarray(1.1 if key.endswith("embed_tokens.weight") else 1, new.dtype)
        tensors[key] = np.concatenate([tensors[key], new])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def alone(enlarged):
    with jaxspec.load(enlarged, **SETTINGS) as llm:
        yield llm


# Params of the prompts of a call.
PARAMS = {
    "plain": [GREEDY, jaxspec.SamplingParams(max_tokens=24, temperature=0.9, seed=3), GREEDY],
    "mixed": [
        jaxspec.SamplingParams(max_tokens=24, temperature=0.8, seed=4, top_k=40, top_p=0.95, presence_penalty=0.4, logit_bias={SIZE: 2.0}),
        jaxspec.SamplingParams(max_tokens=24, temperature=0.8, seed=5, structured_outputs={"regex": "[a-z ]{8,20}"}),
        GREEDY,
    ],
}


def tokens(llm, params):
    return [made.token_ids for made in llm.generate(PROMPTS, params)]


CASES = [("mtp", "plain")]
SLOW = [
    pytest.param(drafter, params, marks=pytest.mark.slow)
    for drafter in ("mtp", "draft", "dflash", "dflash2", "eagle3")
    for params in ("plain", "mixed")
    if (drafter, params) not in CASES
]


@pytest.mark.parametrize(("drafter", "params"), [*CASES, *SLOW])
def test_texts_are_the_targets(enlarged, alone, drafter, params):
    with jaxspec.load(enlarged, drafter=f"pocket-{drafter}", **SETTINGS) as llm:
        found = tokens(llm, PARAMS[params])
        assert found == tokens(alone, PARAMS[params])
        assert max(map(max, found)) >= SIZE
        assert llm.stats.acceptance_length > 1.3


@pytest.mark.slow  # the paths are those of drafters with listed candidates and of models of one vocabulary
@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("drafter", ["pocket-mtp", "pocket-draft"])
def test_rules_that_weigh_drafts(enlarged, alone, drafter, rule):
    with jaxspec.load(enlarged, drafter=drafter, accept=rule, **SETTINGS) as llm:
        assert tokens(llm, GREEDY) == tokens(alone, GREEDY)
        assert all(made.finish_reason == "length" for made in llm.generate(PROMPTS, PARAMS["plain"]))


def test_such_a_drafter_does_not_learn(enlarged):
    with pytest.raises(ValueError, match="the drafter has fewer tokens than the target, so it drafts for it but cannot learn from it"):
        jaxspec.load(enlarged, drafter="pocket-mtp", learn=0.1, **SETTINGS)


def test_how_many_tokens_it_can_guess_is_told(enlarged, capsys):
    for drafter in ("pocket-mtp", "pocket-draft"):
        assert cli.main(["info", str(enlarged), "--drafter", drafter]) == 0
        assert "guesses 4,096 of the target's 4,160 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("drafter", ["pocket-dspark", "pocket-modules"])
def test_those_with_logits_of_their_own_are_refused(enlarged, drafter):
    with pytest.raises(ValueError, match="vocab_size 4096, this target has 4160"):
        jaxspec.load(enlarged, drafter=drafter, **SETTINGS)


def test_logits_are_widened_on_every_device():
    mesh = Mesh(np.asarray(jax.devices()[:4]), (TENSOR,))
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 16)), jnp.float32)
    wide = jnp.pad(logits, ((0, 0), (0, 0), (0, 5)), constant_values=-jnp.inf)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(None, None, TENSOR), out_specs=PartitionSpec(), check_vma=False)
    def widened(logits):
        return over_vocabulary(logits, Shard(TENSOR, 4), 21)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec(None, None, TENSOR), out_specs=PartitionSpec(None, None, TENSOR), check_vma=False
    )
    def same(logits):
        return over_vocabulary(logits, Shard(TENSOR, 4), 16)

    spread = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, None, TENSOR)))
    np.testing.assert_array_equal(widened(spread), wide)
    np.testing.assert_array_equal(same(spread), logits)
    np.testing.assert_array_equal(over_vocabulary(logits, None, 21), wide)
    sampling = Sampling(jnp.zeros((2, 2), jnp.uint32), jnp.ones(2, jnp.float32))
    positions = jnp.zeros((2, 3), jnp.int32)
    np.testing.assert_array_equal(choose(wide, positions, sampling), choose(logits, positions, sampling))
