"""Sounds are opened from whatever they come as, loaded towers are those of every way of saving, and every error names what is wrong."""

import io
import re
import types

import audio_oracle
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile
import soxr
import torch
from safetensors.numpy import load_file, save_file

from jaxspec.audio import Sounds, sounds
from jaxspec.audio.sounds import Source, samples_of, source_of
from jaxspec.media import tower

pytestmark = pytest.mark.usefixtures("unoptimised")
SOUND = audio_oracle.sound(0.5, 3)


def written(samples, rate=16_000, **settings):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **{"format": "WAV", "subtype": "FLOAT", **settings})
    return file.getvalue()


def loaded(kind="plain"):
    return Sounds.load(audio_oracle.saved(kind)[1], jnp.float32)


@pytest.mark.parametrize(
    "given",
    [
        SOUND,
        SOUND.tolist(),
        (SOUND, 16_000),
        [SOUND, 16_000.0],
        {"array": SOUND, "sampling_rate": 16_000},
        torch.tensor(SOUND),
        torch.tensor(SOUND, requires_grad=True),
        written(SOUND),
    ],
    ids=["array", "list", "tuple", "pair", "dict", "tensor", "graph", "bytes"],
)
def test_samples_are_what_they_were(given):
    source = source_of(given)
    assert source_of(source) is source and (source.samples, source.rate) == (8000, 16_000)
    np.testing.assert_array_equal(samples_of(source), SOUND)


@pytest.mark.parametrize("given", [torch.tensor(SOUND).bfloat16(), jnp.asarray(SOUND, jnp.bfloat16), SOUND.astype(np.float16)])
def test_samples_of_fewer_bits_are_read(given):
    np.testing.assert_allclose(samples_of(source_of(given)), SOUND, atol=4e-3)


def test_two_numbers_are_a_sound_of_two_samples():
    for numbers in ([0.25, 0.5], [np.float32(0.25), np.float32(0.5)]):
        np.testing.assert_array_equal(samples_of(source_of(numbers)), np.asarray([0.25, 0.5], np.float32))


@pytest.mark.parametrize("subtype", ["GSM610", "G721_32"])
def test_files_that_cannot_be_searched_are_read(subtype):
    source = source_of(written(np.tile(SOUND, 4), subtype=subtype))
    assert len(samples_of(source)) == source.samples >= 32_000


def test_what_datasets_hold_is_read(tmp_path):
    """Cells of files, and what decodes them from version 4 on."""
    (tmp_path / "sound.wav").write_bytes(written(SOUND))
    stereo = types.SimpleNamespace(data=torch.tensor(np.stack([SOUND, SOUND / 2])), sample_rate=16_000)
    decoder = types.SimpleNamespace(get_all_samples=lambda: stereo)
    for cell, expected in (
        ({"bytes": written(SOUND), "path": "elsewhere.wav"}, SOUND),
        ({"bytes": None, "path": str(tmp_path / "sound.wav")}, SOUND),
        ({"path": str(tmp_path / "sound.wav")}, SOUND),
        (decoder, SOUND * 0.75),
    ):
        np.testing.assert_allclose(samples_of(source_of(cell)), expected, atol=1e-7)
    with pytest.raises(ValueError, match="a types.SimpleNamespace cannot be read as a sound: division by zero; expected an array"):
        source_of(types.SimpleNamespace(get_all_samples=lambda: 1 / 0))
    with pytest.raises(TypeError, match="a sound is of type NoneType; expected an array"):
        source_of({"bytes": None, "path": None})


@pytest.mark.parametrize(
    "settings", [{"format": "FLAC", "subtype": "PCM_16"}, {"format": "OGG", "subtype": "VORBIS"}, {"format": "MP3", "subtype": None}]
)
def test_files_of_other_kinds_are_read(tmp_path, settings):
    path = tmp_path / "sound"
    path.write_bytes(written(np.tile(SOUND, 4), **settings))
    source = source_of(path)
    found = samples_of(source)
    assert len(found) == source.samples and 32_000 <= source.samples < 32_000 + 3 * 1152  # blocks of an MP3
    if settings["format"] != "MP3":  # which begins later
        np.testing.assert_allclose(found, np.tile(SOUND, 4), atol=0.1)


