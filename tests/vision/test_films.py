"""Frames of files, found by seeking, against all frames decoded in their order."""

import contextlib
from fractions import Fraction

import av
import numpy as np
import pytest

from jaxspec.vision import films
from jaxspec.vision.videos import spread

COUNT = 150
H264 = {"codec": "libx264", "g": "24", "bf": "3", "sc_threshold": "0"}
OPEN = {**H264, "x264-params": "open-gop=1:scenecut=0"}  # frames before a key frame need others before it


def written(path, codec, steps=(1,), pixels="yuv420p", **options):
    """A film of COUNT frames that all differ, with so many thirtieths of a second from each to the next, over and over."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        at = 0
        for i in range(COUNT):
            picture = np.full((48, 64, 3), i, np.uint8)
            picture[:, i % 64] = 255
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = at, Fraction(1, 30)
            at += steps[i % len(steps)]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return str(path)


@pytest.fixture
def jumps(monkeypatch):
    """How often files were sought in, for each time that one was opened."""
    opened, found = films._container, []

    class Counted:
        def __init__(self, container):
            self.container = container

        def __getattr__(self, name):
            return getattr(self.container, name)

        def seek(self, *args, **options):
            found[-1] += 1
            self.container.seek(*args, **options)

    @contextlib.contextmanager
    def counted(data):
        found.append(0)
        with opened(data) as container:
            yield Counted(container)

    monkeypatch.setattr(films, "_container", counted)
    return found


def pixels(frames):
    return [frame.to_ndarray(format="rgb24") for frame in frames]


@pytest.mark.parametrize(
    ("name", "settings", "sought"),
    [
        ("film.mp4", H264, True),
        ("film.mp4", OPEN, True),
        ("film.mkv", OPEN, True),
        ("film.mkv", {**H264, "steps": (1, 2, 4)}, True),
        ("film.webm", {"codec": "libvpx", "g": "30"}, True),
        ("film.mp4", {"codec": "mpeg4", "g": "12"}, True),
        ("film.mp4", {**H264, "steps": (1, 2, 4)}, False),  # its index does not say when frames are shown
        ("film.avi", {"codec": "mpeg4", "g": "12"}, False),
        ("film.avi", {"codec": "mjpeg", "pixels": "yuvj420p", "steps": (1, 2)}, False),  # its header counts what was dropped between them
        ("film.ts", H264, None),  # some of its frames are found, and some are not
    ],
)
def test_frames_are_those_of_a_whole_decoding(name, settings, sought, tmp_path, jumps):
    path = written(tmp_path / name, **settings)
    film = films.looked_at(path)
    assert (film.count, film.width, film.height) == (COUNT, 64, 48)
    for most in (3, 40):
        places = spread(COUNT, most)
        wanted = pixels(films._in_order(path, places))
        jumps.clear()
        found = pixels(films.frames_of(path, film, places))
        assert len(found) == most and all(np.array_equal(*both) for both in zip(found, wanted, strict=True))
        if sought:
            assert len(jumps) == 1, "it was decoded from its beginning too"
            assert jumps[0] == 2 or most > 3
        elif sought is False:
            assert not any(jumps)


def test_a_file_that_ends_before_its_last_frame(tmp_path):
    path = written(tmp_path / "film.mp4", **H264)
    film = films.looked_at(path)
    with pytest.raises(ValueError, match=f"it ends after {COUNT} frames; expected 201 at least"):
        list(films.frames_of(path, films.Film(300, film.rate, 64, 48, films.Index(range(0, 300 * 512, 512), [0])), [0, 100, 200]))


def test_an_index_that_is_wrong_does_no_harm(tmp_path):
    path = written(tmp_path / "film.mp4", **H264)
    wanted = pixels(films._in_order(path, [0, 60, 149]))
    for index in (films.Index(range(0, 7 * COUNT, 7), [0, 50, 100]), films.Index(range(0, 512 * COUNT, 512), [0, 130])):
        found = pixels(films.frames_of(path, films.Film(COUNT, Fraction(30), 64, 48, index), [0, 60, 149]))
        assert all(np.array_equal(*both) for both in zip(found, wanted, strict=True))
