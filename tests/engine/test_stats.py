"""Rounds and acceptance, derived from the flags that tokens carry."""

import dataclasses
import types

import numpy as np
import pytest

from jaxspec.engine import device_clock
from jaxspec.engine.device_clock import Compiling, Times
from jaxspec.engine.stats import RoundStats, Stats, accepted_by_round, rates_of


@pytest.mark.parametrize(
    ("flags", "rounds"),
    [
        ("", []),
        ("0", []),  # the first token comes from the prompt's pass
        ("00", [0]),
        ("0110", [2]),
        ("0110100", [2, 1, 0]),
        ("011", [2]),  # cut by a stop before the target's own choice
        ("00111", [0, 3]),
        ("0000", [0, 0, 0]),
    ],
)
def test_rounds_are_runs_of_drafts_with_the_choice_that_ends_them(flags, rounds):
    assert accepted_by_round(np.array([c == "1" for c in flags], bool)).tolist() == rounds


def test_round_stats():
    flags = np.array([c == "1" for c in "0110100111"], bool)  # rounds of 2, 1, 0 and, cut, 3 accepted drafts
    stats = RoundStats.of(flags, drafted=16, num_draft_tokens=4)
    assert stats.histogram == (1, 1, 1, 1, 0)
    assert (stats.steps, stats.drafted, stats.accepted) == (4, 16, 6)
    assert stats.acceptance_length == 9 / 4
    # Unconditional: 3 of 4 rounds accepted the first draft, 2 the second as well, 1 the third, none the fourth.
    assert stats.acceptance_rates == (0.75, 0.5, 0.25, 0.0)
    assert stats.from_draft == tuple(flags.tolist())


def test_without_drafts_a_step_is_a_token():
    stats = RoundStats.of(np.zeros(5, bool), drafted=0, num_draft_tokens=0)
    assert (stats.histogram, stats.acceptance_length, stats.acceptance_rates) == ((4,), 1.0, ())
    assert rates_of((0, 0, 0)) == (0.0, 0.0)
    assert RoundStats.of(np.zeros(1, bool), 0, 2).acceptance_length == 1.0


def test_totals_add_up():
    first = RoundStats.of(np.array([c == "1" for c in "01100"], bool), drafted=4, num_draft_tokens=2)
    second = RoundStats.of(np.array([c == "1" for c in "010"], bool), drafted=2, num_draft_tokens=2)
    total = Stats().plus(7, first).plus(5, second)
    assert (total.requests, total.prompt_tokens, total.tokens) == (2, 12, 8)
    assert (total.steps, total.drafted, total.accepted) == (3, 6, 3)
    assert total.histogram == (1, 1, 1)
    assert total.acceptance_length == 2.0
    assert total.acceptance_rates == (2 / 3, 1 / 3)
    assert Stats().acceptance_length == 1.0
    assert Stats(tokens=10, seconds=4.0).tokens_per_second == 2.5
    assert "2.00 tokens a step (3 steps)" in str(total) and "0.67, 0.33" in str(total)


def test_a_part_is_a_later_total_less_an_earlier_one():
    first = RoundStats.of(np.array([c == "1" for c in "01100"], bool), 4, 2, first_token_seconds=0.5)
    second = RoundStats.of(np.array([c == "1" for c in "0110"], bool), 4, 4, first_token_seconds=0.25)
    before = dataclasses.replace(Stats(weight_bytes=9).plus(7, first), seconds=1.0, compile_seconds=2.0, compilations=3)
    after = dataclasses.replace(before.plus(5, second), seconds=3.0, compile_seconds=2.5, compilations=4, peak_bytes=2**20)
    part = after - before
    assert (part.requests, part.prompt_tokens, part.tokens, part.steps, part.drafted, part.accepted) == (1, 5, 4, 1, 4, 2)
    assert part.histogram == (0, 0, 1, 0, 0) and part.acceptance_rates == (1.0, 1.0, 0.0, 0.0)
    assert (part.seconds, part.compile_seconds, part.compilations, part.weight_bytes, part.peak_bytes) == (2.0, 0.5, 1, 9, 2**20)
    assert (part.tokens_per_second, part.tokens_per_second_with_compiling) == (2.0, 1.6)
    assert part.time_to_first_token == 0.25 and after.time_to_first_token == 0.375
    assert "2.0 tokens/s (2.00 s), 1.6 with compiling" in str(part) and "250.0 ms after the call" in str(part)
    assert "2 of 4 accepted" in str(part) and "peak 1.0 MiB" in str(part) and "peak" not in str(before)


