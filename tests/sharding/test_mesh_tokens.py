"""On a mesh of fake devices every sequence has the tokens that it has on one device, and nothing whole travels between devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from lowering import for_cuda

from jaxspec import decode, sharding
from jaxspec import released as shapes
from jaxspec.collectives import Shard, full_logits, suppress
from jaxspec.decode import accept
from jaxspec.drafters import draft_model
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.layers import Linear
from jaxspec.sampling.choice import Sampling, choose, probabilities
from jaxspec.sampling.filters import Filters, best_candidates
from jaxspec.sampling.logit_edits import defaults, tables
from jaxspec.sharding import specs
from jaxspec.targets import abstract_target
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import Unsummed, mailboxes

pytestmark = pytest.mark.usefixtures("unoptimised")
MESHES = [(1, 2), (1, 4), (2, 2), (2, 4), (8, 1)]
# Of the family the member whose KV heads are repeated; the others are marked slow. A 26B with DFlash on 2 x 2 devices is that of the
# guesses below, a 31B with DSpark that of few rows. Where the parts lie of what nothing divides test_sharding.py looks at, and
# tests/test_step3p5_doors.py loads modules of its family onto a mesh.
FEW = [(1, 4, "E2B", "mtp centroids")]
MORE = [(8, 1, "12B", "eagle3"), (1, 4, "odd", "ngram"), (1, 2, "12B", "dflash2"), (2, 2, "step", "modules")]
DRAFTERS = (
    "none",
    "ngram",
    "mtp",
    "mtp centroids",
    "dflash",
    "dflash d2t",
    "dflash2",
    "dspark",
    "dspark d2t",
    "dspark gemma",
    "eagle3",
    "modules",
    "draft model",
)
POCKET = ("pocket-mtp", "pocket-dflash", "pocket-dflash2", "pocket-dspark", "pocket-eagle3", "pocket-modules", "pocket-draft")
ALL = [(*mesh, member, kind) for mesh in MESHES for member in meshes.MEMBERS for kind in DRAFTERS]
ALL = [case for case in ALL if case[2:] != ("odd", "mtp centroids")]  # centroids divide the vocabulary, which nothing divides here
ALL += [(*mesh, "step", kind) for mesh in MESHES for kind in ("none", "ngram", "modules")]
ALL += [(*mesh, "pocket", kind) for mesh in MESHES for kind in ("ngram", *POCKET)]


def check(data, tensor, member, kind, k=meshes.MAX_K, rows=None):
    placed = meshes.Placed(member, kind, sharding.mesh(data=data, tensor=tensor))
    tokens, state = placed.texts(0 if kind == "none" else k, rows=rows)
    np.testing.assert_array_equal(tokens, meshes.texts(member))
    same = jax.tree.map(lambda x, to: x.sharding.is_equivalent_to(to, x.ndim), state, placed.shardings)
    assert jax.tree.all(same), [specs.dotted(path) for path, ok in jax.tree_util.tree_leaves_with_path(same) if not ok]
    return placed, state


@pytest.mark.parametrize(("data", "tensor", "member", "kind"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_tokens_are_those_of_one_device(data, tensor, member, kind):
    """Every data shard has pages, a free list and an end of its own; every KV head lies beside its query heads, be it in copies."""
    placed, state = check(data, tensor, member, kind)
    spec = placed.target.layers[-1].self_attn.spec
    pool = next(layer for layer in reversed(state.cache.layers) if layer is not None).k
    assert pool.sharding.spec == PartitionSpec("data", None, "tensor", None)
    assert spec.num_kv_heads % tensor == 0 and pool.sharding.shard_shape(pool.shape)[2] == spec.num_kv_heads // tensor
    # What a shard's sequences hold and what is free are all its pages.
    free, held = np.asarray(state.cache.free_count), np.asarray(state.cache.held).reshape(data, -1).sum(axis=1)
    assert free.shape == (data,) and (free + held == len(state.cache.free) // data).all()


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor", "member", "kind"), [case for case in ALL if case not in FEW + MORE])
def test_tokens_are_those_of_one_device_everywhere(data, tensor, member, kind):
    check(data, tensor, member, kind)


@pytest.mark.slow  # tests/decode/test_verification.py has such rounds on one device
def test_tokens_are_those_of_one_device_whatever_is_verified():
    """Fewer rows than drafts: each data shard hands out its own."""
    _, state = check(2, 2, "31B", "dspark gemma", rows=7)
    assert np.sum(state.drafted) < meshes.MAX_K * np.sum(state.rounds)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor", "member", "kind"), [*FEW, *MORE, (1, 2, "31B", "mtp"), (1, 2, "31B", "dspark d2t")])
def test_tokens_are_those_of_one_device_whatever_is_verified_everywhere(data, tensor, member, kind):
    check(data, tensor, member, kind, rows=meshes.SLOTS // data + 3)


def check_guesses(tensor, member, kind, data=1):
    """Guesses are accepted at given rates, whatever the target says: a drafter that is spread wrongly writes another text, where else it
    would only have fewer guesses accepted."""
    rule = accept.synthetic((1.0, 0.8, 0.6))
    tokens, _ = meshes.Placed(member, kind, sharding.mesh(data=data, tensor=tensor)).texts(meshes.MAX_K, rule)
    np.testing.assert_array_equal(tokens, meshes.texts(member, kind, meshes.MAX_K, rule))
    assert np.any(tokens != meshes.texts(member))


def test_guesses_are_those_of_one_device():
    check_guesses(2, "26B", "dflash d2t", data=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "member", "kind"),
    [
        (2, "31B", "mtp"),
        (4, "E2B", "mtp centroids"),
        (2, "31B", "dflash"),
        (2, "31B", "dflash2"),
        (4, "odd", "dflash2"),
        (2, "31B", "dspark"),
        (4, "26B", "dflash d2t"),
        (4, "26B", "dspark d2t"),
        (4, "31B", "dspark gemma"),
        (4, "odd", "dspark gemma"),
        (2, "12B", "eagle3"),
        (4, "odd", "eagle3"),
        (4, "odd", "modules"),
        (2, "step", "modules"),
        (4, "step", "modules"),
    ],
)
def test_guesses_are_those_of_one_device_everywhere(tensor, member, kind):
    check_guesses(tensor, member, kind)


@pytest.mark.slow  # a target's layers are spread in the same way
def test_a_large_draft_model_is_spread(monkeypatch):
    monkeypatch.setattr(draft_model, "SMALL_LAYER", 0)
    placed, state = check(1, 2, "31B", "draft model")
    assert placed.drafter.model.embed_tokens.axis == "tensor"
    assert state.drafter.cache.layers[0].k.sharding.spec == PartitionSpec("data", None, "tensor", None)


VOCAB, ROWS, STEPS, DEVICES = 64, 4, 3, 4


def shown(function, *args):
    """What each of four devices that have a quarter of the last axis of the first argument each makes of it: [4, ...]."""
    mesh = sharding.mesh(tensor=DEVICES)
    first = PartitionSpec(*[None] * (np.ndim(args[0]) - 1), "tensor")

    def local(*args):
        return jax.tree.map(lambda x: x[None], function(*args))

    in_specs = (first, *[PartitionSpec()] * (len(args) - 1))
    return meshes.compiled(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec("tensor"), check_vma=False))(*args)


@functools.cache
def logits():
    """Rounded, so that some tokens are equal, of different devices too."""
    return np.round(np.random.default_rng(0).normal(0, 2, (ROWS, STEPS, VOCAB)) * 4).astype(np.float32) / 4


def sampling(scope, shard=None, edited=False):
    seed = np.stack([np.arange(ROWS), np.zeros(ROWS)], axis=1).astype(np.uint32)
    values = np.array([[0, 3, 5, 4], [1, 0.9, 1, 0.8], [0, 0, 0.05, 0]], np.float32)
    filters = Filters(jnp.asarray(values[0], jnp.int32), *map(jnp.asarray, values[1:]), scope=scope) if scope != "plain" else None
    changed = None
    if edited:
        asked = defaults(ROWS)
        asked = asked.replace(bias_ids=asked.bias_ids.at[:, 0].set(50), bias=asked.bias.at[:, 0].set(3.0))
        known = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (ROWS, 9)), jnp.int32)
        changed = tables(asked, known, jnp.full(ROWS, 4), jnp.full(ROWS, 9), jnp.full((ROWS, 1), -1), VOCAB)
    return Sampling(jnp.asarray(seed), jnp.asarray([0, 1, 0.7, 0], jnp.float32), filters, changed, shard=shard)


POSITIONS = np.arange(ROWS * STEPS, dtype=np.int32).reshape(ROWS, STEPS)


@pytest.mark.parametrize(("scope", "edited"), [("plain", False), ("top", False), ("whole", False), ("search", False), ("plain", True)])
def test_a_vocabulary_on_several_devices_chooses_what_a_whole_one_does(scope, edited):
    def both(x, positions, shard=None):
        how = sampling(scope, shard, edited)
        return choose(x, positions, how), probabilities(x, how)

    wanted, (expected, ids) = meshes.compiled(both)(logits(), POSITIONS)
    of_a_shard = functools.partial(both, shard=Shard("tensor", VOCAB // DEVICES))
    found, (chances, found_ids) = shown(of_a_shard, logits(), POSITIONS)
    for device in range(DEVICES):
        np.testing.assert_array_equal(found[device], wanted)
        np.testing.assert_allclose(chances[device], expected, rtol=1e-5)
        if ids is not None:
            np.testing.assert_array_equal(found_ids[device], ids)


def test_candidates_suppressed_tokens_and_logits_of_a_shard():
    shard = Shard("tensor", VOCAB // DEVICES)
    tied = np.zeros((1, 1, VOCAB), np.float32)  # the lowest of equals wins, wherever it lies
    out = shown(
        lambda x, tied: (
            best_candidates(x, 20, shard),
            full_logits(suppress(x, (0, 17, 63), shard), shard),
            full_logits(x[..., :3], shard),
            shard.best(jnp.where(shard.first == 16, jnp.nan, x[0, 0, :2]), shard.first + jnp.arange(2, dtype=jnp.int32)),
        ),
        logits(),
        tied,
    )
    (values, ids), suppressed, narrow, (best, most) = jax.tree.map(lambda x: np.asarray(x)[2], out)
    expected = best_candidates(jnp.asarray(logits()), 20)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(ids, expected[1])
    wanted = logits().copy()
    wanted[..., [0, 17, 63]] = -np.inf
    np.testing.assert_array_equal(suppressed, wanted)
    assert narrow.shape[-1] == 3  # logits of another width are no shard's
    assert np.isnan(most).all() and best.tolist() == [16, 17]  # what is no number anywhere is not overlooked
    greedy = Sampling(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.float32), shard=shard)
    assert (shown(lambda x: choose(x, jnp.zeros((1, 1), jnp.int32), greedy), tied) == 0).all()


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
def test_a_product_whose_sum_lies_on_several_devices(implementation):
    """Of heads, as attention's output: the same on every device, and the one that a device with all of the weight computes."""
    rng, specs = np.random.default_rng(2), (PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor"))
    heads, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 5, DEVICES, 2, 8), (24, DEVICES, 2, 8)))

    def local(heads, weight):
        return Linear(weight, sum_over="tensor").parts(heads, implementation, over=3)[None]

    mesh = sharding.mesh(tensor=DEVICES)
    summed = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("tensor"), check_vma=False)
    expected = np.einsum("btkgd,hkgd->bth", heads, weight)
    for found in meshes.compiled(summed)(heads, weight):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "left"), [(5, True), (160, True), (300, False)])
