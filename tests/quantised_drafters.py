"""Drafters of the tests in few bits: quantised through a checkpoint, as `load` does it, and the float drafters that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import checkpoint
from jaxspec.drafters import quantising
from jaxspec.drafters.quantising import checkpoint_part, with_checkpoint_part
from jaxspec.trees import is_packed
from pallas_kernels.packed import unpack


def quantised(folder: Path, drafter: Any, kind: str) -> Any:
    """A float32 drafter with its matrices quantised, with scales in float32. folder: where its checkpoint is written."""
    checkpoint.save_weights(folder, checkpoint_part(drafter), {})
    asked = quantising.asked_quantisation(kind, drafter, {"dtype": "float32"}, jnp.float32)
    tree = checkpoint_part(quantising.quantised(jax.eval_shape(lambda: drafter), asked))
    return with_checkpoint_part(drafter, checkpoint.load_weights(folder, tree, quantisation=asked, progress=False))


def dequantised(drafter: Any) -> Any:
    """The float32 drafter whose weights are those that a quantised one's codes stand for."""
    return jax.tree.map(lambda leaf: unpack(leaf, jnp.float32) if is_packed(leaf) else leaf, drafter, is_leaf=is_packed)
