"""SamplingParams: what it takes, what it refuses and with which words."""

import dataclasses

import numpy as np
import pytest

from jaxspec.params import Completion, SamplingParams
from jaxspec.stats import RoundStats


def test_values_are_kept_as_plain_python_numbers():
    params = SamplingParams(max_tokens=np.int32(7), temperature=np.float32(0.5), seed=np.int64(2**62), stop_token_ids=np.array([3, 4]))
    assert params == SamplingParams(max_tokens=7, temperature=0.5, seed=2**62, stop_token_ids=[3, 4])
    assert [type(params.max_tokens), type(params.temperature), type(params.seed), type(params.stop_token_ids)] == [int, float, int, tuple]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("max_tokens", 0, ValueError, "max_tokens is 0, expected at least 1"),
        ("max_tokens", 2.0, TypeError, "max_tokens is 2.0 of type float, expected an integer"),
        ("max_tokens", True, TypeError, "max_tokens is True of type bool, expected an integer"),
        ("temperature", -0.1, ValueError, "temperature is -0.1, expected a finite number of at least 0"),
        ("temperature", float("nan"), ValueError, "temperature is nan"),
        ("temperature", float("inf"), ValueError, "temperature is inf"),
        ("temperature", 10**400, ValueError, "temperature is inf"),
        ("temperature", 1e39, ValueError, "temperature is 1e\\+39"),
        ("temperature", "1", TypeError, "temperature is '1' of type str, expected a number"),
        ("temperature", False, TypeError, "temperature is False of type bool, expected a number"),
        ("seed", -1, ValueError, "seed is -1, expected 0 .. 9223372036854775807"),
        ("seed", 2**63, ValueError, "seed is 9223372036854775808, expected 0 .. 9223372036854775807"),
        ("seed", 1.5, TypeError, "seed is 1.5 of type float, expected an integer"),
        ("stop_token_ids", 5, TypeError, "stop_token_ids is 5, expected a list of token ids"),
        ("stop_token_ids", "56", TypeError, "stop_token_ids is '56', expected a list of token ids"),
        ("stop_token_ids", None, TypeError, "stop_token_ids is None, expected a list of token ids"),
        ("stop_token_ids", [1, -2], ValueError, r"stop_token_ids\[1\] is -2, expected 0 .."),
        ("stop_token_ids", [1, "2"], TypeError, r"stop_token_ids\[1\] is '2' of type str, expected an integer"),
        ("ignore_eos", 1, TypeError, "ignore_eos is 1, expected True or False"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_found_and_expected(field, value, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**{field: value})


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # pyright: ignore[reportCallIssue]


def test_a_completion_shows_itself_in_a_line():
    stats = RoundStats.of(np.array([False, True, False, False]), drafted=4, num_draft_tokens=2)
    completion = Completion("a\nb", [5, 6, 7, 1], "stop", None, [2, 3], 9, stats)
    assert repr(completion) == (r"Completion(text='a\nb', tokens=4, finish_reason='stop', prompt_tokens=2, seed=9, acceptance_length=1.50)")
