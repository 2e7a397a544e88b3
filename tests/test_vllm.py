"""Scripts for vLLM with another import line: the shape of its offline examples, and every argument. What needs no model that knows
something runs on a tiny one."""

import dataclasses
import inspect
import json
import math
import re
import shutil
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from quick import few_programs

import jaxspec
from jaxspec import loading
from jaxspec.checkpoint import hub
from jaxspec.engine.completion import Completion
from jaxspec.engine.stats import RoundStats
from jaxspec.vllm import LLM, SamplingParams, StructuredOutputsParams, TokensPrompt, arguments
from jaxspec.vllm import llm as llm_file
from jaxspec.vllm.outputs import request_output
from jaxspec.vllm.sampling_params import REFUSED, WITHOUT_EFFECT, default_params

SMALL = {"max_model_len": 192, "max_num_seqs": 2}

BASIC = """
from vllm import LLM, SamplingParams

prompts = ["def fibonacci(n):", "class Stack:", "import os"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="pocket", max_model_len=192, max_num_seqs=2)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt:    {prompt!r}")
    print(f"Output:    {generated_text!r}")
"""

CHAT = """
from vllm import LLM

llm = LLM(model="pocket", max_model_len=192, max_num_seqs=2, enforce_eager=True)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 8
sampling_params.temperature = 0.5
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write a function."},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
outputs += llm.chat([conversation for _ in range(2)], sampling_params, use_tqdm=True)
with open(template) as f:
    chat_template = f.read()
outputs += llm.chat([conversation], sampling_params, use_tqdm=False, chat_template=chat_template)
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
"""

PREFIX_CACHING = """
from vllm import LLM, SamplingParams

prefix = "import os\\nimport sys\\n\\n\\nclass Stack:\\n    def push(self, item):\\n        self.items.append(item)\\n\\n" * 3
generating_prompts = [prefix + prompt for prompt in ["def f():", "class Queue:", "import re"]]
sampling_params = SamplingParams(temperature=0.0)
regular_llm = LLM(model="pocket", gpu_memory_utilization=0.4, max_model_len=192, max_num_seqs=2)
outputs = regular_llm.generate(generating_prompts, sampling_params)
regular_generated_texts = [output.outputs[0].text for output in outputs]
del regular_llm
prefix_cached_llm = LLM(model="pocket", enable_prefix_caching=True, gpu_memory_utilization=0.4, max_model_len=192, max_num_seqs=2)
prefix_cached_llm.generate(generating_prompts[0], sampling_params)
outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
cached_generated_texts = [output.outputs[0].text for output in outputs]
generated_same = all(regular_generated_texts[i] == cached_generated_texts[i] for i in range(len(prompts or generating_prompts)))
print(f"Generated answers are the same: {generated_same}")
print(max(output.num_cached_tokens for output in outputs) > 64)
"""

SPEC_DECODE = """
from vllm import LLM, SamplingParams
from vllm.inputs import PromptType, TokensPrompt
from vllm.logprobs import Logprob
from vllm.v1.metrics.reader import Counter, Vector

llm = LLM(
    model="pocket",
    trust_remote_code=True,
    tensor_parallel_size=1,
    enable_chunked_prefill=True,
    enforce_eager=False,
    gpu_memory_utilization=0.9,
    speculative_config={"method": "mtp", "model": "pocket-mtp", "num_speculative_tokens": 3},
    disable_log_stats=False,
    max_model_len=192,
    max_num_seqs=2,
)
tokenizer = llm.get_tokenizer()
messages = [[{"role": "user", "content": text}] for text in ("Write a class.", "Write a loop.")]
prompt_ids = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
sampling_params = SamplingParams(temperature=0, max_tokens=24)
outputs = llm.generate([TokensPrompt(prompt_token_ids=x) for x in prompt_ids], sampling_params=sampling_params)
total_num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
num_drafts = num_draft_tokens = num_accepted_tokens = 0
acceptance_counts = [0] * 3
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        num_drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        num_draft_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        num_accepted_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for pos in range(len(metric.values)):
            acceptance_counts[pos] += metric.values[pos]
acceptance_length = 1 + (num_accepted_tokens / num_drafts) if num_drafts > 0 else 1
print(f"total_num_output_tokens: {total_num_output_tokens}")
"""

