"""Activations rounded to fp8: which products take them, texts with drafts and on meshes, files of every sort, and what is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import quantised_files as files
import tiny
from safetensors.numpy import load_file

import jaxspec
from jaxspec import cli, sharding
from jaxspec.bench.random_weights import random_weights
from jaxspec.bench.workload import plan_bench
from jaxspec.engine import trials
from jaxspec.model.head_guides import guided
from jaxspec.planning import pair_of, plan, released_pair
from jaxspec.sharding import kv_heads
from jaxspec.sharding.placement import placement_of
from jaxspec.trees import is_packed, leaves_by_path
from pallas_kernels import float8_rows
from pallas_kernels.packed import Packed

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SETTINGS = {"max_slots": 2, "max_len": 48, "progress": False}
FP8 = {"quantize": "fp8", "quantize_activations": "fp8"}
PROMPTS = ["def f(x):", "import os"]
PARAMS = jaxspec.SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
# Widths of whole blocks, of which a mesh has two to spread; two devices share a KV head.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "global_head_dim": 64, "hidden_size_per_layer_input": 64}
CHANNEL = files.compressed("float-quantized", type="float")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint in fp8, as llm-compressor writes it."""
    return in_format(tiny.tiny_target(tmp_path_factory.mktemp("wide") / "target", **WIDE), CHANNEL, files.float8("channel"))


def in_format(folder, settings, write, **more):
    """The float checkpoint of a folder, in a format."""
    config = json.loads((folder / "config.json").read_text())
    files.write_folder(folder, config | {"quantization_config": settings}, load_file(folder / "model.safetensors"), write, **more)
    return folder


@pytest.fixture(scope="module")
def llm(folders):
    return jaxspec.load(folders[0], **FP8, **SETTINGS)


def texts(llm, params=PARAMS):
    return [done.token_ids for done in llm.generate(PROMPTS, params)]


def assert_near(found, expected):
    """The same tokens as completions with log-probabilities, or at the first difference two that were about as likely. The last bit of a
    sum, which depends on the number of rows, may decide how an activation is rounded, and then those that follow from it differ too."""
    for ids, wanted in zip(found, expected, strict=True):
        at = next((i for i, pair in enumerate(zip(ids, wanted.token_ids, strict=True)) if len(set(pair)) == 2), None)
        if at is not None:
            likely = wanted.logprobs[at]
            assert likely[wanted.token_ids[at]].logprob - likely[ids[at]].logprob < 0.3


def inputs(tree):
    """What rows are rounded to, by the path of each packed matrix."""
    return {path: leaf.inputs for path, leaf in leaves_by_path(tree, whole=(Packed,)).items() if is_packed(leaf)}


@pytest.mark.slow  # below are the products; tests/drafters/test_quantised_target.py has texts
def test_texts_are_others_and_the_same_with_drafts(folders, llm):
    """Of all matrices of the layers the rows are rounded; tests/checkpoint/test_quantised.py has the logits."""
    assert set(inputs(llm.target).values()) == {"fp8"} and "layers.0.per_layer_input_gate.weight" in inputs(llm.target)
    assert llm.text_settings["quantised"] == "fp8 and fp8 activations"
    floats = jaxspec.load(folders[0], quantize="fp8", **SETTINGS)
    assert floats.text_settings["quantised"] == "fp8" and texts(floats) != texts(llm)
    with_drafts = jaxspec.load(*folders, num_draft_tokens=4, **FP8, **SETTINGS)
    assert_near(texts(with_drafts), llm.generate(PROMPTS, PARAMS.replace(logprobs=5)))
    assert not any(inputs(with_drafts.drafter).values())


