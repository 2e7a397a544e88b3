"""DraftTree: which candidates of a drafter a round verifies, where it verifies more than one after a token.

A tree's shape is static. Row 0 is its root, the anchor; the other rows are its nodes, by depth, and nodes of one depth by the ranks on
the way to them. A node is a candidate of its parent: that of rank 0 is the drafter's likeliest next token, of rank 1 the second, and so
on. After SpecInfer (Miao et al. 2023, arXiv 2305.09781); a static shape by measured ranks as in Sequoia (Chen et al. 2024, arXiv
2402.12374).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

MOST_NODES = 31  # with the root, one bit of a word for each row: attention takes a row's ancestors as one
LEAST_NODES = 2  # with one there is no choice
# How often the text's next token has rank 0, 1, ... among a drafter's candidates, once all before it were right: of the assistant of the
# bundled models, halfway between greedy texts and those at temperature 1 (benchmarks/results/2026-11-22-trees.md).
RANK_RATES = (0.65, 0.13, 0.055, 0.03, 0.02)

Path = tuple[int, ...]  # of a node: the ranks of the candidates on the way to it


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """A static tree of drafts. Hashable, so that it can be a static argument; made by `of`, `default` or `tree_of`.

    parents: of each node the row of its parent, node i being row i + 1. ranks: of each node, among its parent's candidates.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> DraftTree:
        """The tree with a node at the end of each path of ranks, in any order: [[0], [1], [0, 0]] has two candidates after the anchor and
        one after the better of them.

        Raises TypeError or ValueError for what are no paths of ranks, for too many or too few nodes, and for a node without its parent or
        without the better candidates of its parent."""
        if isinstance(paths, str) or not isinstance(paths, Iterable):
            raise TypeError(f"a tree is {paths!r}; expected a list of paths of ranks, such as [[0], [1], [0, 0]]")
        found = set[Path]()
        for path in paths:
            if isinstance(path, str) or not isinstance(path, Sequence) or not path:
                raise TypeError(f"a path of the tree is {path!r}; expected a list of ranks, such as [0, 1]")
            for rank in path:
                if isinstance(rank, bool) or not isinstance(rank, int):
                    raise TypeError(f"path {list(path)} of the tree has rank {rank!r} of type {type(rank).__name__}, expected an int")
                if rank < 0:
                    raise ValueError(f"path {list(path)} of the tree has rank {rank}, expected 0 (the best candidate) or more")
            if tuple(path) in found:
                raise ValueError(f"path {list(path)} is in the tree twice; expected each node once")
            found.add(tuple(path))
        check_size(len(found))
        for path in sorted(found):
            if len(path) > 1 and path[:-1] not in found:
                raise ValueError(f"node {list(path)} of the tree has no parent: {list(path[:-1])} is missing")
            rank = path[len(path) - 1]
            if rank and (better := (*path[:-1], rank - 1)) not in found:
                raise ValueError(f"node {list(path)} of the tree is there without the better candidate {list(better)}")
        ordered = sorted(found, key=lambda path: (len(path), path))
        row = {path: i for i, path in enumerate(((), *ordered))}
        return cls(tuple(row[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))

    @classmethod
    def default(cls, nodes: int) -> DraftTree:
        """The tree of so many nodes that is most likely to have the text's next tokens, by RANK_RATES, and no deeper than pays for the
        passes of a drafter: 2 more than a quarter of its nodes. Raises ValueError for too many or too few."""
        check_size(nodes)
        deepest, chosen = nodes // 4 + 2, list[Path]()
        best: list[tuple[float, Path]] = [(-RANK_RATES[0], (0,))]
        while len(chosen) < nodes:
            chance, path = heapq.heappop(best)
            chosen.append(path)
            if len(path) < deepest:
                heapq.heappush(best, (chance * RANK_RATES[0], (*path, 0)))
            if path[-1] + 1 < len(RANK_RATES):
                sibling = (*path[:-1], path[-1] + 1)
                heapq.heappush(best, (chance / RANK_RATES[path[-1]] * RANK_RATES[sibling[-1]], sibling))
        return cls.of(chosen)

    @property
    def nodes(self) -> int:
        """N, how many drafts there are."""
        return len(self.parents)

    @property
    def rows(self) -> int:
        """N + 1: the root and the nodes."""
        return len(self.parents) + 1

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each row; the root's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """D, the most drafts that a round can accept."""
        return self.depths[-1]

    @property
    def at_depth(self) -> tuple[int, ...]:
        """How many nodes there are at depth 1, 2, ..., D."""
        return tuple(self.depths.count(depth) for depth in range(1, self.depth + 1))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of each node, the ranks of the candidates on the way to it."""
        found: list[Path] = [()]
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            found.append((*found[parent], rank))
        return tuple(found[1:])

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """The nodes of depth 1, 2, ..., D."""
        levels = []
        for depth in range(1, self.depth + 1):
            rows = [row for row in range(1, self.rows) if self.depths[row] == depth]
            parents = sorted({self.parents[row - 1] for row in rows})
            before = self.depths.index(depth - 1)  # the first row of the depth above
            levels.append(
                Level(
                    inner=tuple(parent - before for parent in parents),
                    parent=tuple(parents.index(self.parents[row - 1]) for row in rows),
                    rank=tuple(self.ranks[row - 1] for row in rows),
                )
            )
        return tuple(levels)

    @functools.cached_property
    def seen(self) -> np.ndarray:
        """Which rows each row sees: itself and its ancestors. [N + 1, N + 1] bool."""
        seen = np.eye(self.rows, dtype=bool)
        for row, parent in enumerate(self.parents, start=1):
            seen[row] |= seen[parent]
        return seen

    @functools.cached_property
    def words(self) -> tuple[int, ...]:
        """The same as one word for each row: bit j is set if it sees row j."""
        return tuple(sum(1 << int(j) for j in np.flatnonzero(row)) for row in self.seen)

    @functools.cached_property
    def before(self) -> np.ndarray:
        """On the way to each row, itself included, the row at depth 1, 2, ..., D, and 0 beyond it. [N + 1, D] int32."""
        depths = np.asarray(self.depths)
        found = np.zeros((self.rows, self.depth), np.int32)
        for row, seen in enumerate(self.seen):
            ancestors = np.flatnonzero(seen)[1:]
            found[row, depths[ancestors] - 1] = ancestors
        return found

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.depth} deep ({' '.join(map(str, self.at_depth))})"


@dataclasses.dataclass(frozen=True)
class Level:
    """The nodes of one depth. inner: which rows of the depth above have children. parent: of each node which of those it is a child of,
    and rank: its rank among the candidates there."""

    inner: tuple[int, ...]
    parent: tuple[int, ...]
    rank: tuple[int, ...]

    @property
    def width(self) -> int:
        """How many candidates a parent has at most."""
        return max(self.rank) + 1


def check_size(nodes: int) -> None:
    """Raises ValueError for a number of nodes that no tree has."""
    if not LEAST_NODES <= nodes <= MOST_NODES:
        raise ValueError(f"the tree has {nodes} nodes; expected {LEAST_NODES} .. {MOST_NODES}")


def tree_of(spec: Any) -> DraftTree:
    """The tree that a number of nodes or a list of paths asks for: see `DraftTree.default` and `DraftTree.of`. Raises TypeError or
    ValueError for anything else."""
    if isinstance(spec, DraftTree):
        return spec
    if isinstance(spec, bool):
        raise TypeError(f"tree is {spec}, expected a number of nodes or a list of paths of ranks")
    return DraftTree.default(spec) if isinstance(spec, int) else DraftTree.of(spec)
