"""Texts of an automaton, drawn at random."""

import numpy as np


def drawn(automaton, seed, longest=400):
    """A text that the automaton accepts. After `longest` bytes it takes the shortest way out."""
    rng, state, out = np.random.default_rng(seed), automaton.start, bytearray()
    while True:
        following = np.flatnonzero(automaton.next[state])
        if automaton.accepting[state] and (not following.size or rng.random() < 0.2 or len(out) > longest):
            return out.decode()
        if len(out) > longest:
            ways = distances(automaton)
            following = following[np.argmin(ways[automaton.next[state, following]])][None]
        byte = rng.choice(following)
        out.append(byte)
        state = automaton.next[state, byte]


def distances(automaton):
    """Of each state the bytes to the nearest end: [S]."""
    found = np.where(automaton.accepting, 0, 1 << 20)
    while True:
        found[0] = 1 << 21
        closer = np.minimum(found, found[automaton.next].min(axis=1) + 1)
        if (closer == found).all():
            return found
        found = closer