@pytest.mark.slow  # tests/kernels/test_float8_rows.py has the kernels
def test_kernels_round_the_same_rows(wide):
    """Two of them a layer together with what comes before: see tests/test_launch_dependents.py."""
    scored = PARAMS.replace(max_tokens=1, prompt_logprobs=0)
    scores = []
    for attention in ("xla", "triton-interpret"):
        llm = jaxspec.load(wide, quantize_activations="fp8", attention=attention, **SETTINGS)
        rounded, *_ = llm.generate(["def f(x): return x"], scored)
        scores.append([next(iter(entry.values())).logprob for entry in rounded.prompt_logprobs[1:]])
    gap = np.abs(np.subtract(*scores))
    assert np.median(gap) < 1e-5 and gap.mean() < 5e-3, gap


@pytest.mark.slow  # the same of a tiny model above
def test_pocket_texts_are_nearly_the_same_with_drafts():
    settings, params = {"dtype": "float32", **FP8, **SETTINGS, "max_len": 96}, PARAMS.replace(max_tokens=80)
    expected = jaxspec.load("pocket", **settings).generate(PROMPTS, params.replace(logprobs=5))
    found = jaxspec.load("pocket", "pocket-mtp", num_draft_tokens=4, **settings)
    assert_near(texts(found, params), expected)
    assert found.stats.accepted > found.stats.steps


def test_a_converted_checkpoint_takes_it_when_it_is_loaded(folders, llm, tmp_path):
    """It is a setting of a run: the file is that of fp8 weights, whatever they are multiplied with."""
    converted = jaxspec.convert(folders[0], tmp_path / "converted", dtype="float32", quantize="fp8", progress=False)
    assert "activations" not in (converted / "jaxspec.json").read_text()
    found = jaxspec.load(converted, quantize_activations="fp8", **SETTINGS)
    assert inputs(found.target) == inputs(llm.target) and texts(found) == texts(llm)
    assert not any(inputs(jaxspec.load(converted, **SETTINGS).target).values())


def test_matrices_of_other_kinds_take_rows_as_they_are(tmp_path):
    """Of a checkpoint in several formats, those in fp8 alone; of experts none, and no embedding."""
    experts = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 64}
    folder = tiny.tiny_target(tmp_path / "mixed", **WIDE, **experts)
    four, eight = (found["config_groups"]["group_0"] for found in (files.compressed("pack-quantized", num_bits=4), CHANNEL))
    groups = {"a": four | {"targets": ["re:.*self_attn.*"], "format": "pack-quantized"}, "b": eight | {"format": "float-quantized"}}
    writers = files.pack_quantized(4, None), files.float8("channel")
    settings = CHANNEL | {"format": "mixed-precision", "config_groups": groups}
    in_format(folder, settings, lambda key, weights: writers["self_attn" not in key](key, weights), names="index")
    target = jaxspec.load(folder, quantize_embedding="int8", quantize_activations="fp8", **SETTINGS).target
    found = inputs(target)
    kept = {path for path, rounded in found.items() if rounded is None}
    assert {path.rpartition("layers.")[2].lstrip("01.") for path in kept} == {
        *(
            "embed_tokens.weight",
            "embed_tokens_per_layer.weight",
            "self_attn.qkv_proj.weight",
            "self_attn.o_proj.weight",
            "experts.gate_up_proj",
            "experts.down_proj",
        )
    }
    rounded = {f"layers.1.{name}.weight" for name in ("mlp.gate_up_proj", "per_layer_input_gate", "per_layer_projection")}
    assert rounded | {"per_layer_model_projection.weight"} < found.keys() - kept
    assert target.layers[0].experts.down_proj.kind == "fp8"


# On meshes


