"""Programs as they are lowered for CUDA, on a machine that need not have it."""

import contextlib
import importlib
from unittest import mock

import jax
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect


def for_cuda(function, *args, **static):
    """The text of a jitted function's program. args: arrays or their shapes; static: its static arguments."""
    return lowered_for_cuda(function, *args, **static).as_text()


def triton_kernels(function, *args, **static):
    """Of each kernel in the Triton dialect in a jitted function's program: its name, the types of the arrays that it takes and gives, in
    the order of its arguments, and its text. Arguments as in `for_cuda`."""
    found = []

    def visit(operation):
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and "gpu.triton" in str(attributes["call_target_name"]):
            config = ir.DictAttr(attributes["mhlo.backend_config"])
            name, module = (ir.StringAttr(config[key]).value_bytes for key in ("name", "ir"))
            with ir.Context() as context, ir.Location.unknown():
                triton_dialect.register_dialect(context)
                text = str(ir.Module.parse(module))
            types = [ir.RankedTensorType(value.type) for value in (*operation.operands, *operation.results)]
            found.append((name.decode(), types, text))
        return ir.WalkResult.ADVANCE

    lowered_for_cuda(function, *args, **static).compiler_ir().operation.walk(visit)
    return found


def lowered_for_cuda(function, *args, **static):
    """A jitted function's program. Arguments as in `for_cuda`."""
    registered = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 11):  # from here on, a kernel is lowered for the GPU that is there, or for one of a registered kind
        gpus = importlib.import_module("jax._src.pallas.triton.gpu_info")
        h200 = gpus.get_gpu_info_from_version(gpus.GpuVersion.H200)
        registered = mock.patch.dict(gpus.registry, {device.device_kind: lambda: h200 for device in jax.devices()[:1]})
    with registered:
        return function.trace(*args, **static).lower(lowering_platforms=("cuda",))
