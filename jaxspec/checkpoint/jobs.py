"""Threads that read a checkpoint, a few pieces at a time: one reads while another waits for a disk or copies to a device."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from jaxspec.interrupts import compiled

THREADS = 8  # at most, and one a core: more gain little
HELD_BYTES = 1 << 31  # of host memory that all jobs take; one that takes more runs alone
_compiling: dict[Hashable, threading.Lock] = {}  # by program


class Job(NamedTuple):
    """A piece of a checkpoint to read."""

    nbytes: int  # of host memory, that it takes while it runs
    run: Callable[[Callable[[int], Any]], Any]  # takes `update`, to be called with the number of bytes of each read


class _Stopped(Exception):
    """Raised in a job that nobody waits for any more."""


def results(jobs: Sequence[Job], update: Callable[[int], Any]) -> list[Any]:
    """What each job returns. They begin in their order, as many at a time as HELD_BYTES and the threads allow.

    update: called on this thread with numbers of bytes that were read. Raises what the first job of those that fail raises. Jobs after that
    one, and all after an interrupt, end with their next read.
    """
    config: Any = jax.config
    device = config.jax_default_device
    waiting, running = deque(range(len(jobs))), set[int]()
    found, failed, stopped = list[Any]([None] * len(jobs)), dict[int, BaseException](), False
    # This thread starts one other and waits for `said`, and the other does what takes locks of the threading module: an interrupt could
    # leave one held, for which all would wait.
    said, changed = queue.SimpleQueue[int | None](), threading.Condition()

    def over(i: int) -> bool:
        return stopped or i > min(failed, default=i)

    def taken() -> int | None:
        with changed:
            while waiting and not over(waiting[0]):
                held = sum(jobs[i].nbytes for i in running)
                if not running or held + jobs[waiting[0]].nbytes <= HELD_BYTES:
                    running.add(waiting[0])
                    return waiting.popleft()
                changed.wait()
        return None

    def run(i: int) -> None:
        def told(count: int) -> None:
            with changed:
                if over(i):
                    raise _Stopped
            said.put(count)

        try:
            found[i] = jobs[i].run(told)
        except _Stopped:
            pass
        except BaseException as error:
            with changed:
                failed[i] = error
        finally:
            with changed:
                running.remove(i)
                changed.notify_all()

    def work() -> None:
        with jax.default_device(device):  # which holds for one thread
            while (i := taken()) is not None:
                run(i)

    def lead() -> None:
        try:
            threads = [threading.Thread(target=work, name=f"jaxspec-reader-{i}") for i in range(min(THREADS, os.cpu_count() or 1))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # where the system has no more threads
            with changed:
                failed[-1] = error
        finally:
            said.put(None)

    leader = threading.Thread(target=lead, name="jaxspec-readers")
    try:
        leader.start()
        while (count := said.get()) is not None:
            update(count)
        if failed:
            raise failed[min(failed)]
    finally:
        stopped = True
        if leader.is_alive():
            leader.join()
        failed.clear()  # the errors hold this frame, and it what was read
    return found


def compiled_once(key: Hashable, jitted: Any, *args: Any, **static: Any) -> Any:
    """`interrupts.compiled` for jobs: those that need one program compile it once, and those that need others do so meanwhile. key: names
    the program."""
    with _compiling.setdefault(key, threading.Lock()):
        return compiled(jitted, *args, **static)
