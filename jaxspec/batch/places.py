"""Which files a run of a batch job writes, and which lines it serves where several processes share the job."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jaxspec.batch import parquet
from jaxspec.checks import expanded


@dataclasses.dataclass(frozen=True)
class Files:
    """The files that a run writes. With shards, their names have "-i-of-n"."""

    result: Path | None
    """What the user asked for; None for standard output."""
    lines: Path | None
    """Results as lines of JSON, as they come. The same file, except for parquet."""
    errors: Path | None
    """Lines that cannot be served; None for standard error."""

    @property
    def settings(self) -> Path:
        """What the run was started with."""
        assert self.result is not None
        return self.result.with_name(self.result.name + ".run.json")

    @property
    def drafter(self) -> Path | None:
        """Folder of the drafter that learns from the results, beside them; None for standard output."""
        return None if self.result is None else self.result.with_name(self.result.name + ".drafter")

    @classmethod
    def of(cls, in_path: Path, out_path: str | os.PathLike[str], errors: str | os.PathLike[str] | None, shard: int, shards: int) -> Files:
        """Raises ValueError where two of the files are the same, FileNotFoundError and IsADirectoryError."""
        if os.fspath(out_path) == "-":
            own = None if errors is None else of_shard(expanded(errors), shard, shards)
            _check_writable("errors", own)
            if own is not None and own.resolve() == in_path.resolve():
                raise ValueError(f"the errors would be written over the input, {own}; expected another file")
            return cls(None, None, own)
        _check_writable("output", expanded(out_path))
        result = of_shard(expanded(out_path), shard, shards)
        if result.suffix == parquet.SUFFIX:
            parquet.library()  # raises where it cannot be written
            lines = result.with_name(result.name + ".jsonl")
        else:
            lines = result
        aside = result.with_suffix(f".errors{'.jsonl' if lines != result else result.suffix}")
        made = cls(result, lines, aside if errors is None else of_shard(expanded(errors), shard, shards))
        files = {"input": in_path, "output": result, "errors": made.errors, "run file": made.settings}
        files |= {} if lines == result else {"lines": lines}
        if len({path.resolve() for path in files.values() if path}) < len(files):
            named = ", ".join(f"the {name} {path}" for name, path in files.items())
            raise ValueError(f"found {named}; expected {'four' if lines == result else 'five'} different files")
        _check_writable("errors", made.errors)
        if result.exists() and not result.is_file():
            raise ValueError(f"the output {result} is a device or a pipe, where no run resumes; expected a file, or - for standard output")
        return made


def _check_writable(name: str, path: Path | None) -> None:
    """Raises FileNotFoundError or IsADirectoryError for a file that cannot be one."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} of the {name} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"the {name} {path} is a folder; expected a file to write")


def of_shard(path: Path, shard: int, shards: int) -> Path:
    """The name of a shard's file."""
    return path if shards == 1 else path.with_name(f"{path.stem}-{shard}-of-{shards}{path.suffix}")


def share_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(i, n), i from 1: the share that "i/n", "auto" or "auto/n" names. Raises ValueError."""
    if text == "auto" or text.startswith("auto/"):
        return _by_cluster(text, environment)
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    shard, shards = map(int, found.groups()) if found else (0, 0)
    if not 1 <= shard <= shards:
        raise ValueError(f"shard is {text!r}, expected i/n with i from 1 to n, such as 2/4, or auto, or auto/n")
    return shard, shards


def _by_cluster(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """What the launcher of this process says: its rank and their number. An inner launcher goes before an outer one."""
    said = _said("Open MPI", environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if said is None and "SLURM_STEP_NODELIST" in environment:  # a script of sbatch has a rank too, but is no step
        said = _said("SLURM", environment, "SLURM_PROCID", "SLURM_NTASKS")
    if "SLURM_ARRAY_TASK_ID" in environment and (said is None or said[2] == 1):
        raise ValueError(
            f"shard is {text!r} in a job array of SLURM, whose tasks may be any of any number; expected i/n, such as "
            "--shard $((SLURM_ARRAY_TASK_ID + 1))/8 for --array=0-7"
        )
    if said is None and (index := environment.get("JOB_COMPLETION_INDEX")) is not None:
        said = ("Kubernetes", int(index), None)
    if said is None:
        known = "SLURM (in a step, started by srun), Open MPI and Kubernetes (an indexed Job)"
        raise ValueError(f"shard is {text!r}, but no launcher says which process this is; known are {known}; expected i/n")
    name, rank, count = said
    given = re.fullmatch(r"auto/(\d+)", text)
    if text != "auto" and (given is None or count not in (None, int(given[1]))):
        expected = "auto" if count else "auto/n"
        raise ValueError(f"shard is {text!r}, and {name} says that this is process {rank + 1} of {count or 'n'}; expected {expected}")
    count = count or (int(given[1]) if given else 0)
    if not count:
        raise ValueError(f"shard is 'auto', and {name} says that this is process {rank + 1} but not of how many; expected auto/n")
    if rank >= count:
        raise ValueError(f"shard is {text!r}, and {name} says that this is process {rank + 1}; expected more shards")
    return rank + 1, count


def _said(name: str, environment: Mapping[str, str], rank: str, count: str) -> tuple[str, int, int | None] | None:
    return (name, int(environment[rank]), int(environment[count])) if rank in environment and count in environment else None