def test_totals_tell_of_cached_prompts_and_of_sequences_that_gave_way():
    rounds = RoundStats.of(np.zeros(3, bool), 0, 0)
    total = Stats().plus(100, rounds, 64).plus(10, rounds)
    assert (total.prompt_tokens, total.cached_tokens) == (110, 64)
    assert "prompts 110, 64 of them cached" in str(total) and "preempt" not in str(total)
    later = dataclasses.replace(total.plus(100, rounds, 36), preemptions=2, seconds=2.0, times=((1.5, (2,)),))
    assert "2 preemptions" in str(later) and ((later - total).cached_tokens, (later - total).busy_seconds) == (36, 1.5)


def test_rounds_that_left_no_token_drafted_nothing_that_counts():
    """A stop string is found after the loop has gone on: what it drafted behind it is not part of the text."""
    assert RoundStats.of(np.array([c == "1" for c in "0110"], bool), drafted=12, num_draft_tokens=2).drafted == 2
    assert RoundStats.of(np.zeros(1, bool), drafted=12, num_draft_tokens=2).drafted == 0


def test_rounds_of_differing_numbers_of_drafts():
    """Rounds of 4, 2, 0 and 4 drafts, and one that left no token: a position's rate is that of the rounds which tried it."""
    flags = np.array([c == "1" for c in "0" + "1110" + "110" + "0" + "10"], bool)
    mixed = RoundStats.of(flags, 99, 4, by_round=[4, 2, 0, 4, 4])
    assert (mixed.steps, mixed.drafted, mixed.accepted, mixed.histogram) == (4, 10, 6, (1, 1, 1, 1, 0))
    assert mixed.acceptance_rates == (3 / 3, 2 / 3, 1 / 2, 0.0) and mixed.rounds_by_draft == (3, 3, 2, 2)
    plain = RoundStats.of(np.array([c == "1" for c in "01110"], bool), 4, 4)
    total = Stats().plus(1, mixed).plus(1, plain)
    assert total.acceptance_rates == (4 / 4, 3 / 4, 2 / 3, 0.0) and (total - Stats().plus(1, mixed)).acceptance_rates == (
        1.0,
        1.0,
        1.0,
        0.0,
    )
    assert RoundStats.of(flags[:1], 0, 2, by_round=[]).acceptance_rates == (0.0, 0.0)


def test_drafts_past_the_end_of_a_text_were_accepted_too():
    """The third round accepted two drafts and the text ended with its first; or it accepted all of its four."""
    flags = np.array([c == "1" for c in "0" + "1110" + "0" + "1"], bool)
    for beyond, histogram in ((0, (1, 1, 0, 1, 0)), (1, (1, 0, 1, 1, 0)), (3, (1, 0, 0, 1, 1))):
        stats = RoundStats.of(flags, 12, 4, by_round=[4, 4, 4], beyond=beyond)
        assert (stats.histogram, stats.accepted, stats.drafted, stats.acceptance_length) == (histogram, 4, 12, 2.0)
    assert RoundStats.of(flags[:1], 0, 4, by_round=[], beyond=0).histogram == (0, 0, 0, 0, 0)


def test_rounds_verify_no_drafts_that_have_no_room():
    """A sequence of at most ten new tokens: its rounds found 1, 4, 5 and 8 of them."""
    flags = np.array([c == "1" for c in "0" + "110" + "0" + "110" + "10"], bool)
    stats = RoundStats.of(flags, 16, 4, by_round=[4] * 4, nodes=[4] * 4, room=10)
    assert (stats.rounds_by_draft, stats.drafted, stats.acceptance_rates) == ((4, 4, 3, 3), 14, (3 / 4, 2 / 4, 0.0, 0.0))
    assert RoundStats.of(flags, 16, 4, by_round=[4] * 4, nodes=[4] * 4, room=100).drafted == 16


