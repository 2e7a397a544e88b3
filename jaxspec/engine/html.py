"""What notebooks show of an LLM and of a Completion: HTML whose tints work on light and on dark pages."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from jaxspec.engine.stats import RoundStats, Stats
from jaxspec.text import IncrementalDetokenizer, Tokenizer
from jaxspec.trees import weight_count

MAX_TOKENS = 2000  # tokens of an output that are shown; many more make a page slow
MAX_PROMPT_TOKENS = 100  # tokens of a prompt that are shown, its last ones
TINTS = {"draft": "rgba(46,160,67,.30)", "mixed": "rgba(46,160,67,.15)", "target": "rgba(128,128,128,.14)", "prompt": "transparent"}
TITLES = {"draft": "an accepted draft", "mixed": "partly an accepted draft", "target": "the target's own choice", "prompt": "prompt"}
LABEL = "border:1px solid;border-radius:3px;padding:0 .2em;font-size:85%;opacity:.75"
KEPT = "\n\t\u200c\u200d"  # unprintable, yet text: line breaks, tabs and what joins the parts of an emoji


class Shown(Protocol):
    """What is read of a Completion."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def stats(self) -> RoundStats: ...
    @property
    def error(self) -> str | None: ...


class Loaded(Protocol):
    """What is read of an LLM."""

    @property
    def target(self) -> Any: ...
    @property
    def drafter(self) -> Any: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def max_slots(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def stats(self) -> Stats: ...


class Span(NamedTuple):
    """The fewest tokens that make up whole characters."""

    text: str  # theirs; if special, the name of the token
    token_ids: tuple[int, ...]
    kind: str  # "draft" if all of them were drafts, "target" if none was, else "mixed"; or "prompt"
    special: bool = False  # whether it is one token that has no text


def spans(tokenizer: Tokenizer, token_ids: Sequence[int], from_draft: Sequence[bool] | None = None) -> Iterator[Span]:
    """Cuts a sequence into as many spans as its characters allow. The texts of those that are not special make up what
    `tokenizer.decode` gives for it.

    from_draft: for each token, whether it was an accepted draft; None for a prompt. A character whose bytes are spread over several
    tokens is one span of them all.
    """
    pieces, held = IncrementalDetokenizer(tokenizer), list[int]()

    def kind(places: Sequence[int]) -> str:
        if from_draft is None:
            return "prompt"
        flags = {bool(from_draft[i]) for i in places}
        return "mixed" if len(flags) == 2 else "draft" if True in flags else "target"

    def span(text: str, places: Sequence[int], special: bool = False) -> Span:
        return Span(text, tuple(int(token_ids[i]) for i in places), kind(places), special)

    for i, token in enumerate(map(int, token_ids)):
        if not tokenizer.has_text(token):
            yield span(tokenizer.token_text(token) or f"id {token}", [i], special=True)
            continue
        piece = pieces.push([token])
        before = tokenizer.decode([int(token_ids[j]) for j in held]) if held else ""
        if before and token not in tokenizer.byte_ids and piece.startswith(before) and len(piece) > len(before):
            yield span(before, held)  # bytes of whole characters, which only the next token showed to be whole
            piece, held = piece[len(before) :], []
        held.append(i)
        if piece:
            yield span(piece, held)
            held = []
    if held:
        yield span(pieces.flush(), held)


def completion_html(completion: Shown, tokenizer: Tokenizer | None) -> str:
    """The end of the prompt and the output, token by token, accepted drafts shaded; without a tokenizer, the text alone."""
    stats, new = completion.stats, len(completion.token_ids)
    facts = [f"{new} tokens", f"finish_reason {completion.finish_reason!r}", f"seed {completion.seed}"]
    if completion.error is not None:
        facts.append(html.escape(completion.error))
    if stats.drafted:
        facts.append(f"{stats.accepted} of {stats.drafted} drafts accepted, {stats.acceptance_length:.2f} tokens a step")
    if tokenizer is None:
        body = f"<span>{html.escape(completion.text)}</span>"  # a line break right behind <pre> would be dropped
    else:
        prompt = completion.prompt_token_ids[-MAX_PROMPT_TOKENS:]
        body = "…" if len(prompt) < len(completion.prompt_token_ids) else ""
        body += "".join(_span(span) for span in spans(tokenizer, prompt))
        body += "".join(_span(span) for span in spans(tokenizer, completion.token_ids[:MAX_TOKENS], stats.from_draft))
        body += f"… {new - MAX_TOKENS} more tokens" if new > MAX_TOKENS else ""
        facts += [f'<span style="background:{TINTS[kind]}">{TITLES[kind]}</span>' for kind in ("draft", "target") if stats.drafted]
    style = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5;margin:0"
    # A page that takes styles away keeps the line breaks of <pre> and shows <mark>.
    return f'<pre style="{style}">{body}</pre><div style="font-size:85%;opacity:.8;margin-top:.4em">{" · ".join(facts)}</div>'


def llm_html(llm: Loaded, name: str) -> str:
    """What an LLM is made of, and what it has done so far."""
    stats = llm.stats
    rows: list[tuple[str, Any]] = [
        ("target", f"{name} ({_millions(llm.target)}, {llm.target.dtype})"),
        ("drafter", f"{type(llm.drafter).__name__} ({_millions(llm.drafter)}), {llm.num_draft_tokens} drafts a step"),
        ("slots", f"{llm.max_slots} of {llm.max_len} tokens"),
        ("device", ", ".join(sorted({device.device_kind for device in jax.tree.leaves(llm.target)[0].devices()}))),
        ("memory", f"weights {stats.weight_bytes / 2**20:.1f} MiB, state {stats.state_bytes / 2**20:.1f} MiB"),
    ]
    if stats.steps:
        rows.append(("so far", f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} a second, compiling excluded"))
        rows.append(("acceptance", f"{stats.acceptance_length:.2f} tokens a step"))
    cells = "".join(f'<tr><th style="text-align:left">{key}</th><td>{html.escape(str(value))}</td></tr>' for key, value in rows)
    return f"<table>{cells}</table>"


def _span(span: Span) -> str:
    ids = f"token{'s' if len(span.token_ids) > 1 else ''} {', '.join(map(str, span.token_ids))}"
    tag, style = "span", f"background:{TINTS[span.kind]}"
    if span.kind == "prompt":
        style += ";opacity:.65"
    elif span.kind == "draft":
        tag, style = "mark", f"{style};color:inherit"
    text = html.escape(_visible(span.text))
    if span.special:
        text = f'<span style="{LABEL}">{text}</span>'
    # A line break has no width of its own to shade. The mark is left out when the text is copied.
    text = text.replace("\n", '<span style="user-select:none;opacity:.45">⏎</span>\n') if span.kind != "prompt" else text
    return f'<{tag} title="{ids}: {TITLES[span.kind]}" style="{style}">{text}</{tag}>'


def _visible(text: str) -> str:
    """With escapes for control characters and the like, which would hide or reorder what is around them."""
    return "".join(
        c if c.isprintable() or c in KEPT or (c.isspace() and ord(c) > 127) else c.encode("unicode_escape").decode() for c in text
    )


def _millions(tree: Any) -> str:
    return f"{weight_count(tree) / 1e6:.1f} million parameters"
