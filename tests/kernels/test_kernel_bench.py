"""What the kernels' benchmarks share runs anywhere; what it finds is no test."""

import jax.numpy as jnp
import pytest

from pallas_kernels import bench


def test_a_call_is_timed_alone_and_with_variants_of_its_inputs(monkeypatch):
    monkeypatch.setattr(bench, "SAMPLE_SECONDS", 0.001)
    tree = {"x": jnp.ones((8, 8)), "n": jnp.arange(4, dtype=jnp.int32)}

    def fn(tree, y):
        return tree["x"] @ y, tree["n"] + 1

    y = jnp.ones((8, 8))
    assert 0 < bench.time_us(fn, tree, y) < 1e6
    assert 0 < bench.time_us(fn, tree, y, variants=[(tree, y + i) for i in range(2)]) < 1e6


@pytest.mark.parametrize(("reference", "end"), [(None, "of copy"), (30.0, "reference      30.0 us (3.00x)")])
def test_a_line_gives_the_speed_and_its_share(capsys, reference, end):
    bench.show("a kernel", 10.0, 20_000_000, 4000.0, reference)
    line = capsys.readouterr().out.rstrip()
    assert line.startswith("a kernel") and line.endswith(end)
    assert "10.0 us     2000 GB/s  50.0% of copy" in line
