"""What each kind of device runs by default, and what it refuses."""

import jax
import jax.numpy as jnp
import pytest

from jaxspec import loading, targets
from pallas_kernels import device, dialect

KINDS = {
    "T4": device.Described("Tesla T4", "7.5"),
    "A100": device.Described("NVIDIA A100-SXM4-40GB", "8.0"),
    "L4": device.Described("NVIDIA L4", "8.9"),
    "H200": device.Described("NVIDIA H200", "9.0"),
    "next": device.Described("NVIDIA R100", "11.0"),
    "CPU": device.Described("cpu", "", platform="cpu"),
}


@pytest.mark.parametrize(
    ("kind", "implementation", "dtype", "shared"),
    [
        ("CPU", "xla", jnp.float32, None),
        ("T4", "xla", jnp.bfloat16, None),
        ("A100", "triton", jnp.bfloat16, 166_912),
        ("L4", "triton", jnp.bfloat16, 101_376),
        ("H200", "triton", jnp.bfloat16, 166_912),
        ("next", "triton", jnp.bfloat16, 101_376),
    ],
)
def test_what_each_device_runs_by_default(kind, implementation, dtype, shared):
    with device.described_as(KINDS[kind]):
        assert dialect.select("auto") == implementation
        assert targets.weights_dtype("auto", "bfloat16") == dtype
        # float16 overflows in the residual stream, wherever it runs.
        assert targets.weights_dtype("auto", "float16") == targets.weights_dtype("auto", "float32") == jnp.float32
        assert shared is None or device.shared_memory() == shared
    assert dialect.select("auto") == "xla" and device.current() is jax.devices()[0]


def test_kernels_that_were_asked_for_are_refused_with_the_reason():
    with device.described_as(KINDS["T4"]):
        with pytest.raises(
            ValueError, match="attention is 'triton', but the Tesla T4 has compute capability 7.5; kernels need at least 8.0"
        ):
            loading.check_names(attention="triton")
    assert device.obstacle(KINDS["L4"]) is None
    assert device.obstacle() == "the device is a CPU; kernels need an NVIDIA GPU"
