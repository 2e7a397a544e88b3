"""Batch jobs: requests from a JSON Lines file, results appended to another, so that a run that was killed loses nothing.

A line of input is an object: "prompt" (a text or token ids) or "messages" (a conversation), and optionally "id" (a text or an integer,
by default the line's number) and "params" (fields of SamplingParams). A line of output is one completion: id, line, request (a
digest of what was asked), text, finish_reason, stop_reason, seed, usage, acceptance; index where the request asked for n > 1; error
where it failed alone.
Lines that ask for nothing that can be served go to an errors file, with their number and the reason.

A file `.run.json` next to the results says what the run was started with. It is locked while the run lasts.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from tqdm.auto import tqdm

from jaxspec import jsonl
from jaxspec.batch.isolating import concerns_all, reason, served
from jaxspec.batch.results import ChangedInput, Known, append, parsed, remove_errors, sync, write
from jaxspec.checks import integer
from jaxspec.engine.completion import Completion
from jaxspec.engine.params import MAX_SEED, SamplingParams

SYNC_SECONDS = 1.0  # what a power cut may undo
KEYS = ("id", "prompt", "messages", "params")
FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """How a run ended. written: completions that it added. kept: completions that were there. failed: those among both that failed
    alone and have an error. bad: lines that could not be served. out, errors: the files."""

    written: int
    kept: int
    failed: int
    bad: int
    out: Path
    errors: Path


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

    A line that raises, be it while others are computed beside it, goes to the errors file, and the others go on.

    Raises FileNotFoundError; ValueError or TypeError for arguments that make no sense, results of another run, another input, or a
    run that another process is still writing; OSError where a disk is full; what a device raises that concerns all requests. Results
    that were written stay, whatever is raised.
    """
    with Batch(in_path, out_path, errors=errors, shard=shard, together=_spans_processes(llm)) as job:
        job.begin(llm, params, seed=seed, token_ids=token_ids, enable_thinking=enable_thinking)
        return job.run()


