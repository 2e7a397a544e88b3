"""Images in prompts against transformers, in float32, from a saved checkpoint over the tower to the last token."""

import copy
import functools
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import adapters
import huggingface_hub
import jax.numpy as jnp
import media_oracle
import numpy as np
import pytest
import tiny
import torch
from media_oracle import after, logprobs, picture, same
from vision_oracle import IMAGE
from vision_oracle import in_prompts as saved

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine import fetches
from jaxspec.vision import Images

pytestmark = pytest.mark.usefixtures("quick_to_compile", "shared_programs", "masks_of_the_12b")
masks_of_the_12b = media_oracle.masks_of_the_12b
ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


@functools.cache
def loaded(kind):
    return jaxspec.load(saved(kind)[1], "ngram", num_draft_tokens=3, max_len=256, max_slots=2, images=70, progress=False)


@torch.no_grad()
def expected(kind, ids, images):
    """What transformers generates after token ids in which images have all their tokens: new tokens and their log-probabilities."""
    model, folder = saved(kind)
    made = Images.load(folder, jnp.float32, 70)
    found = [made.preprocessing.patched(made.prepared(image).data) for image in images]
    pixels = torch.tensor(np.stack([made.preprocessing.levels[patches] for patches, _ in found]))
    places = torch.tensor(np.stack([positions for _, positions in found]))
    kinds = (torch.tensor(ids)[None] == IMAGE).long()
    return after(model, ids, pixel_values=pixels, image_position_ids=places.long(), mm_token_type_ids=kinds)


@pytest.mark.parametrize("kind", ["plain", pytest.param("unified", marks=pytest.mark.slow)])
def test_tokens_are_those_of_transformers(kind):
    llm, images = loaded(kind), [picture(1, (30, 50)), picture(2, (64, 20))]
    prompt = {"prompt": "def <unused5>read(<unused5>path):", "multi_modal_data": {"image": images}}
    answer = llm.generate(prompt, GREEDY)[0]
    assert answer.prompt_token_ids.count(IMAGE) == sum(map(llm._inserts.towers["image"].count, images)) > 60
    same(answer, expected(kind, answer.prompt_token_ids, images))
    other = llm.generate({**prompt, "multi_modal_data": {"image": images[::-1]}}, GREEDY)[0]
    assert abs(logprobs(other)[0] - logprobs(answer)[0]) > 1e-2
    same(other, expected(kind, other.prompt_token_ids, images[::-1]))


def test_a_conversation_with_images_in_every_form(tmp_path):
    llm, image = loaded("plain"), picture(3, (40, 40))
    path = tmp_path / "image.png"
    image.save(path)
    import base64

    data = base64.b64encode(path.read_bytes()).decode()
    forms = [
        {"type": "image", "image": image},
        {"type": "image", "path": str(path)},
        {"type": "image", "base64": data},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image_pil", "image_pil": image},
    ]
    answers = []
    for form in forms:
        messages = [{"role": "user", "content": [form, {"type": "text", "text": "What is it?"}]}]
        answers.append(llm.chat(messages, GREEDY))
    first = answers[0]
    same(first, expected("plain", first.prompt_token_ids, [image]))
    assert all(answer.token_ids == first.token_ids for answer in answers)
    assert all(answer.num_cached_tokens > 40 for answer in answers[1:])
    # The next turn goes on from what was computed.
    more = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
    later = llm.chat(more, GREEDY)
    assert later.num_cached_tokens >= len(first.prompt_token_ids) - 1
    same(later, expected("plain", later.prompt_token_ids, [image]))
    assert "".join(chunk.text for chunk in llm.stream_chat(more, GREEDY)) == later.text


