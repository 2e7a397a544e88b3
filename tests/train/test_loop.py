"""The training loop: it learns, repeats itself exactly, goes on where it was killed, and says where and why it failed."""

import dataclasses
import json
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interrupting import interrupted_compilation

from jaxspec.drafters.training import Objective
from jaxspec.learning.losses import Batch
from jaxspec.sharding.placement import placement_of
from jaxspec.train import curves, loop, tuning
from jaxspec.train.loop import Run, fit, read_metrics

pytestmark = pytest.mark.usefixtures("unoptimised")
RUN = Run(steps=6, batch=8, every=2, peak=1e-1, dtype="float32")


def weights():
    return {"a": jnp.full((2, 3), 1.5, jnp.float32), "b": jnp.ones(3, jnp.float32), "ids": jnp.arange(4, dtype=jnp.int32)}


def draw(step):
    return {"x": np.random.default_rng(step).normal(size=(8, 3)).astype(np.float32)}


def loss(weights, fixed, batch, key):
    """Of data and, a little, of chance."""
    errors = jnp.mean((batch["x"] @ weights["a"].T - fixed[None, :]) ** 2, axis=-1)
    luck = jax.random.normal(key, ())
    return jnp.mean(errors) + 0.01 * luck * jnp.sum(weights["b"]) + 0.0 * weights["ids"][0].astype(jnp.float32), {"luck": luck}


FIXED = np.asarray([1.0, -1.0], np.float32)


