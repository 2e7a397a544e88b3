"""Generator: the class that engines for many machines call with batches of rows. It may import all that `loading` and `batch` may, and
both of them."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.batch.isolating import concerns_all, reason, serve_apart, serves_others
from jaxspec.batch.lines import LineReader, derived_seed
from jaxspec.batch.openai import functions
from jaxspec.batch.parquet import text_of
from jaxspec.checks import integer, type_name
from jaxspec.engine.completion import Completion
from jaxspec.engine.fetches import Fetches
from jaxspec.engine.intake import Prompt
from jaxspec.engine.params import MAX_SEED, SamplingParams
from jaxspec.foreign_names import HERE, NEEDLESS, answer
from jaxspec.interrupts import heeded
from jaxspec.loading import load

AHEAD = 2  # rows that `map` reads ahead, for each slot
MISSING = ("NAType", "NaTType", "MaskedConstant")  # the types of cells without a value: pandas', and NumPy's of masked arrays
# The columns that a batch gets, with the name of their types in numpy. Those of object hold str or None.
COLUMNS = {
    "text": object,
    "prompt_tokens": np.int64,
    "completion_tokens": np.int64,
    "finish_reason": object,
    "acceptance_length": np.float64,
    "error": object,
}


class Generator:
    """Completes batches of rows, for Ray Data, Beam, Spark or a loop of your own. It loads its models when it is made.

    target, drafter, and settings: of `load`, which shows no progress here unless it is told to. sampling_params: of all rows. Without a
    seed: each row has its own, from `seed` and its id alone, so that its text does not depend on worker, batch or order.

    prompt_column: the column of prompts, texts or lists of token ids. messages_column: the column of conversations, in its place.
    id_column: the column of ids, texts or integers; without one, a row's prompt stands for its id, and equal prompts get equal texts; then
    images, sounds and videos are given by path or URL.
    enable_thinking, tools: for the chat template of messages; tools are functions that the model may call, as OpenAI's API has them.
    output_prefix: what the names of new columns begin with.

    Several threads may call it. Their rows share the device, so that two calls at a time keep it full while one of them ends. A pickled
    copy loads again.

    Raises what `load` raises, and ValueError or TypeError for settings that make no sense.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = None,
        *,
        sampling_params: SamplingParams | None = None,
        prompt_column: str = "prompt",
        messages_column: str | None = None,
        id_column: str | None = None,
        seed: int = 0,
        enable_thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        output_prefix: str = "",
        **settings: Any,
    ):
        given = {name: value for name, value in locals().items() if name not in ("self", "settings", "__class__")}
        answer("Generator", settings, (*given, *inspect.signature(load).parameters), HERE, NEEDLESS)
        self._arguments = given | settings
        params, tools = check_params(sampling_params), None if tools is None else functions(tools)
        check_columns(prompt_column, messages_column, id_column, output_prefix)
        self._key, self._column = ("prompt", prompt_column) if messages_column is None else ("messages", messages_column)
        self._ids, self._prefix = () if id_column is None else (id_column,), output_prefix
        self._new = COLUMNS if messages_column is None else COLUMNS | {"message": object}
        self._seed = integer("seed", seed, 0, MAX_SEED - 1)
        self.llm = load(target, drafter, **{"progress": False, **settings})
        self._reader = LineReader(self.llm, params, seed, enable_thinking, tools)
        self._source, self._batches = _Source(), set[_Batch]()
        self._lock, self._serving, self._closed = threading.Lock(), False, False
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-generator")  # joined when the interpreter ends

    def __call__(self, batch: Any) -> Any:
        """The batch with new columns: text, prompt_tokens, completion_tokens, finish_reason ("stop", "length" or "error"),
        acceptance_length (tokens a step) and error, which is None for a row that was served; of conversations also message, what
        `Completion.message` is as JSON text.

        batch: a dict of columns (numpy arrays or lists), a pyarrow.Table or a pandas.DataFrame; the result is of the same type. A row that
        cannot be served has its error in its own row, with text None.

        Raises ValueError for a batch without the column of prompts, with a column of a new one's name or with columns of several lengths,
        TypeError for what is no batch or no column, RuntimeError once this is closed, and what a device raises that concerns all rows.
        """
        return self._result(self._submit(batch))

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same for a list of rows, which are dicts. A row without a prompt or without an id has that as its error. Raises TypeError for
        what is no list of dicts."""
        if isinstance(rows, str | bytes | Mapping) or not (hasattr(rows, "__iter__") and hasattr(rows, "__len__")):
            raise TypeError(f"rows are of type {type(rows).__name__}, expected a list of dicts")
        for at, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {at} is {row!r}, expected a dict")
        # Those that all rows lack too: what becomes of a row does not depend on which others are with it.
        names = dict.fromkeys([self._column, *self._ids, *(name for row in rows for name in row)])
        batch = self._submit({name: [row.get(name) for row in rows] for name in names})
        self._wait(batch)
        new = [{f"{self._prefix}{name}": cells.get(name) for name in self._new} for cells in batch.rows]
        return [{**row, **cells} for row, cells in zip(rows, new, strict=True)]

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The results of batches, in order. It reads at least one batch ahead, and more where batches are small, so that rows of the
        next ones run while the last ones of a batch do. An error of a batch, or of what they come from, is raised after the results of
        those before."""
        pending, source, failure = collections.deque[_Batch](), iter(batches), None
        try:
            while True:
                try:
                    pending.append(self._submit(next(source)))
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
                while pending[0].future.done() or len(pending) > 1 and len(self._source) >= AHEAD * self.llm.max_slots:
                    yield self._result(pending.popleft())
                    if not pending:
                        break
            while pending:
                yield self._result(pending.popleft())
            if failure is not None:
                raise failure
        finally:
            for batch in pending:
                self._give_up(batch)

    def close(self) -> None:
        """Waits for the rows that are under way, and gives back the device's memory. A second call does nothing."""
        with self._lock:
            self._closed = True
        self._thread.shutdown()
        self.llm.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Generator({self.llm!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self), self._arguments)

    @heeded()
    def _submit(self, batch: Any) -> _Batch:
        """Checks the rows of a batch, and has those served that can be."""
        if self._closed:
            raise RuntimeError("the Generator is closed; make another")
        columns = _columns(batch)
        wanted = (self._column, *self._ids)
        for name in wanted:
            if name not in columns:
                raise ValueError(f"the batch has no column {name!r}; found {', '.join(map(repr, columns)) or 'none'}")
        taken = [self._prefix + name for name in self._new if self._prefix + name in columns]
        if taken:
            raise ValueError(f"the batch has a column {taken[0]!r} already; rename it, or set output_prefix")
        values = [_values(batch, name) for name in wanted]
        if len({*map(len, values)}) > 1:
            lengths = ", ".join(f"{name!r} has {len(column)}" for name, column in zip(wanted, values, strict=True))
            raise ValueError(f"columns differ in length: {lengths}")
        made = _Batch(batch, len(values[0]))
        rows = []
        with Fetches(self.llm.media) as fetches:
            for at, (asked, *name) in enumerate(fetches.ahead((_plain(asked), *name) for asked, *name in zip(*values, strict=True))):
                try:
                    rows.append(_Row(made, at, *self._request(asked, *map(_id, name))))
                except Exception as error:
                    made.fail(at, error)
        made.left = len(rows)
        if not rows:
            made.future.set_result(None)
            return made
        with self._lock:
            self._batches.add(made)
            self._source.extend(rows)
            if not self._serving:
                self._thread.submit(self._serve)
                self._serving = True
        return made

    def _request(self, asked: Any, *name: Any) -> tuple[Prompt, SamplingParams]:
        """The prompt and the params of a row. name: its id, if there is a column of ids."""
        if asked is None:
            raise ValueError(f"the column {self._column!r} has no value here")
        line = self._reader.read(1, {self._key: asked, **({"id": name[0]} if name else {})})
        try:
            seed = line.seed if name else derived_seed(self._seed, asked)
        except TypeError as error:
            what = f"the row's {self._key} cannot stand for its id: {error}"
            raise TypeError(f"{what}; name an id_column, or give images, sounds and videos by path or URL") from error
        return self._reader.prompt(line), dataclasses.replace(line.params, seed=seed)

    def _serve(self) -> None:
        """Serves rows until there are none. It is the only one that computes."""

        def blame(row: _Row, error: Exception) -> None:
            serves_others(self.llm, error)
            self._done(row, error)

        while True:
            try:
                served = serve_apart(self.llm.as_completed, self._source, _Row.request, blame, lambda error: concerns_all(error, False))
                for row, completion in served:
                    self._done(row, completion)
            except BaseException as error:  # those who wait for rows raise it
                with self._lock:
                    failed, self._serving = list(self._batches), False
                    self._batches.clear()
                    self._source.clear()
                for batch in failed:
                    batch.future.set_exception(error)
                return
            with self._lock:
                if not self._source:
                    self._serving = False
                    return

    def _done(self, row: _Row, result: Completion | Exception) -> None:
        batch = row.batch
        if isinstance(result, Exception):
            batch.fail(row.at, result)
        else:
            message = {"message": text_of(result.message)} if "message" in self._new else {}
            batch.rows[row.at] = _cells(result) | message
        batch.left -= 1
        if not batch.left:
            with self._lock:
                self._batches.discard(batch)
            batch.future.set_result(None)

    def _give_up(self, batch: _Batch) -> None:
        """Nobody waits for the batch any more: rows that have no slot yet get none."""
        batch.given_up = True
        with self._lock:
            self._batches.discard(batch)

    def _result(self, batch: _Batch) -> Any:
        self._wait(batch)
        new = {f"{self._prefix}{name}": ([row.get(name) for row in batch.rows], kind) for name, kind in self._new.items()}
        return _with_columns(batch.given, new)

    @heeded()
    def _wait(self, batch: _Batch) -> None:
        try:
            batch.future.result()
        except BaseException:  # such as an interrupt of this thread
            self._give_up(batch)
            raise


