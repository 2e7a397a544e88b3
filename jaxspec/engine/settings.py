"""The settings of an LLM, and the numbers that follow from them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jaxspec.decode.accept import COUPLED, Rule
from jaxspec.decode.round import Round, check_tree_rule
from jaxspec.decode.state import VERIFIED_ROUNDS
from jaxspec.model.draft_tree import DraftTree
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.logprobs import ring_rows
from pallas_kernels import dialect

PAGE = 64  # positions in a page
PREFIX_BYTES = 2**30  # bytes for snapshots of prompts, on each device
# Rounds of a decode call at most; it bounds how long an interrupt waits, and the state tells of no more what they verified.
STEPS = VERIFIED_ROUNDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How an LLM runs its models.

    Raises ValueError for an acceptance rule that does not fit num_draft_tokens, or for fewer pages than one sequence can need.
    """

    num_draft_tokens: int  # K, the tokens that a round guesses at most
    max_slots: int  # sequences that run at a time, over all data shards
    max_len: int  # tokens of the longest sequence, its prompt counted
    accept: Rule = COUPLED  # the acceptance rule
    attention: str = "auto"  # implementation of the target's attention and of the kernels around it
    draft_attention: str = "auto"  # implementation of the drafter's attention
    kv_dtype: Any = None  # dtype of the target's cache; None for the dtype of its weights
    kv_pages: int | None = None  # full-attention pages that all sequences of a data shard share; None for as many as they can fill
    page_size: int = PAGE  # positions in a page
    prefix_bytes: int = PREFIX_BYTES  # bytes of a device for snapshots of prompts, in slots beside those that run
    # Blocks of 128 states, and different sets of allowed tokens, of all structured outputs that a data shard holds at a time.
    structured_blocks: int = 256
    structured_rows: int = 8192
    # Whether warm-up measures what rounds cost, so that calls then choose how many tokens a round guesses, up to num_draft_tokens, and how
    # many of these it verifies. It takes effect with the rule "coupled" and in one process only.
    adaptive: bool = False
    # What the rounds of calls of at most 4 sequences guess, in place of num_draft_tokens tokens; None for no trees.
    tree: DraftTree | None = None
    insert_rows: tuple[int, ...] = ()  # of an image or a sound that calls have room for, ascending; none where prompts have neither
    seed: int = 0  # from which seeds are drawn for requests that name none
    progress: bool = True  # whether to show progress bars

    def __post_init__(self) -> None:
        self.accept.check(self.num_draft_tokens)
        if self.tree is not None:
            check_tree_rule(self.accept)
        if self.kv_pages is not None:
            check_pages(self.kv_pages, self.max_len, self.page_size)

    def of_shard(self, shards: int) -> Settings:
        """The settings of each of so many data shards: its slots, and the pages that they share, as a number."""
        slots = -(-self.max_slots // shards)
        return dataclasses.replace(self, max_slots=slots, kv_pages=self.kv_pages or slots * self.pages_for(self.max_len))

    def pages_for(self, rows: int) -> int:
        """Full-attention pages of a sequence with so many rows, the drafts of its next round among them."""
        return math.ceil(min(rows, self.max_len) / self.page_size)

    @property
    def most_accepted(self) -> int:
        """The most drafts that a round of any shape can accept."""
        return self.num_draft_tokens if self.tree is None else max(self.num_draft_tokens, self.tree.depth)

    @property
    def state_sizes(self) -> dict[str, Any]:
        """The arguments of `admission.init_state` that follow from the settings of a data shard."""
        sizes = {"max_len": self.max_len, "num_draft_tokens": self.most_accepted, "kv_dtype": self.kv_dtype}
        return {**sizes, "page_size": self.page_size, "full_pages": self.kv_pages}

    def round(self, needs: Needs, num_draft_tokens: int | None = None, rows: int | None = None, tree: DraftTree | None = None) -> Round:
        """What a call is compiled for whose requests have these needs and whose rounds guess so many tokens, by default num_draft_tokens.
        rows, tree: see `Round`."""
        count = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        return Round(count, self.accept, needs, self.attention, self.draft_attention, rows, tree)

    def steps_for(self, needs: Needs, steps: int, unread: int = 1) -> int:
        """How many of these rounds a call may run, so that what it tells of is read before it is overwritten. unread: calls that may be
        under way at a time; if there are several, a prompt's first token may come beside those of their rounds."""
        most = self.most_accepted
        told = STEPS if needs.logprobs is None else min(STEPS, ring_rows(most) // (most + 1))  # rounds that a call can tell of
        return min(steps, told if unread == 1 else (told - 1) // unread)


def in_kernels(attention: str) -> bool:
    """Whether attention of this implementation, and what surrounds it, runs in kernels on the current device."""
    return attention != "xla" and dialect.obstacle() is None


def adaptive_obstacle(rule: Rule, num_draft_tokens: int) -> str | None:
    """Why calls cannot choose what rounds guess and verify, or None."""
    if not num_draft_tokens:
        return "no tokens are drafted; expected a drafter"
    if rule.name != COUPLED.name:
        return f"accept is {rule.name!r}, with which the text would depend on it; expected {COUPLED.name!r}"
    if jax.process_count() > 1:  # each measures other times
        return f"there are {jax.process_count()} processes, which could not choose alike; expected one"
    return None


def check_pages(kv_pages: int, max_len: int, page_size: int = PAGE) -> None:
    """Raises ValueError for fewer pages than one sequence can need."""
    least = math.ceil(max_len / page_size)
    if kv_pages < least:
        raise ValueError(
            f"kv_pages is {kv_pages}; one sequence of max_len {max_len} takes {least} pages of {page_size} tokens: expected at least as "
            "many, or a smaller max_len"
        )
