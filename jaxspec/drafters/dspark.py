"""DSpark: a block of logits in one pass, then a walk over its places in which each token shifts the logits of the next.

One pass over the block gives logits for all places, as in DFlash: see `block_drafter`. The Markov head adds to those of a place a bias
that depends on the token chosen before it, so that guesses fit each other; it is a product of rank 256, far less than a pass. The
confidence head says of each place how likely its guess is to be accepted. By default every row guesses the token after its own, the
anchor's too. Facts: deepseek-ai/DeepSpec `modeling/dspark` (Gemma 4's layers, logits soft-capped before the bias), speculators
`models/dspark` (Qwen3's layers, a draft vocabulary).
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
from jax.sharding import PartitionSpec

from jaxspec.collectives import TENSOR
from jaxspec.drafters import blocks
from jaxspec.drafters.base import Drafts, Target
from jaxspec.drafters.block_drafter import BlockAttention, BlockDrafter, BlockState, Leaves, keys_of
from jaxspec.drafters.blocks import PlainDrafter
from jaxspec.drafters.branching import Branching
from jaxspec.drafters.dflash import DFlashLayer
from jaxspec.drafters.dspark_config import CONFIDENCE, GEMMA, RELEASED, DSparkConfig, default_config
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.training import XLA, Guess, Objective, pick
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.gemma4_fresh import with_query_norms
from jaxspec.model.layers import Embedding, GatedMLP, Linear, RMSNorm, Weight
from jaxspec.model.rows import Hidden
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, draw
from jaxspec.trees import nbytes, told


@struct.dataclass
class GemmaLayer:
    """A decoder layer of Gemma 4's kind: sandwich norms, then the whole stream x layer_scalar ([1])."""

    self_attn: BlockAttention
    mlp: GatedMLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm
    layer_scalar: Weight

    def __call__(self, x: jax.Array, attend: Callable[[jax.Array], jax.Array], implementation: str) -> jax.Array:
        """See `BlockLayer`."""
        x = x + self.post_attention_layernorm(attend(self.input_layernorm(x)))
        with jax.named_scope("feed_forward"):
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), implementation))
            return x * self.layer_scalar.reshape(1, 1, 1)


@struct.dataclass
class Affine:
    """y = x W^T + bias. weight: [out, in]; bias: [out]."""

    weight: Weight
    bias: Weight

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., in] -> [..., out], float32."""
        out = Linear(self.weight)(x, dtype=jnp.float32)
        return out + self.bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + self.bias.shape)


@struct.dataclass
class MarkovHead:
    """markov_w1: [V, r], by target ids; markov_w2: [draft vocabulary, r]. A "gated" head has gate_proj, [r, h + r], an "rnn" head
    joint_proj, [3 r, 2 r + h]. listed: as its logits, the biases are of a draft vocabulary and not of the target's."""

    markov_w1: Embedding
    markov_w2: Linear
    gate_proj: Affine | None
    joint_proj: Affine | None
    listed: bool = struct.field(pytree_node=False)

    @property
    def gathers(self) -> tuple[str, ...]:
        return ("markov_w2",) if self.listed else ()

    def embed(self, tokens: jax.Array) -> jax.Array:
        """tokens: [...] int32 -> [..., r]."""
        return self.markov_w1(tokens)

    def begin(self, hidden: jax.Array) -> jax.Array | None:
        """What an "rnn" head remembers before the first row: [..., r] float32. hidden: [..., h]."""
        if self.joint_proj is None:
            return None
        return jnp.zeros((*hidden.shape[:-1], self.markov_w1.weight.shape[-1]), jnp.float32)

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, memory: jax.Array | None, implementation: str = XLA
    ) -> tuple[jax.Array, jax.Array | None]:
        """The bias of a row's logits, [..., C] float32, and what the head remembers after the row.

        embedded: [..., r], of the token before the guess. hidden: [..., h], the row's. memory: as the row before left it.
        implementation: of the product with a packed markov_w2.
        """
        if self.gate_proj is not None:
            gate = jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, embedded], axis=-1)))
            embedded = (gate * embedded.astype(jnp.float32)).astype(embedded.dtype)
        if self.joint_proj is not None:
            assert memory is not None
            inputs = jnp.concatenate([memory.astype(hidden.dtype), embedded, hidden], axis=-1)
            keep, new, out = jnp.split(self.joint_proj(inputs), 3, axis=-1)
            keep = jax.nn.sigmoid(keep)
            memory, embedded = keep * memory + (1 - keep) * jnp.tanh(new), jnp.tanh(out).astype(embedded.dtype)
        return self.markov_w2(embedded, dtype=jnp.float32, implementation=implementation), memory


@struct.dataclass
class ConfidenceHead:
    """proj: [1, h + r], or [1, h] where it does not see the token before the guess."""

    proj: Affine


