"""From the arguments of vLLM's LLM to those of `jaxspec.load`: what each means here, what only tunes vLLM, and what is refused."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxspec import checkpoint, sharding
from jaxspec.checkpoint.hub import HUB, Hub
from jaxspec.checks import among, flag, integer, path, same_kind, unknown
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.registry import SAME, kind_of
from jaxspec.vllm.limits import limits_of

# What `load` calls the arguments that it takes.
RENAMED = {
    "gpu_memory_utilization": "memory_fraction",
    "max_model_len": "max_len",
    "max_num_seqs": "max_slots",
    "speculative_config['num_speculative_tokens']": "num_draft_tokens",
    "speculative_config['enable_adaptive_verification']": "adaptive_verification",
}
# By vLLM's names for caches, those of `load`.
KV_DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "float32": "float32", "fp8": "fp8", "fp8_e4m3": "fp8"}
# Ways to quantise float weights, and `quantize` of `load`.
ONLINE = {"fp8": "fp8", "fp8_per_tensor": "fp8", "int8_per_channel_weight_only": "int8"}
# Formats of checkpoints by vLLM's names, and the first word of what `checkpoint` calls them.
FORMATS = {
    "compressed-tensors": "compressed-tensors",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "gguf": "gguf",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto-round": "auto-round",
    "auto_round": "auto-round",
    "awq": "awq",
    "awq_marlin": "awq",
}
# Methods of speculation, and the kinds of drafters that they are.
METHODS = {
    "mtp": ("mtp", "mtp-modules"),
    "gemma4_mtp": ("mtp",),
    "step3p5_mtp": ("mtp-modules",),
    "eagle3": ("eagle3",),
    "dflash": ("dflash", "dflash2"),
    "dspark": ("dspark",),
    "draft_model": ("draft-model",),
}
NGRAM_METHODS = ("ngram", "[ngram]", "ngram_gpu")

# Arguments that only tune vLLM, or ask for what is always so here.
TUNING = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization allowed_local_media_path
    allowed_media_domains async_scheduling attention_backend attention_config block_size code_revision collect_detailed_traces
    compilation_config cuda_graph_sizes cudagraph_capture_sizes cudagraph_metrics data_parallel_backend device
    disable_async_output_proc disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
    disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats disable_mm_preprocessor_cache
    distributed_executor_backend enable_chunked_prefill enable_dbo enable_eplb enable_expert_parallel enable_layerwise_nvtx_tracing
    enable_log_requests enable_logging_iteration_details enable_mfu_metrics enable_mm_embeds enable_mm_processor_stats
    enforce_eager eplb_config expert_placement_strategy fully_sharded_loras gpu_id guided_decoding_backend
    ignore_patterns interleave_mm_strings kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_offloading_backend
    language_model_only load_format logits_processor_pattern long_prefill_token_threshold lora_dtype
    mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype max_cpu_loras max_cudagraph_capture_size max_logprobs
    max_long_partial_prefills max_lora_rank max_loras max_num_batched_tokens max_num_partial_prefills max_parallel_loading_workers
    max_seq_len_to_capture mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
    mm_shm_cache_max_object_size_mb model_impl model_loader_extra_config moe_backend num_gpu_blocks_override
    num_lookahead_slots num_scheduler_steps observability_config optimization_level otlp_traces_endpoint performance_mode
    preemption_mode prefix_caching_hash_algo profiler_config pt_load_map_location ray_workers_use_nsight reasoning_parser
    reasoning_parser_plugin safetensors_load_strategy scheduler_cls scheduler_delay_factor scheduling_policy served_model_name
    show_hidden_metrics_for_version skip_mm_profiling stream_interval swap_space tokenizer_mode tokenizer_pool_size
    trust_remote_code use_tqdm_on_load use_v2_block_manager worker_cls worker_extension_cls
    """.split()
)
_TEXT = "a target generates text"
# Arguments that are refused unless they have one of these values, and why.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "runner": (("auto", "generate"), _TEXT),
    "task": ((None, "auto", "generate"), _TEXT),
    "convert": (("auto", "none", None), _TEXT),
    "pooler_config": ((None,), _TEXT),
    "override_pooler_config": ((None,), _TEXT),
    "skip_tokenizer_init": ((False, None), "stop strings and texts need the tokenizer"),
    "pipeline_parallel_size": ((1, None), "weights are spread by tensor_parallel_size alone"),
    "decode_context_parallel_size": ((1, None), "a sequence lies on the devices of one tensor group"),
    "prefill_context_parallel_size": ((1, None), "a sequence lies on the devices of one tensor group"),
    "cpu_offload_gb": ((0, None), "all weights lie on the devices; quantization makes them smaller"),
    "kv_offloading_size": ((0, None), "keys and values lie on the devices; a cache of float8 makes them smaller"),
    "default_mm_loras": ((None, {}), "a prompt has the adapter that its call names"),
    "enable_prompt_adapter": ((False, None), "adapters are not available"),
    "logits_processors": ((None, [], ()), "a step runs on the device whole; logit_bias, allowed_token_ids and bad_words work there"),
    "hf_overrides": ((None, {}), "the checkpoint's config.json is read as it is"),
    "hf_config_path": ((None,), "the checkpoint's config.json is read as it is"),
    "config_format": (("auto", "hf", None), "the checkpoint's config.json is read as it is"),
    "quantization_config": ((None,), "the checkpoint's config.json is read as it is"),
    "rope_scaling": ((None,), "the checkpoint's config.json is read as it is"),
    "rope_theta": ((None,), "the checkpoint's config.json is read as it is"),
    "disable_sliding_window": ((False, None), "it would change the model"),
    "calculate_kv_scales": ((False, None), "a cache of float8 has the checkpoint's scales, or 1"),
    "logprobs_mode": (("raw_logprobs", None), "log-probabilities are the model's own, before temperature and filters"),
    "kv_transfer_config": ((None,), "prompts and steps run on the same devices"),
    "video_pruning_rate": ((None, 0, 0.0), "all tokens of the frames of a video are read"),
    "enable_prompt_embeds": ((False, None), "a prompt is made of tokens"),
    "enable_return_routed_experts": ((False, None), "results have texts, tokens and log-probabilities"),
    "speculative_model": ((None,), "it belongs into speculative_config, as 'model'"),
    "num_speculative_tokens": ((None,), "it belongs into speculative_config"),
}
# Keys of structured_outputs_config: what holds for every request, and those that only tune vLLM.
STRUCTURE = ("disable_any_whitespace", "disable_additional_properties")
STRUCTURE_TUNING = ("backend", "disable_fallback", "enable_in_reasoning", "reasoning_parser", "reasoning_parser_plugin")
# Keys of speculative_config: those that are read, those that only tune vLLM, and those that are refused.
ADAPTIVE = "enable_adaptive_verification"
SPECULATION_READ = (
    "model",
    "method",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "revision",
    "quantization",
    ADAPTIVE,
)
SPECULATION_TUNING = (
    "attention_backend",
    "code_revision",
    "disable_by_batch_size",
    "disable_eagle_block_drop",
    "disable_logprobs",
    "disable_padded_drafter_batch",
    "draft_load_config",
    "draft_sample_method",
    "draft_tensor_parallel_size",
    "dspark_draft_topk",
    "enforce_eager",
    "index_share_for_mtp_iteration",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "num_speculative_tokens_per_batch_size",
    "parallel_drafting",
    "use_local_argmax_reduction",
)
_RATES = "jaxspec.load(accept=...) has acceptance at given rates"
SPECULATION_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # Rules that leave the distribution of texts as it is only tune.
    "rejection_sample_method": ((None, "strict", "standard", "probabilistic", "block"), _RATES),
    "synthetic_acceptance_length": ((None,), _RATES),
    "synthetic_acceptance_rates": ((None,), _RATES),
    "speculative_token_tree": ((None,), "jaxspec.load(tree=...) has trees"),
    "use_heterogeneous_vocab": ((False, None), "a drafter has the target's tokens"),
}


