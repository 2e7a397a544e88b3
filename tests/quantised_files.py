"""Writers of quantised checkpoints, from the formulas of each format: what tests of loading load, and the weights that it means.

A writer takes the key and the weights of a matrix, float32 [..., out, in], and gives the tensors that a file holds for it, by key, and
the weights that these mean, in the dtype that the format computes in. Group scales, 4-bit codes and packing are written here once more,
by loops and comparisons where jaxspec shifts and transposes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec import targets
from pallas_kernels.packed import Packed, unpack

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
IGNORED = ["lm_head", "re:.*embed.*", "re:.*router.*"]
MATRIX = re.compile(r"(_proj|per_layer_input_gate|per_layer_(model_)?projection)(\.weight)?$|router\.proj\.weight$")
Writer = Callable[[str, np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]


def put_in_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned numbers along the last axis in int32 words, the first in the least significant bits."""
    each = 32 // bits
    padded = np.pad(numbers.astype(np.uint32), [*[(0, 0)] * (numbers.ndim - 1), (0, -numbers.shape[-1] % each)])
    fields = padded.reshape(*padded.shape[:-1], -1, each)
    return sum(fields[..., i] << np.uint32(i * bits) for i in range(each)).astype(np.uint32).view(np.int32)


def grouped(w: np.ndarray, group: int | None) -> np.ndarray:
    """[..., out, groups, inputs of a group]"""
    return w.reshape(*w.shape[:-1], -1, group or w.shape[-1])


