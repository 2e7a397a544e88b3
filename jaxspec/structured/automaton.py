"""From a regular expression to an automaton over bytes.

`outlines_core` builds it: the index of a vocabulary of 256 tokens, each a byte, is a table of bytes. Its automata look for a match
anywhere, prefer one match over others, and may end before a longer one. We put a character around the expression that no text has: then a
match begins where it must, ends where it must, and all matches count."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np

from jaxspec.structured.builder import Builder
from jaxspec.structured.transitions import NUMBER, TooManyStates

BUILDER = Builder()
MARK = "\U0010ffff"  # no character, and in no text
DEAD = 0  # the state that leads to no match
MOST_STATES = 60_000  # of an automaton that is taken apart at all; a pool holds fewer


@dataclasses.dataclass(frozen=True)
class Automaton:
    """A deterministic automaton of S states. Every state but DEAD leads to a match."""

    next: np.ndarray  # [S, 256] int32: the state after a byte
    accepting: np.ndarray  # [S] bool: whether a text may end here
    start: int

    @property
    def states(self) -> int:
        """States but DEAD."""
        return len(self.next) - 1

    def after(self, data: bytes, state: int | None = None) -> int:
        """The state after bytes, by default from the start."""
        state = self.start if state is None else state
        for byte in data:
            state = int(self.next[state, byte])
        return state

    def behind_space(self) -> Automaton:
        """The automaton of texts before whose first character a space may stand, which does not count. A decoder that strips a text's first
        space makes of them the texts of this one."""
        row = self.next[self.start].copy()
        row[ord(" ")] = self.start
        return Automaton(np.concatenate([self.next, row[None]]), np.append(self.accepting, self.accepting[self.start]), len(self.next))

    def alike(self, length: int) -> np.ndarray:
        """For each state a number, [S] int32, 0 for DEAD: states with equal numbers survive the same bytes, of `length` at most. So the
        same tokens may follow them."""
        # Bytes that lead to the same states everywhere count once.
        random = np.random.default_rng(0)
        _, columns = np.unique(_odd(random, len(self.next)) @ self.next.astype(np.uint64), return_index=True)
        table, weights = self.next[:, columns], _odd(random, len(columns))
        classes, count = (np.arange(len(table)) != DEAD).astype(np.int64), 2
        for _ in range(length):
            hashes = _mixed(classes)
            _, classes = np.unique(hashes * np.uint64(3) + _mixed(hashes[table] @ weights), return_inverse=True)
            found = int(classes.max()) + 1
            if found == count:
                break
            count = found
        dead = classes[DEAD]
        return np.where(classes == dead, 0, np.where(classes < dead, classes + 1, classes)).astype(np.int32)


def _odd(random: np.random.Generator, size: int) -> np.ndarray:
    """Odd numbers of 64 bits."""
    return random.integers(1 << 63, size=size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Numbers as hashes of 64 bits (splitmix64)."""
    x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def begin() -> None:
    """Starts what `automaton_of` needs, if that is installed, so that the first automaton takes no longer than others."""
    if _installed():
        BUILDER.begin()


def automaton_of(expression: str) -> Automaton:
    """The automaton of the texts that an expression matches as a whole, in UTF-8. Raises ValueError for an expression that is none, that
    matches nothing, or that takes too many states, too much time or too much memory to build: see `builder.py`."""
    if not _installed():
        raise ImportError("structured outputs need the package outlines-core: pip install outlines-core")
    mark = f"\\x{{{ord(MARK):x}}}"
    try:
        first, *numbers = BUILDER.table_of(f"{mark}(?:{expression}){mark}", MOST_STATES)
    except TooManyStates as error:
        raise ValueError(
            f"the automaton of the expression {_short(expression)!r} has {error} states; expected at most {MOST_STATES}"
        ) from None
    except ValueError as error:
        raise ValueError(f"the expression {_short(expression)!r} cannot be made an automaton: {_reason(str(error))}") from None
    finals, states, sizes, codes, targets = (np.frombuffer(of, NUMBER).astype(np.int64) for of in numbers)
    order = np.argsort(states)

    def places(asked: np.ndarray) -> np.ndarray:
        """The place in the table of each state, from 1 on; 0 for one that nothing follows."""
        at = order[np.minimum(np.searchsorted(states[order], asked), len(states) - 1)]
        return np.where(states[at] == asked, at + 1, DEAD)

    ended = np.zeros(len(states) + 1, bool)
    ended[places(finals)] = True
    ended[DEAD] = False
    to, sources = places(targets), np.repeat(np.arange(1, len(states) + 1), sizes)
    table, kept = np.zeros((len(states) + 1, 256), np.int32), (codes < 256) & ~ended[sources]
    table[sources[kept], codes[kept]] = to[kept]
    at = np.arange(len(table))
    for byte in MARK.encode():
        at = table[at, byte]
    accepting = ended[at]
    table[ended[table]] = DEAD
    start = int(places(np.asarray([first]))[0])
    for byte in MARK.encode():
        start = int(table[start, byte])
    return _trimmed(table, accepting, start, expression)


def _trimmed(table: np.ndarray, accepting: np.ndarray, start: int, expression: str) -> Automaton:
    """Without states that the start does not reach or that lead to no match."""
    sources, to = np.nonzero(table)[0], table[table != DEAD]
    reached = _reached(sources, to, np.asarray([start]), len(table))
    alive = reached & _reached(to, sources, np.nonzero(accepting)[0], len(table))
    alive[DEAD] = False
    if not alive[start]:
        raise ValueError(f"the expression {_short(expression)!r} matches no text")
    kept = np.concatenate([[DEAD], np.nonzero(alive)[0]])
    number = np.zeros(len(table), np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    return Automaton(number[table[kept]], accepting[kept] & alive[kept], int(number[start]))


def _reached(sources: np.ndarray, to: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` states are among the starts or can be reached from one: [count] bool. sources, to: the states that a step joins."""
    import scipy.sparse.csgraph  # here, because it takes a sixth of the package's import

    edges = np.concatenate([sources, np.full(len(starts), count)]), np.concatenate([to, starts])  # one more state leads to all starts
    graph = scipy.sparse.csr_array((np.ones(len(edges[0]), np.float32), edges), shape=(count + 1, count + 1))
    found = np.zeros(count + 1, bool)
    found[scipy.sparse.csgraph.breadth_first_order(graph, count, return_predecessors=False)] = True
    return found[:count]


def _installed() -> bool:
    return importlib.util.find_spec("outlines_core") is not None


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _reason(message: str) -> str:
    """What `outlines_core` says, in a line."""
    if "Found no transitions" in message:
        return "a part of it matches no text"
    return message.removeprefix("Failed to build DFA ").splitlines()[0][:200]
