"""How programs are compiled for a GPU and what is left free in its memory, with a GPU that is none."""

import types

import jax
import pytest

from jaxspec.engine import cuda_graphs


def gpu(capability="9.0", process_index=0):
    return types.SimpleNamespace(platform="gpu", compute_capability=capability, process_index=process_index)


class Lowered:
    """Compiles with the options that it is asked for."""

    def __init__(self):
        self.asked = []

    def compile(self, compiler_options=None):
        self.asked.append(compiler_options)
        return "program"


ALONE = cuda_graphs.CONCURRENT if jax.__version_info__ >= cuda_graphs.CONCURRENT_SINCE else cuda_graphs.WHOLE_LOOP


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        ([gpu()], ALONE),
        ([gpu("10.0")], ALONE),
        ([gpu(), gpu()], cuda_graphs.WHOLE_LOOP),
        ([gpu("8.9")], None),
        ([gpu(), gpu("8.9")], None),
        ([gpu(), gpu(process_index=1)], None),
        (jax.devices()[:1], None),
    ],
)
def test_a_loop_on_new_gpus_of_one_process_is_recorded_whole(devices, options):
    lowered = Lowered()
    assert cuda_graphs.compiled(lowered, devices) == "program" and lowered.asked == [options]


def test_a_program_for_a_profiler_has_no_graphs():
    lowered = Lowered()
    assert cuda_graphs.without(lowered, [gpu("8.9")]) == "program" and lowered.asked == [cuda_graphs.ONE_BY_ONE]
    assert cuda_graphs.used_on([gpu("8.9")]) and not cuda_graphs.used_on(jax.devices())


def test_gaps_are_left_between_small_arrays_that_stay(monkeypatch):
    placed = []

    def put(array, device):
        placed.append((array.nbytes, device))
        return jax.numpy.zeros(1)

    monkeypatch.setattr(jax, "device_put", put)
    mine, other = gpu(), gpu(process_index=1)
    walls = cuda_graphs.keep_apart([mine, other, *jax.devices()])
    assert len(walls) == sum(cuda_graphs.GAPS.values()) and {device.process_index for _, device in placed} == {0}
    sizes = [nbytes for nbytes, _ in placed]
    assert sizes[1::2] == [cuda_graphs.SMALLEST] * len(walls)
    assert {size: sizes[::2].count(size) for size in cuda_graphs.GAPS} == cuda_graphs.GAPS
