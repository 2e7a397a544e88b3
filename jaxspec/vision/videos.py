"""Videos: frames of them, which are images with few tokens each, and the times at which they stand."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checks import integer, number, type_name
from jaxspec.interrupts import begun
from jaxspec.media.files import explained, file_in, name_of, read_from
from jaxspec.media.processor import settings_of
from jaxspec.media.tower import Prepared, Run
from jaxspec.vision.films import Film, check_av, frames_of, looked_at, picture_of
from jaxspec.vision.images import Images, source_of
from jaxspec.vision.preprocessing import read_preprocessing

FRAMES, SOFT_TOKENS = 32, 70  # of a video, and of a frame, where the checkpoint says nothing
FRAMES_TOGETHER = 4  # that a call of the tower reads, if so many have no more tokens than an image, for which memory is planned
TOKEN_ID = 258_884  # where config.json says nothing
FPS = 24.0  # of frames that come without, as transformers has it
THREADS = 4  # that make frames fit, beside one that decodes them
LEAST_FPS = 1e-6  # with which no frame's number makes a time too long to be written
PART = "video_processor"
EXPECTED = (
    "expected the path or the bytes of a video file, a URL that begins with data:, file://, http:// or https://, a VideoDecoder of "
    "torchcodec, an array [frames, height, width, 3] or [frames, 3, height, width] of uint8, a list of images, or such frames with a dict "
    "of 'fps'"
)
_explained = functools.partial(explained, kind="a video", expected=EXPECTED)
# Of a dict beside frames, as vLLM and transformers have it.
METADATA = ("fps", "frames_indices", "total_num_frames", "duration", "width", "height", "video_backend", "do_sample_frames")


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A video that is known to be one, as far as its beginning tells. name: what an error calls it. data: the path or the bytes of a file,
    or frames. places: of the frames that are read, ascending. times: of these, in seconds. sizes: their widths and heights. film: what a
    file says of itself."""

    name: str
    data: Any
    places: Sequence[int]
    times: Sequence[float]
    sizes: Sequence[tuple[int, int]]
    film: Film | None = None


