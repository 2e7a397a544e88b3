"""Weights, cache and results on a mesh of fake devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxspec
from jaxspec import decode, gemma4, sharding
from jaxspec.config import Gemma4Config
from tests import real_configs

GREEDY = jaxspec.SamplingParams(max_tokens=40, temperature=0.0)
PROMPTS = ["def add(a, b):", "import os\n\n\ndef walk(top):\n    "]


def test_tokens_on_two_devices_equal_those_on_one():
    one = jaxspec.load("pocket", "pocket-mtp", max_slots=2, max_len=128, progress=False)
    two = jaxspec.load("pocket", "pocket-mtp", max_slots=2, max_len=128, progress=False, mesh=sharding.mesh(tensor=2))
    layer = two.target.layers[0]
    assert layer.self_attn.qkv_proj.weight.sharding.spec == PartitionSpec("tensor", None, None, None)
    assert layer.mlp.down_proj.weight.sharding.spec == PartitionSpec(None, "tensor")
    # The one KV head of a full layer cannot be split, and lies on both.
    assert two.target.layers[3].self_attn.qkv_proj.weight.sharding.spec == PartitionSpec(None, None, None, None)
    for params in (GREEDY, dataclasses.replace(GREEDY, temperature=0.9, seed=3)):
        expected = [c.token_ids for c in one.generate(PROMPTS, params)]
        assert [c.token_ids for c in two.generate(PROMPTS, params)] == expected


def test_every_kind_of_weight_is_spread():
    mesh = sharding.mesh(tensor=2)
    config = Gemma4Config.from_hf(real_configs.TARGETS["26B-A4B"])
    tree = sharding.shard_tree(gemma4.abstract(config), mesh)
    whole = sum(leaf.size for leaf in jax.tree.leaves(tree))
    local = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in jax.tree.leaves(tree))
    # What stays whole on each device is norms and routers: far less than a percent.
    assert local < 0.501 * whole


def test_state_keeps_its_sharding_through_a_step():
    mesh = sharding.mesh(tensor=2)
    config = Gemma4Config.from_hf(real_configs.TARGETS["31B"])
    state = jax.eval_shape(
        functools.partial(decode.init_state, gemma4.abstract(config), jaxspec.drafters.NoDraft(), slots=2, max_len=4096, num_draft_tokens=4)
    )
    shardings = sharding.state_shardings(state, mesh)
    pools = shardings.cache.layers[0].k
    assert pools.spec == PartitionSpec(None, None, "tensor", None)
    assert pools.shard_shape(state.cache.layers[0].k.shape)[2] == 8
    assert shardings.tokens.is_fully_replicated


def test_meshes_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match="data=1 times tensor=64 devices was asked for; found 8"):
        sharding.mesh(tensor=64)
    with pytest.raises(ValueError, match="data axis of 2"):
        jaxspec.load("pocket", mesh=sharding.mesh(data=2, tensor=2), progress=False)
