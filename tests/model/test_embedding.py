"""A table of token embeddings that is packed gives the rows of the dequantised one."""

import jax
import jax.numpy as jnp
import numpy as np
import packed_matrices
import pytest

from jaxspec.model.layers import Embedding, head_logits
from pallas_kernels.linear import reference
from pallas_kernels.packed import unpack, unpack_rows

pytestmark = pytest.mark.usefixtures("unoptimised")

IDS = jnp.asarray([[0, 7, 8, 15], [16, 63, 64, 99]], jnp.int32)


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("form", ["int8", "fp8", "int8 of 16", "fp8 blocks", "fp8 of 32", "int8 zeros", "int8 affine float16"])
def test_rows_are_those_of_the_dequantised_table(form, width):
    """Also of a vocabulary and a width that are no whole blocks. Ids past the end take the last row, as with a float table."""
    table = packed_matrices.packed(form, (100, width))
    whole = unpack(table)
    np.testing.assert_array_equal(unpack_rows(table, jnp.arange(100)), whole)
    ids = IDS.at[0, 0].set(1000)
    found = Embedding(table, 3.3)(ids, jnp.float32)
    np.testing.assert_array_equal(found, Embedding(whole.astype(jnp.float32), 3.3)(ids))
    assert Embedding(table)(ids).dtype == table.scale.dtype


@pytest.mark.parametrize("shape", [(128, 64), (200, 96)])
@pytest.mark.parametrize("bytes_at_a_time", [1 << 25, 1 << 14])
def test_a_head_is_the_same_table(monkeypatch, shape, bytes_at_a_time):
    """Unpacked at once or in pieces, of whole blocks or not."""
    monkeypatch.setattr(reference, "UNPACKED_BYTES", bytes_at_a_time)
    table = packed_matrices.packed("int8", shape)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, shape[1])), jnp.float32)
    wanted = np.asarray(x, np.float64) @ np.asarray(unpack(table, jnp.float32), np.float64).T
    np.testing.assert_allclose(head_logits(x, table, "auto"), wanted, rtol=0, atol=1e-5)


def test_no_row_is_unpacked_that_is_not_looked_up():
    table = packed_matrices.packed("int8", (4096, 256))
    compiled = jax.jit(lambda table, ids: Embedding(table)(ids)).lower(table, IDS).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.words.nbytes // 8
