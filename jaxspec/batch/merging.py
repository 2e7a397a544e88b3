"""Putting the results of all shards of a batch together, and saying what is missing."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import jsonl
from jaxspec.batch import openai, parquet
from jaxspec.batch.inputs import input_of
from jaxspec.batch.lines import digest_of_request
from jaxspec.batch.places import Files, of_shard
from jaxspec.batch.results import parsed, settings_of
from jaxspec.checkpoint.files import writing
from jaxspec.checks import expanded

SHOWN = 8  # ranges of missing lines that are listed


@dataclasses.dataclass(frozen=True)
class Merged:
    """What was put together."""

    out: Path
    """The file of all results."""
    results: int
    """How many there are."""
    shards: int
    """Of how many shards."""
    missing: list[str]
    """What has no result, in words; empty if all is there."""


def merge(in_path: str | os.PathLike[str], out_path: str | os.PathLike[str], *, errors: str | os.PathLike[str] | None = None) -> Merged:
    """Writes the results of all shards of a batch to one file, in the order of the input, and the shards' errors beside it.

    in_path: the input of the shards. out_path: the output as the shards were given it, so `OUT-1-of-n` and so on are read. errors: the
    file for bad lines as the shards were given it, if they were given one. What is written is as one run would have left it: the same
    call without shards resumes it and serves what is missing. Takes 40 bytes a result.

    Raises FileNotFoundError without any shard, or for one without its `.run.json`; ValueError for shards of several numbers or with
    different settings, for a shard that is still being written, or has a result twice, one that is another shard's, or one of another
    input, and if the output exists; OSError, which names the file, if a disk is full.
    """
    in_path = expanded(in_path)
    source, whole = input_of(in_path), Files.of(in_path, out_path, errors, 1, 1)
    if whole.result is None:
        raise ValueError("the output is standard output, '-', which no shards have written; expected the file that the shards were given")
    assert whole.result is not None and whole.lines is not None and whole.errors is not None
    shards = _count(whole.result)
    parts = [Files.of(in_path, out_path, errors, i, shards) for i in range(1, shards + 1)]
    for path in (whole.result, whole.lines):
        if path.exists():
            raise ValueError(
                f"{path} exists; expected a name that only the shards' files begin with; remove it if an earlier merge wrote it"
            )
    there = {i: part for i, part in enumerate(parts, 1) if part.lines is not None and part.lines.exists()}
    with contextlib.ExitStack() as stack:
        settings = _common_settings(there.values(), stack)
        files = [stack.enter_context(open(part.lines, "rb")) for part in there.values() if part.lines is not None]
        places = [_places(file) for file in files]
        for (i, part), (found, *_) in zip(there.items(), places, strict=True):
            other = found[(found - 1) % shards != i - 1]
            if len(other):
                of = (int(other[0]) - 1) % shards + 1
                raise ValueError(f"{part.lines} has a result of line {other[0]}, which is shard {of}'s; expected those of shard {i} alone")
        lines, samples, offsets, digests = (np.concatenate(column) for column in zip(*places, strict=True))
        owner = np.repeat(np.arange(len(files)), [len(place[0]) for place in places])
        order = np.lexsort((samples, lines))
        twice = order[1:][(np.diff(lines[order]) == 0) & (np.diff(samples[order]) == 0)]
        if len(twice):
            raise ValueError(f"{files[owner[twice[0]]].name} has a result of line {lines[twice[0]]} twice; expected it once, so remove one")
        _check_input(source, lines[order], digests[order], whole.lines)
        written = whole.lines.with_name(whole.lines.name + ".part")
        with writing(whole.lines), open(written, "wb") as file:
            for i in order:
                files[owner[i]].seek(int(offsets[i]))
                file.write(files[owner[i]].readline())
        bad = _merge_errors(parts, whole.errors)
        missing = [
            f"shard {i} of {shards} has no results: {part.lines} does not exist" for i, part in enumerate(parts, 1) if i not in there
        ]
        missing += _missing(source, lines, bad, settings)
        with writing(whole.settings):
            whole.settings.write_text(json.dumps(settings | {"shard": "1/1"}, indent=2) + "\n")
        written.replace(whole.lines)
    if whole.lines != whole.result:
        with writing(whole.result):
            parquet.write(whole.lines, whole.result)
    return Merged(whole.result, len(order), shards, missing)


def _count(out: Path) -> int:
    """How many shards wrote this output."""
    pattern = re.compile(re.escape(out.stem) + r"-(\d+)-of-(\d+)" + re.escape(out.suffix) + r"(\.jsonl)?")
    found = {int(match[2]) for path in out.parent.iterdir() if (match := pattern.fullmatch(path.name))}
    if not found:
        raise FileNotFoundError(f"there are no results of shards, such as {of_shard(out, 1, 2)}")
    if len(found) > 1:
        raise ValueError(f"{out.parent} has results of {' and of '.join(map(str, sorted(found)))} shards; expected those of one number")
    return found.pop()


def _common_settings(parts: Iterable[Files], stack: contextlib.ExitStack) -> dict[str, Any]:
    """The settings that all shards were run with. Their files stay locked until the end of `stack`."""
    common, first = dict[str, Any](), None
    for part in parts:
        file = stack.enter_context(open(part.settings, "rb"))
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{part.lines} is still being written; wait for its process") from error
        found = settings_of(part.settings, file.read())
        found.pop("shard", None)
        if first is None:
            common, first = found, part.lines
        different = [f"{name} {common.get(name)!r} and {found.get(name)!r}" for name in common if common.get(name) != found.get(name)]
        if different:
            raise ValueError(f"{first} and {part.lines} were made with {'; '.join(different)}; expected shards of one job")
    return common


def _places(file: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(line, sample, offset, digest of the request) of each result in a file. A damaged end is left out; the run that goes on with it makes
    its results again."""
    lines, samples, offsets, digests, offset = array.array("q"), array.array("q"), array.array("q"), array.array("Q"), 0
    for text in file:
        record = parsed(text)
        if record is None:
            break
        lines.append(record["line"])
        samples.append(record.get("index", 0))
        offsets.append(offset)
        digests.append(int(record.get("request", "0"), 16))
        offset += len(text)
    return np.asarray(lines, np.int64), np.asarray(samples, np.int64), np.asarray(offsets, np.int64), np.asarray(digests, np.uint64)


