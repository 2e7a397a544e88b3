"""Meshes, where weights lie on them, and an LLM on a mesh of fake devices."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import real_configs
import tiny
from jax.sharding import PartitionSpec
from locks import free

import jaxspec
from jaxspec import cli, decode, planning, sharding
from jaxspec.engine import memory
from jaxspec.engine.device_lock import DeviceLock
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.sharding import kv_heads
from pallas_kernels import all_reduce

pytestmark = pytest.mark.usefixtures("quick_to_compile")

GREEDY = jaxspec.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, seed=3)
PROMPTS = ["def add(a, b):", "import os\n\n\ndef walk(top):\n    ", "for i in", "x = {"]


@pytest.fixture(scope="module")
def load(folders):
    def load(**settings):
        chosen = {"num_draft_tokens": 2, "max_slots": 2, "max_len": 60, "progress": False, "seed": 5}
        return jaxspec.load(*folders, **{**chosen, **settings})

    return load


@pytest.fixture(scope="module")
def texts(load):
    """Of one device."""
    llm = load()
    return [[c.token_ids for c in llm.generate(PROMPTS, params)] for params in (GREEDY, SAMPLED)]


@pytest.mark.slow  # tests/engine/test_calls.py has calls over two shards, tests/sharding/test_mesh_tokens.py tokens
def test_data_shards_take_requests_side_by_side(load, texts, monkeypatch):
    """Each has slots, pages and programs of its own; streams, log-probabilities and calls that take turns work across them. While they
    compute, and while what adds up is tried, others that share devices wait."""
    tables, tried = all_reduce.mailbox_tables, []
    monkeypatch.setattr(all_reduce, "mailbox_tables", lambda devices: tried.append(free(DeviceLock(jax.devices()[3:5]))) or tables(devices))
    llm = load(mesh=jaxspec.mesh(data=2, tensor=2), max_slots=3)
    assert tried and not any(tried)
    assert llm.max_slots == 4 and [r.settings.max_slots for r in llm._shards.runners] == [2, 2]
    attn = llm.target.layers[0].self_attn
    # The one KV head lies on both devices of a shard, with one of its two query heads each.
    assert (attn.spec.num_kv_heads, attn.spec.group) == (2, 1) and attn.qkv_proj.weight.sharding.spec[0] == "tensor"
    assert llm.target.layers[0].mlp.down_proj.weight.sharding.spec == PartitionSpec(None, "tensor")
    devices = [r.target.norm.weight.sharding.device_set for r in llm._shards.runners]
    assert len(devices[0] | devices[1]) == 4 and not devices[0] & devices[1]
    stream = llm.stream(PROMPTS[1], SAMPLED)
    first = next(stream)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == texts[0]
    assert {r.free_slots for r in llm._shards.runners} == {1, 2}  # the stream's slot, and no other
    assert [*first.token_ids, *(i for chunk in stream for i in chunk.token_ids)] == texts[1][1]
    held = []

    def asked():
        for prompt in PROMPTS:
            yield prompt, GREEDY
            held.append((free(DeviceLock(jax.devices()[3:5])), free(DeviceLock(jax.devices()[4:6]))))

    done = {c.prompt_index: c for c in llm.as_completed(asked())}
    assert held == [(False, True)] * 4
    assert [done[i].token_ids for i in range(4)] == texts[0]
    assert all(r.free_slots == 2 for r in llm._shards.runners)
    (scored,) = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=3, prompt_logprobs=1))
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    with pytest.raises(ValueError, match="prompt"):
        list(llm.as_completed(["x = {", ""]))
    assert all(r.free_slots == 2 for r in llm._shards.runners)


@pytest.mark.slow  # tests/bench/test_bench.py has a bench of one device, and the test above a mesh
def test_a_bench_over_a_mesh(folders, tmp_path):
    """Its batch is that of all data shards, its bytes are a device's, and a profile counts one device's kernels."""
    asked = ["--drafter", "ngram", "--k", "1", "--context", "4", "--tokens", "4", "--repeats", "1", "--dtype", "float32"]
    files = ["--profile", str(tmp_path), "--json", str(tmp_path / "report.json")]
    assert cli.main(["bench", "--config", str(folders[0]), *asked, "--batch", "4", "--mesh", "data=2,tensor=2", *files]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    [step] = report["decode"]
    assert report["mesh"] == {"data": 2, "tensor": 2} and step["batch"] == 4
    assert step["tokens_per_s"] == pytest.approx(4e3 * step["acceptance_length"] / step["step_ms"]["median"])
    assert step["bytes"]["target"] < 0.6 * report["target_bytes"]
    sums = {kernel["operation"]: kernel["count"] for kernel in step["kernels"] if kernel["operation"].startswith("verify/embed/psum")}
    assert sums == {"verify/embed/psum f32[2,2,32]": 1.0}
    assert (
        cli.main(["bench", "--config", str(folders[0]), *asked, "--batch", "1", "--mesh", "data=2,tensor=2"]) == 2
    )  # of one sequence, which two shards cannot share


def test_every_kind_of_weight_is_spread():
    mesh = sharding.mesh(tensor=2)
    config = Gemma4Config.from_hf(real_configs.TARGETS["26B-A4B"])
    tree = sharding.shard_tree(gemma4.abstract(config), mesh)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    # What stays whole on each device is norms and routers: far less than a percent.
    assert sharding.bytes_per_device(tree) < 0.501 * whole


@pytest.mark.parametrize(("tensor", "sliding", "full"), [(2, 16, 4), (8, 16, 8)])
def test_kv_heads_that_a_mesh_does_not_divide_are_repeated(tensor, sliding, full):
    """The 31B's 16 and 4: over 8 devices each of the 4 lies on two, with four of its eight query heads on either."""
    mesh = sharding.mesh(data=8 // tensor, tensor=tensor)
    target = sharding.spread(sharding.shard_tree(gemma4.abstract(Gemma4Config.from_hf(real_configs.TARGETS["31B"])), mesh), mesh)
    init = functools.partial(decode.init_state, target, jaxspec.drafters.NoDraft(), slots=2, max_len=4096, num_draft_tokens=4)
    layout = sharding.Layout.of(mesh, jaxspec.drafters.NoDraft(), init)
    for i, heads in ((0, sliding), (5, full)):
        spec, pools = target.config.layers[i], layout.shapes.cache.layers[i].k
        assert (spec.num_kv_heads, spec.num_heads) == (heads, 32) and target.layers[i].self_attn.spec == spec
        assert pools.sharding.spec == PartitionSpec("data", None, "tensor", None)
        assert pools.sharding.shard_shape(pools.shape)[2] == heads / tensor
        assert target.layers[i].self_attn.qkv_proj.weight.sharding.spec == PartitionSpec("tensor", None, None, None)
    assert layout.shapes.tokens.shape == (2 * 8 // tensor, 4096) and layout.shapes.starved.shape == (8 // tensor,)


def test_query_heads_are_dealt_out_to_copies():
    """A KV head of three query heads on two devices: two heads and one, and a head of zeros."""
    weight = jnp.arange(1, 5, dtype=jnp.float32).reshape(1, 4, 1)  # three queries and a key
    np.testing.assert_array_equal(kv_heads._deal(weight, 0, 3, 2, 2)[..., 0], [[1, 2, 4], [3, 0, 4]])
    outputs = jnp.arange(1, 4, dtype=jnp.float32).reshape(1, 1, 3)
    np.testing.assert_array_equal(kv_heads._deal(outputs, 1, 3, 2, 2), [[[1, 2], [3, 0]]])


def test_meshes_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match="data=1 times tensor=64 devices was asked for; found 8"):
        sharding.mesh(tensor=64)
    with pytest.raises(ValueError, match="^tensor is 2 and mesh is given too; expected one of them"):
        jaxspec.load("pocket", mesh=sharding.mesh(data=2), tensor=2, progress=False)
    for axes in (("x", "data"), ("tensor", "data")):
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), axes)
        with pytest.raises(ValueError, match=rf"mesh has axes \('{axes[0]}', 'data'\), expected 'data' and 'tensor' in this order"):
            jaxspec.load("pocket", mesh=mesh, progress=False)
    for size, told in ((2.0, "2.0 of type float"), ("2", "'2' of type str"), (True, "True of type bool")):
        with pytest.raises(TypeError, match=f"^tensor is {told}, expected an integer"):
            sharding.mesh(tensor=size)
    with pytest.raises(ValueError, match="^data is 0, expected at least 1"):
        sharding.mesh(data=0)
    twice = jax.sharding.Mesh(np.asarray(jax.devices()[:1] * 2).reshape(1, 2), ("data", "tensor"))
    with pytest.raises(ValueError, match="^the mesh of 2 devices names one of them twice"):
        jaxspec.load("pocket", mesh=twice, progress=False)
    for text in ("tensor", "tensor=x", "pipeline=2", "tensor=2,", "tensor=2,tensor=4", "tensor=\u00b2"):
        with pytest.raises(ValueError, match=f"^the mesh is '{text}'; expected 'data=N', 'tensor=N' or both"):
            sharding.mesh_of(text)
    assert dict(sharding.mesh_of("data=2, tensor=4").shape) == {"data": 2, "tensor": 4}


