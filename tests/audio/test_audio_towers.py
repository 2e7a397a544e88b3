"""The audio towers against transformers, on random weights that it saved."""

import audio_oracle
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.audio import Sounds
from jaxspec.audio.features import Mel

pytestmark = pytest.mark.usefixtures("unoptimised")
LENGTHS = (0.0101, 0.2, 1.0, 1.0004, 2.51, 7.93)  # seconds, from one row on


@pytest.mark.parametrize("kind", audio_oracle.KINDS)
def test_rows_are_those_of_transformers(kind):
    sounds = Sounds.load(audio_oracle.saved(kind)[1], jnp.float32)
    for i, seconds in enumerate(LENGTHS):
        sound = audio_oracle.sound(seconds, i)
        expected = audio_oracle.rows(kind, sound)
        assert len(expected) == sounds.count(sound) >= 1
        np.testing.assert_allclose(sounds.rows(sound)[: len(expected)], expected, atol=1e-4, rtol=2e-5)


def features_of(mel, samples):
    whole = np.pad(samples, (0, -len(samples) % mel.hop_length))
    return np.asarray(mel.of(jnp.asarray(whole)))[: mel.count(len(samples))]


@pytest.mark.parametrize("settings", [{}, {"feature_size": 80, "min_frequency": 60.0, "max_frequency": 7000.0, "fft_overdrive": True}])
def test_features_are_those_of_transformers(settings):
    for i, seconds in enumerate((0.0101, 0.3337, 3.0)):
        sound = audio_oracle.sound(seconds, i)
        expected = audio_oracle.features("plain", sound, **settings)
        found = features_of(Mel(**settings), sound)
        assert found.shape == expected.shape == (Mel().count(len(sound)), settings.get("feature_size", 128))
        np.testing.assert_allclose(found, expected, atol=5e-5)


def test_features_are_scaled_as_a_checkpoint_says():
    generator = np.random.default_rng(0)
    mean, deviation = generator.normal(size=128), generator.uniform(1, 2, size=128)
    more = {"input_scale_factor": 3.0, "mel_floor": 0.1}
    expected = audio_oracle.features("plain", audio_oracle.sound(0.4), per_bin_mean=mean, per_bin_stddev=deviation, **more)
    found = Mel(per_bin_mean=tuple(mean), per_bin_stddev=tuple(deviation), **more)
    found = features_of(found, audio_oracle.sound(0.4))
    np.testing.assert_allclose(found, expected, atol=5e-5)
