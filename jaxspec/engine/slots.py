"""Which slot holds what, as the host knows it: running sequences, and sequences that are kept for prompts that begin like them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from jaxspec.engine.request import Request


@dataclasses.dataclass(eq=False)
class KeptSequence:
    """A sequence that an idle slot holds, for later prompts that begin with it."""

    tokens: np.ndarray  # [n] int32; the first n - 1 are computed, and the drafter has seen the last one
    over: bool  # whether a prompt may continue it in its slot; else it is a snapshot, to be copied
    used: int  # when it last served a prompt, counted by the clock of `Slots`
    sharing: set[Request] = dataclasses.field(default_factory=set)  # requests with a slot that share its pages
    writer: object = None  # as `Request.writer`

    @property
    def needed(self) -> bool:
        """Whether running sequences share its pages, so that few would come free with it."""
        return bool(self.sharing)


class Slots:
    """What each slot holds. A slot changes by one assignment, so that an interrupt always finds it in one of four conditions: it holds a
    Request, a KeptSequence, nothing, or ENDED."""

    ENDED = object()  # a sequence that has ended and whose pages are still to be released

    def __init__(self, count: int):
        self._holds: list[object] = [None] * count
        self._clock = itertools.count()  # counts how often kept sequences were made or served
        self.writer: object = None  # that of the next call; if there is one, kept sequences of others serve no prompt

    @property
    def running(self) -> list[Request]:
        """Oldest first."""
        return sorted((held for held in self._holds if isinstance(held, Request)), key=lambda request: request.order)

    @property
    def ended(self) -> list[int]:
        return [slot for slot, held in enumerate(self._holds) if held is self.ENDED]

    @property
    def kept(self) -> dict[int, KeptSequence]:
        """The one that served longest ago first."""
        found = {slot: held for slot, held in enumerate(self._holds) if isinstance(held, KeptSequence)}
        return dict(sorted(found.items(), key=lambda item: item[1].used))

    def find(self, tokens: np.ndarray) -> tuple[int, int]:
        """(slot, rows) of the kept sequence that these tokens begin with, the longest if there are several; (-1, 0) if there is none. rows:
        how many of its rows are computed, fewer than there are tokens."""
        best = (-1, 0)
        for slot, kept in enumerate(self._holds):
            if isinstance(kept, KeptSequence) and best[1] < (size := len(kept.tokens)) - 1 < len(tokens):
                if self.writer in (None, kept.writer) and (kept.tokens == tokens[:size]).all():
                    best = slot, size - 1
        return best

    def idle(self, but: Collection[int] = ()) -> int:
        """A slot for another sequence: an empty one, else one that has ended, else the one whose kept sequence served longest ago; -1 if
        there is none. but: slots whose kept sequences stay."""
        empty = (slot for slot, held in enumerate(self._holds) if held is None)
        return next(itertools.chain(empty, self.ended, (slot for slot in self.kept if slot not in but)), -1)

    def serve(self, slot: int, request: Request) -> KeptSequence:
        """Notes that a slot's kept sequence serves a request now, and returns that sequence."""
        kept = self._holds[slot]
        assert isinstance(kept, KeptSequence)
        kept.used = next(self._clock)
        kept.sharing.add(request)
        return kept

    def put(self, slot: int, request: Request) -> None:
        assert slot >= 0, "there is no slot for this request"
        self._holds[slot] = request
        request.slot = slot

    def keep(self, slot: int, tokens: np.ndarray, by: Request | None = None, writer: object = None) -> None:
        """Keeps a sequence in a slot. by: the request whose prompt it is, if it is a snapshot; None if the slot may be continued."""
        self._holds[slot] = KeptSequence(tokens, by is None, next(self._clock), set() if by is None else {by}, writer)

    def end(self, slots: Iterable[int]) -> None:
        """Marks slots as ended."""
        for slot in slots:
            self._holds[slot] = self.ENDED

    def released(self, slots: Sequence[int]) -> None:
        """Marks slots as empty, whose pages are released now, except those into which a sequence was put meanwhile."""
        for slot in slots:
            if self._holds[slot] is self.ENDED:
                self._holds[slot] = None

    def clear(self) -> None:
        """Empties all slots; the running requests lose theirs."""
        running = self.running
        self._holds[:] = [None] * len(self._holds)
        for request in running:
            request.lose()

    def take_from(self, requests: Collection[Request]) -> None:
        """Marks the slots that hold these requests as ended; the requests lose them."""
        ours = set(map(id, requests))
        self.end(slot for slot, held in enumerate(self._holds) if id(held) in ours)
        for held in self._holds:
            if isinstance(held, KeptSequence):
                held.sharing.difference_update(requests)
        for request in requests:
            request.lose()


def boundary(tokens: np.ndarray, rows: int, others: Iterable[np.ndarray], least: int) -> int:
    """The row at which a snapshot of a prompt saves most of the work for others, 0 if there is none that saves `least` rows.

    rows: how many are computed already. A snapshot at row b serves the others that have its first b + 1 tokens.
    """
    begin = tokens[: rows + least + 1].tobytes()  # what the others must begin with; most do not, and this rules them out quickly
    alike = [other for other in others if other[: rows + least + 1].tobytes() == begin] if rows + least < len(tokens) else []
    ends = sorted((common(tokens, other) - 1 for other in alike), reverse=True)
    return max((((end - rows) * (i + 1), end) for i, end in enumerate(ends)), default=(0, 0))[1]


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    size = min(len(a), len(b))
    same = a[:size] == b[:size]
    return size if same.all() else int(same.argmin())