STRUCTURED = """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from pydantic import BaseModel
from enum import Enum

MAX_TOKENS = 64
sampling_params_choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
sampling_params_regex = SamplingParams(
    structured_outputs=StructuredOutputsParams(regex=r"\\w{1,12}@\\w{1,12}\\.com\\n"), stop=["\\n"], max_tokens=MAX_TOKENS
)


class CarType(str, Enum):
    SEDAN = "SEDAN"
    SUV = "SUV"


class CarDescription(BaseModel):
    wheels: int
    car_type: CarType


json_schema = CarDescription.model_json_schema()
sampling_params_json = SamplingParams(structured_outputs=StructuredOutputsParams(json=json_schema), max_tokens=MAX_TOKENS)
llm = LLM(model="pocket", speculative_config={"model": "pocket-mtp", "num_speculative_tokens": 3}, max_model_len=192, max_num_seqs=2)
answers = []
for prompt, sampling_params in [
    ("Classify this sentiment: it is wonderful!", sampling_params_choice),
    ("Generate an email address for Alan Turing.", sampling_params_regex),
    ("Generate a JSON with the number of wheels and car_type of a car from the 90's.", sampling_params_json),
]:
    outputs = llm.generate(prompts=prompt, sampling_params=sampling_params)
    answers.append(outputs[0].outputs[0].text)
"""


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


def run(script, target="pocket", **names):
    """What a script leaves behind, its import line changed, and its target for another."""
    found = {"__name__": "__main__", "prompts": None, **names}
    script = script.replace("from vllm", "from jaxspec.vllm").replace('model="pocket"', f'model="{target}"')
    exec(compile(script, "script", "exec"), found)
    return found


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(folders[0], speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, **SMALL)


def test_the_basic_script(folders, capsys):
    outputs = run(BASIC, folders[0])["outputs"]
    assert capsys.readouterr().out.count("Prompt:") == 3
    assert [output.prompt for output in outputs] == ["def fibonacci(n):", "class Stack:", "import os"]
    assert all(1 <= len(output.outputs[0].token_ids) <= 16 and output.finished for output in outputs)
    assert [output.request_id for output in outputs] == ["0", "1", "2"]


@pytest.mark.slow  # the basic script has the same calls
def test_the_script_of_the_docs(capsys, monkeypatch):
    monkeypatch.setattr(loading, "MAX_SLOTS", 2)
    page = (Path(__file__).parent.parent / "docs" / "comparison.md").read_text(encoding="utf-8")
    [script] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run(script)
    assert capsys.readouterr().out.startswith("class Stack: ")


def test_the_chat_script(folders, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    with pytest.warns(UserWarning, match="accepted but without effect here: enforce_eager$"):
        outputs = run(CHAT, folders[0], template=template)["outputs"]
    assert len(outputs) == 4 and all(len(output.outputs[0].token_ids) <= 8 for output in outputs)
    assert "<|turn>system\nYou are a helpful assistant" in outputs[0].prompt and outputs[0].prompt == outputs[2].prompt
    assert outputs[3].prompt.endswith("Hello! How can I assist you today?\nWrite a function.\n") and "<|turn>" not in outputs[3].prompt


@pytest.mark.slow  # tests/engine/test_calls.py has prompts that begin alike
def test_the_script_of_prefix_caching(folders, capsys):
    run(PREFIX_CACHING, folders[0])
    assert "Generated answers are the same: True\nTrue" in capsys.readouterr().out


def test_the_script_of_speculation_and_its_metrics():
    with pytest.warns(
        UserWarning, match="without effect here: disable_log_stats, enable_chunked_prefill, enforce_eager, trust_remote_code$"
    ):
        found = run(SPEC_DECODE)
    stats, outputs = found["llm"].jaxspec.stats, found["outputs"]
    assert found["num_drafts"] == stats.steps > 0 and found["num_draft_tokens"] == stats.drafted == 3 * stats.steps
    assert found["num_accepted_tokens"] == sum(found["acceptance_counts"]) >= stats.accepted > 0
    assert [count / stats.steps for count in found["acceptance_counts"]] == pytest.approx(stats.acceptance_rates)
    assert found["total_num_output_tokens"] == stats.tokens and outputs[0].prompt is None
    assert sum(output.metrics.num_drafts for output in outputs) == stats.steps
    values = {metric.name: metric.value for metric in found["llm"].get_metrics()[:-1]}
    assert values["vllm:generation_tokens"] == stats.tokens and values["vllm:prompt_tokens"] == stats.prompt_tokens
    assert type(found["llm"].jaxspec.drafter).__name__ == "Gemma4MTP" and found["llm"].jaxspec.num_draft_tokens == 3


def test_the_fields_of_results(llm):
    params = SamplingParams(n=2, max_tokens=5, seed=3, logprobs=1, prompt_logprobs=0, stop_token_ids=[7])
    [output] = llm.generate("import os", params, use_tqdm=False)
    assert output.prompt == "import os" and output.prompt_token_ids == llm.get_tokenizer().encode("import os")
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert [sample.index for sample in output.outputs] == [0, 1] and output.lora_request is None
    for sample in output.outputs:
        chosen = [row[token] for token, row in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert math.isclose(sample.cumulative_logprob, sum(entry.logprob for entry in chosen))
        assert sample.finished() and sample.finish_reason == "length" and sample.stop_reason is None and sample.text
    assert output.metrics.num_generation_tokens == 10 and output.metrics.first_token_latency > 0
    ids = jaxspec.SamplingParams(n=2, max_tokens=5, seed=3, temperature=1.0, top_k=0, top_p=1.0)
    assert [s.token_ids for s in output.outputs] == [c.token_ids for c in llm.jaxspec.generate("import os", ids)]


def test_prompts_and_params_of_every_form(llm):
    ids = llm.get_tokenizer().encode("import os")
    prompts = ["import os", ids, {"prompt": "import os"}, TokensPrompt(prompt_token_ids=ids, prompt="of old")]
    params = [SamplingParams(temperature=0, max_tokens=4), *[SamplingParams(temperature=0, max_tokens=5, detokenize=False)] * 3]
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in found] == [4, 5, 5, 5]
    assert [output.prompt for output in found] == ["import os", None, "import os", "of old"]
    assert [bool(output.outputs[0].text) for output in found] == [True, False, False, False]
    assert found[0].outputs[0].logprobs is None and found[0].outputs[0].cumulative_logprob is None
    assert llm.generate([], use_tqdm=False) == []
    with pytest.raises(TypeError, match="sampling_params is of type jaxspec.engine.params.SamplingParams, expected jaxspec.vllm"):
        llm.generate("x", jaxspec.SamplingParams())


def test_what_the_checkpoint_says_applies_where_no_params_are_given(llm):
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.top_p, default.max_tokens) == (1.0, 64, 0.95, 16)
    default.max_tokens = 3
    assert llm.get_default_sampling_params().max_tokens == 16
    assert len(llm.generate("import os", use_tqdm=False)[0].outputs[0].token_ids) <= 16
    assert default_params({"max_new_tokens": 5, "repetition_penalty": 1.5, "do_sample": True}) == SamplingParams(
        max_tokens=5, repetition_penalty=1.5
    )


