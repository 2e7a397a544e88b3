"""Float weights that are quantised while they are read, as `load(quantize=...)` and `jaxspec convert --quantize` ask."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.jobs import compiled_once
from jaxspec.checkpoint.onto_devices import COPIED_BYTES
from jaxspec.checkpoint.quantisation import EMBEDDING, UNPACKED, Matrix, Quantisation, Scheme, Wanted
from jaxspec.checkpoint.safetensors import FLOATS, Stored
from pallas_kernels.packed import KINDS, rounded

# Symmetric, as compressed-tensors quantises: 8 bits with one scale for each output, 4 bits with one for 32 inputs.
GROUPS = {"int8": None, "int4": 32, "fp8": None}
EMBEDDINGS = ("int8",)  # of these, what embeddings may have
# A token's row of the per-layer embeddings has the numbers of all layers; so many share a scale.
PER_LAYER_GROUP = 64
# What a scale is of: the largest magnitude of its weights over this.
STEPS = {"int8": 127.5, "int4": 7.5, "fp8": 448.0}
# Modules that stay float: routers, gates of attention heads, and what would be unpacked when it is read. What is no matrix, and embedding
# tables, stay so anyway.
FLOAT = rf"router|\bg_proj|\.gate$|{UNPACKED.pattern}"
# A target's head stays float too. A drafter's heads have 8 bits whatever its layers have: the wrong ones of thousands of tokens are near.
HEAD = re.compile(r"(^|\.)(lm_head|shared_head\.output|markov_w2)$")
ON_DEVICES = 1 << 26  # weights on devices that are quantised at a time
_QUANTISING = threading.Lock()  # so that the default device holds the float32 of one chunk


@dataclasses.dataclass(frozen=True)
class FromFloats:
    """A float matrix of a file, quantised as it is read. It is a `quantisation.Format`."""

    scheme: Scheme

    def tensors(self, key: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
        """The float matrix itself."""
        return {key: Wanted(shape, tuple(FLOATS))}

    def read(self, key: str, shape: tuple[int, ...], tensors: Mapping[str, Stored]) -> Matrix:
        """The matrix, read and quantised in rows, on the default device: neither it nor the host holds the float matrix whole."""
        width, count = shape[-1], math.prod(shape[:-1])
        stored, group = tensors[key], self.scheme.group
        rows = min(count, max(1, COPIED_BYTES * count // stored.nbytes))
        codes = np.empty((count, width), np.uint8)
        scales = np.empty((count, 1 if group is None else -(-width // group)), jnp.dtype(self.scheme.scale_dtype))
        # One size, so that one program quantises them all. The last rows may overlap those before.
        for start in (min(start, count - rows) for start in range(0, count, rows)):
            floats = stored.rows((count, width), start, start + rows).read()
            codes[start : start + rows], scales[start : start + rows] = quantise(floats, self.scheme)
        return Matrix(codes.reshape(shape), scales.reshape(*shape[:-1], -1))

    def of_array(self, floats: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The codes and scales of a matrix [..., out, in] on devices, as `read` gives them of one in a file. They stay on the devices."""
        rows = floats.reshape(-1, floats.shape[-1])
        at_once = max(1, ON_DEVICES // rows.shape[1])
        parts = [_quantised(rows[start : start + at_once], self.scheme) for start in range(0, len(rows), at_once)]
        codes, scales = (jnp.concatenate(part) for part in zip(*parts, strict=True))
        return codes.reshape(floats.shape), scales.reshape(*floats.shape[:-1], -1)


def quantisation(name: str, scale_dtype: str) -> Quantisation:
    """How float weights are quantised under a name of GROUPS: every matrix of the layers, but no router, embedding and head.

    Raises ValueError for another name."""
    if name not in GROUPS:
        raise ValueError(f"quantize is {name!r}; available: {', '.join(map(repr, GROUPS))}, or None for the weights as they are")
    format, stays = FromFloats(Scheme(name, GROUPS[name], scale_dtype=scale_dtype)), re.compile(f"{FLOAT}|lm_head")
    return Quantisation(name, lambda module: None if stays.search(module) else format)


def quantisation_of_drafter(name: str, scale_dtype: str, unquantised: Sequence[str]) -> Quantisation:
    """How a drafter's float weights are quantised under a name of GROUPS: every matrix but those of modules whose names hold a pattern of
    `unquantised`. Heads have 8 bits, with a scale for each token; so has a token embedding, which then is the head.

    Raises ValueError for another name."""
    if name not in GROUPS:
        raise ValueError(f"quantize_drafter is {name!r}; available: {', '.join(map(repr, GROUPS))}, or None for the weights as they are")
    matrix, head = (FromFloats(Scheme(kind, GROUPS[kind], scale_dtype=scale_dtype)) for kind in (name, "int8"))
    stays = re.compile("|".join([FLOAT, *unquantised]))
    embedding = None if stays.search(EMBEDDING) else head
    return Quantisation(name, lambda module: None if stays.search(module) else head if HEAD.search(module) else matrix, embedding=embedding)


def scale_dtype(checkpoint_dtype: str, dtype: Any) -> str:
    """The dtype of the scales of float weights that are quantised: the checkpoint's, so that the weights are the same numbers on devices
    that compute in others; but bfloat16 if they are to be bfloat16."""
    return "bfloat16" if "bfloat16" in (checkpoint_dtype, jnp.dtype(dtype).name) else "float32"


def with_embedding(found: Quantisation | None, name: str, scale_dtype: str) -> Quantisation:
    """The same with float embeddings quantised under a name of EMBEDDINGS: the token embedding, with a scale for each token, and per-layer
    embeddings. found: how matrices of layers are quantised, or None.

    Raises ValueError for another name."""
    if name not in EMBEDDINGS:
        raise ValueError(
            f"quantize_embedding is {name!r}; available: {', '.join(map(repr, EMBEDDINGS))}, or None for the embedding as it is"
        )
    table, per_layer = (FromFloats(Scheme(name, group, scale_dtype=scale_dtype)) for group in (GROUPS[name], PER_LAYER_GROUP))
    if found is None:
        return Quantisation(f"{name} embedding", lambda module: None, embedding=table, per_layer=per_layer)
    per_layer = found.per_layer or per_layer  # which some files hold quantised
    return dataclasses.replace(found, name=f"{found.name}, {name} embedding", embedding=table, per_layer=per_layer)


def quantise(weights: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of float weights, by compressed-tensors' formula for symmetric schemes, computed on the default device.

    weights: [out, in]. Returns [out, in] uint8, and [out, ceil(in / group)], or [out, 1] without groups, in the scheme's scale_dtype.
    Codes are of the weights over the rounded scale, in float32, rounded to the nearest and half to even.
    """
    form = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
    program = compiled_once(("quantise", form, scheme), _quantised, form, scheme=scheme)
    with _QUANTISING:
        codes, scale = map(np.asarray, program(weights))
    return codes, scale


@functools.partial(jax.jit, static_argnames="scheme")
def _quantised(weights: jax.Array, scheme: Scheme) -> tuple[jax.Array, jax.Array]:
    out, width = weights.shape
    group = width if scheme.group is None else scheme.group
    groups = jnp.pad(weights.astype(jnp.float32), ((0, 0), (0, -width % group))).reshape(out, -1, group)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    steps = STEPS[scheme.kind]
    # Rounded by an operation of its own: of a cast there and back XLA may keep the number that it began with.
    scale = rounded(_divided(largest, jnp.float32(steps)), scheme.scale_dtype).astype(jnp.dtype(scheme.scale_dtype))
    # A scale of 0 would have no codes; of weights that are all 0, or nearly, any other will do.
    scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    numbers = _divided(groups, scale.astype(jnp.float32)[..., None]).reshape(out, -1)[:, :width]
    if scheme.kind == "fp8":
        codes = jax.lax.bitcast_convert_type(jnp.clip(numbers, -steps, steps).astype(jnp.float8_e4m3fn), jnp.uint8)
        return codes, scale
    kind = KINDS[scheme.kind]
    half = 1 << (kind.bits - 1)
    whole = jnp.clip(jnp.round(numbers), -half, half - 1).astype(jnp.int32) + kind.offset
    return (whole & (2**kind.bits - 1)).astype(jnp.uint8), scale


def _divided(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / by. By a number that is repeated XLA would not divide: it would multiply with its rounded inverse."""
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(by, x.shape))


def config_of(name: str) -> dict[str, Any]:
    """The quantization_config of a checkpoint whose weights have been quantised so, in compressed-tensors' terms."""
    group = GROUPS[name]
    weights = {
        "num_bits": KINDS[name].bits,
        "type": "float" if name == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if name == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}},
        "ignore": [
            "lm_head",
            *(f"re:.*{part}" for part in ("embed.*", "vision.*", "audio.*", "router.*", "g_proj", "[.]gate$", UNPACKED.pattern)),
        ],
    }
