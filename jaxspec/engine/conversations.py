"""Conversations as prompts: what a chat template makes of messages, with their media, and what the next turn begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.checks import same_kind
from jaxspec.engine.fetches import Fetches
from jaxspec.engine.inserts import Tower, taken_out
from jaxspec.engine.intake import Prompt
from jaxspec.text import TemplateOptions, Tokenizer

NEXT = ({"role": "assistant", "content": "x"}, {"role": "user", "content": "x"})  # any, to see how a template writes a history

Messages = Sequence[Mapping[str, Any]]


def are_several(messages: Any) -> bool:
    """Whether these are several conversations."""
    return isinstance(messages, list | tuple) and len(messages) > 0 and isinstance(messages[0], list | tuple)


@dataclasses.dataclass(frozen=True)
class Conversations:
    """Makes prompts of conversations. Everywhere, thinking is what the template gets as enable_thinking, and options are its other ones."""

    tokenizer: Tokenizer
    kinds: Sequence[str]  # of the media that messages may have
    towers: Mapping[str, Tower]  # look at them, by kind; none once the LLM is closed

    def ids(self, messages: Messages, thinking: bool, options: TemplateOptions) -> list[int]:
        """The token ids of a conversation up to the model's turn. An image is one token there, and so is a sound."""
        return self.tokenizer.conversation(taken_out(messages, self.kinds)[0], options, thinking, self.kinds)

    def prompt(self, messages: Messages, thinking: bool, options: TemplateOptions) -> Prompt:
        """A conversation as a prompt with its images, sounds and videos, and the tools that an answer may call."""
        ids, more = self.ids(messages, thinking, options), dict[str, Any]()
        if tools := options.get("tools"):
            more["tools"] = tools
        if self.towers:
            with Fetches(self.towers) as fetches:
                given = taken_out(fetches.begin(messages), self.kinds)[1]
                media = {kind: list(map(self.towers[kind].source, some)) for kind, some in given.items() if some}
            more |= {"multi_modal_data": media} if media else {}
        return {"prompt_token_ids": ids, **more} if more else ids

    def turn(self, messages: Messages, thinking: bool, options: TemplateOptions) -> tuple[dict[str, Any], int]:
        """A conversation's prompt with its text, and how many of its tokens the next turn begins with. These are all of them, but where the
        template opens the model's turn with what it leaves out of a history, such as an empty thought."""
        given: Any = self.prompt(messages, thinking, options)
        asked = given if isinstance(given, dict) else {"prompt_token_ids": given}
        ids = asked["prompt_token_ids"]
        shown: dict[str, Any] = {**asked, "prompt": self.tokenizer.decode(ids, special=True)}
        if not options.get("add_generation_prompt", True):
            return shown, len(ids)
        later: TemplateOptions = {**options, "add_generation_prompt": False}
        try:
            told = self.ids([*messages, *NEXT], thinking, later)
        except ValueError:  # a template that refuses such turns
            return shown, len(ids)
        return shown, next((i for i, (one, other) in enumerate(zip(ids, told, strict=False)) if one != other), min(len(ids), len(told)))

    def turns(
        self, messages: Messages | Sequence[Messages], thinking: bool, options: TemplateOptions
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """The same of one conversation or of each of several. Raises TypeError or ValueError for what cannot be read, with the number of
        the conversation if there are several."""
        several, prompts, keep = are_several(messages), list[dict[str, Any]](), list[int]()
        conversations: Any = messages if several else [messages]
        with Fetches(self.towers) as fetches:
            for i, conversation in enumerate(fetches.ahead(conversations)):
                try:
                    prompt, repeated = self.turn(conversation, thinking, options)
                except (TypeError, ValueError) as error:
                    if not several:
                        raise
                    raise same_kind(error, f"conversation {i}: {error}") from error
                prompts.append(prompt)
                keep.append(repeated)
        return prompts, keep
