"""Batch generation on Ray: what an actor makes of its rows, and, in the slow run, a local Ray. There a replica that is killed is started
again, and every row comes once, with the text it has without Ray."""

import copy
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxspec
from jaxspec import SamplingParams

ray = pytest.importorskip("ray", reason="needs ray[data], which the extra ray installs")
pa = pytest.importorskip("pyarrow", reason="needs pyarrow, which the extra ray installs")
psutil = pytest.importorskip("psutil", reason="needs psutil, by which the processes of actors are found")
import pyarrow.parquet as pq  # noqa: E402

import jaxspec.ray  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("unoptimised"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets that Ray leaves open at its end
]
PARAMS = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
SETTINGS = {"sampling_params": PARAMS, "id_column": "id", "seed": 3, "max_len": 64, "max_slots": 2}
ROWS = [{"id": f"r{i}", "prompt": "def f():"[: 1 + i % 8], "n": i} for i in range(96)]
BLOCK = 8  # rows of a file, and of a batch


@pytest.fixture(scope="module")
def texts(folders):
    """By id, the texts without Ray."""
    with jaxspec.Generator(*folders, **SETTINGS) as generator:
        return {row["id"]: row["text"] for row in generator.rows(ROWS)}


@pytest.fixture(scope="module")
def cluster():
    kept = {  # so that programs are those that the test above has compiled
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in kept.items():
            environment.setenv(name, value)
        ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


@pytest.fixture
def parquet_files(tmp_path):
    (folder := tmp_path / "in").mkdir()
    for i in range(0, len(ROWS), BLOCK):
        pq.write_table(pa.Table.from_pylist(ROWS[i : i + BLOCK]), folder / f"{i:03}.parquet")
    return folder


def workers():
    """The processes of actors that this process's Ray runs."""
    return [process for process in psutil.Process().children(recursive=True) if "ray::MapWorker" in " ".join(process.cmdline())]


@pytest.mark.slow  # Ray takes long to start and to notice; what its actors do is looked at below
def test_a_killed_replica_loses_no_row_and_changes_no_text(cluster, folders, texts, parquet_files, tmp_path):
    """The rows come from parquet files and from JSON lines, one of which cannot be served."""
    path, bad = tmp_path / "in.jsonl", {"id": "bad", "prompt": "", "n": 0}
    later = [path.unlink() for path in sorted(parquet_files.iterdir())[6:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[-len(later) * BLOCK :], bad]))
    read = ray.data.read_parquet(str(parquet_files)).union(ray.data.read_json(str(path)))
    made = jaxspec.ray.generate(read, *folders, **SETTINGS, replicas=2, gpus_per_replica=0, batch_size=BLOCK)
    found, killed = list[dict](), list[int]()
    for batch in made.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
        found += batch.to_pylist()
        if not killed:
            assert len(found) < len(ROWS) // 2
            killed = [process.pid for process in workers()]
            assert len(killed) == 2
            os.kill(killed[0], signal.SIGKILL)
    rows = {row["id"]: row for row in found}
    assert len(found) == len(rows) == len(ROWS) + 1
    assert rows.pop("bad")["error"] == "the prompt is empty; expected at least one token"
    assert {name: row["text"] for name, row in rows.items()} == texts
    assert all(row["error"] is None and row["completion_tokens"] == 24 and row["n"] == int(row["id"][1:]) for row in rows.values())


