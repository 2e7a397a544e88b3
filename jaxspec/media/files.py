"""Files of images, sounds and videos, wherever they are."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from jaxspec.checks import type_name

TIMEOUT = 60.0  # seconds without an answer from a server
SHOWN = 200  # characters of a text, in an error


class Coming(str):
    """The URL of a file that is being fetched."""

    def __new__(cls, url: str, answer: concurrent.futures.Future[bytes]) -> Self:
        """answer: what `fetched` gives for it."""
        found = super().__new__(cls, url)
        found.answer = answer
        return found

    answer: concurrent.futures.Future[bytes]


def file_in(given: Any) -> Any:
    """The file that a cell of a dataset has as {"bytes": ..., "path": ...}, where one of them may be None; anything else as it is."""
    if not isinstance(given, Mapping) or not given or not given.keys() <= {"bytes", "path"}:
        return given
    return given.get("path") if given.get("bytes") is None else given["bytes"]


def name_of(file: Any) -> str | None:
    """What an error calls a file, which is given by its bytes, its path or its URL; None for anything else."""
    if isinstance(file, bytes | bytearray | memoryview):
        return f"{memoryview(file).nbytes} bytes"
    if isinstance(file, str | os.PathLike):
        text = os.fsdecode(file)
        return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
    return None


def reason_of(error: Exception) -> str:
    """What an error says, without the name of a file, which may be long or the address of an object."""
    return getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error) or type_name(error)


@contextlib.contextmanager
def explained(name: str, kind: str, expected: str, reason: Callable[[Exception], str] = reason_of) -> Iterator[None]:
    """Raises ValueError that says that `name` cannot be read as `kind`, such as "an image", and why, in place of what readers raise, which
    is whatever they come upon in a broken file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) and not hasattr(error, "errno"):  # FFmpeg's may be of a length that a broken file says
            raise
        raise ValueError(f"{name} cannot be read as {kind}: {reason(error)}; {expected}") from error


def read_from(file: Any, kind: str) -> Any:
    """Where a file is read from: the bytes behind a URL, a path as a str; anything else as it is. kind: of the medium, for errors. Raises
    ValueError, or what urllib raises."""
    if not isinstance(file, str | os.PathLike):
        return file
    text = os.fsdecode(file)
    if is_remote(text):
        return file.answer.result() if isinstance(file, Coming) else fetched(text)
    if text.startswith("data:"):
        head, _, data = text.partition(",")
        if not head.endswith(";base64"):
            example = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}[kind]
            raise ValueError(f"the data of a data: URL must be in base64, after 'data:{example};base64,'")
        return base64.b64decode("".join(data.split()), validate=True)
    if text.startswith("file://"):
        return urllib.request.url2pathname(urllib.parse.urlsplit(text).path)
    return os.path.expanduser(text)


def is_remote(file: Any) -> bool:
    """Whether it is a URL that is fetched from a server."""
    return isinstance(file, str) and file.startswith(("http://", "https://"))


def fetched(url: str) -> bytes:
    """What a server has there. Raises what urllib raises."""
    asked = urllib.request.Request(url, headers={"User-Agent": "jaxspec"})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:  # it is an answer too
        error.close()
        raise
