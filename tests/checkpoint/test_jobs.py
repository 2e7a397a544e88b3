"""Threads that read a checkpoint."""

import contextlib
import gc
import signal
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import jobs
from jaxspec.checkpoint.jobs import Job, results


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(jobs.os, "cpu_count", lambda: 4)


def test_results_come_in_order_and_progress_to_who_asked():
    told = []

    def job(i):
        def run(update):
            time.sleep(0.01 * (5 - i % 5))
            update(i)
            update(1)
            return i

        return Job(10, run)

    assert results([job(i) for i in range(20)], lambda count: told.append((count, threading.current_thread()))) == list(range(20))
    assert sum(count for count, _ in told) == sum(range(20)) + 20 and {thread for _, thread in told} == {threading.current_thread()}


@pytest.mark.parametrize(("room", "most"), [(10**6, 4), (35, 3), (19, 1), (1, 1)])
def test_jobs_that_run_take_no_more_memory_than_they_may(monkeypatch, room, most):
    monkeypatch.setattr(jobs, "HELD_BYTES", room)
    running, seen, lock = set(), [], threading.Lock()

    def job(i):
        def run(update):
            with lock:
                running.add(i)
                seen.append(len(running))
            time.sleep(0.02)
            with lock:
                running.remove(i)

        return Job(10, run)

    results([job(i) for i in range(12)], print)
    assert max(seen) == most


def test_the_first_of_those_that_fail_is_what_is_raised():
    """It fails some reads after one that comes later in the order, while a third would read for ever. Jobs that have not begun never do."""
    begun, later_failed = [], threading.Event()

    def first(update):
        later_failed.wait()
        for _ in range(10):
            time.sleep(0.01)
            update(1)
        raise ValueError("first")

    def later(update):
        later_failed.set()
        raise ValueError("later")

    def endless(update):
        while True:
            time.sleep(0.001)
            update(1)

    def short(update):
        begun.append(1)
        time.sleep(0.01)

    with pytest.raises(ValueError, match="first"):
        results([Job(1, run) for run in (first, later, endless, *[short] * 50)], lambda count: None)
    assert len(begun) < 50


def test_an_error_leaves_nothing_that_was_read():
    """Nor does it wait for the garbage collector, which may not come before the next load."""
    made = []

    def read(update):
        value = np.zeros(1)
        made.append(weakref.ref(value))
        if len(made) > 10:
            raise ValueError("damaged")
        return value

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            results([Job(1, read)] * 20, lambda count: None)
        assert len(made) > 10 and not any(each() is not None for each in made)
    finally:
        gc.enable()


def test_an_interrupt_ends_jobs_with_their_next_read():
    before = threading.active_count()

    def endless(update):
        while True:
            time.sleep(0.001)
            update(1)

    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        results([Job(1, endless)] * 10, lambda count: None)
    timer.join()
    assert threading.active_count() == before


def test_an_interrupt_can_leave_no_lock_held():
    """Inside the threading module it may leave one held, for which every other thread would wait: nothing of that runs here meanwhile."""
    told, entered = [], set()

    def trace(frame, event, arg):
        if 0 < sum(told) < 20:
            entered.add(frame.f_code.co_filename)

    def read(update):
        time.sleep(0.005)
        update(1)

    sys.settrace(trace)
    try:
        results([Job(1, read)] * 20, told.append)
    finally:
        sys.settrace(None)
    assert sum(told) == 20 and not [file for file in entered if file == threading.__file__ or "concurrent" in file]


def test_the_callers_default_device_is_that_of_jobs():
    with jax.default_device(jax.devices()[3]):
        [found] = results([Job(1, lambda update: jnp.zeros(1) + 1)], print)
    assert found.devices() == {jax.devices()[3]}


def test_jobs_that_need_one_program_wait_for_whoever_compiles_it(monkeypatch):
    """And nobody else does."""
    together, seen, lock = {"a": 0, "b": 0}, [], threading.Lock()

    def compiled(jitted, name):
        with lock:
            together[name] += 1
            seen.append(dict(together))
        time.sleep(0.02)
        with lock:
            together[name] -= 1

    monkeypatch.setattr(jobs, "compiled", compiled)
    results([Job(1, lambda update, name=name: jobs.compiled_once(name, None, name)) for name in "aabbaabb"], print)
    assert max(max(each.values()) for each in seen) == 1 and {"a": 1, "b": 1} in seen
