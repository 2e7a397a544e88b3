"""The drafters of the released 31B as their rounds are lowered for CUDA: attention over their own cache is the kernel's."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from lowering import for_cuda

from jaxspec import decode
from jaxspec import released as shapes
from jaxspec.drafters import dflash
from jaxspec.model import gemma4
from jaxspec.model.config import FULL, SLIDING, Gemma4Config

LAYERS = 6  # of the target's 60; its other fields, and the drafters, are those of the released models
TEXT = {**shapes.TARGETS["31b"]["text_config"], "num_hidden_layers": LAYERS, "layer_types": [SLIDING] * 5 + [FULL]}


def drafter(name, target):
    if name != "dflash":
        return shapes.abstract_drafter(name, "31b", target, jnp.bfloat16)
    taps = {"mask_token_id": 4, "target_layer_ids": range(LAYERS)}
    return dflash.abstract(
        dflash.DFlashConfig.from_hf({**shapes.drafter_config("dflash", "31b"), "num_target_layers": LAYERS, "dflash_config": taps}, target)
    )


@functools.cache
def kernels(name, k, draft_attention):
    """How many calls of attention the program of a round has, and whether all of its state is updated in place. Equal layers share one."""
    config = Gemma4Config.from_hf(TEXT)
    weights = gemma4.abstract(config), drafter(name, config)
    state = jax.eval_shape(functools.partial(decode.init_state, slots=2, max_len=1024, num_draft_tokens=k), *weights)
    step = jax.jit(decode.spec_step, static_argnames="round", donate_argnums=2)
    round = decode.Round(k, attention="triton", draft_attention=draft_attention)
    text = for_cuda(step, *weights, state, jax.ShapeDtypeStruct((1,), jnp.int32), round=round)
    in_place = text.count("tf.aliasing_output") == len(jax.tree.leaves(state)) - 1  # all but `starved`
    return len(re.findall(r'name = "paged_attention"', text)), in_place


@pytest.mark.parametrize(("name", "k", "own"), [("dflash", 15, 2), ("eagle3", 5, 5)])
def test_attention_over_an_own_cache_is_the_kernels(name, k, own):
    """A block's sliding layers, causal within it, and its full layer, which sees both ways; EAGLE-3's passes of 1 row, each with one more
    row that is not stored, and its pass over the rows of a round. The target has two kinds of layers."""
    assert kernels(name, k, "xla") == (2, True)
    assert kernels(name, k, "triton") == (2 + own, True)
