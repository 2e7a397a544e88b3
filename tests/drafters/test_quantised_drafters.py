"""Quantised drafters: texts are those without drafts, guesses those of the weights that the codes stand for, and what is refused."""

import dataclasses
import json
from pathlib import Path

import formulas
import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import quantised_files as files
import rounds
import tiny
from quantised_drafters import dequantised, quantised
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import checkpoint, cli, drafters, released, sharding
from jaxspec.bench.roofline import step_bytes
from jaxspec.bench.workload import plan_bench
from jaxspec.checkpoint.quantisation import UNPACKED
from jaxspec.drafters import quantising
from jaxspec.drafters.base import Observed, Target
from jaxspec.learning.settings import learnable
from jaxspec.planning import pair_of
from jaxspec.sampling.choice import Sampling
from jaxspec.train import distil
from jaxspec.train import kinds as trained
from jaxspec.trees import is_packed, leaves_by_path, nbytes, packed_kinds
from pallas_kernels.packed import Packed, unpack

pytestmark = pytest.mark.usefixtures("unoptimised")
K = 3
ALL = [name for name in kinds.LAYOUTS if name != "ngram"]
IN_CI = ("dspark",)  # a draft vocabulary, keys and values of all layers in one matrix, and a Markov head
ROWS = 4  # that the target computed
# What is never quantised, by class: matrices and tables.
FLOAT = {
    "Gemma4MTP": {"model.embed_tokens.weight", "masked_embedding.centroids.weight"},  # of a centroid head
    "Eagle3": {"embed_tokens.weight"},
    "DSpark": {f"markov_head.{name}.weight" for name in ("markov_w1", "gate_proj", "joint_proj")} | {"confidence_head.proj.weight"},
    "DraftModel": {"model.embed_tokens_per_layer.weight"},
}


def matrices(drafter):
    """The matrices of a drafter by path."""
    return {path: leaf for path, leaf in leaves_by_path(drafter, whole=(Packed,)).items() if len(leaf.shape) > 1}


@pytest.mark.parametrize("bits", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ALL)
def test_what_is_quantised(kind, bits):
    """Heads have 8 bits; what is gathered from is float."""
    made = kinds.LAYOUTS[kind]()
    tree = quantising.quantised(made, quantising.asked_quantisation(bits, made, {}, jnp.float32))
    name, found = type(made).__name__, matrices(tree)
    left = {path for path, leaf in found.items() if not is_packed(leaf)}
    if name == "DFlash2":
        assert left and all("_conv." in path or "candidate_selector." in path for path in left)
    elif name == "MTPModules":
        assert all(path.endswith(".eh_proj.weight") for path in left) and len(left) == len(made.modules)
    else:
        assert {path for path in left if not UNPACKED.search(path)} <= FLOAT.get(name, set())
    heads = {path for path in found if path.endswith(("lm_head.weight", "output.weight", "markov_w2.weight", "embed_tokens.weight"))}
    assert {found[path].kind for path in heads - left} <= {"int8"}
    assert {leaf.kind for path, leaf in found.items() if path not in heads | left} == {bits}


def guessed(drafter):
    """What a drafter guesses after random rows of the target."""
    rng, slots = np.random.default_rng(5), jnp.asarray([1, 0], jnp.int32)
    model, batch, hidden = rounds.target(), (2, ROWS), kinds.CONFIG.hidden_size
    ids, anchor = rng.integers(2, rounds.VOCAB, batch).astype(np.int32), jnp.asarray([3, 7], jnp.int32)
    states = [rng.standard_normal((*batch, hidden)).astype(np.float32) for _ in (*drafter.taps, 0)]
    positions = jnp.broadcast_to(jnp.arange(ROWS, dtype=jnp.int32), batch)
    length = jnp.full(2, ROWS, jnp.int32)

    rows = Observed(model, slots, ids, positions, states[-1][:, -1], tuple(states[:-1]), length, anchor)
    return _round(drafter, rows, Sampling(jnp.zeros((2, 2), jnp.uint32), jnp.zeros(2)))


