"""vLLM's functions that take texts of Gemma 4 apart, under their names here."""

import pytest

from jaxspec.vllm.reasoning.gemma4_utils import parse_thinking_output
from jaxspec.vllm.tool_parsers.gemma4_utils import has_tool_response_tag, parse_tool_calls


@pytest.mark.parametrize(
    ("text", "calls", "strict"),
    [
        ('So.<|tool_call>call:f{a:<|"|>x, y<|"|>,n:3}<tool_call|><|tool_call>call:g{}<tool_call|><|tool_response>', 2, 2),
        ("<|tool_call>call:f{a:'x, y', n=3}<turn|>", 1, 1),
        ('<call>f{"a": "x, y", "n": 3}', 1, 0),
        ('So.\ncall:f{a:"x, y",n:3}<eos>', 1, 0),
        ("I call:f", 0, 0),
        ("", 0, 0),
    ],
)
def test_calls_are_found_in_a_text(text, calls, strict):
    found = [{"name": "f", "arguments": {"a": "x, y", "n": 3}}, {"name": "g", "arguments": {}}]
    assert parse_tool_calls(text) == found[:calls] and parse_tool_calls(text, strict=True) == found[:strict]


def test_a_text_says_whether_it_waits_for_a_result():
    assert has_tool_response_tag("<|tool_call>call:f{}<tool_call|><|tool_response>\n")
    assert not has_tool_response_tag("<|tool_call>call:f{}<tool_call|><eos>")


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<|channel>thought\n Long.\n<channel|> Short. <turn|><eos>", "Long.", "Short."),
        ("thought\nLong.<channel|>Short.", "Long.", "Short."),
        ("<|channel>thought\n<channel|>Short.", "", "Short."),
        ("thought\nShort.<turn|>", None, "Short."),
        ("A thought\nis short.", None, "A thought\nis short."),
    ],
)
def test_thoughts_are_taken_out_of_a_text(text, thinking, answer):
    assert parse_thinking_output(text) == {"thinking": thinking, "answer": answer}
