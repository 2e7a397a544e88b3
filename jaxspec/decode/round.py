"""What a round of drafting and verifying is compiled for."""

from __future__ import annotations

import dataclasses

from jaxspec.decode.accept import COUPLED, Rule
from jaxspec.drafters.base import Drafter
from jaxspec.model.draft_tree import DraftTree
from jaxspec.sampling.choice import PLAIN, Needs


@dataclasses.dataclass(frozen=True)
class Round:
    """The settings of a round. Hashable, so that it can be a static argument: each one is a program of its own."""

    # K, the tokens that the drafter guesses one after the other; at most as many as the state was made for. With 0 a round decodes one
    # token.
    num_draft_tokens: int
    # By which rule guesses become tokens.
    accept: Rule = COUPLED
    # What the requests of the call need beside a temperature; what it leaves out is not applied.
    needs: Needs = PLAIN
    # The implementation of the target's attention and of the kernels around it: "xla", "triton", or "auto" for what the device runs.
    attention: str = "auto"
    # The same for the drafter. With "auto" a drafter that reads the target's cache takes `attention`, and any other chooses for itself.
    draft_attention: str = "auto"
    # The rows of the target's pass for all sequences of a call together, at least one for each: see `verification`. None for K + 1 of each.
    rows: int | None = None
    # The drafts, where they are a tree of which the round verifies every node; K is its depth then. None for a chain of K drafts.
    tree: DraftTree | None = None

    @property
    def drafts(self) -> int:
        """Tokens that the drafter guesses, on all paths."""
        return self.num_draft_tokens if self.tree is None else self.tree.nodes

    def tells(self, drafter: Drafter) -> bool:
        """Whether the state tells of each round how many drafts it verified and how many of them were guesses: where that is not always
        K."""
        return self.rows is not None or self.abstains(drafter)

    def abstains(self, drafter: Drafter) -> bool:
        """Whether some of the drafts that it verifies may be no guesses."""
        return self.tree is None and self.num_draft_tokens > 0 and getattr(drafter, "abstains", False)

    def check(self, size: int) -> None:
        """Raises ValueError for rows that a call of so many sequences cannot use or that the acceptance rule forbids, and for what a round
        with a tree does not do."""
        if self.tree is not None:
            check_tree_rule(self.accept)
            if self.rows is not None or self.num_draft_tokens != self.tree.depth:
                raise ValueError(
                    f"the round has a tree that is {self.tree.depth} deep, {self.num_draft_tokens} draft tokens and rows={self.rows}; "
                    "expected its depth, and None"
                )
        if self.rows is None:
            return
        if not self.accept.shares_noise:
            raise ValueError(
                f"rows is {self.rows} and the acceptance rule is {self.accept.name!r}, which needs a row for each draft; expected 'coupled'"
            )
        most = size * (self.num_draft_tokens + 1)
        if not size <= self.rows <= most:
            raise ValueError(
                f"rows is {self.rows} for {size} sequences of {self.num_draft_tokens} drafts; expected {size} .. {most}: one for each "
                "sequence, and at most one more for each draft"
            )


def check_tree_rule(rule: Rule) -> None:
    """Raises ValueError for an acceptance rule that says nothing of trees."""
    if rule.name != COUPLED.name:
        raise ValueError(
            f"the acceptance rule is {rule.name!r}, which keeps drafts of a chain; with a tree of drafts expected {COUPLED.name!r}"
        )


NO_DRAFTS = Round(0)