def sorted_out(others: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Those of the other arguments that only tune vLLM, by name. known: the arguments that are read.

    Raises ValueError for one that cannot be served, TypeError for one that nobody knows, with the nearest."""
    for name, value in others.items():
        if name in REFUSED:
            _refuse(name, value, *REFUSED[name])
        elif name not in TUNING:
            raise unknown("LLM", name, (*known, *TUNING, *REFUSED))
    if others.get("load_format") in ("dummy", "bitsandbytes", "pt", "npcache", "tensorizer", "runai_streamer", "sharded_state"):
        read = "checkpoints are read from safetensors and GGUF files"
        raise ValueError(f"load_format is {others['load_format']!r}, which cannot be served: {read}")
    return sorted(name for name in others if name in TUNING)


def tell_without_effect(names: list[str], stacklevel: int = 2) -> None:
    """Says once which arguments are accepted but change nothing. stacklevel: of who gave them, as for `warnings.warn` from the caller."""
    if names:
        warnings.warn(f"accepted but without effect here: {', '.join(names)}", UserWarning, stacklevel=stacklevel + 1)


def tokenizer_of(
    tokenizer: str | os.PathLike[str] | None, model: str | os.PathLike[str], tokenizer_revision: str | None, revision: str | None
) -> str | None:
    """`tokenizer` of `load`, None where it is the model's own. Raises TypeError, and ValueError for a revision that is not the model's."""
    named = None if tokenizer is None else os.fspath(path("tokenizer", tokenizer, "a hub id, a folder or None"))
    if named not in (None, os.fspath(model)):
        return named if tokenizer_revision is None else f"{named}@{tokenizer_revision}"
    if not among(tokenizer_revision, (None, revision)):
        expected = "None" if revision is None else f"{revision!r} or None"
        raise ValueError(f"tokenizer_revision is {tokenizer_revision!r}, but the tokenizer is the model's; expected {expected}")
    return None


def dtype_of(dtype: Any) -> Any:
    """`dtype` of `load`."""
    name = str(dtype).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name) if isinstance(dtype, str) or "torch." in str(dtype) else dtype


def kv_dtype_of(name: str) -> str:
    """`kv_dtype` of `load`. Raises ValueError."""
    if not isinstance(name, str) or name not in KV_DTYPES:
        raise ValueError(f"kv_cache_dtype is {name!r}; available: {', '.join(map(repr, KV_DTYPES))}")
    return KV_DTYPES[name]


def quantize_of(model: Any, quantization: str | None, hub: Hub = HUB) -> str | None:
    """`quantize` of `load`, or of a drafter `quantize_drafter`: None for weights that the checkpoint holds as `quantization` says, or that
    it says nothing of.

    Raises ValueError for another format than the checkpoint's, and for a method that is not available."""
    if quantization is None:
        return None
    folder = checkpoint.resolve(model, hub, weights=False)
    config = checkpoint.read_config(folder)
    found = checkpoint.read_quantisation(folder, config)
    if found is not None and not found.dense:
        # A converted checkpoint has the name of how it was quantised, and may say in config.json how other tools would call that.
        names = found.name.split()[0].lower(), (config.get("quantization_config") or {}).get("quant_method")
        if not {FORMATS.get(str(quantization)), ONLINE.get(str(quantization))}.intersection(filter(None, names)):
            raise ValueError(f"quantization is {quantization!r}, but the weights of {os.fspath(model)!r} are quantised as {found.name}")
        return None
    if not isinstance(quantization, str) or quantization not in ONLINE:
        raise ValueError(
            f"quantization is {quantization!r}, but the weights of {os.fspath(model)!r} are float; these can be quantised by "
            f"{', '.join(map(repr, ONLINE))}"
        )
    return ONLINE[quantization]


def mesh_of(tensor: Any, data: Any) -> Any:
    """`mesh` of `load`, None for one device. Raises as `jaxspec.mesh` does."""
    tensor, data = integer("tensor_parallel_size", tensor, 1), integer("data_parallel_size", data, 1)
    return None if tensor == data == 1 else sharding.mesh(data=data, tensor=tensor)


def media_of(limits: Any, processing: Any, reading: Any) -> dict[str, bool | int]:
    """`images`, `videos` and `audio` of `load`: prompts have some if `limits`, vLLM's limit_mm_per_prompt, allow any, or, of images, if
    `processing`, its mm_processor_kwargs, says how they are prepared. reading: its media_io_kwargs, which say how many frames of a video
    are read, as `processing` may. Raises TypeError or ValueError."""
    counts = limits_of(limits)
    for name, given in (("mm_processor_kwargs", processing), ("media_io_kwargs", reading)):
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"{name} is {given!r}, expected a dict")
    wanted = dict(processing or {})
    most, sampled = wanted.pop("max_soft_tokens", None), wanted.pop("num_frames", None)
    if wanted:
        raise ValueError(
            f"mm_processor_kwargs has {sorted(wanted)[0]!r}, which cannot be served; expected 'max_soft_tokens' or 'num_frames'"
        )

    by_kind = dict(reading or {})
    of_video = dict(by_kind.pop("video", None) or {})
    frames = of_video.pop("num_frames", None)
    others = [f"['video'][{name!r}]" for name in of_video] + [f"[{kind!r}]" for kind, given in by_kind.items() if given]
    if others:
        raise ValueError(f"media_io_kwargs{others[0]} cannot be served; expected {{'video': {{'num_frames': 32}}}} and the like")

    tokens = True if most is None else integer("mm_processor_kwargs['max_soft_tokens']", most, 1)
    read = [
        integer(f"{name}['num_frames']", count, 1)
        for name, count in (("media_io_kwargs['video']", frames), ("mm_processor_kwargs", sampled))
        if count is not None
    ]
    seen = min(read, default=True)  # a file's frames are read, and the processor samples those
    return {
        "images": counts.get("image", most is not None) > 0 and tokens,
        "videos": counts.get("video", 0) > 0 and seen,
        "audio": counts.get("audio", 0) > 0,
    }


