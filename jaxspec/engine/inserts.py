"""What stands in prompts beside tokens: images, sounds and videos, at which rows they stand, and what those rows are."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.interrupts import begun, undisturbed
from jaxspec.media.tower import Run
from jaxspec.text import Tokenizer

# Types of content that are an image, a sound or a video: which of them, and where such a part has it.
PARTS = {
    "image": ("image", ("image", "url", "path", "base64")),
    "image_url": ("image", ("image_url",)),
    "image_pil": ("image", ("image_pil",)),
    "audio": ("audio", ("audio", "url", "path", "base64")),
    "audio_url": ("audio", ("audio_url",)),
    "input_audio": ("audio", ("input_audio",)),
    "video": ("video", ("video", "url", "path", "base64")),
    "video_url": ("video", ("video_url",)),
}
NOUNS = {"image": "image", "audio": "sound", "video": "video"}
ARTICLES = {"image": "an image", "audio": "a sound", "video": "a video"}
THREADS = 4  # that decode media beside the device's calls
TOGETHER, PLACE = 4, 3  # inserts of a prompt that a call computes at a time, at most, and numbers that it is told of each


class Tower(Protocol):
    """What turns images, sounds or videos into rows of a prompt: see `vision.Images`, `audio.Sounds` and `vision.Videos`. Here, each is a
    medium."""

    @property
    def token_id(self) -> int:
        """The token that stands for such a row."""
        ...

    @property
    def see_one_another(self) -> bool:
        """Whether all rows of a medium may see one another, so that one call computes them. If not, each sees those before it."""
        ...

    @property
    def text_settings(self) -> Mapping[str, Any]:
        """By name, what texts with such media depend on beside the media and the weights."""
        ...

    def source(self, medium: Any, /) -> Any:
        """Looks at a medium; one that was looked at stays as it is. Raises TypeError or ValueError for what is none, as far as its
        beginning tells."""
        ...

    def runs(self, medium: Any, encode: Callable[[str], list[int]], /) -> Sequence[Run]:
        """The rows of a medium that was looked at, as they stand in a prompt. encode: from text between them to tokens."""
        ...

    @property
    def closing(self) -> list[int]:
        """The tokens after a medium's rows in a prompt."""
        ...

    def decoded(self, medium: Any, /) -> Sequence[Any]:
        """Decodes a medium that was looked at: what `rows` takes for each of its runs. Its `digest` tells that from others. Raises
        ValueError for one that cannot be decoded."""
        ...

    def rows(self, decoded: Any, then: Sequence[Any], /) -> Any:
        """What a target reads in place of the embeddings of a run's tokens: an array [R, H] of the device or the host, of which the first
        `count` are the run's. R is one of few. then: the medium's runs behind it, whose rows may be computed with it."""
        ...

    def warmup(self) -> Sequence[Any]:
        """Compiles what `rows` runs. Returns arrays of all shapes that it gives."""
        ...


@dataclasses.dataclass(eq=False)
class Insert:
    """A medium in a prompt, or a part of one. One call computes all its rows."""

    begin: int  # the position of its first row
    count: int  # of its rows
    prepare: Callable[[], concurrent.futures.Future[Any]]  # see `Tower.decoded`; the same for all of a medium
    run: int  # which of the medium's runs it is of
    compute: Callable[[Sequence[Any]], concurrent.futures.Future[Any]]  # from its run and those behind to the run's rows
    room: int  # for how many rows its call has room
    offset: int = 0  # the rows of its run before it
    see_one_another: bool = True  # whether its rows do
    prepared: concurrent.futures.Future[Any] | None = None  # None until `decode`
    _found: concurrent.futures.Future[Any] | None = None

    @property
    def end(self) -> int:
        return self.begin + self.count

    @property
    def place(self) -> tuple[int, int, bool]:
        """What calls are told of it, PLACE numbers: see `model.rows.Inserted`."""
        return self.begin, self.count, self.see_one_another

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
        """[count] int32, below 0: what stands for its rows where prompts are compared, since the tokens are those of any medium. Equal for
        equal media, and different in nearly every row for others. Once it is decoded."""
        seed = np.frombuffer(self.decode().result()[self.run].digest, np.uint32)
        return np.random.default_rng(seed).integers(-(2**31), 0, self.offset + self.count, np.int32)[self.offset :]

    def start(self) -> None:
        """Begins to compute its rows, on another thread."""
        if self._found is None:
            self._found = self.compute(self.decode().result()[self.run :])

    def rows(self) -> Any:
        """The rows of its run: an array [R, H] of the device or the host, of which `count` from `offset` on are its own. Waits for what the
        host does for them, and forgets them. Raises what computing them raised."""
        found = self._found or self.compute(self.decode().result()[self.run :])
        self._found = None
        return found.result()


