"""Which program the next call takes, and which rows of prompts it computes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jaxspec.engine.buckets import TREE_SEQUENCES, Buckets, smallest
from jaxspec.engine.call import Call
from jaxspec.engine.inserts import PLACE, TOGETHER, Insert
from jaxspec.engine.program_kinds import Admit, DecodeRounds, FillMasks, Fork, PlaceStates, Prefill, Program, Score
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import Request
from jaxspec.engine.round_shape import Adaptive, RoundShape, round_shapes
from jaxspec.sampling.choice import Needs

AnyProgram = TypeVar("AnyProgram", bound=Program)
# Rounds, or calls that compute prompts, that a larger program runs in place of one that is not compiled, or that programs of fewer
# sequences run in place of one for all. To compile a loop takes as long as some hundreds of its rounds, or thousands for a small model. It
# is no time, so that the same calls always take the same programs.
STANDS_IN = 256


class NextRows(NamedTuple):
    """What a call for prompts computes of one of them."""

    request: Request
    computed: int  # rows that are computed before
    goal: int  # up to which it is to be computed before the host has something to do, or an insert begins
    rows: int  # that the call computes
    inserts: Sequence[Insert] = ()  # among them

    @property
    def room(self) -> int:
        """For how many rows of inserts its call has room."""
        return self.inserts[0].room if self.inserts else 0

    @property
    def places(self) -> list[int]:
        """What its call is told of the inserts: see `program_kinds.prefill`. Nothing where there are none."""
        found = [int(number) for insert in self.inserts for number in insert.place]
        return [*found, *[0] * (PLACE * TOGETHER - len(found))] if found else []


class ProgramChoice:
    """Chooses the programs of a runner's calls, by what there is to compute and by what is compiled.

    programs: the runner's. buckets: the sizes of its calls. must_draft: says whether all rounds must have drafts.
    """

    def __init__(self, programs: Programs, buckets: Buckets, must_draft: Callable[[], bool]):
        self._programs, self._settings, self._buckets, self._must_draft = programs, programs.settings, buckets, must_draft
        self.adaptive: Adaptive | None = None  # chooses the shape of rounds; None where all guess num_draft_tokens and verify them
        self._stood_in = collections.Counter[Program]()  # the work that other programs have done in place of these
        self._within = buckets.within(programs.target, programs.drafter)

    def all_for(self, needs: Needs, scores: Collection[int] = (), adaptive: bool = False) -> list[Program]:
        """All programs that requests with these needs use. scores: numbers of likely tokens, of texts that are scored. adaptive: whether
        calls choose the shape of rounds."""
        most, buckets = self._settings.num_draft_tokens, self._buckets
        shapes = {size: round_shapes(size, most) if adaptive else (RoundShape(most),) for size in self.chain_sizes}
        tree = self._tree
        return [
            *(DecodeRounds(size, needs, *tree) for size in buckets.trees if tree is not None),
            *(DecodeRounds(size, needs, *shape) for size, some in shapes.items() for shape in some),
            *(Prefill(size, chunk, needs) for size, chunk in buckets.prefill),
            *(Prefill(*bucket, needs, rows) for rows in self._settings.insert_rows for bucket in buckets.inserts(rows)),
            *(Prefill(*bucket, needs, ends=False) for bucket in self._within),
            *(Admit(size) for size in buckets.admit),
            *(Fork(size) for size in buckets.fork),
            *((PlaceStates(), FillMasks()) if needs.structured else ()),
            *(Score(*buckets.prefill[0], count) for count in scores),
        ]

    @property
    def chain_sizes(self) -> list[int]:
        """The sizes of decode calls whose rounds guess chains: all, without trees."""
        return [size for size in self._buckets.decode if size > TREE_SEQUENCES or self._tree is None]

    @property
    def _tree(self) -> RoundShape | None:
        """The shape of rounds of few sequences, if it is a tree."""
        tree = self._settings.tree
        return None if tree is None else RoundShape(tree.depth, tree=tree)

    def prepare(self, requests: Sequence[Request], sequences: int, needs: Needs) -> None:
        """Compiles what the next call for prompts of the requests takes and the rounds of so many sequences after it, both at a time."""
        programs: list[Program] = [self.prompts(requests, needs)[0]]
        if sequences:
            programs.insert(0, self.rounds(sequences, needs))  # which takes longer
        self._programs.make_ready(programs)

    def used(self, requests: Sequence[Request], needs: Needs, behind: Call | None = None) -> float:
        """The share of the next prefill call's rows that belong to prompts of these requests, 0 .. 1. behind: as for `prompts`."""
        program, some = self.prompts(requests, needs, behind)
        return sum(each.rows for each in some) / (program.size * program.chunk)

    def prompts(
        self, requests: Sequence[Request], needs: Needs, behind: Call | None = None, work: int = 0
    ) -> tuple[Prefill, list[NextRows]]:
        """The program of the next call for prompts, and what it computes of some of the requests; the first ones come first. behind: a call
        before it that computes such rows and has not been read. work: see `_at_hand`.

        Prompts whose next rows have inserts among them have calls of their own. These come first, so that text of several prompts is
        computed together. But a prompt of text would wait as long as inserts come, so those of prompts that got their slots much later than
        the oldest prompt come after it."""
        buckets = self._buckets
        under_way = {} if behind is None else behind.under_way
        computed = [r.computed + under_way.get(r, 0) for r in requests]
        if with_insert := self._with_inserts(requests, computed):
            if with_insert[0].request.order - requests[0].order < self._settings.max_slots:
                rows = with_insert[0].room
                sizes = buckets.inserts(rows)
                some = [each for each in with_insert if each.room == rows][: sizes[-1][0]]
                bucket = next((size, chunk) for size, chunk in sizes if size >= len(some))
                return Prefill(*bucket, needs, rows), some
            later = [each.request for each in with_insert]
            requests, computed = zip(*((r, n) for r, n in zip(requests, computed, strict=True) if r not in later), strict=True)
        goals = [r.next_stop(rows + 1) for r, rows in zip(requests, computed, strict=True)]
        left = [goal - rows for goal, rows in zip(goals, computed, strict=True)]
        best, *others = buckets.prefill_by_worth(left, computed)
        least = sum(buckets.shared_out(left, computed, *best))
        larger = [bucket for bucket in others if sum(buckets.shared_out(left, computed, *bucket)) >= least]
        program = self._at_hand(Prefill(*best, needs), (Prefill(*bucket, needs) for bucket in larger), work)
        rows = buckets.shared_out(left, computed, program.size, program.chunk)
        some = [NextRows(*each) for each in zip(requests, computed, goals, rows, strict=False)]
        if (program.size, program.chunk) in self._within and all(each.computed + each.rows < each.request.goal for each in some):
            within = dataclasses.replace(program, ends=False)
            program = within if self._programs.at_hand(within) else program  # worth no compilation while others wait
        return program, some

    def _with_inserts(self, requests: Sequence[Request], computed: Sequence[int]) -> list[NextRows]:
        """What calls with inserts compute of those that have one among their next rows."""
        found = list[NextRows]()
        for request, rows in zip(requests, computed, strict=True):
            if inserts := request.inserts_within(rows, self._chunk):
                goal = request.next_stop(inserts[-1].end, inserts)
                found.append(NextRows(request, rows, goal, min(goal - rows, self._chunk(inserts[0].room)), inserts))
        return found

    def _chunk(self, room: int) -> int:
        """How many rows of each sequence a call computes that has room for so many rows of inserts."""
        return self._buckets.inserts(room)[0][1]

    def rounds(self, sequences: int, needs: Needs, shape: RoundShape | None = None, work: int = 0) -> DecodeRounds:
        """What runs rounds of so many sequences. shape: of each round, with at most the settings' number of drafts; by default a tree where
        the settings have one and there are few sequences, else what `adaptive` chooses among the compiled shapes, or the settings' number
        without it. work: see `_at_hand`."""
        sizes, tree = self._buckets.decode, self._tree
        if shape is None and tree is not None and sequences <= TREE_SEQUENCES:
            sizes, shape = self._buckets.trees, tree
        size = smallest(sizes, sequences)
        if shape is None:
            shape = self._shape(size, sequences, needs)
        larger = (DecodeRounds(other, needs, *shape) for other in sizes if other > size)
        return self._at_hand(DecodeRounds(size, needs, *shape), larger, work)

    def _shape(self, size: int, sequences: int, needs: Needs) -> RoundShape:
        if self.adaptive is None or size not in self.adaptive.sizes:
            return RoundShape(self._settings.num_draft_tokens)
        compiled = [shape for shape in self.adaptive.shapes(size) if DecodeRounds(size, needs, *shape) in self._programs.compiled]
        if self._must_draft():
            compiled = [shape for shape in compiled if shape.num_draft_tokens] or compiled
        return self.adaptive.choose(size, sequences, compiled)

    def _at_hand(self, wanted: AnyProgram, larger: Iterable[AnyProgram], work: int) -> AnyProgram:
        """The program that is wanted, or a larger one that is ready in its place, until it has done so much work there that compiling would
        have been worth it. work: how much it does now, in rounds, or in calls that compute prompts."""
        if self._stood_in[wanted] < STANDS_IN and not self._programs.at_hand(wanted):
            for program in filter(self._programs.at_hand, larger):
                self._stood_in[wanted] += work
                return program
        return wanted

    def worth_running(self, sequences: int, needs: Needs, work: int) -> bool:
        """Whether the program that runs rounds of so many sequences need not be compiled, or that is worth it. work: the rounds that others
        run in its place otherwise."""
        program = self.rounds(sequences, needs)
        if self._programs.at_hand(program):
            return True
        self._stood_in[program] += work
        return self._stood_in[program] >= STANDS_IN

    def see(self, accepted: np.ndarray, verified: np.ndarray, call: Call) -> None:
        """Takes in rounds of a call. accepted, verified: [N] int, the drafts that each round accepted, and those that it verified."""
        if self.adaptive is not None and call.shape.tree is None:  # what a tree accepts says nothing of a chain
            self.adaptive.see(accepted, verified, call.size, call.shape, len(call.requests))
