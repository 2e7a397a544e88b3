"""Interrupts that Python ignores come again, where it matters."""

import concurrent.futures
import sys
import time

import ignored
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
