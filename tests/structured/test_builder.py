"""Expressions become transitions in a process of their own. If a limit, a signal or an interrupt ends it, another takes its place."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxspec.structured import automaton, builder, transitions
from jaxspec.structured.builder import Builder
from jaxspec.structured.transitions import TooManyStates

EXPONENTIAL = "(a|b)*a(a|b){24}"
SMALL = ["[ab]+c", "", "é|𝄞", "(a|b)*a(a|b){3}"]


@pytest.fixture
def make():
    made = []

    def builder_with(**settings):
        made.append(Builder(**settings))
        return made[-1]

    yield builder_with
    for each in made:
        each.close()


def pid_of(made):
    made.begin()
    return made._process.pid


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def serves(made):
    return all(made.table_of(expression, 1000) == transitions.table_of(expression, 1000) for expression in SMALL)


def test_one_process_serves_all_expressions(make):
    made = make()
    pid = pid_of(made)
    assert serves(made) and pid_of(made) == pid != os.getpid()


@pytest.mark.parametrize(("limit", "said"), [({"seconds": 0.2}, "more than 0.2 seconds"), ({"nbytes": 1 << 26}, "more than 0.0625 GiB")])
def test_what_takes_too_much_is_refused_and_the_next_expression_is_served(make, limit, said):
    made = make(**limit)
    pid = pid_of(made)
    with pytest.raises(ValueError, match=f"its automaton takes {said} to build"):
        made.table_of(EXPONENTIAL, 1000)
    assert serves(made) and pid_of(made) != pid


def test_an_automaton_says_what_it_would_have_taken(make, monkeypatch):
    monkeypatch.setattr(automaton, "BUILDER", make(nbytes=1 << 26))
    with pytest.raises(
        ValueError, match=r"the expression '\(a\|b\)\*a\(a\|b\)\{24\}' cannot be made .* takes more than 0.0625 GiB to build"
    ):
        automaton.automaton_of(EXPONENTIAL)


def test_errors_are_those_that_a_call_here_would_raise(make):
    made = make()
    for expression in ("(", "[z-a]"):
        with pytest.raises(ValueError) as here:
            transitions.table_of(expression, 1000)
        with pytest.raises(ValueError) as there:
            made.table_of(expression, 1000)
        assert str(there.value) == str(here.value)
    with pytest.raises(TooManyStates, match="2048"):
        made.table_of("(a|b)*a(a|b){9}", 1000)


def test_a_process_that_was_ended_is_replaced(make):
    made = make()
    pid_of(made)
    made._process.kill()
    made._process.wait()
    assert serves(made)


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_ended_over_an_expression_is_replaced_once(make, monkeypatch, times):
    made, dump = make(), builder.marshal.dump
    left = [times]

    def dump_and_kill(value, file):
        if file is made._process.stdin and left[0]:
            left[0] -= 1
            made._process.send_signal(signal.SIGSTOP)  # so that it cannot answer first
            dump(value, file)
            made._process.kill()
        else:
            dump(value, file)

    monkeypatch.setattr(builder.marshal, "dump", dump_and_kill)
    if times == 1:
        assert serves(made)
        return
    with pytest.raises(ValueError, match="was ended twice"):
        made.table_of("a", 1000)
    assert serves(made)


def test_an_interrupt_leaves_no_answer_behind(make, monkeypatch):
    made = make()
    pid, load = pid_of(made), builder.marshal.load

    def interrupted(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(builder.marshal, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.table_of("abc", 1000)
    monkeypatch.setattr(builder.marshal, "load", load)
    assert serves(made) and pid_of(made) != pid


def test_an_interrupt_of_the_terminal_does_not_end_the_process(make):
    made = make()
    pid = pid_of(made)
    os.kill(pid, signal.SIGINT)
    assert serves(made) and pid_of(made) == pid


def test_threads_share_a_process(make):
    made, found = make(), []
    pid = pid_of(made)
    threads = [threading.Thread(target=lambda: found.append(serves(made))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6 and pid_of(made) == pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_fork_starts_its_own(make):
    made = make()
    pid = pid_of(made)
    child = os.fork()
    if child == 0:
        right = serves(made) and pid_of(made) != pid
        made.close()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert serves(made) and pid_of(made) == pid


def test_without_processes_expressions_are_served_here(make, monkeypatch):
    monkeypatch.setattr(builder.sys, "executable", "/nowhere/python")
    made = make()
    with pytest.warns(UserWarning, match="no process could be started for structured outputs .*any time and memory"):
        made.begin()
    assert serves(made) and made._process is None


def test_the_process_ends_with_the_one_that_started_it():
    lines = "import os", "from jaxspec.structured.builder import Builder", "b = Builder()", "b.begin()", "print(b._process.pid, flush=True)"
    pid = int(subprocess.run([sys.executable, "-c", "; ".join((*lines, "os._exit(0)"))], check=True, capture_output=True, text=True).stdout)
    until = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < until, "the process is still there"
        time.sleep(0.05)
