"""Reads of what a step needs once, such as weights: they leave the L2 cache first.

So what is needed again soon stays there: activations, parts of sums, and the keys and values that several layers share.
"""

from __future__ import annotations

from typing import Any

POLICY = "evict_first"  # a name that loads in the Triton dialect and PTX share


def copy(mosaic: Any, source: Any, held: Any, barrier: Any, *, interpret: bool = False) -> None:
    """`copy_gmem_to_smem` of such an array, in the Mosaic GPU dialect. interpret: whether the kernel is interpreted."""
    mosaic.copy_gmem_to_smem(source, held, barrier)
    if not interpret:
        mosaic.inline_mgpu()(_leave_first)()


def _leave_first(_) -> None:
    """Inlined after a copy: gives its instruction the policy, for which JAX has no argument. JAX writes the instruction as text since 0.12;
    the operation of earlier ones stays as it is."""
    from jaxlib.mlir import ir

    point: Any = ir.InsertionPoint.current
    copies = [op for op in point.block.operations if _is_copy(op)]
    if copies:
        text = _text(copies[-1]).strip().removesuffix(";").replace(" [", ".L2::cache_hint [", 1)
        policy = f".reg .b64 policy; createpolicy.fractional.L2::{POLICY}.b64 policy, 1.0;"
        copies[-1].attributes["asm_string"] = ir.StringAttr.get(f"{{ {policy} {text}, policy; }}")


def _is_copy(op: Any) -> bool:
    return "asm_string" in op.attributes and all(part in _text(op) for part in (" cp.async.bulk.tensor", "::complete_tx"))


def _text(op: Any) -> str:
    from jaxlib.mlir import ir

    return ir.StringAttr(op.attributes["asm_string"]).value