def test_what_cannot_be_read_is_refused_at_the_door(tmp_path):
    llm = loaded("plain")
    ask = {"type": "text", "text": "?"}
    for part, words in (
        ({"type": "image"}, "message 0 holds content of type 'image' without an image; expected it as 'image' or 'url' or 'path'"),
        ({"type": "audio", "audio": "x"}, "message 0 holds content of type 'audio'; texts and images can be read"),
        ({"type": "image", "path": str(tmp_path / "none.png")}, "none.png.* cannot be read as an image"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.chat([{"role": "user", "content": [part, ask]}])
    with pytest.raises(ValueError, match="prompt 0: 1 image and 0 image tokens .<unused5>, 5. are given; expected one for each image"):
        llm.generate({"prompt": "<image>?", "multi_modal_data": {"image": picture(3, (40, 40))}})
    for images, error, words in (
        (100, ValueError, "max_soft_tokens is 100; expected one of 70, 140"),
        ("yes", TypeError, "images is 'yes' of type str, expected an integer"),
    ):
        with pytest.raises(error, match=words):
            jaxspec.load(saved("plain")[1], images=images)
    with pytest.raises(ValueError, match="has no image tower"):
        jaxspec.load("pocket", images=True)
    shown = [{"role": "user", "content": [{"type": "image", "image": picture(3, (40, 40))}]}]
    with pytest.raises(ValueError, match="message 0 holds content of type 'image'; only text can be read; .*images=True"):
        jaxspec.load(saved("plain")[1], max_len=64, progress=False).chat(shown)
    with jaxspec.load(saved("plain")[1], max_len=96, images=70, progress=False) as closed:
        pass
    for ask_again in (closed.chat, closed.stream_chat):
        with pytest.raises(RuntimeError, match="is closed; load it again"):
            ask_again(shown)


def test_what_a_model_of_the_hub_says_of_images_is_downloaded(tmp_path, monkeypatch):
    """With the configs, since memory is planned before weights are there."""

    def download(name, *, allow_patterns, **_):
        for path in saved("plain")[1].iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, tmp_path)
        if any(pattern in ("processor_config.json", "*.json") for pattern in allow_patterns):
            (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": 70}}))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert jaxspec.load("someone/model", images=True, max_len=64, progress=False).settings.insert_rows == (70,)


def test_a_batch_of_messages_with_images(tmp_path):
    from jaxspec.cli import main

    image = picture(3, (40, 40))
    image.save(tmp_path / "image.png")
    content = [{"type": "image_url", "image_url": {"url": str(tmp_path / "image.png")}}, {"type": "text", "text": "What is it?"}]
    lines = [{"messages": [{"role": "user", "content": content}]}, {"messages": [{"role": "user", "content": content[1:]}]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--target", str(saved("plain")[1]), "--images", "70", "--max-len", "256", "--max-slots", "2"]
    options += ["--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--token-ids"]
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options]) == 0
    found = {line["id"]: line["token_ids"] for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert found == {i: loaded("plain").chat(line["messages"], GREEDY).token_ids for i, line in enumerate(lines, 1)}
    (tmp_path / "in.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "text.jsonl"), *options[:2], "--max-len", "64"]) == 1
    assert "load with images=True, or with --images" in json.loads((tmp_path / "text.errors.jsonl").read_text())["error"]


@pytest.mark.slow  # a batch job has the same rows
def test_rows_of_a_generator_with_images(tmp_path):
    image = picture(3, (40, 40))
    image.save(tmp_path / "image.png")
    forms = str(tmp_path / "image.png"), image, np.asarray(image), (tmp_path / "image.png").read_bytes()
    rows = [{"id": i, "messages": [{"role": "user", "content": [{"type": "image", "image": form}]}]} for i, form in enumerate(forms)]
    settings = {"num_draft_tokens": 3, "max_len": 256, "max_slots": 2, "images": 70, "messages_column": "messages"}
    params = SamplingParams(temperature=0, max_tokens=4)
    with jaxspec.Generator(saved("plain")[1], "ngram", sampling_params=params, id_column="id", **settings) as generator:
        named = generator.rows(rows)
    with jaxspec.Generator(saved("plain")[1], "ngram", sampling_params=params, **settings) as generator:
        unnamed = generator.rows(rows)
    expected = loaded("plain").chat(rows[0]["messages"], params).text
    assert [(row["text"], row["error"]) for row in (*named, unnamed[0])] == [(expected, None)] * 5
    for row in unnamed[1:]:
        assert re.fullmatch("the row's messages cannot stand for its id: .*; name an id_column, or give .* by path or URL", row["error"])


@pytest.fixture
def together(monkeypatch):
    """Makes a server's answers wait until so many images are asked for, as they are if they are fetched beside one another: an image for
    each URL, which is fetched once."""
    images, asked, barriers = {}, [], []

    def answer(url):
        asked.append(url)
        barriers[-1].wait(60)
        if url not in images:
            raise OSError(f"nothing is at {url}")
        file = io.BytesIO()
        images[url].save(file, "PNG")
        return file.getvalue()

    def expect(count, *urls):
        barriers.append(threading.Barrier(count))
        images.update({url: picture(i, (40, 40)) for i, url in enumerate(urls)})
        asked.clear()
        return asked

    monkeypatch.setattr(fetches, "fetched", answer)
    return expect


def about(*images):
    return [{"role": "user", "content": [*({"type": "image", "url": image} for image in images), {"type": "text", "text": "What is it?"}]}]


def test_images_behind_urls_are_fetched_beside_one_another(together, tmp_path):
    """Those of one prompt, and of several, in every way of asking."""
    from jaxspec.cli import main

    llm, urls = loaded("plain"), [f"http://somewhere/{i}.png" for i in range(3)]
    found = {}

    def asks(name, run, count=3):
        asked = together(count, *urls)
        found[name] = run()
        assert sorted(asked) == urls[:count]

    prompts = [{"prompt": "<unused5>" * len(images), "multi_modal_data": {"image": images}} for images in (urls[:2], urls[2:], urls[2:])]
    asks("prompts", lambda: [answer.token_ids for answer in llm.generate(prompts, GREEDY)])
    asks("one prompt", lambda: [i for chunk in llm.stream(prompts[0], GREEDY) for i in chunk.token_ids], 2)
    asks("in any order", lambda: {answer.prompt_index: answer.token_ids for answer in llm.as_completed(prompts, GREEDY)})
    asks("from an iterator", lambda: [answer.token_ids for answer in llm.as_completed(iter(prompts[:1]), GREEDY)], 2)
    assert found["from an iterator"] == [found["one prompt"]] == found["prompts"][:1]
    assert found["in any order"] == dict(enumerate(found["prompts"]))
    talks = [about(*urls[:2]), about({"url": urls[2]})]
    asks("conversations", lambda: llm.chat(talks, GREEDY))
    asks("one conversation", lambda: llm.chat(talks[0], GREEDY), 2)
    one, other = found["conversations"]
    assert (found["one conversation"].token_ids, len(one.prompt_token_ids)) == (one.token_ids, len(other.prompt_token_ids) + 66)
    assert llm.chat_prompt(talks[0]).count(IMAGE) == 2

    settings = {"num_draft_tokens": 3, "max_len": 256, "max_slots": 2, "images": 70, "messages_column": "messages"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with jaxspec.Generator(saved("plain")[1], "ngram", sampling_params=params, **settings) as generator:
        asks("rows", lambda: [row["text"] for row in generator.rows([{"messages": messages} for messages in talks])])
    assert found["rows"] == [one.text, other.text]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talks) + "no JSON\n5\n")
    options = ["--target", str(saved("plain")[1]), "--images", "70", "--max-len", "256", "--max-slots", "2"]
    options += ["--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--token-ids"]
    asks("lines", lambda: main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options]))
    served = {line["id"]: line["token_ids"] for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert served == {1: one.token_ids, 2: other.token_ids} and found["lines"] == 1
    asked = together(1)
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options]) == 1
    assert not asked  # nothing is fetched for lines that are done
    errors = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [(line["line"], line["error"][:8]) for line in errors] == [(3, "not JSON"), (4, "the line")]


