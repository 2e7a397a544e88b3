"""A watch over acceptance: a drafter that is loaded but not wired as it was trained costs time and changes no text, so that nothing else
would tell.

Without what it was trained on a drafter is left with what frequent tokens give it. Of the bundled assistant, whose first draft is
accepted in 50 to 70 of 100 rounds of code, 11 to 15 are left with its two inputs exchanged or its embedding at another scale, and none
with random weights. Well wired drafters have 25 and more on the hardest text that is reported of them (JSON). So the watch warns, once,
when the first drafts of the last requests make it unlikely (1 to 1,000) that they are accepted in one of five rounds.
"""

from __future__ import annotations

import collections
import math
import warnings

from jaxspec.decode.accept import Rule

ROUNDS = 500  # the last requests that together have as many
CHANCE = 1 / 5
SURE = 1e-3
WARMEST = 1.0  # above this temperature text wanders off to where no drafter can follow


class AcceptanceWarning(UserWarning):
    """Hardly any draft is accepted."""


class Watch:
    """Adds up what requests report, and warns once. It looks at nothing of a drafter that is not `watched`, such as a lookup, and nothing
    of acceptance at given rates."""

    def __init__(self, drafter: object, accept: Rule):
        self._drafter = type(drafter).__name__
        self._on = getattr(drafter, "watched", True) and accept.name != "synthetic"
        self._last: collections.deque[tuple[int, int]] = collections.deque()
        self._rounds = self._kept = 0

    def see(self, rounds: int, kept: int, temperature: float) -> None:
        """Takes in one request: its rounds that drafted anything, of how many of them the first draft was accepted, and its temperature."""
        if not self._on or not rounds or temperature > WARMEST:
            return
        self._last.append((rounds, kept))
        self._rounds, self._kept = self._rounds + rounds, self._kept + kept
        while self._rounds - self._last[0][0] >= ROUNDS:
            oldest = self._last.popleft()
            self._rounds, self._kept = self._rounds - oldest[0], self._kept - oldest[1]
        if self._rounds >= ROUNDS and at_most(self._kept, self._rounds, CHANCE) < SURE:
            self._on = False
            warnings.warn(
                f"the first draft was accepted in {self._kept} of the last {self._rounds} rounds: the drafter {self._drafter} is near "
                "chance, so drafting costs time and saves none. Likely causes: the drafter was made for another target or for another "
                "fine-tuning of this one; its hidden states are taken from other layers than in training, or its embeddings scaled "
                "otherwise (see its config.json); its weights are not trained or damaged; or the text is unlike all that it was trained "
                "on. Outputs are right all the same; num_draft_tokens=0 or drafter=None makes them faster",
                AcceptanceWarning,
                stacklevel=2,
            )


def at_most(count: int, trials: int, chance: float) -> float:
    """The probability that at most `count` of so many trials succeed."""
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(i + 1)
        - math.lgamma(trials - i + 1)
        + i * math.log(chance)
        + (trials - i) * math.log1p(-chance)
        for i in range(count + 1)
    )
    return min(math.fsum(map(math.exp, logs)), 1.0)