def test_the_difference_of_two_totals_takes_each_data_shard_by_itself():
    before, after = Stats(times=((6.0, (3, 1)), (5.0, (4,)))), Stats(times=((7.0, (3, 2)), (10.0, (4, 0, 9))))
    assert ((after - before).busy_seconds, (after - before).host_times) == (5.0, (0, 0, 9))
    assert ((after - Stats()).busy_seconds, (after - Stats()).host_times) == (10.0, (4, 0, 9))
    assert (Stats().busy_seconds, Stats().host_times) == (0.0, ())


def test_where_the_time_of_a_device_goes():
    now = 0.0
    times = Times(lambda: now)
    for host, first, second in [(0.002, 0.5, 1.5), (0.003, 0.0, 1.0), (0.0, 0.25, 0.25)]:
        now += host
        times.handed()
        now += first
        times.handed(going=True)  # another call, while the first one runs
        now += second
        times.waited()
        times.turn()
    assert times.busy_seconds == pytest.approx(3.5) and now == pytest.approx(3.505)
    found = Stats(times=((times.busy_seconds, tuple(times.host_times)),))
    assert sum(found.host_times) == 2  # the third turn took no time
    assert found.host_seconds(0.5) == pytest.approx(0.002, rel=0.2) and found.host_seconds(1.0) == pytest.approx(0.003, rel=0.2)
    assert (found - found).host_seconds() == 0.0 == Stats().host_seconds()


def test_a_device_that_has_more_to_do_is_busy_while_the_host_reads_what_it_did():
    now, times = 0.0, Times(lambda: now)
    times.handed()
    now += 1.0
    times.handed(going=True)  # what goes on after the first is read
    times.waited()
    now += 0.5
    times.handed(going=True)
    now += 1.0
    times.waited()
    assert times.busy_seconds == 2.5
    times.handed(going=True)
    now += 0.25
    times.handed(going=False)  # it has been idle for nobody knows how much of a quarter
    now += 1.0
    times.waited()
    assert times.busy_seconds == 3.5


def test_the_hosts_times_are_told_to_about_a_tenth():
    every = np.random.default_rng(0).lognormal(np.log(1e-3), 1.0, 2000)
    moments, shares = iter([*np.cumsum(every), 1e4, 1e4 + 1e-9]), (0.05, 0.5, 0.95)
    times = Times(lambda: next(moments))
    for _ in every:
        times.turn()
    found = Stats(times=((times.busy_seconds, tuple(times.host_times)),))
    assert np.allclose([found.host_seconds(share) for share in shares], np.quantile(every, shares), rtol=0.1)
    for entry in (-1, 0):  # the last entry has no end, and the first no beginning
        before = times.host_times[entry]
        times.turn()
        assert times.host_times[entry] == before + 1


def test_what_several_threads_compile_at_once_counts_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(device_clock, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    compiling = Compiling()
    one, other = compiling(), compiling()
    one.__enter__()
    now[0] = 2.0
    other.__enter__()
    assert compiling.seconds == 2.0  # so far
    now[0] = 5.0
    one.__exit__(None, None, None)
    now[0] = 6.0
    other.__exit__(None, None, None)
    now[0] = 9.0
    assert compiling.seconds == 6.0
    with compiling():
        now[0] = 10.0
    assert compiling.seconds == 7.0


def test_the_time_to_the_first_token_is_that_of_requests_that_had_one():
    served = RoundStats.of(np.zeros(3, bool), 4, 2, 0.5)
    total = Stats().plus(7, served).plus(5, RoundStats.of(np.zeros(0, bool), 0, 2))
    assert (total.requests, total.time_to_first_token, Stats().time_to_first_token) == (2, 0.5, 0.0)
