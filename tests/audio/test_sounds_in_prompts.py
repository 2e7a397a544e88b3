"""Sounds in prompts against transformers, in float32, from a saved checkpoint over the tower to the last token; images beside them."""

import base64
import contextlib
import copy
import functools
import io
import json
import re
import shutil

import adapters
import audio_oracle
import jax.numpy as jnp
import media_oracle
import numpy as np
import oracle
import pytest
import soundfile
import tiny
import torch
import vision_oracle
from media_oracle import after, logprobs, picture, same

import jaxspec
from jaxspec import SamplingParams
from jaxspec.audio import Sounds, sounds
from jaxspec.vision import Images

pytestmark = pytest.mark.usefixtures("quick_to_compile", "shared_programs", "masks_of_the_12b")
masks_of_the_12b = media_oracle.masks_of_the_12b
IMAGE, AUDIO = 5, 8  # tokens of the pocket tokenizer that nothing else uses
TOKENS = {"image_token_id": IMAGE, "boi_token_id": 6, "eoi_token_id": 7, "audio_token_id": AUDIO, "boa_token_id": 9, "eoa_token_index": 10}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn>' }}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ {'image': '<unused5>', 'audio': '<unused8>'}.get(p.type) or p.text }}{% endfor %}{% endif %}{{ '<turn|>' }}{% endfor %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
ROWS = 70  # of a sound that a call computes here
KINDS = ("plain", "unified")
# Of LLMs with a drafter and without one: those of the same settings share their programs.
DRAFTING = {"num_draft_tokens": 3, "max_len": 384, "max_slots": 2, "images": ROWS, "audio": True}
ALONE = {"max_len": 256, "max_slots": 1, "audio": True, "progress": False}


@functools.cache
def saved(kind):
    """A tiny random target with both towers and its folder, with the pocket tokenizer and a chat template that has images and sounds."""
    config = vision_oracle.config(kind) | {"audio_config": audio_oracle.config(kind)["audio_config"]} | TOKENS
    text = oracle.text_config("12B" if kind == "unified" else "E4B", vocab_size=tiny.VOCAB, vocab_size_per_layer_input=tiny.VOCAB)
    config["text_config"] = {k: v for k, v in text.items() if k in config["text_config"]}

    def drawn(model):
        oracle.randomise(model, 1)
        audio_oracle.drawn(model, 1)

    model, folder = media_oracle.saved(config, f"sounding-{kind}", drawn)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.POCKET / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model, folder


@contextlib.contextmanager
def small_rooms():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sounds, "ROOMS", (10, ROWS))
        yield


@small_rooms()
def opened(folder):
    return jaxspec.load(folder, "ngram", **DRAFTING, progress=False)


@functools.cache
def loaded(kind):
    return opened(saved(kind)[1])