@pytest.mark.parametrize("rate", [8000, 44_100, 48_000])
def test_channels_are_averaged_and_rates_are_resampled(rate):
    """As librosa does it, which transformers opens sounds with: to as many samples as the length asks for."""
    other = np.random.default_rng(0).normal(size=4001).astype(np.float32) / 10
    source = source_of(written(np.stack([other, other / 2], axis=1), rate))
    found = samples_of(source)
    assert len(found) == source.samples == -(-4001 * 16_000 // rate)
    expected = soxr.resample(np.mean([other, other / 2], axis=0), rate, 16_000, quality="HQ")
    shared = min(len(found), len(expected))
    assert abs(len(found) - len(expected)) <= 1
    np.testing.assert_allclose(found[:shared], expected[:shared], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, TypeError, "a sound is of type int; expected an array of samples"),
        ({"samples": SOUND}, TypeError, "a sound is of type dict; expected an array of samples"),
        ((SOUND, "16 kHz"), ValueError, r"an array \[8000\] of float32 cannot be read as a sound: its rate is '16 kHz'"),
        ((SOUND, 0), ValueError, "its rate is 0"),
        ((SOUND * 9000).astype(np.int16), ValueError, r"an array \[8000\] of int16 cannot be read as a sound: it is not \[n\] of floats"),
        (SOUND[:, None], ValueError, r"an array \[8000, 1\] of float32 cannot be read"),
        ((SOUND, SOUND.tolist()), ValueError, r"its rate is \[0\.\d+, 0\.\d+, 0\.\d+, 0\.\d+, 0\.\d+, -0\.\d+, \.\.\.\]; expected"),
        ((16_000, SOUND), ValueError, "a tuple of 2 cannot be read as a sound: .*inhomogeneous"),
        ([[0.5], [0.5, 0.5], [0.5]], ValueError, "a list of 3 cannot be read as a sound: .*inhomogeneous"),
        (np.full(8000, 1e300), ValueError, r"an array \[8000\] of float64 cannot be read as a sound: it has samples that are not finite"),
        (b"RIFF and nothing", ValueError, "16 bytes cannot be read as a sound: Format not recognised"),
        ("https//x.wav", ValueError, "'https//x.wav' cannot be read as a sound: No such file or directory; expected"),
        ("x" * 9000, ValueError, "^'x{200}...' cannot be read as a sound: File name too long; expected"),
        ("data:audio/wav,xx", ValueError, "must be in base64, after 'data:audio/wav;base64,'"),
        (np.zeros(160, np.float32), ValueError, "lasts 0.0100 seconds, which are too few to hear anything"),
        ([], ValueError, "lasts 0.0000 seconds, which are too few to hear anything"),
    ],
)
def test_what_is_no_sound_is_named(given, error, words):
    with pytest.raises(error, match=words):
        loaded().prepared(given)


def test_samples_that_are_no_numbers_are_named():
    with pytest.raises(
        ValueError, match=re.escape("an array [8000] of float32 cannot be read as a sound: it has samples that are not finite")
    ):
        loaded().prepared(np.where(np.arange(8000) == 77, np.nan, SOUND))


def test_a_file_that_ends_early_is_named():
    whole = written(SOUND)
    with pytest.raises(ValueError, match="it ends after 7,990 samples, but begins as one of 8,000"):
        samples_of(Source("x", written(SOUND[:7990]), source_of(whole).length, 16_000))


def test_without_the_libraries_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "soxr", None)
    with pytest.raises(ImportError, match="sounds need soundfile and soxr: pip install soundfile soxr"):
        source_of("sound.wav")
    assert source_of(SOUND).samples == 8000  # which needs neither


