"""SamplingParams: what it takes, what it refuses and with which words."""

import dataclasses
import re

import numpy as np
import pytest

from jaxspec.engine.admission import arrays_of
from jaxspec.engine.completion import Completion
from jaxspec.engine.intake import Maker
from jaxspec.engine.params import MAX_N, Defaults, SamplingParams
from jaxspec.engine.stats import RoundStats
from jaxspec.foreign_names import PARAMS_HERE, PARAMS_NEEDLESS


def test_values_are_kept_as_plain_python_numbers():
    params = SamplingParams(max_tokens=np.int32(7), temperature=np.float32(0.5), seed=np.int64(2**62), stop_token_ids=np.array([3, 4]))
    assert params == SamplingParams(max_tokens=7, temperature=0.5, seed=2**62, stop_token_ids=[3, 4])
    assert [type(params.max_tokens), type(params.temperature), type(params.seed), type(params.stop_token_ids)] == [int, float, int, tuple]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("field", ("stop", "stop_token_ids", "logit_bias", "bad_words"))
def test_none_asks_for_nothing(field):
    assert SamplingParams(**{field: None}) == SamplingParams()


def test_a_subclass_may_have_more_fields():
    @dataclasses.dataclass(frozen=True)
    class Named(SamplingParams):
        name: str = ""

    params = Named(max_tokens=3, name="x").replace(max_tokens=np.int64(5))
    assert (params.max_tokens, params.name, type(params.max_tokens)) == (5, "x", int)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("max_tokens", 0, ValueError, "max_tokens is 0, expected at least 1"),
        ("max_tokens", 2**31, ValueError, "max_tokens is 2147483648, expected 1 .. 2147483647"),
        ("max_tokens", 2.0, TypeError, "max_tokens is 2.0 of type float, expected an integer"),
        ("max_tokens", True, TypeError, "max_tokens is True of type bool, expected an integer"),
        ("temperature", -0.1, ValueError, "temperature is -0.1, expected a finite number of at least 0"),
        ("temperature", float("nan"), ValueError, "temperature is nan, expected a finite number"),
        ("temperature", float("inf"), ValueError, "temperature is inf"),
        ("temperature", 10**400, ValueError, "temperature is inf"),
        ("temperature", 2e30, ValueError, "temperature is 2e\\+30, expected a finite number of at least 0 and at most 1e\\+30"),
        ("temperature", "1", TypeError, "temperature is '1' of type str, expected a number"),
        ("temperature", False, TypeError, "temperature is False of type bool, expected a number"),
        ("seed", -1, ValueError, "seed is -1, expected 0 .. 9223372036854775807"),
        ("seed", 2**63, ValueError, "seed is 9223372036854775808, expected 0 .. 9223372036854775807"),
        ("seed", 1.5, TypeError, "seed is 1.5 of type float, expected an integer"),
        ("stop_token_ids", 5, TypeError, "stop_token_ids is 5, expected a list of token ids"),
        ("stop_token_ids", "56", TypeError, "stop_token_ids is '56', expected a list of token ids"),
        ("stop_token_ids", [1, -2], ValueError, r"stop_token_ids\[1\] is -2, expected 0 .."),
        ("stop_token_ids", [2**31], ValueError, r"stop_token_ids\[0\] is 2147483648, expected 0 .. 2147483646"),
        ("stop_token_ids", [1, "2"], TypeError, r"stop_token_ids\[1\] is '2' of type str, expected an integer"),
        ("ignore_eos", 1, TypeError, "ignore_eos is 1, expected True or False"),
        ("include_stop_str_in_output", None, TypeError, "include_stop_str_in_output is None, expected True or False"),
        ("min_tokens", -1, ValueError, "min_tokens is -1, expected at least 0"),
        ("min_tokens", 10**10, ValueError, "min_tokens is 10000000000, expected 0 .. 2147483647"),
        ("min_tokens", None, TypeError, "min_tokens is None of type NoneType, expected an integer"),
        ("top_k", -2, ValueError, "top_k is -2, expected at least -1"),
        ("top_k", 10**10, ValueError, "top_k is 10000000000, expected -1 .. 2147483647"),
        ("top_k", 5.0, TypeError, "top_k is 5.0 of type float, expected an integer"),
        ("top_p", 0, ValueError, "top_p is 0.0, expected a finite number of more than 0 and at most 1"),
        ("top_p", 1.1, ValueError, "top_p is 1.1, expected a finite number of more than 0 and at most 1"),
        ("top_p", "x", TypeError, "top_p is 'x' of type str, expected a number"),
        ("min_p", -0.1, ValueError, "min_p is -0.1, expected a finite number of at least 0 and at most 1"),
        ("min_p", 2, ValueError, "min_p is 2.0, expected"),
        ("n", 0, ValueError, "n is 0, expected 1 .. 16384"),
        ("n", 200_000, ValueError, "n is 200000, expected 1 .. 16384"),
        ("stop", 5, TypeError, "stop is 5, expected a list of strings"),
        ("stop", ["a", ""], ValueError, r"stop\[1\] is empty; expected a text"),
        ("stop", ["a", 3], TypeError, r"stop\[1\] is 3 of type int, expected a str"),
        ("bad_words", "x", TypeError, "bad_words is 'x', expected a list of strings"),
        ("stop", ["a", "\ud800"], ValueError, r"stop\[1\] has '\\ud800' at position 0: half of a surrogate pair"),
        ("bad_words", [""], ValueError, r"bad_words\[0\] is empty; expected a text"),
        ("repetition_penalty", 0, ValueError, "repetition_penalty is 0.0, expected a finite number of at least 0.0001"),
        ("repetition_penalty", 1e5, ValueError, "repetition_penalty is 100000.0, expected a finite number of .* and at most 10000"),
        ("repetition_penalty", float("inf"), ValueError, "repetition_penalty is inf"),
        ("presence_penalty", 2.5, ValueError, "presence_penalty is 2.5, expected a finite number of at least -2 and at most 2"),
        ("frequency_penalty", -3, ValueError, "frequency_penalty is -3.0, expected a finite number of at least -2 and at most 2"),
        ("frequency_penalty", None, TypeError, "frequency_penalty is None of type NoneType, expected a number"),
        ("logit_bias", [3], TypeError, r"logit_bias is \[3\], expected a dict of token id to bias"),
        ("logit_bias", {"x": 1}, TypeError, "a token id of logit_bias is 'x' of type str, expected an integer"),
        ("logit_bias", {-1: 1}, ValueError, "a token id of logit_bias is -1, expected 0 .."),
        ("logit_bias", {10**10: 1}, ValueError, "a token id of logit_bias is 10000000000, expected 0 .. 2147483646"),
        ("logit_bias", {3: "1"}, TypeError, r"logit_bias\[3\] is '1' of type str, expected a number"),
        ("logit_bias", {3: float("nan")}, ValueError, r"logit_bias\[3\] is nan, expected a number"),
        ("allowed_token_ids", [], ValueError, "allowed_token_ids is empty; expected at least one token id, or None for all"),
        ("allowed_token_ids", [-1], ValueError, r"allowed_token_ids\[0\] is -1, expected 0 .."),
        ("allowed_token_ids", 7, TypeError, "allowed_token_ids is 7, expected a list of token ids"),
        ("logprobs", -2, ValueError, "logprobs is -2, expected at least -1"),
        ("logprobs", 10**10, ValueError, "logprobs is 10000000000, expected -1 .. 2147483647"),
        ("prompt_logprobs", 10**10, ValueError, "prompt_logprobs is 10000000000, expected -1 .. 2147483647"),
        ("logprobs", True, TypeError, "logprobs is True of type bool, expected an integer"),
        ("prompt_logprobs", 1.0, TypeError, "prompt_logprobs is 1.0 of type float, expected an integer"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_found_and_expected(field, value, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**{field: value})


def test_the_largest_values_that_are_taken_fit_the_device():
    """What is refused later ends the whole call, and with it the job that it serves."""
    most = 2**31 - 1
    integers = {"max_tokens": most, "min_tokens": most, "top_k": most, "seed": 2**63 - 1}
    numbers = {"temperature": 1e30, "top_p": 5e-324, "min_p": 5e-324, "repetition_penalty": 1e4, "logit_bias": {9: 10**400}}
    ids = {"stop_token_ids": [9], "allowed_token_ids": [9], "logprobs": 10, "prompt_logprobs": -1, "n": 2}
    maker = Maker(None, 10, 64, (1,), Defaults(), None)  # pyright: ignore[reportArgumentType]
    found = arrays_of(maker.requests(0, [3], SamplingParams(**integers, **numbers, **ids), int), 2, 64)
    assert (found.filters.top_k.tolist(), found.edits.min_tokens.tolist(), found.limit.tolist()) == ([most] * 2, [most] * 2, [64] * 2)
    assert found.seed.tolist() == [[2**32 - 1, 2**31 - 1], [0, 0]] and (found.temperature == np.float32(1e30)).all()
    assert (found.edits.bias[:, 0] == 100).all() and (found.edits.repetition == 1e4).all()


def test_the_samples_of_a_prompt_share_its_memory():
    maker = Maker(None, 10, 64, (1,), Defaults(temperature=1.0), None)  # pyright: ignore[reportArgumentType]
    samples = maker.requests(0, [3, 4], SamplingParams(n=MAX_N), lambda: 0)
    assert len(samples) == MAX_N and all(np.shares_memory(r.prompt, samples[0].prompt) for r in samples[::1000])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_new_tokens", "here it is called max_tokens$"),
        ("do_sample", "here it is called temperature, which is 0 for greedy$"),
        ("skip_special_tokens", "and needs none: texts leave special tokens out"),
        ("temprature", "the nearest is 'temperature'$"),
        ("zzz", "SamplingParams has no argument 'zzz'$"),
    ],
)
def test_a_name_of_other_engines_is_answered(name, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**{name: 1})