def integers(w: np.ndarray, bits: int, group: int | None, zeros: bool, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """(weights that the codes mean, signed codes, scales [..., out, groups], zeros like scales or None)"""
    parts, half = grouped(w, group), 2 ** (bits - 1)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    scale = ((high - low) / (2 * half - 1) if zeros else np.abs(parts).max(-1) / (half - 0.5)).astype(dtype)
    wide = scale.astype(np.float32)[..., None]
    zero = np.clip(np.rint(-half - low / wide[..., 0]), -half, half - 1).astype(np.int8) if zeros else None
    shift = 0 if zero is None else zero[..., None].astype(np.float32)
    codes = np.clip(np.rint(parts / wide + shift), -half, half - 1)
    means = ((codes - shift).astype(dtype).astype(np.float32) * wide).astype(dtype)
    return means.reshape(w.shape), codes.reshape(w.shape).astype(np.int8), scale, zero


def pack_quantized(bits: int, group: int | None = 32, *, zeros: bool = False, dtype: Any = BF16, shape: bool = True) -> Writer:
    def write(key: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        means, codes, scale, zero = integers(w, bits, group, zeros, np.dtype(dtype))
        half = 2 ** (bits - 1)
        tensors = {f"{key}_packed": put_in_words(codes.astype(np.int32) + half, bits), f"{key}_scale": scale}
        if shape:
            tensors[f"{key}_shape"] = np.asarray(w.shape, np.int64)
        if zero is not None:
            along_outputs = put_in_words(np.swapaxes(zero, -1, -2).astype(np.int32) + half, bits)
            tensors[f"{key}_zero_point"] = np.ascontiguousarray(np.swapaxes(along_outputs, -1, -2))
        return tensors, means

    return write


def plain_integers(key: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """int8 by channel, unpacked."""
    means, codes, scale, _ = integers(w, 8, None, False, BF16)
    return {key: codes, f"{key}_scale": scale}, means


def float8(strategy: str, block: tuple[int, int] = (128, 128), dtype: Any = BF16) -> Writer:
    def write(key: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rows, columns = {"tensor": w.shape[-2:], "channel": (1, w.shape[-1]), "block": block}[strategy]
        scale = np.asarray(
            [
                [np.abs(w[..., i : i + rows, j : j + columns]).max((-1, -2)) / 448 for j in range(0, w.shape[-1], columns)]
                for i in range(0, w.shape[-2], rows)
            ]
        )
        scale = np.moveaxis(scale, (0, 1), (-2, -1)).astype(dtype)
        wide = np.repeat(np.repeat(scale, rows, -2), columns, -1)[..., : w.shape[-2], : w.shape[-1]].astype(np.float32)
        codes = np.clip(w / wide, -448, 448).astype(FP8)
        stored = scale.reshape(-1) if strategy == "tensor" else scale
        return {key: codes, f"{key}_scale": stored}, (codes.astype(np.float32) * wide).astype(dtype)

    return write


def float4(modelopt: bool) -> Writer:
    """NVFP4 in one of its dialects. The weights are float32 here: a reader of bfloat16 rounds them once more."""

    def write(key: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        parts = grouped(w, 16)
        whole = np.float32(448 * 6) / np.abs(w).max().astype(np.float32)
        scale = np.clip(np.abs(parts).max(-1) / 6 * whole, 0, 448).astype(FP8)
        second = np.float32(1) / whole
        wide = scale.astype(np.float32) * second if modelopt else scale.astype(np.float32) / whole
        ratio = parts / np.maximum(wide, 1e-30)[..., None]
        index = np.abs(np.abs(ratio)[..., None] - E2M1).argmin(-1)
        codes = (index + 8 * (ratio < 0)).astype(np.uint8).reshape(w.shape)
        means = (np.where(ratio < 0, -1, 1).astype(np.float32) * E2M1[index] * wide[..., None]).reshape(w.shape)
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        if modelopt:
            inputs = {f"{key.removesuffix('weight')}input_scale": np.asarray(0.01, np.float32)}
            return {key: pairs, f"{key}_scale": scale, f"{key}_scale_2": np.asarray(second)} | inputs, means
        inputs = {f"{key.removesuffix('weight')}input_global_scale": np.asarray([100.0], np.float32)}
        return {f"{key}_packed": pairs, f"{key}_scale": scale, f"{key}_global_scale": whole.reshape(1)} | inputs, means

    return write


def gptq(bits: int, group: int | None = 32, *, sym: bool = True, version: int = 1) -> Writer:
    def write(key: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        means, codes, scale, zero = integers(w, bits, group, not sym, np.dtype(np.float16))
        stem, half = key.removesuffix(".weight"), 2 ** (bits - 1)
        zero = np.full(scale.shape, half) if zero is None else zero.astype(np.int32) + half
        return {
            f"{stem}.qweight": put_in_words(codes.astype(np.int32) + half, bits).T,
            f"{stem}.qzeros": put_in_words(zero.T - (version == 1), bits),
            f"{stem}.scales": scale.T,
            f"{stem}.g_idx": (np.arange(w.shape[1]) // (group or w.shape[1])).astype(np.int32),
        }, means

    return write


def awq(group: int | None = 32) -> Writer:
    def write(key: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        means, codes, scale, zero = integers(w, 4, group, True, np.dtype(np.float16))
        stem = key.removesuffix(".weight")

        def in_order(numbers: np.ndarray) -> np.ndarray:
            """Field p of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[p] of its eight."""
            eights = numbers.astype(np.int32).reshape(*numbers.shape[:-1], -1, 8) + 8
            return put_in_words(eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape), 4)

        return {f"{stem}.qweight": in_order(codes.T), f"{stem}.qzeros": in_order(zero.T), f"{stem}.scales": scale.T}, means

    return write


def experts(key: str, w: np.ndarray, names: str) -> dict[str, np.ndarray]:
    """The matrices of a float tensor of experts, by key. names: "fused", or "index" or "matrix" for what comes first in a name."""
    if names == "fused":
        return {key: w}
    stem, _, name = key.rpartition(".")
    parts = {"down_proj": w} if name == "down_proj" else dict(zip(("gate_proj", "up_proj"), np.split(w, 2, axis=1), strict=True))
    order = {"index": "{e}.{part}", "matrix": "{part}.{e}"}[names]
    return {f"{stem}.{order.format(e=e, part=part)}.weight": one[e] for part, one in parts.items() for e in range(len(w))}


def put_together(key: str, shape: tuple[int, ...], parts: dict[str, np.ndarray], names: str) -> np.ndarray:
    """The inverse of `experts`."""
    values = list(parts.values())
    if names == "fused":
        return values[0]
    half = np.stack(values[: shape[0]])
    return half if key.endswith("down_proj") else np.concatenate([half, np.stack(values[shape[0] :])], axis=1)


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    write: Writer,
    *,
    names: str = "fused",
    leave: Callable[[str], bool] = lambda key: "router" in key,
    more: dict[str, np.ndarray] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a quantised checkpoint and returns the tensors that it means, under the keys of `tensors`.

    config: its config.json. tensors: of the float checkpoint. names: of experts, see `experts`. leave: whether the matrix of a key stays
    float. more: further tensors of the file. change: takes all tensors of the file, to change them.
    """
    stored, means = dict(more or {}), {}
    for key, value in tensors.items():
        if not MATRIX.search(key) or leave(key):
            stored[key] = means[key] = value
            continue
        matrices = experts(key, value, names) if "experts." in key else {key: value}
        meant = {}
        for name, matrix in matrices.items():
            made, meant[name] = write(name, matrix)
            stored |= made
        means[key] = put_together(key, value.shape, meant, names) if "experts." in key else meant[key]
    if change is not None:
        change(stored)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: np.ascontiguousarray(value) for key, value in stored.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return means


def compressed(named: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors for all matrices but the router's. weights: what differs from the defaults."""
    settings = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": settings, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": named,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORED,
        "kv_cache_scheme": None,
    }


def load(folder: Path, dtype: Any = jnp.float32, **asked: Any) -> Any:
    """The target in a folder, with weights of this dtype. asked: `quantize` and the like."""
    config, _ = targets.read_target(folder)
    quantisation = targets.quantisation_of(folder, config, dtype, **asked)
    return targets.load_target(folder, targets.abstract_target(config, dtype, quantisation), quantisation, progress=False)


@jax.jit
def unpacked(tree: Any) -> Any:
    """A tree with every Packed as the array that it means, in float32."""
    return jax.tree.map(lambda x: unpack(x, jnp.float32) if isinstance(x, Packed) else x, tree, is_leaf=lambda x: isinstance(x, Packed))
