"""The audio towers on an NVIDIA GPU, in the released shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_layers import calm_weights

from jaxspec import released

pytestmark = pytest.mark.gpu


def bounded(path, leaf):
    """Bounds of products that leave most numbers as they are."""
    name = jax.tree_util.keystr(path)
    return jnp.full_like(leaf, -4 if name.endswith("_min") else 4) if name.endswith(("_min", "_max")) else leaf


@pytest.mark.parametrize("name", ["e2b", "12b"])
def test_rows_are_near_those_in_higher_precision(name):
    """Of a sound that fills a half of a program, in both dtypes."""
    wide = released.sounds_of(name, jnp.float32)
    wide = wide.with_tower(jax.tree_util.tree_map_with_path(bounded, calm_weights(wide.tower)))
    half = wide.with_tower(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide.tower))
    sound = np.random.default_rng(0).normal(size=16_000 * 5).astype(np.float32) / 10
    prepared, count = wide.prepared(sound), wide.count(sound)
    with jax.default_matmul_precision("highest"):
        (expected,) = wide.computed([prepared])
    for found, limit in ((half, 5e-2), (wide, 5e-3)):
        (rows,) = found.computed([prepared])
        difference = rows[:count].astype(jnp.float32) - expected[:count]
        assert jnp.linalg.norm(difference) <= limit * jnp.linalg.norm(expected[:count])