@rounds.compiled
def _round(drafter, rows, sampling):
    state = drafter.observe(drafter.init(2, rounds.MAX_LEN, K), rows)
    return drafter.draft(state, Target(rows.model, None, rows.slots, rows.anchor, rows.committed), sampling, K)[0]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_CI else pytest.mark.slow) for kind in ALL if kind != "assistant"]
)
def test_guesses_are_those_of_the_weights_that_codes_stand_for(kind, tmp_path):
    packed = quantised(tmp_path, kinds.drafter(kind), "int4")
    found, means, other = map(guessed, (packed, dequantised(packed), kinds.drafter(kind)))  # the last two share a program
    np.testing.assert_array_equal(found.tokens, means.tokens)
    np.testing.assert_allclose(found.logits, means.logits, rtol=1e-4, atol=1e-4)
    assert np.max(np.abs(found.logits[:, 0] - other.logits[:, 0])) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("kind", ALL)
def test_texts_and_guesses(kind, bits, tmp_path):
    """Texts are those without drafts, in as many rounds as with the weights that the codes stand for."""
    packed = quantised(tmp_path, kinds.drafter(kind), bits)
    assert bits in packed_kinds(packed)
    texts, taken = rounds.finish(packed, K)
    np.testing.assert_array_equal(texts, rounds.texts())
    np.testing.assert_array_equal(taken, rounds.finish(dequantised(packed), K)[1])


def test_a_dense_assistant_is_quantised_with_its_head(folders, tmp_path):
    """By `load`, from its checkpoint; and `convert` writes what `load` makes."""
    folder = tiny.tiny_assistant(tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text()) | {"use_ordered_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: value for key, value in load_file(folder / "model.safetensors").items() if not key.startswith("masked_embedding")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = pair_of(folders[0]).config
    found = drafters.load_drafter(folder, target, jnp.float32, quantize="int4", progress=False)
    table = found.model.embed_tokens.weight
    assert table.kind == "int8" and all(is_packed(leaf) for leaf in matrices(found).values())
    largest = np.abs(tensors["model.embed_tokens.weight"]).max(axis=1, keepdims=True)
    error = np.abs(np.asarray(unpack(table, jnp.float32)) - tensors["model.embed_tokens.weight"].astype(np.float32))
    assert (error <= largest / 127.5 * 1.3).all()  # of half a step, of the last code, and of scales and weights in bfloat16
    made = {"drafter": folder, "quantize_drafter": "int4", "dtype": "float32", "progress": False}
    converted = jaxspec.convert(folders[0], tmp_path / "converted", **made) / "drafter"
    again = drafters.load_drafter(converted, target, jnp.float32, progress=False)
    assert packed_kinds(again) == packed_kinds(found) == ["int4", "int8"]
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="quantize_drafter is 'int8', but the weights in .* are quantised already"):
        drafters.abstract_drafter(converted, target, jnp.float32, "int8")
    plain = jaxspec.convert(folders[0], tmp_path / "plain", drafter=folder, progress=False) / "drafter"
    with pytest.raises(ValueError, match="was converted with float weights; convert the original with quantize_drafter"):
        drafters.abstract_drafter(plain, target, jnp.float32, "int8")


FILES_IN_CI = ("dflash", "eagle3", "draft model")
FILES = (*FILES_IN_CI, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("assistant", "dspark", "eagle3 speculators")))


