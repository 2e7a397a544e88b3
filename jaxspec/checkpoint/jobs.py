"""Threads that read a checkpoint, a few pieces at a time: one reads while another waits for a disk or copies to a device."""

from __future__ import annotations

import concurrent.futures
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
SOON = 0.1  # seconds after which progress is told
_compiling: dict[Hashable, threading.Lock] = {}  # by program


class Job(NamedTuple):
    """A piece of a checkpoint to read."""

    nbytes: int  # of host memory, that it takes while it runs
    run: Callable[[Callable[[int], Any]], Any]  # takes `update`, to be called with the number of bytes of each read


class _Stopped(Exception):
    """Raised in a job that nobody waits for any more."""


def results(jobs: Sequence[Job], update: Callable[[int], Any]) -> list[Any]:
    """What each job returns. They begin in their order, as many at a time as HELD_BYTES and the threads allow.

    update: called on this thread with numbers of bytes that were read. Raises what the first job of those that fail raises. After that, and
    after an interrupt, jobs that run end with their next read.
    """
    config: Any = jax.config
    read, stopped, device = queue.SimpleQueue[int](), threading.Event(), config.jax_default_device

    def told(count: int) -> None:
        if stopped.is_set():
            raise _Stopped
        read.put(count)

    def run(job: Job) -> Any:
        with jax.default_device(device):  # which holds for one thread
            return job.run(told)

    def tell() -> None:
        if count := sum(read.get() for _ in range(read.qsize())):
            update(count)

    found: list[Any] = [None] * len(jobs)
    waiting, running = deque(range(len(jobs))), dict[concurrent.futures.Future[Any], int]()
    threads = min(THREADS, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(threads, "jaxspec-reader") as pool:
        try:
            while waiting or running:
                while waiting and len(running) < threads:
                    held = sum(jobs[i].nbytes for i in running.values())
                    if running and held + jobs[waiting[0]].nbytes > HELD_BYTES:
                        break
                    i = waiting.popleft()
                    running[pool.submit(run, jobs[i])] = i
                done, _ = concurrent.futures.wait(running, SOON, concurrent.futures.FIRST_COMPLETED)
                if any(future.exception() for future in done):
                    stopped.set()
                    # All jobs before one that failed have begun. Which of them fail first is known when all are over.
                    failed = sorted(running, key=running.__getitem__)
                    raise next(e for future in failed if (e := future.exception()) and not isinstance(e, _Stopped))
                for future in done:
                    found[running.pop(future)] = future.result()
                tell()
        finally:
            stopped.set()
    return found


def compiled_once(key: Hashable, jitted: Any, *args: Any, **static: Any) -> Any:
    """`interrupts.compiled` for jobs: those that need one program compile it once, and those that need others do so meanwhile. key: names
    the program."""
    with _compiling.setdefault(key, threading.Lock()):
        return compiled(jitted, *args, **static)