@pytest.mark.slow
def test_weights_over_two_devices_of_a_replica(cluster, folders, texts, tmp_path):
    """Of the two GPUs that a replica asks for, Ray only keeps count here. The devices are two that the tests pretend to have."""
    made = jaxspec.ray.generate(ray.data.from_items(ROWS[:20]), *folders, **SETTINGS, gpus_per_replica=2, batch_size=BLOCK)
    made.write_parquet(str(tmp_path / "out"))
    found = {row["id"]: row["text"] for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert found == {row["id"]: texts[row["id"]] for row in ROWS[:20]}


@pytest.mark.slow
def test_rows_that_were_written_are_left_out_by_the_next_run(cluster, folders, texts, parquet_files, tmp_path):
    found = list[dict]()
    for last in (40, 96):
        for path in sorted(parquet_files.iterdir())[last // BLOCK :]:
            path.rename(path.with_suffix(".later"))
        read = ray.data.read_parquet(str(parquet_files), file_extensions=["parquet"])
        settings = SETTINGS | {"checkpoint_path": str(tmp_path / "checkpoint"), "batch_size": BLOCK, "gpus_per_replica": 0}
        out = tmp_path / f"out-{last}"
        jaxspec.ray.generate(read, *folders, **settings).write_parquet(str(out))
        assert read.context.checkpoint_config is None and read.count() == last
        found += pq.read_table(out).to_pylist()
        assert len(found) == last
        for path in parquet_files.glob("*.later"):
            path.rename(path.with_suffix(".parquet"))
    assert {row["id"]: row["text"] for row in found} == texts and len(found) == len(texts)


class Recorded:
    """A dataset that notes what it is asked for."""

    def __init__(self, batch_size=256):
        self.context, self.batch_size = SimpleNamespace(checkpoint_config=None), batch_size

    def copy(self, _deep_copy):
        assert _deep_copy
        return copy.deepcopy(self)

    def repartition(self, *, target_num_rows_per_block):
        assert target_num_rows_per_block == self.batch_size
        return self

    def map_batches(self, function, **asked):
        self.asked = function, asked
        return self


def test_an_actor_gives_each_row_its_text(folders):
    """As Ray makes the actor and hands it a batch: one row cannot be served, and the others have the texts that they have one by one."""
    rows, bad = ROWS[:BLOCK], {"id": "bad", "prompt": "", "n": 0}
    actor, asked = jaxspec.ray.generate(Recorded(BLOCK), *folders, **SETTINGS, gpus_per_replica=0, batch_size=BLOCK).asked
    assert (asked["batch_size"], asked["batch_format"]) == (BLOCK, "pyarrow")
    replica = actor(**asked["fn_constructor_kwargs"])
    found = {row["id"]: row for row in replica(pa.Table.from_pylist([*rows, bad])).to_pylist()}
    assert found.pop("bad")["error"] == "the prompt is empty; expected at least one token"
    assert {name: row["text"] for name, row in found.items()} == {row["id"]: row["text"] for row in replica._generator.rows(rows)}
    assert all(row["error"] is None and row["completion_tokens"] == 24 and row["n"] == int(row["id"][1:]) for row in found.values())


def test_what_ray_is_asked_for(monkeypatch):
    monkeypatch.setattr(jaxspec.ray, "_has_gpus", lambda: True)
    for given, gpus, cpus, tensor in (
        ({}, 1, 0, None),
        ({"gpus_per_replica": 4}, 4, 0, 4),
        ({"gpus_per_replica": 4, "tensor": 2, "cpus_per_replica": 3}, 4, 3, 2),
        ({"gpus_per_replica": 0.5}, 0.5, 0, None),
        ({"gpus_per_replica": 0}, None, 0, None),
    ):
        function, asked = jaxspec.ray.generate(Recorded(), "pocket", replicas=(1, 3), **given).asked
        assert function is jaxspec.ray.Replica and (asked.get("num_gpus"), asked.get("num_cpus")) == (gpus, cpus)
        assert asked["fn_constructor_kwargs"]["arguments"].get("tensor") == tensor
        assert (asked["compute"].min_size, asked["compute"].max_size) == (1, 3)


def test_a_replica_has_its_share_of_memory_and_the_cache(monkeypatch):
    made = []
    monkeypatch.setattr(jaxspec.ray, "Generator", lambda **arguments: made.append(dict(os.environ)))
    for gpus, fraction in ((0.5, "0.45"), (4, "0.9"), (0, "0.9")):
        for name in (*jaxspec.ray.MEMORY_VARIABLES, "JAXSPEC_CACHE_DIR"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        jaxspec.ray.Replica(gpus, "/shared/cache", {})
        assert made[-1]["XLA_CLIENT_MEM_FRACTION"] == fraction and made[-1]["JAXSPEC_CACHE_DIR"] == "/shared/cache"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    jaxspec.ray.Replica(1, None, {})
    assert "XLA_CLIENT_MEM_FRACTION" not in made[-1]


def test_a_checkpoint_is_of_the_result_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given, folders = Recorded(), [tmp_path / "first", "~/second"]
    settings = {"id_column": "id", "gpus_per_replica": 0, "cache_dir": Path("~/cache")}
    made = [jaxspec.ray.generate(given, "pocket", checkpoint_path=folder, **settings) for folder in folders]
    assert given.context.checkpoint_config is None
    assert [dataset.context.checkpoint_config.checkpoint_path for dataset in made] == [str(tmp_path / name) for name in ("first", "second")]
    assert made[0].asked[1]["fn_constructor_kwargs"]["cache_dir"] == str(tmp_path / "cache")  # as a replica's environment takes it


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"mesh": "tensor=2"}, "mesh names devices of this process, which replicas do not have; expected gpus_per_replica, or tensor"),
        ({"replicas": 0}, r"replicas is 0, expected at least 1"),
        ({"replicas": (1, 2, 3)}, r"replicas is \(1, 2, 3\), expected a number, or the least and the most"),
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"cpus_per_replica": -1}, "cpus_per_replica is -1.0, expected a finite number of at least 0"),
        ({"gpus_per_replica": 1.5}, "gpus_per_replica is 1.5, expected a part of one, or a number of whole ones"),
        ({"checkpoint_path": "/x"}, "checkpoint_path is given and id_column is not"),
        ({"sampling_params": SamplingParams(seed=1)}, r"sampling_params\.seed is 1, which all rows would share"),
        ({"seed": -1}, "seed is -1, expected 0 .. "),
        ({"id_column": 5}, "id_column is 5, expected the name of a column"),
        ({"cache_dir": 5}, "cache_dir is 5 of type int, expected a folder"),
    ],
)
def test_settings_that_make_no_sense(given, error):
    with pytest.raises((ValueError, TypeError), match=error):
        jaxspec.ray.generate(Recorded(), "pocket", **{"gpus_per_replica": 0, **given})
