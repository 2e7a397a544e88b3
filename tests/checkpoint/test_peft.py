"""Adapters of PEFT: merged, the weights are those of merge_and_unload, whatever was adapted and wherever they lie; and what is refused."""

import json
import shutil

import adapters
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from quick import few_programs
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import checkpoint, cli, sharding, targets
from jaxspec.checkpoint import from_floats, onto_devices
from jaxspec.checkpoint.hub import HUB
from jaxspec.trees import leaves_by_path

SETTINGS = {"max_slots": 1, "max_len": 48, "progress": False}
MANY = ["q_proj", "v_proj", "down_proj"]
PATTERNS = {"rank_pattern": {"q_proj": 3, r"layers\.1\..*down_proj": 5}, "alpha_pattern": {"v_proj": 12}}
REGEX = r".*\.layers\.[02]\.self_attn\.(q|k|o)_proj"
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "rank_pattern": {"experts.down_proj": 3}}
TEXT, WHOLE = adapters.text_model, adapters.whole_model
WAYS = {
    "list": (TEXT, "31B", {"target_modules": MANY, "r": 4, "lora_alpha": 16, **PATTERNS}),
    "rslora": (TEXT, "31B", {"target_modules": MANY, "r": 4, "lora_alpha": 16, "use_rslora": True, **PATTERNS}),
    "regex": (TEXT, "12B", {"target_modules": REGEX, "r": 2}),
    "all linear": (TEXT, "E2B", {"target_modules": "all-linear", "r": 2}),
    "layers": (TEXT, "E4B", {"target_modules": ["q_proj", "per_layer_projection"], "layers_to_transform": [1, 4], "r": 2}),
    "excluded": (
        TEXT,
        "31B",
        {"target_modules": MANY, "exclude_modules": r".*layers\.3\..*", "layers_to_transform": [2, 3], "layers_pattern": "layers", "r": 2},
    ),
    "experts": (TEXT, "26B", {"target_modules": ["q_proj", "proj"], "r": 2, **EXPERTS}),
    "saved": (TEXT, "31B", {"target_modules": ["q_proj"], "modules_to_save": ["norm", "layers.1.mlp.up_proj"], "r": 2}),
    "tied": (TEXT, "31B", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, "r": 2}),
    "tokens": (TEXT, "31B", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 130], "r": 2}),
    "tokens by name": (TEXT, "31B", {"target_modules": ["q_proj"], "trainable_token_indices": {"model.embed_tokens": [3, 130]}, "r": 2}),
    "per-layer embedding": (TEXT, "E2B", {"target_modules": ["embed_tokens_per_layer"], "r": 2}),
    "whole class": (WHOLE, "E2B", {"target_modules": r".*language_model\..*\.(q_proj|v_proj|gate_proj)", "r": 2}),
    "whole class, towers too": (WHOLE, "31B", {"target_modules": r".*language_model.*\.(o|up)_proj|.*\.linear", "bias": "all", "r": 2}),
}


def weights(folder, adapter=None, *, place=lambda tree: tree, quantize=None, dtype=jnp.float32):
    """A target's weights by path, the adapter merged."""
    config, _ = targets.read_target(folder)
    quantisation = targets.quantisation_of(folder, config, dtype, quantize, None)
    changes = {} if adapter is None else targets.adapter_changes(adapter, HUB, folder, config, targets.read_quantisation(folder))
    tree = place(targets.abstract_target(config, dtype, quantisation))
    return {
        path: np.asarray(leaf)
        for path, leaf in leaves_by_path(targets.load_target(folder, tree, quantisation, changes, progress=False)).items()
    }


