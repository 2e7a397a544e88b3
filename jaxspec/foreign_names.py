"""The names that arguments of `load` have in vLLM, transformers and SGLang, and an answer to who uses one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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
    "tokenizer": "the tokenizer is the target's own",
    "tokenizer_revision": "the tokenizer is the target's own",
    "trust_remote_code": "no code of a checkpoint is run",
    "enforce_eager": "every round is compiled",
    "enable_prefix_caching": "prompts that begin alike are always computed once",
    "low_cpu_mem_usage": "weights always go straight to the devices",
    "pipeline_parallel_size": "weights are spread by tensor alone",
}

P = ParamSpec("P")
R = TypeVar("R")


def answers_foreign_names(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises TypeError for a keyword that it does not have, with the name that this has here or the nearest one."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - set(known):
            if name in HERE:
                raise TypeError(f"{function.__name__} has no argument {name!r}; here it is called {HERE[name]}")
            if name in NEEDLESS:
                raise TypeError(f"{function.__name__} has no argument {name!r}, and needs none: {NEEDLESS[name]}")
            raise unknown(function.__name__, name, known)
        return function(*args, **kwargs)

    return checked
