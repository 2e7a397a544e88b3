"""A Gemma 4 config from the metadata of a GGUF file.

Source: llama.cpp's `conversion/gemma.py` (`Gemma4Model`), which writes it, and `src/models/gemma4.cpp`, which reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.gguf.file import Contents

ARCHITECTURE = "gemma4"
SLIDING, FULL = "sliding_attention", "full_attention"
ENDS = ("<eos>", "<turn|>", "<|tool_response>")  # the tokens that end an answer, as the releases' generation_config.json has them
ROTATED = 1e20  # factors of frequencies from here on mean pairs that do not rotate
# generation_config.json's names of what some files say of sampling.
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}


def config_of(file: Path, contents: Contents) -> dict[str, Any]:
    """The config.json of a file's model. Raises ValueError that names what is missing or cannot be."""
    read = _Metadata(file, contents.metadata)
    count = read.integer("block_count")
    heads, shared = read.integer("attention.head_count"), read.integer("attention.shared_kv_layers", 0)
    sliding = read.by_layer("attention.sliding_window_pattern", count)
    if not all(isinstance(each, bool) for each in sliding):
        raise ValueError(f"{file} has {read.key('attention.sliding_window_pattern')} {sliding}; expected a flag for each of {count} layers")
    kinds = [SLIDING if each else FULL for each in sliding]
    kv_heads, widths = read.by_layer("attention.head_count_kv", count), read.by_layer("feed_forward_length", count)
    owned = count - shared
    table, own = contents.tensors.get("token_embd.weight"), contents.tensors
    if table is None or len(table.shape) != 2:
        raise ValueError(f"{file} has no token embedding (token_embd.weight [vocabulary, width])")
    without_values = [i for i in range(min(owned, count)) if kinds[i] == FULL and f"blk.{i}.attn_v.weight" not in own]
    ple, experts = read.integer("embedding_length_per_layer_input", 0), read.integer("expert_count", 0)
    config = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": table.shape[0],
        "hidden_size": read.integer("embedding_length"),
        "intermediate_size": widths[0],
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": _one(read, "attention.head_count_kv", kv_heads, kinds, SLIDING),
        "head_dim": read.integer("attention.key_length_swa"),
        "global_head_dim": read.integer("attention.key_length"),
        "layer_types": kinds,
        "sliding_window": read.integer("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len(set(widths)) > 1,
        "attention_k_eq_v": bool(without_values),
        "num_global_key_value_heads": _one(read, "attention.head_count_kv", kv_heads, kinds, FULL),
        "hidden_size_per_layer_input": ple,
        "vocab_size_per_layer_input": table.shape[0] if ple else 0,
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.integer("context_length"),
        "final_logit_softcapping": read.number("final_logit_softcapping", None),
        "tie_word_embeddings": "output.weight" not in own,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa")},
            FULL: {"rope_type": "proportional", "rope_theta": read.number("rope.freq_base"), "partial_rotary_factor": _rotating(own)},
        },
        "enable_moe_block": experts > 0,
    }
    if experts:
        config |= {
            "num_experts": experts,
            "top_k_experts": read.integer("expert_used_count"),
            "moe_intermediate_size": read.integer("expert_feed_forward_length"),
        }
    wide = [widths[0] * (2 if config["use_double_wide_mlp"] and i >= owned else 1) for i in range(count)]
    if widths != wide:
        raise ValueError(f"{file} has feed_forward_length {widths}; expected one width, twice as wide in layers that share K and V")
    return config | read.tokens() | {"eos_token_id": ends_of(contents)}


def generation_of(contents: Contents) -> dict[str, Any]:
    """The generation_config.json of a file's model: the tokens that end an answer, and how it samples where the file says so."""
    found = contents.metadata
    settings = {name: found[f"general.sampling.{key}"] for key, name in SAMPLING.items() if f"general.sampling.{key}" in found}
    settings = {name: _short(value) if isinstance(value, float) else value for name, value in settings.items()}
    suppressed = found.get("tokenizer.ggml.suppress_tokens")
    made = {"eos_token_id": ends_of(contents), "do_sample": settings.get("temperature", 0) > 0, **settings}
    return made | ({"suppress_tokens": suppressed} if suppressed else {})


def ends_of(contents: Contents) -> list[int]:
    """The tokens that end an answer: those that the metadata names, and those of ENDS that the vocabulary has."""
    found = contents.metadata
    named = [found.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    vocabulary = found.get("tokenizer.ggml.tokens")
    if isinstance(vocabulary, list):
        named += [vocabulary.index(token) for token in ENDS if token in vocabulary]
    return sorted({token for token in named if isinstance(token, int)})


def _rotating(tensors: Mapping[str, Any]) -> float:
    """How much of a head of full attention rotates. llama.cpp divides the frequencies of the rest by a huge number."""
    if "rope_freqs.weight" not in tensors:
        return 1.0
    factors = tensors["rope_freqs.weight"].read()
    return float((factors < ROTATED).sum() / factors.size)


def _one(read: _Metadata, name: str, values: list[Any], kinds: list[str], kind: str) -> Any:
    """The value of all layers of a kind."""
    found = {value for value, each in zip(values, kinds, strict=True) if each == kind} or set(values)
    if len(found) != 1:
        raise ValueError(f"{read.file} has {read.key(name)} {values}; expected one value for all layers of {kind}")
    return found.pop()


class _Metadata:
    def __init__(self, file: Path, values: Mapping[str, Any]):
        self.file, self.values = file, values

    def key(self, name: str) -> str:
        return f"{ARCHITECTURE}.{name}"

    def integer(self, name: str, otherwise: int | None = None) -> int:
        value = self.values.get(self.key(name), otherwise)
        if type(value) is not int or value < 0:
            raise ValueError(f"{self.file} has {self.key(name)} {value!r}; expected a whole number")
        return value

    def number(self, name: str, otherwise: float | None = 0.0) -> float | None:
        value = self.values.get(self.key(name), otherwise)
        if value == 0.0 or not (value is None or isinstance(value, int | float)):
            raise ValueError(f"{self.file} has {self.key(name)} {self.values.get(self.key(name))!r}; expected a number")
        return value if value is None else _short(value)

    def by_layer(self, name: str, count: int) -> list[Any]:
        """The values of all layers, which a file may have as one."""
        value = self.values.get(self.key(name))
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or not all(isinstance(each, bool | int) and each >= 0 for each in values):
            raise ValueError(f"{self.file} has {self.key(name)} {value!r}; expected a whole number for each of {count} layers")
        return values

    def tokens(self) -> dict[str, int]:
        """The config's ids of special tokens, as far as the metadata has them."""
        names = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
        found = {name: self.values.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
        return {name: value for name, value in found.items() if isinstance(value, int)}


def _short(value: float) -> float:
    """A float32 number of the metadata as whoever wrote it had it: 1e-06, and not 9.999999974752427e-07."""
    return float(str(np.float32(value)))
