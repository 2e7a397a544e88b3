"""Trees of drafts: their rows, and what is no tree."""

import numpy as np
import pytest

from jaxspec.model.draft_tree import DraftTree, Level, tree_of

SMALL = DraftTree.of([[1, 0], [0], [0, 0], [1], [0, 1], [0, 0, 0]])


def test_rows_are_by_depth_and_rank():
    assert SMALL.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert SMALL.parents == (0, 0, 1, 1, 2, 3) and SMALL.ranks == (0, 1, 0, 1, 0, 0)
    assert SMALL.depths == (0, 1, 1, 2, 2, 2, 3) and SMALL.at_depth == (2, 3, 1)
    assert (SMALL.nodes, SMALL.rows, SMALL.depth, str(SMALL)) == (6, 7, 3, "6 nodes, 3 deep (2 3 1)")


def test_a_row_sees_itself_and_its_ancestors():
    assert [np.flatnonzero(row).tolist() for row in SMALL.seen] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6]]
    assert SMALL.before.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [1, 3, 0], [1, 4, 0], [2, 5, 0], [1, 3, 6]]
    assert SMALL.words == (0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1001011)


def test_levels_say_whose_candidates_nodes_are():
    assert SMALL.levels == (Level((0,), (0, 0), (0, 1)), Level((0, 1), (0, 0, 1), (0, 1, 0)), Level((0,), (0,), (0,)))
    assert [level.width for level in SMALL.levels] == [2, 2, 1]


@pytest.mark.parametrize("nodes", range(2, 32))
def test_default_trees(nodes):
    """As many nodes as asked for, each with its parent and the better candidates, and each better one with at least as many below it."""
    tree = DraftTree.default(nodes)
    assert tree.nodes == nodes and tree.depth <= nodes // 4 + 2 and tree_of(nodes) == tree == DraftTree.of(tree.paths) == tree_of(tree)
    below = {path: sum(other[: len(path)] == path for other in tree.paths) for path in tree.paths}
    for path in tree.paths:
        assert path[:-1] in below or len(path) == 1
        assert not path[-1] or below[(*path[:-1], path[-1] - 1)] >= below[path]


def test_a_tree_is_told_by_its_nodes():
    assert hash(SMALL) == hash(DraftTree.of(SMALL.paths)) and SMALL != DraftTree.default(7)
    assert tree_of([(0,), (0, 0)]) == DraftTree((0, 1), (0, 0))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (1, ValueError, "the tree has 1 nodes; expected 2 .. 31"),
        (32, ValueError, "the tree has 32 nodes; expected 2 .. 31"),
        ([[0]], ValueError, "the tree has 1 nodes"),
        (True, TypeError, "tree is True, expected a number of nodes or a list of paths"),
        ("16", TypeError, "a tree is '16'; expected a list of paths of ranks, such as"),
        (2.5, TypeError, "a tree is 2.5; expected"),
        ([0, 1], TypeError, r"a path of the tree is 0; expected a list of ranks, such as \[0, 1\]"),
        ([[0], []], TypeError, r"a path of the tree is \[\]"),
        ([[0], [0.5]], TypeError, r"path \[0.5\] of the tree has rank 0.5 of type float, expected an int"),
        ([[0], [-1]], ValueError, r"path \[-1\] of the tree has rank -1, expected 0"),
        ([[0], [1], [0]], ValueError, r"path \[0\] is in the tree twice"),
        ([[0], [1, 0]], ValueError, r"node \[1, 0\] of the tree has no parent: \[1\] is missing"),
        ([[0], [2]], ValueError, r"node \[2\] of the tree is there without the better candidate \[1\]"),
        ([[0], [0, 1]], ValueError, r"node \[0, 1\] of the tree is there without the better candidate \[0, 0\]"),
    ],
)
def test_what_is_no_tree(spec, error, message):
    with pytest.raises(error, match=message):
        tree_of(spec)
