"""The shapes that the Gemma 4 family and its drafters give to paged attention, for tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

PAGE = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of call of `paged_attention`, for any batch and context."""

    queries: int  # rows of a sequence
    kv_heads: int
    group: int  # query heads for each KV head
    head_dim: int
    rotary: int = 0  # dims of a stored key; 0 if keys are stored whole
    window: int | None = None
    causal: bool = True
    fresh: bool = True  # whether the rows have K and V of their own
    image: int = 0  # rows, after four others, that see one another

    def through(self, first: jax.Array) -> jax.Array | None:
        """Up to which positions the rows see keys, [B, T], as `paged_attention` takes it. first: [B] int32, the first row's position."""
        if not self.image:
            return None
        row = jnp.arange(self.queries, dtype=jnp.int32)[None, :]
        return first[:, None] + jnp.where((row >= 4) & (row < 4 + self.image), 3 + self.image, row)


SHAPES = {
    # Verify blocks: the anchor and K drafts.
    "e2b-full": Shape(4, 1, 8, 512),
    "e2b-sliding": Shape(4, 1, 8, 256, window=512),
    "e4b-full": Shape(5, 2, 4, 512),
    "e4b-sliding": Shape(5, 2, 4, 256, window=512),
    "12b-full": Shape(5, 1, 16, 512, rotary=128),
    "12b-sliding": Shape(5, 8, 2, 256, window=1024),
    "26b-full": Shape(5, 2, 8, 512, rotary=128),
    "26b-sliding": Shape(5, 8, 2, 256, window=1024),
    "31b-full": Shape(5, 4, 8, 512, rotary=128),
    "31b-sliding": Shape(5, 16, 2, 256, window=1024),
    "31b-full-17-rows": Shape(17, 4, 8, 512, rotary=128),
    "31b-sliding-17-rows": Shape(17, 16, 2, 256, window=1024),
    # One row of the assistant, which stores nothing.
    "e2b-assistant-full": Shape(1, 1, 4, 512, fresh=False),
    "e2b-assistant-sliding": Shape(1, 1, 4, 256, window=512, fresh=False),
    "12b-assistant-full": Shape(1, 1, 16, 512, rotary=128, fresh=False),
    "31b-assistant-full": Shape(1, 4, 8, 512, rotary=128, fresh=False),
    "31b-assistant-sliding": Shape(1, 16, 2, 256, window=1024, fresh=False),
    # DFlash blocks of the 31B's drafter.
    "dflash-full": Shape(16, 8, 8, 128, causal=False),
    "dflash-sliding": Shape(16, 8, 8, 128, window=2048),
    # Blocks that see both ways: DFlash2's for the 31B, DSpark's for the 31B and, with Gemma's heads, for the 12B.
    "dflash2-sliding": Shape(16, 8, 8, 128, window=2048, causal=False),
    "31b-dspark": Shape(8, 16, 2, 256, causal=False),
    "12b-dspark": Shape(7, 1, 16, 512, causal=False),
    # Prefill chunks.
    "e2b-full-prefill": Shape(512, 1, 8, 512),
    "e4b-full-prefill": Shape(2048, 2, 4, 512),
    "e2b-sliding-prefill": Shape(512, 1, 8, 256, window=512),
    "31b-full-prefill": Shape(2048, 4, 8, 512, rotary=128),
    "31b-sliding-prefill": Shape(2048, 16, 2, 256, window=1024),
    # A prompt's rows with an image among them.
    "31b-image": Shape(344, 16, 2, 256, window=1024, image=280),
}
