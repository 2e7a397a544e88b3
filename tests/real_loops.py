"""The loop of real models as it is lowered for CUDA, and the kernels that it is to be made of."""

import functools
import re

import jax
import jax.numpy as jnp
from lowering import for_cuda
from real_configs import ASSISTANTS, TARGETS

from jaxspec import checkpoint, decode
from jaxspec.checkpoint import from_floats
from jaxspec.checkpoint.quantisation import with_packed
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config

# Attention of one sequence is divided between programs, and merged.
EVERY_MODEL = {"linear", "qkv", "add_norm", "gated", "lm_head", "paged_attention", "paged_attention_merge"}
KERNELS = {
    "E2B": EVERY_MODEL | {"gated_by", "select", "centroid_choose"},
    "26B-A4B": EVERY_MODEL | {"moe_route", "moe_gate_up", "moe_down"},
    "31B": EVERY_MODEL,
    "pocket": EVERY_MODEL | {"gated_by", "select", "centroid_choose"},
}


# Of those for float weights, the kernels of which a quantised target has others. Its gate by other numbers is a product of theirs.
PACKED = {name: f"packed_{name}" for name in ("linear", "gated", "moe_gate_up", "moe_down")} | {"gated_by": "packed_linear"}


def loop(name, attention, quantize=None):
    """`decode_loop` at one sequence and K = 4, its arguments, and its static ones. quantize: as for `jaxspec.load`."""
    if name == "pocket":
        texts = [checkpoint.read_config(checkpoint.resolve(folder)) for folder in ("pocket", "pocket-mtp")]
    else:
        texts = [TARGETS[name], ASSISTANTS[name]]
    config, assistant = Gemma4Config.from_hf(texts[0]), AssistantConfig.from_hf(texts[1])
    target = gemma4.abstract(config)
    if quantize is not None:
        target = with_packed(target, from_floats.quantisation(quantize, "bfloat16").scheme_of)
    drafter = gemma4_mtp.abstract(gemma4_mtp.bind(assistant, config))
    settings = {"slots": 4, "max_len": 1024, "num_draft_tokens": 4}
    state = jax.eval_shape(functools.partial(decode.init_state, **settings), target, drafter)
    slots, steps = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    function = jax.jit(decode.decode_loop, static_argnames="round", donate_argnames="state")
    return function, (target, drafter, state, slots, steps), {"round": decode.Round(4, attention=attention)}


@functools.cache
def lowered(name, attention, quantize=None):
    """The loop's text for CUDA, and how many arrays its state has."""
    function, args, static = loop(name, attention, quantize)
    return for_cuda(function, *args, **static), len(jax.tree.leaves(args[2]))


def kernels(name, attention, quantize=None):
    """The names of the kernels in the loop for CUDA, which are in the Triton dialect."""
    return set(re.findall(r'name = "(\w+)"', lowered(name, attention, quantize)[0]))


def kernels_of_any_dialect(name, attention):
    """The names of the kernels in the loop for the current device."""
    function, args, static = loop(name, attention)
    found, waiting = set(), [function.trace(*args, **static).jaxpr.jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            if {"compiler_params", "name"} <= set(equation.params):
                found.add(equation.params["name"])
                continue
            inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns"))
            waiting += [jaxpr for x in inner if hasattr(jaxpr := getattr(x, "jaxpr", x), "eqns")]
    return found