def test_params_are_vllms():
    plain = SamplingParams()
    assert (plain.temperature, plain.max_tokens, plain.top_k, plain.top_p, plain.seed) == (1.0, 16, 0, 1.0, None)
    assert plain.served() == jaxspec.SamplingParams(temperature=1.0, max_tokens=16, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert SamplingParams(seed=-1, logprobs=True).served().replace(logprobs=None) == plain.served()
    copied = plain.clone()
    copied.stop = ["x"]
    assert plain.stop is None and copied.served().stop == ("x",)
    copied.max_tokens = 0
    with pytest.raises(ValueError, match="max_tokens is 0, expected at least 1"):
        copied.served()
    assert SamplingParams(logits_processors=[], thinking_token_budget=-1, stream_interval=5).served() == plain.served()
    effects = dict.fromkeys(WITHOUT_EFFECT, None) | {"best_of": 1, "detokenize": False, "skip_special_tokens": True}
    assert SamplingParams(**effects).served() == plain.served()
    with pytest.raises(AttributeError):
        plain.max_token = 5
    for params in (SamplingParams, jaxspec.SamplingParams):  # what a notebook shows of it
        assert inspect.signature(params).parameters["temperature"].default in (1.0, None)


@pytest.mark.parametrize("name", REFUSED)
def test_params_that_cannot_be_served(name):
    wrong = True if name == "use_beam_search" else 5
    with pytest.raises(ValueError, match=f"{name} is {wrong}, which cannot be served: "):
        SamplingParams(**{name: wrong})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"best_of": 3}, ValueError, "best_of is 3, which cannot be served: all n samples come back, here 1"),
        ({"stop": "x", "detokenize": False}, ValueError, "stop needs texts, but detokenize is False"),
        ({"max_token": 3}, TypeError, "SamplingParams has no argument 'max_token'; the nearest is 'max_tokens'"),
        ({"stop": np.array(["x"]), "detokenize": False}, ValueError, "stop needs texts, but detokenize is False"),
        ({"best_of": np.array([1, 2])}, ValueError, r"best_of is array\(.*, which cannot be served"),
        ({"seed": np.array([1, 2])}, TypeError, r"seed is array\(.*expected an integer"),
        ({"logits_processors": np.array([1, 2])}, ValueError, r"logits_processors is array\(.*, which cannot be served"),
        ({"detokenize": "no"}, TypeError, "detokenize is 'no', expected True or False"),
        ({"skip_special_tokens": "false"}, TypeError, "skip_special_tokens is 'false', expected True or False"),
        ({"top_p": 2}, ValueError, "top_p is 2"),
        *(
            ({name: None}, TypeError, f"{name} is None, expected a number; leave it out for vLLM's default")
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        ),
    ],
)
def test_wrong_params(changes, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**changes)


@pytest.fixture
def asked(monkeypatch):
    """What `load` was asked for, which then stops."""
    found = {}

    def noted(target, **settings):
        found.update(settings, target=target)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_file, "load", noted)

    def ask(*args, **given):
        with pytest.raises(KeyboardInterrupt):
            LLM(*args, **given)
        inspect.signature(loading.load).bind(**found)
        return found

    return ask


