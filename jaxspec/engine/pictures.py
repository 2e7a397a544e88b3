"""Images in prompts: at which rows they stand, and what those rows are."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxspec.interrupts import begun

# Types of content that are images, and where such a part has the image.
NAMES = {"image": ("image", "url", "path", "base64"), "image_url": ("image_url",), "image_pil": ("image_pil",)}
THREADS = 4  # that decode images beside the device's calls


class ImageTower(Protocol):
    """What turns an image into rows of a prompt: see `vision.images.Images`."""

    @property
    def image_token_id(self) -> int:
        """The token that stands for such a row."""
        ...

    def source(self, image: Any) -> Any:
        """Looks at an image; one that was looked at stays as it is. Raises TypeError or ValueError for what is none, as far as its
        beginning tells."""
        ...

    def count(self, image: Any) -> int:
        """How many rows an image has that was looked at."""
        ...

    def tokens(self, count: int) -> list[int]:
        """What stands in a prompt for an image of so many rows."""
        ...

    def prepared(self, image: Any) -> Any:
        """Decodes an image that was looked at. Its `digest` tells it from others. Raises ValueError for one that cannot be decoded."""
        ...

    def rows(self, image: Any) -> Any:
        """What a target reads in place of the embeddings of a prepared image's tokens: an array [R, H] of the device or the host, of which
        the first `count` are the image's. R is the same for all."""
        ...

    def warmup(self) -> None:
        """Compiles what `rows` runs."""
        ...


@dataclasses.dataclass(eq=False)
class Picture:
    """An image in a prompt. One call computes all its rows, since they may see one another."""

    begin: int  # the position of its first row
    count: int  # of its rows
    prepare: Callable[[], concurrent.futures.Future[Any]]  # see `ImageTower.prepared`
    compute: Callable[[Any], concurrent.futures.Future[Any]]  # from that to its rows
    prepared: concurrent.futures.Future[Any] | None = None  # None until `decode`
    _found: concurrent.futures.Future[Any] | None = None

    @property
    def end(self) -> int:
        return self.begin + self.count

    def decode(self) -> concurrent.futures.Future[Any]:
        """Begins to decode it, on another thread, if that has not begun."""
        if self.prepared is None:
            self.prepared = self.prepare()
        return self.prepared

    @property
    def decoded(self) -> bool:
        """Whether that is over, however it went."""
        return self.prepared is not None and self.prepared.done()

    @property
    def failure(self) -> str | None:
        """Why it cannot be decoded; None if it can, or if that is not known yet. Raises any other error."""
        error = self.decode().exception() if self.decoded else None
        if error is not None and not isinstance(error, ValueError):
            raise error
        return None if error is None else str(error)

    @functools.cached_property
    def key(self) -> np.ndarray:
        """[count] int32, below 0: what stands for its rows where prompts are compared, since the tokens are those of any image. Equal for
        equal images, and different in nearly every row for others. Once it is decoded."""
        seed = np.frombuffer(self.decode().result().digest, np.uint32)
        return np.random.default_rng(seed).integers(-(2**31), 0, self.count, np.int32)

    def start(self) -> None:
        """Begins to compute its rows, on another thread."""
        if self._found is None:
            self._found = self.compute(self.decode().result())

    def rows(self) -> Any:
        """Its rows: see `ImageTower.rows`. Waits for what the host does for them, and forgets them. Raises what computing them raised."""
        found = self._found or self.compute(self.decode().result())
        self._found = None
        return found.result()


class Placed(NamedTuple):
    """A prompt with room for the rows of its images."""

    ids: list[int]
    pictures: tuple[Picture, ...]
    grown: list[tuple[int, int]]  # where in the given ids it has grown, and by how many

    def length_of(self, given: int) -> int:
        """How many of its tokens the first `given` of the given ones have become."""
        return given + sum(more for at, more in self.grown if at < given)


class Pictures:
    """Makes the pictures of prompts. token: the text of the tower's image token, for errors."""

    def __init__(self, tower: ImageTower, token: str):
        self.tower, self._token = tower, token
        # Apart, since images of several requests are decoded at once, and rows are wanted of one after the other.
        self._decoding = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="jaxspec-images")
        self._computing = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jaxspec-images")

    def placed(self, ids: Sequence[int], images: Sequence[Any]) -> Placed:
        """A prompt with one image token for each image, or with all of an image's tokens, which a processor of transformers writes.

        images: what `ImageTower.source` takes. Raises TypeError or ValueError."""
        token, found, pictures, grown = self.tower.image_token_id, list[int](), list[Picture](), list[tuple[int, int]]()
        left = collections.deque(images)
        at = places = 0
        while at < len(ids):
            if ids[at] != token:
                found.append(ids[at])
                at += 1
                continue
            places += 1
            if not left:
                at += 1
                continue
            image = self.tower.source(left.popleft())
            count = self.tower.count(image)
            opening, *middle, closing = self.tower.tokens(count)
            written = len(found) > 0 and found[-1] == opening
            whole = written and list(ids[at : at + count]) == middle
            if not written:
                found.append(opening)
            pictures.append(Picture(len(found), count, functools.partial(self._prepared, image), self._computed))
            found += middle if written else [*middle, closing]
            taken = count if whole else 1
            grown.append((at, count - taken + (0 if written else 2)))
            at += taken
        if left or places != len(pictures):
            given = f"{len(images)} image{'' if len(images) == 1 else 's'}"
            raise ValueError(f"{given} and {places} image tokens ({self._token}, {token}) are given; expected one for each image")
        return Placed(found, tuple(pictures), grown)

    def _prepared(self, image: Any) -> concurrent.futures.Future[Any]:
        return begun(self._decoding, functools.partial(self.tower.prepared, image))

    def _computed(self, prepared: Any) -> concurrent.futures.Future[Any]:
        return begun(self._computing, functools.partial(self.tower.rows, prepared))

    def warmup(self) -> None:
        """Compiles what computes rows, on another thread, where no interrupt cuts it short."""
        begun(self._computing, self.tower.warmup).result()

    def close(self) -> None:
        for pool in (self._decoding, self._computing):
            pool.shutdown(wait=False, cancel_futures=True)


def taken_out(messages: Any) -> tuple[Any, list[Any]]:
    """(messages, images) of a conversation: for each image that content has as a part there is {"type": "image"} in its place, in which
    form templates read it. Parts are those of transformers ("image" with "image", "url", "path" or "base64") and of OpenAI and vLLM
    ("image_url", "image_pil"). Raises ValueError for one without an image. What is no message stays, to be refused by its name."""
    images = list[Any]()

    def without(i: int, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in NAMES:
            return part
        found = next((part[name] for name in NAMES[kind] if part.get(name) is not None), None)
        if isinstance(found, Mapping):  # OpenAI's {"url": ...}, which may say how finely it is read
            found = found.get("url")
        elif found is not None and found is part.get("base64"):
            found = f"data:image;base64,{found}"
        if found is None:
            raise ValueError(
                f"message {i} holds content of type {kind!r} without an image; expected it as {' or '.join(map(repr, NAMES[kind]))}"
            )
        images.append(found)
        return {"type": "image"}

    def read(i: int, message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        return {**message, "content": [without(i, part) for part in content]} if isinstance(content, list | tuple) else message

    return ([read(i, message) for i, message in enumerate(messages)] if isinstance(messages, list | tuple) else messages), images
