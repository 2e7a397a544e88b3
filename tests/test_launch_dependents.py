"""Kernels that let the next ones be launched while they run: no operation of XLA may read their results (`dialect.launching`)."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal
from real_configs import ASSISTANTS, TARGETS

from jaxspec import decode
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.model import gemma4
from jaxspec.model.config import AssistantConfig, Gemma4Config
from pallas_kernels import device
from pallas_kernels.add_norm import add_norm

VIEWS = {"reshape", "squeeze", "expand_dims", "optimization_barrier"}


@pytest.fixture
def hopper():
    jax.clear_caches()  # what was traced before has another device's decisions
    with device.described_as(device.Described("NVIDIA H200", "9.0")):
        yield
    jax.clear_caches()


def launches(equation):
    return equation.primitive.name == "pallas_call" and "griddepcontrol" in str(equation.params["jaxpr"])


def follow(jaxpr, early, found):
    """Adds to `found` the kernels that launch dependents (a count, under "kernels") and the names of operations of XLA that read the
    results of one. early: of each input, whether it is such a result. Returns the same of the outputs."""
    known = dict(zip(jaxpr.invars, early, strict=True))

    def of(variables):
        return [not isinstance(v, Literal) and known.get(v, False) for v in variables]

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, of(equation.invars)
        out = [False] * len(equation.outvars)
        if name in ("jit", "pjit", "custom_vmap_call"):
            out = follow(equation.params["call" if name == "custom_vmap_call" else "jaxpr"].jaxpr, inputs, found)
        elif name == "pallas_call":
            out = [launches(equation)] * len(out)
            found["kernels"] = found.get("kernels", 0) + out[0]
        elif name in VIEWS:
            out = [any(inputs)] * len(out)
        elif name == "while":
            for body in (equation.params["cond_jaxpr"].jaxpr, equation.params["body_jaxpr"].jaxpr):
                follow(body, [False] * len(body.invars), found)
        elif any(inputs) and name not in ("core_map", "mpmd_map"):  # the latter are kernels for Hopper, launched after the end of others
            found[name] = found.get(name, 0) + 1
        known |= dict(zip(equation.outvars, out, strict=True))
    return of(jaxpr.outvars)


def step(name, batch):
    """What `follow` finds in a loop of steps of a real model with its assistant."""
    config = Gemma4Config.from_hf(TARGETS[name])
    target, drafter = gemma4.abstract(config), gemma4_mtp.abstract(gemma4_mtp.bind(AssistantConfig.from_hf(ASSISTANTS[name]), config))
    state = jax.eval_shape(functools.partial(decode.init_state, slots=batch, max_len=1024, num_draft_tokens=4), target, drafter)
    slots, steps = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    loop = functools.partial(decode.decode_loop, round=decode.Round(4))
    jaxpr = jax.make_jaxpr(loop)(target, drafter, state, slots, steps).jaxpr
    found = {}
    follow(jaxpr, [False] * len(jaxpr.invars), found)
    return found, len(config.layers)


@pytest.mark.parametrize(("name", "batch", "least"), [("E2B", 1, 12), ("E2B", 8, 5), pytest.param("26B-A4B", 1, 6, marks=pytest.mark.slow)])
def test_only_kernels_read_the_results_of_kernels_that_launch_dependents(hopper, name, batch, least):
    found, layers = step(name, batch)
    assert found.pop("kernels") > least * layers  # most kernels of a layer
    assert not found


def test_a_read_by_xla_is_found(hopper):
    def reads(x, y, weight):
        (x,) = add_norm(x, y, weight, eps=1e-6, launch_dependents=True)
        (x,) = add_norm(x.reshape(2, 8, 128), y.reshape(2, 8, 128), weight, eps=1e-6, launch_dependents=True)
        return jnp.tanh(x)

    x, weight, found = jnp.zeros((16, 128), jnp.bfloat16), jnp.zeros(128, jnp.bfloat16), {}
    jaxpr = jax.make_jaxpr(reads)(x, x, weight).jaxpr
    follow(jaxpr, [False] * len(jaxpr.invars), found)
    assert found == {"kernels": 2, "tanh": 1}
