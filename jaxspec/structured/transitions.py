"""What `outlines_core` makes of an expression, as plain numbers. As a program this does so for another process, within limits.

It imports nothing of this package and little else, so that it starts soon: see `builder.py`.
"""

from __future__ import annotations

import array
import functools
import itertools
import marshal
import os
import signal
import sys
from typing import Any

NUMBER = "I"  # the type of the numbers, of 32 bits

# Index of the first state; final states; all others with the number of their transitions; the byte and the next state of each transition.
# All but the first are bytes of numbers.
Table = tuple[int, bytes, bytes, bytes, bytes, bytes]


class TooManyStates(Exception):
    """Its argument is their number."""


def table_of(expression: str, most_states: int) -> Table:
    """The transitions of an expression over bytes. Raises TooManyStates for more than so many states, and the ValueError of
    `outlines_core` for what is no expression."""
    from outlines_core import Index

    index = Index(expression, _bytes())
    found = index.get_transitions()
    if len(found) > most_states:
        raise TooManyStates(len(found))

    def numbers(of: Any) -> bytes:
        return array.array(NUMBER, of).tobytes()

    codes, to = (itertools.chain.from_iterable(map(part, found.values())) for part in (dict.keys, dict.values))
    sizes = numbers(map(len, found.values()))
    return index.get_initial_state(), numbers(index.get_final_states()), numbers(found), sizes, numbers(codes), numbers(to)


@functools.cache
def _bytes() -> Any:
    from outlines_core import Vocabulary

    return Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})


def serve(seconds: float, nbytes: int) -> None:
    """Reads expressions from standard input, and writes what becomes of each to standard output, until there are no more. Each may take so
    many seconds of this process's time and so many bytes more than it has; with more, the system ends the process."""
    read, write = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both processes; the other one decides
    _bytes()
    marshal.dump("ready", write)
    write.flush()
    while True:
        try:
            expression, most_states = marshal.load(read)
        except EOFError:
            return
        _limit(nbytes)
        _alarm(seconds)
        try:
            answer: tuple[str, Any] = "table", table_of(expression, most_states)
        except TooManyStates as error:
            answer = "states", error.args[0]
        except ValueError as error:
            answer = "error", str(error)
        except MemoryError:
            os.abort()  # as Rust does
        _alarm(0)
        marshal.dump(answer, write)
        write.flush()


def _limit(more: int) -> None:
    """Limits this process's memory to so many bytes more than it has, where the system can."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, OSError, ValueError):
        return


def _alarm(seconds: float) -> None:
    """Has the system end this process after so many seconds of its time, where it can; after none if 0."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
