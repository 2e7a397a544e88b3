"""Files of videos: how many frames they have, and some of these, which FFmpeg decodes through PyAV."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import io
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

REORDERED = 16  # frames, at most, that are shown before one and decoded after it


@dataclasses.dataclass(frozen=True)
class Index:
    """Where a file's frames stand. times: at which each is shown, in units of the stream and from the first one on, ascending. keys: the
    frames, ascending and by up to REORDERED too early, from which decoding can begin."""

    times: Sequence[int]
    keys: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Film:
    """What a file says of its video. count: of the frames that are shown. rate: of them in a second, on average. width, height: of the
    first ones, in pixels. index: None if that is not known."""

    count: int
    rate: Fraction
    width: int
    height: int
    index: Index | None


def check_av() -> None:
    """Raises ImportError without PyAV."""
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise ImportError("videos need PyAV: pip install av") from error


def looked_at(data: Any) -> Film:
    """What a file says, given by its path or its bytes. Raises ValueError, or what PyAV raises, for what is no video."""
    with _container(data) as container:
        stream = container.streams.video[0]
        count, index = _frames_in(container, stream)
        rate = 1 if not stream.average_rate and count == 1 else stream.average_rate  # a GIF of one picture has none, or 0/0
        width, height = stream.width, stream.height
    if not count or not rate or not width or not height:
        raise ValueError(f"it has {count} frames of {width} x {height} pixels at a rate of {rate}")
    return Film(count, Fraction(rate), width, height, index)


def frames_of(data: Any, film: Film, places: Sequence[int]) -> Iterator[Any]:
    """Some frames of a file, as PyAV has them. places: which, ascending, the first of all among them. Raises ValueError for a file that
    ends before, or what PyAV raises for one that is damaged."""
    left = list(places)
    for frame in _by_seeking(data, film, places):
        del left[0]
        yield frame
    yield from _in_order(data, left)


def picture_of(frame: Any, film: Film) -> Any:
    """A frame of a film as a PIL image in RGB, of the size that its first frames have, and turned as its file says."""
    image = frame.to_image(width=film.width, height=film.height)
    # By quarters alone: with others a frame would have another number of rows.
    return image if frame.rotation % 90 else image.rotate(frame.rotation, expand=True)


def _frames_in(container: Any, stream: Any) -> tuple[int, Index | None]:
    """How many frames a file has, and where. Some are decoded and not shown, as where a film was cut and not encoded anew: those that its
    edit list leaves out, and those before the first that needs no other."""
    if stream.frames and "mp4" in container.format.name.split(","):  # which has edit lists, and all frames in its index
        entries = list(stream.index_entries)
        shown = sum(not entry.is_discard for entry in entries)
        # The index says when frames are decoded. That is when they are shown, but for an offset, if they all last as long.
        step = entries[1].timestamp - entries[0].timestamp if len(entries) > 1 else 1
        times = range(0, step * len(entries), step) if step > 0 else range(0)
        even = shown == len(entries) and [entry.timestamp - entries[0].timestamp for entry in entries] == list(times)
        return shown, _index(times, [i for i, entry in enumerate(entries) if entry.is_keyframe]) if even else None
    packets = itertools.dropwhile(lambda packet: not packet.is_keyframe, container.demux(stream))
    found = [(packet.pts, packet.is_keyframe) for packet in packets if packet.size]  # without what is in them
    times = sorted({time for time, _ in found if time is not None})
    # An AVI file also counts the frames that were dropped as it was recorded, and after seeking its times are not true.
    if stream.frames or container.format.name == "avi" or len(times) < len(found):
        return len(found), None
    keys = sorted(bisect.bisect_left(times, time) for time, is_key in found if is_key)
    return len(found), _index([time - times[0] for time in times], keys)


def _index(times: Sequence[int], keys: Sequence[int]) -> Index | None:
    return Index(times, keys) if keys and not keys[0] else None


def _by_seeking(data: Any, film: Film, places: Sequence[int]) -> Iterator[Any]:
    """The first ones of some frames, as many as can be found by the times at which they are shown, without decoding all that are between
    them."""
    from av.error import FFmpegError

    if film.index is None:
        return
    times, keys = film.index.times, film.index.keys
    with _container(data) as container, contextlib.suppress(FFmpegError):
        stream = container.streams.video[0]
        decoded, at, begin = container.decode(stream), 0, 0
        for place in places:
            before = max(place - REORDERED, 0)
            sought = keys[bisect.bisect_right(keys, before) - 1] > at + 1
            if sought:
                container.seek(begin + times[before], stream=stream)
                decoded = container.decode(stream)
            for frame in decoded:
                if sought and not frame.key_frame:  # it may lack frames that it needs
                    continue
                sought, begin = False, begin if place else frame.pts
                if frame.pts is None or frame.is_corrupt or frame.pts > begin + times[place]:
                    return
                if frame.pts == begin + times[place]:
                    yield frame
                    break
            else:
                return
            at = place


def _in_order(data: Any, places: Sequence[int]) -> Iterator[Any]:
    """Some frames of a file, all of which are decoded."""
    if not places:
        return
    wanted, last, count = set(places), places[-1], 0
    with _container(data) as container:
        for count, frame in enumerate(container.decode(container.streams.video[0]), 1):
            if count - 1 in wanted:
                yield frame
            if count > last:
                return
    raise ValueError(f"it ends after {count} frames; expected {last + 1} at least")


@contextlib.contextmanager
def _container(data: Any) -> Iterator[Any]:
    import av

    # With its protocol, or FFmpeg takes what stands before a colon in a file's name for one, and asks servers, which may never answer.
    file = f"file:{data}" if isinstance(data, str) else io.BytesIO(data)
    with av.open(file) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        if container.streams.video[0].codec_context is None:
            raise ValueError("FFmpeg knows no decoder for it")
        container.streams.video[0].thread_type = "AUTO"
        yield container
