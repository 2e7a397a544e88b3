"""What texts must look like, as the host knows it: automata, which are built beside the device's work."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable

import jax
import numpy as np

from jaxspec.sampling.automata import BLOCK
from jaxspec.structured.automaton import Automaton, automaton_of, begin
from jaxspec.structured.params import StructuredOutputsParams
from jaxspec.structured.vocabulary import Vocabulary, vocabulary_of
from jaxspec.text import Tokenizer

WAIT = 0.05  # seconds that a call waits for an automaton, to refuse what cannot be built, before it goes on without
KNOWN, KNOWN_BYTES = 256, 1 << 30  # automata that are kept on the host, and the memory that they may take there


@dataclasses.dataclass(frozen=True)
class Built:
    """An automaton, and what the device is to hold of it."""

    automaton: Automaton
    alike: np.ndarray  # [S] int32: states with equal numbers, from 1 on, allow the same tokens
    vocabulary: Vocabulary

    @property
    def blocks(self) -> int:
        return -(-self.automaton.states // BLOCK)

    @property
    def rows(self) -> int:
        return int(self.alike.max())


@dataclasses.dataclass(eq=False)
class Structure:
    """What texts must look like, and its automaton as soon as that is built."""

    label: str
    future: concurrent.futures.Future[Built]

    @property
    def failure(self) -> str | None:
        """Why there is no automaton; None if there is one, or if it is not known yet."""
        error = self.future.exception() if self.future.done() else None
        return None if error is None else str(error)

    @property
    def nbytes(self) -> int:
        """What its automaton takes on the host; 0 as long as there is none."""
        built = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self.future.result().automaton.next.nbytes if built else 0


class Structures:
    """Builds automata for one tokenizer, on a thread of its own. blocks, rows: of a pool, in which each must fit. check_open: raises
    once no more are to be built."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, blocks: int, rows: int, check_open: Callable[[], None] = lambda: None):
        self._tokenizer, self._vocab_size, self.blocks, self.rows = tokenizer, vocab_size, blocks, rows
        self._check_open = check_open
        self._known = collections.OrderedDict[str, Structure]()
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._begun: concurrent.futures.Future[None] | None = None

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self._tokenizer, self._vocab_size)

    def of(self, params: StructuredOutputsParams) -> Structure:
        """The structure that params ask for. Raises ValueError if it cannot be served and that is soon known."""
        with self._lock:
            self._check_open()
            known = self._known.pop(params.expression, None)
            if known is None:
                if self._pool is None:
                    # There too, where no interrupt comes, which would leave locks behind.
                    pool = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-automata")
                    self._begun = pool.submit(begin)
                    self._pool = pool
                known = Structure(params.label, self._pool.submit(self._build, params.label, params.expression))
            self._known[params.expression] = known
            held = sum(structure.nbytes for structure in self._known.values())
            while len(self._known) > 1 and (len(self._known) > KNOWN or held > KNOWN_BYTES):
                _, oldest = self._known.popitem(last=False)
                held -= oldest.nbytes
        if self._begun is not None:
            concurrent.futures.wait([self._begun])  # or the first one would take longer than WAIT
        # Processes that compute together must admit the same requests at the same time.
        try:
            known.future.exception(WAIT if jax.process_count() == 1 else None)
        except TimeoutError:
            pass
        except concurrent.futures.CancelledError:
            self._check_open()
        if known.failure is not None:
            raise ValueError(f"structured_outputs: {known.failure}")
        return known

    def _build(self, label: str, expression: str) -> Built:
        vocabulary = self.vocabulary
        automaton = automaton_of(expression)
        if vocabulary.strips_space:
            automaton = automaton.behind_space()
        built = Built(automaton, automaton.alike(vocabulary.data.shape[1]), vocabulary)
        if built.blocks >= self.blocks or built.rows >= self.rows:
            raise ValueError(
                f"{label} takes {automaton.states} states with {built.rows} different sets of allowed tokens; expected at most "
                f"{(self.blocks - 1) * BLOCK} and {self.rows - 1}: bound its strings and lists lower, or split it"
            )
        return built

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
