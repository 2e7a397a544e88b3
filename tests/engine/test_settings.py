"""The settings of an LLM, and where it lies."""

import jax
import jax.numpy as jnp
import pytest
import tiny

from jaxspec import decode, sharding
from jaxspec.decode.accept import synthetic
from jaxspec.drafters.base import NoDraft
from jaxspec.engine.settings import Settings
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.sharding.placement import abstract_placement_of, placement_of


def test_a_data_shard_has_its_part_of_the_slots_and_as_many_pages_as_these_can_fill():
    settings = Settings(num_draft_tokens=2, max_slots=3, max_len=100, page_size=16)
    shard = settings.of_shard(2)
    assert (shard.max_slots, shard.kv_pages) == (2, 2 * 7) and settings.of_shard(1).kv_pages == 3 * 7
    fewer = Settings(num_draft_tokens=2, max_slots=3, max_len=100, page_size=16, kv_pages=9)
    assert fewer.of_shard(2).kv_pages == 9
    assert [settings.pages_for(rows) for rows in (0, 1, 16, 17, 100, 103)] == [0, 1, 1, 2, 7, 7]  # rows behind max_len are not written


def test_a_rule_that_does_not_fit_the_number_of_drafts_is_refused():
    with pytest.raises(ValueError, match="synthetic acceptance has 1 rates for 2 drafts"):
        Settings(num_draft_tokens=2, max_slots=1, max_len=8, accept=synthetic([0.5]))


def test_devices_that_exchange_sums_are_named():
    """Two LLMs on the same devices take turns only if their programs can wait for each other there."""
    devices = jax.devices()
    assert placement_of(None).summing_devices == placement_of(sharding.mesh(data=2)).summing_devices == ()
    assert placement_of(sharding.mesh(data=2, tensor=2)).summing_devices == tuple(devices[:4])


@pytest.mark.parametrize(("text", "size", "shards"), [(None, 1, 1), ("tensor=2", 2, 1), ("data=2,tensor=4", 8, 2)])
def test_a_state_has_the_slots_of_all_data_shards(text, size, shards):
    placement = abstract_placement_of(text)
    assert (placement.size, placement.shards) == (size, shards)
    target = placement.spread(placement.place(gemma4.abstract(Gemma4Config.from_hf(tiny.TEXT), jnp.float32)))
    layout = placement.layout(NoDraft(), lambda: decode.init_state(target, NoDraft(), slots=3, max_len=20, num_draft_tokens=0))
    assert layout.shapes.tokens.shape == (3 * shards, 20)
