"""Interrupts that Python ignores come again, where it matters, and some work is not cut short."""

import concurrent.futures
import os
import signal
import sys
import threading
import time

import ignored
import jax
import numpy as np
import pytest

from jaxspec import interrupts


def test_an_interrupt_comes_again():
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), interrupts.heeded():
        ignored.interrupt()
        time.sleep(60)
    assert sys.unraisablehook is before


def test_other_exceptions_are_left_to_others(monkeypatch):
    class Broken:
        def __del__(self):
            raise ZeroDivisionError

    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: seen.append(found.exc_type))
    with interrupts.heeded():
        one = Broken()
        del one
    assert seen == [ZeroDivisionError]


def test_threads_leave_it_alone():
    def hook():
        with interrupts.heeded():
            return sys.unraisablehook

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(hook).result() is sys.unraisablehook


def test_work_goes_on_behind_an_interrupt():
    told, ended = threading.Event(), threading.Event()

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        told.wait(60)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        interrupts.undisturbed(work)
    assert not ended.is_set()
    told.set()
    assert ended.wait(60)


def test_work_returns_and_raises_what_it_does_elsewhere():
    assert interrupts.undisturbed(lambda: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ZeroDivisionError):
        interrupts.undisturbed(lambda: 1 // 0)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # which no interrupt reaches anyway
        own = pool.submit(lambda: (threading.get_ident(), interrupts.undisturbed(threading.get_ident))).result()
    assert own[0] == own[1]


@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_program_is_compiled_once_and_where_no_interrupt_reaches(donated):
    threads = []

    def listen(event, duration_secs, **more):
        if event.endswith("backend_compile_duration") and "affine" in more.get("fun_name", ""):
            threads.append(threading.current_thread())

    def affine(x, by, *, plus):
        return {"y": x["x"] * by + plus}

    jax.monitoring.register_event_duration_secs_listener(listen)
    jitted = jax.jit(affine, static_argnames="plus", donate_argnums=donated)
    for size, plus in ((3, 1.0), (3, 1.0), (4, 1.0), (3, 2.0)):
        given = {"x": jax.numpy.arange(size, dtype=np.float32)}, np.float32(2)
        found = interrupts.compiled(jitted, *given, plus=plus)(*given)
        np.testing.assert_array_equal(found["y"], np.arange(size) * 2 + plus)
        assert given[0]["x"].is_deleted() == bool(donated)
    assert len(threads) == 3 and threading.main_thread() not in threads
