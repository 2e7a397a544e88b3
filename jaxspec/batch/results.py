"""The results of a batch on disk: lines of JSON, each about one line of the input, of which a killed run may leave the last torn."""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec import jsonl


class ChangedInput(ValueError):
    """Results are there for lines that the input has no more."""


class Known:
    """Which requests have results: 8 bytes for each line, and some more for those of several samples."""

    def __init__(self) -> None:
        self.count = self.failed = 0
        self._names = array.array("Q")  # by line number, the hash of its id; 0 where there is no result
        self._samples: dict[int, int] = {}  # line number -> bits of the samples that are there, where a request has several

    def add(self, record: Mapping[str, Any]) -> None:
        line = record["line"]
        if line >= len(self._names):
            self._names.extend(bytes(max(line + 1 - len(self._names), len(self._names))))
        self._names[line] = _hash(record["id"])
        if "index" in record:
            self._samples[line] = self._samples.get(line, 0) | 1 << record["index"]
        self.count += 1
        self.failed += "error" in record

    def check(self, line: int, name: str | int, out: Path) -> None:
        """Raises ChangedInput if the result of this line is of another request."""
        known = self._names[line] if line < len(self._names) else 0
        if known and known != _hash(name):
            raise ChangedInput(
                f"the result of line {line} in {out} has another id than {name!r}, so it is of another input; name another output"
            )

    def missing(self, line: int, n: int) -> list[int]:
        """The samples of a line's n that are still to be made."""
        if line >= len(self._names) or not self._names[line]:
            return list(range(n))
        found = self._samples.get(line)
        return [] if found is None else [i for i in range(n) if not found >> i & 1]


def parsed(text: bytes) -> dict[str, Any] | None:
    """A line of results, None if it is damaged."""
    try:
        record = jsonl.value(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("line"), int) and record["line"] > 0 and "id" in record
    return record if whole else None


def remove_errors(path: Path) -> None:
    """Those of an earlier run, be it one that was killed while it wrote the first: each run finds the bad lines again."""
    if path.exists():
        with open(path, "rb") as file:
            first = file.readline()
        begin, left = b'{"line": ', first.partition(b"\0")[0]
        torn = not left.endswith(b"\n") and left[: len(begin)] == begin[: len(left)]
        if first and not torn and not (parsed(first) or {}).get("error"):
            raise ValueError(f"{path} exists and is not a file of errors; name another")
        path.unlink()


def _hash(name: str | int) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(name).encode(), digest_size=8).digest(), "little") | 1


def write(file: Any, record: Mapping[str, Any]) -> None:
    """Appends a line. Text stays readable, unless it has half of a surrogate pair, which only an escape can hold. The rest as in
    `append`."""
    try:
        line = json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        line = json.dumps(record).encode()
    append(file, line + b"\n")


def append(file: Any, text: bytes) -> None:
    """Hands text to the system. file: without a buffer, which would keep what a full disk has no room for. Raises OSError, which says
    that nothing is lost."""
    left = memoryview(text)
    with _told(file):
        while left:
            left = left[file.write(left) :]


def sync(file: Any) -> None:
    """Waits until all is on the disk. Raises as `append` does."""
    with _told(file):
        os.fsync(file.fileno())


@contextlib.contextmanager
def _told(file: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "what is written stays, and the same command goes on with it"
        raise OSError(error.errno, f"{file.name} cannot be written: {error.strerror}; {hint}") from error
