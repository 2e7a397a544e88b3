"""Where the requests of a batch come from: a file of JSON lines, standard input, or a parquet file."""

from __future__ import annotations

import abc
import array
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import jsonl
from jaxspec.batch import parquet
from jaxspec.batch.lines import name_of
from jaxspec.batch.results import digest_of

# How files begin that are no lines of JSON.
OTHER_FORMS = {
    b"\x1f\x8b": "compressed by gzip; expected JSON lines: gunzip it, or pipe them into the command with - for standard input",
    b"\xff\xfe": "text in UTF-16; expected JSON lines in UTF-8",
    b"\xfe\xff": "text in UTF-16; expected JSON lines in UTF-8",
    b"PAR1": f"parquet; expected a name that ends in {parquet.SUFFIX}",
}
SHOWN = 3  # duplicate ids that an error lists


class Input(abc.ABC):
    """Requests in order. A row is the bytes of a line of JSON, or a dict."""

    name: str
    checked = True  # whether `check_ids` can tell
    live = False  # whether rows may come one by one, as somebody writes them

    @abc.abstractmethod
    def rows(self) -> Iterator[bytes | dict[str, Any]]:
        """All rows. The first has number 1."""

    @abc.abstractmethod
    def count(self) -> int | None:
        """How many rows there are; None if that is not known before they are read."""

    @abc.abstractmethod
    def check_ids(self) -> None:
        """Raises ValueError if two rows have the same id and that can be told before the rows are served. It takes 16 bytes a row."""


class LinesFile(Input):
    """A file of JSON lines."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)

    def rows(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            yield from file

    def count(self) -> int:
        with open(self.path, "rb", buffering=0) as file:
            count, last = 0, b"\n"
            while block := file.read(1 << 20):
                count, last = count + block.count(b"\n"), block[-1:]
        return count + (last != b"\n")

    def check_ids(self) -> None:
        if any(b'"id"' in row or b'"custom_id"' in row for row in self.rows()):  # else they are the lines' numbers
            _check_ids(self)


class ParquetFile(Input):
    """A parquet file. A cell without a value is as a column that the row does not have."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)
        parquet.check(path)

    def rows(self) -> Iterator[dict[str, Any]]:
        return parquet.rows(self.path)

    def count(self) -> int:
        return parquet.count(self.path)

    def check_ids(self) -> None:
        _check_ids(self)


class StandardInput(Input):
    """JSON lines that are read as they come. The ids are checked then, too."""

    name, checked, live = "standard input", False, True

    def rows(self) -> Iterator[bytes]:
        yield from sys.stdin.buffer

    def count(self) -> None:
        return None

    def check_ids(self) -> None:
        pass


def input_of(path: Path) -> Input:
    """The requests in a file, by its extension; "-" is standard input. Raises FileNotFoundError, ImportError without pyarrow,
    and ValueError for a parquet file that cannot be served, or a file that is in another form than its name says."""
    if str(path) == "-":
        return StandardInput()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected a file of JSON lines, a parquet file, or - for standard input")
    if path.suffix == parquet.SUFFIX:
        return ParquetFile(path)
    with open(path, "rb") as file:
        begin = file.read(4)
    other = next((form for mark, form in OTHER_FORMS.items() if begin.startswith(mark)), None)
    if other is not None:
        raise ValueError(f"{path} is {other}")
    return LinesFile(path)


def _check_ids(source: Input) -> None:
    digests, numbers = array.array("Q"), array.array("Q")
    for number, row in _numbered(source):
        values = _values(row)
        name = name_of(number, values) if isinstance(values, dict) else None
        if isinstance(name, str | int) and not isinstance(name, bool):  # else it has no id, which is said when it is served
            digests.append(digest_of(name))
            numbers.append(number)
    ids, lines = np.asarray(digests), np.asarray(numbers)
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if len(again):
        pairs = sorted((int(lines[order[i + 1]]), int(lines[order[i]])) for i in again)
        shown = pairs[:SHOWN]
        names = {number: name_of(number, _values(row)) for number, row in _numbered(source) if any(number in pair for pair in shown)}
        found = ", ".join(f"{names[second]!r} in lines {first} and {second}" for second, first in shown)
        more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
        raise ValueError(f"{source.name} has ids twice: {found}{more}; expected an id of its own for each line, or none at all")


def _numbered(source: Input) -> Iterator[tuple[int, Any]]:
    """The rows that ask for something, with their numbers."""
    return ((number, row) for number, row in enumerate(source.rows(), start=1) if not isinstance(row, bytes) or row.strip())


def _values(row: Any) -> Any:
    """The values of a row; None if it cannot be read, which is said when it is served."""
    if not isinstance(row, bytes):
        return row
    try:
        return jsonl.value(row)
    except ValueError:
        return None