def test_an_image_that_is_not_where_its_url_says(together):
    llm, urls = loaded("plain"), [f"http://somewhere/{i}.png" for i in range(4)]
    together(1, *urls[:2])
    gone = rf"'{urls[3]}' cannot be read as an image: nothing is at {urls[3]}"
    with pytest.raises(ValueError, match=f"prompt 1: {gone}"):
        llm.generate([{"prompt": "<unused5>", "multi_modal_data": {"image": url}} for url in (urls[0], urls[3], urls[1])], GREEDY)
    with pytest.raises(ValueError, match=f"conversation 1: {gone}"):
        llm.chat([about(urls[0]), about(urls[3])], GREEDY)
    with pytest.raises(ValueError, match=f"^{gone}"):
        llm.chat(about(urls[3]), GREEDY)


def test_a_script_that_is_interrupted_while_a_server_hangs_ends():
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from jaxspec.engine.fetches import Fetches
from jaxspec.vision.images import source_of
with Fetches(["image"]) as fetches:
    prompt = fetches.begin({{"multi_modal_data": {{"image": sys.argv[1]}}}})
    source_of(prompt["multi_modal_data"]["image"])
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", script, f"http://127.0.0.1:{server.getsockname()[1]}/0.png"]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1", "JAX_PLATFORMS": "cpu"}
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
            connection, _ = server.accept()
            with connection:
                time.sleep(0.5)  # until it waits
                running.send_signal(signal.SIGINT)
                assert running.communicate(timeout=30)[1].rstrip().endswith("KeyboardInterrupt")


def test_nothing_is_fetched_for_a_text_model(together):
    asked = together(1)
    with fetches.Fetches(()) as nothing:
        given = about("http://somewhere/0.png")
        assert nothing.begin(given) is given and list(nothing.ahead([given])) == [given]
    assert not asked


