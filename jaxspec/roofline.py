"""What a step has to move and a prefill has to compute, counted from shapes alone, and how fast the device does either.

A step reads every weight that it uses once and the visible K and V of every sequence once, for the target's pass and for each pass of
the drafter. What a step writes, and rows gathered from embedding tables, are thousands of times less and are not counted.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config import LayerSpec
from jaxspec.drafters.gemma4_mtp import Gemma4MTP
from jaxspec.gemma4 import Gemma4
from jaxspec.runner import nbytes


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that a step reads: weights and K and V, of the target's pass and of all passes of the drafter."""

    target: float
    target_kv: float
    drafter: float
    drafter_kv: float

    @property
    def total(self) -> float:
        return self.target + self.target_kv + self.drafter + self.drafter_kv


def step_bytes(target: Gemma4, drafter: Any, *, batch: int, num_draft_tokens: int, context: float) -> StepBytes:
    """What one step of `batch` sequences with `context` cached positions each has to read.

    target, drafter: weights or their shapes. Of experts those are counted that random routing of all rows is expected to choose, and
    of a centroid head the same. Drafters of a kind that is not in PASSES count as one pass over all their weights.
    """
    rows = batch * (num_draft_tokens + 1)
    kv = sum(_visible(spec, target, context) for spec in target.config.layers if spec.owns_kv)
    passes = PASSES.get(type(drafter), _once)
    drafted = passes(drafter, target, batch, num_draft_tokens, context)
    return StepBytes(_target_weights(target, rows), batch * kv, *drafted)


def expected_distinct(chosen: int, of: int, rows: int) -> float:
    """How many of `of` things are chosen by at least one of `rows` rows that each choose `chosen` of them at random."""
    return of * (1 - (1 - chosen / of) ** rows)


def _target_weights(target: Gemma4, rows: int) -> float:
    """The tied embedding counts as the head; per-layer embeddings are only gathered from."""
    size: float = nbytes(target) - nbytes(target.embed_tokens_per_layer)
    for layer in target.layers:
        if layer.router is not None:
            spec = layer.self_attn.spec
            unused = 1 - expected_distinct(spec.top_k_experts, spec.num_experts, rows) / spec.num_experts
            size -= unused * nbytes(layer.experts)
    return size


def _visible(spec: LayerSpec, target: Gemma4, context: float) -> float:
    """Bytes of one sequence's K and V that a layer's queries see."""
    positions = context if spec.window is None else min(context, spec.window)
    return positions * spec.num_kv_heads * (spec.key_dims + spec.head_dim) * jnp.dtype(target.dtype).itemsize


def _assistant(drafter: Gemma4MTP, target: Gemma4, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
    config = drafter.config
    size: float = nbytes(drafter)
    if drafter.masked_embedding is not None:
        table, ordering = drafter.model.embed_tokens.weight, drafter.masked_embedding.token_ordering
        share = expected_distinct(config.centroid_intermediate_top_k, config.num_centroids, batch) / config.num_centroids
        size -= (1 - share) * nbytes((table, ordering))
    sources = {spec.kv_source: spec for spec in config.text.layers}
    # The keys lie as the target's layer stores them.
    kv = sum(_visible(target.config.layers[source], target, context) for source in sources if source is not None)
    return num_draft_tokens * size, num_draft_tokens * batch * kv


def _once(drafter: Any, target: Gemma4, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
    return (nbytes(drafter) if num_draft_tokens else 0), 0


# Kind of drafter -> (weights, K and V): bytes that all its passes of a step read.
PASSES: dict[type, Callable[[Any, Gemma4, int, int, float], tuple[float, float]]] = {Gemma4MTP: _assistant}


def prefill_flops(target: Gemma4, length: int, chunk: int, taps: tuple[int, ...] = ()) -> float:
    """Floating-point operations that a prompt of `length` tokens needs, computed in chunks: two for each weight of a matrix and row,
    and those of attention over the keys that each row sees. Layers that share K and V run a chunk's last row alone, unless a tap
    lies above the first of them; so does the head."""
    config = target.config
    calls = math.ceil(length / chunk)
    cut = config.first_shared_layer if max(taps, default=0) <= config.first_shared_layer else config.num_hidden_layers
    flops = 2.0 * calls * target.embed_tokens.weight.size
    if target.per_layer_model_projection is not None:
        flops += 2.0 * length * target.per_layer_model_projection.weight.size
    for i, layer in enumerate(target.layers):
        spec = layer.self_attn.spec
        experts = nbytes(layer.experts) // jnp.dtype(target.dtype).itemsize
        matrices = sum(leaf.size for leaf in jax.tree.leaves(layer) if len(leaf.shape) > 1) - experts
        matrices += experts * spec.top_k_experts // max(spec.num_experts, 1)
        last = [min((n + 1) * chunk, length) for n in range(calls)]
        rows, seen = (length, _seen(length, spec.window)) if i < cut else (calls, sum(min(n, spec.window or n) for n in last))
        flops += 2.0 * rows * matrices + 4.0 * spec.num_heads * spec.head_dim * seen
    return flops


def _seen(length: int, window: int | None) -> int:
    """Keys that all rows of a sequence see together."""
    ramp = min(length, window or length)
    return ramp * (ramp + 1) // 2 + (length - ramp) * ramp


def copy_bandwidth(size: int) -> float:
    """Bytes a second, read and written counted both, of an elementwise operation on an array of `size` bytes."""
    add = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)
    return 2 * size / _seconds(add, jnp.zeros(size // 4, jnp.float32))


def matmul_rate(width: int, dtype: Any) -> float:
    """Floating-point operations a second of a product of two square random matrices."""
    # Deviation 1/sqrt(width) keeps the products as large as the factor: a device may run faster on zeros.
    factor = (jax.random.normal(jax.random.key(0), (width, width), jnp.float32) * width**-0.5).astype(dtype)
    multiply = jax.jit(jnp.matmul)
    return 2 * width**3 / _seconds(lambda x: multiply(x, factor), factor)


def _seconds(fn: Callable[[jax.Array], jax.Array], x: jax.Array, calls: int = 10, samples: int = 5) -> float:
    """Seconds of one call, the median of samples of several calls in a row, each on what the call before gave."""
    times = []
    for _ in range(1 + samples):
        begun = time.perf_counter()
        for _ in range(calls):
            x = fn(x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - begun) / calls)
    return statistics.median(times[1:])
