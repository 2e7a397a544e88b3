"""Quantised weights on meshes of fake devices: where their parts lie, and that texts are those of one device."""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxspec import sharding
from jaxspec.bench.random_weights import random_weights
from jaxspec.checkpoint.quantisation import Scheme, with_packed
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.sharding import kv_heads
from pallas_kernels.packed import pack, unpack

pytestmark = pytest.mark.usefixtures("unoptimised")
# Widths of whole blocks, of which there are two along the inner width; a KV head of three query heads, which two devices share.
TEXT = {**meshes.TEXT, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 3, "head_dim": 64, "global_head_dim": 64}
TEXT |= {"num_key_value_heads": 1, "num_global_key_value_heads": 1}
INT4, INT8 = Scheme("int4", 32, scale_dtype="float32"), Scheme("int8", scale_dtype="float32")


def abstract(scheme, **changes):
    return with_packed(gemma4.abstract(Gemma4Config.from_hf({**TEXT, **changes}), jnp.float32), lambda name: scheme)


@pytest.fixture
def quantised(monkeypatch):
    """Makes a quantised target one of the members of `meshes`."""
    made = {}

    def add(scheme):
        name = f"{scheme.kind} {scheme.group}"
        made[name] = random_weights(abstract(scheme), std=0.3)
        return name

    monkeypatch.setattr(meshes, "target", lambda member: made[member])
    monkeypatch.setattr(meshes, "texts", meshes.texts.__wrapped__)
    monkeypatch.setattr(meshes, "drafter", lambda member, kind: meshes.NoDraft())
    return add


@pytest.mark.parametrize(("data", "scheme"), [pytest.param(1, INT4, marks=pytest.mark.slow), (2, INT8)])
def test_tokens_are_those_of_one_device(quantised, data, scheme):
    member = quantised(scheme)
    placed = meshes.Placed(member, "none", sharding.mesh(data=data, tensor=2))
    tokens, _ = placed.texts(0)
    np.testing.assert_array_equal(tokens, meshes.texts(member))
    layer = placed.target.layers[0]
    for linear, shape in (
        (layer.self_attn.qkv_proj, (1, 4, 64, 64)),
        (layer.self_attn.o_proj, (64, 1, 2, 64)),
        (layer.mlp.down_proj, (64, 64)),
    ):
        local = jax.tree.map(lambda x: x.addressable_data(0), linear.weight)
        assert local.shape == shape


def test_fields_lie_as_their_matrix():
    """Scales of all inputs lie whole; an inner width of blocks that the mesh does not divide, or that are not full, lies whole too, of
    both matrices that have it."""
    mesh = sharding.mesh(tensor=2)

    def mlp(scheme, **changes):
        placed = sharding.shard_tree(abstract(scheme, **changes), mesh)
        return placed.layers[0].mlp, sharding.spread(placed, mesh).layers[0].mlp.down_proj.sum_over

    fine, _ = mlp(INT4)
    assert fine.down_proj.weight.words.sharding.spec == fine.down_proj.weight.scale.sharding.spec == PartitionSpec(None, "tensor")
    assert fine.gate_up_proj.weight.scale.sharding.spec == PartitionSpec(None, "tensor", None)
    coarse, summed = mlp(INT8)
    assert coarse.down_proj.weight.words.sharding.spec == PartitionSpec(None, "tensor") and summed == "tensor"
    assert coarse.down_proj.weight.scale.sharding.spec == PartitionSpec(None, None)
    for width in (192, 96):
        whole, summed = mlp(INT8, intermediate_size=width)
        fields = jax.tree.leaves((whole.gate_up_proj.weight, whole.down_proj.weight))
        assert summed is None and all(axis is None for field in fields for axis in field.sharding.spec)


def test_a_mesh_that_would_cut_one_matrix_of_two_is_refused():
    tree = gemma4.abstract(Gemma4Config.from_hf({**TEXT, "intermediate_size": 192}), jnp.float32)
    tree = with_packed(tree, lambda name: INT8 if "down_proj" in name else None)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj\.weight is quantised and its blocks cannot be spread .*gate_up_proj"):
        sharding.shard_tree(tree, sharding.mesh(tensor=2))


@pytest.mark.parametrize(("zeros", "affine"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_heads_that_make_up_the_number_are_zeros(kind, group, zeros, affine):
    """Also where a code of 0 stands for another number."""
    rng = np.random.default_rng(0)
    shape = (64, 1, 3, 64)
    codes = jnp.asarray(rng.integers(0, 16, shape), jnp.uint8)
    scales = (64, 1, 1, 1) if group is None else (*shape[:-1], 2)
    scale = jnp.asarray(rng.uniform(0.5, 1, scales), jnp.float32)
    zero = jnp.asarray(rng.integers(0, 16, scales), jnp.float32) if zeros else None
    matrix = pack(codes, scale, zero, kind=kind, over=3, group=group, affine=affine)
    dealt = unpack(kv_heads._deal(matrix, 1, 3, 2, 2))
    np.testing.assert_array_equal(dealt, kv_heads._deal(unpack(matrix), 1, 3, 2, 2))
    assert not dealt[:, 1, 1].any()
