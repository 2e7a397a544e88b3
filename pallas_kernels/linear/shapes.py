"""The matrices of the Gemma 4 family, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.packed import Packed, abstract

LAYERS = 35  # whose inputs to "gated_by" lie in one array
ROWS = (1, 4, 5, 32, 40, 64)  # a decode step or verify block of one sequence and of eight


@dataclasses.dataclass(frozen=True)
class Packing:
    """A form of packed weights."""

    kind: str
    group: int | None = None  # inputs that share a scale; None for one scale an output
    zeros: bool = False
    scale_dtype: str | None = None  # None for x's
    affine: bool = False

    def abstract(self, shape: tuple[int, ...], dtype: Any) -> Packed:
        """The shapes of weights [*out, in] for products with rows of `dtype`."""
        settings = {"group": self.group, "zeros": self.zeros, "affine": self.affine}
        return abstract(shape, self.kind, scale_dtype=self.scale_dtype or dtype, **settings)


# As checkpoints have them.
PACKINGS = {
    "int4": Packing("int4", 32),
    "int4 float16": Packing("int4", 32, scale_dtype="float16"),  # llama.cpp's Q4_0
    "int4 zeros": Packing("int4", 128, zeros=True),
    "int4 zeros float16": Packing("int4", 128, zeros=True, scale_dtype="float16"),  # GPTQ, AWQ
    "int4 affine float16": Packing("int4", 32, zeros=True, scale_dtype="float16", affine=True),  # llama.cpp's Q4_K, Q4_1
    "int8": Packing("int8"),
    "int8 of 16 float16": Packing("int8", 16, scale_dtype="float16"),  # llama.cpp's Q6_K
    "int8 affine float16": Packing("int8", 32, zeros=True, scale_dtype="float16", affine=True),  # llama.cpp's Q5_K, Q5_1
    "fp8": Packing("fp8"),
    "fp8 float32": Packing("fp8", scale_dtype="float32"),  # ModelOpt
    "fp4": Packing("fp4", 16),
    "fp4 float32": Packing("fp4", 16, scale_dtype="float32"),  # NVFP4
}
ROUNDED = "fp8, rows too"  # as "fp8", and rows of x are rounded to fp8 before a product


def packed(shape: tuple[int, ...], packing: str, dtype: Any) -> Packed:
    """The shapes of packed weights [*out, in]. packing: a key of PACKINGS, or ROUNDED. dtype: x's."""
    found = PACKINGS["fp8" if packing == ROUNDED else packing].abstract(shape, dtype)
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
