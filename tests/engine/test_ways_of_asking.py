"""The forms in which prompts and params may come, streams in asynchronous code, results as dicts, and an LLM that is closed."""

import asyncio
import functools
import gc
import json
import threading
import time
import types
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from quick import few_programs

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine import serving
from jaxspec.engine.stream import Stream

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def load(folders, unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield lambda: jaxspec.load(*folders, num_draft_tokens=2, max_slots=2, max_len=64, progress=False)


@pytest.fixture(scope="module")
def llm(load):
    return load()


@pytest.fixture(scope="module")
def expected(llm):
    return [completion.token_ids for completion in llm.generate(["def f(n):", "import os"], PARAMS)]


class Column:
    """Texts as a dataset hands them out: a length and numbered items."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i]


def test_prompts_may_be_dicts_and_columns(llm, expected):
    ids = llm.tokenizer.encode("import os")
    asked = [{"prompt": "def f(n):"}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "of old", "multi_modal_data": None}]
    found = llm.generate(asked, sampling_params=PARAMS)
    assert [c.token_ids for c in found] == [expected[0], expected[1], expected[1]]
    assert [c.prompt for c in found] == ["def f(n):", None, "of old"]
    [one] = llm.generate(asked[0], PARAMS)
    assert (one.token_ids, one.prompt) == (expected[0], "def f(n):")
    assert [c.token_ids for c in llm.generate(Column(["def f(n):", "import os"]), PARAMS)] == expected
    assert [c.token_ids for c in llm.generate(iter(["def f(n):", "import os"]), PARAMS)] == expected


@pytest.mark.parametrize("library", ["numpy", "jax.numpy", "torch"])
def test_prompts_may_be_arrays(llm, expected, library):
    """One prompt of one axis, several of two."""
    array, ids = pytest.importorskip(library).asarray, llm.tokenizer.encode("import os")
    one, two = array(ids), array([ids, ids])
    for prompts, count in ((one, 1), ([one], 1), (two, 2), ({"prompt_token_ids": one}, 1), (list(two), 2)):
        assert [c.token_ids for c in llm.generate(prompts, PARAMS)] == expected[1:] * count
    with pytest.raises(TypeError, match="prompt 0 has .*1.5.* at position 0; expected a token id, an integer"):
        llm.generate([array([1.5, 2.0])], PARAMS)


def test_what_a_tokenizer_gives_is_answered_with_the_name_here(llm):
    ids = np.array([llm.tokenizer.encode("import os")])
    with pytest.raises(ValueError, match="prompt 0 has 'input_ids', which cannot be served: .* are called 'prompt_token_ids'"):
        llm.generate({"input_ids": ids, "attention_mask": np.ones_like(ids)}, PARAMS)


def test_params_have_a_second_name(llm, expected):
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match="both params and sampling_params were given; expected one of them"):
            call("import os", PARAMS, sampling_params=PARAMS)
    assert sum((chunk.token_ids for chunk in llm.stream("import os", sampling_params=PARAMS)), []) == expected[1]


def test_a_progress_bar_on_demand(llm, capsys):
    llm.generate(["import os"], PARAMS, use_tqdm=True)
    assert "Generating" in capsys.readouterr().err
    made = []

    class Bar(jaxspec.engine.llm.tqdm):
        def __init__(self, *args, **kwargs):
            made.append(kwargs["total"])
            super().__init__(*args, **kwargs)

    llm.generate(["import os"] * 2, PARAMS, use_tqdm=Bar)
    llm.generate(["import os"] * 2, PARAMS, use_tqdm=False)
    assert made == [2]
    capsys.readouterr()
    llm.generate(["import os"] * 2, PARAMS, use_tqdm=functools.partial(jaxspec.engine.llm.tqdm, disable=True))
    assert not capsys.readouterr().err


def test_a_bar_needs_to_be_updated_and_closed_alone(llm):
    seen = []

    class Bar:
        def __init__(self, **said):
            seen.append(said["total"])

        def update(self, count):
            seen.append(count)

        def close(self):
            seen.append("closed")

    llm.generate(["import os"] * 2, PARAMS, use_tqdm=Bar)
    assert (seen[0], sum(seen[1:-1]), seen[-1]) == (2, 2, "closed")


def test_a_completion_as_a_dict(llm, expected):
    [one] = llm.generate("import os", PARAMS.replace(logprobs=1))
    found = json.loads(json.dumps(one.to_dict()))
    assert (found["text"], found["token_ids"], found["prompt"]) == (one.text, expected[1], "import os")
    assert found["logprobs"][0][str(expected[1][0])]["rank"] == 1
    assert found["stats"]["acceptance_length"] == one.stats.acceptance_length and found["stats"]["steps"] == one.stats.steps


def test_params_are_copied_with_changes():
    params = SamplingParams(max_tokens=3, logit_bias={5: 1.0})
    assert params.clone() == params and params.clone().logit_bias is not params.logit_bias
    assert params.replace(max_tokens=4, stop="x") == SamplingParams(max_tokens=4, stop="x", logit_bias={5: 1.0})
    with pytest.raises(ValueError, match="max_tokens is 0"):
        params.replace(max_tokens=0)


def test_streams_in_asynchronous_code_run_side_by_side(llm, expected):
    async def read(prompt):
        return [chunk async for chunk in llm.stream(prompt, PARAMS, steps=1)]

    async def both():
        return await asyncio.gather(read("def f(n):"), read("import os"))

    found = asyncio.run(both())
    assert [sum((chunk.token_ids for chunk in chunks), []) for chunks in found] == expected

    async def stopped():
        stream = llm.stream("import os", PARAMS.replace(max_tokens=40))
        async for chunk in stream:
            await stream.aclose()
            return chunk.token_ids

    assert asyncio.run(stopped()) == expected[1][:1] and llm.free_slots == 2


def test_completions_in_asynchronous_code(llm, expected):
    async def read():
        return {c.prompt_index: c.token_ids async for c in llm.as_completed(["def f(n):", "import os"], PARAMS)}

    assert [asyncio.run(read())[i] for i in range(2)] == expected

    async def stopped():
        async for completion in (completions := llm.as_completed(["import os"] * 9, PARAMS)):
            await completions.aclose()
            return completion.token_ids

    assert asyncio.run(stopped()) == expected[1] and llm.free_slots == 2


def test_a_piece_whose_wait_was_cancelled_comes_next():
    """As with `asyncio.wait_for`, after which a server sends a sign of life and reads on."""
    wanted, go_on = threading.Event(), threading.Event()

    def pieces() -> Any:
        yield "one"
        wanted.set()
        assert go_on.wait(60)
        yield "two"
        yield "three"

    async def read():
        stream = Stream(pieces(), lambda: None)
        found = [await anext(stream)]
        waiting = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(wanted.wait, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        return found + [piece async for piece in stream]

    assert asyncio.run(read()) == ["one", "two", "three"]


def test_a_read_that_was_cancelled_leaves_its_slot_to_the_next_call(llm, expected, monkeypatch):
    """The thread that read has the stream for a moment more."""
    held = [llm.stream("def f(n):", PARAMS.replace(max_tokens=40)) for _ in range(2)]
    assert all(map(next, held))
    monkeypatch.setattr(serving, "time", types.SimpleNamespace(sleep=lambda _: held.clear(), monotonic=time.monotonic))
    assert llm.generate(["import os"], PARAMS)[0].token_ids == expected[1]
    assert llm.free_slots == 2


def test_a_stream_whose_loop_was_stopped_ends_though_the_error_is_kept():
    """As a notebook keeps the error of a cell that was stopped: there is no name by which the stream could be closed."""
    wanted, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def pieces() -> Any:
        try:
            yield "one"
            wanted.set()
            assert go_on.wait(60)
            yield "two"
        finally:
            ended.set()

    async def read():
        async for _ in Stream(pieces(), lambda: None):
            pass

    async def stopped():
        waiting = asyncio.ensure_future(read())
        assert await asyncio.to_thread(wanted.wait, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError) as error:
            await waiting
        go_on.set()
        assert await asyncio.to_thread(ended.wait, 10), error

    gc.disable()
    try:
        asyncio.run(stopped())
    finally:
        gc.enable()


def test_a_conversation_is_written_as_asked(llm):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    turn = llm.chat(messages, PARAMS)
    assert turn.prompt == llm.tokenizer.decode(turn.prompt_token_ids, special=True) and "Hi" in turn.prompt
    further = llm.chat_prompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert turn.prompt.startswith(llm.tokenizer.decode(further, special=True)) and len(further) < len(turn.prompt_token_ids)
    plain = llm.chat_prompt(messages, chat_template="{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}")
    marked = {"chat_template": "{{ messages[0].content }}{{ mark }}", "chat_template_kwargs": {"mark": "!"}}
    assert llm.tokenizer.decode(plain) == "HiWell"
    assert llm.tokenizer.decode(llm.chat_prompt(messages, **marked)) == "Hi!"
    thinking = llm.chat_prompt(messages, chat_template_kwargs={"enable_thinking": True})
    assert thinking == llm.chat_prompt(messages, enable_thinking=True) != turn.prompt_token_ids
    with pytest.raises(ValueError, match="this chat template has no tools: found 1, expected none"):
        llm.chat(messages, PARAMS, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(TypeError, match="tools is of type generator, expected a list of functions or of dicts"):
        llm.chat([messages, messages], PARAMS, tools=(tool for tool in [len]))
    with pytest.raises(TypeError, match="chat has no argument 'add_generation_promt'; the nearest is 'add_generation_prompt'"):
        llm.chat(messages, PARAMS, add_generation_promt=False)


def test_fields_of_params_belong_into_params(llm):
    for call in (llm.generate, llm.stream, llm.chat, llm.stream_chat, llm.as_completed):
        with pytest.raises(TypeError, match=f"^{call.__name__} has no argument 'max_tokens'; it belongs into params=SamplingParams"):
            call("x", max_tokens=3)
        with pytest.raises(TypeError, match=f"^{call.__name__} has no argument 'max_new_tokens'; in params=.* it is called max_tokens"):
            call("x", max_new_tokens=3)
        with pytest.raises(TypeError, match=f"^{call.__name__} has no argument 'input_ids'; a prompt's token ids are given as the prompt"):
            call(input_ids=[3], attention_mask=[1])


def test_who_makes_an_llm_without_load_is_told_of_it():
    for given, named in ((("pocket",), {}), ((), {"model": "pocket"})):
        with pytest.raises(TypeError, match=r"^jaxspec\.load\(target, drafter=\.\.\.\) makes an LLM; .* is jaxspec\.vllm\.LLM$"):
            jaxspec.LLM(*given, **named)


def test_names_for_a_chat_template_change_only_what_it_writes(llm):
    messages = [{"role": "user", "content": "Hi"}]
    assert llm.chat_prompt(messages, chat_template_kwargs={"add_generation_prompt": False}) == llm.chat_prompt(
        messages, add_generation_prompt=False
    )
    for name in ("truncation", "max_length", "padding", "tokenize", "return_dict", "return_tensors", "conversation", "self"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs has '{name}', which is no name for the chat template"):
            llm.chat_prompt(messages, chat_template_kwargs={name: 3})
    for wrong in (5, [1], {1: 2}):
        with pytest.raises(TypeError, match="chat_template_kwargs is .*, expected a dict of names that the chat template knows"):
            llm.chat_prompt(messages, chat_template_kwargs=wrong)


def test_errors_name_the_prompt_and_the_conversation(llm):
    with pytest.raises(ValueError, match=r"^prompt 1: the text has '\\ud800' at position 0"):
        llm.generate(["a", "\ud800"], PARAMS)
    fine, wrong = [{"role": "user", "content": "Hi"}], [{"role": "user"}]
    with pytest.raises(ValueError, match="^conversation 1: message 0 has no content"):
        llm.chat([fine, wrong], PARAMS)
    with pytest.raises(ValueError, match="^message 0 has no content"):
        llm.chat(wrong, PARAMS)


def test_an_llm_that_is_closed_by_what_gives_its_prompts_says_so(load):
    llm = load()

    def prompts():
        yield "import os"
        llm.close()
        yield "def f():"

    with pytest.raises(RuntimeError, match="the LLM is closed"):
        list(llm.as_completed(prompts()))


def test_a_closed_llm_gives_back_memory_and_says_so(load, expected):
    with load() as llm:
        stream = llm.stream("import os", PARAMS.replace(max_tokens=40))
        next(stream)
        arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves((llm.target, llm.drafter))]
        stats = llm.stats
        assert [c.token_ids for c in llm.generate(["import os"], PARAMS)] == [expected[1]]
        state = jax.tree.leaves(llm._runner.programs.state)
    gc.collect()
    assert all(array.is_deleted() for array in state) and not any(array() for array in arrays)
    assert llm.stats.requests > stats.requests and llm.stats.compilations >= stats.compilations > 0
    assert repr(llm).endswith(", closed)") and llm._repr_html_() is None
    llm.close()
    structured = PARAMS.replace(structured_outputs={"regex": "a new one"})
    asked = (llm.warmup, lambda: llm.generate("x"), lambda: llm.generate("x", structured))
    for call in (*asked, lambda: next(stream), lambda: next(llm.stream("x")), lambda: llm.target):
        with pytest.raises(RuntimeError, match="is closed; load it again"):
            call()