def test_names_of_other_engines_are_none_of_ours():
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not ours & (PARAMS_HERE.keys() | PARAMS_NEEDLESS.keys())
    assert {re.split(r"\W", here)[0] for here in PARAMS_HERE.values()} <= ours


def test_fewer_tokens_than_must_be_cannot_be_the_most():
    with pytest.raises(ValueError, match="min_tokens is 5, expected at most max_tokens, 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_values_that_mean_the_same_are_the_same():
    params = SamplingParams(
        stop="\n", top_k=-1, logit_bias={"7": 10**400, np.int64(9): -np.inf}, bad_words=["a", "b", "a"], stop_token_ids=[4, 4]
    )
    assert params == SamplingParams(stop=("\n",), top_k=0, logit_bias={7: 100.0, 9: -100.0}, bad_words=("a", "b"), stop_token_ids=(4,))
    assert SamplingParams(top_p=np.float32(0.5), presence_penalty=1).top_p == 0.5


def test_defaults_are_those_of_the_generation_config():
    assert Defaults.of({}) == Defaults()
    assert Defaults.of({"temperature": 0.7}).temperature == 0.0 and Defaults.of({"do_sample": True}).temperature == 1.0
    pocket = {"do_sample": True, "temperature": 0.7, "top_k": 64, "top_p": 0.95, "suppress_tokens": [8, 9], "eos_token_id": 1}
    assert Defaults.of(pocket) == Defaults(0.7, 64, 0.95, suppress_tokens=(8, 9))
    assert Defaults.of({"min_p": 0.1, "repetition_penalty": 1.1}) == Defaults(min_p=0.1, repetition_penalty=1.1)
    with pytest.raises(ValueError, match="top_p is 7.0, expected"):
        Defaults.of({"top_p": 7})
    with pytest.raises(TypeError, match="do_sample is 'false', expected True or False"):
        Defaults.of({"do_sample": "false"})
    assert Defaults.left_out({**pocket, "num_beams": 1, "stop_strings": None, "bad_words_ids": []}) == []
    assert Defaults.left_out({"num_beams": 4, "stop_strings": ["x"], "typical_p": 1.0}) == ["stop_strings", "num_beams"]
    assert Defaults.left_out({"min_length": 3, "watermarking_config": {"bias": 2.5}}) == ["watermarking_config", "min_length"]
    assert Defaults.left_out({"min_length": 0, "watermarking_config": None}) == []


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # pyright: ignore[reportCallIssue]


def test_a_completion_shows_itself_in_a_line():
    stats = RoundStats.of(np.array([False, True, False, False]), drafted=4, num_draft_tokens=2)
    completion = Completion("a\nb", [5, 6, 7, 1], "stop", None, [2, 3], 9, stats)
    assert repr(completion) == (r"Completion(text='a\nb', tokens=4, finish_reason='stop', prompt_tokens=2, seed=9, acceptance_length=1.50)")
    failed = dataclasses.replace(completion, finish_reason="error", error="not finite")
    assert repr(failed).endswith("acceptance_length=1.50, error='not finite')")
