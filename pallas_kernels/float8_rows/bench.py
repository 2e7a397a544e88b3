"""Checks the kernels that round rows against their reference on a GPU and times them: `python -m pallas_kernels.float8_rows.bench`.

The bytes of a line are the rows in bfloat16 and what is written of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import float8_rows
from pallas_kernels.bench import CALLS, begin, show, time_us
from pallas_kernels.float8_rows.shapes import SHAPES


def main() -> None:
    bandwidth = begin()
    for name, (rows, width) in SHAPES.items():
        x, *turns = (jax.random.normal(jax.random.key(i), (rows, width), jnp.bfloat16) for i in range(CALLS))
        turns = [(turn,) for turn in turns]
        wanted = float8_rows.reference.rounded(x)
        codes, scales = jax.jit(float8_rows.codes)(x)
        numbers = (float8_rows.codes_in_order(codes).astype(jnp.float32) * scales[:, None])[:rows]
        for found in (jax.jit(float8_rows.rounded)(x), numbers.astype(jnp.bfloat16)):
            np.testing.assert_array_equal(found, wanted)
        beside = time_us(float8_rows.reference.rounded, x, variants=turns)
        show(f"{name}, numbers", time_us(float8_rows.rounded, x, variants=turns), 4 * x.size, bandwidth, beside)
        show(f"{name}, codes", time_us(float8_rows.codes, x, variants=turns), 3 * x.size, bandwidth)


if __name__ == "__main__":
    main()
