"""The layers of small models for `projected`, for tests and the benchmark."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

PAGE, PLACES = 64, 9  # places of a page table: enough for a window of 512 and a block of rows


@dataclasses.dataclass(frozen=True)
class Shape:
    """The heads of a layer."""

    kv_heads: int
    group: int  # query heads for each KV head
    owned: int  # heads for keys and values of each KV head
    dim: int  # of a head
    width: int  # of the layer's input

    @property
    def size(self) -> int:
        """Bytes of the weights, in bfloat16."""
        return 2 * self.kv_heads * (self.group + self.owned) * self.dim * self.width

    def arguments(self, batch: int, queries: int, dtype: Any) -> tuple[Any, ...]:
        """The shapes of x, w, cos, sin, q_weight, k_weight, both pools, table, start and count, for so many rows of each sequence. The last
        six are None without keys and values."""
        leaf, pages = jax.ShapeDtypeStruct, batch * PLACES
        turns = [leaf((batch, queries, self.dim // 2), jnp.float32)] * 2
        weight, pool = leaf((self.dim,), dtype), leaf((pages, PAGE, self.kv_heads, self.dim), dtype)
        where = (leaf((batch, PLACES), jnp.int32), *[leaf((batch,), jnp.int32)] * 2)
        matrix = leaf((self.kv_heads, self.group + self.owned, self.dim, self.width), dtype)
        x = leaf((batch, queries, self.width), dtype)
        return (x, matrix, *turns, weight, *((weight, pool, pool, *where) if self.owned else (None,) * 6))


SHAPES = {
    "E2B sliding": Shape(1, 8, 2, 256, 1536),
    "E2B full": Shape(1, 8, 2, 512, 1536),
    "E2B sliding, queries": Shape(1, 8, 0, 256, 1536),
    "E2B full, queries": Shape(1, 8, 0, 512, 1536),
    "E4B sliding": Shape(2, 4, 2, 256, 2560),
    "E4B full": Shape(2, 4, 2, 512, 2560),
    "E4B sliding, queries": Shape(2, 4, 0, 256, 2560),
    "E4B full, queries": Shape(2, 4, 0, 512, 2560),
    "E2B assistant sliding": Shape(1, 4, 0, 256, 256),
    "E2B assistant full": Shape(1, 4, 0, 512, 256),
    "E4B assistant sliding": Shape(2, 2, 0, 256, 256),
    "E4B assistant full": Shape(2, 2, 0, 512, 256),
}