@pytest.mark.parametrize("kind", FILES)
def test_quantised_checkpoints(kind, tmp_path):
    """In compressed-tensors' layout, int8 and blocks of fp8, with the head too where it is a matrix of its own."""
    config = {"assistant": kinds.ASSISTANT, "dflash": kinds.DFLASH["z-lab"], "dspark": kinds.DSPARK["speculators"]}
    config |= {"eagle3": kinds.EAGLE3["eagle"], "eagle3 speculators": kinds.EAGLE3["speculators"], "draft model": kinds.SMALL}
    drafter, writes = kinds.drafter(kind), files.float8("block", (16, 16)) if kind == "dflash" else files.pack_quantized(8, None)
    settings = files.compressed("pack-quantized", num_bits=8, strategy="channel")
    if kind == "dflash":
        settings = files.compressed("float-quantized", type="float", strategy="block", block_structure=[16, 16])
    # A config may name what the file has in float, as it does one layer's down_proj.
    settings["ignore"] = ["re:.*embed.*", "masked_embedding.centroids"]
    raw = {**config[kind], "quantization_config": settings}
    prefix = "model." if kind == "draft model" else ""
    checkpoint.save_weights(tmp_path / "float", quantising.checkpoint_part(drafter), raw, prefix=prefix)
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    heads = {key: tensors.pop(key) for key in [*tensors] if key in ("lm_head.weight", "fc.weight")}
    more = {}
    for key, value in heads.items():
        made, heads[key] = writes(key, value)
        more |= made
    leave = ("markov_head", "confidence_head", "embed_tokens", "centroids", "layers.0.mlp.down_proj")
    means = files.write_folder(tmp_path, raw, tensors, writes, leave=lambda key: any(name in key for name in leave), more=more)
    found = drafters.load_drafter(tmp_path, kinds.CONFIG, jnp.float32, progress=False)
    packed = {path for path, leaf in matrices(found).items() if is_packed(leaf)}
    assert packed and not any(name in path for path in packed for name in leave)
    assert packed.issuperset(heads)
    means = {key: value if value.dtype.kind == "i" else value.astype(np.float32) for key, value in (means | heads).items()}
    formulas.write_checkpoint(tmp_path / "means", config[kind], means)
    wanted = drafters.load_drafter(tmp_path / "means", kinds.CONFIG, jnp.float32, progress=False)
    jax.tree.map(np.testing.assert_array_equal, dequantised(found), wanted)


def test_what_the_kernels_do_not_take_is_refused(tmp_path):
    """A quantised Markov gate, by its name; and a format that is not served."""
    drafter, raw = kinds.drafter("dspark"), kinds.DSPARK["speculators"] | {"quantization_config": files.compressed("pack-quantized")}
    checkpoint.save_weights(tmp_path / "float", drafter, raw)
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    files.write_folder(tmp_path, raw, tensors, files.pack_quantized(8, None), leave=lambda key: "markov_w" in key)
    with pytest.raises(ValueError, match=r"markov_head.gate_proj is quantised \(compressed-tensors pack-quantized\); that of a DSpark has"):
        drafters.abstract_drafter(tmp_path, kinds.CONFIG, jnp.float32)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ValueError, match="cannot be used with this target: .* quantised with quant_method 'bitsandbytes'; served are"):
        drafters.abstract_drafter(tmp_path, kinds.CONFIG, jnp.float32)


def test_refusals(folders, capsys):
    for drafter, message in ((None, "the drafter, NoDraft, is no checkpoint"), ("ngram", "the drafter, NGram, is no checkpoint")):
        with pytest.raises(ValueError, match=f"quantize_drafter is 'int8', but {message}"):
            jaxspec.load(folders[0], drafter, quantize_drafter="int8")
    with pytest.raises(ValueError, match="quantize_drafter is 'int5'; available: 'int8', 'int4', 'fp8', or None"):
        jaxspec.load(*folders, quantize_drafter="int5")
    with pytest.raises(ValueError, match=r"weights are quantised \(int8\), and only float weights learn; expected a float drafter"):
        jaxspec.load(*folders, quantize_drafter="int8", learn=0.05)
    with pytest.raises(ValueError, match="only float weights learn"):
        learnable(pair_of(*folders, quantize_drafter="int4").drafter)
    config = kinds.ASSISTANT | {"quantization_config": {"quant_method": "compressed-tensors"}}
    with pytest.raises(
        ValueError, match=r"weights are quantised \(quant_method 'compressed-tensors'\); a drafter that is trained is float"
    ):
        trained.fresh(trained.kind_of("mtp"), config, rounds.target(), rounds.prompts(), 0)
    assert cli.main(["generate", "--target", str(folders[0]), "--prompt", "a", "--quantize-drafter", "int8"]) == 2
    assert "quantize_drafter is 'int8', but the drafter, NoDraft" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quantised_drafter_is_not_trained_further(folders, tmp_path):
    settings = files.compressed("pack-quantized", num_bits=8, strategy="channel")
    raw = json.loads((folders[1] / "config.json").read_text()) | {"quantization_config": settings}
    leave, tensors = lambda key: "centroids" in key or "token_ordering" in key, load_file(folders[1] / "model.safetensors")
    files.write_folder(tmp_path / "int8", raw, tensors, files.pack_quantized(8, None), leave=leave)
    asked = {"init": tmp_path / "int8", "data": Path(jaxspec.__file__), "out": tmp_path / "out", "steps": 1, "length": 16}
    with pytest.raises(ValueError, match=r"the weights of init .* are quantised \(int8\); a drafter that is trained is float"):
        distil(folders[0], "mtp", **asked, progress=False)


