"""Which slot holds what, as the host knows it: running sequences, and idle slots whose rows may serve prompts that begin alike."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from jaxspec.engine.request import Request


@dataclasses.dataclass(eq=False)
class Kept:
    """What an idle slot holds. tokens: [n] int32, of which the first n - 1 are computed and the drafter has seen the last one. over: the
    slot may be continued in place; else it is a snapshot, to be copied. used: when it served last. sharing: the requests with a slot
    that share its pages."""

    tokens: np.ndarray
    over: bool
    used: int
    sharing: set[Request] = dataclasses.field(default_factory=set)

    @property
    def needed(self) -> bool:
        """Whether running sequences share its pages, so that few would come free with it."""
        return bool(self.sharing)


class Slots:
    """Every slot holds a Request, a Kept, nothing, or a sequence that has ended and whose pages are still to be released (ENDED).

    One assignment is all that a slot's change takes, so that an interrupt finds every slot in one of these.
    """

    ENDED = object()

    def __init__(self, count: int):
        self._holds: list[object] = [None] * count
        self._clock = itertools.count()

    @property
    def running(self) -> list[Request]:
        """Oldest first."""
        return sorted((held for held in self._holds if isinstance(held, Request)), key=lambda request: request.order)

    @property
    def ended(self) -> list[int]:
        return [slot for slot, held in enumerate(self._holds) if held is self.ENDED]

    @property
    def kept(self) -> dict[int, Kept]:
        """The one that served longest ago first."""
        found = {slot: held for slot, held in enumerate(self._holds) if isinstance(held, Kept)}
        return dict(sorted(found.items(), key=lambda item: item[1].used))

    def find(self, tokens: np.ndarray) -> tuple[int, int]:
        """(slot, rows) of the kept sequence that has computed most of these tokens, the last one excepted; (-1, 0) if there is none."""
        best = (-1, 0)
        for slot, kept in enumerate(self._holds):
            if isinstance(kept, Kept) and best[1] < (size := len(kept.tokens)) - 1 < len(tokens):
                if (kept.tokens == tokens[:size]).all():
                    best = slot, size - 1
        return best

    def idle(self, but: Collection[int] = ()) -> int:
        """A slot that can be had: an empty one, one that has ended, or the kept one that served longest ago; -1 if there is none."""
        empty = (slot for slot, held in enumerate(self._holds) if held is None)
        return next(itertools.chain(empty, self.ended, (slot for slot in self.kept if slot not in but)), -1)

    def serve(self, slot: int, request: Request) -> Kept:
        """The kept sequence of a slot, which serves a request now."""
        kept = self._holds[slot]
        assert isinstance(kept, Kept)
        kept.used = next(self._clock)
        kept.sharing.add(request)
        return kept

    def put(self, slot: int, request: Request) -> None:
        assert slot >= 0, "there is no slot for this request"
        self._holds[slot] = request
        request.slot = slot

    def keep(self, slot: int, tokens: np.ndarray, by: Request | None = None) -> None:
        """by: whose prompt it is, where it is a snapshot; else the slot may be continued."""
        self._holds[slot] = Kept(tokens, by is None, next(self._clock), set() if by is None else {by})

    def end(self, slots: Iterable[int]) -> None:
        """These have ended; those that hold nothing stay so."""
        for slot in slots:
            if self._holds[slot] is not None:
                self._holds[slot] = self.ENDED

    def released(self, slots: Sequence[int]) -> None:
        """The pages of these are released, unless a sequence has been put into them."""
        for slot in slots:
            if self._holds[slot] is self.ENDED:
                self._holds[slot] = None

    def clear(self) -> None:
        """All is lost."""
        running = self.running
        self._holds[:] = [None] * len(self._holds)
        for request in running:
            request.lose()

    def take_from(self, requests: Collection[Request]) -> None:
        """Ends whatever slots hold these requests."""
        ours = set(map(id, requests))
        self.end(slot for slot, held in enumerate(self._holds) if id(held) in ours)
        for held in self._holds:
            if isinstance(held, Kept):
                held.sharing.difference_update(requests)
        for request in requests:
            request.lose()


def boundary(tokens: np.ndarray, rows: int, others: Iterable[np.ndarray], least: int) -> int:
    """The row at which a snapshot of a prompt saves most of the work for others, 0 if there is none that saves `least` rows.

    rows: how many are computed already. A snapshot at row b serves the others that have its first b + 1 tokens.
    """
    begin = tokens[: rows + least + 1].tobytes()  # what the others must begin with; most do not, and are done with at once
    alike = [other for other in others if other[: rows + least + 1].tobytes() == begin] if rows + least < len(tokens) else []
    ends = sorted((common(tokens, other) - 1 for other in alike), reverse=True)
    return max((((end - rows) * (i + 1), end) for i, end in enumerate(ends)), default=(0, 0))[1]


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    size = min(len(a), len(b))
    same = a[:size] == b[:size]
    return size if same.all() else int(same.argmin())
