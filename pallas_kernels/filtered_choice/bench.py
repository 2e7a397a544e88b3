"""Checks the filtered choice's kernels against their reference on a GPU and times both: `python -m pallas_kernels.filtered_choice.bench`.

The settings are Gemma 4's own: temperature 1, top_k 64 and top_p 0.95. The bytes of a line are the logits, each read once.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import begin, show, time_us
from pallas_kernels.filtered_choice import reference, triton
from pallas_kernels.filtered_choice.shapes import SHAPES


def main() -> None:
    bandwidth = begin()
    for name, shape in SHAPES.items():
        logits = 5 * jax.random.normal(jax.random.key(0), (shape.rows, shape.vocab), jnp.float32)
        keys = jax.random.bits(jax.random.key(1), (shape.rows, 2), jnp.uint32)
        numbers = [jnp.full(shape.sequences, number) for number in (np.float32(1), np.int32(64), np.float32(0.95), np.float32(0))]
        kernel, plain = (partial(f, count=shape.count) for f in (triton.filtered_choice, reference.filtered_choice))
        arguments = logits, keys, *numbers
        different = np.sum(np.asarray(jax.jit(kernel)(*arguments)) != np.asarray(jax.jit(plain)(*arguments)))
        if different:
            print(f"  {different} of {shape.rows} rows chose another token than the reference: a threshold within a rounding, or an error")
        show(name, time_us(kernel, *arguments), logits.nbytes, bandwidth, time_us(plain, *arguments))


if __name__ == "__main__":
    main()