def test_parts_of_a_row_are_rounded_as_the_row_is():
    """But for numbers that e4m3 has no normal ones for: so a mesh, each device of which rounds its part, is as one device. What a scale
    that is no power of two would not be."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 128)) * np.exp(3 * rng.standard_normal((64, 128))), jnp.float32)
    whole = float8_rows.rounded(x, implementation="xla")
    parts = float8_rows.rounded(x.reshape(64, 4, 32), implementation="xla").reshape(x.shape)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    assert (whole != parts).any()
    assert (np.abs(x)[whole != parts] < np.broadcast_to(largest, x.shape)[whole != parts] * 2.0**-13).all()
    assert (np.abs(whole - parts) <= largest * 2.0**-16).all()


@pytest.mark.slow  # tests/sharding/test_packed.py has quantised weights on meshes
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"tensor": 2}])
def test_a_mesh_is_near_one_device(wide, axes):
    """Log-probabilities of prompts. Where the last bit of a sum rounds a number the other way they differ more, but that is rare."""
    prompts = np.random.default_rng(0).integers(100, 4000, (4, 24)).tolist()

    def scored(**settings):
        llm = jaxspec.load(wide, dtype="float32", **SETTINGS | {"max_slots": 4}, **settings)
        outs = llm.generate(prompts, jaxspec.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
        steps = [
            [step[token] for token, step in zip(ids, out.prompt_logprobs, strict=True) if step]
            for ids, out in zip(prompts, outs, strict=True)
        ]
        return llm.target, np.asarray([[found.logprob for found in row] for row in steps])

    _, expected = scored(quantize_activations="fp8")
    _, floats = scored()
    target, found = scored(quantize_activations="fp8", mesh=sharding.mesh(**axes))
    layer = target.layers[0]
    assert layer.mlp.down_proj.sum_over == layer.self_attn.o_proj.sum_over == "tensor" and set(inputs(target).values()) == {"fp8"}
    errors, effect = np.abs(found - expected), np.abs(floats - expected)
    assert np.median(errors) < 1e-4 and errors.mean() < 0.3 * effect.mean()


def test_it_stays_wherever_weights_go():
    """Placed on a mesh, with heads dealt out, cut into data shards, and as plain functions take them; with random weights too."""
    tree = released_pair("e2b", **FP8).target
    expected = inputs(tree)
    assert set(expected.values()) == {"fp8"} and not any("embed_tokens." in path for path in expected)
    abstract = placement_of(sharding.mesh(data=2, tensor=2))
    placed = abstract.place(tree)
    spread = abstract.spread(placed)
    assert inputs(placed) == inputs(spread) == inputs(kv_heads.unspread(spread)) == expected
    assert spread.layers[0].self_attn.o_proj.weight.shape != tree.layers[0].self_attn.o_proj.weight.shape
    assert inputs(guided(tree)) == expected | {"embed_tokens.guide.codes": None}
    small = pair_of("pocket", **FP8).target
    made = random_weights(abstract.spread(abstract.place(small)))
    assert inputs(made) == inputs(small) and made.layers[0].mlp.gate_up_proj.weight.flat().inputs == "fp8"
    for (target, _), _ in abstract.split((made, None)):
        assert inputs(target) == inputs(small)


def test_a_plan_is_that_of_fp8_weights():
    sizes = {"max_len": 4096, "num_draft_tokens": 0, "default_slots": 8}
    plans = [plan(released_pair("e2b", quantize="fp8", quantize_activations=name), 80 * 10**9, **sizes) for name in (None, "fp8")]
    assert plans[0] == plans[1]


# What else takes it, and what is refused


@pytest.mark.slow  # tests/engine/test_learn.py has a quantised target, and the texts above are those with drafts
@pytest.mark.parametrize("axes", [{}, {"tensor": 2}])
def test_a_drafter_learns_beside_it(wide, tmp_path, monkeypatch, axes):
    """Texts are nearly those without learning, whatever weights are tried and taken."""
    assistant = tiny.tiny_assistant(tmp_path / "assistant", backbone_hidden_size=64, head_dim=64, global_head_dim=64)
    monkeypatch.setattr(trials, "LEAST", 1)
    monkeypatch.setattr(trials, "ALIKE", 1e9)
    learn = jaxspec.Learn(share=0.9, batch=4, length=32, anchors=8, rate=1e-2, every=1)
    settings = {"num_draft_tokens": 2, "quantize_activations": "fp8", "mesh": jaxspec.mesh(**axes) if axes else None, **SETTINGS}
    with jaxspec.load(wide, assistant, **settings) as llm:
        expected = llm.generate(PROMPTS, PARAMS.replace(logprobs=5))
    with jaxspec.load(wide, assistant, learn=learn, **settings) as llm:
        while not llm.learning.stats.taken:
            assert_near(texts(llm), expected)


@pytest.mark.slow  # tests/test_cli.py has the commands
def test_commands_have_it(folders, tmp_path, capsys):
    """Texts and a plan; a batch is not resumed with other activations; a conversion has no such option."""
    asked = ["--quantize", "fp8", "--quantize-activations", "fp8"]
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    command = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--target", str(folders[0])]
    command += ["--max-len", "16", "--max-slots", "1", "--quantize", "fp8"]
    assert cli.main([*command, *asked[2:]]) == 0
    assert cli.main(command) == 2
    assert "was made with quantised 'fp8 and fp8 activations', not 'fp8'" in capsys.readouterr().err
    assert cli.main(["info", "pocket", "--plan", "--memory", "1GB", *asked]) == 0
    assert "quantised   fp8, fp8 activations\n" in capsys.readouterr().out
    assert cli.main(["info", "pocket", *asked[2:]]) == 2
    assert "quantize_activations is 'fp8', but the weights" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["convert", str(folders[0]), str(tmp_path / "made"), *asked])
    assert "unrecognized arguments: --quantize-activations" in capsys.readouterr().err


def test_a_bench_times_it(wide):
    plans = [
        plan_bench(config, quantize=kind, quantize_activations="fp8", context=4, tokens=4)
        for config, kind in (("e2b", "fp8"), (str(wide), None))
    ]
    assert all(set(inputs(found.target_tree).values()) == {"fp8"} for found in plans)
    assert [found.quantize_activations for found in plans] == ["fp8", "fp8"]


@pytest.mark.slow
def test_a_bench_says_so(folders, tmp_path, capsys):
    asked = [
        "--context",
        "4",
        "--tokens",
        "4",
        "--repeats",
        "1",
        "--dtype",
        "float32",
        "--quantize",
        "fp8",
        "--quantize-activations",
        "fp8",
    ]
    assert cli.main(["bench", "--config", str(folders[0]), *asked, "--json", str(tmp_path / "json")]) == 0
    assert "target quantised to fp8, activations in fp8" in capsys.readouterr().out
    assert json.loads((tmp_path / "json").read_text())["quantize_activations"] == "fp8"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize_activations": "int8"}, "quantize_activations is 'int8'; available: 'fp8', or None for activations as they are"),
        ({}, "'fp8', but the weights of the target's layers, .*, are float; expected fp8, which quantize='fp8' makes"),
        ({"quantize_embedding": "int8"}, "are float; expected fp8, which quantize='fp8' makes"),
        ({"quantize": "int8"}, "quantize_activations is 'fp8', but .*, routed experts aside, are in int8; expected fp8$"),
        ({"quantize": "int4"}, "are in int4; expected fp8$"),
    ],
)
def test_weights_that_are_not_in_fp8_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        jaxspec.load("pocket", **{"quantize_activations": "fp8", **settings})


def test_checkpoints_whose_layers_are_not_in_fp8_are_refused(tmp_path):
    """By their formats: here fp4, and one that has fp8 experts alone."""
    experts = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 64}
    folder = tiny.tiny_target(tmp_path / "target", **WIDE, **experts)
    tensors = load_file(folder / "model.safetensors")
    only = CHANNEL | {"ignore": ["re:.*(mlp|self_attn|router|per_layer).*", "lm_head"]}
    four = files.compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
    for settings, write, leave, message in (
        (four, files.float4(False), lambda key: "router" in key, "are in fp4; expected fp8$"),
        (only, files.float8("channel"), lambda key: "experts" not in key, "routed experts aside, are float; expected fp8"),
    ):
        config = {**tiny.TARGET, "text_config": {**tiny.TEXT, **WIDE, **experts}, "quantization_config": settings}
        files.write_folder(folder, config, tensors, write, names="index", leave=leave)
        with pytest.raises(ValueError, match=message):
            jaxspec.load(folder, quantize_activations="fp8", **SETTINGS)
