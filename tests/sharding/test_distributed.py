"""A mesh that spans processes, as it does hosts: here two, of two fake CPU devices each."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

import jaxspec
from jaxspec import cli
from jaxspec.batch import job
from jaxspec.engine.params import SamplingParams
from jaxspec.sharding import meshes as mesh_files

LINES = 40


def slurm_job() -> tuple[int, int]:
    """The id of a job of SLURM whose port, which JAX computes from it, is free; and that port."""
    first = 2**16 - 2**12
    for job_id in range(os.getpid() % 2**12, 2**12):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", first + job_id))
            return job_id, first + job_id
    raise RuntimeError("no port is free")


@pytest.mark.slow  # tests/batch/test_batch.py kills a job and resumes it; what the processes compute is that of any mesh
def test_a_batch_over_two_processes_ends_when_one_dies_and_goes_on_in_one(folders, unoptimised, tmp_path):
    target, path, out = folders[0], tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": f"r{i}", "prompt": "def f():"[: i % 7 + 1], "params": {"max_tokens": 20 + i % 13}} for i in range(LINES)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    job_id, port = slurm_job()
    command = [
        "batch",
        "--target",
        str(target),
        "--max-len",
        "64",
        "--max-slots",
        "1",
        "--temperature",
        "0.8",
        "--ignore-eos",
        str(path),
        str(out),
    ]
    settings = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }

    def start(*options: str, **more: str) -> subprocess.Popen:
        whole = [sys.executable, "-m", "jaxspec", *command, "--mesh", "tensor=4", *options]
        return subprocess.Popen(whole, env=os.environ | settings | more, stderr=subprocess.PIPE, text=True)

    # One is told who it is, and the other finds out as in a step of SLURM.
    first = start("--process", "1/2", "--coordinator", f"localhost:{port}")
    step = {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    second = start("--coordinator", "auto", SLURM_JOB_ID=str(job_id), **step)
    deadline = time.monotonic() + 300
    while first.poll() is None and second.poll() is None and time.monotonic() < deadline and not (out.exists() and out.stat().st_size):
        time.sleep(0.002)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    _, said = first.communicate(timeout=120)
    # Either a call failed, or the processes' heartbeat did.
    assert first.returncode in (1, -signal.SIGABRT), said
    assert first.returncode != 1 or ("jaxspec: a process of this run failed or is gone (" in said and "; the same command resumes" in said)
    found = out.read_bytes().count(b"\n")
    assert 0 < found < LINES

    llm = jaxspec.load(target, max_len=64, max_slots=1, progress=False)
    params = SamplingParams(temperature=0.8, ignore_eos=True)
    result = job.run_batch(llm, path, out, params)
    assert (result.written, result.kept) == (LINES - found, found)
    job.run_batch(llm, path, tmp_path / "whole.jsonl", params)
    assert sorted(out.read_text().splitlines()) == sorted((tmp_path / "whole.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--process", "3/2", "--coordinator", "x:1"],
            "process is '3/2' and coordinator 'x:1', expected i/n with i from 1 to n, and host:port",
        ),
        (["--process", "1/2"], "process is '1/2' and coordinator None, expected i/n"),
        (["--coordinator", "x:1"], "process is None and coordinator 'x:1', expected i/n"),
    ],
)
def test_processes_that_make_no_sense_are_refused(options, message, tmp_path, capsys):
    assert cli.main(["batch", "in.jsonl", str(tmp_path / "out.jsonl"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"jaxspec: {message}")


def test_a_cluster_that_is_not_there(tmp_path):
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "KUBERNETES_"))}
    command = [sys.executable, "-m", "jaxspec", "batch", "in.jsonl", str(tmp_path / "out.jsonl"), "--coordinator", "auto"]
    ended = subprocess.run(command, env=alone, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("jaxspec: coordinator is 'auto', but JAX finds no cluster (")
    assert ended.stderr.endswith("an indexed Job of Kubernetes with the package kubernetes; expected host:port\n")


def test_processes_that_share_nothing_need_no_mesh(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    one = ["batch", "in.jsonl", str(tmp_path / "out.jsonl"), "--process", "1/1", "--coordinator", "x:1"]
    for mesh in ([], ["--mesh", "tensor=2"]):
        assert cli.main([*one, *mesh]) == 2
        assert capsys.readouterr().err == (
            "jaxspec: the processes have 8 devices; expected --mesh over all of them, or --shard without --process\n"
        )
    monkeypatch.setattr(mesh_files, "_processes", lambda mesh: 2)
    assert cli.main([*one, "--mesh", "data=2,tensor=4"]) == 2
    assert capsys.readouterr().err.startswith("jaxspec: the mesh has data=2 and lies in 2 processes; expected tensor alone")
    assert not list(tmp_path.iterdir())
