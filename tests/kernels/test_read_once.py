"""Copies of what a step reads once say so. What they copy is tested with each kernel."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from lowering import for_cuda

from pallas_kernels import device, read_once
from pallas_kernels.linear import gated
from pallas_kernels.paged_attention import paged_attention

COPY = """
@$0 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [$1], [$2, {$4,$5}], [$3];
"""
TEXT = jax.__version_info__ >= (0, 12)
ONCE = (
    "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; @$0 cp.async.bulk.tensor.2d.shared::cta.global"
    ".mbarrier::complete_tx::bytes.L2::cache_hint [$1], [$2, {$4,$5}], [$3], policy; }"
)


def test_the_last_copy_alone_gets_the_policy():
    with ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            for text in ("nothing;", COPY, COPY, "@$0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$2, {$3,$4}], [$1];"):
                llvm.inline_asm(None, [], text, "", has_side_effects=True)
            read_once._leave_first(None)
        texts = [ir.StringAttr(op.attributes["asm_string"]).value for op in module.body.operations]
    assert texts[1:3] == [COPY, ONCE] and not any("policy" in text for text in (texts[0], texts[3]))


@pytest.mark.parametrize("once", [True, False])
def test_weights_and_keys_of_one_layer_leave_the_cache_first(once):
    """Where JAX writes a copy as text. Before, it is lowered as it was."""

    def hints(function, *shapes):
        jax.clear_caches()
        with device.described_as(device.Described("NVIDIA H200", "9.0")):
            return for_cuda(jax.jit(function), *shapes).count("L2::cache_hint")

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    int32 = functools.partial(array, dtype=jnp.int32)
    if once:
        assert bool(hints(gated, array(32, 1536), array(2, 6144, 1536))) == TEXT
    pool = array(64, 64, 1, 256)
    attend = functools.partial(paged_attention, window=512, read_once=once, implementation="mosaic")
    found = hints(attend, array(8, 4, 1, 8, 256), int32(8, 4), (pool, pool), int32(8, 9), int32(8))
    assert bool(found) == (once and TEXT)
