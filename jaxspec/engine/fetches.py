"""Images, sounds and videos behind URLs, fetched beside one another and ahead of the prompts that name them."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from jaxspec.engine.inserts import PARTS, are_several
from jaxspec.media.files import Coming, fetched, is_remote

THREADS = 16  # that fetch
AHEAD = 32  # prompts whose images, sounds and videos are on their way while one is read
Item = TypeVar("Item")


class Fetches:
    """Fetches the images, sounds and videos of prompts and conversations. A context, at whose end nothing more is begun.

    It gives what it was given, with a `Coming` in place of the URL of one. A URL is fetched once as long as somebody holds that."""

    def __init__(self, kinds: Collection[str]):
        """kinds: of the media that are read, "image", "audio" or "video"; nothing else is fetched."""
        self._kinds = tuple(kinds)
        self._places, self._closed = threading.Semaphore(THREADS), False
        self._coming = weakref.WeakValueDictionary[str, Coming]()

    def __enter__(self) -> Fetches:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    def ahead(self, items: Iterable[Item], count: int = AHEAD) -> Iterator[Item]:
        """The items, of which so many are read and begun ahead of the one that is given."""
        if not self._kinds:
            yield from items
            return
        waiting = collections.deque[Item]()
        for item in items:
            waiting.append(self.begin(item))
            if len(waiting) > count:
                yield waiting.popleft()
        yield from waiting

    def begin(self, given: Any) -> Any:
        """A prompt, messages, or whatever holds some, with its images, sounds and videos on their way."""
        if not self._kinds:
            return given
        if isinstance(given, Mapping):
            name = given.get("type")
            kind, fields = PARTS.get(name, (None, ())) if isinstance(name, str) else (None, ())
            fields = fields if kind in self._kinds else ()
            of_prompt = given.get("multi_modal_data")
            if isinstance(of_prompt, Mapping):
                begun = {key: self.begin_medium(value) if key in self._kinds else value for key, value in of_prompt.items()}
                given = {**given, "multi_modal_data": begun}
            return {key: (self.begin_medium if key in fields else self.begin)(value) for key, value in given.items()}
        if type(given) in (list, tuple) and given and not isinstance(given[0], int):  # which token ids are
            return type(given)(map(self.begin, given))
        return given

    def begin_medium(self, given: Any) -> Any:
        """A medium, or several, on their way. OpenAI's {"url": ...} is one too."""
        if isinstance(given, Mapping):  # transformers' VideoMetadata is one, and raises AttributeError for what it does not have
            return {**given, "url": self.begin_medium(given["url"])} if "url" in list(given) else given
        if type(given) in (list, tuple) and are_several(given):
            return type(given)(map(self.begin_medium, given))
        if not is_remote(given) or isinstance(given, Coming):
            return given
        coming = self._coming.get(given)
        if coming is None:
            coming = self._coming[given] = Coming(given, concurrent.futures.Future())
            # Python does not wait for daemons as it exits, and a server may let them wait for long.
            thread = threading.Thread(target=self._fetch, args=(coming,), name="jaxspec-fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the main thread has ended, after which none begins
                self._fetch(coming)
        return coming

    def _fetch(self, coming: Coming) -> None:
        with self._places:
            if self._closed:
                coming.answer.cancel()
                return
            try:
                coming.answer.set_result(fetched(coming))
            except BaseException as error:
                coming.answer.set_exception(error)


def read_ahead(items: Iterable[Item], kinds: Collection[str]) -> Iterable[Item]:
    """Items with their media on their way, ahead if they are a list or a tuple. Others may wait for something, or have more
    after their end: they stay as they are. kinds: as for `Fetches`."""

    def ahead() -> Iterator[Item]:
        with Fetches(kinds) as fetches:
            yield from fetches.ahead(items)

    return ahead() if kinds and isinstance(items, list | tuple) else items
