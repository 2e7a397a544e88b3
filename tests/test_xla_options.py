"""Options of XLA's compiler that may be unknown to it."""

import jax
import pytest

from jaxspec import xla_options
from jaxspec.engine import cuda_graphs
from jaxspec.media import tower


def test_options_are_known_to_this_jax():
    program = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 5, lambda x: x + 1, x)).lower(0)
    for options in (cuda_graphs.WHOLE_LOOP, cuda_graphs.CONCURRENT, cuda_graphs.ONE_BY_ONE, tower.BY_CUBLAS):
        assert xla_options.known(options) == options
        assert program.compile(compiler_options=options)(0) == 5


@pytest.mark.parametrize("options", [{"xla_gpu_no_such_option": 1}, {"xla_gpu_graph_min_graph_size": "many"}])
def test_a_compiler_that_does_not_know_them_does_without(options):
    assert xla_options.known(tower.BY_CUBLAS | options) == {}


def test_other_errors_are_raised(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(jax, "jit", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        xla_options.known({"xla_gpu_enable_triton_gemm": True})
