"""Residual sums and their norms as one kernel in the Triton dialect. A program holds one row."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.add_norm.reference import Float8
from pallas_kernels.all_reduce import Unsummed
from pallas_kernels.all_reduce.triton import in_two_steps, read_mail, sum_over_devices, turn_ends
from pallas_kernels.all_reduce.triton import num_warps as warps_of
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.float8_rows import Rounded
from pallas_kernels.float8_rows.reference import power_for
from pallas_kernels.float8_rows.triton import abstract_codes, on_grid
from pallas_kernels.moe import Choices

MOST_WARPS = 16


def add_norm(x, y, weight, scalar, next_weights, eps, *, launch_dependents=False, interpret=False, num_warps=None):
    """See `pallas_kernels.add_norm.add_norm`."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    y, mail = (y.parts, y.mail) if isinstance(y, Unsummed) else (y, None)
    addends = y if isinstance(y, tuple) else ((y, None),)

    def by_row(part):
        return part if isinstance(part, Choices) else part.reshape(*part.shape[: part.ndim - x.ndim], *rows.shape)

    parts = tuple((by_row(part), w) for part, w in addends)
    inputs, tree = jax.tree.flatten((rows, parts, weight, scalar, next_weights, mail))
    like = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    outputs = [like, *(abstract_codes(*rows.shape) if isinstance(w, Float8) and w.codes else like for w in next_weights)]
    two_steps = mail is not None and in_two_steps(rows.shape[0], mail.shape[0] - 1)
    out = dialect.call(
        functools.partial(_row, tree=tree, eps=eps, late=two_steps),
        name="add_norm",
        grid=(rows.shape[0],),
        out_shape=outputs,
        num_warps=num_warps or min(MOST_WARPS, warps_of(width, two_steps)),
        num_stages=1,
        interpret=interpret,
        launch_dependents=launch_dependents,
    )(*inputs)
    return out[0].reshape(x.shape), *(_result(found, w, x) for found, w in zip(out[1:], next_weights, strict=True))


def _result(found, weight, x):
    if not isinstance(weight, Float8):
        return found.reshape(x.shape)
    rows, scales = found if weight.codes else (found, None)
    return Rounded(rows, scales, x.shape[:-1], x.dtype)


def _row(*refs, tree, eps, late):
    x_ref, part_refs, weight_ref, scalar_ref, next_refs, mail_ref = tree.unflatten(refs[: tree.num_leaves])
    sum_ref, *normed_refs = refs[tree.num_leaves :]
    row, (_, width), dtype = pl.program_id(0), x_ref.shape, x_ref.dtype
    column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    inside = column < width

    def load(ref, *index):
        return plgpu.load(ref.at[*index, column], mask=inside, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)

    def output(ref):
        if isinstance(ref, Choices):
            _, top_k = ref.ids.shape
            chosen = [(load(ref.out, row * top_k + k), ref.ids[row, k], ref.weights[row, k]) for k in range(top_k)]
            # We multiply after the `where`, so that a NaN weight shows in the result.
            terms = [jnp.where(expert < ref.experts, found, 0) * weight.astype(jnp.float32) for found, expert, weight in chosen]
            return functools.reduce(operator.add, terms)
        if len(ref.shape) == 2:
            return load(ref, row)
        return functools.reduce(operator.add, [load(ref, part, row) for part in range(ref.shape[0])])

    def rounded(values):
        return values.astype(dtype).astype(jnp.float32)

    def norm(values, weight, factor=None):
        values *= jax.lax.rsqrt(jnp.sum(values * values) / width + eps)
        return rounded(values * weight) if factor is None else rounded(rounded(rounded(values) * weight) * factor)

    # All loads are issued before the first sum waits for one. What comes after a sum in two steps is loaded after it (`late`), for want of
    # registers.
    mail = None if mail_ref is None else read_mail(mail_ref)
    parts = [(output(part), None if w is None else load(w)) for part, w in part_refs]

    def load_others():
        x, weight = load(x_ref, row), None if weight_ref is None else load(weight_ref)
        scalar = None if scalar_ref is None else scalar_ref[0].astype(jnp.float32)
        return x, weight, scalar, [(load(getattr(ref, "weight", ref)), getattr(ref, "factor", None)) for ref in next_refs]

    if not late:
        x, weight, scalar, next_norms = load_others()
    y = functools.reduce(lambda a, b: rounded(a + b), [rounded(part) if w is None else norm(rounded(part), w) for part, w in parts])
    if mail is not None:
        y, turn = sum_over_devices(y, column, inside, mail, x_ref.shape[0])
        y = rounded(y)
        inside &= turn_ends(turn, jnp.sum(y * y), mail)  # the sum that its norm takes
    if late:
        x, weight, scalar, next_norms = load_others()
    x = rounded(x + (y if weight is None else norm(y, weight)))
    if scalar is not None:
        x = rounded(x * scalar)
    plgpu.store(sum_ref.at[row, column], x.astype(dtype), mask=inside)
    for ref, next_ref, next_norm in zip(normed_refs, next_refs, next_norms, strict=True):
        normed = norm(x, *next_norm)
        if isinstance(next_ref, Float8):
            scale, inverse = power_for(jnp.max(jnp.abs(normed)))
            if next_ref.codes:
                ref, scale_ref = ref
                scale_ref[row] = scale
                codes = (normed * inverse).astype(jnp.float8_e4m3fn).reshape(-1, 2, 4, 2).transpose(0, 2, 3, 1).reshape(-1)
                plgpu.store(ref.at[row, column], codes, mask=inside)
                continue
            normed = on_grid(normed * inverse) * scale
        plgpu.store(ref.at[row, column], normed.astype(dtype), mask=inside)
