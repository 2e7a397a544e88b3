"""LLM with vLLM's arguments, calls and results."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec import checkpoint
from jaxspec.checkpoint.hub import Hub
from jaxspec.checks import among, expanded, path, same_kind, type_name, unknown
from jaxspec.engine.completion import Completion
from jaxspec.engine.conversations import are_several
from jaxspec.engine.intake import prompts_of
from jaxspec.loading import load
from jaxspec.structured import StructuredOutputsParams
from jaxspec.text import in_one_text
from jaxspec.vllm import arguments
from jaxspec.vllm.adapters import Adapter, Adapters
from jaxspec.vllm.inputs import PromptType
from jaxspec.vllm.limits import check_conversations, check_prompts, limits_of
from jaxspec.vllm.lora.request import LoRARequest
from jaxspec.vllm.outputs import RequestOutput, request_output
from jaxspec.vllm.sampling_params import GENERATION, SamplingParams, default_params
from jaxspec.vllm.v1.metrics.reader import Counter, Vector, counters

Params = SamplingParams | Sequence[SamplingParams] | None
Bar = bool | Callable[..., Any]

_POOLING = "a target generates text"
_PROCESS = "the engine has no processes or hooks of its own"
# Methods of vLLM's LLM that are not here, and why.
MISSING = {
    **dict.fromkeys(("embed", "encode", "classify", "reward", "score"), _POOLING),
    **dict.fromkeys(("apply_model", "collective_rpc", "llm_engine", "start_profile", "stop_profile"), _PROCESS),
    "beam_search": "beam search is not available",
    **dict.fromkeys(("enqueue", "wait_for_completion"), "generate returns all results; `llm.jaxspec.as_completed` each when it is there"),
}
# Arguments of generate and chat that are refused unless they are None or empty, and why.
CALLS_REFUSED = {
    "prompt_adapter_request": "adapters are not available",
    "guided_options_request": "SamplingParams(structured_outputs=...) takes their place",
    "prompt_token_ids": "they belong into prompts, as {'prompt_token_ids': [...]}",
    "tokenization_kwargs": "a prompt is read whole; cut its ids before",
    "mm_processor_kwargs": "images of all prompts are prepared alike; it belongs into LLM(...)",
}
CALLS_TUNING = ("priority",)
CONTENT_FORMATS = ("auto", "string", "openai")


class LLM:
    """A model that is loaded as vLLM's LLM would be, by `jaxspec.load`. `jaxspec` is the LLM that this returned: it streams, and has all
    statistics.

    model: a hub id, a folder, a GGUF file, or "pocket". tokenizer, dtype, seed, max_num_seqs (slots), gpu_memory_utilization
    (memory_fraction, of what JAX takes): as `load` has them. max_model_len: by default, None or -1, the model's maximum, but at most 4096.
    tensor_parallel_size, data_parallel_size: the mesh of devices. kv_cache_dtype: "auto", "bfloat16", "float32", "fp8" or "fp8_e4m3".
    quantization: the checkpoint's own format; or "fp8" or "int8_per_channel_weight_only" of float weights, where activations stay float:
    those who want them in fp8 too take `jaxspec.load` with `quantize_activations`. revision, download_dir, hf_token: `revision`,
    `cache_dir` and `token` of `load`.

    speculative_config: a dict with "model", a drafter's checkpoint, or "method" "ngram" (with "prompt_lookup_max", "prompt_lookup_min"),
    and "num_speculative_tokens". "method" may say what the checkpoint is: "mtp", "eagle3", "dflash", "dspark" or "draft_model".

    generation_config: "auto", by which the checkpoint's generation_config.json has a say where no sampling params are given, or "vllm", by
    which it has none; override_generation_config: a dict that goes before it. structured_outputs_config: a dict of which
    "disable_any_whitespace" and "disable_additional_properties" hold for all requests. chat_template: a template, or a file of one, in
    place of the checkpoint's. limit_mm_per_prompt: how many images, sounds and videos a prompt may have, as {"image": 2, "audio": 1} says;
    none of a kind that it does not name. mm_processor_kwargs may have "max_soft_tokens", of an image at most, and "num_frames", of a video;
    media_io_kwargs may be {"video": {"num_frames": 32}}. enable_lora: calls may have a lora_request. Where it is another than the last one,
    its adapter is merged into the model's weights, which are read again. enable_prefix_caching: prompts that begin alike are computed once
    whatever it says. enable_sleep_mode: `sleep` works whatever it says.

    others: more arguments of vLLM. Those that only tune it are accepted, and a warning names them. Raises ValueError, with the reason,
    for one that cannot be served; TypeError, with the nearest name, for one that vLLM has not; and what `load` raises.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: Any = "auto",
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        seed: int | None = 0,
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        download_dir: str | os.PathLike[str] | None = None,
        hf_token: str | bool | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        enable_prefix_caching: bool | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        structured_outputs_config: Mapping[str, Any] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        limit_mm_per_prompt: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        enable_lora: bool | None = False,
        enable_sleep_mode: bool | None = False,
        **others: Any,
    ):
        tuning = arguments.sorted_out(others, inspect.signature(LLM).parameters)
        path("model", model, "a hub id, a folder or a bundled name")
        tokenizer = arguments.tokenizer_of(tokenizer, model, tokenizer_revision, revision)
        if not among(generation_config, ("auto", "vllm")):
            raise ValueError(f"generation_config is {generation_config!r}; available: 'auto', 'vllm'")
        hub = Hub(revision, hf_token, download_dir)
        self._template = _template(chat_template)
        overrides = _overrides(override_generation_config)
        drafting, ignored = arguments.speculation_of(speculative_config, hub)
        self._structure, unread = arguments.structure_of(structured_outputs_config)
        mesh, kv_dtype = arguments.mesh_of(tensor_parallel_size, data_parallel_size), arguments.kv_dtype_of(kv_cache_dtype)
        quantize = arguments.quantize_of(model, quantization, hub)
        media = arguments.media_of(limit_mm_per_prompt, mm_processor_kwargs, media_io_kwargs)
        self._limits = limits_of(limit_mm_per_prompt)
        unheard = ["enable_prefix_caching"] if enable_prefix_caching is False else []
        unheard += [f"override_generation_config[{name!r}]" for name in overrides if name not in GENERATION]
        arguments.tell_without_effect([*tuning, *ignored, *unread, *unheard])
        with arguments.in_their_names():
            self.jaxspec = load(
                model,
                dtype=arguments.dtype_of(dtype),
                quantize=quantize,
                mesh=mesh,
                max_slots=max_num_seqs,
                max_len=None if max_model_len == -1 else max_model_len,
                kv_dtype=kv_dtype,
                memory_fraction=gpu_memory_utilization,
                seed=0 if seed is None else seed,
                tokenizer=tokenizer,
                revision=revision,
                token=hf_token,
                cache_dir=download_dir,
                **media,
                **drafting,
            )
        generation = checkpoint.read_generation_config(checkpoint.resolve(model, hub)) if generation_config == "auto" else {}
        self._defaults = default_params({**generation, **overrides})
        self._adapters = Adapters(self.jaxspec, os.fspath(model), bool(enable_lora))
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        reason = f", which cannot be served: {MISSING[name]}" if name in MISSING else ""
        raise AttributeError(f"jaxspec.vllm.LLM has no {name!r}{reason}")

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Completes prompts and returns a result for each, in order.

        prompts: a text, a list of token ids, or a dict with "prompt" or "prompt_token_ids", and with "multi_modal_data" for images and
        sounds; or several of these.
        sampling_params: one for all, or one for each; None takes `get_default_sampling_params()`. use_tqdm: whether to show a progress
        bar, or what makes one. lora_request: an adapter for all prompts, or one or None for each; prompts of one adapter are served after
        those of another. Raises what `jaxspec.LLM.generate` and `jaxspec.LLM.update_weights` raise, and ValueError for other arguments that
        cannot be served.
        """
        _check_call("generate", others)
        if prompts is None:
            raise TypeError("generate has no prompts; expected a text, token ids, or several of these")
        listed = prompts_of(prompts)
        check_prompts(listed, self._limits)
        params, wanted = self._params(sampling_params, len(listed)), self._adapters.of_call("generate", lora_request, len(listed))

        def serve(some: Sequence[int] | None) -> list[Completion]:
            return self.jaxspec.generate(_picked(listed, some), self._served(_picked(params, some)), use_tqdm=use_tqdm)

        with arguments.in_their_names():
            return self._results(self._adapters.served(wanted, serve), params, wanted)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: Bar = True,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation or a list of them. Returns one result for each, in order. See `jaxspec.LLM.chat` for the arguments.

        chat_template_content_format: how the template gets content: "string", parts joined by line breaks; "openai", texts as parts; or
        "auto", as it is. With tools, or where thoughts are asked for, texts have special tokens if those mark thoughts and calls.
        """
        _check_call("chat", others)
        if chat_template_content_format not in CONTENT_FORMATS:
            available = ", ".join(map(repr, CONTENT_FORMATS))
            raise ValueError(f"chat_template_content_format is {chat_template_content_format!r}; available: {available}")
        several = are_several(messages)
        conversations = [_in_format(each, chat_template_content_format) for each in (messages if several else [messages])]
        check_conversations(conversations, self._limits)
        wanted = self._adapters.of_call("chat", lora_request, len(conversations))
        params = self._params(sampling_params, len(conversations))
        thinks = isinstance(chat_template_kwargs, Mapping) and chat_template_kwargs.get("enable_thinking")
        if (tools or thinks) and self._marks_with_special_tokens():
            params = _with_special_tokens(params)

        def serve(some: Sequence[int] | None) -> list[Completion]:
            return self.jaxspec.chat(
                _picked(conversations, some) if isinstance(messages, list | tuple) else messages,
                self._served(_picked(params, some)),
                use_tqdm=use_tqdm,
                chat_template=_template(chat_template) or self._template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )

        with arguments.in_their_names():
            return self._results(self._adapters.served(wanted, serve), params, wanted)

    def sleep(self, level: int = 1) -> None:
        """Gives the devices' memory back, see `jaxspec.LLM.sleep`: that of the cache, and that of the weights, which level 1 moves to the
        host and level 2 drops."""
        if not among(level, (1, 2)):
            raise ValueError(f"level is {level!r}; available: 1, 2")
        self.jaxspec.sleep(weights="host" if level == 1 else "drop")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Puts weights that `sleep` moved to the host back. tags: of "weights" and "kv_cache", None for both; the cache is there again with
        the next call whatever they say."""
        if unknown_tags := [tag for tag in tags or () if not among(tag, ("weights", "kv_cache"))]:
            raise ValueError(f"tags have {unknown_tags[0]!r}; available: 'weights', 'kv_cache'")
        if tags is None or "weights" in tags:
            self.jaxspec.wake_up()

    def reset_prefix_cache(self) -> bool:
        """Forgets what was computed of prompts. Returns True."""
        self.jaxspec.reset_prefix_cache()
        return True

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it."""
        return self.jaxspec.tokenizer.transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without params use: the checkpoint's generation_config.json, and vLLM's defaults where it says nothing."""
        return self._defaults.clone()

    def get_metrics(self) -> list[Counter | Vector]:
        """Totals since the model was loaded, under vLLM's names."""
        return counters(self.jaxspec.stats, self.jaxspec.settings.most_accepted)

    def _params(self, given: Any, count: int) -> SamplingParams | list[SamplingParams]:
        """One for all prompts, or a list of one for each of `count`. Raises TypeError for what is neither, ValueError for fewer or more."""
        chosen = self._defaults if given is None else given
        several = isinstance(chosen, list | tuple)
        for params in chosen if several else [chosen]:
            if not isinstance(params, SamplingParams):
                raise TypeError(f"sampling_params is of type {type_name(params)}, expected jaxspec.vllm.SamplingParams")
        if several and len(chosen) != count:
            raise ValueError(
                f"sampling_params is a list of length {len(chosen)}; expected {count}, one for each prompt, or one alone for all"
            )
        return list(chosen) if several else chosen

    def _served(self, params: SamplingParams | list[SamplingParams]) -> Any:
        """The same for jaxspec. Raises ValueError or TypeError."""
        if isinstance(params, list):
            return [self._served(each) for each in params]
        if not params.skip_special_tokens:
            self._check_stops(params)
        served = params.served()
        if self._structure and served.structured_outputs is not None:
            structure = dataclasses.replace(StructuredOutputsParams.of(served.structured_outputs), **self._structure)
            served = served.replace(structured_outputs=structure)
        return served

    def _check_stops(self, params: SamplingParams) -> None:
        tokenizer = self.jaxspec.tokenizer
        for stop in [params.stop] if isinstance(params.stop, str) else params.stop or ():
            if special := [token for token in tokenizer.encode_word(stop) if not tokenizer.has_text(token)]:
                raise ValueError(f"stop has {stop!r}, which holds a special token; expected its id in stop_token_ids: {special[0]}")

    def _marks_with_special_tokens(self) -> bool:
        tokenizer = self.jaxspec.tokenizer
        opening = tokenizer.thought_ids[0]
        return opening >= 0 and not tokenizer.has_text(opening)

    def _results(
        self, completions: Sequence[Completion], params: SamplingParams | list[SamplingParams], adapters: Sequence[Adapter]
    ) -> list[RequestOutput]:
        results = []
        for prompt, group in itertools.groupby(completions, lambda completion: completion.prompt_index):
            samples, chosen = list(group), params[prompt] if isinstance(params, list) else params
            texts = [self._text(sample, chosen) for sample in samples]
            results.append(request_output(str(next(self._numbers)), samples, texts, adapters[prompt]))
        return results

    def _text(self, sample: Completion, params: SamplingParams) -> str:
        """What a result shows as a sample's text."""
        if not params.detokenize:
            return ""
        if params.skip_special_tokens:
            return sample.text
        ids, stop, keep = sample.token_ids, sample.stop_reason, params.include_stop_str_in_output
        tokenizer = self.jaxspec.tokenizer
        text = tokenizer.decode(ids, special=True)
        if isinstance(stop, str):
            cut = tokenizer.decode(ids)[len(sample.text) :]  # by the stop string, which the last token completes
            return text.removesuffix(cut)
        return tokenizer.decode(ids[:-1], special=True) if sample.finish_reason == "stop" and not keep else text


