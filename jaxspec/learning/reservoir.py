"""Recent texts to learn from."""

from __future__ import annotations

import numpy as np

from jaxspec.learning.losses import Batch


class Reservoir:
    """Some texts of those that came, recent ones more likely than old ones: every new text takes the place of one at random, so that a
    text of `size` texts ago is still there with probability 1/e (biased reservoir sampling: Aggarwal, "On Biased Reservoir Sampling in the
    Presence of Stream Evolution", VLDB 2006). So an odd stretch fades, and does not drown the rest.
    """

    def __init__(self, size: int, seed: int):
        self.size, self._seed = size, seed
        self._texts: list[tuple[np.ndarray, int]] = []  # ids, and how many of them were given
        self._places = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, ids: np.ndarray, given: int) -> None:
        """Takes in a text. ids: [n] int32. given: how many of them are its prompt."""
        if len(self._texts) < self.size:
            self._texts.append((ids, given))
        else:
            self._texts[int(self._places.integers(self.size))] = ids, given

    def batch(self, step: int, count: int, length: int) -> Batch:
        """`count` texts at random, none twice where there are enough, as rows of `length` tokens. Of a longer text, a part that holds some
        of what was written. The step determines the choice."""
        rng = np.random.default_rng([self._seed, step])
        ids = np.zeros((count, length), np.int32)
        first, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for row, i in enumerate(rng.choice(len(self._texts), count, replace=count > len(self._texts))):
            text, given = self._texts[i]
            last = max(len(text) - length, 0)
            start = int(rng.integers(min(max(given - length // 2, 0), last), last + 1))
            part = text[start : start + length]
            ids[row, : len(part)] = part
            first[row], lengths[row] = max(given - start, 0), len(part)
        return Batch(ids, first, lengths)
