"""Sums and gathers over the GPUs of the host, many times over, against `jax.lax`'s."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels import all_reduce
from pallas_kernels import bench_devices as bench

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def devices():
    """(mesh, tables) of all GPUs."""
    mesh, tables = Mesh(np.asarray(jax.devices()), (bench.AXIS,)), all_reduce.mailbox_tables([jax.devices()])
    if tables is None:
        pytest.skip("there are no GPUs that reach each other's memory")
    return mesh, tables[0]


@pytest.mark.parametrize("shape", bench.SHAPES, ids=str)
def test_no_number_of_many_turns_is_wrong(devices, shape):
    mesh, mail = devices
    wrong = bench.over_devices(mesh, functools.partial(bench.errors, shape), mail)(np.int32(7))
    assert not np.asarray(wrong).any()
    chain = functools.partial(bench.chain, shape, 2000, bench.by_kernel)
    ended = np.asarray(bench.over_devices(mesh, chain, mail)(), np.float32)
    np.testing.assert_array_equal(ended, np.broadcast_to(np.arange(shape[1]) % 128, ended.shape))
