"""Images in prompts through the whole engine, on a tiny target whose tower is made up: an image is a row of numbers, and its rows are
drawn by them."""

import contextlib
import dataclasses
import functools
import itertools
import random
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxspec import SamplingParams
from jaxspec.drafters.base import NoDraft
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.inserts import Inserts, in_order, in_turn
from jaxspec.engine.learn import Learning
from jaxspec.engine.llm import LLM
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import Settings
from jaxspec.media.tower import Run
from jaxspec.model import gemma4
from jaxspec.model import paged_kv as paged
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.rows import Inserted, Rows

pytestmark = pytest.mark.usefixtures("quick_to_compile")
VOCAB, MAX_LEN, PAGE, MOST, HIDDEN = 64, 96, 4, 12, 16
CONFIG = {
    **tiny.TEXT,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
OPENING, IMAGE, CLOSING = 61, 62, 63


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What stands for an image. It has as many rows as it says."""

    number: int
    size: int = 5

    @property
    def digest(self):
        return self.number.to_bytes(8, "little", signed=True)


class Tower:
    """What stands for an image tower."""

    token_id, see_one_another, text_settings = IMAGE, True, types.MappingProxyType({"images": MOST})

    def source(self, image):
        if not isinstance(image, Drawn):
            raise TypeError(f"an image is of type {type(image).__name__}, expected a Drawn")
        return image

    closing = (CLOSING,)

    def runs(self, image, encode):
        return [Run([OPENING], image.size)]

    def decoded(self, image):
        if image.number == -2:
            raise ValueError("Drawn(-2) cannot be read as an image")
        return [image]

    def rows(self, image, then=()):
        if image.number < 0:
            raise RuntimeError("this image has no rows")
        found = np.full((MOST, HIDDEN), 9.0, np.float32)
        found[: image.size] = np.random.default_rng(image.number).normal(size=(image.size, HIDDEN))
        return found

    def warmup(self):
        self.warm = True
        return []


@functools.cache
def target():
    return jax.tree.map(jnp.asarray, tiny.random_weights(gemma4.abstract(Gemma4Config.from_hf(CONFIG), jnp.float32), 0))


@functools.cache
def llm_of(drafter, pages=None, slots=3, tower=True):
    sizes = {"max_slots": slots, "max_len": MAX_LEN, "num_draft_tokens": 0 if drafter is NoDraft else 3, "page_size": PAGE}
    settings = Settings(**sizes, kv_pages=pages, insert_rows=(MOST,) if tower else (), progress=False)
    return LLM(target(), drafter(), tiny.Letters(), settings, towers={"image": Tower()} if tower else {})


def asked(*parts):
    """A prompt of token ids and images, one after the other."""
    ids = [int(i) for part in parts for i in ([IMAGE] if isinstance(part, Drawn) else part)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [part for part in parts if isinstance(part, Drawn)]}}


def first_token(*parts):
    """What the target chooses after a prompt, computed part by part without the engine."""
    model, at, token = target(), 0, None
    cache = gemma4.init_cache(model.config, slots=1, max_len=MAX_LEN, num_draft_tokens=0, page_size=PAGE, dtype=jnp.float32)
    pieces = list[tuple[list[int], np.ndarray | None]]()
    for part in parts:
        if isinstance(part, Drawn):
            pieces += [([OPENING], None), ([IMAGE] * part.size, Tower().rows(part)[None]), ([CLOSING], None)]
        else:
            pieces += [(part[begin : begin + 4], None) for begin in range(0, len(part), 4)]
    for ids, rows in pieces:
        block = np.zeros((1, 4 if rows is None else MOST), np.int32)
        block[0, : len(ids)] = ids
        token, cache = after_block(model, cache, block, jnp.full(1, at), jnp.full(1, len(ids)), rows)
        at += len(ids)
    return int(token)


@jax.jit
def after_block(model, cache, ids, start, count, rows):
    """What the target chooses after a block of one sequence, whose rows those of an image may be, and the cache."""
    cache, _ = paged.reserve(cache, 0 * count, start + count, ids.shape[1])
    inserted = None if rows is None else Inserted(rows, start[:, None], count[:, None], count[:, None] > 0)
    out, cache = model(Rows(ids, start, count, 0 * count, inserted=inserted), cache)
    return jnp.argmax(model.unembed(out.hidden)[0, count[0] - 1]), cache


WORDS = [list(np.random.default_rng(i).integers(3, 60, n)) for i, n in enumerate((9, 3, 21, 1, 14))]
PROMPTS = [
    (WORDS[0], Drawn(1), WORDS[1]),
    (WORDS[0], Drawn(2), WORDS[1]),  # as the first, but for what it shows
    (WORDS[0], Drawn(1), WORDS[4]),
    (Drawn(3, 11), Drawn(4, 1), WORDS[2]),
    (WORDS[2], WORDS[0], WORDS[4], Drawn(5, 12)),
    (WORDS[3], Drawn(1), Drawn(1), WORDS[3]),
]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@functools.cache
def answers():
    """Of each prompt by itself, without drafts."""
    return [llm_of(NoDraft).generate(asked(*prompt), GREEDY)[0] for prompt in PROMPTS]


def test_the_first_token_is_the_targets_own_after_text_and_images():
    assert [answer.token_ids[0] for answer in answers()] == [first_token(*prompt) for prompt in PROMPTS]
    assert answers()[0].token_ids != answers()[1].token_ids  # they differ in the image alone
    ids = answers()[0].prompt_token_ids
    assert ids == [*WORDS[0], OPENING, *[IMAGE] * 5, CLOSING, *WORDS[1]]


@pytest.mark.parametrize("pages", [pytest.param(None, marks=pytest.mark.slow), 26])
def test_texts_do_not_depend_on_drafts_company_room_or_what_is_kept(pages):
    """Twice each, in two orders, so that prompts find what others have left; and with so few pages that some are computed again."""
    llm, expected = llm_of(NGram, pages), [answer.token_ids for answer in answers()]
    order = [0, 1, 2, 3, 4, 5, 3, 1, 0, 5, 2, 4]
    for some in (order, order[::-1]):
        found = llm.generate([asked(*PROMPTS[i]) for i in some], GREEDY)
        assert [answer.token_ids for answer in found] == [expected[i] for i in some]
    if pages is None:
        assert llm.stats.cached_tokens > 0
    else:
        assert llm.stats.preemptions > 0


def test_what_is_queued_behind_an_image_without_pages_is_not_computed(monkeypatch):
    """Those rows are fewer, and there would be pages for them."""
    monkeypatch.setattr(Buckets, "prefill", [(1, 8)])
    monkeypatch.setattr(Buckets, "inserts", lambda self, rows: [(1, 16)])
    llm, lacking, queued = llm_of.__wrapped__(NoDraft), [], []
    prompt = asked(WORDS[1], Drawn(6, 12), WORDS[2])
    expected = llm.generate(prompt, GREEDY)[0].token_ids
    runner, prefill, read = llm._runner, Runner.prefill, Runner.read

    def leave(pages):
        programs = runner.programs
        cache = dataclasses.replace(programs.state.cache, free_count=jnp.asarray(pages, jnp.int32))
        programs.state = dataclasses.replace(programs.state, cache=cache)

    def prefilled(self, requests, needs, behind=None):
        if not lacking:  # for the first sixteen rows, the image's among them
            lacking.append(self.free_pages)
            leave(2)
        elif len(lacking) == 1:
            queued.append(behind)
        return prefill(self, requests, needs, behind)

    def read_calls(self, calls):
        starved = read(self, calls)
        if starved and len(lacking) == 1:
            lacking.append(self.free_pages)
            leave(lacking[0])
        return starved

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "prefill", prefilled)
        patch.setattr(Runner, "read", read_calls)
        found = llm.generate(prompt, GREEDY)[0]
    assert len(lacking) == 2 and len(queued) == 1 and queued[0].rows == [16]
    assert found.token_ids == expected


def test_text_does_not_wait_as_long_as_images_come():
    """Prompts with images, which end with their first token, so that there are always others whose images are next."""
    llm, params = llm_of(NoDraft), GREEDY.replace(max_tokens=1)
    prompts = [asked(WORDS[0], Drawn(800 + i), WORDS[1]) for i in range(30)]
    prompts[6] = {"prompt_token_ids": WORDS[4]}
    found = list(llm.as_completed((prompt, params) for prompt in prompts))
    assert len(found) == 30 and [answer.prompt_index for answer in found].index(6) <= 6 + 2 * llm.max_slots
    assert found[-1].token_ids == [first_token(WORDS[0], Drawn(829), WORDS[1])]


def test_an_image_of_one_prompt_is_computed_once(monkeypatch):
    """Also where the call that takes its rows is still under way when images are looked for that come next."""
    llm, computed, rows = llm_of(NGram), [], Tower.rows
    monkeypatch.setattr(Tower, "rows", lambda self, image, then: computed.append(image.number) or rows(self, image, then))
    prompts = [asked(WORDS[0], Drawn(200 + i), Drawn(300 + i, 9), WORDS[2], Drawn(400 + i)) for i in range(6)]
    llm.generate(prompts, GREEDY)
    assert sorted(computed) == [first + i for first in (200, 300, 400) for i in range(6)]


def test_what_was_decoded_is_forgotten_once_it_is_used(monkeypatch):
    """A call of many prompts does not keep the pixels of all until its end."""
    llm, decoded, held, rows = llm_of(NGram), [], [], Tower.rows

    def decode(self, image):
        made = dataclasses.replace(image)
        decoded.append(weakref.ref(made))
        return [made]

    def counted(self, image, then):
        held.append(sum(made() is not None for made in decoded))
        return rows(self, image, then)

    monkeypatch.setattr(Tower, "decoded", decode)
    monkeypatch.setattr(Tower, "rows", counted)
    llm.generate([asked(WORDS[1], Drawn(500 + i)) for i in range(30)], GREEDY)
    assert len(decoded) == 30 and max(held) <= 12


def test_a_drafter_that_learns_skips_texts_with_images(monkeypatch):
    taken = []
    learner = types.SimpleNamespace(add=lambda tokens, prompt: taken.append(prompt))
    learning = types.SimpleNamespace(going=True, _learner=learner, between=lambda: None)
    learning.add = functools.partial(Learning.add, learning)
    llm = llm_of(NGram)
    monkeypatch.setattr(llm._serving, "learning", learning)
    llm.generate([asked(*PROMPTS[0]), {"prompt_token_ids": WORDS[1]}], GREEDY)
    assert taken == [len(WORDS[1])]


def test_images_that_fit_share_a_call(monkeypatch):
    """Up to four of a prompt, as far as a call has room for their rows."""
    llm, shared = llm_of(NGram), []

    def counted(inserts):
        shared.append([insert.count for insert in inserts])
        return in_turn(inserts)

    monkeypatch.setattr("jaxspec.engine.runner.in_turn", counted)
    few, many = [Drawn(900 + i, 2) for i in range(5)], [Drawn(910, 7), Drawn(911, 6), Drawn(912, 5), Drawn(913, 1)]
    for images, calls in ((few, [[2, 2, 2, 2], [2]]), (many, [[7], [6, 5, 1]])):
        shared.clear()
        prompt = [part for image in images for part in (image, WORDS[3])]
        assert llm.generate(asked(*prompt), GREEDY)[0].token_ids[0] == first_token(*prompt)
        assert shared == calls


@pytest.mark.parametrize("sizes", [(9, 9, 9), (9, 12, 5), (12, 12, 12)])
def test_rows_of_several_inserts_lie_in_turn(sizes):
    """Also of parts of a run, and of towers that give more or fewer rows than a call has room for."""
    runs = [np.random.default_rng(i).normal(size=(size, HIDDEN)).astype(np.float32) for i, size in enumerate(sizes)]
    places = [(0, 3), (2, 4), (1, 4)]
    some = [types.SimpleNamespace(rows=lambda run=run: run, offset=at, count=n, room=11) for run, (at, n) in zip(runs, places, strict=True)]
    own = [run[at : at + n] for run, (at, n) in zip(runs, places, strict=True)]
    np.testing.assert_array_equal(in_turn(some)[:11], np.concatenate(own))
    np.testing.assert_array_equal(in_turn(some[1:])[:8], np.concatenate(own[1:]))
    np.testing.assert_array_equal(in_turn(some[2:])[:4], own[2])
    assert len(in_turn(some)) == len(in_turn(some[2:])) == 11


def test_inserts_are_looked_for_as_calls_take_them():
    """Four of each of so many prompts, until these have no more."""
    prompts = [[f"{name}{i}" for i in range(count)] for name, count in (("a", 6), ("b", 1), ("c", 2), ("d", 5))]
    assert list(in_order(prompts, 2)) == ["a0", "a1", "a2", "a3", "b0", "a4", "a5", "c0", "c1", "d0", "d1", "d2", "d3", "d4"]
    assert list(in_order([], 2)) == []


def test_samples_of_a_prompt_with_an_image():
    llm = llm_of(NGram)
    params = SamplingParams(temperature=1, seed=5, n=3, max_tokens=6, ignore_eos=True)
    samples = llm.generate(asked(WORDS[4], Drawn(77), WORDS[1]), params)
    for i, sample in enumerate(samples):
        alone = llm_of(NoDraft).generate(asked(WORDS[4], Drawn(77), WORDS[1]), params.replace(n=1, seed=5 + i))[0]
        assert sample.token_ids == alone.token_ids


def test_a_stream_and_calls_beside_it():
    llm, expected = llm_of(NGram), answers()
    with contextlib.closing(llm.stream(asked(*PROMPTS[3]), GREEDY, steps=1)) as stream:
        first = next(stream)
        assert [a.token_ids for a in llm.generate([asked(*PROMPTS[i]) for i in (0, 1)], GREEDY)] == [expected[i].token_ids for i in (0, 1)]
        rest = list(stream)
    assert "".join(chunk.text for chunk in (first, *rest)) == expected[3].text


def test_prompts_as_a_processor_writes_them():
    """With an image's tokens written out, or its opening and closing alone."""
    llm, image = llm_of(NoDraft), Drawn(1)
    for middle in ([IMAGE], [OPENING, IMAGE, CLOSING], [OPENING, *[IMAGE] * 5, CLOSING]):
        prompt = {"prompt_token_ids": [*WORDS[0], *middle, *WORDS[1]], "multi_modal_data": {"image": image}}
        assert llm.generate(prompt, GREEDY)[0].token_ids == answers()[0].token_ids
    inserts = Inserts({"image": Tower()}, [MOST], llm.tokenizer)
    placed = inserts.placed([5, IMAGE, 7, OPENING, IMAGE, CLOSING, 9], {"image": [image, Drawn(2, 3)]}, 12)
    assert placed.ids == [5, OPENING, *[IMAGE] * 5, CLOSING, 7, OPENING, *[IMAGE] * 3, CLOSING, 9]
    assert [(picture.begin, picture.end) for picture in placed.inserts] == [(2, 7), (10, 13)]
    assert [placed.length_of(n) for n in range(8)] == [0, 1, 8, 9, 10, 13, 14, 15]


def test_what_cannot_be_read_is_refused_by_name():
    llm = llm_of(NoDraft)
    ids, image = [5, IMAGE, 7], Drawn(1)
    for data, error, words in (
        ({"image": [image, image]}, ValueError, "prompt 0: 2 images and 1 image tokens .*, 62. are given; expected one for each image"),
        ({"image": "cat.png"}, TypeError, "prompt 0: an image is of type str"),
        (
            {"audio": [1.0]},
            ValueError,
            "has 'audio', expected 'image' alone; to hear sounds, load with audio=True",
        ),
        ([image], TypeError, "'multi_modal_data' of prompt 0 is of type list, expected a dict with 'image'"),
    ):
        with pytest.raises(error, match=words):
            llm.generate({"prompt_token_ids": ids, "multi_modal_data": data})
    with pytest.raises(ValueError, match="1 image and 0 image tokens"):
        llm.generate({"prompt_token_ids": [5, 7], "multi_modal_data": {"image": image}})
    with pytest.raises(ValueError, match="0 images and 1 image tokens"):
        llm.generate([5, IMAGE, 7])
    assert llm_of(NoDraft, tower=False).generate([5, IMAGE, 7], GREEDY)[0].token_ids  # a token like others there
    with pytest.raises(ValueError, match="prompt 0 has 97 tokens; expected at most 95"):
        llm.generate({"prompt_token_ids": [5] * 89 + ids[1:], "multi_modal_data": {"image": image}})
    with pytest.raises(ValueError, match="prompt 0: image 1 has 10,000,000,000,000 tokens; expected at most 95, for which there is room"):
        llm.generate({"prompt_token_ids": [*ids, *ids], "multi_modal_data": {"image": [image, Drawn(2, 10**13)]}})
    for logprobs in ({"prompt_logprobs": 1}, {"logprobs": -1}, {"logprobs": 50}):
        with pytest.raises(
            ValueError, match="prompt 0 has images, sounds or videos, of which prompt_logprobs and more than 20 logprobs cannot be served"
        ):
            llm.generate(asked(*PROMPTS[0]), SamplingParams(**logprobs))
    with pytest.raises(ValueError, match="'multi_modal_data', which cannot be served: .*images=True"):
        llm_of(NoDraft, tower=False).generate(asked(*PROMPTS[0]))
    with pytest.raises(RuntimeError, match="this image has no rows"):
        llm.generate([asked(*PROMPTS[0]), asked(WORDS[0], Drawn(-1))], GREEDY)
    assert llm.generate(asked(*PROMPTS[0]), GREEDY)[0].token_ids == answers()[0].token_ids  # it goes on


def test_an_image_that_cannot_be_decoded_fails_alone():
    llm = llm_of(NGram)
    first, broken, last = llm.generate([asked(*PROMPTS[0]), asked(WORDS[0], Drawn(-2)), asked(*PROMPTS[3])], GREEDY)
    assert (broken.finish_reason, broken.error, broken.token_ids) == ("error", "Drawn(-2) cannot be read as an image", [])
    assert (first.token_ids, last.token_ids) == (answers()[0].token_ids, answers()[3].token_ids)
    with pytest.raises(StopIteration):
        stream = llm.stream(asked(WORDS[0], Drawn(-2)), GREEDY)
        assert next(stream).completion.error == "Drawn(-2) cannot be read as an image"
        next(stream)


def test_others_go_on_while_an_image_is_decoded(monkeypatch):
    """One that takes long, before and after others."""
    llm, over = llm_of(NGram), threading.Event()

    def decoded(image):
        if image.number == 9:
            assert over.wait(60)
        return [image]

    monkeypatch.setattr(llm._inserts.towers["image"], "decoded", decoded)
    order = []
    for answer in llm.as_completed([(asked(WORDS[1], Drawn(9)), GREEDY), (asked(*PROMPTS[0]), GREEDY), (asked(*PROMPTS[3]), GREEDY)]):
        order.append(answer.prompt_index)
        over.set()
        if answer.prompt_index == 0:
            slow = answer
    assert order[0] != 0 and sorted(order) == [0, 1, 2]
    assert slow.token_ids == llm_of(NoDraft).generate(asked(WORDS[1], Drawn(9)), GREEDY)[0].token_ids


def test_the_tower_is_warmed_up_too(monkeypatch):
    llm = llm_of(NoDraft)
    monkeypatch.setattr("jaxspec.engine.llm.warm_up", lambda *_: None)
    llm.warmup()
    assert llm._inserts.towers["image"].warm


def test_a_thread_that_outlives_the_main_one_reads_images(monkeypatch):
    """As Python exits, pools take nothing on."""

    def refused(*_):
        raise RuntimeError("cannot schedule new futures after shutdown")

    llm = llm_of(NoDraft)
    for pool in (llm._inserts._decoding, llm._inserts._computing):
        monkeypatch.setattr(pool, "submit", refused)
    with pytest.raises(RuntimeError, match="this image has no rows"):
        llm.generate(asked(WORDS[0], Drawn(-1)), GREEDY)
    assert llm.generate(asked(*PROMPTS[0]), GREEDY)[0].token_ids == answers()[0].token_ids


def test_log_probabilities_of_what_follows_an_image():
    found = llm_of(NGram).generate(asked(*PROMPTS[0]), GREEDY.replace(logprobs=2))[0]
    assert found.token_ids == answers()[0].token_ids
    assert [row[token].rank for token, row in zip(found.token_ids, found.logprobs, strict=True)] == [1] * 9


def random_parts(rng):
    """Text and images in any places, often with beginnings that other prompts have: up to before an image, or behind it."""
    images = [Drawn(i, count) for i, count in enumerate((1, MOST, 5, 3), 100)]
    stems = [[WORDS[0], images[0], WORDS[1], images[1], WORDS[1]], [images[1], images[2], WORDS[4]], [WORDS[1], images[3], images[3]]]
    while True:
        stem = rng.choice(stems)
        parts = stem[: rng.randint(0, len(stem))]
        for _ in range(rng.choice((0, 1, 2, 3))):
            image = rng.choice(images) if rng.random() < 0.5 else Drawn(rng.randint(1, 10**6), rng.randint(1, MOST))
            parts = [*parts, image if rng.random() < 0.4 else rng.choice(WORDS)]
        if parts and sum(part.size + 2 if isinstance(part, Drawn) else len(part) for part in parts) < 75:
            return parts


def random_calls(llm, seed, calls):
    """Calls of several sorts, whose requests all get what they get alone without drafts."""
    rng, known = random.Random(seed), {}

    def alone(prompt, params):
        key = repr((prompt, params))
        if key not in known:
            known[key] = llm_of(NoDraft).generate(asked(*prompt), params)[0]
        return known[key]

    def request():
        prompt = tuple(tuple(part) if isinstance(part, list) else part for part in random_parts(rng))
        params = SamplingParams(max_tokens=rng.choice((1, 4, 9, 16)), seed=rng.randint(0, 3), temperature=rng.choice((0.0, 1.0)))
        return prompt, params.replace(n=rng.choice((2, 3))) if params.temperature and rng.random() < 0.3 else params

    def check(found, prompt, params):
        expected = alone(prompt, params.replace(n=1, seed=params.seed + found.index))
        assert (found.token_ids, found.finish_reason, found.error) == (expected.token_ids, expected.finish_reason, None)

    for _ in range(calls):
        some = [request() for _ in range(rng.choice((1, 2, 3, 6)))]
        items = [(asked(*prompt), params) for prompt, params in some]
        kind = rng.choice(("generate", "as_completed", "stream"))
        if kind == "generate":
            for found in llm.generate([prompt for prompt, _ in items], [params for _, params in items]):
                check(found, *some[found.prompt_index])
        elif kind == "as_completed":
            with contextlib.closing(llm.as_completed(items)) as answers:
                for found in itertools.islice(answers, rng.choice((1, 2, 100))):
                    check(found, *some[found.prompt_index])
        else:
            prompt, params = some[0][0], some[0][1].replace(n=1)
            with contextlib.closing(llm.stream(asked(*prompt), params, steps=2)) as stream:
                chunks = list(itertools.islice(stream, rng.choice((1, 100))))
            if chunks[-1].completion is not None:
                check(chunks[-1].completion, prompt, params)
    assert llm.free_slots == llm.max_slots


@pytest.mark.parametrize("pages", [pytest.param(None, marks=pytest.mark.slow), 26])
def test_calls_of_every_sort_give_what_each_request_gets_alone(pages):
    random_calls(llm_of(NGram, pages), 0, 10)


@pytest.mark.slow
@pytest.mark.parametrize("pages", [None, 26])
@pytest.mark.parametrize("seed", range(1, 9))
def test_calls_of_every_sort_give_what_each_request_gets_alone_more(pages, seed):
    random_calls(llm_of(NGram, pages), seed, 60)
