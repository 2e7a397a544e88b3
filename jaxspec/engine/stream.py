"""Stream: what comes one by one, the pieces of a text or completions, for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


class Stream(Iterator[T], AsyncIterator[T]):
    """The pieces of one text, or completions. `for` reads them, and `async for` does so while other tasks go on.

    It holds slots until it is read to its end or closed, or until nobody has it any more. Several threads may use it; they take turns. A
    read whose task was cancelled goes on for a moment, and holds the slots so long; `aclose`, as `contextlib.aclosing` calls it, waits.
    """

    def __init__(self, items: Generator[T, None, None], settle: Callable[[], None], closing: threading.Event | None = None):
        """settle: frees the slots of a stream that was closed. closing: set when it is closed, so that a read in another thread ends."""
        self._items, self._settle, self._closing = items, settle, closing or threading.Event()
        self._lock = threading.RLock()  # a signal's handler that reads it, while it is read, is refused by the generator
        self._awaited = collections.deque[asyncio.Future[T | None]]()  # items whose `await` was cancelled before they came

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)

    def close(self) -> None:
        """Ends all that is unfinished here and frees its slots. A second call does nothing."""
        self._closing.set()
        with self._lock:
            self._items.close()
        self._settle()

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        """The next one. If the wait for it is cancelled, as `asyncio.wait_for` does, the next call in the same loop returns it."""
        loop, coming = asyncio.get_running_loop(), None
        while self._awaited and (coming is None or coming.get_loop() is not loop):
            coming = self._awaited.popleft()
        if coming is None or coming.get_loop() is not loop:
            coming = self._coming(loop)
        try:
            item = await asyncio.shield(coming)
        except asyncio.CancelledError:
            coming.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody need ask for it
            self._awaited.append(coming)
            del self  # a notebook keeps the error with this frame: a stream that nobody else has must come to its end
            raise
        if item is None:
            raise StopAsyncIteration
        return item

    def _coming(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[T | None]:
        """The next item, None at the end. It is read on a thread of its own: reads that wait for slots could take all threads of the loop's
        executor, and leave none to those that have the slots."""
        coming = loop.create_future()

        def tell(item: T | None, error: BaseException | None) -> None:
            if coming.cancelled():  # with the loop
                return
            if error is None:
                coming.set_result(item)
            else:
                coming.set_exception(error)

        def read() -> None:
            item, error = None, None
            try:
                item = next(self, None)
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, item, error)

        threading.Thread(target=read, name="jaxspec-stream").start()
        return coming

    async def aclose(self) -> None:
        """`close`, without keeping other tasks waiting."""
        await asyncio.to_thread(self.close)
