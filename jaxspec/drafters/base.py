"""What a drafter is: an immutable pytree of weights with three pure methods over a state of its own.

A new kind of drafter is one file: a class like `NoDraft`, whose members `Drafter` lists, and a `Kind`, with which `registry.register`
makes it known to loading, benchmarks and training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.checks import integer
from jaxspec.drafters.kind import kind_without_weights
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.paged_kv import PagedKV
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, choose_by_head
from jaxspec.trees import nbytes

NUM_DRAFT_TOKENS = 4  # of a drafter that names no number


@struct.dataclass
class Observed:
    """What the target just computed for B slots; the first `committed` of T rows stay, the rest were rejected or are padding.

    model: the target, for its embeddings. slots: [B] int32, ids >= slots stand for no sequence. ids, positions: [B, T] int32.
    hidden: [B, H], after the final norm, at the last committed row. taps: [B, T, H] each, the drafter's `taps`. committed: [B] int32,
    0 leaves the slot alone. anchor: [B] int32, the token after the last committed row: the newest choice, or the next prompt token
    in the middle of a prompt. draft_attention: as in `Target`. last: [B] bool, whether these are the last of the slot's new rows; None
    where each slot is there once. If it is there several times, the parts are of one prompt. Where it is False more rows follow, here or in
    a later call, and `hidden` may be anything.
    """

    model: TargetModel
    slots: jax.Array
    ids: jax.Array
    positions: jax.Array
    hidden: jax.Array
    taps: tuple[jax.Array, ...]
    committed: jax.Array
    anchor: jax.Array
    draft_attention: str = struct.field(pytree_node=False, default="auto")
    last: jax.Array | None = None


@struct.dataclass
class Target:
    """The target as a drafter sees it, for B slots. anchor: [B] int32, the newest token, at position `length`, whose K and V do not
    exist yet. length: [B] int32, the cache holds positions 0 .. length - 1.

    attention: the implementation that serves the target's attention. draft_attention: the one asked for the drafter's, "auto" where
    none was: then a drafter that reads the target's cache takes `attention`, and any other chooses by its own needs."""

    model: TargetModel
    cache: PagedKV
    slots: jax.Array
    anchor: jax.Array
    length: jax.Array
    attention: str = struct.field(pytree_node=False, default="auto")
    draft_attention: str = struct.field(pytree_node=False, default="auto")


@struct.dataclass
class Drafts:
    """Guessed tokens. tokens: [B, K] int32; ids that the vocabulary does not have are rejected. logits: [B, K, C] float32, what each was
    chosen from, before temperature, as `sampling.draw` returns them; None if a guess was made in another way (a lookup): the rules
    "standard" and "block" take them for what they say. ids: [B, K, C] int32, the candidates' token ids; None if candidate i is token i.
    confidence: [B, K] float32, the probability that each is accepted if those before it are, by which rounds choose what to verify; None
    where the drafter has no opinion.

    A round that does not use the logits or the confidence costs nothing for them: they are never computed.
    """

    tokens: jax.Array
    logits: jax.Array | None = None
    ids: jax.Array | None = None
    confidence: jax.Array | None = None

    @classmethod
    def joined(cls, steps: Sequence[tuple[jax.Array, jax.Array | None, jax.Array | None]], batch: int) -> Drafts:
        """Drafts made one by one. steps: of each its token [B, 1], logits [B, 1, C] and ids [B, 1, C]; none at all give K = 0."""
        if not steps:
            return cls(jnp.zeros((batch, 0), jnp.int32))
        tokens, logits, ids = (None if part[0] is None else jnp.concatenate(part, axis=1) for part in zip(*steps, strict=True))
        assert tokens is not None
        return cls(tokens, logits, ids)


