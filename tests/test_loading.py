"""load: what it takes, its defaults, and every refusal."""

import copy
import gc
import inspect
import json
import pickle
import re
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import pytest
import tiny

import jaxspec
from jaxspec import Learn, foreign_names, loading, planning, sharding
from jaxspec.decode import accept
from jaxspec.drafters.assistant import Gemma4MTP
from jaxspec.engine.params import Defaults, SamplingParams
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.sharding import meshes as mesh_files


@pytest.fixture(scope="module")
def llm(folders):
    return jaxspec.load(*folders, progress=False)


def edited(folder, to, name, **changes):
    """A copy of a checkpoint with other entries in one of its json files; None takes one away."""
    shutil.copytree(folder, to)
    config = json.loads((to / name).read_text())
    config.update(changes)
    (to / name).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return to


def test_defaults_come_from_the_checkpoints(llm, folders, tmp_path):
    assert isinstance(llm.drafter, Gemma4MTP)
    assert llm.num_draft_tokens == 3  # the assistant's generation config
    assert (llm.max_len, llm.max_slots) == (256, 8)  # the target's max_position_embeddings
    assert llm.target.dtype == jnp.float32  # bfloat16 in the checkpoint, but on a CPU
    assert (llm.eos_token_ids, llm.defaults) == (tiny.EOS, Defaults(temperature=1.0, top_k=64, top_p=0.95))
    silent = edited(folders[1], tmp_path / "silent", "generation_config.json", num_assistant_tokens=None)
    assert jaxspec.load(folders[0], silent, progress=False).num_draft_tokens == 4
    left = edited(folders[1], tmp_path / "left", "generation_config.json", num_assistant_tokens=6.0)
    assert jaxspec.load(folders[0], left, progress=False).num_draft_tokens == 6


@pytest.mark.parametrize(
    ("named", "message"),
    [(-1, "num_assistant_tokens is -1, expected at least 0"), ("3", "num_assistant_tokens is '3' of type str, expected an integer")],
)
def test_a_drafters_own_number_of_drafts_is_checked(folders, tmp_path, named, message):
    wrong = edited(folders[1], tmp_path / "wrong", "generation_config.json", num_assistant_tokens=named)
    with pytest.raises(ValueError, match=f"generation_config.json in .*wrong: {message}"):
        jaxspec.load(folders[0], wrong, progress=False)


def test_end_tokens_of_generation_configs():
    config = jaxspec.config.Gemma4Config.from_hf({**tiny.TARGET, "eos_token_id": [1, 106]})
    assert loading.eos_token_ids(config, {}) == (1, 106)
    assert loading.eos_token_ids(config, {"eos_token_id": 7}) == (7,)
    assert loading.eos_token_ids(config, {"eos_token_id": [7, 8]}) == (7, 8)


