"""Videos in prompts against transformers, in float32, from a saved checkpoint over frames and times to the last token."""

import dataclasses
import functools
import json
import re
import shutil
import struct
import types
from pathlib import Path

import av
import jax.numpy as jnp
import media_oracle
import numpy as np
import pytest
import torch
from media_oracle import after, logprobs, picture, same
from transformers.video_utils import VideoMetadata
from vision_oracle import IMAGE, VIDEO
from vision_oracle import in_prompts as saved

import jaxspec
from jaxspec import SamplingParams
from jaxspec.vision import Images, Preprocessing, Videos

pytestmark = pytest.mark.usefixtures("quick_to_compile", "masks_of_the_12b")
masks_of_the_12b = media_oracle.masks_of_the_12b
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
FRAMES = 3
SIZES = {"num_draft_tokens": 3, "max_len": 512, "max_slots": 2, "images": 140, "videos": FRAMES, "progress": False}


@functools.cache
def loaded(kind):
    return jaxspec.load(saved(kind)[1], "ngram", **SIZES)


def clip(seed, frames, size=(24, 36)):
    return np.random.default_rng(seed).integers(0, 256, (frames, *size, 3), np.uint8)


@torch.no_grad()
def expected(kind, ids, frames, images=()):
    """What transformers generates after token ids in which all tokens of media are. frames: of all videos."""
    model, folder = saved(kind)
    given = {}
    for found, names in ((frames, ("pixel_values_videos", "video_position_ids")), (images, ("pixel_values", "image_position_ids"))):
        if len(found):
            made = Images.load(folder, jnp.float32, 140 if found is images else 70)
            both = [made.preprocessing.patched(made.prepared(image).data) for image in found]
            given[names[0]] = torch.tensor(np.stack([made.preprocessing.levels[patches] for patches, _ in both]))
            given[names[1]] = torch.tensor(np.stack([positions for _, positions in both])).long()
    tokens = torch.tensor(ids)[None]
    kinds = (tokens == IMAGE).long() + 2 * (tokens == VIDEO).long()
    return after(model, ids, num_frames_per_video=torch.tensor([len(frames)]), mm_token_type_ids=kinds, **given)


def written(llm, ids):
    """A prompt's text, with each run of tokens of a medium as one."""
    return re.sub(r"(<unused[58]>)\1*", r"\1", llm.tokenizer.decode(ids, special=True))


@pytest.mark.parametrize("kind", ["plain", pytest.param("unified", marks=pytest.mark.slow)])
def test_tokens_are_those_of_transformers(kind):
    llm, video, image = loaded(kind), clip(1, 10), picture(2, (30, 20))
    metadata = {"fps": 0.1, "total_num_frames": 10}
    prompt = {"prompt": "def <unused5>read(<unused8>path):", "multi_modal_data": {"video": (video, metadata), "image": image}}
    answer = llm.generate(prompt, GREEDY)[0]
    ids, chosen = answer.prompt_token_ids, video[[0, 3, 6]]
    frames = [f"{time} <unused6>{'<unused8>' * (ids.count(VIDEO) // 3)}<unused7>" for time in ("00:00", "00:30", "01:00")]
    text = re.sub("<unused5>", f"<unused6>{'<unused5>' * ids.count(IMAGE)}<unused7>", "def <unused5>read(")
    assert ids == llm.tokenizer.encode(f"{text}{' '.join(frames)}path):") and ids.count(VIDEO) > 100
    same(answer, expected(kind, ids, chosen, [image]))
    again = llm.generate({"prompt_token_ids": ids, "multi_modal_data": prompt["multi_modal_data"]}, GREEDY)[0]  # with all tokens written
    assert again.prompt_token_ids == ids and again.token_ids == answer.token_ids
    other = llm.generate({**prompt, "multi_modal_data": {"video": (video[::-1], metadata), "image": image}}, GREEDY)[0]
    assert np.abs(np.subtract(logprobs(other), logprobs(answer))).max() > 4e-3  # twice what `same` lets pass


