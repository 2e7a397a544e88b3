"""The results of a batch on disk: lines of JSON, one for each completion. A killed run may leave the last line incomplete."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec import jsonl
from jaxspec.batch import openai
from jaxspec.batch.lines import Line
from jaxspec.checkpoint.files import writing
from jaxspec.engine.completion import Completion

if TYPE_CHECKING:
    from jaxspec.text import Tokenizer


# What else to say where a disk is full.
GOES_ON = "what is written stays, and the same command goes on with it"


class ChangedInput(ValueError):
    """The input has other lines than those that results exist for."""


class Known:
    """Which requests have results. It takes 8 bytes a line, and a little more for a line with several samples."""

    def __init__(self) -> None:
        self.count = 0  # results
        self.failed = 0  # results with an error
        self._names = array.array("Q")  # by line number, the hash of its id; 0 without a result
        self._samples: dict[int, int] = {}  # of lines with several samples: line number -> a bit for each sample with a result

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes note of a result: a line of the output."""
        line = record["line"]
        if line >= len(self._names):
            self._names.extend(bytes(max(line + 1 - len(self._names), len(self._names))))
        self._names[line] = digest_of(record["id"])
        if "index" in record:
            self._samples[line] = self._samples.get(line, 0) | 1 << record["index"]
        self.count += 1
        self.failed += record.get("error") is not None

    def check(self, line: int, name: str | int, out: Path | None) -> None:
        """Raises ChangedInput if this line has a result under another id. out: the output, for the error."""
        known = self._names[line] if line < len(self._names) else 0
        if known and known != digest_of(name):
            raise ChangedInput(
                f"the result of line {line} in {out} has another id than {name!r}, so it is of another input; name another output"
            )

    def missing(self, line: int, n: int) -> list[int]:
        """The indices, of 0 .. n - 1, of a line's samples that have no result."""
        if line >= len(self._names) or not self._names[line]:
            return list(range(n))
        found = self._samples.get(line)
        return [] if found is None else [i for i in range(n) if not found >> i & 1]


def result_of(
    line: Line, sample: int, done: Completion, *, model: str, tokenizer: Tokenizer, token_ids: bool, prompts: bool
) -> dict[str, Any] | None:
    """The line of results for a completion. None for a line in OpenAI's form that has other samples to come: its result has them all.

    sample: its index among the samples of the input's line. model, tokenizer: the target's name, and its tokenizer. token_ids, prompts:
    include them.
    """
    asked = line.asked if prompts else {}
    if line.url is not None:
        line.samples[sample] = done
        if len(line.samples) < line.params.n:
            return None
        samples = [line.samples[i] for i in range(line.params.n)]
        most = line.params.logprobs or 0
        return openai.record(line.number, line.digest, line.url, str(line.name), samples, model, most, tokenizer) | asked
    record: dict[str, Any] = {"id": line.name, "line": line.number, "request": f"{line.digest:016x}", **line.extra, **asked}
    if line.params.n > 1:
        record["index"] = sample
    record["text"] = done.text
    if "messages" in line.asked:
        record["message"] = done.message
    if token_ids:
        record["token_ids"] = list(done.token_ids)
    record |= {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason, "seed": done.seed, "model": model}
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


def parsed(text: bytes) -> dict[str, Any] | None:
    """The result in a line, or None if the line is damaged. One in OpenAI's form has "line" and "request" too, and its id is custom_id."""
    try:
        record = jsonl.value(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    if "custom_id" in record and "line" not in record and (place := openai.place_of(record)):
        record |= {"line": place[0], "request": place[1], "id": record["custom_id"]}
    intact = isinstance(record.get("line"), int) and record["line"] > 0 and "id" in record
    return record if intact else None


def settings_of(path: Path, text: bytes) -> dict[str, Any]:
    """What a file `.run.json` says: `text`, which may be empty. Raises ValueError, naming the file, if it is damaged."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected an object")
    return found


def check_errors(path: Path) -> None:
    """Raises ValueError for a file that is there and is not one of errors. The only line of one may be incomplete."""
    if path.is_file():
        with open(path, "rb") as file:
            first = file.readline()
        begin, left = b'{"line": ', first.partition(b"\0")[0]
        torn = not left.endswith(b"\n") and left[: len(begin)] == begin[: len(left)]
        if first and not torn and not (parsed(first) or {}).get("error"):
            raise ValueError(f"{path} exists and is not a file of errors; name another")


def remove_errors(path: Path) -> None:
    """Removes the errors file of an earlier run, because each run finds the bad lines again. A device, such as /dev/null, stays; and so
    does a link."""
    if path.is_file():
        if path.is_symlink():
            os.truncate(path, 0)
        else:
            path.unlink()


def digest_of(name: Any) -> int:
    """64 bits of an id, never 0."""
    return int.from_bytes(hashlib.blake2b(json.dumps(name).encode(), digest_size=8).digest(), "little") | 1


def write_line(file: Any, record: Mapping[str, Any]) -> None:
    """Appends a line of JSON in UTF-8. Text is escaped only if it has half of a surrogate pair, which UTF-8 cannot hold. Numbers of columns
    that are passed on and that JSON cannot hold, NaN and infinite ones, become null.

    file: as for `append`, and so is what it raises.
    """
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        line = json.dumps(_finite(record), ensure_ascii=False)
    try:
        text = line.encode()
    except UnicodeEncodeError:
        text = json.dumps(json.loads(line)).encode()
    append(file, text + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(held) for key, held in value.items()}
    return [_finite(held) for held in value] if isinstance(value, list | tuple) else value


def append(file: Any, text: bytes) -> None:
    """Hands text to the operating system. Raises OSError, which says that the earlier results stay.

    file: opened without a buffer, since a buffer would keep what did not fit on a full disk and write it later.
    """
    left = memoryview(text)
    with _explained(file):
        while left:
            left = left[file.write(left) :]


def sync(file: Any) -> None:
    """Waits until everything written is on the disk. Raises as `append` does."""
    with _explained(file):
        os.fsync(file.fileno())


def _explained(file: Any) -> contextlib.AbstractContextManager[None]:
    if isinstance(file.name, int):  # standard output or error
        return contextlib.nullcontext()
    return writing(file.name, GOES_ON)
