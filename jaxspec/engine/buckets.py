"""The static sizes of calls. A program is compiled for a bucket, and the list of slots that it works on is padded to that size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.model.target import TargetModel

BUCKET_RATIO = 8  # between the sizes of decode calls
PREFILL_ROWS = 512  # rows of the largest prefill call at least; see `prefill_rows`
MOST_PREFILL_ROWS = 2048
# The most that a larger call does, in rows times weights that a row is multiplied with, since sequences that decode wait for it: what 512
# rows of a target of 30 billion weights do, which takes an H200 50 ms.
PREFILL_WORK = PREFILL_ROWS * 30e9
PREFILL_CHUNK = 64  # rows of each sequence in a prefill call of several sequences, or of a short one
TREE_SEQUENCES = 4  # the most that verify a tree each: with more, its rows take longer than what they bring


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes of a runner's calls."""

    slots: int  # sequences that run at a time
    max_len: int  # tokens of the longest sequence
    prefill_rows: int = PREFILL_ROWS  # of the largest prefill call

    @property
    def decode(self) -> list[int]:
        """Sequences of a decode call: 1, 8, 64, ... and the number of slots."""
        sizes = [1]
        while sizes[-1] < self.slots:
            sizes.append(min(sizes[-1] * BUCKET_RATIO, self.slots))
        return sizes

    @property
    def trees(self) -> list[int]:
        """Sequences of a decode call whose rounds have trees: 1, and 4 or the number of slots."""
        return sorted({1, min(self.slots, TREE_SEQUENCES)})

    @property
    def prefill(self) -> list[tuple[int, int]]:
        """(sequences, rows of each) of a prefill call."""
        rows, short, long = self.prefill_rows, PREFILL_CHUNK, PREFILL_ROWS
        found = [(1, short), (1, long), (long // short, short)]
        if rows > long:
            found += [(1, rows), (rows // long, long), (rows // short, short)]
        elif self.slots > 1 and self.max_len >= long > 2 * short:
            # Once the long chunk has been through two prompts, a call that they share finishes what is left of them with few idle rows.
            found.append((2, long // 2))
        return sorted({(min(size, self.slots), min(chunk, self.max_len)) for size, chunk in found})

    @property
    def admit(self) -> list[int]:
        """Requests that a call puts into slots: 1, and 8 or a quarter of the slots, since more than an eighth may come free at a time."""
        return sorted({1, min(self.slots, max(BUCKET_RATIO, self.slots // 4))})

    @property
    def fork(self) -> list[int]:
        """Copies of kept sequences that a call makes."""
        return sorted({1, min(self.slots, BUCKET_RATIO)})

    def prefill_by_worth(self, left: Sequence[int]) -> list[tuple[int, int]]:
        """The prefill buckets, those first that compute most prompt rows for what they cost. left: the rows that each prompt lacks, in the
        order in which they are served."""
        # A call reads all weights. Measured, that costs about as much as half the rows of the largest.
        beside = self.prefill_rows // 2
        return sorted(self.prefill, key=lambda bucket: -useful_rows(left, *bucket) / (bucket[0] * bucket[1] + beside))


def prefill_rows(target: TargetModel, kernels: bool) -> int:
    """Rows of the largest prefill call. A target that does little for a row gets more: with few, its call would wait for the weights, or
    for its kernels to start. target: weights or their shapes. kernels: whether attention runs in kernels; XLA's needs memory for each row.
    """
    before, of_layers = target.weights_multiplied()
    rows = PREFILL_ROWS
    while kernels and rows < MOST_PREFILL_ROWS and 2 * rows * (before + sum(of_layers)) <= PREFILL_WORK:
        rows *= 2
    return rows


def useful_rows(left: Sequence[int], size: int, chunk: int) -> int:
    """How many rows of a prefill call for `size` sequences of `chunk` rows belong to prompts, of which `left` rows each are missing."""
    return sum(min(chunk, n) for n in left[:size])


def smallest(sizes: Sequence[int], count: int) -> int:
    """The first size that holds so many. sizes: ascending."""
    return next(size for size in sizes if size >= count)


def padded(values: Sequence[Any], size: int, fill: Any = 0, dtype: Any = np.int32) -> Any:
    """The values as an array [size] of this dtype, with `fill` in the places that are left."""
    return np.asarray([*values, *[fill] * (size - len(values))], dtype)
