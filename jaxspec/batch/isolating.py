"""Requests of a long job, of which one that raises ends nothing but itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from jaxspec.engine.completion import Completion

T = TypeVar("T")


def served(
    complete: Callable[[Iterator[Any]], Iterator[Completion]],
    items: Iterator[T],
    request_of: Callable[[T], Any],
    blame: Callable[[T, Exception], None],
    concerns_all: Callable[[Exception], bool],
) -> Iterator[tuple[T, Completion]]:
    """Each item with its completion, in whatever order.

    complete: as `LLM.as_completed`, which ends with the first request that raises. Those that were under way are then served again, in
    halves, until the one that raises is alone: `blame` gets it and the error, and the others go on. items: read as they are needed.
    request_of: what `complete` takes for an item.

    Raises what `items` and `blame` raise, and an error of which `concerns_all` is true.
    """
    groups = [iter(items)]  # the last one is served, and then those before it
    while groups:
        under_way = dict[int, T]()
        try:
            with contextlib.closing(complete(_asked(groups[-1], request_of, under_way))) as completions:  # pyright: ignore[reportArgumentType]
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


def _asked(items: Iterator[T], request_of: Callable[[T], Any], under_way: dict[int, T]) -> Iterator[Any]:
    """The requests of items, which it notes as under way."""
    index = 0
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception:
            under_way.clear()  # it is no request's
            raise
        under_way[index] = item
        index += 1
        yield request_of(item)


def concerns_all(error: Exception, several: bool) -> bool:
    """Whether an error is the job's and no request's: no memory, no disk and, where there are several processes, one of them gone."""
    device = isinstance(error, jax.errors.JaxRuntimeError)
    return isinstance(error, OSError | MemoryError) or (device and (several or "RESOURCE_EXHAUSTED" in str(error)))


def reason(error: Exception) -> str:
    """What a reader is told. What is checked of a request says itself what is wrong; its only prompt is to a reader that of the line."""
    text = str(error).replace("prompt 0", "the prompt", 1)
    return text if isinstance(error, ValueError | TypeError) and text else f"{type(error).__name__}: {text}"
