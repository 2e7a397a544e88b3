"""The matrices of the Gemma 4 family, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.packed import Packed, abstract

LAYERS = 35  # whose inputs to "gated_by" lie in one array
ROWS = (1, 4, 5, 32, 40, 64)  # a decode step or verify block of one sequence and of eight
# Forms of packed weights as checkpoints have them: the kind, the inputs that share a scale (None: one scale an output), zeros or none, and
# the scales' dtype (None: x's).
PACKINGS = {
    "int4": ("int4", 32, False, None),
    "int4 zeros": ("int4", 128, True, None),
    "int4 zeros float16": ("int4", 128, True, "float16"),  # GPTQ, AWQ
    "int8": ("int8", None, False, None),
    "fp8": ("fp8", None, False, None),
    "fp8 float32": ("fp8", None, False, "float32"),  # ModelOpt
    "fp4": ("fp4", 16, False, None),
    "fp4 float32": ("fp4", 16, False, "float32"),  # NVFP4
}
ROUNDED = "fp8, rows too"  # as "fp8", and rows of x are rounded to fp8 before a product


def packed(shape: tuple[int, ...], packing: str, dtype: Any) -> Packed:
    """The shapes of packed weights [*out, in]. packing: a key of PACKINGS, or ROUNDED. dtype: x's."""
    kind, group, zeros, scale_dtype = PACKINGS["fp8" if packing == ROUNDED else packing]
    found = abstract(shape, kind, group=group, zeros=zeros, scale_dtype=scale_dtype or dtype)
    return dataclasses.replace(found, inputs="fp8") if packing == ROUNDED else found


@dataclasses.dataclass(frozen=True)
class Shape:
    """One matrix."""

    kind: str  # "linear", "partials" (a norm reads the product), "gated" or "gated_by"
    columns: int  # of the output
    width: int  # of the input

    def arguments(self, rows: int, dtype: Any, packing: str | None = None) -> tuple[Any, ...]:
        """The shapes of the arguments of the function `kind`. packing: of the weights, as for `packed`; None for weights of `dtype`."""
        weights: Any = jax.ShapeDtypeStruct((2,) * (self.kind == "gated") + (self.columns, self.width), dtype)
        if packing is not None:
            weights = packed(weights.shape, packing, dtype)
        shapes = jax.ShapeDtypeStruct((rows, self.width), dtype), weights
        if self.kind != "gated_by":
            return shapes
        return *shapes, jax.ShapeDtypeStruct((rows, LAYERS, self.columns), dtype), jax.ShapeDtypeStruct((), jnp.int32)


SHAPES = {
    "E2B qkv": Shape("linear", 2560, 1536),
    "E2B qkv full": Shape("linear", 5120, 1536),
    "E2B q": Shape("linear", 2048, 1536),
    "E2B o": Shape("partials", 1536, 2048),
    "E2B o full": Shape("partials", 1536, 4096),
    "E2B gate_up": Shape("gated", 6144, 1536),
    "E2B gate_up wide": Shape("gated", 12288, 1536),
    "E2B down": Shape("partials", 1536, 6144),
    "E2B down wide": Shape("partials", 1536, 12288),
    "E2B per-layer gate": Shape("gated_by", 256, 1536),
    "E2B per-layer projection": Shape("partials", 1536, 256),
    "E4B gate_up": Shape("gated", 10240, 2560),
    "E4B down": Shape("partials", 2560, 10240),
    "26B qkv": Shape("linear", 8192, 2816),
    "26B o": Shape("partials", 2816, 4096),
    "26B o full": Shape("partials", 2816, 8192),
    "26B gate_up": Shape("gated", 2112, 2816),
    "26B down": Shape("partials", 2816, 2112),
    "31B qkv": Shape("linear", 16384, 5376),
    "31B qkv full": Shape("linear", 18432, 5376),
    "31B o": Shape("partials", 5376, 8192),
    "31B o full": Shape("partials", 5376, 16384),
    "31B gate_up": Shape("gated", 21504, 5376),
    "31B down": Shape("partials", 5376, 21504),
    "assistant pre": Shape("linear", 1024, 10752),
    "assistant q": Shape("linear", 8192, 1024),
    "assistant o": Shape("partials", 1024, 8192),
    "assistant gate_up": Shape("gated", 8192, 1024),
    "assistant down": Shape("partials", 1024, 8192),
    "assistant post": Shape("linear", 5376, 1024),
}