def structure_of(config: Mapping[str, Any] | None) -> tuple[dict[str, bool], list[str]]:
    """(what StructuredOutputsParams of every request have, by name; the keys that only tune vLLM). Raises TypeError."""
    if config is None:
        return {}, []
    if not isinstance(config, Mapping):
        raise TypeError(f"structured_outputs_config is {config!r}, expected a dict")
    for key, value in config.items():
        if key not in (*STRUCTURE, *STRUCTURE_TUNING):
            raise unknown("structured_outputs_config", key, (*STRUCTURE, *STRUCTURE_TUNING))
        if key in STRUCTURE:
            flag(f"structured_outputs_config[{key!r}]", value)
    tuning = [f"structured_outputs_config[{key!r}]" for key in config if key in STRUCTURE_TUNING]
    return {key: True for key in STRUCTURE if config.get(key)}, tuning


def speculation_of(config: Mapping[str, Any] | None, hub: Hub = HUB) -> tuple[dict[str, Any], list[str]]:
    """(arguments of `load` by name: the drafter and how it is used, the keys that only tune vLLM). hub: of the target.

    Raises TypeError or ValueError for what cannot be served, a model that is not of the method's kind among it."""
    if config is None:
        return {}, []
    if not isinstance(config, Mapping):
        raise TypeError(f"speculative_config is {config!r}, expected a dict with 'model' or 'method', and 'num_speculative_tokens'")
    method, model = config.get("method"), config.get("model")
    if method is not None and not (isinstance(method, str) and method in (*METHODS, *NGRAM_METHODS)):
        raise ValueError(f"speculative_config['method'] is {method!r}; available: {', '.join(map(repr, [*METHODS, 'ngram']))}")
    if model is not None:
        path("speculative_config['model']", model, "a hub id, a folder or a bundled name")
    for key, value in config.items():
        if key in SPECULATION_REFUSED:
            _refuse(f"speculative_config[{key!r}]", value, *SPECULATION_REFUSED[key])
        elif key not in (*SPECULATION_READ, *SPECULATION_TUNING):
            raise unknown("speculative_config", key, (*SPECULATION_READ, *SPECULATION_TUNING))
    tuning = [f"speculative_config[{key!r}]" for key in config if key in SPECULATION_TUNING]
    chosen = {"num_draft_tokens": config.get("num_speculative_tokens")}
    if ADAPTIVE in config:
        chosen["adaptive_verification"] = config[ADAPTIVE]
    quantization, lookup = config.get("quantization"), method in NGRAM_METHODS or model in NGRAM_METHODS
    if quantization is not None and (model is None or lookup):
        raise ValueError(f"speculative_config['quantization'] is {quantization!r}, but the drafter is no checkpoint of its own")
    if lookup:
        most, least = (_lookup(config, name) for name in ("prompt_lookup_max", "prompt_lookup_min"))
        longest, shortest = most or least or 5, least or most or 5  # vLLM's defaults
        if shortest > longest:
            raise ValueError(f"speculative_config['prompt_lookup_min'] is {shortest}, expected at most prompt_lookup_max, {longest}")
        return {**chosen, "drafter": NGram(longest, shortest)}, tuning
    if model is None and method is not None and "mtp-modules" in METHODS[method]:  # those in the target's own checkpoint
        return {**chosen, "drafter": SAME}, tuning
    if model is None:
        raise ValueError(f"speculative_config has no 'model', found {dict(config)}; expected a drafter's checkpoint, or method 'ngram'")
    revision = config.get("revision")
    drafter = model if revision is None else f"{os.fspath(model)}@{revision}"
    if method is not None:
        kind = kind_of(checkpoint.read_config(checkpoint.resolve(drafter, hub.of_others, weights=False)))
        if kind is not None and kind.name not in METHODS[method]:
            raise ValueError(f"speculative_config['method'] is {method!r}, but {os.fspath(model)!r} is a drafter of the kind {kind.name}")
    if quantize := quantize_of(drafter, quantization, hub.of_others):
        chosen["quantize_drafter"] = quantize
    return {**chosen, "drafter": drafter}, tuning