def test_a_sum_over_devices_is_left_to_the_norm_that_reads_it(rows, left):
    """Up to as many rows as its kernel takes, also where the product itself is XLA's."""
    found, mail = [], mailboxes.mailbox_table([2**44, 2**45])[0]

    def local(x, weight):
        found.append(Linear(weight, sum_over="tensor", mail=mail).parts(x, "auto"))
        return jax.tree.leaves(found)[0]

    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 512), (256, 512)))
    mesh = AbstractMesh((2,), ("tensor",))
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False), x, weight)
    assert [isinstance(out, Unsummed) for out in found] == [left]
    assert not left or found[0].parts.shape[1:] == (rows, 256)


LAYERS = 2  # of the target's 60; its other fields, and the assistant, are those of the released models


@functools.cache
def released(data, tensor):
    """The loop of a 31B of few layers with its assistant on a mesh, and its arguments as shapes that lie where they should."""
    mesh = sharding.mesh(data=data, tensor=tensor)
    text = {**shapes.TARGETS["31b"]["text_config"], "num_hidden_layers": LAYERS, "layer_types": [SLIDING, FULL]}
    config = Gemma4Config.from_hf(text)
    trees = gemma4.abstract(config), shapes.abstract_drafter("mtp", "31b", config, jnp.bfloat16)
    trees = [sharding.spread(sharding.shard_tree(tree, mesh), mesh) for tree in trees]
    init = functools.partial(decode.init_state, *trees, slots=2, max_len=1024, num_draft_tokens=4)
    layout = sharding.Layout.of(mesh, trees[1], init)
    slots = jax.ShapeDtypeStruct((2 * data,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return layout, (*trees, layout.shapes, slots, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))


def loop(layout, attention):
    return layout.on(functools.partial(decode.decode_loop, round=decode.Round(4, attention=attention)))


def collectives(text):
    """(kind, bytes of the largest result) of every operation of a compiled program that communicates."""
    sizes = {"pred": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2}
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
        yield kind, max(sizes[dtype] * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in arrays)


def test_nothing_whole_travels():
    """Of the released 31B's sizes, where a weight is megabytes and a row's hidden state is kilobytes, on both axes of a mesh."""
    layout, arguments = released(2, 2)
    program = meshes.compiled(loop(layout, "xla"), donate_argnums=2).lower(*arguments).compile()
    found = list(collectives(program.as_text()))
    hidden = 10 * 5376 * 4  # of all rows of a data shard; XLA adds up bfloat16 in float32 on a CPU
    assert {kind for kind, _ in found} == {"all-reduce"} and max(size for _, size in found) <= hidden
    # The target's embedding, and two sums a layer; of each of four drafts the embedding, and a sum in each layer's attention.
    assert sum(kind == "all-reduce" for kind, size in found if size >= 2 * 1024 * 2) >= 1 + 2 * LAYERS + 4 * 5
    assert {x.sharding.spec for x in jax.tree.leaves(arguments[2].cache.layers)} == {PartitionSpec("data", None, "tensor", None)}


def test_kernels_serve_on_a_mesh(monkeypatch):
    """They see a device's part: 2 of 4 KV heads of a full layer, and half of the vocabulary. On GPUs that reach each other's memory they
    also add up and choose, so that nothing cuts a round in two."""
    table = mailboxes.mailbox_table([2**44, 2**45])[None]
    monkeypatch.setattr(all_reduce, "mailbox_tables", lambda groups: table)
    layout, (*trees, _, slots, steps, until_ended) = released.__wrapped__(1, 2)
    state = layout.shapes
    assert state.mail.shape == table.shape and layout.shardings.mail.spec == PartitionSpec("data", "tensor")
    program = jax.jit(loop(layout, "triton"))
    text = for_cuda(program, *trees, state, slots, steps, until_ended)
    found = set(re.findall(r'name = "(\w+)"', text))
    assert {"qkv", "add_norm", "gated", "paged_attention", "lm_head", "all_reduce", "all_gather"} <= found
    assert "tensor<131072x1024xbf16>" in text and "stablehlo.all_reduce" not in text
    assert jax.eval_shape(program, *trees, state, slots, steps, until_ended).mail.shape == table.shape
    monkeypatch.setenv("JAXSPEC_ALL_REDUCE", "xla")
    assert layout.shapes.mail is None and jax.tree.structure(layout.shapes) == jax.tree.structure(layout.shardings)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_what_lies_on_every_device(tensor):
    """Of every released target and every drafter for it: norms, routers and scalars; and what is read sooner than it is added up."""
    mesh, replicated = sharding.mesh(tensor=tensor), set()
    for name in shapes.TARGETS:
        config = shapes.target_config(name)
        trees = [abstract_target(config, jnp.bfloat16)]
        there = {"12b": ["dspark"], "26b": ["dflash"], "31b": ["dflash", "dflash2", "dspark"]}.get(name, [])
        for kind in ("eagle3", "modules", *(() if name.startswith("step") else ("mtp", "e4b")), *there):
            trees.append(shapes.abstract_drafter(kind, name, config, jnp.bfloat16))
        for tree in trees:
            placed = sharding.spread(sharding.shard_tree(tree, mesh), mesh)
            kind = type(tree).__name__
            for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
                if "tensor" not in leaf.sharding.spec and leaf.size > 2**19:
                    replicated.add(f"{kind} {re.sub(r'[.][0-9]+[.]', '.', specs.dotted(path))}")
            if kind not in ("Gemma4MTP", "DSpark", "DFlash2"):
                share = sharding.bytes_per_device(tree) / sharding.bytes_per_device(placed)
                assert share > 0.9 * tensor, (kind, name)
    assistant = ("layers.mlp.gate_up_proj", "layers.mlp.down_proj", "embed_tokens")
    ple = ("per_layer_model_projection", "layers.per_layer_input_gate", "layers.per_layer_projection")
    assert replicated == {
        *(f"Gemma4MTP model.{part}.weight" for part in assistant),
        "Gemma4MTP pre_projection.weight",
        "Gemma4MTP post_projection.weight",
        "Gemma4 per_layer_model_projection.weight",
        *(f"Gemma4 {part}.weight" for part in ple),
        *(f"DraftModel model.{part}.weight" for part in ple),
        "Step3p5 model.layers.moe.gate.weight",
        "DSpark markov_head.markov_w1.weight",
        *(f"DFlash2 layers.{part}_conv.kernel_projection.weight" for part in ("attention", "mlp")),
        *(f"DFlash2 candidate_selector.{part}_codebook" for part in ("predecessor", "successor")),
        "DFlash2 candidate_selector.hidden_projection.weight",
    }
