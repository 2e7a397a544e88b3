"""From a sound's samples to what a tower reads.

Facts: transformers `feature_extraction_gemma4.py` and `feature_extraction_gemma4_unified.py` 5.24, whose numbers these are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audio.config import AudioConfig, EmbedderConfig
from jaxspec.checks import integer, number
from jaxspec.media.processor import settings_of

SAMPLING_RATE = 16_000  # samples a second
MOST_SAMPLES = 480_000  # of a sound for an encoder: 30 seconds


@dataclasses.dataclass(frozen=True)
class Mel:
    """What an encoder reads: for each frame of 20 ms, every 10 ms, the logarithms of how loud it is in bands of frequency, which lie closer
    where these are low (the mel scale). min_frequency, max_frequency: in Hz. per_bin_mean, per_bin_stddev: [feature_size] each."""

    feature_size: int = 128
    min_frequency: float = 0.0
    max_frequency: float = 8000.0
    fft_overdrive: bool = False
    input_scale_factor: float = 1.0
    mel_floor: float = 1e-3
    per_bin_mean: tuple[float, ...] | None = None
    per_bin_stddev: tuple[float, ...] | None = None
    hop_length = 160  # samples from one frame to the next
    frame_length = 2 * hop_length
    most_samples = MOST_SAMPLES
    frames_a_row = 4  # of a tower's rows

    def count(self, samples: int) -> int:
        """The frames of a sound of so many samples that lie within it. The first is centred at its beginning."""
        return max((samples - self.hop_length - 1) // self.hop_length + 1, 0)

    def of(self, samples: jax.Array) -> jax.Array:
        """samples: [N * hop_length] float32 -> [N, feature_size] float32."""
        hops = (samples * self.input_scale_factor).reshape(-1, self.hop_length)
        frames = jnp.concatenate([jnp.concatenate([jnp.zeros_like(hops[:1]), hops[:-1]]), hops], axis=1)
        window = np.hanning(self.frame_length + 1)[:-1].astype(np.float32)
        loudness = jnp.abs(jnp.fft.rfft(frames * window[None, :], n=self.fft_length))
        found = jnp.log(jnp.matmul(loudness, self.filters.astype(np.float32), precision="highest") + self.mel_floor)
        if self.per_bin_mean is not None:
            found = found - np.asarray(self.per_bin_mean, np.float32)[None, :]
        if self.per_bin_stddev is not None:
            found = found / np.asarray(self.per_bin_stddev, np.float32)[None, :]
        return found

    @property
    def fft_length(self) -> int:
        return 2 ** (math.ceil(math.log2(self.frame_length)) + self.fft_overdrive)

    @functools.cached_property
    def filters(self) -> np.ndarray:
        """How much of a frequency belongs to a band, in triangles whose ends are their neighbours' tips: [fft_length // 2 + 1,
        feature_size]."""
        low, high = (2595 * np.log10(1 + frequency / 700) for frequency in (self.min_frequency, self.max_frequency))
        tips = 700 * (10 ** (np.linspace(low, high, self.feature_size + 2) / 2595) - 1)
        beyond = tips[None, :] - np.linspace(0, SAMPLING_RATE // 2, self.fft_length // 2 + 1)[:, None]
        between = np.diff(tips)
        return np.maximum(0, np.minimum(-beyond[:, :-2] / between[:-1], beyond[:, 2:] / between[1:]))


@dataclasses.dataclass(frozen=True)
class Frames:
    """What the 12B reads: the samples themselves, `feature_size` for each row. The last one is filled up with zeros."""

    feature_size: int = 640
    most_samples = None
    frames_a_row = 1

    @property
    def hop_length(self) -> int:
        """Samples from one frame to the next."""
        return self.feature_size

    def count(self, samples: int) -> int:
        """The frames of a sound of so many samples."""
        return -(-samples // self.feature_size)

    def of(self, samples: jax.Array) -> jax.Array:
        """samples: [N * hop_length] float32 -> [N, feature_size] float32."""
        return samples.reshape(-1, self.feature_size)


def read_features(folder: Path, config: AudioConfig) -> Mel | Frames:
    """What a checkpoint's folder says about features, and the published settings for what it does not say. Raises ValueError for what is
    not served."""
    file, found = settings_of(folder, "feature_extractor")
    fixed = {"sampling_rate": SAMPLING_RATE}
    if isinstance(config.tower, EmbedderConfig):
        width = config.tower.audio_embed_dim
        _expect(file, found, fixed | {"feature_size": width, "audio_samples_per_token": width})
        return Frames(width)
    fixed |= {"frame_length": Mel.frame_length, "hop_length": Mel.hop_length, "frame_length_ms": 20.0, "hop_length_ms": 10.0}
    _expect(file, found, fixed | {"preemphasis": 0.0, "dither": 0.0})
    try:
        made = Mel(
            feature_size=integer("feature_size", found.get("feature_size", Mel.feature_size), 1),
            min_frequency=number("min_frequency", found.get("min_frequency", Mel.min_frequency), 0),
            max_frequency=number("max_frequency", found.get("max_frequency", Mel.max_frequency), 0, above=True),
            fft_overdrive=bool(found.get("fft_overdrive", False)),
            input_scale_factor=number("input_scale_factor", found.get("input_scale_factor", 1.0), 0, above=True),
            mel_floor=number("mel_floor", found.get("mel_floor", Mel.mel_floor), 0, above=True),
            per_bin_mean=_of_bands("per_bin_mean", found),
            per_bin_stddev=_of_bands("per_bin_stddev", found),
        )
    except TypeError as error:
        raise ValueError(f"{file}: {error}") from error
    places, expected = -(-made.feature_size // 4), config.tower.num_places
    if places != expected:
        raise ValueError(f"{file}: feature_size is {made.feature_size}, of which convolutions leave {places}; expected {expected}")
    return made


def _of_bands(name: str, found: Mapping[str, Any]) -> tuple[float, ...] | None:
    values, count = found.get(name), found.get("feature_size", Mel.feature_size)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name} is {values!r}; expected a list of {count} numbers")
    return tuple(number(name, value, -math.inf) for value in values)


def _expect(file: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if found.get(name, value) != value:
            raise ValueError(f"{file}: {name} of the feature extractor is {found[name]!r}; expected {value}")