class _Batch:
    """A batch that is being served."""

    def __init__(self, given: Any, count: int):
        self.given = given
        self.rows: list[Any] = [None] * count  # the new cells of each
        self.left = 0  # rows that are to be served
        self.given_up = False  # whether nobody waits for it any more
        self.future = concurrent.futures.Future[None]()

    def fail(self, at: int, error: Exception) -> None:
        nothing = {"text": None, "prompt_tokens": 0, "completion_tokens": 0, "finish_reason": "error", "acceptance_length": 0.0}
        self.rows[at] = nothing | {"error": reason(error)}


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row that can be served."""

    batch: _Batch
    at: int  # its place in the batch
    prompt: Prompt
    params: SamplingParams

    def request(self) -> tuple[Prompt, SamplingParams]:
        return self.prompt, self.params


class _Source(collections.deque[_Row]):
    """The rows that wait. It stops where there are none and goes on when there are more."""

    def __iter__(self) -> Iterator[_Row]:
        return self

    def __next__(self) -> _Row:
        while self:
            row = self.popleft()
            if not row.batch.given_up:
                return row
        raise StopIteration


def check_params(params: SamplingParams | None) -> SamplingParams:
    """The params of all rows. Raises TypeError or ValueError for what rows cannot share."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params is {type_name(params)}, expected jaxspec.SamplingParams or None")
    if params.seed is not None:
        raise ValueError(f"sampling_params.seed is {params.seed}, which all rows would share; expected None, and seed= for the job")
    if params.n > 1:
        raise ValueError(f"sampling_params.n is {params.n}; a row has one text, expected 1")
    return params


