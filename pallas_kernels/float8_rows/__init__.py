"""Rows rounded to 8 bits a number, as products take them whose inputs are quantised (`Packed.inputs`).

A row x becomes scale * code: codes are float8_e4m3fn, and the scale is the least power of two for which none of them exceeds 448, the
largest e4m3. So scale * code is a bfloat16 exactly (if not below 2**-117), and a product may take it as one, or multiply codes and scale
the sums.
"""

from __future__ import annotations

import math

import jax

from pallas_kernels import device, dialect
from pallas_kernels.float8_rows import reference, triton
from pallas_kernels.float8_rows.reference import Rounded, codes_in_order, padded


def rounded(x: jax.Array, *, launch_dependents: bool = False, implementation: str = "auto") -> jax.Array:
    """scale * code for each row of x. x: [..., I] bfloat16 or float32 -> [..., I] in x's dtype.

    launch_dependents: whether only kernels read the result: see `dialect.launching`. implementation: see `dialect.select`; the kernel takes
    multiples of 16 numbers. Raises ValueError for an unknown one, and for a kernel that cannot serve."""
    width, multiple = x.shape[-1], triton.SIXTEEN
    obstacle = f"rows have {width} numbers; the kernel takes multiples of {multiple}" if width % multiple else None
    chosen = dialect.select(implementation, obstacle)
    if chosen == "xla":
        return reference.rounded(x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    found = triton.rounded(rows, launch_dependents=launch_dependents, interpret=chosen == "triton-interpret")
    return found.reshape(x.shape)


def codes(x: jax.Array, *, launch_dependents: bool = False, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """Codes and scales of the rows of x. x: [N, I], I a multiple of 16 -> [P, I] float8_e4m3fn and [P] float32, with P = padded(N) rows of
    which those after the Nth are copies of the last one.

    Codes of 16 inputs lie in the order 4 c + 2 b + e of the input 8 e + 2 c + b: the order in which the kernel for Hopper has the codes of
    a packed matrix (see `packed`). `codes_in_order` brings them back. Settings and errors: as for `rounded`; the kernel needs compute
    capability 8.9."""
    found = device.capability()
    lacks = found is not None and found < device.FLOAT8_CAPABILITY
    obstacle = f"the device has compute capability {found}; the kernel needs {device.FLOAT8_CAPABILITY}" if lacks else None
    chosen = dialect.select(implementation, obstacle)
    if chosen == "xla":
        return reference.codes(x)
    return triton.codes(x, launch_dependents=launch_dependents, interpret=chosen == "triton-interpret")


__all__ = ["Rounded", "codes", "codes_in_order", "padded", "rounded"]