@struct.dataclass
class DSpark(BlockDrafter):
    """The drafter's weights: see `BlockDrafter`. markov_head, confidence_head: None where the checkpoint has none."""

    fc: Linear
    hidden_norm: RMSNorm
    kv_proj: Linear
    layers: tuple[DFlashLayer | GemmaLayer, ...]
    norm: RMSNorm
    lm_head: Linear | None
    d2t: Weight | None
    mask_embedding: Weight | None
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    config: DSparkConfig = struct.field(pytree_node=False)
    page_size: int = struct.field(pytree_node=False, default=64)
    reading: jax.Array | None = None

    # A table, of which rows are read, and products that are small.
    __repr__ = told

    unquantised: ClassVar[tuple[str, ...]] = (r"\bmarkov_w1$", r"\bmarkov_head\.(gate|joint)_proj$", r"\bconfidence_head\.")
    # The rows of markov_w1 that a round reads are few, and a sum over devices takes longer than they do: so it is whole everywhere.
    partitions: ClassVar[tuple[tuple[str, PartitionSpec], ...]] = (
        (r"\bmarkov_w2\.weight$", PartitionSpec(TENSOR, None)),
        *PlainDrafter.partitions,
    )

    @property
    def own_logits(self) -> bool:
        return super().own_logits or (self.markov_head is not None and not self.markov_head.listed)

    def draft(self, state: BlockState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, BlockState]:
        if num_draft_tokens == 0:
            return Drafts.joined([], target.slots.shape[0]), state
        rows = self.rows(state, target, num_draft_tokens)
        guessing = self.guessing(rows, num_draft_tokens)
        base, ids = self.candidates(target.model, guessing, target.draft_attention)
        previous, memory, steps, odds = target.anchor, self.begin(rows, target.anchor), [], []
        for k in range(num_draft_tokens):
            hidden = guessing[:, k]
            odds.append(self.confidence(previous, hidden))
            logits, memory = self.follow(base[:, k], previous, hidden, memory, target.draft_attention)
            logits, among = logits[:, None], None if ids is None else ids[:, k : k + 1]
            token, logits, sampling = draw(logits, target.length[:, None] + k + 1, sampling, among)
            steps.append((token, logits, among))
            previous = token[:, 0]
        confidence = None if self.confidence_head is None else jax.nn.sigmoid(jnp.stack(odds, axis=1))
        return dataclasses.replace(Drafts.joined(steps, target.slots.shape[0]), confidence=confidence), state

    def draft_tree(self, state: BlockState, target: Target, sampling: Sampling, tree: DraftTree) -> tuple[Drafts, BlockState]:
        """See `Drafter`. One pass; the Markov head shifts the logits of a place for each parent's token."""
        rows = self.rows(state, target, tree.depth)
        guessing = self.guessing(rows, tree.depth)
        base, ids = self.candidates(target.model, guessing, target.draft_attention)
        previous, nodes, branching = target.anchor[:, None], [], Branching.begun(sampling)
        memory = self.begin(rows, target.anchor)
        memory = None if memory is None else memory[:, None]
        for k, level in enumerate(tree.levels):
            previous, memory = previous[:, level.inner], None if memory is None else memory[:, level.inner]

            def of_parents(x: jax.Array, k: int = k, count: int = len(level.inner)) -> jax.Array:
                return jnp.broadcast_to(x[:, k : k + 1], (x.shape[0], count, x.shape[2]))

            logits, memory = self.follow(of_parents(base), previous, of_parents(guessing), memory, target.draft_attention)
            among = None if ids is None else of_parents(ids)
            previous, branching = branching.choose(logits, target.length + k + 1, level, among)
            memory = None if memory is None else memory[:, level.parent]
            nodes.append(previous)
        return Drafts(jnp.concatenate(nodes, axis=1)), state

    def begin(self, rows: jax.Array, anchor: jax.Array) -> jax.Array | None:
        """What the Markov head remembers before the first guess. rows: [..., T, h]; anchor: [...] int32."""
        if self.markov_head is None:
            return None
        hidden = rows[..., 0, :]
        memory = self.markov_head.begin(hidden)
        first = self.first_row
        if memory is None or (isinstance(first, int) and first == 0):
            return memory
        stepped = self.markov_head(self.markov_head.embed(anchor), hidden, memory)[1]  # over the row that guesses nothing, as in training
        return stepped if isinstance(first, int) or stepped is None else jnp.where(first == 0, memory, stepped)

    def follow(
        self, base: jax.Array, previous: jax.Array, hidden: jax.Array, memory: jax.Array | None, implementation: str = XLA
    ) -> tuple[jax.Array, jax.Array | None]:
        """A guess's logits, [..., C] float32, and what the Markov head remembers. base: [..., C], the block's; previous: [...] int32, the
        token before the guess; hidden: [..., h], the row's; memory: as the guess before left it; implementation: as the head takes it."""
        if self.markov_head is None:
            return base, None
        bias, memory = self.markov_head(self.markov_head.embed(previous), hidden, memory, implementation)
        return base + bias, memory

    def confidence(self, previous: jax.Array, hidden: jax.Array) -> jax.Array | None:
        """The log-odds that a guess is accepted if those before it are, [...] float32. previous, hidden: as for `follow`."""
        if self.confidence_head is None:
            return None
        if self.config.confidence_with_markov:
            assert self.markov_head is not None
            hidden = jnp.concatenate([hidden, self.markov_head.embed(previous)], axis=-1)
        return self.confidence_head.proj(hidden)[..., 0]

    def bytes_read(self, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
        """One pass, and for every guess the Markov head's output; of its embedding, rows alone."""
        weights, kv = self.bytes_of_a_pass(target, batch=batch, context=context)
        if self.markov_head is not None:
            every = nbytes((self.markov_head.markov_w2, self.markov_head.gate_proj, self.markov_head.joint_proj))
            weights += (num_draft_tokens - 1) * every - nbytes(self.markov_head.markov_w1)
        return weights - nbytes(self.confidence_head), kv

    def guesses(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        rows = self.rows_along(target, out, ids, at, steps)
        memory, guessing = self.begin(rows, pick(ids, at + 1)), self.guessing(rows, steps)
        for k in range(1, steps + 1):
            hidden, previous = guessing[:, :, k - 1], pick(ids, at + k)
            base, tokens = self.candidates(target, hidden)
            logits, memory = self.follow(base, previous, hidden, memory)
            yield Guess(logits, None if tokens is None else tokens[0, 0], confidence=self.confidence(previous, hidden))

    def fresh(self, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray, seed: int) -> DSpark:
        """The Markov head begins without an effect."""
        drafter = blocks.with_the_targets_head(with_query_norms(self) if self.config.gemma else self, table, norm, tokens)
        head = drafter.markov_head
        if head is None:
            return drafter
        silent = dataclasses.replace(head.markov_w2, weight=jnp.zeros_like(head.markov_w2.weight))
        return dataclasses.replace(drafter, markov_head=dataclasses.replace(head, markov_w2=silent))


def abstract(config: DSparkConfig, dtype: Any = jnp.bfloat16) -> DSpark:
    """The drafter as a tree of ShapeDtypeStructs."""
    make, rank, hidden = Leaves(config, dtype), config.markov_rank, config.hidden_size

    def affine(out: int, width: int) -> Affine:
        return Affine(make.leaf(out, width), make.leaf(out))

    layers, head, confidence = [], None, None
    for spec in config.layers:
        attn = make.attention(spec, gemma=config.gemma)
        if config.gemma:
            mlp = GatedMLP(make.linear(2, spec.intermediate_size, hidden), make.linear(hidden, spec.intermediate_size))
            layers.append(GemmaLayer(attn, mlp, *(make.norm() for _ in range(4)), layer_scalar=make.leaf(1)))
        else:
            layers.append(DFlashLayer(attn, make.silu_mlp(spec), make.norm(), make.norm()))
    if rank:
        head = MarkovHead(
            markov_w1=Embedding(make.leaf(config.vocab_size, rank)),
            markov_w2=make.linear(config.draft_vocab_size, rank),
            gate_proj=affine(rank, hidden + rank) if config.markov_head == "gated" else None,
            joint_proj=affine(3 * rank, 2 * rank + hidden) if config.markov_head == "rnn" else None,
            listed=config.draft_vocab_size != config.vocab_size,
        )
    if config.confidence:
        confidence = ConfidenceHead(affine(1, hidden + (rank if config.confidence_with_markov else 0)))
    return DSpark(**make.shared(), layers=tuple(layers), markov_head=head, confidence_head=confidence)


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: TargetConfig, dtype: Any) -> DSpark:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs. Raises ValueError if it cannot be used with the target."""
    keys = ("lm_head.weight", CONFIDENCE) if folder is None else keys_of(folder)
    return abstract(DSparkConfig.from_hf(config, target, keys), dtype)


KIND = Kind(
    name="dspark",
    config_names=(GEMMA, "DSparkSpeculator", "DSparkDraftModel", "dspark"),
    made=DSpark,
    from_checkpoint=from_checkpoint,
    released=lambda name, raw, target: RELEASED.get(name or ""),
    # DeepSpec's: a tenth of cross-entropy and nine tenths of the L1 distance, which is twice the total variation; weights fall by e
    # every fourth place.
    objective=Objective(steps=7, decay=0.78, soft=0.0, hard=0.1, tv=1.8),
    default_config=default_config,
)
