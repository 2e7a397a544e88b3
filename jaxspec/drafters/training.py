"""What training asks of a drafter: an objective, and what it guesses along a known text, from many places of it at once.

Of a place P of a text the drafter has seen the rows 0 .. P of the target; token P + 1 is the anchor. Draft step k, from 1 on, guesses
token P + k + 1, and the text's own tokens stand for the guesses before it, which they are for as long as those are accepted. Guesses
along a text are made by the very modules that run at inference. What is differentiated runs in plain XLA: the kernels have no
derivative.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.checks import integer, number
from jaxspec.model import paged_kv as paged
from jaxspec.model.layer_spec import FULL, SLIDING, LayerSpec
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.model.rows import Rows

XLA = "xla"  # the implementation of attention that has a derivative


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a drafter is trained towards: draft steps at places of a text, and weights of the distances of a guess's distribution q from
    the target's p. Raises ValueError or TypeError for what makes no objective."""

    # Draft steps in a row.
    steps: int = 4
    # Places of each text that draft, drawn anew in every step.
    anchors: int = 64
    # Weight of a draft step, against that of the step before it.
    decay: float = 0.8
    # Weight of cross-entropy to p, which is KL up to a constant.
    soft: float = 1.0
    # Weight of cross-entropy to p's most likely token.
    hard: float = 0.0
    # Weight of total variation, half of the L1 distance: 1 - tv is how often speculative sampling accepts (Leviathan et al. 2023,
    # section 3.2).
    tv: float = 0.0
    # Weight of a confidence's cross-entropy to the share of guesses that speculative sampling accepts, where a drafter has confidences.
    confidence: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "anchors"):
            object.__setattr__(self, name, integer(f"the objective's {name}", getattr(self, name), 1))
        for name in ("decay", "soft", "hard", "tv", "confidence"):
            object.__setattr__(self, name, number(f"the objective's {name}", getattr(self, name), 0))
        if not (0 < self.decay <= 1 and 0 < self.soft + self.hard + self.tv):
            raise ValueError(f"the objective is {self}; expected a decay above 0 and at most 1, weights of at least 0, and one above")


@struct.dataclass
class Centroids:
    """The scores of a centroid head, of whose best centroids the tokens are offered."""

    # [B, A, centroids] float32.
    logits: jax.Array
    # [V] int32, the token ids of each centroid in turn.
    ordering: jax.Array
    # How many centroids offer their tokens.
    top_k: int = struct.field(pytree_node=False)


@struct.dataclass
class Shortlist:
    """Logits by which tokens become candidates, before those are scored."""

    # [B, A, V] float32.
    logits: jax.Array
    # How many tokens become candidates.
    top_k: int = struct.field(pytree_node=False)


@struct.dataclass
class Guess:
    """One draft step, from A places of each of B texts."""

    # [B, A, C] float32.
    logits: jax.Array
    # [C] int32, the tokens that the logits belong to; None if candidate i is token i.
    ids: jax.Array | None = None
    # Of a centroid head, whose logits then are of all tokens; else None.
    centroids: Centroids | None = None
    # Of a drafter that scores a few candidates, whose logits here are the scores of all tokens; else None.
    shortlist: Shortlist | None = None
    # [B, A] float32, the log-odds that the guess is accepted if those before it are; None of a drafter that does not say.
    confidence: jax.Array | None = None


def whole_rows(ids: jax.Array) -> Rows:
    """Every row of a batch of whole sequences. ids: [B, T] int32."""
    batch, length = ids.shape
    zero = jnp.zeros((batch,), jnp.int32)
    return Rows(ids, zero, zero + length, jnp.arange(batch, dtype=jnp.int32))


def whole_cache(layers: tuple[LayerSpec, ...], keys: Any) -> PagedKV:
    """A cache of whole sequences, each of which is one page. keys: of each layer K and V, [B, T, KV, D]."""
    batch, length = keys[0][0].shape[:2]
    table = jnp.arange(batch, dtype=jnp.int32)[:, None]
    empty = paged.init(layers, slots=batch, max_len=length, num_draft_tokens=0, page_size=length, dtype=keys[0][0].dtype)
    return dataclasses.replace(paged.fixed(empty), layers=tuple(LayerKV(*pair) for pair in keys), tables={SLIDING: table, FULL: table})


def pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of each sequence. x: [B, T, ...], index: [B, A] int32 -> [B, A, ...]; indices past the end give the last row."""
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1, mode="clip")
