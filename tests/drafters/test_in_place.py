"""Pages are overwritten in place: no program copies a pool, which holds the pages of every slot."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import rounds

from jaxspec import decode
from jaxspec.drafters.base import NoDraft
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.paged_kv import LayerKV

K = 3
IDS = np.arange(2, dtype=np.int32)
# More rows than a ring has places for beside the window, and fewer.
PROGRAMS = {
    "prefill": (functools.partial(decode.prefill, chunk=9), IDS),
    "short prefill": (functools.partial(decode.prefill, chunk=2), IDS),
    "decode": (functools.partial(decode.decode_loop, round=decode.Round(K)), IDS, np.int32(4)),
}


def copies(target, drafter, program, *args):
    """The copies of pools in a compiled program, by shape."""
    sizes = {"slots": 7, "max_len": 43, "num_draft_tokens": K, "page_size": rounds.PAGE, "max_stop_ids": 1}
    state = jax.eval_shape(functools.partial(decode.init_state, **sizes), target, drafter)
    layers = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LayerKV)) if isinstance(x, LayerKV)]
    pools = {f"f32[{','.join(map(str, x.shape))}]" for layer in layers for x in (layer.k, layer.v)}
    text = rounds.compiled(program, donate_argnums=2).lower(target, drafter, state, *args).compile().as_text()
    assert all(f" = {pool}" in text for pool in pools)
    return [shape for shape in re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", text) if shape in pools]


# Rounds of each way of keeping rows, and prompts; DFlash2 and DSpark keep theirs as DFlash does.
OFTEN = {("assistant", "decode"), ("dflash", "decode"), ("modules", "decode"), ("dflash", "prefill"), ("modules", "short prefill")}
EACH = itertools.product(kinds.KINDS, PROGRAMS)


@pytest.mark.parametrize(("name", "program"), [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.slow) for case in EACH])
def test_no_pool_is_copied(name, program):
    assert copies(rounds.target(), kinds.drafter(name), *PROGRAMS[program]) == []


@pytest.mark.parametrize("program", ["prefill", pytest.param("short prefill", marks=pytest.mark.slow)])
def test_nor_one_that_later_layers_read_too(program):
    like_e2b = rounds.random_weights(gemma4.abstract(Gemma4Config.from_hf(kinds.LIKE_E2B), jnp.float32), 0)
    assert copies(like_e2b, NoDraft(), *PROGRAMS[program]) == []
