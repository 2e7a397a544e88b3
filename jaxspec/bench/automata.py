"""An automaton and a vocabulary made up for benchmarks, in which a text never ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling.automata import BLOCK, FILLED, SAME, Automata, fill, place

START = BLOCK  # the state in which texts begin
LONGEST = 48  # bytes of a token
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)


def made(vocab_size: int, states: int, seed: int) -> Automata:
    """A ring of states, each of which lets about two letters in three go on to the next; tokens of random letters."""
    rng = np.random.default_rng(seed)
    length = np.minimum(rng.geometric(0.2, vocab_size), LONGEST).astype(np.int32)
    data = LETTERS[rng.integers(0, len(LETTERS), (vocab_size, LONGEST))]
    data[np.arange(LONGEST) >= length[:, None]] = 0
    data[: len(LETTERS), 0], length[: len(LETTERS)] = LETTERS, 1  # so that no state is without a token
    blocks = -(-states // BLOCK)
    automata = Automata.empty(data, length, (-1, -1), blocks=blocks + 1, rows=states + 1)
    following = np.zeros((blocks * BLOCK, SAME + 1), np.uint16)
    following[:, SAME] = START + np.arange(len(following))
    open_letters = rng.random((states, len(LETTERS))) < 2 / 3
    open_letters[:, 0] = True
    following[:states, LETTERS] = np.where(open_letters, START + (np.arange(states)[:, None] + 1) % states, 0)
    row = np.zeros(len(following), np.int32)
    row[:states] = 1 + np.arange(states)
    accepting = np.zeros(BLOCK, bool)
    for i in range(blocks):
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        automata = jax.jit(place, donate_argnums=0)(automata, jnp.int32(i + 1), following[part], row[part], accepting)
    for first in range(0, states, FILLED):
        some = np.arange(first, first + FILLED)
        rows = np.where(some < states, some + 1, states + 1).astype(np.int32)
        automata = jax.jit(fill, donate_argnums=0)(automata, (START + np.minimum(some, states - 1)).astype(np.int32), rows)
    return automata