def count(videos, source):
    """How many rows a video has."""
    return sum(run.count for run in videos.runs(source, lambda text: []))


def encoded(path, frames, rate=5, codec="mpeg4", pixels="yuv420p", options=None):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """A file of 40 frames in 8 seconds, each of one grey; and those that are read, as FFmpeg decodes them."""
    frames = np.repeat(np.arange(40, dtype=np.uint8) * 6, 32 * 48 * 3).reshape(40, 32, 48, 3)
    path = encoded(tmp_path_factory.mktemp("films") / "film.mp4", frames)
    with av.open(str(path)) as container:
        decoded = [frame.to_image() for frame in container.decode(video=0)]
    return path, [decoded[i] for i in (0, 13, 26)]


def test_a_conversation_with_a_video_in_every_form(film):
    llm, (path, frames) = loaded("plain"), film
    import base64

    data = base64.b64encode(path.read_bytes()).decode()
    forms = [
        {"type": "video", "video": str(path)},
        {"type": "video", "path": str(path)},
        {"type": "video", "base64": data},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
        {"type": "video", "video": path.read_bytes()},
        {"type": "video", "video": (frames, {"fps": 5, "frames_indices": [0, 13, 26]})},
        {"type": "video", "video": (frames, VideoMetadata(total_num_frames=40, fps=5, frames_indices=[0, 13, 26]))},
    ]
    answers = []
    for form in forms:
        messages = [{"role": "user", "content": [form, {"type": "text", "text": "What is it?"}]}]
        answers.append(llm.chat(messages, GREEDY))
    first = answers[0]
    ids = first.prompt_token_ids
    shown = [f"{time} <unused6><unused8><unused7>" for time in ("00:00", "00:02", "00:05")]
    assert written(llm, ids) == f"<bos><|turn>{' '.join(shown)}What is it?<turn|>"
    same(first, expected("plain", ids, frames))
    assert all(answer.token_ids == first.token_ids for answer in answers)
    assert all(answer.num_cached_tokens > 100 for answer in answers[1:])
    more = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
    later = llm.chat(more, GREEDY)
    assert later.num_cached_tokens >= len(ids) - 1
    assert "".join(chunk.text for chunk in llm.stream_chat(more, GREEDY)) == later.text


@pytest.mark.parametrize("kind", ["plain", "unified"])
def test_frames_are_read_together(kind, monkeypatch):
    """Two at a time, which have as many patches as an image; those of equal frames once."""
    videos, run, calls = loaded(kind)._inserts.towers["video"], Images.computed, []
    monkeypatch.setattr(Images, "computed", lambda self, several: calls.append(len(several)) or run(self, several))
    frames = [frame for seed in (1, 2, 3, 2, 5) for frame in videos.decoded(clip(seed, 1))]
    videos = videos.with_tower(videos.images.tower)
    found = [np.asarray(videos.rows(frame, frames[i + 1 :])) for i, frame in enumerate(frames)]
    assert calls == [2, 2]
    alone = Images(videos.images.config, videos.images.preprocessing, videos.images.tower)
    for frame, rows in zip(frames, found, strict=True):
        np.testing.assert_allclose(rows, alone.rows(frame), atol=1e-4, rtol=1e-4)
    assert calls == [2, 2, 1, 1, 1, 1] and np.abs(found[0] - found[1]).max() > 0.1