@pytest.mark.parametrize("kind", ["plain", "unified"])
@pytest.mark.parametrize("text", ["", r"|.*language_model.*\.q_proj"], ids=["alone", "with text"])
def test_an_adapter_of_the_tower_is_merged(kind, text, tmp_path):
    """As PEFT merges it, alone or with the text model's, and in a conversion."""
    image, modules = picture(1, (30, 50)), rf".*\.linear|.*patch_dense|.*embedding_projection{text}"
    made = adapters.adapted(copy.deepcopy(saved(kind)[0]), tmp_path, target_modules=modules, r=2, lora_alpha=16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.POCKET / name, made.target / name)
    before, wanted = (np.asarray(Images.load(folder, jnp.float32, 70).rows(image)) for folder in (made.target, made.merged))
    assert np.abs(before - wanted).max() > 0.1 * np.abs(wanted).max()
    llm = jaxspec.load(made.target, adapter=made.adapter, images=70, max_len=128, max_slots=1, progress=False)
    np.testing.assert_allclose(llm._inserts.towers["image"].rows(image), wanted, atol=1e-4, rtol=1e-4)
    converted = jaxspec.convert(made.target, tmp_path / "converted", adapter=made.adapter, progress=False)
    np.testing.assert_allclose(Images.load(converted, jnp.float32, 70).rows(image), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "unified"])
def test_a_converted_checkpoint_has_its_tower(kind, tmp_path):
    image, prompt = picture(1, (30, 50)), {"prompt": "def <unused5>read", "multi_modal_data": {"image": picture(1, (30, 50))}}
    folder = jaxspec.convert(saved(kind)[1], tmp_path / "converted", progress=False)
    again = jaxspec.convert(folder, tmp_path / "again", progress=False)
    for converted in (folder, again):
        found, original = (Images.load(each, jnp.float32, 70) for each in (converted, saved(kind)[1]))
        np.testing.assert_array_equal(found.rows(image), original.rows(image))
    llm = jaxspec.load(folder, "ngram", num_draft_tokens=3, max_len=256, max_slots=2, images=70, progress=False)
    assert llm.generate(prompt, GREEDY)[0].token_ids == loaded(kind).generate(prompt, GREEDY)[0].token_ids


def test_a_script_for_vllm_with_images():
    from jaxspec import vllm

    sizes = {"max_model_len": 256, "max_num_seqs": 2, "mm_processor_kwargs": {"max_soft_tokens": 70}}
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    llm = vllm.LLM(str(saved("plain")[1]), limit_mm_per_prompt={"image": 2, "audio": 0}, speculative_config=speculation, **sizes)
    params, image = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), picture(3, (40, 40))
    prompt = {"prompt": "def <unused5>read", "multi_modal_data": {"image": image}}
    (found,) = llm.generate(prompt, params, use_tqdm=False)
    assert found.outputs[0].token_ids == loaded("plain").generate(prompt, GREEDY)[0].token_ids
    messages = [{"role": "user", "content": [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "What is it?"}]}]
    (found,) = llm.chat(messages, params, use_tqdm=False)
    assert found.outputs[0].token_ids == loaded("plain").chat(messages, GREEDY).token_ids
    three = {"prompt": "def <unused5><unused5><unused5>", "multi_modal_data": {"image": [image] * 3}}
    with pytest.raises(ValueError, match="^prompt 1 has 3 images; expected at most 2, as limit_mm_per_prompt says"):
        llm.generate([prompt, three], params)
    told = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "nowhere.png"}}]}] * 3
    with pytest.raises(ValueError, match="^conversation 0 has 3 images; expected at most 2"):
        llm.chat(told, params)
    for limits, processing, error, words in (
        ({"image": -1}, None, ValueError, r"limit_mm_per_prompt\['image'\] is -1"),
        (3, None, TypeError, "limit_mm_per_prompt is 3, expected a dict"),
        (None, {"do_pan_and_scan": True}, ValueError, "mm_processor_kwargs has 'do_pan_and_scan', which cannot be served"),
        (None, {"max_soft_tokens": 100}, ValueError, "max_soft_tokens is 100; expected one of 70"),
    ):
        with pytest.raises(error, match=words):
            vllm.LLM(str(saved("plain")[1]), limit_mm_per_prompt=limits, mm_processor_kwargs=processing)
    plain = vllm.LLM(str(saved("plain")[1]), limit_mm_per_prompt={"image": 0}, max_model_len=64, max_num_seqs=1)
    with pytest.raises(ValueError, match=r"'multi_modal_data', which cannot be served: .*limit_mm_per_prompt=\{'image': 1\}"):
        plain.generate(prompt, params)