def check_columns(prompt_column: Any, messages_column: Any, id_column: Any, output_prefix: Any) -> None:
    """Raises TypeError for what is no name of a column, or no beginning of one."""
    for name, column in {"prompt_column": prompt_column, "messages_column": messages_column, "id_column": id_column}.items():
        if not isinstance(column, str) and (column is not None or name == "prompt_column"):
            raise TypeError(f"{name} is {column!r}, expected the name of a column")
    if not isinstance(output_prefix, str):
        raise TypeError(f"output_prefix is {output_prefix!r}, expected a str")


def _made(kind: type[Generator], arguments: dict[str, Any]) -> Generator:
    return kind(**arguments)


def _cells(done: Completion) -> dict[str, Any]:
    return {
        "text": done.text,
        "prompt_tokens": len(done.prompt_token_ids),
        "completion_tokens": len(done.token_ids),
        "finish_reason": done.finish_reason,
        "acceptance_length": done.stats.acceptance_length,
        "error": done.error,
    }


def _columns(batch: Any) -> list[str]:
    """The names of a batch's columns. Raises TypeError for what is no batch."""
    if isinstance(batch, Mapping):
        return list(batch)
    if hasattr(batch, "column_names"):  # pyarrow.Table
        return list(batch.column_names)
    if hasattr(batch, "columns") and hasattr(batch, "assign"):  # pandas.DataFrame
        return list(batch.columns)
    raise TypeError(f"the batch is of type {type(batch).__name__}, expected a dict of columns, a pyarrow.Table or a pandas.DataFrame")


def _values(batch: Any, name: str) -> list[Any]:
    column = batch[name]
    if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__iter__"):
        raise TypeError(f"the column {name!r} is of type {type(column).__name__}, expected an array or a list")
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _with_columns(batch: Any, new: Mapping[str, tuple[list[Any], Any]]) -> Any:
    """The batch with more columns. new: the values of each and their type."""
    if isinstance(batch, Mapping):
        return {**batch, **{name: np.array(values, kind) for name, (values, kind) in new.items()}}
    if hasattr(batch, "assign"):
        import pandas as pd

        return batch.assign(**{name: pd.Series(values, batch.index, kind) for name, (values, kind) in new.items()})
    import pyarrow as pa

    types = {object: pa.string(), np.int64: pa.int64(), np.float64: pa.float64()}
    for name, (values, kind) in new.items():
        batch = batch.append_column(name, pa.array(values, types[kind]))
    return batch


def _id(value: Any) -> Any:
    """The id in a cell. pandas makes floats of a column of integers that lacks some."""
    value = _plain(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _plain(value: Any) -> Any:
    """A cell as JSON would have it, without the arrays and missing values that tables make of it, but with its images and
    sounds."""
    if type(value).__name__ in MISSING:
        return None
    if isinstance(value, np.ndarray) and (value.ndim == 3 or value.ndim == 1 and np.issubdtype(value.dtype, np.floating)):
        return value
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and value != value else value  # pandas has nan for what is missing