def test_frames_of_other_libraries():
    """Arrays of JAX and PyTorch, with colours as their last or second axis, and what datasets have: a decoder of torchcodec."""
    videos, frames = loaded("plain")._inserts.towers["video"], clip(4, 10)
    wanted = [frame.digest for frame in videos.decoded((frames, {"fps": 2}))]
    forms = jnp.asarray(frames), torch.from_numpy(frames), torch.from_numpy(frames).permute(0, 3, 1, 2), frames.transpose(0, 3, 1, 2)
    for form in forms:
        source = videos.source((form, {"fps": 2}))
        assert source.times == [0, 1.5, 3] and [frame.digest for frame in videos.decoded(source)] == wanted
    metadata = types.SimpleNamespace(num_frames=10, average_fps=2.0)
    decoder = types.SimpleNamespace(
        metadata=metadata, get_frames_at=lambda indices: types.SimpleNamespace(data=torch.from_numpy(frames[indices]).permute(0, 3, 1, 2))
    )
    source = videos.source(decoder)
    assert source.times == [0, 1.5, 3] and [frame.digest for frame in videos.decoded(source)] == wanted
    metadata.num_frames = None
    with pytest.raises(ValueError, match="a types.SimpleNamespace cannot be read as a video: it does not say how many"):
        videos.source(decoder)


def test_a_list_is_of_frames_or_of_videos(film):
    llm, (path, _) = loaded("plain"), film
    frames = [picture(seed, (20, 30)) for seed in range(5)]
    one = {"prompt": "<unused8>", "multi_modal_data": {"video": frames}}
    counts = [len(llm.generate(one, GREEDY)[0].prompt_token_ids)]
    one["multi_modal_data"] = {"video": [np.stack([np.asarray(frame) for frame in frames])]}
    counts.append(len(llm.generate(one, GREEDY)[0].prompt_token_ids))
    assert counts[0] == counts[1]
    both = {"prompt": "<unused8> <unused8>", "multi_modal_data": {"video": [frames[:1], str(path)]}}
    shown = [f"{time} <unused6><unused8><unused7>" for time in ("00:00", "00:00", "00:02", "00:05")]
    assert written(llm, llm.generate(both, GREEDY)[0].prompt_token_ids) == f"<bos>{' '.join(shown)}"


@pytest.mark.parametrize(("name", "codec"), [("film.mkv", "mpeg4"), ("film.webm", "libvpx"), ("film.avi", "mjpeg"), ("film.gif", "gif")])
def test_files_of_other_kinds(name, codec, tmp_path):
    """Some do not say how many frames they have."""
    frames = np.repeat(np.arange(7, dtype=np.uint8) * 30, 32 * 48 * 3).reshape(7, 32, 48, 3)
    if codec == "gif":
        made = [media_oracle.Image.fromarray(frame) for frame in frames]
        made[0].save(tmp_path / name, save_all=True, append_images=made[1:], duration=200)
    else:
        encoded(tmp_path / name, frames, codec=codec, pixels="yuvj420p" if codec == "mjpeg" else "yuv420p")
    videos = loaded("plain")._inserts.towers["video"]
    source = videos.source(tmp_path / name)
    assert [round(time, 3) for time in source.times] == [0, 0.4, 0.8]
    means = [frame.data.mean() for frame in videos.decoded(source)]
    np.testing.assert_allclose(means, [0, 60, 120], atol=4)


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.jpg"])
def test_a_picture_is_a_video_of_one_frame(name, tmp_path):
    picture(1, (32, 48)).save(tmp_path / name)
    videos = loaded("plain")._inserts.towers["video"]
    source = videos.source(tmp_path / name)
    assert source.times == [0] and [frame.data.shape for frame in videos.decoded(source)] == [(72, 120, 3)]


