"""The names that arguments of `load` and SamplingParams have in vLLM, transformers and other places, and an answer to who uses one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from jaxspec.checks import unknown

# What each is called here. What follows a name here is said behind it.
HERE = {
    "model": "target",
    "model_id": "target",
    "model_path": "target",
    "pretrained_model_name_or_path": "target",
    "assistant_model": "drafter",
    "speculative_model": "drafter",
    "speculative_draft_model_path": "drafter",
    "speculative_config": "drafter, with num_draft_tokens",
    "num_speculative_tokens": "num_draft_tokens",
    "num_assistant_tokens": "num_draft_tokens",
    "speculative_num_draft_tokens": "num_draft_tokens",
    "enable_adaptive_verification": "adaptive_verification",
    "torch_dtype": "dtype",
    "quantization": "quantize, of weights alone, with quantize_activations beside it",
    "quantization_config": "quantize",
    "load_in_8bit": "quantize='int8'",
    "load_in_4bit": "quantize='int4'",
    "device_map": "mesh, made by jaxspec.mesh",
    "data_parallel_size": "mesh=jaxspec.mesh(data=...)",
    "dp_size": "mesh=jaxspec.mesh(data=...)",
    "tensor_parallel_size": "tensor",
    "tp_size": "tensor",
    "tp_plan": "tensor",
    "max_num_seqs": "max_slots",
    "max_running_requests": "max_slots",
    "max_batch_size": "max_slots",
    "max_model_len": "max_len",
    "max_seq_len": "max_len",
    "max_length": "max_len",
    "context_length": "max_len",
    "attn_implementation": "attention",
    "attention_backend": "attention",
    "kv_cache_dtype": "kv_dtype",
    "num_gpu_blocks_override": "kv_pages, of 64 tokens",
    "gpu_memory_utilization": "memory_fraction",
    "mem_fraction_static": "memory_fraction",
    "random_seed": "seed",
    "enable_lora": "adapter, which is merged",
    "lora_path": "adapter",
    "lora_paths": "adapter",
    "adapter_name_or_path": "adapter",
    "peft_model_id": "adapter",
    "download_dir": "cache_dir",
    "hf_token": "token",
    "use_auth_token": "token",
    "use_tqdm": "progress",
    "use_tqdm_on_load": "progress",
}
# What there is none of, and why none is needed.
NEEDLESS = {
    "tokenizer_revision": "tokenizer='owner/name@revision' says it",
    "trust_remote_code": "no code of a checkpoint is run",
    "enforce_eager": "every round is compiled",
    "enable_prefix_caching": "prompts that begin alike are always computed once",
    "low_cpu_mem_usage": "weights always go straight to the devices",
    "pipeline_parallel_size": "weights are spread by tensor alone",
}

# The same of SamplingParams.
PARAMS_HERE = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, of new tokens alone",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "best_of": "n",
    "do_sample": "temperature, which is 0 for greedy",
    "temp": "temperature",
    "random_seed": "seed",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words, which are texts",
    "sequence_bias": "logit_bias, of single tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "top_logprobs": "logprobs, a number",
    "guided_decoding": "structured_outputs",
    "guided_json": "structured_outputs={'json': ...}",
    "json_schema": "structured_outputs={'json': ...}",
    "guided_regex": "structured_outputs={'regex': ...}",
    "guided_choice": "structured_outputs={'choice': ...}",
    "response_format": "structured_outputs={'json': ...}",
}
PARAMS_NEEDLESS = {
    "detokenize": "a result always has its text and its token_ids",
    "skip_special_tokens": "texts leave special tokens out; llm.tokenizer.decode(token_ids, special=True) has them",
    "use_cache": "there always is one",
}

P = ParamSpec("P")
R = TypeVar("R")


def answers_foreign_names(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises TypeError for a keyword that it does not have, with the name that this has here or the nearest one."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        answer(function.__name__, kwargs, known, HERE, NEEDLESS)
        return function(*args, **kwargs)

    return checked


def answer(function: str, given: Iterable[str], known: Iterable[str], here: Mapping[str, str], needless: Mapping[str, str]) -> None:
    """Raises TypeError for a name that is not among those known, with what it is called here, why there is none, or the nearest one."""
    for name in given:
        if name in known:
            continue
        if name in here:
            raise TypeError(f"{function} has no argument {name!r}; here it is called {here[name]}")
        if name in needless:
            raise TypeError(f"{function} has no argument {name!r}, and needs none: {needless[name]}")
        raise unknown(function, name, known)
