"""Checks the top candidates' kernels against their reference on a GPU and times both: `python -m pallas_kernels.top_candidates.bench`.

It also times `jax.lax.top_k` over the whole row, for one shape of each k.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import begin, show, time_us
from pallas_kernels.top_candidates import reference, triton
from pallas_kernels.top_candidates.shapes import SHAPES


def main() -> None:
    bandwidth = begin()
    for name, shape in SHAPES.items():
        logits = 5 * jax.random.normal(jax.random.key(0), (shape.rows, shape.vocab), jnp.float32)
        kernel, plain, sort = (partial(f, k=shape.k) for f in (triton.top_candidates, reference.top_candidates, jax.lax.top_k))
        expected = jax.device_get(jax.jit(sort)(logits))
        for found in (jax.jit(kernel)(logits), jax.jit(plain)(logits)):
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_array_equal(found[1], expected[1])
        show(name, time_us(kernel, logits), logits.nbytes, bandwidth, time_us(plain, logits))
        if shape.rows == 5:
            show("  jax.lax.top_k", time_us(sort, logits), logits.nbytes, bandwidth)


if __name__ == "__main__":
    main()