def _picked(given: Any, numbers: Sequence[int] | None) -> Any:
    """Those of a list that have these numbers, None for all. What is no list is for all."""
    return given if numbers is None or not isinstance(given, list) else [given[i] for i in numbers]


def _check_call(call: str, others: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that cannot be served, TypeError for one that vLLM has not."""
    for name, value in others.items():
        if name in CALLS_REFUSED and value and not (isinstance(value, list | tuple) and all(each is None for each in value)):
            raise ValueError(f"{name} of {call} cannot be served: {CALLS_REFUSED[name]}")
        if name not in CALLS_REFUSED and name not in CALLS_TUNING:
            raise unknown(call, name, (*inspect.signature(getattr(LLM, call)).parameters, *CALLS_REFUSED, *CALLS_TUNING))
    arguments.tell_without_effect([name for name in CALLS_TUNING if others.get(name) not in (None, "auto")], stacklevel=3)


def _in_format(messages: Any, content_format: str) -> Any:
    """A conversation with its content in a format of CONTENT_FORMATS. What is no message stays, to be refused by its name."""
    if content_format == "auto" or not isinstance(messages, list | tuple):
        return messages
    change = in_one_text if content_format == "string" else _in_parts
    return [change(message) if isinstance(message, Mapping) else message for message in messages]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_special_tokens(params: SamplingParams | list[SamplingParams]) -> Any:
    if isinstance(params, list):
        return [_with_special_tokens(each) for each in params]
    return dataclasses.replace(params, skip_special_tokens=False)


def _overrides(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`override_generation_config`, checked. Raises TypeError or ValueError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"override_generation_config is {given!r}, expected a dict of what generation_config.json may hold")
    try:
        default_params(given)
    except (TypeError, ValueError) as error:
        raise same_kind(error, f"override_generation_config: {error}") from error
    return given


def _template(template: str | os.PathLike[str] | None) -> str | None:
    """A chat template, read from its file if it names one. Raises TypeError for neither, OSError for a file that cannot be read."""
    if template is None or (isinstance(template, str) and any(sign in template for sign in "{}\n")):
        return template
    file = expanded(path("chat_template", template, "a template or a file of one"))
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise type(error)(
            f"chat_template is {os.fspath(template)!r}, no template and no file that can be read: {error.strerror}"
        ) from error