def test_arguments_have_their_meaning(asked):
    found = asked("pocket")
    assert {name: found[name] for name in ("target", "dtype", "quantize", "mesh", "max_slots", "max_len", "kv_dtype", "seed")} == {
        **dict.fromkeys(["quantize", "mesh", "max_slots", "max_len"]),
        **{"target": "pocket", "dtype": "auto", "kv_dtype": "auto", "seed": 0},
    }
    assert found["memory_fraction"] == 0.9 and "drafter" not in found
    found = asked(
        model="pocket",
        tokenizer="pocket",
        dtype="float",
        tensor_parallel_size=2,
        data_parallel_size=2,
        gpu_memory_utilization=0.5,
        max_model_len=100,
        max_num_seqs=7,
        seed=None,
        kv_cache_dtype="fp8_e4m3",
        quantization="fp8",
        revision=None,
        speculative_config={"model": "pocket-draft", "method": "draft_model", "num_speculative_tokens": 2},
        runner="generate",
        pipeline_parallel_size=1,
    )
    assert dict(found["mesh"].shape) == {"data": 2, "tensor": 2} and found["kv_dtype"] == found["quantize"] == "fp8"
    assert (found["dtype"], found["memory_fraction"], found["max_len"], found["max_slots"]) == ("float32", 0.5, 100, 7)
    assert (found["drafter"], found["num_draft_tokens"], found["seed"]) == ("pocket-draft", 2, 0)
    assert asked("pocket", quantization="int8_per_channel_weight_only", max_model_len=-1)["quantize"] == "int8" and found["max_len"] is None
    drafting = {"model": "pocket-mtp", "quantization": "fp8"}
    assert asked("pocket", speculative_config=drafting)["quantize_drafter"] == "fp8" and found["quantize"] is None
    assert asked("pocket", dtype=jnp.bfloat16)["dtype"] == jnp.bfloat16 and asked("pocket", dtype="half")["dtype"] == "float16"
    for config, ends in (({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (4, 2)), ({"prompt_lookup_max": 3}, (3, 3)), ({}, (5, 5))):
        drafter = asked("pocket", speculative_config={"method": "ngram", **config})["drafter"]
        assert (drafter.longest, drafter.shortest) == ends
    for rule in ("standard", "block"):  # both leave the distribution of texts as it is
        asked("pocket", speculative_config={"method": "ngram", "rejection_sample_method": rule})
    asked("pocket", speculative_config={"method": "ngram", "num_speculative_tokens": 3, "enable_adaptive_verification": True})
    assert found["adaptive_verification"] is True and found["num_draft_tokens"] == 3


def test_arguments_that_only_tune_are_accepted_and_told_in_one_warning(asked):
    with pytest.warns(UserWarning) as told:
        asked("pocket", **dict.fromkeys(arguments.TUNING, "auto"), enable_prefix_caching=False)
    [one] = told
    assert all(name in str(one.message) for name in (*arguments.TUNING, "enable_prefix_caching"))
    config = {"method": "ngram"} | dict.fromkeys(arguments.SPECULATION_TUNING, 1)
    with pytest.warns(UserWarning, match=r"without effect here: speculative_config\['attention_backend'\], "):
        asked("pocket", speculative_config=config)


@pytest.mark.parametrize("name", arguments.REFUSED)
def test_arguments_that_cannot_be_served(name):
    with pytest.raises(ValueError, match=f"{name} is 'other', which cannot be served: "):
        LLM("pocket", **{name: "other"})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_model_length": 5}, TypeError, "LLM has no argument 'max_model_length'; the nearest is 'max_model_len'"),
        ({"tokenizer": "other"}, FileNotFoundError, "'other' is neither a folder, nor a hub id"),
        ({"tokenizer": 5}, TypeError, "tokenizer is 5 of type int, expected a hub id, a folder or None"),
        ({"tokenizer_revision": "v2"}, ValueError, "tokenizer_revision is 'v2', but the tokenizer is the model's; expected None"),
        ({"hf_overrides": np.array([1, 2])}, ValueError, r"hf_overrides is array\(.*, which cannot be served"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size is 0, expected at least 1"),
        ({"tensor_parallel_size": 16}, ValueError, "a mesh of data=1 times tensor=16 devices was asked for; found 8"),
        ({"kv_cache_dtype": "fp8_e5m2"}, ValueError, "kv_cache_dtype is 'fp8_e5m2'; available: 'auto', 'bfloat16', 'float32', 'fp8'"),
        ({"quantization": "awq"}, ValueError, "quantization is 'awq', but the weights of 'pocket' are float; these can be .* 'fp8'"),
        ({"dtype": "half"}, ValueError, "dtype is 'float16'; available"),
        ({"max_model_len": 1}, ValueError, "^max_model_len is 1, expected 2 .. "),
        ({"gpu_memory_utilization": 1.5}, ValueError, "^gpu_memory_utilization is 1.5"),
        ({"max_num_seqs": 0}, ValueError, "^max_num_seqs is 0, expected at least 1"),
        ({"model": None}, TypeError, "model is None of type NoneType, expected a hub id, a folder or a bundled name"),
        ({"gpu_memory_utilization": "0.5"}, TypeError, "gpu_memory_utilization is '0.5' of type str, expected a number"),
        ({"kv_cache_dtype": ["fp8"]}, ValueError, r"kv_cache_dtype is \['fp8'\]; available"),
        ({"quantization": ["fp8"]}, ValueError, r"quantization is \['fp8'\], but the weights of 'pocket' are float"),
        ({"chat_template": "none.jinja"}, FileNotFoundError, "chat_template is 'none.jinja', no template and no file that can be read: No"),
        ({"chat_template": 5}, TypeError, "chat_template is 5 of type int, expected a template or a file of one"),
        ({"override_generation_config": "x"}, TypeError, "override_generation_config is 'x', expected a dict"),
        ({"override_generation_config": {"top_p": 2}}, ValueError, "override_generation_config: top_p is 2"),
        ({"generation_config": "folder"}, ValueError, "generation_config is 'folder'; available: 'auto', 'vllm'"),
        ({"load_format": "dummy"}, ValueError, "load_format is 'dummy', which cannot be served: checkpoints are read from safetensors"),
        ({"revision": "main"}, ValueError, "revision is 'main', but 'pocket' is no model of a hub, and has no revisions"),
        ({"structured_outputs_config": "xgrammar"}, TypeError, "structured_outputs_config is 'xgrammar', expected a dict"),
        (
            {"structured_outputs_config": {"backnd": "xgrammar"}},
            TypeError,
            "structured_outputs_config has no argument 'backnd'; the nearest",
        ),
        (
            {"structured_outputs_config": {"disable_any_whitespace": 1}},
            TypeError,
            r"structured_outputs_config\['disable_any_whitespace'\] is 1, expected True or False",
        ),
        ({"speculative_config": "ngram"}, TypeError, "speculative_config is 'ngram', expected a dict"),
        ({"speculative_config": {}}, ValueError, "speculative_config has no 'model', found {}; expected a drafter's checkpoint"),
        ({"speculative_config": {"methd": "ngram"}}, TypeError, "speculative_config has no argument 'methd'; the nearest is 'method'"),
        ({"speculative_config": {"model": 5}}, TypeError, r"speculative_config\['model'\] is 5 of type int, expected a hub id, a folder"),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 24}},
            ValueError,
            r"\['method'\] is 'suffix'; available",
        ),
        ({"speculative_config": {"method": ["ngram"]}}, ValueError, r"\['method'\] is \['ngram'\]; available"),
        (
            {"speculative_config": {"method": "mtp"}},
            ValueError,
            "^speculative_config has no 'model', but the config.json in .* tells of no",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": -1}},
            ValueError,
            r"^speculative_config\['num_speculative_tokens'\] is -1, expected 0 .. ",
        ),
        (
            {"speculative_config": {"method": "ngram", "enable_adaptive_verification": "yes"}},
            TypeError,
            r"^speculative_config\['enable_adaptive_verification'\] is 'yes', expected True",
        ),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_max": "4"}}, TypeError, r"\['prompt_lookup_max'\] is '4' of type str"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_min": 0}},
            ValueError,
            r"\['prompt_lookup_min'\] is 0, expected at least 1",
        ),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 4}},
            ValueError,
            r"speculative_config\['prompt_lookup_min'\] is 4, expected at most prompt_lookup_max, 2",
        ),
        (
            {"speculative_config": {"method": "ngram", "synthetic_acceptance_rates": [0.5]}},
            ValueError,
            r"\['synthetic_acceptance_rates'\] is \[0.5\], which cannot be served: jaxspec.load\(accept=...\) has acceptance",
        ),
        ({"speculative_config": {"method": "medusa", "model": "x"}}, ValueError, r"\['method'\] is 'medusa'; available: 'mtp', "),
        (
            {"speculative_config": {"method": "eagle3", "model": "pocket-mtp"}},
            ValueError,
            "is 'eagle3', but 'pocket-mtp' is a drafter of the kind mtp",
        ),
        (
            {"speculative_config": {"method": "ngram", "quantization": "fp8"}},
            ValueError,
            r"speculative_config\['quantization'\] is 'fp8', but the drafter is no checkpoint of its own",
        ),
        (
            {"speculative_config": {"model": "pocket-mtp", "quantization": "awq"}},
            ValueError,
            "quantization is 'awq', but the weights of 'pocket-mtp' are float; these can be quantised by 'fp8'",
        ),
    ],
)
def test_wrong_arguments(given, error, message, monkeypatch):
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        LLM(**{"model": "pocket", **given})


