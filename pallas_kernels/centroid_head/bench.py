"""Checks the centroid head's kernels against their reference on a GPU and times both: `python -m pallas_kernels.centroid_head.bench`.

The bytes of a line are those of the centroids and of the selected rows of ordering and table. Each call has other hidden states, and so
other selected rows.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import CALLS, begin, show, time_us
from pallas_kernels.centroid_head import reference, triton
from pallas_kernels.centroid_head.shapes import SHAPES


def main() -> None:
    bandwidth = begin()
    for name, shape in SHAPES.items():

        def normal(seed: int, rows: int, deviation: float = 1.0, width: int = shape.hidden) -> jax.Array:
            return jax.random.normal(jax.random.key(seed), (rows, width), jnp.bfloat16) * jnp.bfloat16(deviation)

        centroids, table = normal(0, shape.centroids), normal(1, shape.vocab, 5 * shape.hidden**-0.5)
        ordering = jax.random.permutation(jax.random.key(2), jnp.arange(shape.vocab, dtype=jnp.int32))
        keys = jax.random.bits(jax.random.key(3), (shape.rows, 2), jnp.uint32)
        temperature = jnp.ones(shape.rows, jnp.float32)
        turns = [(normal(4 + i, shape.rows), centroids, ordering, table) for i in range(CALLS)]
        count = shape.rows * shape.top_k * shape.vocab // shape.centroids
        size = centroids.nbytes + count * (4 + shape.hidden * 2)
        static = {"top_k": shape.top_k, "suppressed": ()}

        kernel, plain = (partial(f, **static) for f in (triton.candidates, reference.candidates))
        (logits, ids), (expected, wanted) = jax.device_get((jax.jit(kernel)(*turns[0]), jax.jit(plain)(*turns[0])))
        np.testing.assert_array_equal(ids, wanted)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
        taken, beside = (time_us(f, *turns[0], variants=turns[1:]) for f in (kernel, plain))
        show(f"{name}: candidates", taken, size, bandwidth, beside)

        kernel, plain = (partial(f, **static) for f in (triton.choose, reference.choose))
        turns = [(*turn, keys, temperature) for turn in turns]
        different = np.sum(np.asarray(jax.jit(kernel)(*turns[0])) != np.asarray(jax.jit(plain)(*turns[0])))
        if different:
            print(f"  {different} of {shape.rows} rows chose another token than the reference: ties, or an error")
        taken, beside = (time_us(f, *turns[0], variants=turns[1:]) for f in (kernel, plain))
        show(f"{name}: choice", taken, size, bandwidth, beside)


if __name__ == "__main__":
    main()
