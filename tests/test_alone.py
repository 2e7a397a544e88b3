"""Who computes while others do, on devices that wait for each other."""

import threading

import jax
import pytest

from jaxspec.engine.device_lock import Alone


@pytest.fixture(autouse=True)
def unused(monkeypatch):
    monkeypatch.setattr(Alone, "_of", {})


def free(alone):
    """Whether another thread would get in at once."""
    found = []

    def look():
        got = [lock.held.acquire(blocking=False) for lock in alone._locks]
        for lock, ours in zip(alone._locks, got, strict=True):
            if ours:
                lock.held.release()
        found.append(all(got))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_those_that_share_a_device_take_turns():
    first, second, third, fourth, *_ = jax.devices()
    ours, same, other, overlapping = Alone([first, second]), Alone([second, first]), Alone([third, fourth]), Alone([second, third])
    with ours(), ours():
        assert not free(ours) and not free(same) and not free(overlapping) and free(other)
        with same():  # a thread does not wait for itself
            assert free(other)
    assert free(ours) and free(overlapping)
    with pytest.raises(ZeroDivisionError), overlapping():
        assert not free(ours) and not free(other)
        raise ZeroDivisionError
    assert free(ours) and free(other) and free(overlapping)


def test_without_such_devices_each_has_a_lock_of_its_own():
    one, other = Alone(), Alone()
    with one():
        assert not free(one) and free(other)


def test_who_comes_next_waits_for_what_the_last_one_left_under_way():
    devices, settled = jax.devices(), []
    one, other, apart = Alone(devices[:2]), Alone(devices[1:3]), Alone(devices[4:6])
    for name, alone in (("one", one), ("other", other), ("apart", apart)):
        alone.settle = lambda name=name: settled.append(name)
    for alone in (one, one, apart, other, other, one):
        with alone():
            pass
    assert settled == ["one", "other"]
    del alone, one  # and nothing of what is gone is kept
    with other():
        assert settled == ["one", "other"]


def test_threads_that_come_from_either_side_all_get_through():
    devices, rounds = jax.devices(), []
    each = [Alone(devices[i : i + 3]) for i in range(4)] + [Alone(devices[i : i + 3][::-1]) for i in range(4)]

    def work(alone):
        for _ in range(50):
            with alone():
                rounds.append(1)

    threads = [threading.Thread(target=work, args=(alone,), daemon=True) for alone in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)  # those that waited for each other would wait for ever
    assert len(rounds) == 400
