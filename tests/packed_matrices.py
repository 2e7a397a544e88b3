"""Random packed matrices."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear.shapes import PACKINGS
from pallas_kernels.packed import KINDS, pack

in_one_program = jax.jit(pack, static_argnames=("kind", "over", "group", "affine"))
# Kind, inputs that share a scale, whether there are zeros, and the scales' dtype if it is not bfloat16.
FORMS = {
    **PACKINGS,
    "int4 an output": ("int4", None, False, None),
    "int4 of 8": ("int4", 8, False, None),
    "int4 zeros of 16": ("int4", 16, True, None),
    "int4 float32": ("int4", 32, False, "float32"),
    "int4 zeros of 16 float32": ("int4", 16, True, "float32"),
    "int8 zeros": ("int8", 64, True, None),
    "int8 zeros of 8": ("int8", 8, True, None),
    "int8 of 16": ("int8", 16, False, None),
    "int8 float16": ("int8", None, False, "float16"),
    "int8 zeros float16": ("int8", 128, True, "float16"),
    "int8 zeros float32": ("int8", 32, True, "float32"),
    "int8 float32": ("int8", None, False, "float32"),
    "fp8 blocks": ("fp8", 128, False, None),
    "fp8 of 32": ("fp8", 32, False, None),
    "fp8 blocks float16": ("fp8", 128, False, "float16"),
    "fp4 of 8 float16": ("fp4", 8, False, "float16"),
}


def packed(form, shape, seed=0):
    """Random codes, all of a kind, with scales that make the weights about as large as those of a model."""
    kind, group, zeros, dtype = FORMS[form]
    dtype = dtype or jnp.bfloat16
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2 ** KINDS[kind].bits, shape).astype(np.uint8)
    if kind == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    largest = {"int4": 8, "int8": 128, "fp8": 448, "fp4": 6}[kind]
    numbers = (*shape[:-1], -(-shape[-1] // group) if group else 1)
    scale = jnp.asarray(rng.uniform(0.5, 2, numbers) / largest, dtype)
    zero = jnp.asarray(rng.integers(-9 if kind == "int8" else 0, 15, numbers), dtype) if zeros else None
    return in_one_program(codes, scale, zero, kind=kind, group=group)
