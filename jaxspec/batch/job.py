"""Batch jobs: requests from a JSON Lines file, results appended to another, so that a run that was killed loses nothing.

A line of input is an object. It has "prompt" (a text or token ids) or "messages" (a conversation), and may have "id" (a text or an
integer, by default the line's number) and "params" (fields of SamplingParams). A line of output is one completion: id, line, request (a
digest of what was asked), text, finish_reason, stop_reason, seed, usage and acceptance; index if the request asked for n > 1; error
if it failed alone. A line of input that cannot be served goes to an errors file, with its number and the reason.

A file `.run.json` next to the results says what the run was started with. It is locked while the run lasts.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from tqdm.auto import tqdm

from jaxspec import jsonl
from jaxspec.batch.isolating import concerns_all, reason, serve_apart
from jaxspec.batch.lines import Line, LineReader
from jaxspec.batch.results import ChangedInput, Known, append, parsed, remove_errors, result_of, sync, write_line
from jaxspec.checks import integer
from jaxspec.engine.completion import Completion
from jaxspec.engine.params import MAX_SEED, SamplingParams

SYNC_SECONDS = 1.0  # a power cut loses the results of about so long


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """How a run ended."""

    written: int
    """Completions that this run added."""
    kept: int
    """Completions that earlier runs had written."""
    failed: int
    """How many of both have an error, which concerns them alone."""
    bad: int
    """Lines that could not be served."""
    out: Path
    """The file of results."""
    errors: Path
    """The file of bad lines."""


def run_batch(
    llm: Any,
    in_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    params: SamplingParams | None = None,
    *,
    errors: str | os.PathLike[str] | None = None,
    seed: int = 0,
    shard: str = "1/1",
    token_ids: bool = False,
    enable_thinking: bool = False,
) -> BatchResult:
    """Completes every request of a file, and appends each result to another file as soon as it is there. If a run is interrupted, the
    same call resumes it and ends with the same results.

    params: what a line's own params leave out. errors: the file for bad lines, by default `OUT.errors.jsonl`. seed: where a request
    names no seed, its seed is made from this one and the line's number. shard: "i/n" serves only lines i, i + n, i + 2n, ... and puts
    "-i-of-n" into the names of its files, so that n processes can share a job. token_ids: whether to write token ids too.
    enable_thinking: goes to the chat template of messages.

    A line that raises goes to the errors file, even if it raises while it is computed together with others. The others go on.

    Raises FileNotFoundError; ValueError or TypeError for arguments that make no sense, results of another run, another input, or a
    run that another process is still writing; OSError if a disk is full; what a device raises that concerns all requests. Results
    that were written stay, whatever is raised.
    """
    with BatchJob(in_path, out_path, errors=errors, shard=shard, together=_spans_processes(llm)) as job:
        job.begin(llm, params, seed=seed, token_ids=token_ids, enable_thinking=enable_thinking)
        return job.run()


class BatchJob:
    """One run of a batch job. It opens and locks the files, so it is their only writer until it is closed.

    Arguments and errors are those of `run_batch`: the constructor checks the files, `begin` the model and the settings. together:
    whether all processes of `jax.distributed` serve the same requests, with a model that lies on all of them. They must see the same
    files; the first one writes.
    """

    def __init__(
        self,
        in_path: str | os.PathLike[str],
        out_path: str | os.PathLike[str],
        *,
        errors: str | os.PathLike[str] | None = None,
        shard: str = "1/1",
        together: bool = False,
    ):
        self._together, self._writes = together, not together or jax.process_index() == 0
        self._shard, self._shards = _shard(shard)
        self.input, self.out = Path(in_path), self._of_shard(Path(out_path))
        self.errors = self.out.with_suffix(f".errors{self.out.suffix}") if errors is None else self._of_shard(Path(errors))
        self._settings_file = self.out.with_name(self.out.name + ".run.json")
        files = {"input": self.input, "output": self.out, "errors": self.errors, "run file": self._settings_file}
        if len({path.resolve() for path in files.values()}) < len(files):
            named = ", ".join(f"the {name} {path}" for name, path in files.items())
            raise ValueError(f"found {named}; expected four different files")
        if not self.input.is_file():
            raise FileNotFoundError(f"{self.input} is not a file; expected a file of JSON lines")
        if not self.out.parent.is_dir():
            raise FileNotFoundError(f"the output's folder {self.out.parent} does not exist")
        if self.out.is_dir():
            raise IsADirectoryError(f"the output {self.out} is a folder; expected a file to write")
        self._known, self._errors, self._bad = Known(), None, 0
        self._asked = array.array("Q")  # by line number, the digest of the request that its result answers; 0 without a result
        self._files = contextlib.ExitStack()
        if self._writes:
            with contextlib.ExitStack() as files:
                self._settings = files.enter_context(open(self._settings_file, "a+b", buffering=0))
                self._lock()
                self._out = files.enter_context(open(self.out, "ab", buffering=0))
                self._repair()
                remove_errors(self.errors)
                self._files = files.pop_all()
        self._wait()  # until the results are repaired
        if not self._writes:
            self._repair()
        self._wait()  # until all know what is there

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, *_: Any) -> None:
        self._files.close()

    def begin(
        self,
        llm: Any,
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        token_ids: bool = False,
        enable_thinking: bool = False,
    ) -> None:
        """Sets the model and the settings, and writes them beside the results. Raises ValueError if results exist that were made with
        other settings."""
        self._llm, self._params = llm, SamplingParams() if params is None else params
        self._token_ids = token_ids
        seed = integer("seed", seed, 0, MAX_SEED - 1)
        if not isinstance(self._params, SamplingParams):
            raise TypeError(f"params is {type(params).__name__}, expected SamplingParams or None")
        if self._params.seed is not None:
            raise ValueError(f"params.seed is {self._params.seed}, which all lines would share; expected None, and a seed for the run")
        self._reader = LineReader(llm, self._params, seed, enable_thinking)
        settings = {
            **llm.text_settings,
            "run_seed": seed,
            "shard": f"{self._shard}/{self._shards}",
            "token_ids": token_ids,
            "enable_thinking": enable_thinking,
            **dataclasses.asdict(self._params),
        }
        text = json.dumps(settings, indent=2) + "\n"
        if not self._writes:
            return
        if self._known.count:
            self._settings.seek(0)
            before, after = json.loads(self._settings.read()), json.loads(text)
            changed = [f"{name} {before.get(name)!r}, not {after[name]!r}" for name in after if before.get(name) != after[name]]
            if changed:
                raise ValueError(f"{self.out} was made with {'; '.join(changed)}: use the same to resume, or name another output")
            return
        self._settings.truncate(0)
        append(self._settings, text.encode())
        sync(self._settings)

    def run(self) -> BatchResult:
        """Serves every line that has no result yet, and returns how that ended. Raises as `run_batch` does."""
        written, failed, tokens, stepped, steps, began = 0, self._known.failed, 0, 0, 0, time.perf_counter()
        synced = began
        show = self._llm.progress and self._writes
        with (
            open(self.input, "rb") as file,
            tqdm(total=self._total() if show else None, desc=self.out.name, unit="line", smoothing=0, disable=not show) as bar,
        ):

            def blame(asked: _Asked, error: Exception) -> None:
                self._serves_others(error)
                bar.update(self._fail(asked[0], error))

            requests = serve_apart(
                self._llm.as_completed, self._requests(file, bar), _request, blame, lambda error: concerns_all(error, self._together)
            )
            with contextlib.closing(requests):  # pyright: ignore[reportArgumentType]
                try:
                    for (line, sample), done in requests:
                        if error := self._keep(line, sample, done):
                            bar.update(self._fail(line, error))
                            continue
                        if self._writes and time.perf_counter() - synced > SYNC_SECONDS:
                            sync(self._out)
                            synced = time.perf_counter()
                        written, failed = written + 1, failed + (done.finish_reason == "error")
                        tokens, steps = tokens + len(done.token_ids), steps + done.stats.steps
                        stepped += max(len(done.token_ids) - 1, 0)
                        line.left -= 1
                        rate, length = tokens / (time.perf_counter() - began), stepped / steps if steps else 1.0
                        bar.set_postfix_str(f"{rate:.1f} tokens/s, acceptance length {length:.2f}", refresh=False)
                        bar.update(int(not line.left))
                finally:
                    if self._writes:
                        sync(self._out)
        return BatchResult(written, self._known.count, failed, self._bad, self.out, self.errors)

    def _requests(self, file: Any, bar: Any) -> Iterator[_Asked]:
        """Yields what remains to be done, and reads the input only as far as that is asked for."""
        for number, text in enumerate(file, start=1):
            if (number - 1) % self._shards != self._shard - 1:
                continue
            line = self._line(number, text) if text.strip() else None
            samples = [] if line is None else self._known.missing(line.number, line.params.n)
            if line is None or not samples:
                # Counted as done at the start: the bar's rate is of the lines that this run serves.
                bar.initial = getattr(bar, "initial", 0) + 1
                bar.update()
                continue
            line.left = len(samples)
            yield from ((line, sample) for sample in samples)

    def _serves_others(self, error: Exception) -> None:
        """Tries a request of one token. Raises `error`, which another request raised, if that fails too: then no request is to blame."""
        params = dataclasses.replace(self._params, max_tokens=1, min_tokens=0, n=1, seed=0)
        try:
            list(self._llm.as_completed([([0], params)]))
        except Exception:
            raise error from None

    def _keep(self, line: Line, sample: int, done: Completion) -> Exception | None:
        """Appends a completion to the results. Returns an error that concerns this completion alone, and raises any other."""
        if self._writes:
            try:
                write_line(self._out, result_of(line, sample, done, token_ids=self._token_ids))
            except OSError:
                raise
            except Exception as error:
                return error
        return None

    def _fail(self, line: Line, error: Exception) -> int:
        """Puts a line aside because its request raised. Returns 1, or 0 if the line had been put aside for another of its samples."""
        first, line.failed = not line.failed, True
        if first:
            self._put_aside(line.number, line.name, reason(error))
        return int(first)

    def _line(self, number: int, text: bytes) -> Line | None:
        """The request of a line, or None if it cannot be served: then it goes to the errors file. Raises ChangedInput."""
        name: Any = None
        try:
            values = jsonl.value(text)
            if not isinstance(values, dict):
                raise ValueError(f"the line is a {type(values).__name__}, expected an object")
            name = values.get("id", number)
            line = self._reader.read(number, values)
        except Exception as error:
            self._put_aside(number, name, reason(error))
            return None
        self._known.check(line.number, line.name, self.out)
        before = self._asked[number] if number < len(self._asked) else 0
        if before and before != line.digest:
            raise ChangedInput(f"line {number} is not the request that its result in {self.out} answers; name another output")
        return line

    def _put_aside(self, number: int, name: Any, reason: str) -> None:
        self._bad += 1
        if not self._writes:
            return
        if self._errors is None:
            self._errors = self._files.enter_context(open(self.errors, "wb", buffering=0))
        write_line(self._errors, {"line": number, "id": name if isinstance(name, str | int) else None, "error": reason})

    def _of_shard(self, path: Path) -> Path:
        """The name of this shard's file."""
        return path if self._shards == 1 else path.with_name(f"{path.stem}-{self._shard}-of-{self._shards}{path.suffix}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._settings, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.out} is being written by another process; wait for it, or name another output") from error

    def _wait(self) -> None:
        """Waits until all processes have come here."""
        if self._together:
            multihost_utils.sync_global_devices(f"batch {self.out}")

    def _repair(self) -> None:
        """Reads the results of earlier runs, and cuts off a damaged end that a killed run or a power cut left. Raises ValueError."""
        size, end = self.out.stat().st_size, 0
        if size and not self._settings_file.stat().st_size:
            raise ValueError(
                f"{self.out} exists but {self._settings_file.name}, which a run writes next to its results, does not; name another output"
            )
        with open(self.out, "rb") as file:
            for number, text in enumerate(file, start=1):
                record = parsed(text)
                if record is None:
                    # After a power cut a file system may have zeros in place of earlier blocks. The results from there on are made again.
                    if end + len(text) < size and b"\0" not in text:
                        raise ValueError(f"line {number} of {self.out} is not a result; remove it, and its request is served again")
                    if self._writes:
                        self._out.truncate(end)
                    break
                self._known.add(record)
                self._asked.extend(bytes(max(record["line"] + 1 - len(self._asked), 0)))
                self._asked[record["line"]] = int(record.get("request", "0"), 16)
                end += len(text)

    def _total(self) -> int:
        """The number of lines of the input that this shard serves."""
        with open(self.input, "rb", buffering=0) as file:
            count, last = 0, b"\n"
            while block := file.read(1 << 20):
                count, last = count + block.count(b"\n"), block[-1:]
        count += last != b"\n"
        return max(count - self._shard + self._shards, 0) // self._shards


_Asked = tuple[Line, int]  # a line, and the index of one of its samples


def _request(asked: _Asked) -> tuple[list[int], SamplingParams]:
    line, sample = asked
    return line.prompt, dataclasses.replace(line.params, n=1, seed=(line.seed + sample) % MAX_SEED)


def _spans_processes(llm: Any) -> bool:
    return any(not weight.is_fully_addressable for weight in jax.tree.leaves(llm.target))


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    shard, shards = map(int, found.groups()) if found else (0, 0)
    if not 1 <= shard <= shards:
        raise ValueError(f"shard is {text!r}, expected i/n with i from 1 to n, such as 2/4")
    return shard, shards
