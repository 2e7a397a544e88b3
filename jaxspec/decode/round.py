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


NO_DRAFTS = Round(0)
