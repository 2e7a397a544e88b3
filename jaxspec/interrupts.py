"""Interrupts that Python would ignore come again, work that none may cut short, and work as Python exits."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

SOON = 0.01  # seconds
Result = TypeVar("Result")


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """Interrupts again, soon, where Python ignores an interrupt: in a function that is called when garbage is collected, as JAX has one. A
    decorator too. It does nothing in threads but the main one, which alone is interrupted, and on Windows, where a process cannot do it."""
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        yield
        return
    ignored = sys.unraisablehook

    def again(found: Any) -> None:
        if found.exc_type is not KeyboardInterrupt:
            ignored(found)
            return
        timer = threading.Timer(SOON, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = ignored


def undisturbed(work: Callable[[], Result], *, to_end: bool = False) -> Result:
    """Calls a function on a thread of its own, where no interrupt reaches it, and returns or raises what it does. An interrupt is raised
    here at once; the function goes on to its end, for which Python waits before it exits. to_end: wait for that end here, unless a second
    interrupt comes. For a function that starts threads, which Python refuses once it exits.

    Programs are compiled in this way, but for those that take milliseconds: if their caller is interrupted, JAX's compiler goes on with a
    program that is no longer held, and the process crashes."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    pool = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-undisturbed")
    try:
        return pool.submit(work).result()
    finally:
        pool.shutdown(wait=to_end)


def begun(pool: concurrent.futures.Executor, work: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    """What a pool is to do. This thread does it if the main one has ended, after which pools take nothing on."""
    try:
        return pool.submit(work)
    except RuntimeError:
        done = concurrent.futures.Future[Result]()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done


def compiled(jitted: Any, *args: Any, **static: Any) -> Any:
    """The program of a jitted function for arguments like these. It is compiled `undisturbed`, and called without the static arguments.
    JAX keeps it: asked again, with the same function and arguments of the same form, this takes milliseconds."""
    return undisturbed(jitted.lower(*args, **static).compile)
