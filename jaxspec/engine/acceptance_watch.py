"""A watch over acceptance. A drafter that does not get the inputs it was trained with costs time but changes no text, so nothing else shows
the mistake.

Such a drafter can only guess frequent tokens. The bundled assistant's first draft is accepted in 50 to 70 of 100 rounds on code; in 11 to
15 if its two inputs are exchanged or its embedding is scaled otherwise; in none with random weights. For correct drafters the lowest
reported figure, on the hardest text (JSON), is 25. So the watch warns, once, when what the last requests had accepted would have a
probability below 1 in 1,000 if the first draft were accepted in one of five rounds.
"""

from __future__ import annotations

import collections
import math
import warnings

from jaxspec.decode.accept import Rule

ROUNDS = 500  # the last requests that together have so many rounds are looked at
CHANCE = 1 / 5  # a drafter that is wired as it should be has its first draft accepted in at least this share of rounds
SURE = 1e-3  # the probability, under CHANCE, of so few accepted drafts below which the watch warns
WARMEST = 1.0  # requests of a higher temperature are ignored: no drafter can follow their text


class AcceptanceWarning(UserWarning):
    """Hardly any draft is accepted. An LLM warns once: what may be the reason, the message says."""


class Watch:
    """Adds up what requests report, and warns once. It ignores a drafter that is not `watched`, such as a lookup, and acceptance at
    given rates."""

    def __init__(self, drafter: object, accept: Rule):
        self._drafter = type(drafter).__name__
        self._on = getattr(drafter, "watched", True) and accept.name != "synthetic"
        self._last: collections.deque[tuple[int, int]] = collections.deque()
        self._rounds = self._kept = 0

    def see(self, rounds: int, kept: int, temperature: float) -> None:
        """Takes in one request. rounds: those that drafted anything. kept: those of them whose first draft was accepted."""
        if not self._on or not rounds or temperature > WARMEST:
            return
        self._last.append((rounds, kept))
        self._rounds, self._kept = self._rounds + rounds, self._kept + kept
        while self._rounds - self._last[0][0] >= ROUNDS:
            oldest = self._last.popleft()
            self._rounds, self._kept = self._rounds - oldest[0], self._kept - oldest[1]
        few = self._kept < CHANCE * self._rounds  # else the probability is a half or more, and need not be computed for each request
        if few and self._rounds >= ROUNDS and at_most(self._kept, self._rounds, CHANCE) < SURE:
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