@torch.no_grad()
def expected(kind, ids, heard, seen=()):
    """What transformers generates after token ids in which sounds and images have all their tokens: tokens and their log-probabilities."""
    model, folder = saved(kind)
    found = audio_oracle.extractor(kind)(list(heard), return_tensors="pt")
    more = {"input_features": found["input_features"], "input_features_mask": found["input_features_mask"]}
    if seen:
        made = Images.load(folder, jnp.float32, ROWS)
        patched = [made.preprocessing.patched(made.prepared(image).data) for image in seen]
        more["pixel_values"] = torch.tensor(np.stack([made.preprocessing.levels[patches] for patches, _ in patched]))
        more["image_position_ids"] = torch.tensor(np.stack([positions for _, positions in patched])).long()
    given = torch.tensor(ids)[None]
    return after(model, ids, **more, mm_token_type_ids=(given == IMAGE).long() + 3 * (given == AUDIO).long())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind):
    """Of a sound that one call computes, and of one that needs three."""
    llm, heard = loaded(kind), [audio_oracle.sound(1.3, 1), audio_oracle.sound(6.1, 2)]
    prompt = {"prompt": "def <unused8>read(<unused8>path):", "multi_modal_data": {"audio": heard}}
    answer = llm.generate(prompt, GREEDY)[0]
    assert answer.prompt_token_ids.count(AUDIO) == sum(map(llm._inserts.towers["audio"].count, heard)) > 2.5 * ROWS
    same(answer, expected(kind, answer.prompt_token_ids, heard))
    other = llm.generate({**prompt, "multi_modal_data": {"audio": [heard[0], audio_oracle.sound(6.1, 3)]}}, GREEDY)[0]
    assert abs(logprobs(other)[0] - logprobs(answer)[0]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_sounds_and_images_in_one_prompt(kind):
    """In the 12B the rows of an image see one another, and those of a sound do not."""
    llm, heard, seen = loaded(kind), [audio_oracle.sound(3.1, 1)], [picture(1, (30, 50)), picture(2, (64, 20))]
    prompt = {"prompt": "<unused5>def <unused8>read(<unused5>path):", "multi_modal_data": {"audio": heard, "image": seen}}
    answer = llm.generate(prompt, GREEDY)[0]
    same(answer, expected(kind, answer.prompt_token_ids, heard, seen))
    # With all tokens written out, as a processor of transformers does.
    whole = {"prompt_token_ids": answer.prompt_token_ids, "multi_modal_data": prompt["multi_modal_data"]}
    assert llm.generate(whole, GREEDY)[0].token_ids == answer.token_ids


def test_a_model_that_hears_alone():
    heard = audio_oracle.sound(2, 4)
    llm = jaxspec.load(saved("plain")[1], **ALONE)
    assert llm.settings.insert_rows == sounds.ROOMS == (256, 768) and llm.media == ("audio",)
    answer = llm.generate({"prompt": "a <unused8>", "multi_modal_data": {"audio": heard}}, GREEDY)[0]
    same(answer, expected("plain", answer.prompt_token_ids, [heard]))
    assert llm.text_settings["audio"] is True and "images" not in llm.text_settings
    with pytest.raises(ValueError, match="has 'image', expected 'audio' alone; to read images, load with images=True"):
        llm.generate({"prompt": "<unused5>", "multi_modal_data": {"image": picture(1, (9, 9))}})


def test_calls_have_room_for_short_and_long_sounds(monkeypatch):
    """Beside one another: of 15 rows, of 50, of 83 in two parts, and of two in one prompt."""
    monkeypatch.setattr(sounds, "ROOMS", (20, 60))
    llm = jaxspec.load(saved("unified")[1], "ngram", num_draft_tokens=2, max_len=160, max_slots=4, audio=True, progress=False)
    assert llm.settings.insert_rows == (20, 60)
    heard = [[audio_oracle.sound(seconds, i) for i, seconds in enumerate(some)] for some in ((0.6,), (2,), (3.3,), (1.9, 0.7), (0.5,))]
    answers = llm.generate([{"prompt": "a <unused8>" * len(some), "multi_modal_data": {"audio": some}} for some in heard], GREEDY)
    for answer, some in zip(answers, heard, strict=True):
        same(answer, expected("unified", answer.prompt_token_ids, some))


def test_a_conversation_with_sounds_in_every_form(tmp_path):
    llm, heard = loaded("plain"), audio_oracle.sound(2.9, 5)
    path = tmp_path / "sound.wav"
    soundfile.write(path, heard, 16_000, subtype="FLOAT")
    data = base64.b64encode(path.read_bytes()).decode()
    forms = [
        {"type": "audio", "audio": heard},
        {"type": "audio", "audio": (heard, 16_000)},
        {"type": "audio", "audio": {"array": heard, "sampling_rate": 16_000}},
        {"type": "audio", "audio": {"bytes": path.read_bytes(), "path": None}},
        {"type": "audio", "audio": torch.tensor(heard)},
        {"type": "audio", "audio": heard.tolist()},
        {"type": "audio", "path": str(path)},
        {"type": "audio", "base64": data},
        {"type": "audio_url", "audio_url": {"url": path.as_uri()}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{data}"}},
    ]
    answers = []
    for form in forms:
        messages = [{"role": "user", "content": [form, {"type": "text", "text": "What is it?"}]}]
        answers.append(llm.chat(messages, GREEDY))
    first = answers[0]
    same(first, expected("plain", first.prompt_token_ids, [heard]))
    assert all(answer.token_ids == first.token_ids for answer in answers)
    assert all(answer.num_cached_tokens > 60 for answer in answers[1:])
    more = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
    later = llm.chat(more, GREEDY)
    assert later.num_cached_tokens >= len(first.prompt_token_ids) - 1
    same(later, expected("plain", later.prompt_token_ids, [heard]))
    assert "".join(chunk.text for chunk in llm.stream_chat(more, GREEDY)) == later.text


def test_what_cannot_be_read_is_refused_at_the_door(tmp_path):
    llm, heard = loaded("plain"), audio_oracle.sound(1, 1)
    for part, words in (
        ({"type": "audio"}, "message 0 holds content of type 'audio' without a sound; expected it as 'audio' or 'url' or 'path'"),
        ({"type": "video", "video": "x"}, "message 0 holds content of type 'video'; texts and images and sounds can be read"),
        ({"type": "audio", "path": str(tmp_path / "none.wav")}, "none.wav.* cannot be read as a sound"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
    with pytest.raises(ValueError, match="prompt 0: 1 sound and 0 audio tokens .<unused8>, 8. are given; expected one for each sound"):
        llm.generate({"prompt": "<audio>?", "multi_modal_data": {"audio": heard}})
    with pytest.raises(ValueError, match=r"prompt 0: an array \[488000\] of float32 lasts 30.5000 seconds; the tower hears 30 at most"):
        llm.generate({"prompt": "<unused8>", "multi_modal_data": {"audio": audio_oracle.sound(30.5)}})
    with pytest.raises(ValueError, match="prompt 0 has images, sounds or videos, of which prompt_logprobs"):
        llm.generate({"prompt": "<unused8>", "multi_modal_data": {"audio": heard}}, SamplingParams(prompt_logprobs=1))
    with pytest.raises(TypeError, match="audio is 1, expected True or False"):
        jaxspec.load(saved("plain")[1], audio=1)
    with pytest.raises(ValueError, match="has no audio tower: its config.json has no audio_config"):
        jaxspec.load("pocket", audio=True)
    part = {"type": "audio", "audio": heard}
    with pytest.raises(ValueError, match="message 0 holds content of type 'audio'; only text can be read; .*audio=True"):
        jaxspec.load(saved("plain")[1], max_len=64, progress=False).chat([{"role": "user", "content": [part]}])


def test_a_damaged_sound_fails_alone(tmp_path):
    """Its beginning is right, so that it is known for what it is only when it is decoded."""
    llm, path = loaded("plain"), tmp_path / "sound.flac"
    soundfile.write(path, audio_oracle.sound(2, 1), 16_000)
    path.write_bytes(path.read_bytes()[:9000])
    asked = [{"prompt": "<unused8>", "multi_modal_data": {"audio": one}} for one in (str(path), audio_oracle.sound(1, 1))]
    damaged, whole = llm.generate(asked, GREEDY)
    assert damaged.finish_reason == "error" and "sound.flac' cannot be read as a sound" in damaged.error
    assert whole.error is None and len(whole.token_ids) == 8


@pytest.mark.slow  # tests/vision has the same of images
def test_a_batch_of_messages_with_sounds(tmp_path):
    from jaxspec.cli import main

    soundfile.write(tmp_path / "sound.wav", audio_oracle.sound(1.7, 5), 16_000, subtype="FLOAT")
    content = [{"type": "audio_url", "audio_url": {"url": str(tmp_path / "sound.wav")}}, {"type": "text", "text": "What is it?"}]
    lines = [{"messages": [{"role": "user", "content": content}]}, {"messages": [{"role": "user", "content": content[1:]}]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--target", str(saved("plain")[1]), "--audio", "--max-len", "256", "--max-slots", "1"]
    options += ["--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--token-ids"]
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options]) == 0
    found = {line["id"]: line["token_ids"] for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert found == {i: loaded("plain").chat(line["messages"], GREEDY).token_ids for i, line in enumerate(lines, 1)}
    (tmp_path / "in.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "text.jsonl"), *options[:2], "--max-len", "64"]) == 1
    assert "load with audio=True, or with --audio" in json.loads((tmp_path / "text.errors.jsonl").read_text())["error"]


def test_a_conversation_on_the_command_line(tmp_path, monkeypatch, capsys):
    """The first message is about the files, and they stay in the conversation."""
    from jaxspec.cli import main

    files = [{"type": "audio", "path": str(tmp_path / f"{i}.wav")} for i in range(2)]
    for i, file in enumerate(files):
        soundfile.write(file["path"], audio_oracle.sound(1.7, i), 16_000, subtype="FLOAT")
    command = ["chat", "--target", str(saved("plain")[1]), "--max-len", "256", "--max-tokens", "4", "--temperature", "0", "--audio"]
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\nAnd now?\n"))
    assert main([*command, files[0]["path"], "--audio", files[1]["path"]]) == 0
    said, params = capsys.readouterr().out, SamplingParams(temperature=0, max_tokens=4)
    messages = [{"role": "user", "content": [*files, {"type": "text", "text": "What is it?"}]}]
    first = loaded("plain").chat(messages, params).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    assert said == f"{first}\n{loaded('plain').chat(messages, params).text}\n"
    assert main([*command, str(tmp_path / "none.wav")]) == 2
    assert "none.wav' cannot be read as a sound" in capsys.readouterr().err


def test_rows_of_a_generator_with_sounds(tmp_path):
    heard = audio_oracle.sound(1.7, 5)
    soundfile.write(tmp_path / "sound.wav", heard, 16_000, subtype="FLOAT")
    forms = str(tmp_path / "sound.wav"), heard, {"array": heard, "sampling_rate": 16_000}, (tmp_path / "sound.wav").read_bytes()
    rows = [{"id": i, "messages": [{"role": "user", "content": [{"type": "audio", "audio": form}]}]} for i, form in enumerate(forms)]
    columns, params = {"id_column": "id", "messages_column": "messages"}, SamplingParams(temperature=0, max_tokens=4)
    with small_rooms(), jaxspec.Generator(saved("plain")[1], "ngram", sampling_params=params, **columns, **DRAFTING) as generator:
        named = generator.rows(rows)
    assert [(row["text"], row["error"]) for row in named] == [(loaded("plain").chat(rows[0]["messages"], params).text, None)] * 4


def test_a_script_for_vllm_with_sounds():
    from jaxspec.vllm import LLM
    from jaxspec.vllm import SamplingParams as Params

    heard, params = audio_oracle.sound(1.7, 5), Params(temperature=0, max_tokens=8, ignore_eos=True)
    llm = LLM(str(saved("plain")[1]), max_model_len=256, max_num_seqs=1, limit_mm_per_prompt={"audio": 1})
    (answer,) = llm.generate({"prompt": "a <unused8>", "multi_modal_data": {"audio": (heard, 16_000)}}, params)
    assert answer.outputs[0].token_ids == expected("plain", answer.prompt_token_ids, [heard])[0]
    with pytest.raises(ValueError, match="prompt 0 has 2 sounds; expected at most 1"):
        llm.generate({"prompt": "a <unused8> <unused8>", "multi_modal_data": {"audio": [(heard, 16_000)] * 2}}, params)
    with pytest.raises(ValueError, match=re.escape("to read images, load with limit_mm_per_prompt={'image': 1}")):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}]}])


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_the_tower_is_merged(kind, tmp_path):
    """As PEFT merges it, and in a conversion."""
    heard, modules = audio_oracle.sound(2, 4), r".*audio_tower.*\.linear|.*output_proj|.*embed_audio.embedding_projection"
    made = adapters.adapted(copy.deepcopy(saved(kind)[0]), tmp_path, target_modules=modules, r=2, lora_alpha=16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.POCKET / name, made.target / name)
    before, wanted = (np.asarray(Sounds.load(folder, jnp.float32).rows(heard)) for folder in (made.target, made.merged))
    assert np.abs(before - wanted).max() > 0.1 * np.abs(wanted).max()
    llm = jaxspec.load(made.target, adapter=made.adapter, **ALONE)
    np.testing.assert_allclose(llm._inserts.towers["audio"].rows(heard), wanted, atol=1e-4, rtol=1e-4)
    converted = jaxspec.convert(made.target, tmp_path / "converted", adapter=made.adapter, progress=False)
    np.testing.assert_allclose(Sounds.load(converted, jnp.float32).rows(heard), wanted, atol=1e-4, rtol=1e-4)
    hint = "if it changes the image tower, load with images=True, and if it changes the audio tower, load with audio=True"
    with pytest.raises(ValueError, match=f"changes none of the target's text weights; {hint}"):
        jaxspec.load(made.target, adapter=made.adapter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_checkpoint_hears(kind, tmp_path):
    folder = jaxspec.convert(saved(kind)[1], tmp_path / "converted", progress=False)
    heard, image = audio_oracle.sound(2, 4), picture(1, (30, 50))
    llm = opened(folder)
    prompt = {"prompt": "a <unused8> <unused5>", "multi_modal_data": {"audio": heard, "image": image}}
    answer = llm.generate(prompt, GREEDY)[0]
    same(answer, expected(kind, answer.prompt_token_ids, [heard], [image]))