def _merge_errors(parts: Iterable[Files], out: Path) -> set[int]:
    """Writes the errors of all shards to one file. Returns their lines."""
    found = list[tuple[int, bytes]]()
    for part in parts:
        if part.errors is not None and part.errors.exists():
            with open(part.errors, "rb") as file:
                found += [(record["line"], text) for text in file if (record := parsed(text)) is not None]
    if found:
        with writing(out):
            out.write_bytes(b"".join(text for _, text in sorted(found)))
    return {line for line, _ in found}


def _check_input(source: Any, lines: np.ndarray, digests: np.ndarray, out: Path) -> None:
    """Raises ValueError where results answer other requests than the input's. lines, digests: of all results, by line; a digest may be 0,
    which is none."""
    at = 0
    for number, row in enumerate(source.rows(), start=1):
        first = at
        while at < len(lines) and lines[at] == number:
            at += 1
        if at > first and digests[first] and digests[first] != _digest(row):
            raise ValueError(f"line {number} is not the request that its result in a shard of {out} answers; expected the shards' input")
    if at < len(lines):
        raise ValueError(f"the shards of {out} have a result of line {lines[at]}, which {source.name} does not have; expected their input")


def _digest(row: Any) -> int:
    try:
        return digest_of_request(jsonl.value(row) if isinstance(row, bytes) else row)
    except (ValueError, TypeError):  # a line that cannot be served
        return 0


def _missing(source: Any, lines: np.ndarray, bad: set[int], settings: dict[str, Any]) -> list[str]:
    """What has no result, in words."""
    have, default = dict(zip(*np.unique(lines, return_counts=True), strict=True)), int(settings.get("n") or 1)
    asking = ((number, row) for number, row in enumerate(source.rows(), start=1) if not isinstance(row, bytes) or row.strip())
    gone = [number for number, row in asking if number not in bad and have.get(number, 0) < _results(row, default)]
    said = [f"{len(bad)} lines could not be served: the errors say why"] if bad else []
    if not gone:
        return said
    breaks = [i for i in range(1, len(gone)) if gone[i] != gone[i - 1] + 1]
    ranges = [(gone[a], gone[b - 1]) for a, b in zip([0, *breaks], [*breaks, len(gone)], strict=True)]
    shown = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in ranges[:SHOWN])
    more = f" and {len(ranges) - SHOWN} more ranges" if len(ranges) > SHOWN else ""
    return [*said, f"{len(gone)} lines have no result, or not all of theirs: {shown}{more}; the same command without --shard serves them"]


def _results(row: Any, default: int) -> int:
    """How many results a line has once all is there, as far as one can tell."""
    try:
        values = jsonl.value(row) if isinstance(row, bytes) else row
        return 1 if openai.is_line(values) else int((values.get("params") or {}).get("n") or default)
    except (ValueError, TypeError, AttributeError):
        return 1
