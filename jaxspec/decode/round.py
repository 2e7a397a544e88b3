"""What a round of drafting and verifying is compiled for."""

from __future__ import annotations

import dataclasses

from jaxspec.decode.accept import COUPLED, Rule
from jaxspec.sampling.choice import PLAIN, Needs


@dataclasses.dataclass(frozen=True)
class Round:
    """The settings of a round. Hashable, so that it can be a static argument: each one is a program of its own."""

    # K, the tokens that the drafter guesses; at most as many as the state was made for. With 0 a round decodes one token.
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

    def check(self, size: int) -> None:
        """Raises ValueError for rows that a call of so many sequences cannot use, or that the acceptance rule forbids."""
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


NO_DRAFTS = Round(0)
