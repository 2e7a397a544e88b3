"""The pool of automata that a device holds for structured texts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.program_kinds import FillMasks, PlaceStates
from jaxspec.engine.programs import Programs
from jaxspec.engine.structures import Built, Structure, Structures
from jaxspec.sampling.automata import BLOCK, FILLED, FREE, MAY_THINK, SAME, THINKING

BESIDE = 8  # calls that compute allowed tokens, of FILLED states each, in a step while sequences decode


@dataclasses.dataclass(eq=False)
class Held:
    """A structure that the device holds."""

    ids: np.ndarray  # [S] int32: the pool's numbers of its states
    blocks: list[int]
    rows: list[int]
    used: int  # when it was last asked for
    left: list[tuple[np.ndarray, np.ndarray]]  # (states, rows) whose allowed tokens are still to be computed


class Pool:
    """The automata that a device holds. Those of running requests stay; of the others the one that was used longest ago goes first."""

    def __init__(self, programs: Programs, structures: Structures, running: Callable[[], Collection[Any]]):
        """running: gives the requests that have slots."""
        self._programs, self._structures, self._running = programs, structures, running
        self._held = dict[Structure, Held]()
        self._clock = 0

    @property
    def lost(self) -> bool:
        """Whether the device no longer has what it held, since a call that failed or was interrupted took it along."""
        return bool(self._held) and self._programs.automata is None

    @property
    def bytes_by_label(self) -> dict[str, int]:
        """Bytes of device memory of each structure."""
        found = collections.Counter[str]()
        for structure, held in list(self._held.items()):  # others may compute meanwhile
            words = -(-len(structure.future.result().vocabulary.length) // 32)
            found[structure.label] += len(held.blocks) * BLOCK * (2 * SAME + 2 + 4 + 1) + len(held.rows) * 4 * words
        return dict(found)

    def begin(self) -> None:
        """Makes the pool, if there is none."""
        if self._programs.automata is None:
            self._held.clear()
            self._programs.begin_automata(self._structures.vocabulary, self._structures.blocks, self._structures.rows)

    def clear(self) -> None:
        self._held.clear()

    def offers(self, structure: Structure, older: Sequence[Any], busy: bool) -> bool | None:
        """Whether requests of a structure, which is built, can be admitted now. It is put into the pool if there is room: None says that
        there is none until others end. older: requests that come first: their structures stay. busy: whether there are others, which
        should not wait."""
        self.begin()
        self._clock += 1
        if structure not in self._held:
            needed = {r.structure for r in [*self._running(), *older]}
            built = structure.future.result()
            while not self._fits(built):
                idle = [s for s in self._held if s not in needed]
                if not idle:
                    return None
                # One that is half filled may be another thread's, which would drive this one out in turn. So this one is filled at once.
                busy &= not self._held.pop(min(idle, key=lambda s: self._held[s].used)).left
            self._held[structure] = self._place(built)
        held = self._held[structure]
        held.used = self._clock
        for _ in range(min(BESIDE, len(held.left)) if busy else len(held.left)):
            self._programs.change_automata(FillMasks(), *held.left[0])
            del held.left[0]
        return not held.left

    def states_of(self, structure: Structure, prompt: np.ndarray, output: Sequence[int]) -> tuple[int, int]:
        """(state after the known tokens, state in which the text begins) of a request."""
        built, ids = structure.future.result(), self._held[structure].ids
        vocabulary, automaton = built.vocabulary, built.automaton
        start = automaton.start
        state, at = {False: FREE, True: THINKING, None: MAY_THINK}[vocabulary.begins_in_thought(prompt.tolist())], start
        for token in output:
            if state == THINKING:
                state = FREE if token == vocabulary.closing else THINKING
            elif state == MAY_THINK and token == vocabulary.opening:
                state = THINKING
            else:
                state, at = FREE, automaton.after(vocabulary.bytes_of(token), at) or at
        return state or int(ids[at]), int(ids[start])

    def _fits(self, built: Built) -> bool:
        blocks, rows = self._free()
        return len(blocks) >= built.blocks and len(rows) >= built.rows

    def _free(self) -> tuple[list[int], list[int]]:
        """(blocks, rows) that no automaton has. The first of each never has one."""
        blocks = {block for held in self._held.values() for block in held.blocks}
        rows = {row for held in self._held.values() for row in held.rows}
        every_block, every_row = range(1, self._structures.blocks), range(1, self._structures.rows)
        return [i for i in every_block if i not in blocks], [i for i in every_row if i not in rows]

    def _place(self, built: Built) -> Held:
        """Puts an automaton's states into free blocks."""
        free_blocks, free_rows = self._free()
        blocks, rows = free_blocks[: built.blocks], free_rows[: built.rows]
        count, own = built.automaton.states, np.asarray([0, *rows], np.int32)
        ids = np.zeros(len(blocks) * BLOCK + 1, np.int32)
        ids[1:] = np.concatenate([np.arange(BLOCK) + block * BLOCK for block in blocks])
        for i, block in enumerate(blocks):
            some = np.arange(i * BLOCK + 1, min((i + 1) * BLOCK, count) + 1)
            following = np.zeros((BLOCK, SAME + 1), np.uint16)
            following[:, SAME] = ids[i * BLOCK + 1 : (i + 1) * BLOCK + 1]
            following[: len(some), :SAME] = ids[built.automaton.next[some]]
            row, accepting = np.zeros(BLOCK, np.int32), np.zeros(BLOCK, bool)
            row[: len(some)], accepting[: len(some)] = own[built.alike[some]], built.automaton.accepting[some]
            self._programs.change_automata(PlaceStates(), np.int32(block), following, row, accepting)
        _, first = np.unique(built.alike[1:], return_index=True)
        left = []
        for begin in range(0, len(first), FILLED):
            some = first[begin : begin + FILLED] + 1
            pad = (0, FILLED - len(some))
            states = np.pad(ids[some], pad).astype(np.int32)
            left.append((states, np.pad(own[built.alike[some]], pad, constant_values=self._structures.rows).astype(np.int32)))
        return Held(ids, blocks, rows, self._clock, left)
