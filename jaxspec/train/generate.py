"""Text that a target writes itself, for its drafters to learn from, and how much of such text a drafter guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode
from jaxspec.decode.state import DecodeState
from jaxspec.drafters.base import Drafter, NoDraft
from jaxspec.drafters.training import XLA
from jaxspec.learning.losses import Batch
from jaxspec.model.target import TargetModel
from jaxspec.train.data import batch_of


def beginnings(texts: Batch, count: int, seed: int) -> list[list[int]]:
    """Beginnings of `count` texts, drawn at random: a text's given part if it has one, else an eighth to a half of a row's length."""
    rng, width = np.random.default_rng(seed), texts.ids.shape[1]
    prompts = []
    for row in rng.choice(len(texts.ids), count, replace=count > len(texts.ids)):
        given = int(texts.first[row]) or int(rng.integers(max(width // 8, 1), width // 2 + 1))
        prompts.append(texts.ids[row, : min(given, int(texts.length[row]), width - 2)].tolist())
    return prompts


def written(llm: Any, prompts: Sequence[list[int]], width: int, *, temperature: float, seed: int) -> Batch:
    """Prompts with what an LLM writes after them, until it stops or the row of `width` tokens is full. Prompt i has the seed `seed` + i."""
    from jaxspec.engine.params import SamplingParams

    params = [SamplingParams(max_tokens=width - len(p), temperature=temperature, seed=seed + i) for i, p in enumerate(prompts)]
    done = llm.generate(prompts, params)
    texts = [np.asarray([*p, *c.token_ids], np.int32) for p, c in zip(prompts, done, strict=True)]
    return batch_of(texts, [len(p) for p in prompts], width)


def continued(model: TargetModel, drafter: Drafter, ids: jax.Array, given: jax.Array, num_draft_tokens: int) -> DecodeState:
    """The state after greedy decoding to the end of the rows, by the loop that serves requests. No token ends a sequence.

    ids: [B, T] int32. given: [B] int32; the first `given` ids of a row are its prompt.
    """
    batch, length = ids.shape
    slots = jnp.arange(batch, dtype=jnp.int32)
    state = decode.init_state(model, drafter, slots=batch, max_len=length, num_draft_tokens=num_draft_tokens)
    requests = decode.Requests(
        tokens=ids,
        length=given,
        prompt=given,
        limit=jnp.full_like(given, length),
        stop_ids=jnp.broadcast_to(state.stop_ids[:1], state.stop_ids.shape),
        seed=state.seed,
        temperature=state.temperature,
    )
    state = decode.admit(state, slots, requests)
    round = decode.Round(num_draft_tokens, attention=XLA, draft_attention=XLA)
    state = decode.prefill(model, drafter, state, slots, chunk=length, round=round)
    return decode.decode_loop(model, drafter, state, slots, length, round=round)


def generate(model: TargetModel, prompts: jax.Array, new_tokens: int) -> jax.Array:
    """Greedy continuations. prompts: [B, P] int32 -> [B, P + new_tokens] int32."""
    given = jnp.full((prompts.shape[0],), prompts.shape[1], jnp.int32)
    return continued(model, NoDraft(), jnp.pad(prompts, ((0, 0), (0, new_tokens))), given, 0).tokens


def acceptance_length(state: DecodeState) -> jax.Array:
    """Tokens a round in a state of `continued`, the target's own choice included: [] float32."""
    # Prefill, not a round, chooses the first token of each text.
    return jnp.sum(state.length - state.prompt - 1) / jnp.maximum(jnp.sum(state.rounds), 1)
