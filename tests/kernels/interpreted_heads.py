"""Interprets the kernel that makes heads of rows beside its reference, for `test_qkv_product.py`: `python interpreted_heads.py`.

A process of its own, since JAX runs a cluster's programs in as many threads as XLA has, and those of one wait for each other: XLA must
have more than the machine has cores."""

import contextlib
from unittest import mock

import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels.qkv import Pages, mosaic, reference

EPS, PAGE, PLACES = 1e-6, 4, 3

# Rows, sequences, KV heads, query heads of each, heads of keys and values, numbers of a head and inputs. Constants of the module.
CASES = {
    "a key that is a value too, two warpgroups, rows that wrap": ((16, 2, 1, 1, 1, 256, 256), {}),
    "three tiles of rows for two warpgroups, and inputs that do not fit": (
        (24, 3, 1, 1, 2, 256, 512),
        {"WARPGROUPS": (2,), "STEPS": (1,), "SHARED_MEMORY": 50 << 10},
    ),
    "queries of one row": ((1, 1, 2, 1, 0, 512, 64), {}),
    "fresh keys and values": ((6, 2, 1, 1, 2, 512, 128), {}),
    "values without a norm": ((8, 1, 1, 1, 2, 256, 128), {}),
}


def check(name: str) -> None:
    """Raises AssertionError where kernel and reference differ."""
    rows, batch, kv_heads, group, owned, dim, width = CASES[name][0]
    rng, length, value_norm = np.random.default_rng(0), rows // batch, "without a norm" not in name
    x = jnp.asarray(rng.integers(-8, 9, (rows, width)) / 8, jnp.bfloat16)
    w = jnp.asarray(rng.integers(-8, 9, (kv_heads, group + owned, dim, width)) / 64, jnp.bfloat16)
    angles = rng.standard_normal((rows, dim // 2)).astype(np.float32)
    weights = [jnp.asarray(1 + rng.standard_normal(dim) / 8, jnp.bfloat16) for _ in range(2)]
    pages, total = None, batch * PLACES + 1
    if owned and "fresh" not in name:
        pools = [jnp.full((total, PAGE, kv_heads, dim), jnp.nan, jnp.bfloat16) for _ in range(2)]
        table = jnp.asarray(rng.permutation(total)[: batch * PLACES].reshape(batch, PLACES), jnp.int32)
        start, count = jnp.asarray(rng.integers(9, 60, batch), jnp.int32), jnp.asarray([length, length - 2, 0][:batch], jnp.int32)
        pages = Pages(*pools, table, start, count)
    given = jnp.cos(angles), jnp.sin(angles), weights[0], weights[1] if owned else None
    settings = {"group": group, "eps": EPS, "value_norm": value_norm}
    cut = mosaic.choose_cut(-(-rows // 8) * 8, dim, width)
    assert (cut.stages < cut.steps) == ("do not fit" in name), cut
    found = mosaic.projected(x, w, *given, pages, batch=batch, **settings, interpret=InterpretGPUParams())
    product = jnp.einsum("nh,kpdh->nkpd", x.astype(jnp.float32), w.astype(jnp.float32)).reshape(batch, length, *w.shape[:3])
    turns = [angles.reshape(batch, length, -1) for angles in given[:2]]
    settings |= {"key_dims": dim, "dtype": jnp.bfloat16}
    for a, b in zip(found, reference.qkv(product, *turns, *given[2:], pages, **settings), strict=True):
        if b is None:
            assert a is None
        else:
            a, b = (np.asarray(array, np.float32).reshape(b.shape) for array in (a, b))
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-5)


if __name__ == "__main__":
    for name, (_, constants) in CASES.items():
        with contextlib.ExitStack() as stack:
            for constant, value in constants.items():
                stack.enter_context(mock.patch.object(mosaic, constant, value))
            check(name)
        print(name)