def test_a_mesh_that_jax_makes_is_one_of_ours():
    """Whatever the type of its axes: some of our programs leave it to the compiler how intermediate results lie."""
    made = jax.make_mesh((2, 4), ("data", "tensor"))
    assert sharding.placement_of(made).mesh == jaxspec.mesh(data=2, tensor=4)


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2, "tensor": 2}])
def test_snapshots_of_prompts_are_as_many_as_planned(folders, load, axes, monkeypatch):
    placement = sharding.placement_of(jaxspec.mesh(**axes))
    sizes, _ = planning.plan(
        planning.pair_of(*folders, dtype=lambda _: jnp.float32),
        None,
        placement=placement,
        max_len=60,
        num_draft_tokens=2,
        kernels=False,
        default_slots=3,
    )
    monkeypatch.setattr(memory, "PREFIX_BYTES", 2 * sizes.slot)
    runner = load(mesh=jaxspec.mesh(**axes), max_slots=3 * placement.shards)._runner
    assert runner.total_slots == 3 + 2


def test_a_vocabulary_that_a_mesh_does_not_divide_lies_on_every_device():
    mesh = sharding.mesh(tensor=2)
    config = Gemma4Config.from_hf({**tiny.TEXT, "vocab_size": 97, "vocab_size_per_layer_input": 98})
    target = sharding.spread(sharding.shard_tree(gemma4.abstract(config), mesh), mesh)
    assert target.embed_tokens.axis is None and target.embed_tokens.weight.sharding.spec == PartitionSpec(None, None)
    assert target.embed_tokens_per_layer.axis == "tensor"
