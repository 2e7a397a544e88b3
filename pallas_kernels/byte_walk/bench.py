"""Checks the walk's kernel against its reference on a GPU and times both: `python -m pallas_kernels.byte_walk.bench`.

The bytes of a line are those of the tokens and the states that they pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import CALLS, begin, show, time_us
from pallas_kernels.byte_walk import reference, triton
from pallas_kernels.byte_walk.shapes import SHAPES


def main() -> None:
    bandwidth = begin()
    for name, shape in SHAPES.items():
        rng = np.random.default_rng(0)
        length = np.minimum(rng.geometric(0.2, shape.vocab), shape.longest).astype(np.int32)
        tables = jax.device_put(
            (
                rng.integers(0, shape.states, (shape.states, 257)).astype(np.uint16),
                rng.integers(0, 256, (shape.vocab, shape.longest)).astype(np.uint8),
                length,
            )
        )
        turns = []
        for _ in range(CALLS):
            states, tokens = (rng.integers(0, n, shape.rows).astype(np.int32) for n in (shape.states, shape.vocab))
            turns.append((*tables, jnp.asarray(states), jnp.asarray(tokens)))
        for turn in turns:
            np.testing.assert_array_equal(jax.jit(triton.byte_walk)(*turn), reference.byte_walk(*turn))
        size = int(3 * length[np.asarray(turns[0][4])].sum() + 12 * shape.rows)
        taken, beside = (time_us(f, *turns[0], variants=turns[1:]) for f in (triton.byte_walk, reference.byte_walk))
        show(name, taken, size, bandwidth, beside)


if __name__ == "__main__":
    main()