class Videos:
    """What makes rows of videos: the image tower of a checkpoint reads some of their frames. Threads may share it."""

    see_one_another = True  # the rows of a frame

    def __init__(self, images: Images, frames: int, token_id: int):
        """images: with the tower, and prepared as frames are. frames: of a video that are read, at most, evenly spread. token_id: of the
        token that stands in a prompt for each row."""
        self.images, self.frames, self.token_id = images, integer("videos", frames, 1), token_id
        self._fitting = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="jaxspec-frames")

    @classmethod
    def read(cls, folder: Path, images: Images, frames: int | None = None) -> Videos:
        """What a checkpoint says about videos. images: as the same checkpoint has them, with their tower. frames: in place of the
        checkpoint's number. Raises ImportError without PyAV, ValueError for what is not served."""
        check_av()
        folder = images.home(Path(folder))
        file, found = settings_of(folder, PART)
        if found.get("fps") is not None or not found.get("do_sample_frames", True):
            raise ValueError(f"{file}: the {PART} has fps or no do_sample_frames; expected num_frames, a number of frames for each video")
        preprocessing = read_preprocessing(folder, images.config, None, PART, SOFT_TOKENS)
        if preprocessing.max_soft_tokens > images.max_soft_tokens:
            raise ValueError(
                f"a frame of a video has up to {preprocessing.max_soft_tokens} tokens, and an image {images.max_soft_tokens}; expected no "
                f"fewer: load with images={preprocessing.max_soft_tokens}"
            )
        token_id = images.config_of(folder).get("video_token_id") or TOKEN_ID
        together = min(images.max_soft_tokens // preprocessing.max_soft_tokens, FRAMES_TOGETHER)
        own = Images(images.config, preprocessing, images.tower, together)
        return cls(own, found.get("num_frames", FRAMES) if frames is None else frames, token_id)

    def with_tower(self, tower: Any) -> Videos:
        """The same with another tower of these shapes."""
        return Videos(self.images.with_tower(tower), self.frames, self.token_id)

    @property
    def text_settings(self) -> dict[str, Any]:
        """By name, what texts with videos depend on."""
        return {"videos": self.frames, "of a frame": self.images.max_soft_tokens}

    @property
    def closing(self) -> list[int]:
        """The tokens after the rows of a video's last frame."""
        return self.images.closing

    def source(self, video: Any) -> Source:
        """Looks at a video without decoding it; one behind a URL is fetched. video: see `EXPECTED`; a `Source` stays as it is. Raises
        TypeError for something else, and ValueError, which names the video, for what cannot be read."""
        if isinstance(video, Source):
            return video
        video, metadata = _apart(video)
        video = file_in(video)
        with _explained(f"a {type_name(video)}"):
            if hasattr(video, "get_frames_at"):  # torchcodec's VideoDecoder, as datasets have it
                if not video.metadata.num_frames:
                    raise ValueError("it does not say how many frames it has")
                places = spread(video.metadata.num_frames, self.frames)
                metadata = {"fps": video.metadata.average_fps, "frames_indices": places}
                video = video.get_frames_at(indices=places).data
            if hasattr(video, "__array__"):
                video = _on_host(video)
        name = _name(video)
        with _explained(name):
            if isinstance(video, np.ndarray | list | tuple):
                return self._given(name, video, metadata)
            if metadata:
                raise ValueError("a file says itself at which rate its frames stand")
            return self._of_file(name, read_from(video, "video"))

    def _given(self, name: str, video: Any, metadata: Mapping[str, Any]) -> Source:
        """Frames of an array, or of a list of images."""
        if isinstance(video, np.ndarray) and (video.dtype != np.uint8 or video.ndim != 4 or video.shape[3] != 3):
            raise ValueError("it is not [frames, height, width, 3] of uint8, nor [frames, 3, height, width]")
        if not len(video):
            raise ValueError("it has no frames")
        rate = number("fps", FPS if metadata.get("fps") is None else metadata["fps"], LEAST_FPS)
        known = metadata.get("frames_indices")
        known = range(len(video)) if known is None else [integer("frames_indices", place, 0) for place in known]
        if len(known) != len(video):
            raise ValueError(f"it has {len(video)} frames and {len(known)} frames_indices; expected one for each frame")
        places = spread(len(video), self.frames)
        images = [source_of(video[place]) for place in places]
        times = [known[place] / rate for place in places]
        return Source(name, images, range(len(images)), times, [(image.width, image.height) for image in images])

    def _of_file(self, name: str, data: Any) -> Source:
        """Frames of a file, given by its path or its bytes."""
        film = looked_at(data)
        places = spread(film.count, self.frames)
        times, sizes = [float(place / film.rate) for place in places], [(film.width, film.height)] * len(places)
        return Source(name, data, places, times, sizes, film)

    def runs(self, video: Any, encode: Callable[[str], list[int]]) -> list[Run]:
        """The frames of a video as they stand in a prompt, each after its time: "00:07 ", the beginning of an image, the frame's tokens,
        the end of an image, and a space. Argument and errors are those of `source`."""
        found, source = list[Run](), self.source(video)
        for time, size in zip(source.times, source.sizes, strict=True):
            minutes, seconds = divmod(math.floor(time), 60)
            shown = f"{minutes:02}:{seconds:02} "
            before = [*self.closing, *encode(f" {shown}")] if found else encode(shown)
            found.append(Run([*before, *self.images.opening], self.images.preprocessing.count(*size)))
        return found

    def decoded(self, video: Any) -> list[Prepared]:
        """The frames of a video. Argument and errors are those of `source`, and ValueError for a damaged file."""
        source = self.source(video)
        with _explained(source.name):
            if source.film is None:
                return list(self._each(self.images.prepared, source.data))
            frames = frames_of(source.data, source.film, source.places)
            return list(self._each(functools.partial(self._fit, source.film), frames))

    def _each(self, fit: Callable[[Any], Prepared], frames: Iterable[Any]) -> Iterator[Prepared]:
        """What several threads make of frames, of which they keep few waiting."""
        coming = collections.deque[concurrent.futures.Future[Prepared]]()
        for frame in frames:
            coming.append(begun(self._fitting, functools.partial(fit, frame)))
            if len(coming) > 2 * THREADS:
                yield coming.popleft().result()
        yield from (each.result() for each in coming)

    def _fit(self, film: Film, frame: Any) -> Prepared:
        """A frame of a file."""
        return Prepared.of(self.images.preprocessing.resized(picture_of(frame, film)))

    def rows(self, prepared: Prepared, then: Sequence[Prepared] = ()) -> jax.Array:
        """See `Images.rows`."""
        return self.images.rows(prepared, then)

    def warmup(self) -> list[jax.Array]:
        """Compiles the tower for frames. Returns rows of one."""
        return self.images.warmup()


def spread(count: int, most: int) -> list[int]:
    """Which of so many frames are read, as transformers samples them; all, if there are no more than that."""
    number = min(count, most)
    return [i * count // number for i in range(number)]


def _apart(video: Any) -> tuple[Any, Mapping[str, Any]]:
    """(frames, metadata) of a video that may come with its metadata. Raises ValueError for unknown ones."""
    if not isinstance(video, tuple) or len(video) != 2 or not isinstance(video[1], Mapping):
        return video, {}
    unknown = [key for key in video[1] if key not in METADATA]
    if unknown:
        raise ValueError(f"the metadata of a video have {unknown[0]!r}; expected some of {', '.join(map(repr, METADATA))}")
    return video


def _on_host(frames: Any) -> np.ndarray:
    """An array of any library. Colours may be its second axis, as PyTorch's have them."""
    found = np.asarray(frames.detach().cpu() if hasattr(frames, "detach") else frames)
    return found.transpose(0, 2, 3, 1) if found.ndim == 4 and found.shape[1] == 3 != found.shape[3] else found


def _name(video: Any) -> str:
    """What an error calls a video. Raises TypeError for what is none of those that `Videos.source` takes."""
    if isinstance(video, np.ndarray):
        return f"an array {list(video.shape)} of {video.dtype}"
    if isinstance(video, list | tuple):
        return f"a list of {len(video)} images"
    name = name_of(video)
    if name is None:
        raise TypeError(f"a video is of type {type_name(video)}; {EXPECTED}")
    return name
