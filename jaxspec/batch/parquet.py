"""Parquet files of requests and of results, read and written by pyarrow where it is installed."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxspec import jsonl

SUFFIX = ".parquet"
ROWS = 4096  # rows that are in memory at a time
SURROGATE = re.compile("[\ud800-\udfff]")
NO_TYPE = (ValueError, TypeError, NotImplementedError, OverflowError)  # what pyarrow raises for values that a type does not hold
OWN = ("stop_reason", "error")  # columns of text, which a file has even where all values are missing
AS_JSON = ("prompt", "messages", "message", "logprobs", "prompt_logprobs")  # columns of results whose form changes from row to row


def library() -> Any:
    """pyarrow, with pyarrow.parquet imported. Raises ImportError that names the package."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files need the package pyarrow: pip install pyarrow, or use JSON lines") from error
    return pyarrow


def check(path: Path) -> None:
    """Raises ValueError for a file that is none of parquet, and for a column that no result can hold, by its name."""
    pa = library()
    try:
        schema = pa.parquet.read_schema(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error
    for field in schema:
        if not _is_json(pa.types, field.type):
            found = f"column {field.name!r} of {path} is of type {field.type}"
            raise ValueError(f"{found}, which results cannot hold; leave it out, or make it text")


def _is_json(types: Any, kind: Any) -> bool:
    """Whether JSON has a form of a type's values."""
    if types.is_dictionary(kind):
        return _is_json(types, kind.value_type)
    binary = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    unknown = any(is_kind(kind) for is_kind in (*binary, types.is_duration, types.is_interval))
    return not unknown and all(_is_json(types, kind.field(i).type) for i in range(kind.num_fields))


def count(path: Path) -> int:
    """How many rows a file has."""
    return library().parquet.read_metadata(path).num_rows


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file as JSON would have them: without missing values; times, UUIDs, and decimals with more digits than a number has
    as text. Raises ValueError for a value that Python cannot hold, with its column."""
    with library().parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS):
            try:
                found = batch.to_pylist()
            except Exception as error:  # pyarrow raises what Python's own types raise
                raise ValueError(_unreadable(path, batch)) from error
            yield from (_plain(row) for row in found)


def _unreadable(path: Path, batch: Any) -> str:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.to_pylist()
        except Exception as error:
            found = f"column {name!r} of {path}, of type {column.type}, has a value that cannot be read: {error}"
            return f"{found}; leave it out, or make it text"
    return f"{path} has a value that cannot be read"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, decimal.Decimal):
        return float(value) if decimal.Decimal(repr(float(value))) == value else str(value)
    return value


def write(lines: Path, out: Path) -> None:
    """Writes a file of results in JSON lines as a parquet file, which appears once it is whole. A column whose values have no type in
    common is JSON text. Raises ValueError for results in OpenAI's form, and OSError."""
    pa, kinds = library(), dict[str, Any]()
    for chunk in _chunks(lines):
        cells = _cells(chunk)
        for name in dict.fromkeys(key for row in cells for key in row):
            kinds[name] = _either(pa, name, kinds.get(name), _kind(pa, [row.get(name) for row in cells]))
    # Files that are read as one data set have the columns of the first, so a type must not depend on which values came.
    kinds = {name: pa.string() if pa.types.is_null(kind) else kind for name, kind in (kinds or {"id": pa.string()}).items()}
    kinds |= dict.fromkeys(OWN, pa.string())
    part = out.with_name(out.name + ".part")
    while (name := _unfit(pa, lines, kinds, part)) is not None:
        kinds[name] = pa.string()
    part.replace(out)


def _unfit(pa: Any, lines: Path, kinds: dict[str, Any], out: Path) -> str | None:
    """Writes the file, unless some column has a value that its type does not hold: then returns the column's name."""
    with pa.parquet.ParquetWriter(out, pa.schema(list(kinds.items()))) as file:
        for chunk in _chunks(lines):
            cells, columns = _cells(chunk), {}
            for name, kind in kinds.items():
                values = [row.get(name) for row in cells]
                values = [text_of(value) for value in values] if kind == pa.string() else values
                try:
                    columns[name] = pa.array(values, kind)
                except NO_TYPE:
                    if kind == pa.string():
                        raise
                    return name
            file.write_table(pa.table(columns))
    return None


def _kind(pa: Any, values: list[Any]) -> Any:
    """The type that holds these values, text if there is none."""
    try:
        kind = pa.infer_type(values)
    except NO_TYPE:
        return pa.string()
    return pa.string() if _holds_nothing(pa.types, kind) else kind


def _holds_nothing(types: Any, kind: Any) -> bool:
    """Whether a type has a struct without fields within, which parquet cannot write."""
    fields = [kind.field(i).type for i in range(kind.num_fields)]
    return (types.is_struct(kind) and not fields) or any(_holds_nothing(types, field) for field in fields)


def _either(pa: Any, name: str, known: Any, kind: Any) -> Any:
    """The type that holds a column's earlier values, if there are any, and these: ids that are numbers and texts are texts."""
    if known is None:
        return kind
    try:
        return pa.unify_schemas([pa.schema([(name, known)]), pa.schema([(name, kind)])], promote_options="permissive").field(0).type
    except NO_TYPE:
        return pa.string()


def _chunks(lines: Path) -> Iterator[list[dict[str, Any]]]:
    with open(lines, "rb") as file:
        while chunk := [jsonl.value(line) for line in itertools.islice(file, ROWS)]:
            yield chunk


def _cells(chunk: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose columns have one type each, as far as one can tell from the row alone."""
    made = []
    for record in chunk:
        row = {_utf8(key, key): value for key, value in record.items()}
        for key in AS_JSON:
            if key in row and not isinstance(row[key], str):
                row[key] = json.dumps(row[key], ensure_ascii=False)
        if row.get("stop_reason") is not None:
            row["stop_reason"] = str(row["stop_reason"])
        made.append(row)
    # Within a chunk, a column of several types becomes a text as well.
    for name in dict.fromkeys(key for row in made for key in row):
        kinds = {type(row[name]) for row in made if row.get(name) is not None}
        if len(kinds) > 1 and kinds != {int, float}:
            for row in made:
                row[name] = text_of(row.get(name))
    return made


def text_of(value: Any) -> str | None:
    """A value as text that a table can hold, in JSON if it is none; None stays."""
    return value if value is None else _utf8(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), value)


def _utf8(text: str, value: Any) -> str:
    """The text of a value, as JSON if it has half of a surrogate pair, which has no form in UTF-8, but one in JSON."""
    return text if text.isascii() or not SURROGATE.search(text) else json.dumps(value)
