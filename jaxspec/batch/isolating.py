"""Serving the requests of a long job so that one that raises does not end the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from jaxspec.engine.completion import Completion
from jaxspec.engine.params import SamplingParams

T = TypeVar("T")


def serve_apart(
    complete: Callable[[Iterator[Any]], Iterator[Completion]],
    items: Iterator[T],
    request_of: Callable[[T], Any],
    blame: Callable[[T, Exception], None],
    concerns_all: Callable[[Exception], bool],
) -> Iterator[tuple[T, Completion]]:
    """Yields each item with its completion, in any order.

    complete: like `LLM.as_completed`, it ends when a request raises. We then serve the requests that were under way again, in halves,
    until the one that raises is alone. `blame` gets that one and its error. items: read as needed; as for
    `as_completed`, they may stop for a while. request_of: makes an item into what
    `complete` takes. concerns_all: whether an error is the job's and no single request's.

    Raises what `items` and `blame` raise, and an error for which `concerns_all` is true.
    """
    groups = [iter(items)]  # served from the last to the first
    while groups:
        under_way = dict[int, T]()
        try:
            with contextlib.closing(complete(_Asked(groups[-1], request_of, under_way))) as completions:  # pyright: ignore[reportArgumentType]
                for done in completions:
                    yield under_way.pop(done.prompt_index), done
            groups.pop()
        except Exception as error:
            left = list(under_way.values())
            if not left or concerns_all(error):
                raise
            if len(left) == 1:
                blame(left[0], error)
            else:
                half = len(left) // 2
                groups += [iter(left[half:]), iter(left[:half])]


class _Asked(Iterator[Any]):
    """The requests of items. Each item is noted in `under_way` by its index."""

    def __init__(self, items: Iterator[T], request_of: Callable[[T], Any], under_way: dict[int, T]):
        self._items, self._request_of, self._under_way, self._index = items, request_of, under_way, 0

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:  # items may come later
            raise
        except Exception:
            self._under_way.clear()  # the error is no request's
            raise
        self._under_way[self._index] = item
        self._index += 1
        return self._request_of(item)


def serves_others(llm: Any, error: Exception) -> None:
    """Tries a request of one token. Raises `error`, which another request raised, if that fails too: then no request is to blame."""
    try:
        list(llm.as_completed([([0], SamplingParams(max_tokens=1, seed=0))]))
    except Exception:
        raise error from None


def concerns_all(error: Exception, several: bool) -> bool:
    """Whether an error is the job's and no single request's: no memory, no disk, or, with several processes, any error of a device."""
    device = isinstance(error, jax.errors.JaxRuntimeError)
    return isinstance(error, OSError | MemoryError) or (device and (several or "RESOURCE_EXHAUSTED" in str(error)))


def reason(error: Exception) -> str:
    """The text about an error in the errors file. ValueError and TypeError, which checks raise, need no type in front of their message."""
    text = str(error).replace("prompt 0", "the prompt", 1)  # a line has one prompt
    return text if isinstance(error, ValueError | TypeError) and text else f"{type(error).__name__}: {text}"
