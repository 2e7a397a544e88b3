"""The order that XLA is told to keep changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.order import zero_after


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38, np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zero_is_zero_after_any_number(value, dtype):
    found = jax.jit(zero_after)(jnp.full((2, 3), value, dtype))
    assert found.dtype == jnp.int32 and found.shape == () and int(found) == 0


def test_the_compiler_does_not_know_it():
    text = jax.jit(lambda x, y: y + zero_after(x)).lower(jnp.ones(3), jnp.arange(2, dtype=jnp.int32)).compile().as_text()
    assert "bitcast-convert" in text
