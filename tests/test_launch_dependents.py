"""Kernels that let the next ones be launched while they run: no operation of XLA may read their results (`dialect.launching`). Kernels that
wait themselves (`dialect.mosaic_wait`): before that they may read the program's own weights alone."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal
from real_configs import ASSISTANTS, TARGETS

from jaxspec import decode, sharding
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config
from jaxspec.model.head_guides import guided
from jaxspec.targets import abstract_target, asked_quantisation
from pallas_kernels import all_reduce, device
from pallas_kernels.add_norm import add_norm
from pallas_kernels.all_reduce import mailboxes
from pallas_kernels.layer_end import mosaic as layer_end
from pallas_kernels.linear import linear
from pallas_kernels.lm_head import abstract_guide, likely_logits, lm_head
from pallas_kernels.packed import abstract
from pallas_kernels.qkv import mosaic as qkv
from pallas_kernels.top_candidates import choose, top_candidates
from pallas_kernels.top_candidates.shapes import filters

# What kernels read before they wait, of their arguments: the words, scales and zeros of a packed matrix, whose last argument is a constant.
READ_AHEAD = dict.fromkeys(("linear", "gated", "lm_head"), slice(1, 2)) | dict.fromkeys(("packed_linear", "packed_gated"), slice(1, -1))
READ_AHEAD |= dict.fromkeys(("packed_codes_linear", "packed_codes_gated"), slice(2, -1))  # after the scales of rows
READ_AHEAD |= dict.fromkeys(("packed_lm_head", "layer_end"), slice(3, -1))  # after two more arrays
READ_AHEAD |= {"qkv_product": slice(1, 4), "q_product": slice(1, 3)}
VIEWS = {"reshape", "squeeze", "expand_dims", "optimization_barrier", "new_ref", "get"}


@pytest.fixture
def hopper():
    jax.clear_caches()  # what was traced before has another device's decisions
    with device.described_as(device.Described("NVIDIA H200", "9.0")):
        yield
    jax.clear_caches()


def instructions(equation):
    """Which instructions of a kernel are about the launch of others: a subset of "wait" and "launch_dependents"."""
    return set(re.findall(r"griddepcontrol[._](\w+)", str({name: equation.params.get(name) for name in ("jaxpr", "jaxprs")})))


def follow(jaxpr, origins, found, calls=None):
    """Adds to `found` how many kernels launch dependents and how many wait, under "launch_dependents" and "wait"; the names of operations
    of XLA that read the results of the former; and the names of kernels that wait and have read something else than weights.

    origins: of each input "weights" if it is one of those, "early" if it is the result of a kernel that launches dependents, or None.
    calls: where kernels are counted by name, or None. Returns the same of the outputs."""
    known = dict(zip(jaxpr.invars, origins, strict=True))

    def of(variables):
        return [None if isinstance(v, Literal) else known.get(v) for v in variables]

    def count(name):
        found[name] = found.get(name, 0) + 1

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, of(equation.invars)
        out = [None] * len(equation.outvars)
        if name in ("jit", "pjit", "custom_vmap_call"):
            out = follow(equation.params["call" if name == "custom_vmap_call" else "jaxpr"].jaxpr, inputs, found, calls)
        elif name in ("pallas_call", "mpmd_map"):
            if calls is not None:
                calls[equation.params["name"]] += 1
            does = instructions(equation)
            for instruction in does:
                count(instruction)
            out = ["early" if "launch_dependents" in does else None] * len(out)
            if "wait" in does and set(inputs[READ_AHEAD.get(equation.params["name"], slice(0))]) - {"weights"}:
                count(equation.params["name"])
        elif name == "shard_map":
            out = follow(equation.params["jaxpr"], inputs, found, calls)
        elif name in VIEWS:
            out = [next(filter(None, inputs), None)] * len(out)
        elif name == "while":
            conditions, bodies = equation.params["cond_nconsts"], equation.params["body_nconsts"]
            carried = [None] * (len(inputs) - conditions - bodies)
            follow(equation.params["cond_jaxpr"].jaxpr, [*inputs[:conditions], *carried], found, calls)
            follow(equation.params["body_jaxpr"].jaxpr, [*inputs[conditions : conditions + bodies], *carried], found, calls)
        elif "early" in inputs:
            count(name)
        known |= dict(zip(equation.outvars, out, strict=True))
    return of(jaxpr.outvars)


def step(name, batch, quantize=None, activations=None, calls=None):
    """What `follow` finds in a loop of steps of a real model with its assistant, whose heads have guides."""
    config = Gemma4Config.from_hf(TARGETS[name])
    quantisation = None if quantize is None else asked_quantisation(config, jnp.bfloat16, quantize, None, activations)
    target = abstract_target(config, jnp.bfloat16, quantisation)
    drafter = gemma4_mtp.abstract(gemma4_mtp.bind(AssistantConfig.from_hf(ASSISTANTS[name]), config))
    target, drafter = guided(target), guided(drafter)
    state = jax.eval_shape(functools.partial(decode.init_state, slots=batch, max_len=1024, num_draft_tokens=4), target, drafter)
    slots, steps = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    loop = functools.partial(decode.decode_loop, round=decode.Round(4))
    jaxpr = jax.make_jaxpr(loop)(target, drafter, state, slots, steps).jaxpr
    weights, found = len(jax.tree.leaves((target, drafter))), {}
    follow(jaxpr, ["weights"] * weights + [None] * (len(jaxpr.invars) - weights), found, calls)
    return found, len(config.layers)


def step_on(devices, name, batch):
    """The same of a model of two layers on so many devices that sum by kernels."""
    short = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma4Config.from_hf({**TARGETS[name]["text_config"], **short})
    mesh = sharding.mesh(tensor=devices)
    trees = guided(gemma4.abstract(config)), guided(gemma4_mtp.abstract(gemma4_mtp.bind(AssistantConfig.from_hf(ASSISTANTS[name]), config)))
    trees = tuple(sharding.spread(sharding.shard_tree(tree, mesh), mesh) for tree in trees)
    init = functools.partial(decode.init_state, *trees, slots=batch, max_len=1024, num_draft_tokens=4)
    layout = sharding.Layout.of(mesh, trees[1], init)
    loop = layout.on(functools.partial(decode.decode_loop, round=decode.Round(4)))
    slots, steps = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(loop)(*trees, layout.shapes, slots, steps).jaxpr
    weights, found = len(jax.tree.leaves(trees)), {}
    follow(jaxpr, ["weights"] * weights + [None] * (len(jaxpr.invars) - weights), found)
    return found


# least: so many kernels at least launch dependents, in two layers and the assistant's passes.
@pytest.mark.parametrize(
    ("name", "batch", "least"),
    [pytest.param("31B", 1, 140, marks=pytest.mark.slow), pytest.param("31B", 32, 115, marks=pytest.mark.slow), ("26B-A4B", 8, 135)],
)
def test_only_kernels_read_such_results_on_several_devices(hopper, monkeypatch, name, batch, least):
    table = mailboxes.mailbox_table([2**44 + 2**30 * n for n in range(4)])[None]
    monkeypatch.setattr(all_reduce, "mailbox_tables", lambda groups: table)
    found = step_on(4, name, batch)
    assert found.pop("launch_dependents") >= least
    found.pop("wait", 0)
    assert not found


# least: more kernels than that for each layer launch dependents, which is most of a layer's; waiting: so many for each layer wait.
@pytest.mark.parametrize(
    ("name", "batch", "quantize", "least", "waiting"),
    [
        ("E2B", 1, None, 10, 0),
        pytest.param("E2B", 8, "int4", 6, 2, marks=pytest.mark.slow),
        pytest.param("E2B", 8, None, 5, 0, marks=pytest.mark.slow),
        pytest.param("31B", 1, "int4", 8, 4, marks=pytest.mark.slow),
        pytest.param("31B", 8, None, 4, 3, marks=pytest.mark.slow),
        pytest.param("26B-A4B", 1, None, 13, 0, marks=pytest.mark.slow),
        pytest.param("26B-A4B", 8, "int8", 14, 6, marks=pytest.mark.slow),
        pytest.param("26B-A4B", 32, None, 10, 1, marks=pytest.mark.slow),
    ],
)
def test_only_kernels_read_the_results_of_kernels_that_launch_dependents(hopper, name, batch, quantize, least, waiting):
    found, layers = step(name, batch, quantize)
    assert found.pop("launch_dependents") > least * layers
    assert found.pop("wait", 0) >= waiting * layers
    assert not found


# Kernels that do nothing but round, of each layer. Norms round the rows of two of the E2B's six products, and of the 31B's four. With many
# rows an activation rounds too.
@pytest.mark.slow  # tests/kernels/test_float8_rows.py has the kernels
@pytest.mark.parametrize(
    ("name", "batch", "alone", "activated"),
    [
        ("E2B", 1, {"float8_numbers": 4}, 0),
        ("E2B", 8, {"float8_codes": 2, "float8_numbers": 2}, 0),
        ("31B", 1, {"float8_numbers": 2}, 0),
        ("31B", 8, {"float8_codes": 2}, 0),
        ("31B", 32, {"float8_codes": 1}, 1),
    ],
)
def test_kernels_before_a_product_round_its_rows(hopper, name, batch, alone, activated):
    calls = collections.Counter()
    found, layers = step(name, batch, "fp8", "fp8", calls)
    found.pop("wait", 0)
    assert found.pop("launch_dependents") > 4 * layers
    assert not found
    for kernel in ("float8_codes", "float8_numbers"):
        count = calls[kernel] - alone.get(kernel, 0) * layers
        assert 0 <= count <= 3, (kernel, calls)  # before the first layer, or of its inputs for all layers
    assert calls["activated_codes"] == activated * layers


@pytest.mark.parametrize("kernel", [layer_end, qkv])
def test_kernels_of_small_models_read_nothing_but_weights_ahead(hopper, monkeypatch, kernel):
    monkeypatch.setattr(kernel, "SINCE", (0, 0))
    found, layers = step("E2B", 1)
    assert found.pop("launch_dependents") > 10 * layers
    assert found.pop("wait") >= layers
    assert not found


def test_a_read_by_xla_is_found(hopper):
    def reads(x, y, weight):
        (x,) = add_norm(x, y, weight, eps=1e-6, launch_dependents=True)
        (x,) = add_norm(x.reshape(2, 8, 128), y.reshape(2, 8, 128), weight, eps=1e-6, launch_dependents=True)
        return jnp.tanh(x)

    x, weight, found = jnp.zeros((16, 128), jnp.bfloat16), jnp.zeros(128, jnp.bfloat16), {}
    jaxpr = jax.make_jaxpr(reads)(x, x, weight).jaxpr
    follow(jaxpr, [None] * len(jaxpr.invars), found)
    assert found == {"launch_dependents": 2, "tanh": 1}


def test_a_packed_head_reads_nothing_but_its_table_ahead(hopper):
    table, found = abstract((2048, 1024), "int8", group=None, scale_dtype=jnp.bfloat16), {}
    hidden, keys, temperature = jnp.zeros((5, 1024), jnp.bfloat16), jnp.zeros((5, 2), jnp.uint32), jnp.zeros(5)
    jaxpr = jax.make_jaxpr(functools.partial(lm_head, softcap=30.0))(hidden, table, keys, temperature).jaxpr
    follow(jaxpr, [None, *["weights"] * len(jax.tree.leaves(table)), None, None], found)
    assert found == {"wait": 1}


def test_kernels_alone_read_what_likely_logits_are_made_of(hopper):
    leaf, found = jax.ShapeDtypeStruct, {}
    table = leaf((262_144, 1536), jnp.bfloat16)
    hidden, guide, most = leaf((5, 1536), jnp.bfloat16), abstract_guide(table), leaf((5,), jnp.int32)
    jaxpr = jax.make_jaxpr(likely_logits)(hidden, table, guide, most).jaxpr
    weights = ["weights"] * (1 + len(jax.tree.leaves(guide)))
    follow(jaxpr, [None, *weights, None], found)
    assert found == {"wait": 1, "launch_dependents": 3}


def test_weights_that_the_program_computes_are_found(hopper):
    def multiplies(x, w, twice):
        return linear(linear(x, w, implementation="mosaic"), twice * 2, implementation="mosaic")

    x, w, found = jnp.zeros((16, 2048), jnp.bfloat16), jnp.zeros((2048, 2048), jnp.bfloat16), {}
    follow(jax.make_jaxpr(multiplies)(x, w, w).jaxpr, [None, "weights", "weights"], found)
    assert found == {"wait": 2, "linear": 1}


def test_kernels_alone_read_what_top_candidates_are_made_of(hopper):
    found = {}
    jaxpr = jax.make_jaxpr(functools.partial(top_candidates, k=64))(jax.ShapeDtypeStruct((5, 262_144), jnp.float32)).jaxpr
    follow(jaxpr, [None], found)
    assert found == {"launch_dependents": 2}


def test_kernels_alone_read_what_a_choice_is_made_of(hopper):
    found = {}
    jaxpr = jax.make_jaxpr(functools.partial(choose, k=128))(jax.ShapeDtypeStruct((5, 1, 262_144), jnp.float32), *filters(5)).jaxpr
    follow(jaxpr, [None] * len(jaxpr.invars), found)
    assert found == {"launch_dependents": 2}
