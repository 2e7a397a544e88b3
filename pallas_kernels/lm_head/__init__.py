"""The output head and the choice of a token in one pass over the table, without logits in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.linear import mosaic as products
from pallas_kernels.linear import packed_mosaic as packed_linear
from pallas_kernels.linear.reference import product
from pallas_kernels.lm_head import guided, mosaic, packed_mosaic, packed_triton, reference, triton
from pallas_kernels.lm_head.guided import Guide, abstract_guide, guide_of, unguided
from pallas_kernels.packed import Packed, tile

__all__ = ["Guide", "abstract_guide", "choose", "guide_of", "guide_pays", "likely_logits", "lm_head", "most_rows", "unguided"]

MOST_ROWS = 64  # with more, the Triton kernel's product takes longer than XLA's


def most_rows(table: jax.Array | Packed, implementation: str = "auto") -> int:
    """The most rows that a kernel multiplies with this table. implementation: the one asked for."""
    if isinstance(table, Packed):
        return 0 if tile.unsupported(table, jnp.dtype(jnp.bfloat16)) else packed_triton.MOST_ROWS
    if implementation == "mosaic":
        return products.MOST_ROWS
    return max(MOST_ROWS, mosaic.most_rows(table)) if implementation == "auto" else MOST_ROWS


def guide_pays() -> bool:
    """Whether heads with a guide have been found to be faster on the current device: they were timed on Hopper."""
    return dialect.mosaic_obstacle() is None


def likely_logits(hidden: jax.Array, table: jax.Array, guide: Guide, most: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """Logits without a softcap, of which those that may be among the `most` largest of their row are the table's: [N, V] float32. The
    others may come from the guide, and are then smaller than `most` logits of the table.

    hidden: [N, H]. table: [V, H], of the same dtype. guide: of the table. most: [N] int32. implementation: see `dialect.select`; "auto" is
    XLA, which computes all logits from the table, for more than `guided.MOST_LIKELY_ROWS` rows and for float32. Raises ValueError for an
    `implementation` that is unknown or cannot serve these arrays.
    """
    if implementation == "auto" and (hidden.shape[0] > guided.MOST_LIKELY_ROWS or hidden.dtype.itemsize > 2):
        implementation = "xla"
    chosen = dialect.select(implementation, guided.likely_obstacle(hidden, table, guide))
    if chosen == "xla":
        return product(hidden, table, dtype=jnp.float32)
    return guided.likely_logits(hidden, table, guide, most, implementation=implementation)


def lm_head(
    hidden: jax.Array,
    table: jax.Array | Packed,
    keys: jax.Array,
    temperature: jax.Array,
    *,
    softcap: float | None = None,
    suppressed: tuple[int, ...] = (),
    first_id: jax.Array | None = None,
    guide: Guide | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The token that each row chooses: argmax(logits / T + noise), or argmax(logits) where the temperature T is 0.

    hidden: [N, H]. table: [V, H], of the same dtype or packed. Logits are products of table rows with hidden,
    summed in float32; with a softcap, softcap * tanh(logits / softcap). keys: [N, 2] uint32 from `noise.row_keys`; temperature: [N]
    float32. suppressed: token ids that are never chosen. first_id: [] int32, the token id of the table's first row, for a shard of a
    vocabulary (by default 0). guide: of the table, as `guide_of` makes it: with it few rows take a kernel about half as long, and get
    the same tokens.

    implementation: see `dialect.select`; or "mosaic", a kernel for Hopper and a table of bfloat16, which "auto" takes for 33 to 160 rows.
    With more rows than `most_rows`, "auto" is XLA's product, and `choose`.

    Returns ids [N] int32 and their values [N] float32, noise included. Of equal values the lower id wins. Raises ValueError for arrays
    that do not fit each other, and for an `implementation` that is unknown or cannot serve them.
    """
    dtype = table.kind if isinstance(table, Packed) else table.dtype
    if hidden.shape[1:] != table.shape[1:] or not (isinstance(table, Packed) or hidden.dtype == dtype):
        raise ValueError(
            f"hidden states are {hidden.dtype}{list(hidden.shape)} and the table {dtype}{list(table.shape)}; "
            "expected [N, H] and [V, H] of one dtype"
        )
    if keys.shape != (hidden.shape[0], 2) or temperature.shape != hidden.shape[:1]:
        raise ValueError(
            f"keys are {list(keys.shape)} and temperatures {list(temperature.shape)}; expected [N, 2] and [N] for {hidden.shape[0]} rows"
        )
    settings = keys, temperature, softcap, suppressed, first_id
    if implementation == "auto" and hidden.shape[0] > most_rows(table):
        return choose(product(hidden, table, dtype=jnp.float32), *settings)
    if guide is not None and not isinstance(table, Packed) and hidden.shape[0] <= guided.MOST_ROWS and implementation != "mosaic":
        chosen = dialect.select(implementation, guided.unsupported(hidden, guide, suppressed))
        if chosen != "xla":
            return guided.lm_head(hidden, table, guide, *settings, implementation=implementation)
    if not isinstance(table, Packed):
        fastest = mosaic.LEAST_ROWS <= hidden.shape[0] <= mosaic.most_rows(table)
        if implementation == "mosaic" or (implementation == "auto" and fastest):
            reason = mosaic.unsupported(hidden, table, suppressed)
            if not reason:
                return mosaic.lm_head(hidden, table, *settings)
            if implementation == "mosaic":
                raise ValueError(f"implementation 'mosaic' cannot serve this: {reason}")
            implementation = "xla" if hidden.shape[0] > MOST_ROWS else implementation
        chosen = dialect.select(implementation, triton.unsupported(table.dtype, suppressed), further=("mosaic",))
    elif implementation == "auto" and not packed_mosaic.unsupported(hidden, table, suppressed):
        return packed_mosaic.lm_head(hidden, table, *settings)
    elif implementation == "auto" and not packed_linear.unsupported(hidden, table):
        # Where its kernel of products runs, that saves more than it takes to write and read the logits.
        return choose(packed_linear.partials(hidden, table, 1)[0], *settings)
    else:
        chosen = dialect.select(implementation, packed_triton.unsupported(hidden, table, suppressed))
    if chosen == "xla":
        return reference.lm_head(hidden, table, *settings)
    interpret = chosen == "triton-interpret"
    if isinstance(table, Packed):
        return packed_triton.lm_head(hidden, table, *settings, interpret=interpret)
    return triton.lm_head(hidden, table, *settings, interpret=interpret)


def choose(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None = None,
    suppressed: tuple[int, ...] = (),
    first_id: jax.Array | None = None,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The token that each row chooses, where the products with the table are in memory already.

    logits: [N, V] float32, the products. Other arguments, and what it returns: as for `lm_head`. implementation: see `dialect.select`.
    Raises ValueError for one that is unknown or cannot suppress so many ids.
    """
    chosen = dialect.select(implementation, triton.too_many(suppressed))
    settings = logits, keys, temperature, softcap, suppressed, first_id
    return reference.choose(*settings) if chosen == "xla" else triton.choose(*settings, interpret=chosen == "triton-interpret")