def test_settings_reach_the_llm(folders):
    settings = dict(num_draft_tokens=2, dtype="bfloat16", max_slots=2, max_len=40, seed=3, progress=False)
    one, other = (jaxspec.load(*folders, **settings) for _ in range(2))
    assert (one.num_draft_tokens, one.max_slots, one.max_len) == (2, 2, 40)
    assert one.target.dtype == one.drafter.post_projection.weight.dtype == jnp.bfloat16
    assert one._runner.programs.state.cache.layers[0].k.dtype == jnp.bfloat16
    drawn = [llm._requests([[5]], SamplingParams())[0].seed for llm in (one, other)]
    assert drawn[0] == drawn[1]
    assert jaxspec.load(*folders, dtype=jnp.float32, progress=False).target.dtype == jnp.float32


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_a_cache_of_another_dtype(folders, kv_dtype):
    llm = jaxspec.load(*folders, kv_dtype=kv_dtype, max_slots=1, max_len=64, progress=False)
    pools = next(pools for pools in llm._runner.programs.state.cache.layers if pools is not None)
    assert pools.k.dtype == pools.v.dtype == {"bfloat16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}[kv_dtype]
    assert llm.target.dtype == jnp.float32


@pytest.mark.parametrize("name", ["pocket", "mtp", "dflash", "dflash2", "dspark", "eagle3", "modules", "draft"])
def test_a_model_is_shown_in_a_line(name):
    """And not with all of its arrays, which are hundreds of thousands of characters."""
    drafter = None if name == "pocket" else f"pocket-{name}"
    pair = planning.pair_of("pocket", drafter, quantize="int8")
    shown = repr(pair.target if drafter is None else pair.drafter)
    assert re.fullmatch(r"\w+\([\d,]{9} weights in bfloat16( and int8)?\)", shown), shown
    assert ("int8" in shown) == (drafter is None)


def test_what_an_llm_and_its_learning_show(llm):
    assert repr(llm.target).startswith("Gemma4(") and "float32" in repr(llm.target)
    with llm.learn(0.1) as learning:
        assert re.fullmatch(r"Learning\(.* updates, .* trials won\)", repr(learning))
    assert dir(jaxspec) == sorted(set(dir(jaxspec))) and {name for name in dir(jaxspec) if name[0] != "_"} == set(jaxspec.__all__)


@pytest.mark.parametrize("asked", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_neither_pickled_nor_copied(llm, asked):
    with pytest.raises(TypeError, match=r"the LLM of '.*' lies on devices, and is neither pickled nor copied; load it in the process"):
        asked(llm)


def test_a_drafter_may_be_an_object(folders, llm):
    again = jaxspec.load(folders[0], llm.drafter, num_draft_tokens=1, progress=False)
    assert again.drafter.config == llm.drafter.config


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tensor_parallel_size": 2}, TypeError, "load has no argument 'tensor_parallel_size'; here it is called tensor$"),
        ({"gpu_memory_utilization": 0.5}, TypeError, "'gpu_memory_utilization'; here it is called memory_fraction$"),
        ({"torch_dtype": "bfloat16"}, TypeError, "'torch_dtype'; here it is called dtype$"),
        ({"device_map": "auto"}, TypeError, "'device_map'; here it is called mesh, made by jaxspec.mesh$"),
        ({"trust_remote_code": True}, TypeError, "no argument 'trust_remote_code', and needs none: no code of a checkpoint is run$"),
        ({"num_draft_token": 2}, TypeError, "load has no argument 'num_draft_token'; the nearest is 'num_draft_tokens'$"),
        ({"download_dir": "x"}, TypeError, "load has no argument 'download_dir'; here it is called cache_dir$"),
        ({"enable_lora": True}, TypeError, "'enable_lora'; here it is called adapter, which is merged$"),
        ({"zzz": 2}, TypeError, "load has no argument 'zzz'$"),
        ({"accept": "fly"}, ValueError, "accept is 'fly'; available: 'coupled'"),
        ({"accept": accept.synthetic([0.5])}, ValueError, "synthetic acceptance has 1 rates for 3 drafts"),
        ({"attention": "cuda"}, ValueError, "attention is 'cuda'; available: 'auto', 'xla', 'triton', 'triton-interpret'"),
        ({"attention": "triton"}, ValueError, "attention is 'triton', but the device is a CPU; kernels need an NVIDIA GPU"),
        ({"draft_attention": "triton"}, ValueError, "draft_attention is 'triton', but the device is a CPU"),
        ({"kv_dtype": "int8"}, ValueError, "kv_dtype is 'int8'; available: 'auto', 'float32', 'bfloat16', 'fp8'"),
        ({"dtype": "float16"}, ValueError, "dtype is 'float16'; available: 'auto', 'float32', 'bfloat16'"),
        ({"dtype": jnp.float16}, ValueError, "dtype is 'float16'"),
        ({"dtype": 5}, TypeError, "dtype is 5 of type int; available: 'auto', 'float32', 'bfloat16'"),
        ({"dtype": None}, TypeError, "dtype is None of type NoneType; available"),
        ({"target": None}, TypeError, "target is None of type NoneType, expected a hub id, a folder or a bundled name"),
        ({"adapter": 5}, TypeError, "adapter is 5 of type int, expected a folder or a hub id"),
        ({"memory_fraction": "0.5"}, TypeError, "memory_fraction is '0.5' of type str, expected a number"),
        ({"memory_fraction": 0}, ValueError, "memory_fraction is 0, expected more than 0 and at most 1"),
        ({"max_slots": 0}, ValueError, "max_slots is 0, expected at least 1"),
        ({"max_len": 1}, ValueError, "max_len is 1, expected 2 .. 256"),
        ({"max_len": 257}, ValueError, "max_len is 257, expected 2 .. 256"),
        ({"max_len": 64.0}, TypeError, "max_len is 64.0 of type float, expected an integer"),
        ({"num_draft_tokens": -1}, ValueError, "num_draft_tokens is -1, expected 0 .."),
        ({"seed": -1}, ValueError, "seed is -1, expected 0 .. 9223372036854775807"),
        ({"drafter": None, "num_draft_tokens": 2}, ValueError, "num_draft_tokens is 2 but there is no drafter; expected 0, or a drafter"),
        ({"drafter": "bigram"}, FileNotFoundError, "'bigram' is neither a folder, nor a hub id"),
        ({"target": "ngram"}, FileNotFoundError, r"'ngram' is neither .* bundled \(.*\); it is a drafter, to be given as drafter=$"),
        ({"mesh": "tensor=2"}, TypeError, "mesh is 'tensor=2', expected a Mesh, as jaxspec.mesh"),
        ({"learn": Learn(objective={"soft": -1})}, ValueError, "the objective's soft is -1.0, expected a finite number of at least 0"),
        ({"learn": Learn(objective={"soft": 0, "hard": 0})}, ValueError, "the objective is Objective.* expected a decay above 0"),
        ({"drafter": 3}, TypeError, "drafter is of type int without taps, init, observe, draft; expected a checkpoint's name"),
    ],
)
def test_a_bad_setting_is_refused_before_weights_are_read(folders, monkeypatch, settings, error, message):
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        jaxspec.load(**{"target": folders[0], "drafter": folders[1], "progress": False, **settings})


