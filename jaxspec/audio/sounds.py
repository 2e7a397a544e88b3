"""Sounds of a checkpoint: opened, brought to its sampling rate, and turned into rows by its tower."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import numbers
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audio import gemma4_tower, unified_embedder
from jaxspec.audio.config import AudioConfig, TowerConfig, audio_config
from jaxspec.audio.features import SAMPLING_RATE, Frames, Mel, read_features
from jaxspec.checkpoint.files import AUDIO
from jaxspec.checks import type_name
from jaxspec.media.files import explained, file_in, name_of, read_from
from jaxspec.media.tower import AHEAD, KEPT, Media, Prepared, jitted

# Rows of a sound that calls have room for: of ten seconds, and of thirty. In the 12B, longer ones are computed in parts.
ROOMS = (256, 768)
LEAST_ROWS = 192  # of the smallest program that runs a tower: 7.7 seconds; others take twice as many, 4 times, ...
SIZES = 3  # of such programs that are compiled at warm-up: up to 30 seconds
EXPECTED = (
    f"expected an array of samples [n] of floats, {SAMPLING_RATE:,} a second, (samples, rate), a dataset's cell, "
    "the path or the bytes of a sound file, or a URL that begins with data:, file://, http:// or https://"
)
_explained = functools.partial(explained, kind="a sound", expected=EXPECTED)


@dataclasses.dataclass(frozen=True)
class Source:
    """A sound that is known to be one, as far as its beginning tells. name: what an error calls it. data: samples [n] float32, the bytes of
    a file, or a path. length: in samples, of which there are `rate` a second."""

    name: str
    data: Any
    length: int
    rate: int

    @property
    def samples(self) -> int:
        """Its length at the towers' sampling rate."""
        return -(-self.length * SAMPLING_RATE // self.rate)


def check_libraries() -> None:
    """Raises ImportError without soundfile and soxr."""
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except ImportError as error:
        raise ImportError("sounds need soundfile and soxr: pip install soundfile soxr") from error


def source_of(sound: Any) -> Source:
    """Looks at a sound without decoding it; one behind a URL is fetched.

    sound: samples [n] of floats, at 16,000 a second, as an array or a list; (samples, rate); what a dataset has, a dict with "array" and
    "sampling_rate", or with "bytes" or "path", or a torchcodec AudioDecoder, which is decoded; a path, the bytes of a sound file, or a URL
    that begins with data:, file://, http:// or https://; a `Source` stays as it is. Raises ImportError for a file or another rate without
    soundfile and soxr, TypeError for something else, and ValueError, which names the sound, for what cannot be read.
    """
    if isinstance(sound, Source):
        return sound
    sound = file_in(sound)
    name = name_of(sound)
    if name is None:
        return _of_samples(sound)
    check_libraries()
    with _explained(name):
        data = read_from(sound, "audio")
        with _opened(data) as found:
            return Source(name, data, found.frames, found.samplerate)


def _of_samples(sound: Any) -> Source:
    given, rate, decode = sound, SAMPLING_RATE, getattr(sound, "get_all_samples", None)
    if isinstance(sound, Mapping) and "array" in sound:
        given, rate = sound["array"], sound.get("sampling_rate", SAMPLING_RATE)
    elif decode is not None:
        with _explained(f"a {type_name(sound)}"):
            decoded = decode()
            given, rate = decoded.data.mean(dim=0), decoded.sample_rate
    elif isinstance(sound, list | tuple) and len(sound) == 2 and not isinstance(sound[0], numbers.Real):
        given, rate = sound
    if not isinstance(given, list | tuple) and not hasattr(given, "__array__"):
        raise TypeError(f"a sound is of type {type_name(sound)}; {EXPECTED}")
    with _explained(f"a {type_name(given)} of {len(given)}" if isinstance(given, list | tuple) else f"a {type_name(given)}"):
        array = _on_host(given)
    name = f"an array {list(array.shape)} of {array.dtype}"
    with _explained(name):
        if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.floating):  # bfloat16 is such a type for JAX alone
            raise ValueError("it is not [n] of floats")
        if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not 1 <= rate == int(rate):
            raise ValueError(f"its rate is {reprlib.repr(rate)}")
    if rate != SAMPLING_RATE:
        check_libraries()
    with np.errstate(over="ignore"):  # what float32 cannot hold is not finite then
        return Source(name, array.astype(np.float32), len(array), int(rate))


def _on_host(given: Any) -> np.ndarray:
    """Numbers as an array. PyTorch's may lie on a device and have gradients, and NumPy cannot take their bfloat16."""
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        given = given.float() if given.is_floating_point() else given
    return np.asarray(given)


def samples_of(source: Source) -> np.ndarray:
    """Samples of one channel, the mean of all, at the towers' sampling rate: [samples] float32. Raises ValueError for a damaged file."""
    with _explained(source.name):
        samples = source.data
        if not isinstance(samples, np.ndarray):
            with _opened(source.data) as found:
                # The length is given, since files of some codecs cannot be searched for their end.
                samples = found.read(found.frames, dtype="float32", always_2d=True).mean(axis=1)
        if len(samples) != source.length:
            raise ValueError(f"it ends after {len(samples):,} samples, but begins as one of {source.length:,}")
        if not np.all(np.isfinite(samples)):
            raise ValueError("it has samples that are not finite")
        if source.rate == SAMPLING_RATE:
            return samples
        import soxr

        found = soxr.resample(samples, source.rate, SAMPLING_RATE, quality="HQ")[: source.samples]
        return np.pad(found, (0, source.samples - len(found)))