class Drafter(Protocol):
    """taps: indices of the target's hidden states that `observe` needs.

    `init` raises ValueError for more drafts than the drafter can make. All other members are optional.

    What it was made for:

    - `bind(target: TargetConfig)` gives the drafter as it is used with that target, and raises ValueError, naming what was found and what
      was expected, if it does not fit.
    - `num_draft_tokens`: drafts a round where nobody asks for a number; None or no such member for 4, 0 for a drafter that never drafts.
    - `draft_vocab_size`: how many tokens it can guess, which `jaxspec info` tells where the target has more. None or no such member for
      all.
    - `readings`: where the config leaves open how the checkpoint is read, what either reading is called, the first being the one that is
      used as it is; else (). `read_as(which)`, an int32 scalar, is the drafter by that reading: both have the same shapes, and keep the
      same of a sequence. An LLM tries them: see `engine.trials`. `decided(config)` gives the drafter as its checkpoint holds it and the
      config.json with the reading's key.
    - `draft_tree(state, target, sampling, tree)` guesses the nodes of a `DraftTree`, as `draft` guesses tokens: Drafts whose tokens are
      [B, N], in the tree's order, and the new state. A node at depth d is chosen at position length + d, as `sampling.best` ranks its
      parent's candidates; `branching.Branching` does it for the nodes of a depth. Without it the drafter serves chains alone.
    - `watched`: False if hardly any accepted draft is no sign of a mistake; see `engine.acceptance_watch`.
    - `takes_parts`: True if `observe` may be told of a prompt's rows in several parts at a time, each as an entry of its own with `last`
      set. It keeps the same of a row whatever comes before it, or stores all rows' K and V before it attends to them. Then calls for
      prompts that fit a window have fewer idle rows.
    - `abstains`: True if `draft` may guess fewer tokens than it is asked for, with ids that the vocabulary does not have, such as -1,
      in place of the rest. Then stats count the guesses before the first of these, and otherwise all K.

    Loading and saving:

    - `layouts(path, shapes)`: how a checkpoint holds the leaf at a path, as `checkpoint.layout.layouts` does for all others.
    - `unread`: beginnings of a checkpoint's keys that nothing reads.
    - `checkpoint_field`: name of the field that a checkpoint holds, where it is not the whole drafter; `key_prefixes`: what keys may have
      before the paths in it; the first is written where config.json has a `text_config`, the last elsewhere.
    - `unquantised`: patterns of the names of modules, as a checkpoint has them, that are never quantised: tables that rows are read of, and
      products that no kernel makes of a packed matrix. A drafter without this member has float weights alone.
    - `check_weights(folder)` raises ValueError for weights that can be no such drafter's, once they are loaded.

    Several devices:

    - `partitions`: rows of (pattern of a path, PartitionSpec), which say where weights lie on a mesh; None or no such member for a
      drafter that lies whole on every device. What its modules say then: see `model.split`.

    Benchmarks:

    - `bytes_read(target, *, batch, num_draft_tokens, context)`: bytes of weights, and of K and V, that all passes of a round read; see
      `bytes_read` for the default.

    Training, of a drafter whose `Kind` has an objective:

    - `guesses(target, out, ids, at, steps)` yields a `training.Guess` for each of the draft steps 1 .. steps. out: Hidden, of the target
      for all rows, with the drafter's taps. ids: [B, T] int32. at: [B, A] int32, the places P: see `training`. Rows past the text's
      end read its last token: whoever uses them leaves those out.
    - `fresh(table, norm, tokens, seed)` gives a drafter with random weights as training begins with it. table, norm: the target's
      head [V, H] and last norm [H], float32 NumPy. tokens: [...] int32, what it will be trained on.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> Any:
        """A state for this many slots of up to max_len positions and at most num_draft_tokens drafts a round: any pytree whose
        arrays have a leading slot axis, or one of length 1 for what the slots of a data shard share, or are a PagedKV."""
        ...

    def observe(self, state: Any, rows: Observed) -> Any:
        """Takes in rows that the target computed."""
        ...

    def draft(self, state: Any, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, Any]:
        """Guesses the tokens at positions length + 1 .. length + K, and gives the new state. K is what a round asks for, from 1 to what
        `init` was told; a round without drafts does not ask. Guesses are chosen at those positions with `sampling.draw`, or with
        `sampling.choose`, which knows nothing of structured outputs. The new state is kept for every slot, those of no running sequence
        too; what of the guesses became text, `observe` tells."""
        ...


@struct.dataclass
class NoDraft:
    """Drafts nothing: with it the same loop decodes one token a step."""

    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())
    num_draft_tokens: int = struct.field(pytree_node=False, default=0)

    watched: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = True

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> tuple[()]:
        return ()

    def observe(self, state: tuple[()], rows: Observed) -> tuple[()]:
        return state

    def draft(self, state: tuple[()], target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, tuple[()]]:
        # Ids that no target chooses: with num_draft_tokens above 0 every draft is rejected.
        return Drafts(jnp.full((target.slots.shape[0], num_draft_tokens), -1, jnp.int32)), state


def fitted(drafter: Any, target: TargetConfig) -> Any:
    """The drafter, weights or an abstract tree, bound to its target. Raises ValueError, naming both numbers, if it does not fit."""
    bind = getattr(drafter, "bind", None)
    drafter = drafter if bind is None else bind(target)
    depth = target.num_hidden_layers
    if any(not 0 <= i <= depth for i in drafter.taps):
        raise ValueError(f"the drafter reads hidden states {list(drafter.taps)}; this target has 0 .. {depth}")
    return drafter


def num_draft_tokens_of(drafter: Any) -> int:
    """Drafts a round where nobody asked for a number: what the drafter says, else 4."""
    named = getattr(drafter, "num_draft_tokens", None)
    return NUM_DRAFT_TOKENS if named is None else integer(f"num_draft_tokens of the drafter {type(drafter).__name__}", named, 0)


def check_tree(drafter: Any, tree: DraftTree, target: TargetConfig) -> None:
    """Raises ValueError for a drafter that drafts no trees, and for a tree deeper than a target's windows, of whose rows one could not see
    all of the others before it."""
    if not hasattr(drafter, "draft_tree"):
        raise ValueError(f"the drafter {type(drafter).__name__} drafts one token after the other and no tree; expected no tree")
    window = min((spec.window for spec in target.layers if spec.window is not None), default=None)
    if window is not None and tree.depth >= window:
        raise ValueError(f"the tree is {tree.depth} deep, the target has a window of {window} tokens; expected at most {window - 1}")


def drafted(drafter: Any, state: Any, target: Target, sampling: Sampling, asked: int | DraftTree) -> tuple[Drafts, Any]:
    """What the drafter guesses: a chain of so many tokens, or a tree. See `Drafter.draft`."""
    return (drafter.draft_tree if isinstance(asked, DraftTree) else drafter.draft)(state, target, sampling, asked)


def bytes_read(drafter: Any, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
    """Bytes of weights, and of K and V, that all passes of a round read: what the drafter says, else all weights once for each draft.

    drafter, target: weights or their shapes. batch: sequences, of `context` cached positions each."""
    if not num_draft_tokens:
        return 0, 0
    said = getattr(drafter, "bytes_read", None)
    if said is None:
        return num_draft_tokens * nbytes(drafter), 0
    return said(target, batch=batch, num_draft_tokens=num_draft_tokens, context=context)


KIND = kind_without_weights("none", NoDraft)


def choose_by_head_of(
    model: TargetModel, hidden: jax.Array, positions: jax.Array, sampling: Sampling, softcap: float | None, implementation: str
) -> jax.Array:
    """Drafts at `positions` by a target's head, where `sampling.by_temperature_alone`: [B, T] int32. If logits were computed for them too,
    XLA drops those, and the head is read once.

    hidden: [B, T, H]. positions: [B, T] int32. softcap: of the logits, or None. implementation: see `pallas_kernels.lm_head`."""
    settings = {"softcap": softcap, "guide": model.head_guide, "implementation": implementation}
    own = dataclasses.replace(sampling, shard=model.shard)
    return choose_by_head(hidden.astype(model.dtype), model.head[0], positions, own, **settings)[0]