@pytest.mark.parametrize(("name", "begin", "earlier"), [("cut.mp4", 0, 25), ("cut.ts", 10, 0)])
def test_a_film_that_was_cut_and_not_encoded_anew(name, begin, earlier, tmp_path):
    """Its file has frames before the first that is shown: an edit list leaves out 25, or it begins in the midst of a group of 20."""
    videos, shown = loaded("plain")._inserts.towers["video"], 25 if earlier else 30
    frames = np.repeat(np.arange(50, dtype=np.uint8) * 5, 32 * 48 * 3).reshape(50, 32, 48, 3)
    options = {"g": "20", "keyint_min": "20", "bf": "0", "sc_threshold": "0"}
    whole = encoded(tmp_path / "whole.mp4", frames, codec="libx264", options=options)
    with av.open(str(whole)) as read, av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream_from_template(read.streams.video[0])
        for packet in list(read.demux(video=0))[begin:-1]:
            packet.pts, packet.dts = (time - int(earlier / 5 / packet.time_base) for time in (packet.pts, packet.dts))
            packet.stream = stream
            container.mux(packet)
    source = videos.source(tmp_path / name)
    assert list(source.places) == [i * shown // FRAMES for i in range(FRAMES)]
    means = [frame.data.mean() for frame in videos.decoded(source)]
    np.testing.assert_allclose(means, [5 * (50 - shown + place) for place in source.places], atol=4)


def test_frames_that_change_their_size(tmp_path):
    """As in a recorded call, whose picture gets larger. All have as many rows as the prompt has tokens for them."""
    videos = loaded("plain")._inserts.towers["video"]
    parts = [np.full((3, *size, 3), grey, np.uint8) for size, grey in (((32, 48), 40), ((64, 64), 200))]
    files = [encoded(tmp_path / f"{i}.mjpeg", part, codec="mjpeg", pixels="yuvj420p") for i, part in enumerate(parts)]
    source = videos.source(b"".join(file.read_bytes() for file in files))
    decoded = [frame.data for frame in videos.decoded(source)]
    assert [frame.shape for frame in decoded] == [(72, 120, 3)] * 3 and count(videos, source) == 3 * 72 * 120 // 12**2
    np.testing.assert_allclose([frame.mean() for frame in decoded], [40, 40, 200], atol=4)


@pytest.mark.parametrize(("matrix", "shape"), [((0, 1, -1, 0), (120, 72, 3)), ((0.7071, 0.7071, -0.7071, 0.7071), (72, 120, 3))])
def test_a_video_that_is_turned(matrix, shape, tmp_path):
    """As telephones write them: the file says that its frames are to be turned by a quarter to the right, so that the white on the left is
    at the top. By an eighth, they stay as they are."""
    frames = np.zeros((3, 32, 48, 3), np.uint8)
    frames[:, :, :24] = 255
    videos, data = loaded("plain")._inserts.towers["video"], bytearray(encoded(tmp_path / "film.mp4", frames).read_bytes())
    a, b, c, d = (round(number * 65536) for number in matrix)
    at = data.index(b"tkhd") + 44
    data[at : at + 20] = struct.pack(">5i", a, b, 0, c, d)
    source = videos.source(data)
    decoded = [frame.data for frame in videos.decoded(source)]
    assert [frame.shape for frame in decoded] == [shape] * 3 and count(videos, source) == 3 * 60
    assert all((frame[:50] if shape[0] > 100 else frame[:, :50]).mean() > 200 for frame in decoded)


def test_a_name_with_a_colon_is_that_of_a_file(film, tmp_path, monkeypatch):
    videos, (path, _) = loaded("plain")._inserts.towers["video"], film
    monkeypatch.chdir(tmp_path)
    for name in ("2026-11-30T12:30.mp4", "tcp:hall.mp4"):
        shutil.copy(path, name)
        assert videos.source(name).times == videos.source(path).times
    for name in ("tcp://127.0.0.1:9/film.mp4", "concat:2026-11-30T12:30.mp4"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be read as a video: No such file"):
            videos.source(name)


def test_what_cannot_be_read_is_refused_at_the_door(film, tmp_path):
    llm, (path, _) = loaded("plain"), film
    (tmp_path / "text.mp4").write_text("no video")
    silent = tmp_path / "sound.wav"
    with av.open(str(silent), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=16000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 160), np.int16), format="s16", layout="mono")
        sound.sample_rate = 16000
        container.mux(stream.encode(sound))
    unknown, long = path.read_bytes().replace(b"mp4v", b"zzzz").replace(b"esds", b"zzzz"), bytearray(path.read_bytes())
    at = long.index(b"stts") + 8  # how many entries of times it has
    long[at : at + 4] = b"\x7f\xff\xff\xf0"
    for video, error, words in (
        (str(tmp_path / "none.mp4"), ValueError, "prompt 0: '.*none.mp4' cannot be read as a video: No such file"),
        (tmp_path / "text.mp4", ValueError, "cannot be read as a video: Invalid data"),
        (silent, ValueError, "it has no video stream"),
        (unknown, ValueError, "bytes cannot be read as a video: FFmpeg knows no decoder for it"),
        (long, ValueError, "bytes cannot be read as a video: Cannot allocate memory"),
        (7, TypeError, "a video is of type int; expected the path"),
        (clip(1, 4).astype(np.float32), ValueError, r"an array \[4, 24, 36, 3\] of float32 cannot be read as a video: it is not"),
        (clip(1, 0), ValueError, "it has no frames"),
        ((clip(1, 4), {"rate": 3}), ValueError, "the metadata of a video have 'rate'; expected some of 'fps'"),
        ((clip(1, 4), {"fps": 0}), ValueError, "fps is 0"),
        ((clip(1, 4), {"fps": 1e-320}), ValueError, "fps is 1e-320, expected a finite number of at least 1e-06"),
        ((clip(1, 4), {"frames_indices": [1, 2]}), ValueError, "it has 4 frames and 2 frames_indices"),
        ((str(path), {"fps": 3}), ValueError, "a file says itself at which rate"),
    ):
        with pytest.raises(error, match=words):
            llm.generate({"prompt": "<unused8>", "multi_modal_data": {"video": video}}, GREEDY)
    with pytest.raises(ValueError, match="2 videos and 1 video tokens .<unused8>, 8. are given; expected one for each video"):
        llm.generate({"prompt": "<unused8>", "multi_modal_data": {"video": [path, path]}}, GREEDY)
    shown = [{"role": "user", "content": [{"type": "video", "video": str(path)}]}]
    with pytest.raises(ValueError, match="message 0 holds content of type 'video'; only text can be read; .*videos=True"):
        jaxspec.load(saved("plain")[1], max_len=64, progress=False).chat(shown)
    for videos, error, words in ((0, ValueError, "videos is 0|expected"), ("yes", TypeError, "videos is 'yes' of type str")):
        if videos:
            with pytest.raises(error, match=words):
                jaxspec.load(saved("plain")[1], videos=videos)
    with pytest.raises(ValueError, match="has no image tower"):
        jaxspec.load("pocket", videos=True)