def test_info_and_bench_count_its_bytes(capsys):
    lines = {}
    for more in ([], ["--quantize-drafter", "int8"]):
        assert cli.main(["info", "31b", "--drafter", "mtp", "--quantize", "int4", "--memory", "32GB", *more]) == 0
        lines[bool(more)] = capsys.readouterr().out.splitlines()
    assert any("Gemma4MTP, fits" in line and "in int8 and bfloat16" in line for line in lines[True])
    before, after = (next(line for line in lines[more] if line.startswith("weights     ") and "target" in line) for more in (False, True))
    assert before != after
    plans = [plan_bench("31b", "mtp", num_draft_tokens=4, quantize="int4", quantize_drafter=bits) for bits in (None, "int8")]
    wide, narrow = (step_bytes(p.target_tree, p.drafter_tree, batch=1, num_draft_tokens=4, context=512) for p in plans)
    assert wide.target == narrow.target and narrow.drafter == 4 * nbytes(plans[1].drafter_tree) < 0.51 * wide.drafter
    with pytest.raises(ValueError, match="quantize_drafter is 'int8', but a NGram has no weights to quantise"):
        plan_bench("31b", "ngram", quantize_drafter="int8")


def test_it_lies_on_a_mesh():
    """Cut between blocks of 64; a matrix whose product is gathered lies whole where the blocks do not divide."""
    target = released.target_config("31b")
    mesh = sharding.mesh(tensor=2)
    placed = sharding.shard_tree(released.abstract_drafter("mtp", "31b", target, jnp.bfloat16, "int8"), mesh)
    assert placed.model.embed_tokens.weight.words.sharding.spec[0] == "tensor"
    eagle = released.abstract_drafter("eagle3", "e2b", released.target_config("e2b"), jnp.bfloat16, "int4")
    assert sharding.shard_tree(eagle, mesh).lm_head.weight.words.sharding.spec[0] == "tensor"
    placed = sharding.shard_tree(eagle, sharding.mesh(tensor=8))
    assert placed.lm_head.weight.words.sharding.spec[0] is None and placed.fc.weight.words.sharding.spec[0] == "tensor"
    spread = sharding.spread(placed, sharding.mesh(tensor=8))
    assert spread.lm_head.gather_over is None and spread.fc.gather_over == "tensor"
    with pytest.raises(ValueError, match="the head of 32000 tokens is quantised, and its blocks of 64 cannot be spread over 8 devices"):
        sharding.shard_tree(dataclasses.replace(eagle, d2t=None), sharding.mesh(tensor=8))
    dspark = released.abstract_drafter("dspark", "12b", released.target_config("12b"), jnp.bfloat16, "int8")
    spread = sharding.spread(sharding.shard_tree(dspark, mesh), mesh)
    assert dspark.kv_proj.weight.shape[2] == 1 and spread.kv_proj.weight.shape[2] == 2  # a KV head for each device


# On eight devices the blocks of some matrices do not divide, and those of others do.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bits", "devices"),
    [
        *((name, bits, 2) for name in ("mtp", "dflash", "dflash2", "dspark", "eagle3", "modules", "draft") for bits in ("int8", "int4")),
        *((name, "int8", 8) for name in ("dflash", "dspark", "eagle3")),
    ],
)
def test_a_mesh_guesses_the_same(name, bits, devices):
    settings = {"quantize_drafter": bits, "num_draft_tokens": K, "dtype": "float32", "max_slots": 2, "max_len": 96, "progress": False}
    params = jaxspec.SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    alone, both = (
        jaxspec.load("pocket", f"pocket-{name}", mesh=mesh, **settings).generate(["def f(x):"], params)[0]
        for mesh in (None, sharding.mesh(tensor=devices))
    )
    assert alone.token_ids == both.token_ids and alone.stats.accepted == both.stats.accepted
