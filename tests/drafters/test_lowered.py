"""The drafters of the released 31B: their rounds as they are lowered for CUDA, where attention over their own cache is the kernel's, and
what they ask of a target."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import struct
from lowering import for_cuda

from jaxspec import decode, drafters
from jaxspec import released as shapes
from jaxspec.drafters import dflash, mtp_modules
from jaxspec.drafters.base import fitted
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling import Needs

LAYERS = 6  # of the target's 60; its other fields, and the drafters, are those of the released models
TEXT = {**shapes.TARGETS["31b"]["text_config"], "num_hidden_layers": LAYERS, "layer_types": [SLIDING] * 5 + [FULL]}


def drafter(name, target):
    if name == "modules":
        text = {**TEXT, "layer_types": [*TEXT["layer_types"], SLIDING, SLIDING]}
        config = {"model_type": "gemma4_mtp_modules", "num_nextn_predict_layers": 2, "text_config": text}
        return mtp_modules.abstract(mtp_modules.read_config(config))
    if name in ("dflash2", "dspark"):
        kind = drafters.KINDS[name]
        config = {**shapes.drafter_config(name, "31b"), "aux_hidden_state_layer_ids": range(1, LAYERS)}
        return fitted(kind.from_checkpoint(None, config, target, jnp.bfloat16), target)
    if name != "dflash":
        return shapes.abstract_drafter(name, "31b", target, jnp.bfloat16)
    taps = {"mask_token_id": 4, "target_layer_ids": range(LAYERS)}
    return dflash.abstract(
        dflash.DFlashConfig.from_hf({**shapes.drafter_config("dflash", "31b"), "num_target_layers": LAYERS, "dflash_config": taps}, target)
    )


@functools.cache
def kernels(name, k, draft_attention, rows=None):
    """How many calls of attention the program of a round has, and whether all of its state is updated in place. Equal calls share one."""
    config = Gemma4Config.from_hf(TEXT)
    weights = gemma4.abstract(config), drafter(name, config)
    state = jax.eval_shape(functools.partial(decode.init_state, slots=2, max_len=1024, num_draft_tokens=k), *weights)
    step = jax.jit(decode.spec_step, static_argnames="round", donate_argnums=2)
    round = decode.Round(k, attention="triton", draft_attention=draft_attention, rows=rows)
    text = for_cuda(step, *weights, state, jax.ShapeDtypeStruct((1,), jnp.int32), round=round)
    in_place = text.count("tf.aliasing_output") == len(jax.tree.leaves(state)) - 1  # all but `starved`
    return len(re.findall(r'name = "paged_attention"', text)), in_place


@pytest.mark.parametrize(
    ("name", "k", "targets", "own"),
    [*(pytest.param(kind, 15, 2, 2, marks=pytest.mark.slow) for kind in ("dflash", "dflash2")), ("eagle3", 5, 2, 5)],
)
def test_attention_over_an_own_cache_is_the_kernels(name, k, targets, own):
    """A block's sliding layers, causal within it or not, and its full layers, which see both ways; EAGLE-3's passes of 1 row, each with
    one more row that is not stored, and its pass over the rows of a round. The target has two kinds of layers."""
    assert kernels(name, k, "xla") == (targets, True)
    assert kernels(name, k, "triton") == (targets + own, True)


def test_a_round_of_few_rows_reads_keys_once_for_all_rows_of_a_sequence():
    """Rows are packed for everything but attention, of which there is a call for each kind of layer as ever, and nothing is copied."""
    assert kernels("dflash", 15, "xla", rows=5) == (2, True)


def only(protocol, name, found):
    """What an object has under a name, if the protocol knows it."""
    if name not in vars(protocol):
        raise AttributeError(f"{protocol.__name__} has no {name}")
    return getattr(found, name)


class Config:
    """A config with the members of TargetConfig alone."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return only(TargetConfig, name, self.__dict__["inner"])


@struct.dataclass
class Model:
    """A target with the members of TargetModel alone."""

    inner: gemma4.Gemma4

    @property
    def config(self):
        return Config(self.inner.config)

    def __getattr__(self, name):
        return only(TargetModel, name, self.inner)

    def __call__(self, *args, **settings):
        return self.inner(*args, **settings)


@pytest.mark.parametrize("name", ["mtp", "dflash", "dflash2", "dspark", "eagle3", "modules"])
def test_nothing_but_what_a_target_is_asked_for_is_used(name):
    """A round, a prompt and scores with a target that has no other members than the protocols; another family may lack the rest."""
    config, each = Gemma4Config.from_hf(TEXT), jax.ShapeDtypeStruct((1,), jnp.int32)
    inner = gemma4.abstract(config)
    draft = fitted(drafter(name, config), Config(config))
    init = functools.partial(decode.init_state, slots=2, max_len=256, num_draft_tokens=2)
    wanted = jax.eval_shape(init, inner, draft)
    assert jax.eval_shape(init, Model(inner), draft) == wanted
    for needs in (Needs(), Needs("search", edits=True, logprobs=1, suppress_tokens=(3,))):
        for call in (functools.partial(decode.prefill, chunk=4), decode.spec_step):
            call = functools.partial(call, round=decode.Round(2, needs=needs))
            assert jax.eval_shape(call, Model(inner), draft, wanted, each).cache == wanted.cache
    scored = functools.partial(decode.score, chunk=4, count=1)
    assert jax.eval_shape(scored, Model(inner), wanted, each)[0].cache == wanted.cache
