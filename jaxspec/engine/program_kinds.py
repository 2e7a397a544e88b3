"""What calls run on a device: functions of weights, the state and more, and for each function a kind of program that is compiled of it."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode
from jaxspec.decode.state import DecodeState
from jaxspec.engine.admission import arrays_of, packed, unpacked
from jaxspec.engine.inserts import PLACE, TOGETHER
from jaxspec.engine.round_shape import RoundShape
from jaxspec.engine.settings import STEPS, Settings
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.rows import Inserted
from jaxspec.model.target import TargetModel
from jaxspec.sampling.automata import BLOCK, FILLED, SAME, fill, place
from jaxspec.sampling.choice import PLAIN, Needs

PREFILL_COLUMNS = 5  # of numbers about each part of a call for prompts, beside those of inserts
ToLower = tuple[Callable[..., Any], Sequence[Any]]  # see `Program.to_lower`


def admit(state: DecodeState, bits: jax.Array, *, like: Any) -> Any:
    ended, slots, requests = unpacked(bits, like)
    state = decode.admit(decode.release(state, ended), slots, requests)
    return state, state.cache.free_count + 0  # a new array: the next call takes the state's own


def fork(target: Any, drafter: Any, automata: None, state: DecodeState, columns: jax.Array) -> Any:
    state = decode.fork(state, *columns.T)
    return state, state.cache.free_count + 0


def prefill(target, drafter, automata, state, columns, *rows, **static) -> Any:
    slots, until, known, offset, after = columns[:, :PREFILL_COLUMNS].T
    begin, count, together = jnp.moveaxis(columns[:, PREFILL_COLUMNS:].reshape(len(columns), -1, PLACE), 2, 0)
    inserted = Inserted(jnp.stack(rows), begin, count, together != 0) if rows else None
    state = decode.prefill(target, drafter, state, slots, until, offset, after, inserted, automata=automata, **static)
    return state, decode.report(state, slots, known, 1, static["round"].needs.logprobs is not None)


def decode_rounds(target, drafter, automata, state, columns, *, width, round) -> Any:
    slots, known, steps, until_ended = columns.T
    state = decode.decode_loop(target, drafter, state, slots, steps[0], until_ended[0], round=round, automata=automata)
    return state, decode.report(state, slots, known, width, round.needs.logprobs is not None, round.tells(drafter))


def score(target, drafter, automata, state, slots, **static) -> Any:
    state, found = decode.score(target, state, slots, **static)
    return state, (found, state.starved | False)


def padding(slots: int, size: int, columns: int) -> np.ndarray:
    """What a program of a state of `slots` slots takes for each slot of a call, of no slot: [size, columns] int32."""
    return np.full((size, columns), slots, np.int32)


class Program(abc.ABC):
    """A program by its static shape; programs that are equal are compiled once. As text, it is what a progress bar shows.

    `size` is a bucket: the length of the list of slot ids that it works on. Shorter lists are padded with an id out of range.
    """

    takes_bare_state: ClassVar[bool] = False  # whether it is a function of a bare state, and of no weights
    loops: ClassVar[bool] = False  # whether it is a loop, which a GPU should record whole
    of_automata: ClassVar[bool] = False  # whether it is a function of the automata, which it returns, and of neither weights nor state

    @property
    def structured(self) -> bool:
        """Whether it reads the automata of structured texts."""
        return getattr(self, "needs", PLAIN).structured

    @abc.abstractmethod
    def to_lower(self, settings: Settings, slots: int, target: TargetModel) -> ToLower:
        """(function, args): what it runs, and arrays of the shapes that the function takes after what `Programs` gives it: target, drafter,
        automata and state, or what the class says in their place.

        settings: of a data shard. slots: of the state. target: only its sizes and dtype count.
        """


@dataclasses.dataclass(frozen=True)
class Admit(Program):
    """Releases slots, then puts requests into slots."""

    size: int  # requests
    takes_bare_state: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"admit {self.size}"

    def to_lower(self, settings: Settings, slots: int, target: TargetModel) -> ToLower:
        requests = arrays_of([], self.size, settings.max_len)
        taken = padding(slots, slots, 1)[:, 0], padding(slots, self.size, 1)[:, 0], requests
        return functools.partial(admit, like=taken), [packed(taken)]


@dataclasses.dataclass(frozen=True)
class Fork(Program):
    """Copies kept sequences into other slots."""

    size: int  # copies

    def __str__(self) -> str:
        return f"fork {self.size}"

    def to_lower(self, settings: Settings, slots: int, target: TargetModel) -> ToLower:
        return fork, [padding(slots, self.size, 3)]


@dataclasses.dataclass(frozen=True)
class Prefill(Program):
    """Computes rows of prompts."""

    size: int  # parts of prompts
    chunk: int  # rows of each
    needs: Needs  # what sampling is compiled for
    insert_rows: int = 0  # of media in each part at most; 0 for text alone
    ends: bool = True  # whether prompts may come to their ends

    def __str__(self) -> str:
        return f"prefill {self.size} {self.chunk}{' with media' if self.insert_rows else ''}{'' if self.ends else ' within'}"

    def to_lower(self, settings: Settings, slots: int, target: TargetModel) -> ToLower:
        function = functools.partial(prefill, chunk=self.chunk, ends=self.ends, round=settings.round(self.needs))
        rows = np.zeros((self.insert_rows, target.config.hidden_size), target.dtype)
        columns = PREFILL_COLUMNS + (PLACE * TOGETHER if self.insert_rows else 0)
        return function, [padding(slots, self.size, columns), *[rows] * (self.size if self.insert_rows else 0)]


@dataclasses.dataclass(frozen=True)
class DecodeRounds(Program):
    """Runs draft/verify rounds."""

    size: int  # sequences
    needs: Needs  # what sampling is compiled for
    num_draft_tokens: int  # tokens that each round guesses, one after the other
    rows: int | None = None  # of the target's pass, see `decode.Round`
    tree: DraftTree | None = None  # see `decode.Round`
    loops: ClassVar[bool] = True

    @property
    def shape(self) -> RoundShape:
        return RoundShape(self.num_draft_tokens, self.rows, self.tree)

    def __str__(self) -> str:
        what = self.num_draft_tokens if self.tree is None else f"tree {self.tree.nodes}"
        return f"decode {self.size} {what}" + ("" if self.rows is None else f" {self.rows}")

    def to_lower(self, settings: Settings, slots: int, target: TargetModel) -> ToLower:
        width = settings.steps_for(self.needs, STEPS) * (settings.most_accepted + 1)
        round = settings.round(self.needs, self.num_draft_tokens, self.rows, self.tree)
        return functools.partial(decode_rounds, width=width, round=round), [padding(slots, self.size, 4)]


@dataclasses.dataclass(frozen=True)
class Score(Program):
    """Gives log-probabilities of a known text."""

    size: int  # sequences
    chunk: int  # rows of each
    count: int  # most likely tokens that are named at each row

    def __str__(self) -> str:
        return f"score {self.size} {self.chunk} {self.count}"

    def to_lower(self, settings: Settings, slots: int, target: TargetModel) -> ToLower:
        function = functools.partial(score, chunk=self.chunk, count=self.count, attention=settings.attention)
        return function, [padding(slots, self.size, 1)[:, 0]]


@dataclasses.dataclass(frozen=True)
class PlaceStates(Program):
    """Puts a block of states of an automaton into the pool. It works on the pool alone."""

    of_automata: ClassVar[bool] = True

    def __str__(self) -> str:
        return "place states"

    def to_lower(self, settings: Settings, slots: int, target: TargetModel) -> ToLower:
        one, zero = np.zeros(BLOCK, np.int32), np.int32(0)
        return place, [zero, np.zeros((BLOCK, SAME + 1), np.uint16), one, np.zeros(BLOCK, bool)]


@dataclasses.dataclass(frozen=True)
class FillMasks(Program):
    """Computes the tokens that states allow. It works on the pool alone."""

    of_automata: ClassVar[bool] = True

    def __str__(self) -> str:
        return "fill masks"

    def to_lower(self, settings: Settings, slots: int, target: TargetModel) -> ToLower:
        return fill, [np.zeros(FILLED, np.int32)] * 2
