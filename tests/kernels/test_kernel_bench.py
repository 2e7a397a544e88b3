"""What the kernels' benchmarks share, with a clock of its own."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench


def fn(tree, y):
    return tree["x"] @ y, tree["n"] + 1


@pytest.mark.parametrize("count", [0, 2])
def test_what_is_timed_are_calls_with_all_variants_in_turn(monkeypatch, count):
    """Every call's result is kept, and is that of its own inputs."""
    timed = []
    monkeypatch.setattr(bench, "loop_us", lambda run, turns: timed.append((run(turns), turns)) or 7.0)
    tree, y = {"x": jnp.ones((8, 8)), "n": jnp.arange(4, dtype=jnp.int32)}, jnp.ones((8, 8))
    variants = [(tree, y + i) for i in range(1, count + 1)]
    assert bench.time_us(fn, tree, y, variants=variants) == 7.0
    ((results, turns),) = timed
    assert [float(y[0, 0]) for _, y in turns] == [1 + i % (count + 1) for i in range(bench.CALLS)]
    for (product, numbers), (_, y) in zip(results, turns, strict=True):
        np.testing.assert_array_equal(product, 8 * y)
        np.testing.assert_array_equal(numbers, [1, 2, 3, 4])


@pytest.mark.parametrize("us", [3.0, 5000.0])
def test_the_time_of_a_dispatch_is_shared_by_its_calls(monkeypatch, us):
    now, turns, dispatches = [0.0], [()] * 5, []

    def run(turns):
        dispatches.append(1)
        # The first, which compiles, takes a second more.
        now[0] += us * 1e-6 * bench.TRIPS * len(turns) + (len(dispatches) == 1)
        return jnp.zeros(())

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    assert bench.loop_us(run, turns) == pytest.approx(us)
    each = max(1, min(64, -(-bench.SAMPLE_SECONDS // (us * 1e-6 * bench.TRIPS * len(turns)))))
    assert len(dispatches) == bench.WARM_UPS + bench.SAMPLES * each


@pytest.mark.parametrize(("reference", "end"), [(None, "of copy"), (30.0, "reference      30.0 us (3.00x)")])
def test_a_line_gives_the_speed_and_its_share(capsys, reference, end):
    bench.show("a kernel", 10.0, 20_000_000, 4000.0, reference)
    line = capsys.readouterr().out.rstrip()
    assert line.startswith("a kernel") and line.endswith(end)
    assert "10.0 us     2000 GB/s  50.0% of copy" in line