class Batch:
    """The files of one run, which is its only writer until it is closed. The rest as in `run_batch`: what it checks and raises about
    files comes from here, what concerns the model from `begin`.

    together: whether all processes of `jax.distributed` serve the same requests, with a model that lies on all of them. They must see
    the same files; the first one writes.
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
        self.input, self.out = Path(in_path), self._part(Path(out_path))
        self.errors = self.out.with_suffix(f".errors{self.out.suffix}") if errors is None else self._part(Path(errors))
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
        self._asked = array.array("Q")  # by line number, the digest of the request that its result answers; 0 where there is none
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

    def __enter__(self) -> Batch:
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
        """Says what the requests go to. Raises ValueError if results are there that were made with something else."""
        self._llm, self._params = llm, SamplingParams() if params is None else params
        self._seed, self._token_ids, self._thinking = integer("seed", seed, 0, MAX_SEED - 1), token_ids, enable_thinking
        if not isinstance(self._params, SamplingParams):
            raise TypeError(f"params is {type(params).__name__}, expected SamplingParams or None")
        if self._params.seed is not None:
            raise ValueError(f"params.seed is {self._params.seed}, which all lines would share; expected None, and a seed for the run")
        settings = {
            **llm.text_settings,
            "run_seed": self._seed,
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
        """Serves all lines that have no result yet."""
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

            requests = served(
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
        """What remains to be done, read as it is asked for."""
        for number, text in enumerate(file, start=1):
            if (number - 1) % self._shards != self._shard - 1:
                continue
            line = self._line(number, text) if text.strip() else None
            samples = [] if line is None else self._known.missing(line.number, line.params.n)
            if line is None or not samples:
                # It took no time, and the bar's rate is to be that of those that do.
                bar.initial = getattr(bar, "initial", 0) + 1
                bar.update()
                continue
            line.left = len(samples)
            yield from ((line, sample) for sample in samples)

    def _serves_others(self, error: Exception) -> None:
        """Raises an error that a request raised where none is served: one that asks for as little as can be, by the run's own params."""
        params = dataclasses.replace(self._params, max_tokens=1, min_tokens=0, n=1, seed=0)
        try:
            list(self._llm.as_completed([([0], params)]))
        except Exception:
            raise error from None

    def _keep(self, line: _Line, sample: int, done: Completion) -> Exception | None:
        """Appends a completion to the results. Returns what it raises that concerns this one alone."""
        if self._writes:
            try:
                write(self._out, self._record(line, sample, done))
            except OSError:
                raise
            except Exception as error:
                return error
        return None

    def _fail(self, line: _Line, error: Exception) -> int:
        """Puts a line aside whose request raised, unless another of its samples did before. Returns how many lines that ends."""
        first, line.failed = not line.failed, True
        if first:
            self._put_aside(line.number, line.name, reason(error))
        return int(first)

    def _line(self, number: int, text: bytes) -> _Line | None:
        """A line that can be served. One that cannot goes to the errors file."""
        name: Any = None
        try:
            values = jsonl.value(text)
            if not isinstance(values, dict):
                raise ValueError(f"the line is a {type(values).__name__}, expected an object")
            name = values.get("id", number)
            line = self._checked(number, values)
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
        write(self._errors, {"line": number, "id": name if isinstance(name, str | int) else None, "error": reason})

    def _checked(self, number: int, values: Mapping[str, Any]) -> _Line:
        unknown = [key for key in values if key not in KEYS]
        if unknown:
            within = " (it belongs into params)" if unknown[0] in FIELDS else ""
            raise ValueError(f"found {unknown[0]!r}{within}; expected {', '.join(KEYS)}")
        name, messages = values.get("id", number), values.get("messages")
        prompt = values.get("prompt")
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise TypeError(f"id is {name!r}, expected a text or an integer")
        if (prompt is None) == (messages is None):
            raise ValueError(f"found {'neither prompt nor' if prompt is None else 'both prompt and'} messages; expected one of them")
        given = values.get("params") or {}
        if not isinstance(given, dict):
            raise TypeError(f"params is {given!r}, expected an object")
        unknown = [key for key in given if key not in FIELDS]
        if unknown:
            raise ValueError(f"params has {unknown[0]!r}; expected some of {', '.join(sorted(FIELDS))}")
        params = dataclasses.replace(self._params, **given)
        ids: Any = prompt
        if messages is not None:
            ids = self._llm.chat_prompt(messages, enable_thinking=self._thinking)
        elif isinstance(prompt, str) and prompt:
            ids = self._llm.tokenizer.encode(prompt)
        self._llm.check(ids, params)
        seed = _derived(self._seed, number) if params.seed is None else params.seed
        return _Line(number, name, ids, params, seed, _digest({key: values[key] for key in values if key != "id"}))

    def _record(self, line: _Line, sample: int, done: Completion) -> dict[str, Any]:
        record: dict[str, Any] = {"id": line.name, "line": line.number, "request": f"{line.digest:016x}"}
        if line.params.n > 1:
            record["index"] = sample
        record["text"] = done.text
        if self._token_ids:
            record["token_ids"] = list(done.token_ids)
        record |= {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason, "seed": done.seed}
        record["usage"] = {"prompt_tokens": len(done.prompt_token_ids), "completion_tokens": len(done.token_ids)}
        stats = done.stats
        record["acceptance"] = {
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "length": stats.acceptance_length,
        }
        for key in ("logprobs", "prompt_logprobs"):
            rows = getattr(done, key)
            if rows is not None:
                record[key] = [row and {token: dataclasses.asdict(found) for token, found in row.items()} for row in rows]
        if done.finish_reason == "error":
            record["error"] = done.error
        return record

    def _part(self, path: Path) -> Path:
        return path if self._shards == 1 else path.with_name(f"{path.stem}-{self._shard}-of-{self._shards}{path.suffix}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._settings, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.out} is being written by another process; wait for it, or name another output") from error

    def _wait(self) -> None:
        """For all processes to come here."""
        if self._together:
            multihost_utils.sync_global_devices(f"batch {self.out}")

    def _repair(self) -> None:
        """Reads the results that are there, and cuts off what a killed run or a power cut left at the end."""
        size, end = self.out.stat().st_size, 0
        if size and not self._settings_file.stat().st_size:
            raise ValueError(
                f"{self.out} exists but {self._settings_file.name}, which a run writes next to its results, does not; name another output"
            )
        with open(self.out, "rb") as file:
            for number, text in enumerate(file, start=1):
                record = parsed(text)
                if record is None:
                    # A file system may lose blocks before the last: they are zeros then. What follows them is made again.
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
        """Lines of this shard."""
        with open(self.input, "rb", buffering=0) as file:
            count, last = 0, b"\n"
            while block := file.read(1 << 20):
                count, last = count + block.count(b"\n"), block[-1:]
        count += last != b"\n"
        return max(count - self._shard + self._shards, 0) // self._shards


@dataclasses.dataclass
class _Line:
    """A request of the input. seed: of its first sample. digest: of what it asks. left: samples that are still to come. failed: whether
    one of them raised."""

    number: int
    name: str | int
    prompt: list[int]
    params: SamplingParams
    seed: int
    digest: int
    left: int = 0
    failed: bool = False


_Asked = tuple[_Line, int]  # a line, and which of its samples


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


def _digest(request: Mapping[str, Any]) -> int:
    """64 bits, not 0, that tell requests apart, in whatever order and spacing a line writes them."""
    text = json.dumps(request, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1


def _derived(seed: int, number: int) -> int:
    """The seed of a line, which does not depend on what else a run serves: 53 bits, which every reader of JSON keeps."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 11
