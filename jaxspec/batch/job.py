"""Batch jobs: requests from a file, results appended to another, so that a run that was killed loses nothing.

A line of input is an object of JSON, or a row of a parquet file. It has "prompt" (a text or token ids) or "messages" (a conversation),
and may have "id" (a text or an integer, by default the line's number), "params" (fields of SamplingParams) and any other columns, which
go to its results. A line of output is one completion: id, line, request (a digest of what was asked), the other columns, text,
finish_reason, stop_reason, seed, model, usage and acceptance; index if the request asked for n > 1; error if it failed alone. A line in
OpenAI's form is answered in that form: see `openai`. A line of input that cannot be served goes to an errors file, with its number and
the reason.

A file `.run.json` next to the results says what the run was started with. It is locked while the run lasts. If the drafter learns from the
job's texts, it is kept in a folder `.drafter` next to the results.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from tqdm.auto import tqdm

from jaxspec import jsonl
from jaxspec.batch import openai, parquet
from jaxspec.batch.inputs import input_of
from jaxspec.batch.isolating import concerns_all, reason, serve_apart, serves_others
from jaxspec.batch.lines import Line, LineReader, name_of
from jaxspec.batch.places import Files, share_of
from jaxspec.batch.results import (
    GOES_ON,
    ChangedInput,
    Known,
    append,
    check_errors,
    digest_of,
    parsed,
    remove_errors,
    result_of,
    settings_of,
    sync,
    write_line,
)
from jaxspec.checkpoint.files import lock, writing
from jaxspec.checks import expanded, integer, type_name
from jaxspec.engine.completion import Completion
from jaxspec.engine.fetches import AHEAD, Fetches
from jaxspec.engine.intake import Prompt
from jaxspec.engine.learn import Learning
from jaxspec.engine.params import MAX_SEED, SamplingParams
from jaxspec.interrupts import heeded
from jaxspec.learning.settings import Learn, learn_of

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
    out: Path | None
    """The file of results; None for standard output."""
    errors: Path | None
    """The file of bad lines; None for standard error."""


@heeded()
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
    include_prompt: bool = False,
    enable_thinking: bool = False,
    learn: float | Learn | None = None,
) -> BatchResult:
    """Completes every request of a file, and appends each result to another file as soon as it is there. If a run is interrupted, the
    same call resumes it and ends with the same results.

    in_path: JSON lines, a file `.parquet`, or "-" for standard input. out_path: JSON lines; a file `.parquet`, which is written at the end,
    from lines that are kept in `OUT.parquet.jsonl` and by which the run resumes; or "-" for standard output, where no run resumes.
    params: what a line's own params leave out. errors: the file for bad lines, by default `OUT.errors.jsonl`, or standard error beside
    standard output. seed: where a request names no seed, its seed is made from this one and its id. shard: "i/n" serves only lines i,
    i + n, i + 2n, ... and puts "-i-of-n" into the names of its files, so that n processes can share a job; "auto" takes i and n from
    SLURM or Open MPI, and "auto/n" takes i from them or from an indexed Job of Kubernetes. token_ids, include_prompt: whether to write
    token ids, and the prompt or messages, too. enable_thinking: goes to the chat template of messages.

    learn: the share of the time, such as 0.05, that the drafter may take to learn from the texts of the job, or all settings as a `Learn`.
    Texts stay the same. The learnt drafter is kept in the folder `OUT.drafter`, a checkpoint that `load` takes, which is written every two
    minutes and at the end; a run that resumes goes on with it. See `LLM.learn`.

    A line that raises goes to the errors file, even if it raises while it is computed together with others. The others go on.

    Raises FileNotFoundError; ValueError or TypeError for arguments that make no sense, two lines with one id, results of another run,
    another input, or a run that another process is still writing; ImportError for a parquet file without pyarrow; OSError if a disk is
    full; what a device raises that concerns all requests. Results that were written stay, whatever is raised.
    """
    with BatchJob(in_path, out_path, errors=errors, shard=shard, together=_spans_processes(llm)) as job:
        shown = {"token_ids": token_ids, "include_prompt": include_prompt}
        job.begin(llm, params, seed=seed, **shown, enable_thinking=enable_thinking, learn=learn)
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
        self._shard, self._shards = share_of(shard)
        source = expanded(in_path)
        self.files = Files.of(source, out_path, errors, self._shard, self._shards)
        self.out = self.files.lines
        if together and (self.out is None or os.fspath(in_path) == "-"):
            raise ValueError("standard input and output are those of one process, and several are to serve the same lines; expected files")
        self._input = input_of(source)
        self._input.check_ids()
        self._known, self._errors, self._bad = Known(), None, 0
        self._asked = array.array("Q")  # by line number, the digest of the request that its result answers; 0 without a result
        self._seen = None if self._input.checked else dict[int, int]()  # digest of an id -> its line
        self._open = contextlib.ExitStack()
        self._learning: Learning | None = None
        self._made = list[Path]()  # files that were not there before
        if self._writes:
            with contextlib.ExitStack() as files:
                if self.out is None:
                    self._out = io.FileIO(sys.stdout.fileno(), "w", closefd=False)
                else:
                    self._made = [path.resolve() for path in (self.files.settings, self.out) if not path.exists()]
                    self._settings = files.enter_context(open(self.files.settings, "a+b", buffering=0))
                    lock(self._settings, self.out)
                    self._out = files.enter_context(open(self.out, "ab", buffering=0))
                    self._repair(self.out)
                if self.files.errors is not None:
                    check_errors(self.files.errors)
                self._open = files.pop_all()
        self._wait()  # until the results are repaired
        if not self._writes and self.out is not None:
            self._repair(self.out)
        self._wait()  # until all know what is there

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._made and not os.fstat(self._settings.fileno()).st_size:  # the run was refused before it began
            for path in self._made:
                path.unlink(missing_ok=True)
        self._open.close()

    def begin(
        self,
        llm: Any,
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        token_ids: bool = False,
        include_prompt: bool = False,
        enable_thinking: bool = False,
        learn: float | Learn | None = None,
    ) -> None:
        """Sets the model and the settings, and writes them beside the results. With `learn` the drafter learns until the job is closed.
        Raises ValueError if results exist that were made with other settings, and what `LLM.learn` raises."""
        self._llm, self._params = llm, SamplingParams() if params is None else params
        self._shown = {"model": llm.name, "tokenizer": llm.tokenizer, "token_ids": token_ids, "prompts": include_prompt}
        seed = integer("seed", seed, 0, MAX_SEED - 1)
        if not isinstance(self._params, SamplingParams):
            raise TypeError(f"params is {type_name(params)}, expected jaxspec.SamplingParams or None")
        if self._params.seed is not None:
            raise ValueError(f"params.seed is {self._params.seed}, which all lines would share; expected None, and a seed for the run")
        self._reader = LineReader(llm, self._params, seed, enable_thinking)
        settings = {
            **llm.text_settings,
            "run_seed": seed,
            "shard": f"{self._shard}/{self._shards}",
            "token_ids": token_ids,
            "include_prompt": include_prompt,
            "enable_thinking": enable_thinking,
            **dataclasses.asdict(self._params),
        }
        text = json.dumps(settings, indent=2) + "\n"
        if self._writes and self.out is not None and self._known.count:
            self._check_settings(json.loads(text))
        self._learning = llm.learning
        if learn is not None:
            self._learning = self._open.enter_context(llm.learn(self.kept(learn)))
        if self._writes and self.out is not None and not self._known.count:
            self._settings.truncate(0)
            append(self._settings, text.encode())
            sync(self._settings)
        if self._writes and self.files.errors is not None:  # only now, as a run that is refused leaves what an earlier one found
            remove_errors(self.files.errors)

    def kept(self, learn: float | Learn) -> Learn:
        """The settings of learning, with the drafter kept beside the results, unless they name another folder. It goes on from what that
        holds."""
        asked = learn_of(learn)
        out = self.files.drafter if asked.out is None else asked.out
        return dataclasses.replace(asked, out=out, resume=out is not None)

    def _check_settings(self, after: dict[str, Any]) -> None:
        """Raises ValueError if the results that are there were made with other settings."""
        self._settings.seek(0)
        before = settings_of(self.files.settings, self._settings.read())
        changed = [f"{name} {before.get(name)!r}, not {after[name]!r}" for name in after if before.get(name) != after[name]]
        if changed:
            raise ValueError(f"{self.out} was made with {'; '.join(changed)}: use the same to resume, or name another output")

    def run(self) -> BatchResult:
        """Serves every line that has no result yet, and returns how that ended. Raises as `run_batch` does."""
        written, failed, tokens, stepped, steps, began = 0, self._known.failed, 0, 0, 0, time.perf_counter()
        synced, show = began, self._llm.progress and self._writes
        name = "standard output" if self.files.result is None else self.files.result.name
        with tqdm(total=self._total() if show else None, desc=name, unit="line", smoothing=0, disable=not show) as bar:

            def blame(asked: _Asked, error: Exception) -> None:
                serves_others(self._llm, error)
                bar.update(self._fail(asked[0], error))

            requests = serve_apart(
                self._llm.as_completed, self._requests(bar), _request, blame, lambda error: concerns_all(error, self._together)
            )
            with contextlib.closing(requests):  # pyright: ignore[reportArgumentType]
                try:
                    for (line, sample), done in requests:
                        record, error = self._keep(line, sample, done)
                        if error is not None:
                            bar.update(self._fail(line, error))
                            continue
                        if time.perf_counter() - synced > SYNC_SECONDS:
                            self._sync()
                            synced = time.perf_counter()
                        if record is not None:
                            written, failed = written + 1, failed + (record.get("error") is not None)
                        tokens, steps = tokens + len(done.token_ids), steps + done.stats.steps
                        stepped += max(len(done.token_ids) - 1, 0)
                        line.left -= 1
                        rate, length = tokens / (time.perf_counter() - began), f"{stepped / steps if steps else 1.0:.2f}"
                        if self._learning is not None:
                            length = self._learning.stats.lengths
                        bar.set_postfix_str(f"{rate:.1f} tokens/s, acceptance length {length}", refresh=False)
                        bar.update(int(not line.left))
                finally:
                    self._sync()
        if self._writes and self.out is not None and self.files.result != self.out:
            with writing(self.files.result, GOES_ON):
                parquet.write(self.out, self.files.result)  # pyright: ignore[reportArgumentType]
        return BatchResult(written, self._known.count, failed, self._bad, self.files.result, self.files.errors)

    def _requests(self, bar: Any) -> Iterator[_Asked]:
        """Yields what remains to be done, and reads the input only as far as that is asked for: with images or sounds some lines further,
        where what URLs name is fetched."""
        with Fetches(self._llm.media) as fetches:
            for asked, line, samples in fetches.ahead(self._left(bar), 0 if self._input.live else AHEAD):
                try:
                    line.prompt = self._reader.prompt(line, asked)
                except Exception as error:
                    self._put_aside(line.number, line.name, error, line.url is not None)
                    _counted(bar)
                    continue
                line.left = len(samples)
                yield from ((line, sample) for sample in samples)

    def _left(self, bar: Any) -> Iterator[tuple[dict[str, Any], Line, list[int]]]:
        """The lines that are not done, with what they ask for and the samples that have no result."""
        for number, row in enumerate(self._input.rows(), start=1):
            if (number - 1) % self._shards != self._shard - 1:
                continue
            line = None if isinstance(row, bytes) and not row.strip() else self._line(number, row)
            samples = [] if line is None else self._known.missing(line.number, line.params.n)
            if line is None or not samples:
                _counted(bar)
                continue
            yield line.asked, line, samples

    def _keep(self, line: Line, sample: int, done: Completion) -> tuple[dict[str, Any] | None, Exception | None]:
        """Appends a completion to the results. Returns what was appended, or the error of this completion alone, and raises any other."""
        try:
            record = result_of(line, sample, done, **self._shown)
            if self._writes and record is not None:
                write_line(self._out, record)
        except OSError:
            raise
        except Exception as error:
            return None, error
        return record, None

    def _sync(self) -> None:
        if self._writes and self.out is not None:
            sync(self._out)

    def _fail(self, line: Line, error: Exception) -> int:
        """Puts a line aside because its request raised. Returns 1, or 0 if the line had been put aside for another of its samples."""
        first, line.failed = not line.failed, True
        if first:
            self._put_aside(line.number, line.name, error, line.url is not None)
        return int(first)

    def _line(self, number: int, row: bytes | dict[str, Any]) -> Line | None:
        """The request of a line, without its prompt; None if it cannot be served, then it goes to the errors file. Raises ChangedInput."""
        name, values = None, None
        try:
            values = jsonl.value(row) if isinstance(row, bytes) else row
            if not isinstance(values, dict):
                raise ValueError(f"the line is a {type(values).__name__}, expected an object")
            name = name_of(number, values)
            line = self._reader.read(number, values)
            if self._seen is not None and (first := self._seen.setdefault(digest_of(name), number)) != number:
                raise ValueError(f"line {number} has the id {name!r} of line {first}; expected an id of its own for each line")
        except Exception as error:
            self._put_aside(number, name, error, isinstance(values, dict) and openai.is_line(values))
            return None
        self._known.check(line.number, line.name, self.out)
        before = self._asked[number] if number < len(self._asked) else 0
        if before and before != line.digest:
            raise ChangedInput(f"line {number} is not the request that its result in {self.out} answers; name another output")
        return line

    def _put_aside(self, number: int, name: Any, error: Exception, openai_form: bool) -> None:
        self._bad += 1
        if not self._writes:
            return
        if self._errors is None:
            path = self.files.errors
            self._errors = io.FileIO(sys.stderr.fileno(), "w", closefd=False) if path is None else open(path, "wb", buffering=0)
            self._open.callback(self._errors.close)
        name = name if isinstance(name, str | int) else None
        told = reason(error)
        for ours in ("images=True", "videos=True", "audio=True"):
            option = f"--{ours.partition('=')[0]}"  # the same on the command line
            told = told.replace(ours, f"{ours}, or with {option}")
        plain = {"line": number, "id": name, "error": told}
        write_line(self._errors, openai.refusal(number, name, told) if openai_form else plain)

    def _wait(self) -> None:
        """Waits until all processes have come here."""
        if self._together:
            multihost_utils.sync_global_devices(f"batch {self.out}")

    def _repair(self, out: Path) -> None:
        """Reads the results of earlier runs, and cuts off a damaged end that a killed run or a power cut left. Raises ValueError."""
        size, end = out.stat().st_size, 0
        there = out if size else self.files.result
        if there is not None and there.exists() and there.stat().st_size and not self.files.settings.stat().st_size:
            raise ValueError(
                f"{there} exists but {self.files.settings.name}, which a run writes next to its results, does not; name another output"
            )
        with open(out, "rb") as file:
            for number, text in enumerate(file, start=1):
                record = parsed(text)
                if record is None:
                    # After a power cut a file system may have zeros in place of earlier blocks. The results from there on are made again.
                    if end + len(text) < size and b"\0" not in text:
                        raise ValueError(f"line {number} of {out} is not a result; remove it, and its request is served again")
                    if self._writes:
                        self._out.truncate(end)
                    break
                self._known.add(record)
                self._asked.extend(bytes(max(record["line"] + 1 - len(self._asked), 0)))
                self._asked[record["line"]] = int(record.get("request", "0"), 16)
                end += len(text)

    def _total(self) -> int | None:
        """The number of lines of the input that this shard serves; None if nobody knows."""
        count = self._input.count()
        return None if count is None else max(count - self._shard + self._shards, 0) // self._shards


_Asked = tuple[Line, int]  # a line, and the index of one of its samples


def _request(asked: _Asked) -> tuple[Prompt, SamplingParams]:
    line, sample = asked
    return line.prompt, dataclasses.replace(line.params, n=1, seed=(line.seed + sample) % MAX_SEED)


def _counted(bar: Any) -> None:
    """Counts a line as done at the start: the bar's rate is of those that this run serves."""
    bar.initial = getattr(bar, "initial", 0) + 1
    bar.update()


def _spans_processes(llm: Any) -> bool:
    return any(not weight.is_fully_addressable for weight in jax.tree.leaves(llm.target))
