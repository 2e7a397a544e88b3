"""The sparse head of ordered embeddings: only the tokens of the best centroids get a logit.

Source: the `masked_embedding` of Gemma 4's E2B and E4B assistants, transformers `Gemma4AssistantForCausalLM` and vLLM `gemma4_mtp.py`.
"""

from __future__ import annotations

import jax

from pallas_kernels import dialect
from pallas_kernels.centroid_head import reference, triton


def candidates(
    hidden: jax.Array,
    centroids: jax.Array,
    token_ordering: jax.Array,
    table: jax.Array,
    *,
    top_k: int,
    suppressed: tuple[int, ...] = (),
    bias: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The tokens of each row's best centroids, and their logits.

    hidden: [N, h]; centroids: [C, h]; table: [V, h], all of one dtype. token_ordering: [V] int32, the V / C token ids of centroid 0, then
    those of centroid 1, and so on. top_k: how many centroids a row takes. The best have the largest product with hidden, in float32, to
    which `bias`, [N, C] float32, is added first; of equal ones the lower wins. suppressed: token ids whose logits are -inf.

    Returns logits [N, top_k * V / C] float32 and ids [N, top_k * V / C] int32, by ascending centroid. Raises ValueError for arrays that
    do not fit each other, and for an `implementation` that is unknown or cannot serve them.
    """
    chosen = _selected(hidden, centroids, token_ordering, table, top_k, suppressed, implementation)
    if chosen == "xla":
        return reference.candidates(hidden, centroids, token_ordering, table, top_k, suppressed, bias)
    interpret = chosen == "triton-interpret"
    return triton.candidates(hidden, centroids, token_ordering, table, top_k, suppressed, bias, interpret=interpret)


def choose(
    hidden: jax.Array,
    centroids: jax.Array,
    token_ordering: jax.Array,
    table: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    *,
    top_k: int,
    suppressed: tuple[int, ...] = (),
    implementation: str = "auto",
) -> jax.Array:
    """The token that each row chooses among its candidates: argmax(logits / T + noise), or argmax(logits) where the temperature T is 0.

    keys: [N, 2] uint32 from `noise.row_keys`; temperature: [N] float32; all else is as for `candidates`, errors too. Returns ids [N]
    int32. Of equal values the lower id wins.
    """
    if keys.shape != (hidden.shape[0], 2) or temperature.shape != hidden.shape[:1]:
        raise ValueError(
            f"keys are {list(keys.shape)} and temperatures {list(temperature.shape)}; expected [N, 2] and [N] for {hidden.shape[0]} rows"
        )
    chosen = _selected(hidden, centroids, token_ordering, table, top_k, suppressed, implementation)
    if chosen == "xla":
        return reference.choose(hidden, centroids, token_ordering, table, keys, temperature, top_k, suppressed)
    interpret = chosen == "triton-interpret"
    return triton.choose(hidden, centroids, token_ordering, table, keys, temperature, top_k, suppressed, interpret=interpret)


def _selected(
    hidden: jax.Array,
    centroids: jax.Array,
    token_ordering: jax.Array,
    table: jax.Array,
    top_k: int,
    suppressed: tuple[int, ...],
    implementation: str,
) -> str:
    """The implementation for these arrays. Raises ValueError as `candidates` does."""
    arrays = (hidden, centroids, table)
    if len({x.shape[1:] for x in arrays}) > 1 or len({x.dtype for x in arrays}) > 1:
        found = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        raise ValueError(f"hidden states, centroids and table are {found}; expected [N, h], [C, h] and [V, h] of one dtype")
    if token_ordering.shape != table.shape[:1] or table.shape[0] % centroids.shape[0]:
        raise ValueError(
            f"token_ordering is {list(token_ordering.shape)} for a table of {table.shape[0]} rows and {centroids.shape[0]} centroids; "
            "expected one id a row, and as many for each centroid"
        )
    if not 1 <= top_k <= centroids.shape[0]:
        raise ValueError(f"top_k is {top_k}; expected 1 .. {centroids.shape[0]}, the number of centroids")
    return dialect.select(implementation, triton.unsupported(table, centroids.shape[0], suppressed))
