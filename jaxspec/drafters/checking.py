"""Whether a drafter keeps the protocol of `base.Drafter`, told in words: by shapes alone, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafters.base import Drafts, Observed, Target, drafted, num_draft_tokens_of
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.paged_kv import PagedKV
from jaxspec.model.target import TargetModel
from jaxspec.sampling.choice import Sampling
from jaxspec.trees import leaves_by_path

MEMBERS = ("taps", "init", "observe", "draft")
FAILURES = (TypeError, ValueError, AttributeError, IndexError)
SLOTS, BATCH, MAX_LEN = 3, 2, 64  # of the state that is tried


def check(drafter: Any, target: TargetModel, *, num_draft_tokens: int | None = None, tree: DraftTree | None = None) -> None:
    """Raises TypeError or ValueError, with what was found and what was expected, for a drafter that breaks the protocol.

    drafter: one that is bound to the target (`base.fitted`); of weights or of ShapeDtypeStructs. target: the same. num_draft_tokens: K,
    by default the drafter's own. tree: of drafts, which it is to guess too. `load` calls it; it traces init, draft and observe a few
    times, for 2 sequences.
    """
    check_members(drafter)
    count = num_draft_tokens_of(drafter) if num_draft_tokens is None else num_draft_tokens
    drafter, target = jax.tree.map(_shape, (drafter, target))
    view = _View(drafter, target, count)
    state = view.state()
    view.compare(state, view.observed_by(state), "observe")
    for asked in dict.fromkeys((count, min(count, 1), tree)):  # rounds may ask for fewer than K
        if asked:
            view.compare(state, view.observed_by(view.drafted(state, asked)), "draft, then observe,")


def check_members(drafter: Any) -> None:
    """What `check` says of a drafter before there is a target."""
    name = type(drafter).__name__
    if isinstance(drafter, type):
        raise TypeError(f"drafter is the class {drafter.__name__} itself; expected an object of it")
    missing = [member for member in MEMBERS if not hasattr(drafter, member)]
    if missing:
        raise TypeError(f"drafter is of type {name} without {', '.join(missing)}; expected a checkpoint's name, a Drafter or None")
    if any(leaf is drafter for leaf in jax.tree.leaves(drafter)):
        raise TypeError(
            f"the drafter {name} is a plain class, which no compiled function takes as an argument; expected a pytree: decorate the class "
            "with flax.struct.dataclass"
        )


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype)


class _View:
    """A drafter, and what is put before it, as shapes."""

    def __init__(self, drafter: Any, target: Any, count: int):
        self.drafter, self.target, self.count, self.name = drafter, target, count, type(drafter).__name__

    def call(self, member: str, function: Callable[..., Any], *args: Any) -> Any:
        """The result's shapes."""
        try:
            return jax.eval_shape(function, self.drafter, *args)
        except FAILURES as error:  # JAX's own are kinds of these, made from something other than a text
            kind = next(kind for kind in FAILURES if isinstance(error, kind))
            raise kind(f"{member} of the drafter {self.name} failed where its shapes were checked: {error}") from error

    def state(self) -> Any:
        """The state of SLOTS slots. Raises ValueError as `Drafter.init` says, and for arrays without the axis that it asks for."""
        state = jax.eval_shape(lambda d: d.init(SLOTS, MAX_LEN, self.count), self.drafter)
        parts = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda part: isinstance(part, PagedKV))
        for path, part in parts:
            if not isinstance(part, PagedKV) and (not part.shape or part.shape[0] not in (SLOTS, 1)):
                where = jax.tree_util.keystr(path, simple=True, separator=".") or "the array"
                raise ValueError(
                    f"init of the drafter {self.name} gives a state of which {where} is {list(part.shape)}; expected a leading axis of "
                    f"slots, [{SLOTS}, ...] for {SLOTS} slots, or one of length 1 for what they share"
                )
        return state

    def observed_by(self, state: Any) -> Any:
        """The state after a step's rows."""
        rows, hidden, dtype = self.count + 1, self.target.config.hidden_size, self.target.dtype
        block = Observed(
            model=self.target,
            slots=_int32(BATCH),
            ids=_int32(BATCH, rows),
            positions=_int32(BATCH, rows),
            hidden=_array(dtype, BATCH, hidden),
            taps=tuple(_array(dtype, BATCH, rows, hidden) for _ in self.drafter.taps),
            committed=_int32(BATCH),
            anchor=_int32(BATCH),
            draft_attention="xla",
        )
        return self.call("observe", lambda d, s, rows: d.observe(s, rows), state, block)

    def drafted(self, state: Any, asked: int | DraftTree) -> Any:
        """The state after drafts, which are checked: a chain of so many, or a tree."""
        member, count = ("draft_tree", asked.nodes) if isinstance(asked, DraftTree) else ("draft", asked)
        sizes = {"slots": SLOTS, "max_len": MAX_LEN, "num_draft_tokens": self.count, "dtype": self.target.dtype}
        cache = jax.eval_shape(lambda target: target.init_cache(**sizes), self.target)
        view = Target(self.target, cache, _int32(BATCH), _int32(BATCH), _int32(BATCH), "xla", "xla")
        sampling = Sampling(_array(jnp.uint32, BATCH, 2), _array(jnp.float32, BATCH))
        found = self.call(member, lambda d, s, v, how: drafted(d, s, v, how, asked), state, view, sampling)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Drafts)):
            said = f"a tuple of {', '.join(type(x).__name__ for x in found)}" if isinstance(found, tuple) else _told(found)
            raise TypeError(f"{member} of the drafter {self.name} gives {said}; expected the pair (Drafts, state)")
        self._check_drafts(found[0], member, count)
        return found[1]

    def _check_drafts(self, drafts: Drafts, member: str, count: int) -> None:
        wanted = (BATCH, count)
        dtypes = {"tokens": jnp.int32, "logits": jnp.float32, "ids": jnp.int32, "confidence": jnp.float32}
        for what, dtype in dtypes.items():
            array: Any = getattr(drafts, what)
            if array is None and what != "tokens":
                continue
            shape, of_each = getattr(array, "shape", None), what in ("tokens", "confidence")
            fits = shape is not None and shape[:2] == wanted and len(shape) == (2 if of_each else 3)
            if not fits or getattr(array, "dtype", None) != dtype:
                expected = [*wanted] if of_each else [*wanted, "C"]
                asked = f"K = {count}" if member == "draft" else f"a tree of {count} nodes"
                raise ValueError(
                    f"{member} of the drafter {self.name} gives {what} {_told(array)}; expected {jnp.dtype(dtype).name} "
                    f"[{', '.join(map(str, expected))}] for {BATCH} sequences and {asked}"
                )
        if drafts.logits is not None:
            candidates = self.target.config.vocab_size if drafts.ids is None else drafts.ids.shape[2]
            if drafts.logits.shape[2] != candidates:
                of, found = "the vocabulary has" if drafts.ids is None else "there are ids", drafts.logits.shape[2]
                raise ValueError(f"{member} of the drafter {self.name} gives logits of {found} candidates; expected {candidates}, as {of}")

    def compare(self, before: Any, after: Any, member: str) -> None:
        """Raises ValueError for a state that is not of the structure of init's. member: what gave it."""
        if jax.tree.structure(before) == jax.tree.structure(after) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        ):
            return
        held, found = (leaves_by_path(state) for state in (before, after))
        path = next((path for path in {**held, **found} if _told(held.get(path)) != _told(found.get(path))), None)
        if path is None:
            raise ValueError(
                f"{member} of the drafter {self.name} gives a state of the structure {jax.tree.structure(after)}; expected that of init, "
                f"{jax.tree.structure(before)}"
            )
        raise ValueError(
            f"{member} of the drafter {self.name} gives a state of another structure: {path or 'the array'} is {_told(found.get(path))}, "
            f"expected {_told(held.get(path))} as init gives it"
        )


def _told(leaf: Any) -> str:
    if leaf is None:
        return "missing"
    return f"{leaf.dtype} {list(leaf.shape)}" if hasattr(leaf, "shape") else f"a {type(leaf).__name__}"


def _array(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _int32(*shape: int) -> Any:
    return _array(jnp.int32, *shape)
