"""Random packed matrices."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear.shapes import PACKINGS
from pallas_kernels.packed import KINDS, pack

# Kind, inputs that share a scale, and whether there are zeros.
FORMS = {
    **PACKINGS,
    "int4 an output": ("int4", None, False),
    "int4 of 8": ("int4", 8, False),
    "int4 zeros of 16": ("int4", 16, True),
    "int8 zeros of 8": ("int8", 8, True),
    "int8 of 16": ("int8", 16, False),
    "fp8 blocks": ("fp8", 128, False),
    "fp8 of 32": ("fp8", 32, False),
}


def packed(form, shape, seed=0):
    """Random codes, all of a kind, with scales that make the weights about as large as those of a model."""
    kind, group, zeros = FORMS[form]
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2 ** KINDS[kind].bits, shape).astype(np.uint8)
    if kind == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    largest = {"int4": 8, "int8": 128, "fp8": 448, "fp4": 6}[kind]
    numbers = (*shape[:-1], -(-shape[-1] // group) if group else 1)
    scale = jnp.asarray(rng.uniform(0.5, 2, numbers) / largest, jnp.bfloat16)
    zero = jnp.asarray(rng.integers(-9 if kind == "int8" else 0, 15, numbers), jnp.bfloat16) if zeros else None
    return pack(jnp.asarray(codes), scale, zero, kind=kind, group=group)