def test_a_drafter_that_does_not_fit_is_refused_before_a_target_is_downloaded(folders, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **settings: asked.append(settings) or str(folders[0]))
    with pytest.raises(FileNotFoundError, match="'bigram' is neither .* nor the drafter 'ngram'"):
        jaxspec.load("google/gemma-4-31B-it", "bigram", progress=False)
    [settings] = asked
    assert list(huggingface_hub.utils.filter_repo_objects(["config.json", "model.safetensors"], **settings)) == ["config.json"]
    llm = jaxspec.load("google/gemma-4-31B-it", max_slots=1, max_len=8, progress=False)
    assert "model.safetensors" in huggingface_hub.utils.filter_repo_objects(["model.safetensors"], **asked[-1]) and len(llm.target.layers)


def test_a_checkpoint_of_another_kind_is_refused(folders, tmp_path):
    target, assistant = folders
    with pytest.raises(ValueError, match="the target .* model_type is 'gemma4_assistant'.*it is a drafter, to be given as drafter="):
        jaxspec.load(assistant)
    block = edited(assistant, tmp_path / "block", "config.json", model_type="qwen3", architectures=["DFlashDraftModel"])
    with pytest.raises(ValueError, match="the target .* model_type is 'qwen3'.*it is a drafter, to be given as drafter="):
        jaxspec.load(block)
    other = edited(assistant, tmp_path / "other", "config.json", model_type="qwen3")
    with pytest.raises(ValueError, match="the drafter .* has model_type 'qwen3'; expected one of 'gemma4_assistant'"):
        jaxspec.load(target, other)
    with pytest.raises(FileNotFoundError, match="has no config.json; found block, other$"):
        jaxspec.load(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(target / "config.json", bare)
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        jaxspec.load(bare)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 40}, "made for a target of hidden_size 40, this target has 32"),
        ({"vocab_size": 4160}, "vocab_size 4160, the target 4096"),
        ({"num_key_value_heads": 2}, "num_kv_heads 2, .* has 1"),
        ({"sliding_window": 16}, "window 16, .* has 8"),
        ({"head_dim": 16}, "head_dim 16, .* has 8"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_both_numbers(folders, tmp_path, changes, message):
    drafter = tiny.tiny_assistant(tmp_path / "misfit", **changes)
    with pytest.raises(ValueError, match="the drafter .* cannot be used with this target: .*" + message):
        jaxspec.load(folders[0], drafter, progress=False)


def test_a_drafter_object_that_does_not_fit_is_refused(folders, llm, tmp_path):
    narrow = tiny.tiny_target(tmp_path / "narrow", hidden_size=24)
    with pytest.raises(ValueError, match="hidden_size 32, this target has 24"):
        jaxspec.load(narrow, llm.drafter, progress=False)


def test_models_that_exceed_the_memory_are_refused_before_weights_are_read(folders, monkeypatch):
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(loading, "memory_limit", lambda device: 2**20)
    message = r"the weights take .* MiB and the state .* MiB \(slots: 1, pages: 4\) of a device; there is 0.50 MiB of it. Fewer max_slots"
    with pytest.raises(ValueError, match=message):
        jaxspec.load(*folders, memory_fraction=0.5, progress=False)


def test_memory_of_an_llm_that_is_there_is_named_and_that_of_one_that_is_gone_is_room(folders, monkeypatch):
    """As in a notebook whose cell with `load` runs once more, on a device that has room for one and a half."""

    def held():
        return sum(array.nbytes for array in jax.live_arrays())

    settings = dict(max_slots=2, kv_pages=8, max_len=256, num_draft_tokens=2)
    pair = planning.pair_of(*folders, dtype=lambda name: jnp.float32)
    gc.collect()
    sizes, _ = planning.plan(pair, None, max_len=256, num_draft_tokens=2, slots=2, pages=8, default_slots=2, kernels=False)
    limit = held() + sizes.kept(2, 8) * 3 // 2 + sizes.work(2)
    monkeypatch.setattr(jax.Device, "memory_stats", lambda device: {"bytes_limit": limit, "bytes_in_use": held()})
    llm = jaxspec.load(*folders, **settings, memory_fraction=1, progress=False)
    with pytest.raises(ValueError, match=r"; there is .* Another \S* MiB are in use by this process; .* by its close\(\)$"):
        jaxspec.load(*folders, **settings, memory_fraction=1, progress=False)
    del llm
    assert jaxspec.load(*folders, **settings, memory_fraction=1, progress=False).max_slots == 2


def test_a_generation_config_that_makes_no_sense_is_refused(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    wrong = edited(folders[0], tmp_path / "wrong", "generation_config.json", top_p=7)
    with pytest.raises(ValueError, match="generation_config.json cannot be used: top_p is 7.0, expected"):
        jaxspec.load(wrong, progress=False)
    wrong = edited(folders[0], tmp_path / "ends", "generation_config.json", eos_token_id=list(range(20)))
    with pytest.raises(ValueError, match="generation_config.json cannot be used: eos_token_id has 20 ids, expected at most 16"):
        jaxspec.load(wrong, progress=False)
    wrong = edited(folders[0], tmp_path / "end", "generation_config.json", eos_token_id=["x"])
    with pytest.raises(ValueError, match="generation_config.json cannot be used: eos_token_id is 'x' of type str, expected an integer"):
        jaxspec.load(wrong, progress=False)
    size = planning.pair_of(*folders).config.vocab_size
    wrong = edited(folders[0], tmp_path / "none", "generation_config.json", suppress_tokens=list(range(size)))
    with pytest.raises(ValueError, match=f"suppress_tokens has all {size} ids of the vocabulary, so no token could be chosen"):
        jaxspec.load(wrong, progress=False)


def test_what_requests_do_not_take_from_a_generation_config_is_said(folders, tmp_path):
    more = edited(folders[0], tmp_path / "more", "generation_config.json", stop_strings=["x"], num_beams=4)
    with pytest.warns(UserWarning, match="generation_config.json has stop_strings, num_beams, which requests do not take from it"):
        jaxspec.load(more, max_slots=1, max_len=64, progress=False).close()


def test_a_config_of_wrong_types_is_refused_with_the_folder(folders, tmp_path):
    wrong = edited(folders[0], tmp_path / "wrong", "config.json", **{**tiny.TARGET, "text_config": {**tiny.TEXT, "rms_norm_eps": "x"}})
    with pytest.raises(ValueError, match=f"the target {wrong} cannot be loaded: config.json has a wrong value: rms_norm_eps is .x."):
        jaxspec.load(wrong, progress=False)
    wrong = edited(folders[0], tmp_path / "floats", "config.json", dtype="bf16")
    with pytest.raises(ValueError, match="config.json has dtype='bf16'; expected 'bfloat16', 'float16', 'float32', 'float64'"):
        jaxspec.load(wrong, progress=False)
    assert Gemma4Config.from_hf({**tiny.TARGET, "dtype": None, "torch_dtype": "torch.float16"}).dtype == "float16"
    wrong = edited(folders[1], tmp_path / "drafter", "config.json", text_config=[1])
    with pytest.raises(ValueError, match=f"the drafter {wrong} cannot be used with this target: config.json has text_config=.1.; expected"):
        jaxspec.load(folders[0], wrong, progress=False)


def test_data_shards_of_several_processes_are_refused(folders, monkeypatch):
    """Whoever made the mesh: each process would serve requests that the others do not know of."""
    mesh = sharding.mesh(data=2, tensor=2)
    monkeypatch.setattr(mesh_files, "_processes", lambda mesh: 2)
    message = "^the mesh has data=2 and lies in 2 processes; expected tensor alone over processes, .*: jaxspec batch --shard i/2$"
    with pytest.raises(ValueError, match=message):
        jaxspec.load(*folders, mesh=mesh, progress=False)
    with pytest.raises(ValueError, match=message):
        sharding.mesh(data=2)
    assert sharding.mesh(tensor=2).size == 2


def test_a_mesh_needs_its_two_axes(folders):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match=r"mesh has axes \('data',\), expected 'data' and 'tensor'"):
        jaxspec.load(*folders, mesh=mesh, progress=False)


def test_compiled_programs_are_kept_where_nobody_chose_a_folder(monkeypatch, tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    chosen = jax.config.jax_compilation_cache_dir
    try:
        loading.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == chosen  # somebody chose: left alone
        monkeypatch.setenv("JAXSPEC_CACHE_DIR", str(tmp_path / "own"))
        jax.config.update("jax_compilation_cache_dir", None)
        loading.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
        monkeypatch.delenv("JAXSPEC_CACHE_DIR")
        monkeypatch.setenv("HOME", str(tmp_path))
        jax.config.update("jax_compilation_cache_dir", None)
        loading.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / ".cache" / "jaxspec")
    finally:
        jax.config.update("jax_compilation_cache_dir", chosen)
        compilation_cache.reset_cache()


def test_names_of_other_engines_are_none_of_ours():
    ours = set(inspect.signature(jaxspec.load).parameters)
    assert not ours & (foreign_names.HERE.keys() | foreign_names.NEEDLESS.keys())
    assert {re.split(r"\W", here)[0] for here in foreign_names.HERE.values()} <= ours