@pytest.mark.parametrize(
    ("settings", "name", "called"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, "awq_marlin", "awq of 4 bits"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8 of blocks 128 x 128"),  # as Step-3.5-Flash-FP8 has it
    ],
)
def test_the_format_of_a_quantised_checkpoint_is_checked(settings, name, called, asked, tmp_path):
    folder = tmp_path / "quantised"
    shutil.copytree(hub.bundled()["pocket"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    assert asked(folder, quantization=name)["quantize"] is None
    with pytest.raises(ValueError, match=f"quantization is 'gptq', but the weights of .* are quantised as {called}"):
        LLM(folder, quantization="gptq")


def test_a_converted_checkpoint_is_in_the_format_that_its_config_names(asked, tmp_path):
    jaxspec.convert("pocket", tmp_path / "converted", quantize="int8")
    for name in ("compressed-tensors", "int8_per_channel_weight_only"):
        assert asked(tmp_path / "converted", quantization=name)["quantize"] is None
    with pytest.raises(ValueError, match="quantization is 'fp8', but the weights of .* are quantised as int8"):
        LLM(tmp_path / "converted", quantization="fp8")


def test_what_a_hub_is_asked_for_reaches_load(asked, monkeypatch, tmp_path):
    found = asked("some/model", revision="v1", tokenizer_revision="v1", download_dir=tmp_path, hf_token="secret")
    assert [found[name] for name in ("target", "revision", "cache_dir", "token")] == ["some/model", "v1", tmp_path, "secret"]
    calls = []

    def downloaded(name, **settings):
        calls.append((name, settings.get("revision"), settings["cache_dir"], settings["token"]))
        return str(hub.bundled()["pocket-draft"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloaded)
    config = {"model": "some/drafter", "revision": "v2", "method": "draft_model"}
    found = asked("some/model", revision="v1", download_dir=tmp_path, hf_token="secret", speculative_config=config)
    assert found["drafter"] == "some/drafter@v2" and calls[0] == ("some/drafter", "v2", tmp_path, "secret")
    with pytest.raises(ValueError, match="tokenizer_revision is 'v2', but the tokenizer is the model's; expected 'v1' or None"):
        LLM("some/model", revision="v1", tokenizer_revision="v2")


def test_calls_refuse_what_they_cannot_serve(llm):
    message = "params is jaxspec.vllm.sampling_params.SamplingParams, expected jaxspec.SamplingParams"
    with pytest.raises(TypeError, match=message):
        llm.jaxspec.generate("x", SamplingParams())
    for name in llm_file.CALLS_REFUSED:
        for call in (llm.generate, llm.chat):
            with pytest.raises(ValueError, match=f"{name} of {call.__name__} cannot be served: "):
                call([{"role": "user", "content": "Hi"}], **{name: [1]})
    with pytest.raises(TypeError, match="generate has no argument 'sampling_param'; the nearest is 'sampling_params'"):
        llm.generate("x", sampling_param=None)
    with pytest.warns(UserWarning, match="without effect here: priority$") as told:
        llm.generate(["x", "y"], SamplingParams(max_tokens=1), use_tqdm=False, priority=[1, 0], lora_request=[None, None])
    assert told[0].filename == __file__
    for name, reason in llm_file.MISSING.items():
        with pytest.raises(AttributeError, match=f"has no '{name}', which cannot be served: {reason[:20]}"):
            getattr(llm, name)
    with pytest.raises(ImportError, match="jaxspec.vllm has no GuidedDecodingParams: its name is StructuredOutputsParams"):
        from jaxspec.vllm import GuidedDecodingParams  # noqa: F401  # pyright: ignore
    with pytest.raises(ImportError, match="jaxspec.vllm.sampling_params has no GuidedDecodingParams: its name is StructuredOutputsParams"):
        from jaxspec.vllm.sampling_params import GuidedDecodingParams  # noqa: F401  # pyright: ignore
    with pytest.raises(ImportError, match="jaxspec.vllm has no PoolingRequestOutput: a target generates text"):
        from jaxspec.vllm import PoolingRequestOutput  # noqa: F401  # pyright: ignore
    with pytest.raises(ImportError, match="jaxspec.vllm.outputs has no PoolingRequestOutput: a target generates text"):
        from jaxspec.vllm.outputs import PoolingRequestOutput  # noqa: F401  # pyright: ignore
    with pytest.raises(ValueError, match="prompt_token_ids of generate cannot be served: they belong into prompts"):
        llm.generate(prompt_token_ids=[[5, 6]], sampling_params=SamplingParams())
    with pytest.raises(TypeError, match="generate has no prompts; expected a text, token ids, or several of these"):
        llm.generate(sampling_params=SamplingParams())
    with pytest.raises(ValueError, match="prompt 0 has 200 tokens; expected at most 191, max_model_len 192 less one to generate"):
        llm.generate([[5] * 200], use_tqdm=False)


@pytest.mark.parametrize(
    "messages", [{"role": "user", "content": "Hi"}, None, iter([]), []], ids=["one message", "none", "iterator", "no message"]
)
def test_a_conversation_is_a_list_of_messages(llm, messages):
    with pytest.raises(ValueError, match="chat takes a list of at least one message"):
        llm.chat(messages, use_tqdm=False)


def test_a_request_that_fails_alone_says_why(llm):
    [failed, good] = llm.generate(
        ["x", "y"], [SamplingParams(allowed_token_ids=[1], min_tokens=2), SamplingParams(max_tokens=2)], use_tqdm=False
    )
    assert (failed.outputs[0].finish_reason, good.outputs[0].error) == ("error", None)
    assert "or the request allows none" in failed.outputs[0].error
    assert failed.metrics.first_token_latency == 0.0


def test_a_sample_without_a_first_token_has_no_latency():
    seconds = {"failed": 0.0, "slow": 2.0, "fast": 1.0}
    samples = [Completion(name, [], "length", None, [5], 0, RoundStats(0, (), (), found)) for name, found in seconds.items()]
    assert request_output("0", samples, list(seconds)).metrics.first_token_latency == 1.0


@pytest.mark.parametrize("name", ["swap_space", "guided_decoding_backend", "max_lora_rank", "model_impl", "worker_extension_cls"])
def test_more_of_what_vllm_has_is_known(asked, name):
    with pytest.warns(UserWarning, match=f"without effect here: {name}$"):
        asked("pocket", **{name: 1})


def test_what_a_generation_config_has_beside_sampling_changes_nothing(asked):
    with pytest.warns(UserWarning, match=r"without effect here: override_generation_config\['num_beams'\]$"):
        asked("pocket", override_generation_config={"num_beams": 2, "top_k": 5})


def test_numbers_that_may_be_none():
    given = dict.fromkeys(["n", "presence_penalty", "temperature", "top_p", "repetition_penalty", "stop"])
    assert SamplingParams.from_optional(**given) == SamplingParams() and SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(logit_bias={"5": 200, 6: -1}).logit_bias == {5: 100.0, 6: -1}
    with pytest.raises(ValueError, match="logit_bias has the key 'x', expected a token id"):
        SamplingParams.from_optional(logit_bias={"x": 1})
    with pytest.raises(TypeError, match="SamplingParams has no argument 'temprature'; the nearest is 'temperature'"):
        SamplingParams.from_optional(temprature=1)


MARKS = {"allowed_token_ids": [48, 52, 419], "ignore_eos": True, "max_tokens": 8, "seed": 2}  # <|tool_call>, <|"|>, def


@pytest.mark.parametrize("end", [{}, {"stop_token_ids": [419]}, {"stop_token_ids": [48]}, {"stop": "ef"}])
@pytest.mark.parametrize("kept", [False, True])
def test_special_tokens_are_in_texts_that_want_them(llm, end, kept):
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(**MARKS, **end, include_stop_str_in_output=kept, skip_special_tokens=False)
    [found] = llm.generate("x", params, use_tqdm=False)[0].outputs
    plain = SamplingParams(**MARKS, **end, include_stop_str_in_output=kept)
    [skipped] = llm.generate("x", plain, use_tqdm=False)[0].outputs
    ends = 0 if kept or found.finish_reason == "length" else 1 if "stop_token_ids" in end else 0
    whole = tokenizer.decode(found.token_ids[: len(found.token_ids) - ends], skip_special_tokens=False)
    assert found.finish_reason == ("stop" if end else "length") and found.token_ids == skipped.token_ids
    assert found.text == (whole.removesuffix("ef") if "stop" in end and not kept else whole)
    assert re.sub(r'<\|tool_call>|<\|"\|>', "", found.text) == skipped.text


def test_a_stop_string_that_ends_in_several_tokens_is_cut_off_texts_with_special_tokens(llm):
    params = SamplingParams(
        max_tokens=20, stop=["a😀"], skip_special_tokens=False, structured_outputs=StructuredOutputsParams(regex="aaa😀b")
    )
    found = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert (found.text, found.stop_reason) == ("aa", "a😀")


@pytest.mark.parametrize("kept", [False, True])
def test_a_stop_string_of_bytes_that_are_no_character_cuts_off_itself_alone(llm, kept):
    tokenizer = llm.jaxspec.tokenizer
    lone = next(i for i in range(4096) if tokenizer.decode([i]) == "\ufffd" and tokenizer.decode([i, i]) == "\ufffd\ufffd")
    params = SamplingParams(
        allowed_token_ids=[lone],
        ignore_eos=True,
        min_tokens=3,
        max_tokens=8,
        stop=["\ufffd"],
        include_stop_str_in_output=kept,
        skip_special_tokens=False,
    )
    found = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    plain = dataclasses.replace(params, skip_special_tokens=True)
    assert found.stop_reason == "\ufffd" and len(found.text) >= 2
    assert found.text == llm.generate("x", plain, use_tqdm=False)[0].outputs[0].text


def test_a_stop_string_with_a_special_token_is_refused_where_texts_have_them(llm):
    with pytest.raises(ValueError, match=r"stop has 'a<\|tool_call>', which holds a special token; expected its id in stop_token_ids: 48"):
        llm.generate("x", SamplingParams(stop=["b", "a<|tool_call>"], skip_special_tokens=False), use_tqdm=False)


@pytest.mark.parametrize("asking", [{"tools": [{"type": "function"}]}, {"chat_template_kwargs": {"enable_thinking": True}}])
def test_a_chat_with_tools_or_thoughts_has_their_marks(llm, asking):
    params, question = SamplingParams(**MARKS), [{"role": "user", "content": "Hi"}]
    asking = {"chat_template": "{{ messages[0].content }}", "use_tqdm": False, **asking}
    for given in (params, [params]):
        [output] = llm.chat(question, given, **asking)
        assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids) and "<|" in output.outputs[0].text
    assert params.skip_special_tokens
    del asking["tools" if "tools" in asking else "chat_template_kwargs"]
    assert "<|" not in llm.chat(question, params, **asking)[0].outputs[0].text


def test_the_format_of_content(llm):
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    asked = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Go"}]
    given = {"sampling_params": SamplingParams(max_tokens=1), "use_tqdm": False}
    reads_parts = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    for content_format, template, prompt in (
        ("openai", reads_parts, "[Hi][you][Yes][Go]"),
        ("string", "{% for m in messages %}{{ m.content is string }}[{{ m.content }}]{% endfor %}", "True[Hi\nyou]True[Yes]True[Go]"),
        ("auto", "{% for m in messages %}[{{ m.content }}]{% endfor %}", "[Hi\nyou][Yes][Go]"),
    ):
        [output] = llm.chat(asked, chat_template=template, chat_template_content_format=content_format, **given)
        assert output.prompt == prompt
    with pytest.raises(ValueError, match="chat_template_content_format is 'text'; available: 'auto', 'string', 'openai'"):
        llm.chat(asked, chat_template_content_format="text", **given)
    for content_format in ("string", "openai"):
        with pytest.raises(ValueError, match="message 0 holds content of type 'image_url'; only text can be read"):
            seen = [{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}]}]
            llm.chat(seen, chat_template_content_format=content_format, **given)


