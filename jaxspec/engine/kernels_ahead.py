"""A program's kernels in the Mosaic GPU dialect, compiled beside one another while XLA still works on the program.

XLA compiles a program's kernels one after the other, a second or several each, once it has done all else. It keeps those that it has
compiled, by what is in them, for whatever program comes next. So a program of its own for each kernel brings it there beforehand.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp

TARGET = "mosaic_gpu_v2"  # the name of the call of such a kernel; where it has another, kernels are compiled with the program
_begun = set[bytes]()  # kernels of this process, by the names that JAX gives them


def compilers(lowered: Any, devices: Collection[Any]) -> list[Callable[[], None]]:
    """What compiles each kernel of a lowered program that has not been begun, without raising anything. devices: those that the program
    runs on."""
    found = list[Callable[[], None]]()
    if any(device.platform != "gpu" for device in devices):
        return found
    with contextlib.suppress(Exception):  # another JAX may write calls in another form
        for attributes in _calls(lowered.compiler_ir().operation):
            if attributes["kernel_hash"] not in _begun:
                _begun.add(attributes["kernel_hash"])
                found.append(functools.partial(_compile, attributes))
    return found


def _calls(operation: Any) -> Iterator[dict[str, Any]]:
    """The attributes of the calls of kernels within an operation."""
    attributes = operation.attributes
    if operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == TARGET:
        yield {each.name: getattr(each.attr, "value_bytes", None) or each.attr.value for each in attributes["mhlo.backend_config"]}
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _calls(inner.operation)


def _compile(attributes: dict[str, Any]) -> None:
    with contextlib.suppress(Exception):  # whatever is wrong shows itself with the program
        _program(attributes).lower().compile()


def _program(attributes: dict[str, Any]) -> Any:
    """A program that calls a kernel without its arguments. It is never run."""
    nothing = jax.ShapeDtypeStruct((1,), jnp.float32)
    return jax.jit(functools.partial(jax.ffi.ffi_call(TARGET, nothing, has_side_effect=True), **attributes))
