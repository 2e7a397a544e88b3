"""A kind of drafter is one file: loading, meshes, benchmarks and training need nothing but `register` to serve the one in toy.py."""

import dataclasses

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import tiny
import toy
from flax import struct
from jax.sharding import PartitionSpec

import jaxspec
from jaxspec import drafters, sharding
from jaxspec.bench import roofline, workload
from jaxspec.drafters import registry
from jaxspec.drafters.base import Target
from jaxspec.drafters.kind import kind_without_weights
from jaxspec.drafters.ngram import NGram
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.sampling.choice import Sampling
from jaxspec.train import distil, kinds
from jaxspec.train.loop import read_metrics

pytestmark = pytest.mark.usefixtures("unoptimised", "registered")
CONFIG = Gemma4Config.from_hf(tiny.TARGET)


@pytest.fixture(scope="module")
def registered():
    """No other module's tests know the toy."""
    tables = (registry.KINDS, registry.REGISTRY)
    before = [dict(table) for table in tables]
    drafters.register(toy.KIND)
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with random weights, for the tiny target."""
    path, config = tmp_path_factory.mktemp("toy"), toy.config_for(CONFIG)
    weights = tiny.random_weights(toy.from_checkpoint(None, config, CONFIG, jnp.float32), 1)
    drafters.save_drafter(path, weights, config)
    return path


def test_what_is_saved_is_loaded(folder):
    found = drafters.load_drafter(folder, CONFIG, jnp.float32, progress=False)
    weights = tiny.random_weights(toy.from_checkpoint(None, toy.config_for(CONFIG), CONFIG, jnp.float32), 1)
    assert isinstance(found, toy.Toy) and jax.tree.structure(found) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, found, weights)
    other = dataclasses.replace(CONFIG, hidden_size=48)
    with pytest.raises(ValueError, match="cannot be used with this target: the toy has hidden_size 32, this target has 48"):
        drafters.abstract_drafter(folder, other, jnp.float32)


def test_a_name_is_taken_once():
    drafters.register(toy.KIND)  # the same kind
    for changes in ({"name": "other"}, {"name": "mtp", "config_names": ()}, {"made": NGram}):
        with pytest.raises(ValueError, match="has the name '(toy|mtp)', which (Toy|Gemma4MTP) has"):
            drafters.register(dataclasses.replace(toy.KIND, **changes))
    assert "other" not in registry.KINDS


def test_a_kind_that_is_written_again_takes_the_place_of_the_one_before():
    """As when a notebook's cell is run twice, which makes a class of the same name."""
    made = type("Toy", (toy.Toy,), {"__module__": toy.Toy.__module__, "__qualname__": toy.Toy.__qualname__})
    again = dataclasses.replace(toy.KIND, made=made, config_names=("toy2",))
    drafters.register(again)
    assert registry.KINDS["toy"] is again and registry.REGISTRY["toy2"] is again and "toy" not in registry.REGISTRY
    drafters.register(toy.KIND)
    assert registry.REGISTRY["toy"] is toy.KIND and "toy2" not in registry.REGISTRY


@struct.dataclass
class Parrot(NGram):
    """A kind without weights."""

    longest: int = struct.field(pytree_node=False, default=1)


def test_a_kind_without_weights_is_loaded_by_its_name(tmp_path):
    drafters.register(kind_without_weights("parrot", Parrot))
    settings = {"max_slots": 1, "max_len": 32, "progress": False}
    assert jaxspec.load(tiny.tiny_target(tmp_path), "parrot", **settings).drafter == Parrot()


def drafted(target, drafter, state, slots):
    """The state, and drafts for every slot behind an anchor of its own."""
    view = Target(target, state.cache, slots, slots + 7, slots)
    drafts, _ = drafter.draft(state.drafter, view, Sampling(state.seed, state.temperature, shard=target.shard), 3)
    return state, drafts.tokens


@pytest.mark.slow
def test_tokens_and_guesses_on_two_devices_are_those_of_one(monkeypatch):
    """Tokens are those without drafts. Wrong guesses would change none of them, so they are compared by themselves."""
    target = meshes.target("31B").config
    weights = tiny.random_weights(toy.from_checkpoint(None, toy.config_for(target), target, jnp.float32), 2)
    known = meshes.drafter
    monkeypatch.setattr(meshes, "drafter", lambda member, kind: weights if kind == "toy" else known(member, kind))
    placed = meshes.Placed("31B", "toy", sharding.mesh(tensor=2))
    assert placed.drafter.embed_tokens.axis == placed.drafter.mix.gather_over == "tensor"
    assert all(leaf.sharding.shard_shape(leaf.shape)[0] == leaf.shape[0] // 2 for leaf in jax.tree.leaves(placed.drafter))
    tokens, state = placed.texts(2)
    np.testing.assert_array_equal(tokens, meshes.texts("31B"))
    slots = np.arange(meshes.SLOTS, dtype=np.int32)
    _, guesses = jax.jit(placed.layout.on(drafted, PartitionSpec("data")))(placed.target, placed.drafter, state, slots)
    _, wanted = jax.jit(drafted)(meshes.target("31B"), weights, jax.tree.map(np.asarray, state), slots)
    np.testing.assert_array_equal(guesses, wanted)
    assert len(np.unique(guesses)) > 8


@pytest.mark.parametrize("named", [True, False])
def test_a_bench_knows_its_shape_and_bytes(named, folder, tmp_path):
    """By its name, and by a folder with a config.json. All its weights are read for each draft."""
    target = tiny.tiny_target(tmp_path / "target")
    drafter = "toy" if named else str(folder)
    asked = {"num_draft_tokens": 2, "batches": (2,), "context": 8, "tokens": 8, "mesh": sharding.mesh(tensor=2)}
    plan = workload.plan_bench(str(target), drafter, dtype="float32", **asked)
    assert isinstance(plan.drafter_tree, toy.Toy)
    assert sharding.bytes_per_device(plan.placed()[1]) == sharding.nbytes(plan.drafter_tree) / 2
    read = roofline.step_bytes(plan.target_tree, plan.drafter_tree, batch=2, num_draft_tokens=2, context=8)
    assert (read.drafter, read.drafter_kv) == (2 * 4 * (2 * tiny.VOCAB * 32 + 32 * 32), 0)


@pytest.mark.slow  # tests/engine/test_learn.py has an LLM that learns
def test_it_learns_and_load_spreads_it(tmp_path):
    target = tiny.tiny_target(tmp_path / "target", hidden_size_per_layer_input=0)
    data = tmp_path / "data.txt"
    data.write_text("def f(x):\n    return x + 1\n" * 40)
    run = {"steps": 40, "every": 40, "batch": 4, "length": 16, "peak": 3e-2, "dtype": "float32", "save_every": 0, "progress": False}
    out = distil(target, "toy", data=data, held_out=data, out=tmp_path / "toy", num_draft_tokens=2, **run)
    first, last = read_metrics(out)
    assert last["held_out_loss"] < first["held_out_loss"] - 0.8
    with pytest.raises(ValueError, match="available: .*'draft-model', 'toy'"):
        kinds.kind_of("mtp5")

    llm = jaxspec.load(target, out, tensor=2, max_slots=1, max_len=32, progress=False)
    assert isinstance(llm.drafter, toy.Toy) and llm.num_draft_tokens == 3
    assert llm.drafter.lm_head.weight.sharding.shard_shape((tiny.VOCAB, 32)) == (tiny.VOCAB // 2, 32)
