"""Adapters that calls of vLLM's interface name: texts are those of a model that was loaded with each."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec.vllm import LLM, LoRARequest, SamplingParams

pytestmark = pytest.mark.usefixtures("quick_to_compile")
PROMPTS = [{"prompt_token_ids": ids} for ids in np.random.default_rng(0).integers(100, 4000, (5, 12)).tolist()]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SIZES = {"max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    found = []
    for seed in range(2):
        folder, rng = tmp_path_factory.mktemp("adapter"), np.random.default_rng(seed)
        stem = "base_model.model.model.language_model.layers.1.mlp.down_proj.lora_"
        sides = {f"{stem}A.weight": rng.standard_normal((2, 48)), f"{stem}B.weight": rng.standard_normal((32, 2))}
        save_file({key: x.astype(np.float32) for key, x in sides.items()}, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["down_proj"], "layers_to_transform": [1]}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found.append(LoRARequest(f"adapter {seed}", seed + 1, str(folder)))
    return found


@pytest.fixture(scope="module")
def expected(folders, adapters):
    """By adapter: token ids of each prompt."""
    found = {}
    for adapter in (None, *adapters):
        with jaxspec.load(folders[0], adapter=None if adapter is None else adapter.lora_path, max_len=64, progress=False) as llm:
            given = [prompt["prompt_token_ids"] for prompt in PROMPTS]
            params = jaxspec.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            found[adapter] = [made.token_ids for made in llm.generate(given, params)]
    assert len({str(ids) for ids in found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def llm(folders):
    made = LLM(str(folders[0]), enable_lora=True, speculative_config={"model": str(folders[1])}, **SIZES)
    yield made
    made.jaxspec.close()


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_one_for_all_prompts(llm, adapters, expected, monkeypatch):
    updates, update = [], jaxspec.LLM.update_weights
    monkeypatch.setattr(jaxspec.LLM, "update_weights", lambda *args, **more: updates.append(0) or update(*args, **more))
    for adapter in (adapters[0], adapters[0], None, adapters[1], LoRARequest("again", 7, adapters[1].lora_path)):
        outputs = llm.generate(PROMPTS, GREEDY, lora_request=adapter, use_tqdm=False)
        wanted = next(found for key, found in expected.items() if (key and key.lora_path) == (adapter and adapter.lora_path))
        assert ids(outputs) == wanted
        assert [output.lora_request for output in outputs] == [adapter] * 5
    assert len(updates) == 3  # what is merged already is not merged again


def test_one_for_each_prompt(llm, adapters, expected):
    """With several samples of some: the order is that of the prompts."""
    wanted = [adapters[1], None, adapters[0], adapters[1], None]
    outputs = llm.generate(
        PROMPTS, [GREEDY, GREEDY, GREEDY, SamplingParams(n=2, max_tokens=3), GREEDY], lora_request=wanted, use_tqdm=False
    )
    assert [output.lora_request for output in outputs] == wanted
    for i in (0, 1, 2, 4):
        assert outputs[i].outputs[0].token_ids == expected[wanted[i]][i]
    assert [sample.index for sample in outputs[3].outputs] == [0, 1]
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in PROMPTS]


def test_conversations_have_adapters_too(llm, adapters):
    talks = [[{"role": "user", "content": text}] for text in ("Hi", "a", "Hi")]
    mixed = llm.chat(talks, GREEDY, use_tqdm=False, lora_request=[adapters[0], None, None])
    alone = [
        llm.chat(talk, GREEDY, use_tqdm=False, lora_request=adapter)[0]
        for talk, adapter in zip(talks, (adapters[0], None, None), strict=True)
    ]
    assert ids(mixed) == ids(alone) and ids(mixed)[0] != ids(mixed)[2]


def test_what_is_no_adapter_is_refused(llm, folders, adapters, expected, tmp_path):
    with pytest.raises(TypeError, match=r"lora_request of generate is of type str, expected jaxspec.vllm.lora.request.LoRARequest"):
        llm.generate(PROMPTS, GREEDY, lora_request="sql")
    with pytest.raises(ValueError, match="lora_request is a list of length 2; expected 5, one for each prompt"):
        llm.generate(PROMPTS, GREEDY, lora_request=[None, None])
    for count in (3, 6):
        with pytest.raises(ValueError, match=f"sampling_params is a list of length {count}; expected 5"):
            llm.generate(PROMPTS, [GREEDY] * count, lora_request=[adapters[0], *[None] * 4])
    with pytest.raises(FileNotFoundError):
        llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("none", 1, str(tmp_path / "none")), use_tqdm=False)
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected[None]
    with pytest.raises(ValueError, match="lora_int_id is 0"):
        LoRARequest("zero", 0, "x")
    with pytest.raises(ValueError, match="the LoRARequest 'empty' has no lora_path"):
        LoRARequest("empty", 1)
    plain = LLM(str(folders[0]), **SIZES)
    with pytest.raises(ValueError, match="is 'adapter 0', but the LLM was not made with enable_lora=True"):
        plain.generate(PROMPTS, GREEDY, lora_request=adapters[0])


def test_it_sleeps_by_levels(llm, adapters, expected):
    assert llm.reset_prefix_cache()
    assert ids(llm.generate(PROMPTS, GREEDY, lora_request=adapters[0], use_tqdm=False)) == expected[adapters[0]]
    llm.sleep()
    for adapter in (adapters[0], None):  # whether it is merged or not
        with pytest.raises(RuntimeError, match="sleeps"):
            llm.generate(PROMPTS, GREEDY, lora_request=adapter, use_tqdm=False)
    llm.wake_up(tags=["weights"]), llm.wake_up(tags=["kv_cache"])
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected[None]
    llm.sleep(level=2)
    with pytest.raises(RuntimeError, match="were dropped"):
        llm.wake_up()
    llm.jaxspec.update_weights(llm.jaxspec._whole._reader.name)
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected[None]
    with pytest.raises(ValueError, match="level is 3; available: 1, 2"):
        llm.sleep(level=3)
    with pytest.raises(ValueError, match="tags have 'cache'; available: 'weights', 'kv_cache'"):
        llm.wake_up(tags=["cache"])


def test_an_interrupt_leaves_no_adapter_unnoticed(llm, adapters, expected, monkeypatch):
    """The weights have the adapter by then, though the call does not know it."""
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected[None]
    update = jaxspec.LLM.update_weights

    def interrupted(*args, **more):
        update(*args, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(jaxspec.LLM, "update_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, lora_request=adapters[0], use_tqdm=False)
    monkeypatch.undo()
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected[None]


def test_weights_that_are_given_in_between_have_no_adapter(llm, folders, adapters, expected):
    """So they serve prompts without one, and the adapter of before is merged again where it is asked for."""
    assert ids(llm.generate(PROMPTS, GREEDY, lora_request=adapters[0], use_tqdm=False)) == expected[adapters[0]]
    given = {key: 1.5 * x for key, x in load_file(folders[0] / "model.safetensors").items()}
    llm.jaxspec.update_weights(given)
    wanted = [made.token_ids for made in llm.jaxspec.generate([prompt["prompt_token_ids"] for prompt in PROMPTS], GREEDY.served())]
    assert wanted not in expected.values()
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
    assert ids(llm.generate(PROMPTS, GREEDY, lora_request=adapters[0], use_tqdm=False)) == expected[adapters[0]]
    llm.jaxspec.update_weights(folders[0])
    assert ids(llm.generate(PROMPTS, GREEDY, lora_request=adapters[0], use_tqdm=False)) == expected[adapters[0]]
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected[None]
