"""Stream: the pieces of one text as they come, for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from jaxspec.engine.completion import Chunk


class Stream(Iterator[Chunk], AsyncIterator[Chunk]):
    """The pieces of one text. `for` reads them, and `async for` does so while other tasks go on.

    It holds a slot until it is read to its end or closed, or until nobody has it any more. Several threads may use it; they take turns.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], settle: Callable[[], None]):
        """settle: frees the slot of a stream that was closed."""
        self._chunks, self._settle = chunks, settle
        self._lock = threading.RLock()  # a signal's handler that reads it, while it is read, is refused by the generator
        self._awaited = collections.deque[asyncio.Future[Chunk | None]]()  # pieces whose `await` was cancelled before they came

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        with self._lock:
            return next(self._chunks)

    def close(self) -> None:
        """Ends the text here and frees its slot. A second call does nothing."""
        with self._lock:
            self._chunks.close()
        self._settle()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        """The next piece. If the wait for it is cancelled, as `asyncio.wait_for` does, the next call in the same loop returns it."""
        loop, coming = asyncio.get_running_loop(), None
        while self._awaited and (coming is None or coming.get_loop() is not loop):
            coming = self._awaited.popleft()
        if coming is None or coming.get_loop() is not loop:
            coming = loop.run_in_executor(None, next, self, None)
        try:
            chunk = await asyncio.shield(coming)
        except asyncio.CancelledError:
            coming.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody need ask for it
            self._awaited.append(coming)
            del self  # a notebook keeps the error with this frame: a stream that nobody else has must come to its end
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """`close`, without keeping other tasks waiting."""
        await asyncio.to_thread(self.close)