class Placed(NamedTuple):
    """A prompt with room for the rows of its media."""

    ids: list[int]
    inserts: tuple[Insert, ...]
    grown: list[tuple[int, int]]  # where in the given ids it has grown, and by how many

    def length_of(self, given: int) -> int:
        """How many of its tokens the first `given` of the given ones have become."""
        return given + sum(more for at, more in self.grown if at < given)


class Inserts:
    """Makes the inserts of prompts.

    towers: by what they read, "image", "audio" or "video". rooms: for how many rows calls have room, ascending; a run of more rows than the
    last, which do not see one another, has parts. tokenizer: of the tokens between rows, and for errors.
    """

    def __init__(self, towers: Mapping[str, Tower], rooms: Sequence[int], tokenizer: Tokenizer):
        self.towers, self._rooms, self._encode = dict(towers), tuple(rooms), tokenizer.encode_word
        self._texts = {kind: tokenizer.token_text(tower.token_id) for kind, tower in towers.items()}
        self._kinds = {tower.token_id: kind for kind, tower in self.towers.items()}
        # Apart, since media of several requests are decoded at once, and rows are wanted of one after the other.
        self._decoding = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="jaxspec-media")
        self._computing = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jaxspec-media")

    def are_in(self, ids: Any) -> bool:
        """Whether tokens of media are among these."""
        return any(token in ids for token in self._kinds)

    def placed(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]], most: int) -> Placed:
        """A prompt with one token for each medium, or with all of a medium's tokens, which a processor of transformers writes.

        media: by kind, what `Tower.source` takes. most: rows of a medium for which there is room. Raises TypeError or ValueError."""
        found, inserts, grown = list[int](), list[Insert](), list[tuple[int, int]]()
        left = {kind: collections.deque(media.get(kind, ())) for kind in self.towers}
        places = dict.fromkeys(self.towers, 0)
        at = 0
        while at < len(ids):
            kind = self._kinds.get(ids[at])
            if kind is not None:
                places[kind] += 1
            if kind is None or not left[kind]:
                found.append(ids[at])
                at += 1
                continue
            tower = self.towers[kind]
            source = tower.source(left[kind].popleft())
            runs = tower.runs(source, self._encode)
            count = sum(run.count for run in runs)
            if count > most:  # before tokens take memory: the header of a file may name any length
                which = f"{NOUNS[kind]} {places[kind] - 1}"
                raise ValueError(f"{which} has {count:,} tokens; expected at most {most:,}, for which there is room")
            opening, closing, middle = runs[0].before, tower.closing, list[int]()
            for run in runs:
                middle += run.before + [tower.token_id] * run.count
            middle = middle[len(opening) :]
            written = found[len(found) - len(opening) :] == opening
            whole = written and list(ids[at : at + len(middle)]) == middle
            if not written:
                found += opening
            begin = len(found) - len(opening)
            prepare = functools.cache(functools.partial(begun, self._decoding, functools.partial(tower.decoded, source)))
            for i, run in enumerate(runs):
                begin += len(run.before)
                inserts += self._inserts(tower, prepare, i, begin, run.count)
                begin += run.count
            found += middle if written else [*middle, *closing]
            taken = len(middle) if whole else 1
            grown.append((at, len(middle) - taken + (0 if written else len(opening) + len(closing))))
            at += taken
        for kind, tower in self.towers.items():
            given = len(media.get(kind, ()))
            if given != places[kind]:
                noun = NOUNS[kind]
                raise ValueError(
                    f"{given} {noun}{'' if given == 1 else 's'} and {places[kind]} {kind} tokens ({self._texts[kind]}, {tower.token_id}) "
                    f"are given; expected one for each {noun}"
                )
        return Placed(found, tuple(inserts), grown)

    def _inserts(self, tower: Tower, prepare: Callable[[], Any], run: int, begin: int, count: int) -> list[Insert]:
        """The parts of a medium's run of so many rows, the first of which is at `begin`."""
        found = list[Insert]()
        for at in range(0, count, self._rooms[-1]):
            own = min(self._rooms[-1], count - at)
            room = next(room for room in self._rooms if room >= own)
            compute = functools.partial(self._computed, tower)
            found.append(Insert(begin + at, own, prepare, run, compute, room, at, tower.see_one_another))
        return found

    def _computed(self, tower: Tower, decoded: Sequence[Any]) -> concurrent.futures.Future[Any]:
        return begun(self._computing, lambda: tower.rows(decoded[0], decoded[1:]))

    def warmup(self) -> None:
        """Compiles what computes rows, on another thread, where no interrupt cuts it short."""

        def warm(tower: Tower) -> None:
            for rows, room in itertools.product(tower.warmup(), self._rooms):
                for each in (rows, _cut(rows, 0, room)):
                    _in_turn([each] * TOGETHER, np.zeros(TOGETHER, np.int32), room=room)

        for tower in self.towers.values():
            begun(self._computing, functools.partial(warm, tower)).result()

    def close(self) -> None:
        for pool in (self._decoding, self._computing):
            pool.shutdown(wait=False, cancel_futures=True)


