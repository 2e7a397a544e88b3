"""DFlash2: DFlash with convolutions over the block, and a choice among candidates that looks at the token before.

Around attention and around the MLP of every layer a causal convolution mixes a row with the rows before it in the block; its kernel is a
learnt one plus what the row itself adds, for groups of channels. Each place then has its best few tokens as candidates. A walk over the
places adds to their logits how well they follow the token chosen before, a product of three vectors of rank 256. Facts: speculators
`models/dflash2`, vLLM `DFlash2DraftModel`; where a sliding window ends inside the context, a row's own position counts, as in vLLM. The
rest is DFlash's: see `block_drafter`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.collectives import full_logits, shard_of
from jaxspec.drafters import blocks
from jaxspec.drafters.base import Drafts, Target
from jaxspec.drafters.block_drafter import BlockAttention, BlockDrafter, BlockState, Leaves, keys_of
from jaxspec.drafters.blocks import SiluMLP
from jaxspec.drafters.dflash2_config import RELEASED, DFlash2Config, default_config
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.training import Guess, Objective, Shortlist, pick
from jaxspec.model.layers import Linear, RMSNorm, Weight
from jaxspec.model.rows import Hidden
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, draw
from jaxspec.sampling.filters import best_candidates
from jaxspec.trees import nbytes, told


@struct.dataclass
class BlockConvolution:
    """The convolutions before and after a part of a layer. base_kernel: [2, taps, h]; kernel_projection: [2 x taps x groups, h]. Tap t
    takes the row t places earlier in the block."""

    base_kernel: Weight
    kernel_projection: Linear

    def around(self, part: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """The part of a layer between its two convolutions. x: [B, T, h], the rows before both, which make both kernels."""
        taps, hidden = self.base_kernel.shape[1:]
        own = self.kernel_projection(x, dtype=jnp.float32).reshape(*x.shape[:2], 2, taps, -1, 1)
        base = self.base_kernel.astype(jnp.float32).reshape(1, 1, 2, taps, own.shape[-2], -1)
        before, after = ((own + base)[:, :, side].reshape(*x.shape[:2], taps, hidden) for side in (0, 1))
        return _convolved(after, part(_convolved(before, x)))


def _convolved(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """kernel: [B, T, taps, h] float32; x: [B, T, h]."""
    rows = x.astype(jnp.float32)
    earlier = (jnp.pad(rows, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]] for tap in range(kernel.shape[2]))
    return sum((kernel[:, :, tap] * row for tap, row in enumerate(earlier)), jnp.zeros_like(rows)).astype(x.dtype)


@struct.dataclass
class DFlash2Layer:
    """A pre-norm decoder layer (Qwen3's) with convolutions around its two parts."""

    self_attn: BlockAttention
    mlp: SiluMLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    attention_conv: BlockConvolution
    mlp_conv: BlockConvolution

    def __call__(self, x: jax.Array, attend: Callable[[jax.Array], jax.Array], implementation: str) -> jax.Array:
        """See `BlockLayer`."""
        x = x + self.attention_conv.around(attend, self.input_layernorm(x))
        with jax.named_scope("feed_forward"):
            return x + self.mlp_conv.around(lambda rows: self.mlp(rows, implementation), self.post_attention_layernorm(x))


@struct.dataclass
class CandidateSelector:
    """predecessor_codebook, successor_codebook: [V, r]; hidden_projection: [r, h]."""

    predecessor_codebook: Weight
    successor_codebook: Weight
    hidden_projection: Linear

    def following(self, previous: jax.Array, projected: jax.Array) -> jax.Array:
        """What a successor's row is multiplied with: [..., r] float32. previous: [...] int32, the token before; projected: [..., r],
        what hidden_projection makes of the place's row."""
        return jnp.take(self.predecessor_codebook, previous, axis=0, mode="clip").astype(jnp.float32) * projected

    def successors(self, ids: jax.Array) -> jax.Array:
        """[...] int32 -> [..., r] float32."""
        return jnp.take(self.successor_codebook, ids, axis=0, mode="clip").astype(jnp.float32)


@struct.dataclass
class DFlash2(BlockDrafter):
    """The drafter's weights: see `BlockDrafter`. Convolutions and selector are whole on every device of a mesh: a sum over devices takes
    longer than the rows that are read of the codebooks, and the projections are small."""

    fc: Linear
    hidden_norm: RMSNorm
    kv_proj: Linear
    layers: tuple[DFlash2Layer, ...]
    norm: RMSNorm
    lm_head: Linear | None
    d2t: Weight | None
    mask_embedding: Weight | None
    candidate_selector: CandidateSelector
    config: DFlash2Config = struct.field(pytree_node=False)
    page_size: int = struct.field(pytree_node=False, default=64)
    reading: jax.Array | None = None

    __repr__ = told

    unquantised: ClassVar[tuple[str, ...]] = (r"_conv\.", r"\bcandidate_selector\.")

    def draft(self, state: BlockState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, BlockState]:
        if num_draft_tokens == 0:
            return Drafts.joined([], target.slots.shape[0]), state
        rows = self.rows(state, target, num_draft_tokens)[:, 1:]
        logits, _ = self.candidates(target.model, rows, target.draft_attention)
        positions = target.length[:, None] + jnp.arange(1, num_draft_tokens + 1, dtype=jnp.int32)[None, :]
        unary, ids = self.among(logits, positions, sampling)
        selector = self.candidate_selector
        projected, successors = selector.hidden_projection(rows, dtype=jnp.float32), selector.successors(ids)
        previous, steps = target.anchor, []
        for k in range(num_draft_tokens):
            own, among, following = (x[:, k : k + 1] for x in (unary, ids, successors))
            if (constraint := sampling.constraint) is not None:  # who may come is known after the drafts before
                masked = constraint.masked(logits[:, k : k + 1], constraint.state[:, None], sampling.shard)
                own, among = self.among(masked, positions[:, k : k + 1], sampling)
                following = selector.successors(among)
            edges = jnp.sum(selector.following(previous, projected[:, k])[:, None] * following[:, 0], axis=-1)
            token, scores, sampling = draw(own + edges[:, None], positions[:, k : k + 1], sampling, among)
            steps.append((token, scores, among))
            previous = token[:, 0]
        return Drafts.joined(steps, target.slots.shape[0]), state

    def among(self, logits: jax.Array, positions: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
        """The candidates of drafts, the best as the logits are edited: their logits as they are, [B, T, top_k], and their ids."""
        if sampling.tables is None:
            return best_candidates(logits, self.config.selector_top_k, shard_of(logits, None, sampling.shard))
        logits = full_logits(logits, sampling.shard)
        _, ids = best_candidates(sampling.tables.applied(logits, None, positions), self.config.selector_top_k)
        return jnp.take_along_axis(logits, ids, axis=-1), ids

    def bytes_read(self, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
        """One pass, however many drafts it makes; of the codebooks, rows alone."""
        weights, kv = self.bytes_of_a_pass(target, batch=batch, context=context)
        selector = self.candidate_selector
        books = nbytes((selector.predecessor_codebook, selector.successor_codebook))
        row = books / 2 / selector.predecessor_codebook.shape[0]
        return weights - books + batch * num_draft_tokens * (1 + self.config.selector_top_k) * row, kv

    def guesses(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        """Scored are all tokens, and not the candidates alone: so both parts of a score learn from every token."""
        rows, selector = self.rows_along(target, out, ids, at, steps), self.candidate_selector
        for k in range(1, steps + 1):
            logits, _ = self.candidates(target, rows[:, :, k])
            projected = selector.hidden_projection(rows[:, :, k], dtype=jnp.float32)
            following = selector.following(pick(ids, at + k), projected)
            edges = Linear(selector.successor_codebook)(following.astype(rows.dtype), dtype=jnp.float32)
            # The target may have more tokens, whose successors are the last one's too.
            edges = jnp.pad(edges, [(0, 0)] * (edges.ndim - 1) + [(0, logits.shape[-1] - edges.shape[-1])], mode="edge")
            yield Guess(logits + edges, shortlist=Shortlist(logits, self.config.selector_top_k))

    def fresh(self, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray, seed: int) -> DFlash2:
        """Convolutions begin as the identity, and the selector without an effect."""

        def identity(conv: BlockConvolution) -> BlockConvolution:
            none = jax.tree.map(jnp.zeros_like, conv)
            return dataclasses.replace(none, base_kernel=none.base_kernel.at[:, 0].set(1.0))

        drafter = blocks.with_the_targets_head(self, table, norm, tokens)
        layers = tuple(
            dataclasses.replace(layer, attention_conv=identity(layer.attention_conv), mlp_conv=identity(layer.mlp_conv))
            for layer in drafter.layers
        )
        selector = drafter.candidate_selector
        selector = dataclasses.replace(selector, successor_codebook=jnp.zeros_like(selector.successor_codebook))
        return dataclasses.replace(drafter, layers=layers, candidate_selector=selector)


def abstract(config: DFlash2Config, dtype: Any = jnp.bfloat16) -> DFlash2:
    """The drafter as a tree of ShapeDtypeStructs."""
    make, hidden, taps, rank = Leaves(config, dtype), config.hidden_size, config.conv_kernel_size, config.selector_rank

    def convolution() -> BlockConvolution:
        return BlockConvolution(make.leaf(2, taps, hidden), make.linear(2 * taps * (hidden // config.conv_group_size), hidden))

    layers = (
        DFlash2Layer(make.attention(spec), make.silu_mlp(spec), make.norm(), make.norm(), convolution(), convolution())
        for spec in config.layers
    )
    books = make.leaf(config.vocab_size, rank), make.leaf(config.vocab_size, rank)
    return DFlash2(**make.shared(), layers=tuple(layers), candidate_selector=CandidateSelector(*books, make.linear(rank, hidden)))


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: TargetConfig, dtype: Any) -> DFlash2:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs. Raises ValueError if it cannot be used with the target."""
    return abstract(DFlash2Config.from_hf(config, target, keys_of(folder)), dtype)


KIND = Kind(
    name="dflash2",
    config_names=("DFlash2DraftModel", "DFlash2Speculator", "dflash2"),
    made=DFlash2,
    from_checkpoint=from_checkpoint,
    released=lambda name, raw, target: RELEASED.get(name or ""),
    objective=Objective(steps=7, decay=0.78, hard=1.0),  # DFlash's
    default_config=default_config,
)