@pytest.mark.parametrize("kind", ["plain", "unified"])
def test_a_sound_in_a_prompt(kind):
    found = loaded(kind)
    count = found.count(SOUND)
    assert count == len(audio_oracle.rows(kind, SOUND)) == 13
    assert (found.opening, found.token_id, found.closing) == ([256_000], 258_881, [258_883])
    longest = np.zeros(480_000, np.float32)
    assert found.count(longest) == 750
    if kind == "unified":  # there is no tower that would limit it
        assert found.count(np.zeros(900_000, np.float32)) == 1407


def test_what_is_warmed_up_compiles_nothing_more():
    found = loaded()
    run = tower.jitted(sounds._rows, "features")
    run.clear_cache()
    shapes = {rows.shape for rows in found.warmup()}
    compiled = run._cache_size()
    for seconds in (0.1, 8, 29.9):
        assert found.rows(audio_oracle.sound(seconds)).shape in shapes
    assert run._cache_size() == compiled == 3


def test_rows_of_the_last_sounds_are_kept(monkeypatch):
    """By what is heard, whatever it comes as."""
    found, run, runs = loaded(), Sounds.computed, []
    monkeypatch.setattr(Sounds, "computed", lambda *args: runs.append(0) or run(*args))
    monkeypatch.setattr(tower, "KEPT", 2)
    first = found.rows(SOUND)
    assert found.rows(written(SOUND)) is first and len(runs) == 1
    found.rows(audio_oracle.sound(0.5, 4)), found.rows(audio_oracle.sound(0.4, 3))
    assert found.rows(SOUND) is not first and len(runs) == 4


def test_rows_of_long_sounds_are_not_kept_beyond_what_is_planned(monkeypatch):
    """In the 12B, which hears sounds of any length."""
    monkeypatch.setattr(tower, "KEPT", 4)
    found = loaded("unified")
    long = found.rows(audio_oracle.sound(70))  # 3,072 rows, as many as are planned for four sounds
    assert len(long) == 4 * sounds.ROOMS[-1] and found.rows(audio_oracle.sound(70)) is long
    short = found.rows(SOUND)
    assert found.rows(audio_oracle.sound(70)) is not long and found.rows(SOUND) is not short


def test_rows_do_not_depend_on_what_is_behind():
    """A program is for sounds up to a length; what fills a shorter one up changes nothing."""
    found = loaded()
    short, longer = audio_oracle.sound(7.6, 1), np.concatenate([audio_oracle.sound(7.6, 1), np.zeros(16_000, np.float32)])
    rows, more = np.asarray(found.rows(short)), np.asarray(found.rows(longer))
    assert len(rows) == 192 and len(more) == 384
    np.testing.assert_allclose(rows[:188], more[:188], atol=1e-5)


def test_bfloat16_rows_are_near():
    exact, found = loaded().rows(SOUND), Sounds.load(audio_oracle.saved("plain")[1], jnp.bfloat16).rows(SOUND)
    assert found.dtype == jnp.bfloat16
    difference = np.linalg.norm(np.asarray(found, np.float32)[:13] - exact[:13]) / np.linalg.norm(exact[:13])
    assert difference < 0.05


def changed(tmp_path, change):
    """A folder like that of the plain model with its tensors changed."""
    folder = audio_oracle.saved("plain")[1]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path


Q = "model.audio_tower.layers.1.self_attn.q_proj.linear.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(Q), rf"{Q}: missing, expected \[32, 32\]".removeprefix("model.")),
        (lambda t: t.update({Q: t[Q][:8].copy()}), r"q_proj.linear.weight.*\[8, 32\]"),
        (lambda t: t.update({Q: t[Q].astype(np.int8)}), rf"holds its audio tower quantised \({Q} is I8"),
        (
            lambda t: [t.pop(key) for key in list(t) if "audio" in key],
            "has no audio tower: its config.json has audio_config, but its weights have no audio_tower",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        Sounds.load(changed(tmp_path, change), jnp.float32)
