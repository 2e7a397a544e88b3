"""The bundled target and its assistant, held-out code, and how their tokens are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode, targets
from jaxspec.checkpoint.hub import resolve
from jaxspec.drafters.registry import load_drafter
from jaxspec.model import gemma4
from jaxspec.model.rows import Rows
from jaxspec.text import load_tokenizer
from jaxspec.train.pocket.corpus import held_out_texts
from pallas_kernels.noise import gumbel, row_keys

TIE = 1e-4  # margins below this are floating-point ties
admit = jax.jit(decode.admit)


@functools.cache
def target():
    folder = resolve("pocket")
    config, _ = targets.read_target(folder)
    return targets.load_target(folder, gemma4.abstract(config, jnp.float32), progress=False)


@functools.cache
def drafter_of(name):
    return load_drafter(resolve(f"pocket-{name}"), target().config, jnp.float32, progress=False)


@functools.cache
def texts():
    """Ids of each held-out module."""
    tokenizer = load_tokenizer(resolve("pocket"))
    return [np.asarray(tokenizer.encode(text), np.int32) for text in held_out_texts().values()]


def put(state, sequences, limits, prompts=None, temperature=0.0):
    """Admits sequences of any lengths into slots 0, 1, ...; their seeds are 0, 1, ... temperature: one for all, or some in turn."""
    slots, width = state.tokens.shape

    def padded(rows):
        return jnp.asarray(np.pad(rows, (0, slots - len(sequences))), jnp.int32)

    tokens = np.zeros((slots, width), np.int32)
    for row, ids in zip(tokens, sequences, strict=False):
        row[: len(ids)] = ids
    lengths = [len(ids) for ids in sequences]
    stop_ids = np.full(state.stop_ids.shape, -1, np.int32)
    stop_ids[:, 0] = 1
    each = jnp.arange(slots, dtype=jnp.int32)
    return admit(
        state,
        jnp.where(each < len(sequences), each, slots),  # the others are nobody's
        decode.Requests(
            tokens=jnp.asarray(tokens),
            length=padded(lengths),
            prompt=padded(lengths if prompts is None else prompts),
            limit=padded(limits),
            stop_ids=jnp.asarray(stop_ids),
            seed=jnp.stack([each, jnp.zeros_like(each)], axis=1).astype(jnp.uint32),
            temperature=jnp.asarray(np.resize(temperature, slots), jnp.float32),
        ),
    )


def assert_same(found, expected, temperature, seed):
    """Equal, or the target's own margin at the first difference is a floating-point tie. Returns the number of ties, 0 or 1."""
    if found.shape == expected.shape and (found == expected).all():
        return 0
    at = int(np.argmin(found[: len(expected)] == expected[: len(found)]))
    out, _ = target()(Rows(jnp.asarray(expected[None, :at]), jnp.zeros(1, jnp.int32), jnp.full(1, at), jnp.zeros(1, jnp.int32)), None)
    logits = target().unembed(out.hidden)[0, -1]
    if temperature:
        keys = row_keys(jnp.asarray([seed, 0], jnp.uint32), jnp.asarray(at))
        logits = logits / temperature + gumbel(keys, jnp.arange(logits.shape[0]))
    margin = abs(float(logits[int(expected[at])] - logits[int(found[at])]))
    assert margin < TIE, f"tokens differ at {at}: {expected[at]} without drafts, {found[at]} with, margin {margin}"
    return 1