@contextlib.contextmanager
def _opened(data: Any) -> Iterator[Any]:
    import soundfile

    if isinstance(data, str):
        os.stat(data)  # which says more about a file that is not there
    with soundfile.SoundFile(data if isinstance(data, str) else io.BytesIO(data)) as found:
        yield found


class Sounds(Media):
    """What makes rows of sounds."""

    noun, section, folder = "audio tower", "audio_config", AUDIO
    modules = ("audio_tower", "embed_audio")
    see_one_another = False

    def __init__(self, config: AudioConfig, features: Mel | Frames, tower: Any):
        super().__init__(tower)
        self.config = config
        self.features = features

    @classmethod
    def read(cls, folder: Path, dtype: Any) -> Sounds:
        folder = cls.home(Path(folder))
        config = audio_config(cls.config_of(folder))
        assert config is not None
        return cls.of(config, read_features(folder, config), dtype)

    @classmethod
    def of(cls, config: AudioConfig, features: Mel | Frames, dtype: Any) -> Sounds:
        """The same without a checkpoint."""
        family = gemma4_tower if isinstance(config.tower, TowerConfig) else unified_embedder
        return cls(config, features, family.abstract(config, dtype))

    @property
    def token_id(self) -> int:
        """The token that stands in a prompt for each row."""
        return self.config.audio_token_id

    @property
    def opening(self) -> list[int]:
        return [self.config.boa_token_id]

    @property
    def closing(self) -> list[int]:
        return [self.config.eoa_token_index]

    @property
    def rooms(self) -> tuple[int, ...]:
        return ROOMS

    @property
    def largest(self) -> str:
        return "sounds of 30 seconds"

    @property
    def text_settings(self) -> dict[str, Any]:
        """By name, what texts with sounds depend on."""
        return {"audio": True}

    def bytes_needed(self, kernels: bool) -> int:
        rows, size, tower = LEAST_ROWS << SIZES - 1, jax.tree.leaves(self.tower)[0].dtype.itemsize, self.config.tower
        found = self.nbytes + (KEPT + AHEAD) * rows * self.config.text_hidden_size * size
        if not isinstance(tower, TowerConfig):
            return found
        frames, first = 4 * rows, tower.subsampling_conv_channels[0]
        convolved = frames // 2 * tower.num_places * 2 * first * (4 + 2 * size)
        context = tower.attention_chunk_size + tower.attention_context_left + tower.attention_context_right
        scores = rows * context * (3 * tower.num_attention_heads + 2 * tower.hidden_size // tower.attention_chunk_size) * 4
        return found + max(convolved, scores + rows * 8 * tower.hidden_size * size)

    def source(self, sound: Any) -> Source:
        """`source_of`, for a sound that is as long as the tower can read. Raises ValueError for another one too."""
        source = source_of(sound)
        most, seconds = self.features.most_samples, source.samples / SAMPLING_RATE
        if most is not None and source.samples > most:
            longest = most // SAMPLING_RATE
            raise ValueError(f"{source.name} lasts {seconds:.4f} seconds; the tower hears {longest} at most: cut it into parts")
        if not self.features.count(source.samples):
            raise ValueError(f"{source.name} lasts {seconds:.4f} seconds, which are too few to hear anything")
        return source

    def count(self, sound: Any) -> int:
        """How many rows a sound has. Argument and errors are those of `source`."""
        return -(-self.features.count(self.source(sound).samples) // self.features.frames_a_row)

    def prepared(self, sound: Any) -> Prepared:
        """Decodes a sound to samples [n] float32, 16,000 a second. Argument and errors are those of `source`, and ValueError for a damaged
        file."""
        return Prepared.of(samples_of(self.source(sound)))

    def warmup(self) -> list[jax.Array]:
        """Compiles the tower for sounds up to 30 seconds. Returns rows of each size that it gives."""
        samples = LEAST_ROWS * self.features.frames_a_row * self.features.hop_length
        sounds = (Prepared(np.zeros(samples << i, np.float32), b"") for i in range(SIZES))
        with concurrent.futures.ThreadPoolExecutor(SIZES) as pool:
            return [jax.block_until_ready(rows) for (rows,) in pool.map(lambda sound: self.computed([sound]), sounds)]

    def computed(self, several: Sequence[Prepared]) -> Sequence[jax.Array]:
        (prepared,) = several
        frames, size = self.features.count(len(prepared.data)), LEAST_ROWS * self.features.frames_a_row
        while size < frames:
            size *= 2
        samples = np.zeros(size * self.features.hop_length, np.float32)
        known = prepared.data[: len(samples)]  # what follows lies in no frame
        samples[: len(known)] = known
        return [jitted(_rows, "features")(self.tower, samples, frames, features=self.features)]


def _rows(tower: Any, samples: jax.Array, frames: jax.Array, *, features: Mel | Frames) -> jax.Array:
    return tower(features.of(samples), frames)
