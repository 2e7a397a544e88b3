"""The static sizes of calls. A program is compiled for a bucket, and the list of slots that it works on is padded to that size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.model.layer_spec import SLIDING
from jaxspec.model.paged_kv import PagedKV, has_room, page_size_of
from jaxspec.model.target import TargetModel, last_row_layer

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
    # Up to which position a call may compute several parts of PREFILL_CHUNK rows of a prompt; 0 where it computes one part of each.
    parts_end: int = 0

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
        elif self.slots > 1 and self.max_len >= long > 2 * short and not self.parts_end:
            # Once the long chunk has been through two prompts, a call that they share finishes what is left of them with few idle rows.
            found.append((2, long // 2))

        def size_of(size: int, chunk: int) -> int:
            each = max(min(self.parts_end, self.max_len) // chunk, 1) if chunk == short else 1
            return min(size, self.slots * each if self.slots > 1 else 1)

        return sorted({(size_of(size, chunk), min(chunk, self.max_len)) for size, chunk in found})

    def within(self, target: TargetModel, drafter: Any) -> list[tuple[int, int]]:
        """(sequences, rows of each) of calls for rows of long prompts before their ends: the largest of one sequence, if that `spares`
        something."""
        largest = [chunk for size, chunk in self.prefill if size == 1][-1:]
        return [(1, chunk) for chunk in largest if spares(target, drafter) and chunk < self.max_len - 1]

    def inserts(self, rows: int) -> list[tuple[int, int]]:
        """(sequences, rows of each) of a prefill call with an insert of each sequence, of `rows` rows at most."""
        chunk = min(insert_chunk(rows), self.max_len)
        return sorted({(1, chunk), (max(min(self.prefill_rows // chunk, self.slots), 1), chunk)})

    @property
    def admit(self) -> list[int]:
        """Requests that a call puts into slots: 1, and 8 or a quarter of the slots, since more than an eighth may come free at a time."""
        return sorted({1, min(self.slots, max(BUCKET_RATIO, self.slots // 4))})

    @property
    def fork(self) -> list[int]:
        """Copies of kept sequences that a call makes."""
        return sorted({1, min(self.slots, BUCKET_RATIO)})

    def prefill_by_worth(self, left: Sequence[int], computed: Sequence[int]) -> list[tuple[int, int]]:
        """The prefill buckets, those first that compute most prompt rows for what they cost. left: the rows that each prompt lacks, in the
        order in which they are served. computed: those that it has."""
        # A call reads all weights. Measured, that costs about as much as half the rows of the largest.
        beside = self.prefill_rows // 2

        def worth(bucket: tuple[int, int]) -> float:
            return sum(self.shared_out(left, computed, *bucket)) / (bucket[0] * bucket[1] + beside)

        return sorted(self.prefill, key=worth, reverse=True)

    def shared_out(self, left: Sequence[int], computed: Sequence[int], size: int, chunk: int) -> list[int]:
        """How many rows of each of the first prompts a prefill call with `size` parts of `chunk` rows computes. left, computed: as for
        `prefill_by_worth`."""
        shares = list[int]()
        for missing, begin in zip(left, computed, strict=True):
            if not size:
                break
            most = (self.parts_end - begin) // chunk if chunk == PREFILL_CHUNK else 1
            parts = min(max(-(-missing // chunk), 1), max(most, 1), size)
            shares.append(min(missing, parts * chunk))
            size -= parts
        return shares


def spares(target: TargetModel, drafter: Any) -> bool:
    """Whether a call for rows before a prompt's end can leave out what comes after the last K and V: neither the taps nor the drafter's
    `observe` need it."""
    return last_row_layer(target.config, drafter.taps) < target.config.num_hidden_layers and getattr(drafter, "takes_parts", False)


def insert_chunk(insert_rows: int) -> int:
    """Rows of a sequence in a prefill call with an insert, which has at most so many: there is room for a question about it."""
    return insert_rows + PREFILL_CHUNK


def prefill_rows(target: TargetModel, kernels: bool) -> int:
    """Rows of the largest prefill call. A target that does little for a row gets more: with few, its call would wait for the weights, or
    for its kernels to start. target: weights or their shapes. kernels: whether attention runs in kernels; XLA's needs memory for each row.
    """
    before, of_layers = target.weights_multiplied()
    rows = PREFILL_ROWS
    while kernels and rows < MOST_PREFILL_ROWS and 2 * rows * (before + sum(of_layers)) <= PREFILL_WORK:
        rows *= 2
    return rows


def parts_end(target: TargetModel, drafter: Any, state: Any) -> int:
    """See `Buckets`: no ring may come round while a call computes several parts of a prompt, neither of the target's cache nor of one that
    the drafter keeps. state: of slots, whose shapes alone count."""
    if not getattr(drafter, "takes_parts", False):
        return 0
    if not all(has_room(state.cache, spec, PREFILL_CHUNK) for spec in target.config.layers):
        return 0
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, PagedKV))
    caches = [part for part in parts if isinstance(part, PagedKV)]
    rings = [part.tables[SLIDING].shape[1] * page_size_of(part) for part in caches if SLIDING in part.kinds]
    return min(rings, default=state.tokens.shape[1])


def smallest(sizes: Sequence[int], count: int) -> int:
    """The first size that holds so many. sizes: ascending."""
    return next(size for size in sizes if size >= count)


def padded(values: Sequence[Any], size: int, fill: Any = 0, dtype: Any = np.int32) -> Any:
    """The values as an array [size] of this dtype, with `fill` in the places that are left."""
    return np.asarray([*values, *[fill] * (size - len(values))], dtype)
