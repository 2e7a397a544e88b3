"""A draft model: any target, smaller than the one it guesses for, with a cache of its own.

It is the target's own class, called in the same loop. `observe` runs it over the rows that are committed and over the anchor, so its
cache holds positions 0 .. length and the output at the anchor gives the first guess; each further guess is one row. A round of K
guesses thus reads the draft model's weights K times. What guesses leave in the cache lies behind the anchor, where the next rows are
written before anything sees them. Facts: vLLM's standalone draft model speculator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxspec.collectives import over_vocabulary
from jaxspec.drafters.base import Drafts, Observed, Target, choose_by_head_of
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.training import XLA, Guess, Objective, pick, whole_rows
from jaxspec.model import paged_kv as paged
from jaxspec.model import traffic
from jaxspec.model.families import MODEL_TYPES, family_named, family_of
from jaxspec.model.head_guides import guided
from jaxspec.model.layer_spec import FULL
from jaxspec.model.paged_kv import PagedKV
from jaxspec.model.rows import Hidden, Rows
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, draw
from jaxspec.trees import nbytes, told

# A draft model whose layers take less, in bytes, is read by every device sooner than two sums a layer are made.
SMALL_LAYER = 2**27


@struct.dataclass
class DraftModelState:
    """cache: the draft model's own. hidden: [slots, h], its output after the final norm at each slot's anchor.

    drafted: `draft` has run since the last `observe`, so that all rows of its block but the last have their K and V. It is a property
    of the program, never of the data: false in any state that a program takes or gives.
    """

    cache: PagedKV
    hidden: jax.Array
    drafted: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class DraftModel:
    """A smaller target as a drafter. model: its weights. page_size: positions in a page of its cache. target_vocab_size: of the target that
    it is bound to, which may have more tokens."""

    model: TargetModel
    page_size: int = struct.field(pytree_node=False, default=64)
    target_vocab_size: int | None = struct.field(pytree_node=False, default=None)
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    # A checkpoint is a target's.
    __repr__ = told

    checkpoint_field: ClassVar[str] = "model"

    @property
    def key_prefixes(self) -> tuple[str, ...]:
        return family_of(self.model.config).prefixes

    @property
    def unread(self) -> tuple[str, ...]:
        return family_of(self.model.config).unread(self.model.config)

    @property
    def unquantised(self) -> tuple[str, ...]:
        """A table that is not the head too."""
        return () if self.model.head[0] is self.model.embed_tokens.weight else (r"\bembed_tokens$",)

    @property
    def partitions(self) -> tuple[tuple[str, PartitionSpec], ...] | None:
        layers = self.model.layers
        return None if nbytes(layers) < len(layers) * SMALL_LAYER else self.model.partitions

    def with_head_guide(self) -> DraftModel:
        """The same with a guide for its head, if that may have one: see `head_guides`."""
        return dataclasses.replace(self, model=guided(self.model))

    def bind(self, target: TargetConfig) -> DraftModel:
        bind(self.model.config, target)
        return dataclasses.replace(self, target_vocab_size=target.vocab_size)

    @property
    def draft_vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def narrower(self) -> bool:
        """Whether the target has more tokens."""
        return self.target_vocab_size not in (None, self.draft_vocab_size)

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> DraftModelState:
        config, dtype = self.model.config, self.model.dtype
        sizes = {"slots": slots, "max_len": max_len, "num_draft_tokens": num_draft_tokens, "page_size": self.page_size}
        cache = paged.fixed(paged.init(config.layers, **sizes, dtype=dtype))
        return DraftModelState(cache, jnp.zeros((slots, config.hidden_size), dtype))

    def observe(self, state: DraftModelState, rows: Observed) -> DraftModelState:
        live, start = rows.committed > 0, rows.positions[:, 0]
        row = jnp.arange(rows.ids.shape[1] + 1, dtype=jnp.int32)[None, :]
        ids = jnp.where(row == rows.committed[:, None], rows.anchor[:, None], jnp.pad(rows.ids, ((0, 0), (0, 1))))
        count = jnp.where(live, rows.committed + 1, 0)
        if state.drafted:
            # Of the rows that stayed only the last may be missing: two rows do, where there are K + 2.
            last = jnp.maximum(rows.committed - 1, 0)
            ids = jnp.take_along_axis(ids, last[:, None] + row[:, :2], axis=1)
            start, count = start + last, jnp.minimum(count, 2)
        out, cache = self.model(Rows(ids, start, count, rows.slots), state.cache, wanted="last", attention=rows.draft_attention)
        assert cache is not None
        slots = jnp.where(live, rows.slots, cache.slots)
        return DraftModelState(cache, state.hidden.at[slots].set(out.hidden[:, 0], mode="drop"))

    def draft(self, state: DraftModelState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, DraftModelState]:
        hidden = jnp.take(state.hidden, target.slots, axis=0, mode="clip")[:, None]
        cache: PagedKV | None = state.cache
        # A full table does not wrap: rows past its end would overwrite the sequence's beginning.
        end = cache.tables[FULL].shape[1] * paged.page_size_of(cache)
        steps = []
        for k in range(1, num_draft_tokens + 1):
            at = target.length + k
            logits = self.model.unembed(hidden, target.draft_attention)
            logits = over_vocabulary(logits, self.model.shard, target.model.config.vocab_size)
            if sampling.by_temperature_alone:
                token = choose_by_head_of(self.model, hidden, at[:, None], sampling, self.model.head[1], target.draft_attention)
            else:
                token, logits, sampling = draw(logits, at[:, None], sampling)
            steps.append((token, logits, None))
            if k < num_draft_tokens:
                count = ((target.slots < state.hidden.shape[0]) & (at < end)).astype(jnp.int32)
                out, cache = self.model(Rows(token, at, count, target.slots), cache, attention=target.draft_attention)
                hidden = out.hidden
        assert cache is not None
        after = dataclasses.replace(state, cache=cache, drafted=num_draft_tokens > 0)
        return Drafts.joined(steps, target.slots.shape[0]), after

    def bytes_read(self, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
        """A pass for each draft."""
        model = self.model
        kv = traffic.visible_kv((spec for spec in model.config.layers if spec.owns_kv), model.dtype, context)
        return num_draft_tokens * model.weights_read(batch), num_draft_tokens * batch * kv

    def guesses(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        own, _ = self.model(whole_rows(ids), None, attention=XLA)
        for k in range(1, steps + 1):
            yield Guess(self.model.unembed(pick(own.hidden, at + k)))

    def fresh(self, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray, seed: int) -> DraftModel:
        return dataclasses.replace(self, model=family_of(self.model.config).fresh(self.model))


def bind(config: TargetConfig, target: TargetConfig) -> TargetConfig:
    """The draft model's config, if it can guess for this target. Raises ValueError, naming both numbers, if it cannot."""
    if config.vocab_size > target.vocab_size or (config.vocab_size < target.vocab_size and family_of(config) is not family_of(target)):
        raise ValueError(
            f"the draft model has vocab_size {config.vocab_size}, the target {target.vocab_size}; expected as many, or in a model of the "
            "target's family at most as many"
        )
    return config


def abstract(config: TargetConfig, dtype: Any = jnp.bfloat16) -> DraftModel:
    """The draft model as a tree of ShapeDtypeStructs."""
    return DraftModel(family_of(config).abstract(config, dtype))


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: TargetConfig, dtype: Any) -> DraftModel:
    """The draft model that a target's config.json tells of, as a tree of ShapeDtypeStructs."""
    return abstract(family_named(config.get("model_type")).read(config), dtype)


def default_config(raw: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The config.json of a fresh draft model. raw: the target's."""
    return family_of(target).draft_config(raw, target)


KIND = Kind(
    name="draft-model",
    config_names=MODEL_TYPES,
    made=DraftModel,
    from_checkpoint=from_checkpoint,
    objective=Objective(steps=4, decay=1.0, hard=1.0),
    default_config=default_config,
)