def assert_close(found, wanted, limit=1e-6):
    assert found.keys() == wanted.keys()
    for path in wanted:
        np.testing.assert_allclose(found[path].astype(np.float32), wanted[path].astype(np.float32), atol=limit, rtol=limit, err_msg=path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An adapter of a few kinds of matrices."""
    return adapters.adapted(
        adapters.text_model("31B"), tmp_path_factory.mktemp("plain"), target_modules=MANY, r=4, lora_alpha=16, **PATTERNS
    )


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_of_merge_and_unload(way, tmp_path):
    make, member, lora = WAYS[way]
    made = adapters.adapted(make(member), tmp_path, **lora)
    base, wanted = weights(made.target), weights(made.merged)
    changed = {path for path in base if not np.array_equal(base[path], wanted[path])}
    assert changed and (len(changed) < len(base))
    assert_close(weights(made.target, made.adapter), wanted)


@pytest.mark.parametrize("compiled", ["_orig_mod.base_model.model.", "base_model.model._orig_mod."])
def test_an_adapter_of_a_compiled_model(plain, tmp_path, compiled):
    edited = adapters.edited(plain.adapter, tmp_path / "edited")
    tensors = load_file(edited / "adapter_model.safetensors")
    save_file(
        {key.replace("base_model.model.", compiled, 1): tensor for key, tensor in tensors.items()}, edited / "adapter_model.safetensors"
    )
    assert_close(weights(plain.target, edited), weights(plain.merged))


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_one_table_is_embedding_and_head(module, tmp_path):
    """As merge_and_unload, which says so too; adapted alike, the table changes once, as it was trained."""
    made = adapters.adapted(adapters.text_model("31B"), tmp_path / "one", target_modules=["q_proj", module], r=2)
    with pytest.warns(UserWarning, match=f"was trained on {module} alone; embedding and head are one table, and both change"):
        assert_close(weights(made.target, made.adapter), weights(made.merged))


def test_a_table_that_was_adapted_as_both_changes_once(tmp_path):

    lora = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True, "r": 2}
    made = adapters.adapted(adapters.text_model("31B"), tmp_path / "both", **lora)
    found = weights(made.target, made.adapter)["embed_tokens.weight"]
    tensors = load_file(made.adapter / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.model.embed_tokens.lora_embedding_{side}"] for side in "AB")
    np.testing.assert_allclose(found, weights(made.target)["embed_tokens.weight"] + 8 / 2 * (b @ a).T, atol=1e-6)
    tensors["base_model.model.lm_head.lora_A.weight"] += 1
    other = adapters.edited(made.adapter, tmp_path / "other")
    save_file(tensors, other / "adapter_model.safetensors")
    refuse(made.target, other, "embedding and head are one table here, and were adapted in two ways; expected ensure_weight_tying")


def test_a_table_has_one_scale(tmp_path):
    """PEFT ties the factors of embedding and head, and takes the alpha of each from the patterns."""
    lora = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True, "r": 2, "lora_alpha": 4}
    for name, pattern in (("embedding", {"embed_tokens": 16}), ("head", {"lm_head": 16})):
        made = adapters.adapted(adapters.text_model("31B"), tmp_path / name, **lora, alpha_pattern=pattern)
        refuse(
            made.target,
            made.adapter,
            r"expected ensure_weight_tying, and the same alpha and rank for both \(their scales are [28] and [28]\)",
        )
    made = adapters.adapted(adapters.text_model("31B"), tmp_path / "both", **lora, alpha_pattern={"lm_head|embed_tokens": 16})
    a, b = (load_file(made.adapter / "adapter_model.safetensors")[f"base_model.model.model.embed_tokens.lora_embedding_{s}"] for s in "AB")
    found, before = (weights(*given)["embed_tokens.weight"] for given in ((made.target, made.adapter), (made.target,)))
    np.testing.assert_allclose(found, before + 8 * (b @ a).T, atol=1e-6)


def test_an_adapter_of_one_class_fits_the_checkpoint_of_the_other(plain, tmp_path):
    """Of the text-only class on conditional generation's keys, and of the bare model without a head."""
    config = checkpoint.read_config(plain.target)
    tensors = {
        key.replace("model.", "model.language_model.", 1): value for key, value in load_file(plain.target / "model.safetensors").items()
    }
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    (tmp_path / "whole" / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": config}))
    wanted = weights(plain.merged)
    assert_close(weights(tmp_path / "whole", plain.adapter), wanted)
    bare = adapters.edited(plain.adapter, tmp_path / "bare")
    tensors = load_file(plain.adapter / "adapter_model.safetensors")
    save_file(
        {key.replace("base_model.model.model.", "base_model.model."): x for key, x in tensors.items()}, bare / "adapter_model.safetensors"
    )
    assert_close(weights(plain.target, bare), wanted)


def test_one_rounding_to_the_dtype_of_the_weights(tmp_path):
    """In bfloat16 as merge_and_unload: the sum is made in float32, and differs by no more than an order of additions can."""
    made = adapters.adapted(adapters.text_model("31B"), tmp_path, dtype=torch.bfloat16, target_modules=MANY, r=4)
    found, wanted = weights(made.target, made.adapter, dtype=jnp.bfloat16), weights(made.merged, dtype=jnp.bfloat16)
    same = np.concatenate([(found[path] == wanted[path]).ravel() for path in wanted])
    assert np.mean(same) > 0.9999
    # Also where the target computes in float32.
    assert_close(weights(made.target, made.adapter), {path: value.astype(np.float32) for path, value in found.items()}, 0)


def test_on_a_mesh_from_converted_weights_and_in_chunks(tmp_path, monkeypatch):
    lora = {"target_modules": ["q_proj", "o_proj", "gate_proj", "embed_tokens"], "ensure_weight_tying": True, "r": 2, **EXPERTS}
    made = adapters.adapted(adapters.text_model("26B"), tmp_path, **lora)
    wanted = weights(made.target, made.adapter)
    mesh = sharding.mesh(data=2, tensor=2)

    def place(tree):
        return sharding.shard_tree(tree, mesh)

    assert_close(weights(made.target, made.adapter, place=place), wanted, 0)
    (made.target / "tokenizer.json").touch()  # without one it would be no target
    before = jaxspec.convert(made.target, tmp_path / "before", progress=False)
    merged = jaxspec.convert(made.target, tmp_path / "after", adapter=made.adapter, progress=False)
    assert_close(weights(before, made.adapter), wanted, 0)
    assert_close(weights(before, made.adapter, place=place), wanted, 0)
    assert_close(weights(merged), wanted, 0)
    monkeypatch.setattr(onto_devices, "LARGE_BYTES", 2_000)
    monkeypatch.setattr(onto_devices, "COPIED_BYTES", 1_000)
    monkeypatch.setattr(from_floats, "COPIED_BYTES", 1_000)
    assert_close(weights(made.target, made.adapter), wanted, 1e-6)


def test_weights_are_quantised_once_they_are_merged(plain):
    for kind in ("int8", "int4"):
        found, wanted = weights(plain.target, plain.adapter, quantize=kind), weights(plain.merged, quantize=kind)
        same = np.concatenate([(found[path] == wanted[path]).ravel() for path in wanted])
        assert np.mean(same) > 0.999 and found.keys() == wanted.keys()


@pytest.fixture(scope="module")
def folders_with_adapter(folders, tmp_path_factory):
    """The tiny target and its assistant, and an adapter in PEFT's layout that PEFT itself can merge."""
    root = tmp_path_factory.mktemp("adapter")
    rng = np.random.default_rng(5)
    tensors = {}
    for layer in range(2):
        stem = f"base_model.model.model.language_model.layers.{layer}.mlp.down_proj.lora_"
        tensors[f"{stem}A.weight"] = rng.standard_normal((2, 48), np.float32)
        tensors[f"{stem}B.weight"] = rng.standard_normal((32, 2), np.float32)
    save_file(tensors, root / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["down_proj"], "base_model_name_or_path": "tiny/target"}
    (root / "adapter_config.json").write_text(json.dumps(config))
    return *folders, root


def test_load_merges_and_the_drafter_guesses_on(folders_with_adapter, tmp_path, capsys, unoptimised, monkeypatch):
    few_programs(monkeypatch)
    target, assistant, adapter = folders_with_adapter
    params = jaxspec.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    llm = jaxspec.load(target, assistant, adapter=adapter, **SETTINGS)
    assert llm.name == f"{target} with {adapter}"
    assert not np.array_equal(llm.target.layers[0].mlp.down_proj.weight, weights(target)["layers.0.mlp.down_proj.weight"])
    found = llm.generate("def f(x):", params)[0].token_ids
    assert cli.main(["convert", str(target), str(tmp_path / "out"), "--adapter", str(adapter), "--dtype", "float32"]) == 0
    assert jaxspec.load(tmp_path / "out", **SETTINGS).generate("def f(x):", params)[0].token_ids == found
    later = jaxspec.load(target, assistant, **SETTINGS)
    for name, merged in (({"adapter": adapter}, True), ({"target": target}, False)):
        later.update_weights(**name)
        assert later.name == (llm.name if merged else str(target))
        assert (later.generate("def f(x):", params)[0].token_ids == found) == merged
    capsys.readouterr()
    assert cli.main(["info", str(target), "--adapter", str(adapter)]) == 0
    assert "adapter     changes 2 weights\n" in capsys.readouterr().out


# What is refused


def refuse(target, adapter, message, kind=ValueError):
    config, _ = targets.read_target(target)
    with pytest.raises(kind, match=message):
        targets.adapter_changes(adapter, HUB, target, config, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "has peft_type 'IA3'; served is 'LORA', merge others with PEFT's merge_and_unload"),
        ({"peft_type": "PROMPT_TUNING"}, "has peft_type 'PROMPT_TUNING'"),
        ({"use_dora": True}, "has use_dora, DoRA, which scales every row"),
        ({"lora_bias": True}, "has lora_bias, biases, and the target's matrices have none"),
        ({"alora_invocation_tokens": [1]}, "has alora_invocation_tokens, an activated LoRA"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "has layer_replication, repeated layers"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa', which changed the target's weights before it trained"),
        ({"use_new": True}, "has use_new True, which is not known here; expected a plain LoRA"),
        ({"r": 6}, r"v_proj: found A \[4, 32\], expected rank 6"),
        ({"target_modules": ["q_proj"]}, "down_proj: is not among what adapter_config.json says was adapted"),
        ({"target_modules": [*MANY, "up_proj"]}, "up_proj: missing, and adapter_config.json says that it was adapted"),
        ({"r": 0}, "adapter_config.json of the adapter '.*edited' has r 0; expected a whole number of at least 1"),
        ({"r": "4"}, "has r '4'; expected a whole number"),
        ({"lora_alpha": float("nan")}, "has lora_alpha nan; expected a finite number"),
        ({"lora_alpha": True}, "has lora_alpha True; expected a finite number"),
        ({"target_modules": "("}, r"has target_modules '\('; expected a regular expression or a list of names"),
        ({"modules_to_save": "norm"}, "has modules_to_save 'norm'; expected a list of names"),
        ({"layers_to_transform": "1"}, "has layers_to_transform '1'; expected the number of a layer or a list of them"),
        ({"rank_pattern": ["q_proj"]}, r"has rank_pattern \['q_proj'\]; expected an object of regular expressions to whole numbers"),
        (
            {"alpha_pattern": {"q_proj": "8"}},
            "has alpha_pattern {'q_proj': '8'}; expected an object of regular expressions to",
        ),
        ({"trainable_token_indices": "35"}, "has trainable_token_indices '35'; expected a list of token ids"),
        ({"layers_to_transform": 1}, r"layers\.0\..*: is not among what adapter_config.json says was adapted"),
    ],
)
def test_an_adapter_of_another_kind(plain, tmp_path, changes, message):
    refuse(plain.target, adapters.edited(plain.adapter, tmp_path / "edited", **changes), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, k: t.update(extra=t[k]), "extra: unknown"),
        (lambda t, k: t.pop(k), r"q_proj: found lora_B alone, expected lora_A and lora_B"),
        (lambda t, k: t.update({k: t[k][:, :-1].copy()}), r"q_proj: made for a matrix of \[64, 31\], the target's is \[64, 32\]"),
        (lambda t, k: t.update({k: t[k][:-1].copy()}), r"q_proj: found A \[2, 32\] and B \[64, 3\], expected \[r, in\] and \[out, r\]"),
        (lambda t, k: t.update({k: t[k].astype(np.int32)}), "lora_A.weight: found I32, expected one of F64, F32"),
        (
            lambda t, k: t.update({key.replace("layers.0", "layers.9"): t[key] for key in (k, k.replace("lora_A", "lora_B"))}),
            r"layers\.9\.self_attn\.q_proj: matches no weight of the target",
        ),
        (lambda t, k: t.update({"base_model.model.score.weight": t[k]}), r"score.weight: unknown, found F32 \[3, 32\]"),
        (
            lambda t, k: t.update({"base_model.model.model.embed_tokens.weight": np.zeros((140, 32), np.float32)}),
            r"embed_tokens.weight: found \[140, 32\], expected \[131, 32\]",
        ),
        (
            lambda t, k: t.update({"base_model.model.lm_head.weight": np.zeros((131, 32), np.float32)}),
            "lm_head.weight: differs from embed_tokens.weight; expected none, as the two are tied",
        ),
    ],
)
def test_tensors_that_do_not_fit(plain, tmp_path, change, message):
    edited = adapters.edited(plain.adapter, tmp_path / "edited", base_model_name_or_path="some/model")
    tensors = load_file(edited / "adapter_model.safetensors")
    change(tensors, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    save_file(tensors, edited / "adapter_model.safetensors")
    refuse(plain.target, edited, f"which was made for 'some/model', does not fit the target, [0-9]+ problems?:(.|\n)*{message}")


def test_a_table_that_was_trained_without_the_head(tmp_path):
    made = adapters.adapted(adapters.text_model("31B"), tmp_path, target_modules=["q_proj"], modules_to_save=["embed_tokens"], r=2)
    refuse(made.target, made.adapter, "embed_tokens.weight: trained without the head, which is the same table here; expected both, or")


def test_tokens_that_the_table_does_not_have(tmp_path):
    made = adapters.adapted(adapters.text_model("31B"), tmp_path, target_modules=["q_proj"], trainable_token_indices=[3, 5], r=2)
    edited = adapters.edited(made.adapter, tmp_path / "edited", trainable_token_indices=[3, 131])
    refuse(made.target, edited, r"embed_tokens.token_adapter: found F32 \[2, 32\] for trainable_token_indices \[3, 131\]")


def test_tokens_of_the_head_alone(tmp_path):
    made = adapters.adapted(
        adapters.text_model("31B"), tmp_path, target_modules=["q_proj"], trainable_token_indices={"lm_head": [3, 5]}, r=2
    )
    refuse(
        made.target, made.adapter, "lm_head.token_adapter: not that of embed_tokens, which is the same table; expected rows of both alike"
    )


def test_an_adapter_of_the_towers_alone(plain, tmp_path):
    edited = adapters.edited(plain.adapter, tmp_path / "edited")
    tensors = load_file(edited / "adapter_model.safetensors")
    save_file(
        {key.replace("model.model.", "model.model.vision_tower."): x for key, x in tensors.items()}, edited / "adapter_model.safetensors"
    )
    refuse(plain.target, edited, "missing, and adapter_config.json says")
    config = json.loads((edited / "adapter_config.json").read_text()) | {"target_modules": r".*vision_tower.*"}
    (edited / "adapter_config.json").write_text(json.dumps(config))
    target = shutil.copytree(plain.target, tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.POCKET / name, target / name)
    none = f"the adapter '{edited}' changes none of the target's text weights"
    with pytest.raises(ValueError, match=f"{none}; if it changes the image tower, load with images=True"):
        jaxspec.load(target, adapter=edited, max_len=64, progress=False)
    with jaxspec.load(target, max_len=64, progress=False) as llm, pytest.raises(ValueError, match=none):
        llm.update_weights(adapter=edited)
    with pytest.raises(ValueError, match=f"{none}, and {target} has no image tower"):
        jaxspec.convert(target, tmp_path / "converted", adapter=edited, progress=False)


def test_an_adapter_of_nothing(plain, tmp_path):
    edited = adapters.edited(plain.adapter, tmp_path / "edited", target_modules=[])
    save_file({}, edited / "adapter_model.safetensors")
    refuse(plain.target, edited, "1 problem:\n  it changes none of the target's weights")


def test_no_adapter(plain, tmp_path):
    refuse(plain.target, plain.target, "has no adapter_config.json; expected a folder that PEFT's save_pretrained wrote", FileNotFoundError)
    adapters.edited(plain.adapter, tmp_path / "mine")
    refuse(plain.target, tmp_path, "has no adapter_config.json; expected one of the adapters in it: mine$", FileNotFoundError)
    bare = adapters.edited(plain.adapter, tmp_path / "bare")
    (bare / "adapter_model.safetensors").rename(bare / "adapter_model.bin")
    refuse(plain.target, bare, r"adapter_model.bin is a pickle.*save_file\(.*'adapter_model.safetensors'")
    (bare / "adapter_model.bin").unlink()
    refuse(plain.target, bare, "has no adapter_model.safetensors", FileNotFoundError)
    refuse(plain.target, "no/such", "'no/such' is not in the hub's cache", FileNotFoundError)


def test_quantised_weights_and_shapes_take_no_adapter(folders_with_adapter, tmp_path, capsys):
    target, _, adapter = folders_with_adapter
    quantised = jaxspec.convert(target, tmp_path / "int8", quantize="int8", progress=False)
    message = (
        f"the adapter '{adapter}' cannot be merged into .*int8, whose weights are quantised .* expected the float weights, which quantize="
    )
    with pytest.raises(ValueError, match=message):
        jaxspec.load(quantised, adapter=adapter, **SETTINGS)
    with pytest.raises(ValueError, match=message):
        jaxspec.convert(quantised, tmp_path / "again", adapter=adapter)
    assert cli.main(["info", "e2b", "--adapter", str(adapter)]) == 2
    assert "'e2b' is a released shape without weights, which no adapter can be merged into" in capsys.readouterr().err


def test_experts_in_several_tensors_take_no_adapter(tmp_path):
    made = adapters.adapted(adapters.text_model("26B"), tmp_path, target_modules=["q_proj"], r=2, **EXPERTS)
    tensors = load_file(made.target / "model.safetensors")
    for key in [key for key in tensors if key.endswith("experts.gate_up_proj")]:
        for i, both in enumerate(tensors.pop(key)):
            for name, half in zip(("gate_proj", "up_proj"), np.split(both, 2), strict=True):
                tensors[f"{key.removesuffix('gate_up_proj')}{i}.{name}.weight"] = half.copy()
    save_file(tensors, made.target / "model.safetensors")
    with pytest.raises(ValueError, match="layers.0.experts.gate_up_proj: the adapter changes it, and it lies in several tensors"):
        weights(made.target, made.adapter)
