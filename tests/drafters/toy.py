"""A kind of drafter in one file: the target's hidden state, then the embedding of each token, through two matrices to logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxspec.collectives import TENSOR
from jaxspec.drafters import Kind
from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.drafters.training import Guess, Objective, pick
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layers import Embedding, Linear
from jaxspec.model.rows import Hidden
from jaxspec.sampling.choice import Sampling, draw


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    hidden_size: int
    vocab_size: int


@struct.dataclass
class Toy:
    """embed_tokens, lm_head: [V, H]; mix: [H, H]. Its state is the target's last hidden state of every slot, [slots, H]."""

    embed_tokens: Embedding
    mix: Linear
    lm_head: Linear
    config: ToyConfig = struct.field(pytree_node=False)
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())
    num_draft_tokens: int = struct.field(pytree_node=False, default=3)

    partitions: ClassVar[tuple[tuple[str, PartitionSpec], ...]] = ((r"\.weight$", PartitionSpec(TENSOR, None)),)
    gathers: ClassVar[tuple[str, ...]] = ("mix",)

    def bind(self, target: Gemma4Config) -> Toy:
        if self.config.hidden_size != target.hidden_size:
            raise ValueError(f"the toy has hidden_size {self.config.hidden_size}, this target has {target.hidden_size}")
        return self

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> jax.Array:
        return jnp.zeros((slots, self.config.hidden_size), self.mix.weight.dtype)

    def observe(self, state: jax.Array, rows: Observed) -> jax.Array:
        slots = jnp.where(rows.committed > 0, rows.slots, state.shape[0])
        return state.at[slots].set(rows.hidden.astype(state.dtype), mode="drop")

    def draft(self, state: jax.Array, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, jax.Array]:
        x, token = jnp.take(state, target.slots, axis=0, mode="clip")[:, None], target.anchor[:, None]
        steps = []
        for k in range(1, num_draft_tokens + 1):
            x, logits = self.step(x, token)
            token, logits, sampling = draw(logits, target.length[:, None] + k, sampling)
            steps.append((token, logits, None))
        return Drafts.joined(steps, target.slots.shape[0]), state

    def step(self, x: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x: [B, T, H]; token: [B, T] int32 -> the next x, and logits [B, T, V] float32."""
        x = self.mix(x) + self.embed_tokens(token).astype(x.dtype)
        return x, self.lm_head(x, dtype=jnp.float32)

    def guesses(self, target: Gemma4, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        x = pick(out.hidden, at).astype(self.mix.weight.dtype)
        for k in range(1, steps + 1):
            x, logits = self.step(x, pick(ids, at + k))
            yield Guess(logits)


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: Gemma4Config, dtype: Any) -> Toy:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table, square = (jax.ShapeDtypeStruct((rows, hidden), dtype) for rows in (vocab, hidden))
    return Toy(Embedding(table), Linear(square), Linear(table), ToyConfig(hidden, vocab))


def config_for(target: Gemma4Config) -> dict[str, Any]:
    return {"model_type": "toy", "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}


KIND = Kind(
    name="toy",
    config_names=("toy",),
    made=Toy,
    from_checkpoint=from_checkpoint,
    released=lambda name, raw, target: config_for(target),
    objective=Objective(steps=2),
    default_config=lambda raw, target: config_for(target),
)
