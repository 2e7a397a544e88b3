"""Paged attention in the Mosaic GPU dialect, for Hopper: which of its kernels serves, and how the keys are divided."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import (
    mosaic_parts,
    mosaic_rotary,
    mosaic_rotary_few,
    mosaic_rotary_prompt,
    mosaic_whole,
    mosaic_whole_prompt,
    mosaic_wide_prompt,
    triton,
)
from pallas_kernels.paged_attention.mosaic_parts import KEYS, ROWS

START = 4  # the time of a program's start and end, in units of the time for a block of keys
MOST_SPLITS = 64
# Items of the kernels for whole keys, for which they were the fastest: with fewer, what counts is how soon the first key comes. Since JAX
# 0.12 the kernel for few rows is launched early, so one suffices.
LEAST_ITEMS = 1 if jax.__version_info__ >= (0, 12) else 32
LEAST_WIDE_ITEMS = 8  # the same of heads of 512
LEAST_PROMPT_ITEMS = 32
LEAST_ROTARY_ITEMS = 32  # of so few rows that `triton` needs one tile


def unsupported(q, cached, fresh, key_weight, scales, through=None, ancestors=None) -> str | None:
    """Why no kernel here can serve these arguments of `paged_attention`, or None."""
    if reason := dialect.mosaic_obstacle():
        return reason
    if cached is None:
        return "there are no pages, which it reads"
    k, v = cached
    served = [(dim, dim) for dim in mosaic_whole.MOST_ROWS] if key_weight is None else [(mosaic_rotary.DIM, mosaic_rotary.ROTARY)]
    if (q.shape[-1], k.shape[-1]) not in served:
        wanted = " or ".join(f"{dim} with keys of {stored}" for dim, stored in served)
        return f"head_dim is {q.shape[-1]} with keys of {k.shape[-1]}, the kernel needs {wanted}"
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v, *(fresh or ()))) or scales is not None:
        return f"queries and keys are {q.dtype} and {k.dtype}{' with scales' if scales is not None else ''}, the kernel needs bfloat16"
    if q.shape[3] > 8 and q.shape[3] not in (16, 32, ROWS):
        return f"a KV head has {q.shape[3]} query heads, the kernel needs at most 8, or 16, 32 or {ROWS}"
    if k.shape[1] % KEYS:
        return f"pages hold {k.shape[1]} positions, the kernel needs a multiple of {KEYS}"
    if ancestors is not None:
        return "the rows are those of a tree, the kernel's are consecutive"
    if through is not None and (key_weight is not None or _for_prompts(q) is None):
        return "rows see past their own positions, which only the kernels for many rows with whole keys know of"
    return None


def is_faster(q, key_weight, window) -> bool:
    """Whether the kernel is faster than `triton` on an H200."""
    if key_weight is not None:
        # Where `triton` needs several tiles of 16 query rows, each tile reads the keys again.
        plan = mosaic_parts.Plan(q.shape, True, window, 1.0)
        return q.shape[1] * q.shape[3] > 16 or (mosaic_rotary_few.serves(plan) and plan.items >= LEAST_ROTARY_ITEMS)
    wide = q.shape[4] > mosaic_whole.PART
    if (kernel := _for_prompts(q)) is not None:
        items = mosaic_whole_prompt.Plan(q.shape, True, window, 1.0, kernel.MEMBERS).items
        return (wide or window is not None) and items >= LEAST_PROMPT_ITEMS
    plan = mosaic_whole.Plan(q.shape, True, window, 1.0)
    if wide:
        return plan.tiles == 1 and plan.items >= LEAST_WIDE_ITEMS
    return window is not None and plan.tiles == 1 and plan.items >= LEAST_ITEMS


# Jitted by itself so that layers with equal shapes trace and lower one kernel, which takes up to a second; XLA inlines it.
@jax.jit(static_argnames=("causal", "window", "scale", "splits", "launch_dependents", "read_once"))
def paged_attention(
    q,
    positions,
    cached,
    table,
    lengths,
    fresh,
    fresh_count,
    key_weight,
    through=None,
    *,
    causal,
    window,
    scale,
    splits=None,
    launch_dependents=False,
    read_once=False,
):
    """See `pallas_kernels.paged_attention.paged_attention`."""
    inputs = {"lengths": lengths, "positions": positions, "q": q, "table": table, "k": cached[0], "v": cached[1]}
    if key_weight is not None:
        inputs["weight"] = key_weight
    if through is not None:
        inputs["through"] = through
    if fresh is not None:
        # Rows are copied in tiles of eight, so there must be fewer than eight, or a multiple.
        missing = -fresh[0].shape[1] % 8 if fresh[0].shape[1] > 8 else 0
        fresh = tuple(jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in fresh) if missing else fresh
        inputs |= {"count": fresh_count, "fresh_k": fresh[0], "fresh_v": fresh[1]}
    scale = scale * triton.LOG2_E
    if key_weight is None and splits is None and (kernel := _for_prompts(q)) is not None:
        return kernel.attend(mosaic_whole_prompt.Plan(q.shape, causal, window, scale, kernel.MEMBERS), inputs, q)
    visible = table.shape[1] * cached[0].shape[1]
    visible = visible if window is None else min(visible, window + q.shape[1])
    blocks = visible // KEYS + (window is not None)  # a window seldom begins where a block does
    if key_weight is None:
        plan = mosaic_whole.Plan(q.shape, causal, window, scale, read_once=read_once)
        plan = dataclasses.replace(plan, splits=splits or mosaic_whole.splits_for(plan, blocks))
        return mosaic_whole.attend(plan, inputs, {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}, launch_dependents)[0]
    plan = mosaic_parts.Plan(q.shape, causal, window, scale)
    plan = dataclasses.replace(plan, splits=splits or splits_for(plan.items, blocks))
    if plan.splits == 1 and q.shape[1] >= ROWS:
        return mosaic_rotary_prompt.attend(plan, inputs, q)
    kernel = mosaic_rotary_few if mosaic_rotary_few.serves(plan) else mosaic_rotary
    out = kernel.attend(plan, inputs, plan.results(q.dtype), launch_dependents or plan.splits > 1)
    if plan.splits == 1:
        return out[0]
    batch, queries, heads, group, dim = q.shape
    acc, *numbers = out
    acc = acc.reshape(batch, heads, plan.splits, queries * group, dim)
    numbers = (x.reshape(batch, heads, plan.splits, x.shape[1]) for x in numbers)
    return triton.merged((acc, *numbers), q, plan.splits, interpret=False, rows=plan.rows, launch_dependents=launch_dependents)


def _for_prompts(q) -> Any:
    """The kernel for many rows of a prompt, if keys are stored whole, or None if none serves these queries."""
    return next((kernel for kernel in (mosaic_whole_prompt, mosaic_wide_prompt) if kernel.serves(q)), None)


def splits_for(programs: int, blocks: int) -> int:
    """The best number of parts for `blocks` blocks of keys. Each part takes `programs` programs; a multiprocessor runs one at a time."""

    def time(splits: int) -> float:  # in units of the time for a block of keys, if every sequence is as long as its table
        return pl.cdiv(programs * splits, dialect.MULTIPROCESSORS) * (blocks / splits + START)

    return min(range(1, min(blocks, MOST_SPLITS) + 1), key=time)
