"""Has expressions made into transitions by another process, which may take only so much time and memory.

The automaton of a short expression can be larger than any memory: `(a|b)*a(a|b){60}` takes 2**61 states. `outlines_core` cannot be
interrupted, so it works in a process that can be ended.
"""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import signal
import subprocess
import sys
import threading
import warnings
from typing import Any

from jaxspec.structured import transitions
from jaxspec.structured.transitions import Table, TooManyStates

SECONDS, BYTES = 20.0, 1 << 30  # of the process's time, and of memory beyond what it begins with, for one expression


class Builder:
    """Keeps such a process, from its first expression on. Threads may share it; one of them is served at a time."""

    def __init__(self, seconds: float = SECONDS, nbytes: int = BYTES):
        self.seconds, self.nbytes = seconds, nbytes
        self._forget()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)  # the process is its parent's

    def _forget(self) -> None:
        self._lock, self._alone = threading.Lock(), False
        self._process: Any = None  # a Popen with both pipes

    def begin(self) -> None:
        """Starts the process, if there is none, and waits until it is ready. If another thread has it work, returns at once."""
        if self._lock.acquire(blocking=False):
            try:
                self._running()
            finally:
                self._lock.release()

    def table_of(self, expression: str, most_states: int) -> Table:
        """See `transitions.table_of`. Raises ValueError too if it takes too much time or memory."""
        with self._lock:
            answer = self._answer(expression, most_states) or self._answer(expression, most_states)
            if answer is None:
                raise ValueError("the process that builds its automaton was ended twice")
            kind, found = answer
            if kind == "states":
                raise TooManyStates(found)
            if kind == "error":
                raise ValueError(found)
            return found

    def _answer(self, expression: str, most_states: int) -> tuple[str, Any] | None:
        """What the process answers. None if something else than a limit ended it."""
        process = self._running()
        if process is None:
            return "table", transitions.table_of(expression, most_states)
        try:
            marshal.dump((expression, most_states), process.stdin)
            process.stdin.flush()
            return marshal.load(process.stdout)
        except (EOFError, OSError):
            reason = self._exceeded(self._end())
            return None if reason is None else ("error", reason)
        except BaseException:  # an interrupt; what the process would answer is of no use to the next expression
            process.kill()
            self._end()
            raise

    def _running(self) -> Any:
        """The process; None if none can be started."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None and not self._alone:
            # Without `site`, which may take long, but with this process's paths, and without the program's own folder, whose modules have
            # names of the standard library.
            paths = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable or "", "-S", "-P", transitions.__file__, str(self.seconds), str(self.nbytes)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            try:
                self._process = subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": paths})
                marshal.load(self._process.stdout)
            except (EOFError, OSError, ValueError) as error:
                self._end()
                self._alone = True
                warnings.warn(
                    f"no process could be started for structured outputs ({error}), so an expression may take any time and memory",
                    stacklevel=2,
                )
            except BaseException:
                self._end()
                raise
        return self._process

    def _exceeded(self, status: int) -> str | None:
        """Which limit a process with this exit status has exceeded, or None."""
        limits = {"SIGPROF": f"{self.seconds:g} seconds", "SIGABRT": f"{self.nbytes / 2**30:g} GiB"}  # Rust aborts for want of memory
        found = next((limit for name, limit in limits.items() if status == -getattr(signal, name, 0) != 0), None)
        return found and f"its automaton takes more than {found} to build"

    def _end(self) -> int:
        """Ends the process. Returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(OSError):
            process.stdin.close()  # at which it ends by itself, if it has not yet
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()
        return process.wait()

    def close(self) -> None:
        """Ends the process. The next expression starts another."""
        if self._process is not None:
            self._process.kill()
            self._end()