def test_a_damaged_file_fails_alone(film, tmp_path):
    llm, (path, _) = loaded("plain"), film
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 8
    data[start + 40 : start + (len(data) - start) // 2] = b"\0" * len(data[start + 40 : start + (len(data) - start) // 2])
    (tmp_path / "bad.mp4").write_bytes(data)
    prompts = [{"prompt": "<unused8>", "multi_modal_data": {"video": each}} for each in (path, tmp_path / "bad.mp4")]
    good, bad = llm.generate(prompts, GREEDY)
    assert good.error is None and len(good.token_ids) == 8
    assert bad.error is not None and re.search("bad.mp4' cannot be read as a video", bad.error)


def test_what_a_checkpoint_says_of_videos(tmp_path):
    folder = shutil.copytree(saved("plain")[1], tmp_path / "model")
    images = Images.read(folder, jnp.float32, 70)
    tower = dataclasses.replace(images.config.tower, position_embedding_size=10_000)
    images = Images(dataclasses.replace(images.config, tower=tower), Preprocessing(4, 3, 280), images.tower)

    def says(settings, name="processor_config.json"):
        for each in ("processor_config.json", "video_preprocessor_config.json"):
            (folder / each).unlink(missing_ok=True)
        (folder / name).write_text(json.dumps({"video_processor": settings} if name.startswith("proc") else settings))
        return Videos.read(folder, images)

    for name in ("processor_config.json", "video_preprocessor_config.json"):
        found = says({"num_frames": 9, "max_soft_tokens": 140}, name)
        assert (found.frames, found.images.max_soft_tokens, found.token_id) == (9, 140, VIDEO)
    found = says({})
    assert (found.frames, found.images.max_soft_tokens) == (32, 70)
    for settings, words in (
        ({"fps": 2}, "processor_config.json: the video_processor has fps"),
        ({"max_soft_tokens": 560}, "a frame of a video has up to 560 tokens, and an image 280; .* load with images=560"),
        ({"num_frames": 0}, "videos is 0"),
        ({"patch_size": 5}, "patch_size is 5"),
    ):
        with pytest.raises(ValueError, match=words):
            says(settings)
    converted = jaxspec.convert(saved("plain")[1], tmp_path / "converted", progress=False)
    prompt = {"prompt": "def <unused8>", "multi_modal_data": {"video": clip(1, 3)}}
    with jaxspec.load(converted, "ngram", **SIZES) as llm:
        assert llm.generate(prompt, GREEDY)[0].token_ids == loaded("plain").generate(prompt, GREEDY)[0].token_ids


@pytest.mark.slow  # test_images_in_prompts.py has the same of images
def test_a_batch_and_a_script_for_vllm(film, tmp_path):
    from jaxspec import vllm
    from jaxspec.cli import main
    from jaxspec.vllm import arguments

    path = str(film[0])
    content = [{"type": "video_url", "video_url": {"url": path}}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    wanted = loaded("plain").chat(messages, GREEDY).token_ids
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    options = ["--target", str(saved("plain")[1]), "--images", "70", "--videos", str(FRAMES), "--max-len", "512", "--max-slots", "2"]
    options += ["--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--token-ids"]
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options]) == 0
    assert json.loads(Path(tmp_path / "out.jsonl").read_text())["token_ids"] == wanted
    sizes = {"max_model_len": 512, "max_num_seqs": 2, "mm_processor_kwargs": {"max_soft_tokens": 70}}
    frames_read = {"video": {"num_frames": FRAMES}}
    llm = vllm.LLM(str(saved("plain")[1]), limit_mm_per_prompt={"video": 1, "image": 1}, media_io_kwargs=frames_read, **sizes)
    frames = {"prompt": "<unused8>", "multi_modal_data": {"video": (clip(3, 7), {"fps": 1.0, "do_sample_frames": False})}}
    params = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (found,) = llm.generate(frames, params, use_tqdm=False)
    assert found.outputs[0].token_ids == loaded("plain").generate(frames, GREEDY)[0].token_ids
    several = {"prompt": "<unused8> <unused8>", "multi_modal_data": {"video": [clip(3, 7), clip(4, 7)]}}
    with pytest.raises(ValueError, match="prompt 0 has 2 videos; expected at most 1"):
        llm.generate(several, params)
    media = arguments.media_of({"video": 1}, {"num_frames": 5}, {"video": {"num_frames": 9}})
    assert media["videos"] == 5 and arguments.media_of({"video": 1}, None, None)["videos"] is True
    for reading, words in (
        ({"video": {"fps": 2}}, r"media_io_kwargs\['video'\]\['fps'\] cannot be served; expected {'video': {'num_frames': 32}}"),
        ({"image": {"rgba_background_color": [0, 0, 0]}}, r"media_io_kwargs\['image'\] cannot be served"),
        ({"video": {"num_frames": -1}}, r"media_io_kwargs\['video'\]\['num_frames'\] is -1"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm.LLM(str(saved("plain")[1]), media_io_kwargs=reading)
    folder = shutil.copytree(saved("plain")[1], tmp_path / "model")
    (folder / "processor_config.json").write_text(json.dumps({"video_processor": {"max_soft_tokens": 140}}))
    with pytest.raises(ValueError, match=re.escape("load with mm_processor_kwargs={'max_soft_tokens': 140}")):
        vllm.LLM(str(folder), limit_mm_per_prompt={"video": 1, "image": 1}, **sizes)
    with pytest.raises(ValueError, match="video_pruning_rate is 0.5"):
        vllm.LLM(str(saved("plain")[1]), video_pruning_rate=0.5)
