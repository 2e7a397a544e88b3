"""Call: one that the device was given and whose report the host has not read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxspec import decode
from jaxspec.engine.request import Request
from jaxspec.engine.round_shape import RoundShape


class Call(NamedTuple):
    """A call that is under way."""

    requests: Sequence[Request | None]  # those it works on; None for one that is not to be told of it
    size: int  # its bucket
    shape: RoundShape  # of its rounds; no drafts where it computes prompts
    report: decode.Report  # what it returns
    known: Sequence[int] = ()  # of how many tokens of each request the host knew when the call was made: the report tells of those after
    rows: Sequence[int] = ()  # of each request's prompt that it computes, unless pages are lacking
    finished: Sequence[Request | None] = ()  # those whose prompts it computes to their ends then
    reaches: bool = True  # whether the host has something to do for one of these prompts then, so that the next call for prompts must wait
    number: int = 0  # its place in the order in which the device runs calls that tell how many pages are free
    variant: str | None = None  # the drafter's variant that guessed, if its rounds count in a trial
    until_ended: int = 0  # its rounds return once so many more have ended, unless this is 0

    @property
    def under_way(self) -> dict[Request | None, int]:
        """How many rows of each request's prompt it computes."""
        return dict(zip(self.requests, self.rows, strict=True))

    def without(self, gone: Collection[Request]) -> Call | None:
        """The call, of which these requests are not told; None if that leaves nobody."""
        told, finished = ([None if r in gone else r for r in some] for some in (self.requests, self.finished))
        return self._replace(requests=told, finished=finished) if any(told) else None
