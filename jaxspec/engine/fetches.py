"""Images behind URLs, fetched beside one another and ahead of the prompts that name them."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from jaxspec.engine.pictures import NAMES
from jaxspec.vision.images import Coming, fetched, is_remote

THREADS = 16  # that fetch
AHEAD = 32  # prompts whose images are on their way while one is read
Item = TypeVar("Item")


class Fetches:
    """Fetches the images of prompts and conversations. A context, at whose end nothing more is begun.

    It gives what it was given, with a `Coming` in place of an image's URL. A URL is fetched once as long as somebody holds that."""

    def __init__(self, with_images: bool = True):
        """with_images: whether images are read at all; if not, nothing is fetched."""
        self._with_images = with_images
        self._places, self._closed = threading.Semaphore(THREADS), False
        self._coming = weakref.WeakValueDictionary[str, Coming]()

    def __enter__(self) -> Fetches:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    def ahead(self, items: Iterable[Item], count: int = AHEAD) -> Iterator[Item]:
        """The items, of which so many are read and begun ahead of the one that is given."""
        if not self._with_images:
            yield from items
            return
        waiting = collections.deque[Item]()
        for item in items:
            waiting.append(self.begin(item))
            if len(waiting) > count:
                yield waiting.popleft()
        yield from waiting

    def begin(self, given: Any) -> Any:
        """A prompt, messages, or whatever holds some, with its images on their way."""
        if not self._with_images:
            return given
        if isinstance(given, Mapping):
            kind = given.get("type")
            images = NAMES.get(kind, ()) if isinstance(kind, str) else ()
            of_prompt = given.get("multi_modal_data")
            if isinstance(of_prompt, Mapping) and "image" in of_prompt:
                given = {**given, "multi_modal_data": {**of_prompt, "image": self.begin_image(of_prompt["image"])}}
            return {key: (self.begin_image if key in images else self.begin)(value) for key, value in given.items()}
        if type(given) in (list, tuple) and given and not isinstance(given[0], int):  # which token ids are
            return type(given)(map(self.begin, given))
        return given

    def begin_image(self, given: Any) -> Any:
        """An image, or several, on their way. OpenAI's {"url": ...} is one too."""
        if isinstance(given, Mapping):
            return {**given, "url": self.begin_image(given["url"])} if "url" in given else given
        if type(given) in (list, tuple):
            return type(given)(map(self.begin_image, given))
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


def read_ahead(items: Iterable[Item]) -> Iterable[Item]:
    """Items with their images on their way, ahead if they are a list or a tuple. Others may wait for something, or have more after their
    end: they stay as they are."""

    def ahead() -> Iterator[Item]:
        with Fetches() as fetches:
            yield from fetches.ahead(items)

    return ahead() if isinstance(items, list | tuple) else items