def test_structures_have_what_holds_for_all_of_them(monkeypatch):
    monkeypatch.setattr(llm_file, "load", lambda *_, **__: None)
    flags = {"disable_any_whitespace": True, "disable_additional_properties": True}
    with pytest.warns(UserWarning, match=r"without effect here: structured_outputs_config\['backend'\]$"):
        llm = LLM("pocket", structured_outputs_config={"backend": "guidance", **flags})
    for given in (StructuredOutputsParams(json={"properties": {}}), {"json": {"properties": {}}}):
        assert llm._served(SamplingParams(structured_outputs=given)).structured_outputs == StructuredOutputsParams(
            json={"properties": {}}, **flags
        )
    assert llm._served(SamplingParams()).structured_outputs is None


def test_types_of_metrics_are_known(llm):
    from jaxspec.vllm import Counter, Gauge, Histogram, Metric, Vector

    assert {type(metric) for metric in llm.get_metrics()} == {Counter, Vector}
    assert all(isinstance(metric, Metric) and not isinstance(metric, Gauge | Histogram) for metric in llm.get_metrics())
    assert Histogram("x", 1, 2.0, {"+Inf": 1}, labels={"engine": "0"}).labels == {"engine": "0"}


@pytest.mark.slow
def test_a_script_for_structured_outputs():
    choice, email, car = run(STRUCTURED)["answers"]
    assert choice in ("Positive", "Negative") and re.fullmatch(r"\w{1,12}@\w{1,12}\.com", email)
    found = json.loads(car)
    assert set(found) == {"wheels", "car_type"} and isinstance(found["wheels"], int) and found["car_type"] in ("SEDAN", "SUV")


def test_structured_outputs_have_vllm_s_names():
    served = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"])).served().structured_outputs
    assert served == StructuredOutputsParams(choice=("a", "b"))
    with pytest.raises(ValueError, match="guided_decoding .* cannot be served: its name is structured_outputs"):
        SamplingParams(guided_decoding={"choice": ["a"]})
    with pytest.raises(ValueError, match="grammars \\(EBNF, Lark\\) have no automaton"):
        SamplingParams(structured_outputs={"grammar": "root ::= x"})
