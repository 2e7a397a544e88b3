"""Who computes while others do, on devices that wait for each other."""

import contextlib
import gc
import os
import signal
import sys
import threading

import jax
import pytest
from locks import free

from jaxspec.engine.device_lock import DeviceLock


@pytest.fixture(autouse=True)
def unused(monkeypatch):
    monkeypatch.setattr(DeviceLock, "_of", {})


def test_those_that_share_a_device_take_turns():
    first, second, third, fourth, *_ = jax.devices()
    pairs = ([first, second], [second, first], [third, fourth], [second, third])
    ours, same, other, overlapping = map(DeviceLock, pairs)
    with ours(), ours():
        assert not free(ours) and not free(same) and not free(overlapping) and free(other)
        with same():  # a thread does not wait for itself
            assert free(other)
    assert free(ours) and free(overlapping)
    with pytest.raises(ZeroDivisionError), overlapping():
        assert not free(ours) and not free(other)
        raise ZeroDivisionError
    assert free(ours) and free(other) and free(overlapping)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_that_it_has_no_devices():
    """Where it would wait for ever: here for the thread that is inside, which is not in the fork, else for the devices."""
    lock = DeviceLock()
    with held_elsewhere(lock):
        child = os.fork()
        if not child:
            try:
                signal.alarm(20)
                with lock():
                    os._exit(1)
            except RuntimeError as error:
                os._exit(0 if "this process is a fork of the one that loaded the model" in str(error) else 2)
        assert os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def held_elsewhere(lock):
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with lock():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def test_one_that_is_taken_is_not_waited_for():
    first, second, third, *_ = jax.devices()
    ours, other = DeviceLock([first, second]), DeviceLock([second, third])
    with ours.if_free() as entered:
        assert entered and not free(ours) and not free(other)
        with ours.if_free() as again:
            assert not again
    for holder in (ours, other):
        inside, over, found = threading.Event(), threading.Event(), []

        def hold(holder=holder, inside=inside, over=over):
            with holder():
                inside.set()
                over.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait(60)
        with ours.if_free() as entered:
            found.append(entered)
        over.set()
        thread.join()
        assert found == [False] and free(ours) and free(other)
    with ours(), ours.if_free() as entered:
        assert not entered
    with ours.if_free() as entered:
        assert entered


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_while_it_is_taken_leaves_it_free(count):
    """At each line in turn, of this module and of those that it calls."""
    lock, places = DeviceLock(jax.devices()[:count]), 0

    def interrupt(frame, event, _):
        nonlocal left
        left -= event in ("call", "line")
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    while True:
        left, entered = places, False
        try:
            sys.settrace(interrupt)
            with lock():
                sys.settrace(None)
                entered = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        gc.collect(0)  # what is as young as this
        assert free(lock), places
        if entered:
            break
        places += 1
    assert places > 10


def test_without_such_devices_each_has_a_lock_of_its_own():
    one, other = DeviceLock(), DeviceLock()
    with one():
        assert not free(one) and free(other)


def test_who_comes_next_waits_for_what_the_last_one_left_under_way():
    devices, settled = jax.devices(), []
    one, other, apart = DeviceLock(devices[:2]), DeviceLock(devices[1:3]), DeviceLock(devices[4:6])
    for name, lock in (("one", one), ("other", other), ("apart", apart)):
        lock.settle = lambda name=name: settled.append(name)
    for lock in (one, one, apart, other, other, one):
        with lock():
            pass
    assert settled == ["one", "other"]
    del lock, one  # and nothing of what is gone is kept
    with other():
        assert settled == ["one", "other"]


def test_threads_that_come_from_either_side_all_get_through():
    devices, rounds = jax.devices(), []
    each = [DeviceLock(devices[i : i + 3]) for i in range(4)] + [DeviceLock(devices[i : i + 3][::-1]) for i in range(4)]

    def work(lock):
        for _ in range(50):
            with lock():
                rounds.append(1)

    threads = [threading.Thread(target=work, args=(lock,), daemon=True) for lock in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)  # those that waited for each other would wait for ever
    assert len(rounds) == 400