def in_order(prompts: Sequence[Sequence[Insert]], size: int) -> Iterator[Insert]:
    """The inserts of prompts in the order in which calls take them: of `size` prompts at a time, and some of each."""
    for first in range(0, len(prompts), size):
        some = prompts[first : first + size]
        for at in range(0, max(map(len, some)), TOGETHER):
            for inserts in some:
                yield from inserts[at : at + TOGETHER]


def in_turn(inserts: Sequence[Insert]) -> Any:
    """The rows of inserts, one after the other: an array [room, H] of the device or the host, as the call has room for all of these. What
    is past their end is anything."""
    found, room = [insert.rows() for insert in inserts], inserts[0].room
    if len(found) == 1:
        return _cut(found[0], inserts[0].offset, room)
    if len({len(rows) for rows in found}) > 1 or any(insert.offset for insert in inserts):  # few forms are compiled
        found = [_cut(rows, insert.offset, room) for rows, insert in zip(found, inserts, strict=True)]
    counts = np.zeros(TOGETHER, np.int32)
    counts[: len(found)] = [insert.count for insert in inserts]
    arguments = [*found, *found[:1] * (TOGETHER - len(found))], counts
    return undisturbed(functools.partial(_in_turn, *arguments, room=room))


@functools.partial(jax.jit, static_argnames="room")
def _in_turn(rows: Sequence[jax.Array], counts: jax.Array, *, room: int) -> jax.Array:
    out, at = jnp.zeros((2 * room, rows[0].shape[1]), rows[0].dtype), jnp.cumsum(counts) - counts
    for i, some in enumerate(rows):  # what is past the end of one is written over by the next
        out = jax.lax.dynamic_update_slice_in_dim(out, some[:room], at[i], axis=0)
    return out[:room]


def _cut(rows: Any, at: int, count: int) -> Any:
    """So many rows of a medium, from one on; what is past its end is anything."""
    return rows if not at and len(rows) == count else undisturbed(functools.partial(_part, rows, at, count))


@functools.partial(jax.jit, static_argnames="count")
def _part(rows: jax.Array, at: int, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(jnp.pad(rows, ((0, count), (0, 0))), at, count)


def are_several(given: Any, kind: str = "") -> bool:
    """Whether what a prompt has under one name is a list of media. A list of numbers is one sound, and so is (samples, rate); a list of
    images, given as arrays or by Pillow, is one video, and so is (frames, metadata)."""
    if not isinstance(given, list | tuple) or any(isinstance(each, numbers.Real) for each in given[:2]):
        return False
    if kind != "video" or not given:
        return True
    is_frame = getattr(given[0], "ndim", 0) == 3 or type(given[0]).__module__.startswith("PIL.")
    return not is_frame and (isinstance(given[0], Mapping) or not any(isinstance(each, Mapping) for each in given[1:2]))


def taken_out(messages: Any, kinds: Sequence[str]) -> tuple[Any, dict[str, list[Any]]]:
    """(messages, media by kind) of a conversation: for each medium of these kinds that content has as a part there is {"type": kind} in
    its place, in which form templates read it. Parts are those of transformers ("image" and "audio"), of OpenAI and of vLLM: see `PARTS`.
    Raises ValueError for one without a medium. What is no message stays, to be refused by its name."""
    media: dict[str, list[Any]] = {kind: [] for kind in kinds}

    def without(i: int, part: Any) -> Any:
        name = part.get("type") if isinstance(part, Mapping) else None
        kind, fields = PARTS.get(name, (None, ())) if isinstance(name, str) else (None, ())
        if kind not in media:
            return part
        found = next((part[field] for field in fields if part.get(field) is not None), None)
        if isinstance(found, Mapping) and "data" in found:  # OpenAI's {"data": ..., "format": ...}
            scheme = "" if str(found["data"]).startswith("data:") else f"data:audio/{found.get('format')};base64,"
            found = f"{scheme}{found['data']}"
        elif isinstance(found, Mapping) and not found.keys() & {"array", "bytes", "path"}:  # {"url": ...}, maybe with "detail"
            found = found.get("url")
        elif found is not None and found is part.get("base64"):
            found = f"data:{kind};base64,{found}"
        if found is None:
            expected = " or ".join(map(repr, fields))
            raise ValueError(f"message {i} holds content of type {name!r} without {ARTICLES[kind]}; expected it as {expected}")
        media[kind].append(found)
        return {"type": kind}

    def read(i: int, message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        return {**message, "content": [without(i, part) for part in content]} if isinstance(content, list | tuple) else message

    return ([read(i, message) for i, message in enumerate(messages)] if isinstance(messages, list | tuple) else messages), media
