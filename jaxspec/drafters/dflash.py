"""DFlash: a block of drafts in one pass, from hidden states of several target layers (arXiv 2602.06036).

The block is [anchor, mask, ..., mask]; the row at a position guesses the token there, and all tokens are chosen at once. Full layers see
the whole block, sliding layers only what lies before a row: see `block_drafter`. Facts: z-lab/dflash `model.py`, SpecForge
`DFlashDraftModel`, vLLM `qwen3_dflash.py`, speculators `models/dflash`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.drafters import blocks
from jaxspec.drafters.base import Drafts, Target, choose_by_head_of
from jaxspec.drafters.block_drafter import BlockAttention, BlockDrafter, BlockState, Leaves, keys_of
from jaxspec.drafters.blocks import SiluMLP
from jaxspec.drafters.dflash_config import RELEASED, DFlashConfig, default_config
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.training import Guess, Objective
from jaxspec.model.head_guides import head_bytes
from jaxspec.model.layers import Linear, RMSNorm, Weight
from jaxspec.model.rows import Hidden
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, draw
from jaxspec.trees import nbytes, told


@struct.dataclass
class DFlashLayer:
    """A pre-norm decoder layer (Qwen3's)."""

    self_attn: BlockAttention
    mlp: SiluMLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __call__(self, x: jax.Array, attend: Callable[[jax.Array], jax.Array], implementation: str) -> jax.Array:
        """See `BlockLayer`."""
        x = x + attend(self.input_layernorm(x))
        with jax.named_scope("feed_forward"):
            return x + self.mlp(self.post_attention_layernorm(x), implementation)


@struct.dataclass
class DFlash(BlockDrafter):
    """The drafter's weights: see `BlockDrafter`."""

    fc: Linear
    hidden_norm: RMSNorm
    kv_proj: Linear
    layers: tuple[DFlashLayer, ...]
    norm: RMSNorm
    lm_head: Linear | None
    d2t: Weight | None
    mask_embedding: Weight | None
    config: DFlashConfig = struct.field(pytree_node=False)
    page_size: int = struct.field(pytree_node=False, default=64)
    reading: jax.Array | None = None

    __repr__ = told

    def draft(self, state: BlockState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, BlockState]:
        if num_draft_tokens == 0:
            return Drafts.joined([], target.slots.shape[0]), state
        out = self.rows(state, target, num_draft_tokens)[:, 1:]
        logits, ids = self.candidates(target.model, out, target.draft_attention)
        positions = target.length[:, None] + jnp.arange(1, num_draft_tokens + 1, dtype=jnp.int32)[None, :]
        if self.lm_head is None and self.config.output_multiplier == 1 and sampling.by_temperature_alone:
            cap = self.config.final_logit_softcapping
            tokens = choose_by_head_of(target.model, out, positions, sampling, cap, target.draft_attention)
        else:
            tokens, logits, _ = draw(logits, positions, sampling, ids)
        return Drafts(tokens, logits, ids), state

    def bytes_read(self, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
        """One pass, however many drafts it makes. Of few drafts the guide of the target's head is read, if it has one."""
        size, kv = self.bytes_of_a_pass(target, batch=batch, context=context)
        if self.lm_head is None:
            size += head_bytes(target, batch * num_draft_tokens) - nbytes(target.head[0])
        return size, kv

    def guesses(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        rows = self.rows_along(target, out, ids, at, steps)
        for k in range(1, steps + 1):
            logits, tokens = self.candidates(target, rows[:, :, k])
            yield Guess(logits, None if tokens is None else tokens[0, 0])

    def fresh(self, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray, seed: int) -> DFlash:
        return blocks.with_the_targets_head(self, table, norm, tokens)


def abstract(config: DFlashConfig, dtype: Any = jnp.bfloat16) -> DFlash:
    """The drafter as a tree of ShapeDtypeStructs."""
    make = Leaves(config, dtype)
    layers = (DFlashLayer(make.attention(spec), make.silu_mlp(spec), make.norm(), make.norm()) for spec in config.layers)
    return DFlash(**make.shared(), layers=tuple(layers))


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: TargetConfig, dtype: Any) -> DFlash:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs. Raises ValueError if it cannot be used with the target."""
    return abstract(DFlashConfig.from_hf(config, target, keys_of(folder)), dtype)


KIND = Kind(
    name="dflash",
    config_names=("DFlashDraftModel", "DFlashSpeculator", "dflash"),
    made=DFlash,
    from_checkpoint=from_checkpoint,
    released=lambda name, raw, target: RELEASED.get(name or ""),
    # The weights of a block of 8 fall by e every fourth place (arXiv 2602.06036, section 4.2).
    objective=Objective(steps=7, decay=0.78, hard=1.0),
    default_config=default_config,
)
