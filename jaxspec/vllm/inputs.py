"""Prompts as dicts."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: its text, which results repeat."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
