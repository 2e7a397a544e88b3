"""Random packed matrices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear.shapes import PACKINGS, Packing
from pallas_kernels.packed import KINDS, pack

in_one_program = jax.jit(pack, static_argnames=("kind", "over", "group", "affine"))
FORMS = {
    **PACKINGS,
    "int4 an output": Packing("int4"),
    "int4 of 8": Packing("int4", 8),
    "int4 zeros of 16": Packing("int4", 16, zeros=True),
    "int4 float32": Packing("int4", 32, scale_dtype="float32"),
    "int4 zeros of 16 float32": Packing("int4", 16, zeros=True, scale_dtype="float32"),
    "int4 affine of 16": Packing("int4", 16, zeros=True, affine=True),
    "int4 affine an output float16": Packing("int4", zeros=True, scale_dtype="float16", affine=True),
    "int4 affine float32": Packing("int4", 64, zeros=True, scale_dtype="float32", affine=True),
    "int8 zeros": Packing("int8", 64, zeros=True),
    "int8 zeros of 8": Packing("int8", 8, zeros=True),
    "int8 of 16": Packing("int8", 16),
    "int8 float16": Packing("int8", scale_dtype="float16"),
    "int8 zeros float16": Packing("int8", 128, zeros=True, scale_dtype="float16"),
    "int8 zeros float32": Packing("int8", 32, zeros=True, scale_dtype="float32"),
    "int8 affine of 8": Packing("int8", 8, zeros=True, affine=True),
    "int8 affine blocks": Packing("int8", 128, zeros=True, affine=True),
    "int8 affine float32": Packing("int8", 16, zeros=True, scale_dtype="float32", affine=True),
    "int8 float32": Packing("int8", scale_dtype="float32"),
    "fp8 blocks": Packing("fp8", 128),
    "fp8 of 32": Packing("fp8", 32),
    "fp8 blocks float16": Packing("fp8", 128, scale_dtype="float16"),
    "fp4 of 8 float16": Packing("fp4", 8, scale_dtype="float16"),
}


SMALL_FORMS = (
    *("int4 zeros float16", "int4 affine float16", "int8 float16", "int8 affine float16"),
    *("fp8 blocks float16", "fp4 of 8 float16", "fp8 float32"),
)


def small(form, shape):
    """As `packed`, with scales and weights that are subnormal in float16."""
    w = packed(form, shape)
    scale, zero = ((x if x is None else x * x.dtype.type(2**-13)) for x in (w.scale, w.zero))
    assert w.scale.dtype != jnp.float16 or float(jnp.min(jnp.abs(scale)[scale != 0])) < 2**-14
    return dataclasses.replace(w, scale=scale, zero=zero if w.affine else w.zero)


def packed(form, shape, seed=0):
    """Random codes, all of a kind, with scales that make the weights about as large as those of a model."""
    packing = FORMS[form]
    kind, group, dtype = packing.kind, packing.group, packing.scale_dtype or jnp.bfloat16
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2 ** KINDS[kind].bits, shape).astype(np.uint8)
    if kind == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    largest = {"int4": 8, "int8": 128, "fp8": 448, "fp4": 6}[kind]
    numbers = (*shape[:-1], -(-shape[-1] // group) if group else 1)
    scale = jnp.asarray(rng.uniform(0.5, 2, numbers) / largest, dtype)
    zero = rng.uniform(-1, 1, numbers) if packing.affine else rng.integers(-9 if kind == "int8" else 0, 15, numbers)
    zero = jnp.asarray(zero, dtype) if packing.zeros else None
    return in_one_program(codes, scale, zero, kind=kind, group=group, affine=packing.affine)
