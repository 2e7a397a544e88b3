"""Writers of GGUF files, by llama.cpp's library of that name: what its `convert_hf_to_gguf.py` writes of a Gemma 4 target, and quantised
tensors.

The library quantises to the types of plain blocks. Of the others a tensor is random blocks, and means what the library says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

PLAIN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
RANDOM = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
HALVES = {"Q2_K": slice(80, 84), "Q3_K": slice(108, 110), "Q6_K": slice(208, 210), "Q4_K": slice(0, 4), "Q5_K": slice(0, 4)}
VISIBLE = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'}


def blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random blocks of a type whose numbers are all small: uint8 [..., bytes of a row]."""
    rng = np.random.default_rng(seed)
    count, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (int(np.prod(shape)) // count, nbytes), dtype=np.uint8)
    halves = HALVES.get(kind, slice(0, 2))
    steps = (
        0.1 * rng.uniform(0.2, 1, (len(data), (halves.stop - halves.start) // 2)) / {"IQ4_NL": 127, "Q3_K": 64, "Q6_K": 2048}.get(kind, 512)
    )
    data[:, halves] = steps.astype("<f2").view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def coded(kind: str, value: np.ndarray, seed: int = 0) -> np.ndarray:
    """A tensor in a type: what a file holds."""
    if kind in RANDOM:
        return blocks(kind, value.shape, seed)
    return quantize(np.ascontiguousarray(value, np.float32), gguf.GGMLQuantizationType[kind])


def meant(kind: str, data: np.ndarray) -> np.ndarray:
    """The numbers of such a tensor, float32."""
    return dequantize(data, gguf.GGMLQuantizationType[kind])


def metadata(writer: gguf.GGUFWriter, text: Mapping[str, Any]) -> None:
    """What the converter writes of a text config of a release."""
    layers, shared = text["num_hidden_layers"], text.get("num_kv_shared_layers", 0)
    sliding = [kind == "sliding_attention" for kind in text["layer_types"]]
    rope = text["rope_parameters"]
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(text["sliding_window"])
    if text.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(text["final_logit_softcapping"])
    if text.get("enable_moe_block"):
        writer.add_expert_count(text["num_experts"])
        writer.add_expert_used_count(text["top_k_experts"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(text.get("hidden_size_per_layer_input") or 0)
    writer.add_sliding_window_pattern(sliding)
    writer.add_key_length(text["global_head_dim"])
    writer.add_value_length(text["global_head_dim"])
    writer.add_key_length_swa(text["head_dim"])
    writer.add_value_length_swa(text["head_dim"])
    if text.get("use_double_wide_mlp"):
        wide = [text["intermediate_size"] * (1 if i < layers - shared else 2) for i in range(layers)]
        replace(writer, writer.add_feed_forward_length, wide)
    if text.get("num_global_key_value_heads") is not None:
        heads = [text["num_key_value_heads"] if each else text["num_global_key_value_heads"] for each in sliding]
        replace(writer, writer.add_head_count_kv, heads)
    writer.add_rope_dimension_count(text["global_head_dim"])
    writer.add_rope_dimension_count_swa(text["head_dim"])


def replace(writer: gguf.GGUFWriter, add: Callable[[Any], None], value: Any) -> None:
    """The library warns of a key that is written again, as the converter does."""
    before = [{**part} for part in writer.kv_data]
    for part in writer.kv_data:
        part.clear()
    add(value)
    new = {key: held for part in writer.kv_data for key, held in part.items()}
    for part, old in zip(writer.kv_data, before, strict=True):
        part.clear()
        part |= old | new


def tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """What the converter writes of a tokenizer: tokens that are special, marks that it shows, and the rest."""
    held = json.loads((folder / "tokenizer.json").read_text())
    names = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in held["added_tokens"]}
    vocabulary = held["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    kinds = gguf.TokenType
    special = {text for text, token in added.items() if token["special"]}
    writer.add_token_types(
        [
            kinds.USER_DEFINED if t in VISIBLE else kinds.CONTROL if t in special else kinds.BYTE if t.startswith("<0x") else kinds.NORMAL
            for t in tokens
        ]
    )
    merges = held["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id), ("pad", writer.add_pad_token_id)):
        add(vocabulary[names[f"{name}_token"]])
    writer.add_unk_token_id(vocabulary[names["unk_token"]])
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    if (folder / "chat_template.jinja").exists():
        writer.add_chat_template((folder / "chat_template.jinja").read_text())


def names_of(layers: int) -> Callable[[str], str]:
    """From Hugging Face's key of a tensor to its name in a file, by the library's table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)

    def name(key: str) -> str:
        if key.endswith("router.scale"):
            return name(key.replace("router.scale", "router.proj.weight")).replace("weight", "scale")
        if key.endswith("router.per_expert_scale"):
            return name(key.replace("router.per_expert_scale", "experts.down_proj")).replace("weight", "scale")
        found = table.get_name(key.removesuffix(".weight"))
        assert found is not None, key
        return f"{found}.weight"

    return name


def write(
    file: Path,
    text: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    type_of: Callable[[str], str],
    *,
    tokenizer_of: Path,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    **settings: Any,
) -> dict[str, tuple[str, np.ndarray]]:
    """Writes a target's file. text: its text config, with the fields of a release. tensors: by Hugging Face's keys, float. type_of: a
    tensor's type; vectors and routers are float32, as the converter has them. Returns by key the type of each tensor and its data."""
    writer = gguf.GGUFWriter(file, "gemma4", **settings)
    metadata(writer, text)
    tokenizer(writer, tokenizer_of)
    if change is not None:
        change(writer)
    rope, half = text["rope_parameters"]["full_attention"], text["global_head_dim"] // 2
    rotating = int(half * rope["partial_rotary_factor"])
    writer.add_tensor("rope_freqs.weight", np.asarray([1.0] * rotating + [1e30] * (half - rotating), np.float32))
    held, name = {}, names_of(text["num_hidden_layers"])
    for number, (key, value) in enumerate(tensors.items()):
        kind = "F32" if value.ndim < 2 or "router" in key else type_of(key)
        data = coded(kind, value.astype(np.float32), number)
        writer.add_tensor(name(key), data, raw_dtype=gguf.GGMLQuantizationType[kind])
        held[key] = kind, data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
