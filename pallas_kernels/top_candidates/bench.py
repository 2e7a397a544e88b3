"""Checks the top candidates' kernels against their reference on a GPU and times both: `python -m pallas_kernels.top_candidates.bench`.

It also times `jax.lax.top_k` over the whole row, for one shape of each k, and the choice among the most candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import begin, show, time_us
from pallas_kernels.top_candidates import reference, triton
from pallas_kernels.top_candidates.shapes import SHAPES, filters


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
        if shape.k == triton.MOST:
            calls = [partial(_choice, f, shape.k, filters(shape.rows)) for f in (triton.choose, reference.choose)]
            (found, largest), (expected, wanted) = (jax.device_get(jax.jit(f)(logits)) for f in calls)
            np.testing.assert_allclose(largest, wanted, rtol=1e-6)
            if different := np.sum(found != expected):
                print(f"  {different} of {shape.rows} rows chose another token than the reference: ties, or an error")
            show("  the choice among them", time_us(calls[0], logits), logits.nbytes, bandwidth, time_us(calls[1], logits))


def _choice(function: Callable[..., Any], k: int, settings: tuple[jax.Array, ...], logits: jax.Array) -> Any:
    positions, seed, temperature, *kept = settings
    return function(logits[:, None], None, positions, seed, temperature, tuple(kept), k, 30.0)


if __name__ == "__main__":
    main()