def _lookup(config: Mapping[str, Any], name: str) -> int | None:
    return None if config.get(name) is None else integer(f"speculative_config[{name!r}]", config[name], 1)


@contextlib.contextmanager
def in_their_names() -> Iterator[None]:
    """Gives what jaxspec raises about arguments vLLM's names of them."""
    try:
        yield
    except (TypeError, ValueError) as error:
        ours = {here: theirs for theirs, here in RENAMED.items()}
        told = str(error).replace(f"drafter is {SAME!r}", "speculative_config has no 'model'")
        told = told.replace("images=True", "limit_mm_per_prompt={'image': 1}")
        told = told.replace("videos=True", "limit_mm_per_prompt={'video': 1}")
        told = told.replace("audio=True", "limit_mm_per_prompt={'audio': 1}")
        told = re.sub(r"\bimages=(\d+)", r"mm_processor_kwargs={'max_soft_tokens': \1}", told)
        told = re.sub(rf"\b({'|'.join(ours)})\b", lambda found: ours[found[0]], told)
        if told == str(error):
            raise
        raise same_kind(error, told) from error


def _refuse(name: str, value: Any, allowed: tuple[Any, ...], reason: str) -> None:
    if not among(value, allowed):
        raise ValueError(f"{name} is {value!r}, which cannot be served: {reason}")