def without_seconds(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(weights, rows, saved) of a run that nobody disturbed"""
    out, saved = tmp_path_factory.mktemp("unbroken") / "new folder", []
    found = fit(
        loss, weights(), FIXED, draw, RUN, out=out, save=saved.append, evaluate=lambda w: {"largest": jnp.max(w["a"])}, progress=False
    )
    return found, read_metrics(out), saved


def test_weights_learn_and_integers_stay(unbroken):
    found, rows, saved = unbroken
    assert [row["step"] for row in rows] == [0, 2, 4, 6] and rows[-1]["loss"] < rows[1]["loss"]
    assert set(rows[1]) == {"step", "seconds", "loss", "luck", "gradient", "largest"}
    assert rows[0] == {"step": 0, "seconds": 0.0, "largest": 1.5}  # as it was given
    assert np.array_equal(found["ids"], weights()["ids"]) and found["a"].dtype == jnp.float32
    assert rows[-1]["largest"] == pytest.approx(float(found["a"].max()), abs=1e-4)
    assert len(saved) == 3 and np.array_equal(saved[-1]["a"], found["a"])  # with each checkpoint but the last, and at the end


@pytest.mark.parametrize("steps_before", [3, 4])
def test_a_killed_run_goes_on_as_if_nothing_had_been(unbroken, tmp_path, steps_before):
    """Killed right before and right after a checkpoint of step 4; rows, which a kill may leave cut off, and weights are the same."""

    def killed(step):
        if step == steps_before + (steps_before == 4):
            raise KeyboardInterrupt
        return draw(step)

    measure = {"evaluate": lambda w: {"largest": jnp.max(w["a"])}, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        fit(loss, weights(), FIXED, killed, RUN, out=tmp_path, **measure)
    with (tmp_path / loop.METRICS).open("a") as log:
        log.write('{"step": 6, "lo')
    found = fit(loss, weights(), FIXED, draw, RUN, out=tmp_path, resume=True, **measure)
    assert without_seconds(read_metrics(tmp_path)) == without_seconds(unbroken[1])
    assert all(np.array_equal(found[name], unbroken[0][name]) for name in found)
    assert [p.name for p in sorted((tmp_path / loop.CHECKPOINTS).iterdir())] == ["4", "6"]  # the newest two
    again = fit(loss, weights(), FIXED, draw, RUN, out=tmp_path, resume=True, **measure)  # which has ended
    assert np.array_equal(again["a"], found["a"])


def test_an_interrupt_leaves_the_compiler_to_end_its_work(unbroken, tmp_path, monkeypatch):
    with interrupted_compilation(monkeypatch):
        fit(loss, weights(), FIXED, draw, RUN, out=tmp_path, progress=False)
    found = fit(loss, weights(), FIXED, draw, RUN, out=tmp_path, progress=False)
    assert np.array_equal(found["a"], unbroken[0]["a"])


def test_the_programs_of_a_run_are_compiled_once_and_where_no_interrupt_reaches(tmp_path):
    made = []

    def listen(event, duration_secs, **more):
        if event.endswith("backend_compile_duration"):
            made.append((more.get("fun_name"), threading.current_thread() is threading.main_thread()))

    def of_ids(weights, fixed, batch, key):
        return jnp.sum(weights["a"]) * jnp.mean(batch.ids.astype(jnp.float32)), {}

    held = Batch(np.ones((4, 3), np.int32), np.zeros(4, np.int32), np.full(4, 3, np.int32))
    score = tuning.scores(held, of_ids, 2)
    jax.monitoring.register_event_duration_secs_listener(listen)
    fit(loss, weights(), FIXED, draw, RUN, out=tmp_path, evaluate=lambda w: score(w, ()), progress=False)
    assert sorted(m for m in made if m[0] in ("jit(rounded)", "jit(score)", "jit(update)")) == [
        ("jit(rounded)", False),
        ("jit(score)", False),
        ("jit(update)", False),
    ]
    assert read_metrics(tmp_path)[0]["held_out_loss"] == 9.0  # 6 weights of 1.5


def test_a_run_is_resumed_only_as_it_was(tmp_path):
    fit(loss, weights(), FIXED, draw, RUN, out=tmp_path, settings={"target": "pocket"}, progress=False)
    with pytest.raises(ValueError, match=f"peak is 0.2; the run in {tmp_path} has 0.1, and a resumed run must have the same"):
        fit(loss, weights(), FIXED, draw, Run(**{**RUN.__dict__, "peak": 0.2}), out=tmp_path, resume=True, settings={"target": "pocket"})
    with pytest.raises(ValueError, match="target is 'other'; the run in .* has 'pocket'"):
        fit(loss, weights(), FIXED, draw, RUN, out=tmp_path, resume=True, settings={"target": "other"})
    with pytest.raises(FileExistsError, match=f"{tmp_path} has checkpoints of an earlier run; resume it, or take another folder"):
        fit(loss, weights(), FIXED, draw, RUN, out=tmp_path, settings={"target": "pocket"})
    with pytest.raises(FileNotFoundError, match="has no checkpoint to resume from"):
        fit(loss, weights(), FIXED, draw, RUN, out=tmp_path / "other", resume=True)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_no_number_ends_the_run_and_names_step_and_checkpoint(tmp_path, where):
    """At step 4, in the middle of the steps between two rows."""

    def broken(weights, fixed, batch, key):
        bad = jnp.where(batch["step"][0] == 3, 0.0, 1.0)
        if where == "loss":
            return jnp.sum(weights["a"]) / bad, {}
        return jnp.sum(jnp.sqrt(weights["a"] * bad)), {}  # a finite value whose derivative is not

    def numbered(step):
        return {"step": np.full(8, step, np.int32)}

    with pytest.raises(
        FloatingPointError, match=f"the {where} at step 4 is (inf|nan); the last good checkpoint is {tmp_path}/checkpoints/3$"
    ):
        fit(broken, weights(), None, numbered, Run(steps=9, batch=8, every=3, dtype="float32"), out=tmp_path, progress=False)
    assert [row["step"] for row in read_metrics(tmp_path)] == [3]
    unsaved = Run(steps=9, batch=8, every=3, save_every=0, dtype="float32")
    with pytest.raises(FloatingPointError, match="at step 4 is (inf|nan); no checkpoint was written before"):
        fit(broken, weights(), None, numbered, unsaved, out=tmp_path / "unsaved", progress=False)


def test_parts_of_a_batch_and_devices_give_the_whole_batches_weights(tmp_path):
    def plain(weights, fixed, batch, key):
        return loss(weights, fixed, batch, jax.random.key(0))

    placement = placement_of(jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("data",)))
    parts = Run(**{**RUN.__dict__, "accumulate": 2})
    whole = fit(plain, weights(), FIXED, draw, RUN, out=tmp_path / "whole", progress=False)
    halves = fit(plain, weights(), FIXED, draw, parts, out=tmp_path / "parts", progress=False)
    spread = fit(plain, weights(), FIXED, draw, parts, out=tmp_path / "spread", placement=placement, progress=False)
    for found in (halves, spread):
        np.testing.assert_allclose(found["a"], whole["a"], rtol=1e-5)
        np.testing.assert_allclose(found["b"], whole["b"], rtol=1e-5)
    assert len(spread["a"].sharding.device_set) == 4
    # A checkpoint of several devices is one of the same weights, and is read on them.
    again = fit(plain, weights(), FIXED, draw, parts, out=tmp_path / "spread", placement=placement, resume=True, progress=False)
    assert np.array_equal(again["a"], spread["a"]) and len(again["a"].sharding.device_set) == 4
    with pytest.raises(ValueError, match="4 devices along the mesh's axis 'data' do not divide a batch of 2 texts"):
        fit(plain, weights(), FIXED, draw, Run(batch=8, accumulate=4), out=tmp_path, placement=placement)


@pytest.mark.parametrize(("steps", "rates"), [(1, [0.5]), (2, [0.5, 0.01])])
def test_only_matrices_decay_and_the_first_step_counts(tmp_path, steps, rates):
    """A run of a single step learns at the peak. What a run that was killed at its first checkpoint left there does no harm."""

    def nothing(weights, fixed, batch, key):
        return 0.0 * (jnp.sum(weights["a"]) + jnp.sum(weights["b"])), {}

    (tmp_path / loop.CHECKPOINTS / "1.unfinished").mkdir(parents=True)
    run = Run(steps=steps, batch=8, peak=0.5, dtype="float32")
    found = fit(nothing, weights(), None, draw, run, out=tmp_path, progress=False)
    np.testing.assert_allclose(found["a"], 1.5 * np.prod(1 - 0.1 * np.asarray(rates)), rtol=1e-6)
    assert np.array_equal(found["b"], weights()["b"])
    assert [p.name for p in (tmp_path / loop.CHECKPOINTS).iterdir()] == [str(steps)]


@pytest.mark.parametrize(("steps", "rise"), [(1, 1), (2, 1), (49, 1), (100, 2), (1000, 20)])
def test_the_rate_rises_evenly_to_its_peak_and_falls_to_a_fiftieth(steps, rise):
    rates = np.asarray(loop.schedule(2.0, steps)(jnp.arange(steps, dtype=jnp.float32)))
    np.testing.assert_allclose(rates[:rise], 2.0 * np.arange(1, rise + 1) / rise, rtol=1e-6)
    assert (np.diff(rates[rise - 1 :]) < 0).all() and (steps == 1 or rates[-1] == pytest.approx(0.04))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0, expected at least 1"),
        ({"peak": -1e-3}, "peak is -0.001, expected a finite number of more than 0"),
        ({"peak": math.inf}, "peak is inf, expected a finite number"),
        ({"seed": -1}, "seed is -1, expected 0 .. "),
        ({"seed": 2**63}, "seed is 9223372036854775808, expected 0 .. "),
        ({"length": 3}, "length is 3, expected at least 4"),
        ({"batch": 9, "accumulate": 2}, "batch is 9, expected a multiple of accumulate, which is 2"),
        ({"every": 100, "save_every": 150}, "save_every is 150, expected a multiple of every, which is 100"),
        ({"dtype": "float16"}, "dtype is 'float16'; available: 'float32', 'bfloat16'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Run(**changes)


@pytest.mark.parametrize("name", ["steps", "batch", "length", "accumulate", "every", "save_every", "peak"])
def test_what_is_no_number_is_refused_by_name(name):
    for value in ("4", True) if name == "peak" else ("4", True, 2.5):
        with pytest.raises(TypeError, match=rf"^{name} is {value!r} of type {type(value).__name__}, expected "):
            Run(**{name: value})


@pytest.mark.parametrize("name", ["steps", "anchors", "decay", "soft", "hard", "tv", "confidence"])
def test_what_is_no_number_in_an_objective_is_refused_by_name(name):
    with pytest.raises(TypeError, match=f"^the objective's {name} is '1' of type str, expected "):
        Objective(**{name: "1"})


def test_numbers_of_numpy_are_written_into_the_settings(tmp_path):
    run = Run(steps=np.int64(3), save_every=np.int32(100), peak=np.float32(0.5), seed=np.uint32(7))
    assert loop.check_out(tmp_path, run, None, resume=False) | {"save_every": None} == dataclasses.asdict(Run(steps=3, peak=0.5, seed=7))


def test_curves_are_drawn_of_what_was_measured(tmp_path):
    rows = [
        {"step": 0, "measured_acceptance_length": 1.2},
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.0, "held_out_loss": 2.5, "measured_acceptance_length": 1.5},
    ]
    curves.draw_curves(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.dumps(rows)  # as metrics.jsonl has them
