"""Stream: the pieces of one text as they come, for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator

from jaxspec.engine.completion import Chunk


class Stream(Iterator[Chunk], AsyncIterator[Chunk]):
    """The pieces of one text. `for` reads them, and `async for` does so while other tasks go on.

    It holds a slot until it is read to its end or closed, or until nobody has it any more. Several threads may use it; they take turns.
    """

    def __init__(self, chunks: Generator[Chunk, None, None]):
        self._chunks, self._lock = chunks, threading.Lock()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        with self._lock:
            return next(self._chunks)

    def close(self) -> None:
        """Ends the text here and frees its slot. A second call does nothing."""
        with self._lock:
            self._chunks.close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await asyncio.to_thread(next, self, None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """`close`, without keeping other tasks waiting."""
        await asyncio.to_thread(self.close)
