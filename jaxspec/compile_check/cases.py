"""The programs that `compile_check` compiles: every kernel at the shapes that models give it, and the decode loop of a model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import decode, released
from jaxspec.model.head_guides import guided
from jaxspec.targets import abstract_target
from pallas_kernels import (
    add_norm,
    all_reduce,
    byte_walk,
    centroid_head,
    device,
    float8_rows,
    layer_end,
    linear,
    lm_head,
    moe,
    paged_attention,
    qkv,
    top_candidates,
)
from pallas_kernels.add_norm import bench as add_norm_bench
from pallas_kernels.add_norm import shapes as add_norm_shapes
from pallas_kernels.byte_walk import shapes as byte_walk_shapes
from pallas_kernels.centroid_head import shapes as centroid_head_shapes
from pallas_kernels.float8_rows import shapes as float8_rows_shapes
from pallas_kernels.layer_end import shapes as layer_end_shapes
from pallas_kernels.linear import mosaic as mosaic_products
from pallas_kernels.linear import packed_mosaic
from pallas_kernels.linear import shapes as linear_shapes
from pallas_kernels.lm_head import guided as guided_head
from pallas_kernels.lm_head import mosaic as mosaic_head
from pallas_kernels.lm_head import shapes as lm_head_shapes
from pallas_kernels.moe import shapes as moe_shapes
from pallas_kernels.paged_attention import bench as attention_bench
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention import shapes as attention_shapes
from pallas_kernels.qkv import shapes as qkv_shapes
from pallas_kernels.top_candidates import shapes as top_candidates_shapes

ROWS = (5, 40, 160)  # of products
EVERY = ("E4B gate_up", "E4B down", "31B qkv full")  # matrices whose products are compiled for every number of rows in eights
STEP = "step"  # stands in the place of the kernel's name where the program is a model's step


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile."""

    kernel: str  # its package in pallas_kernels, or STEP
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]  # trees of ShapeDtypeStructs
    donate: tuple[int, ...] = ()  # the args that it may overwrite
    further: bool = False  # whether a similar case exists, so that only --all compiles this one

    def program(self) -> Any:
        """A key that is equal for cases of the same program."""
        function: Any = self.function
        leaves, tree = jax.tree.flatten(self.args)
        return function.func, function.args, tuple(function.keywords.items()), tuple(leaves), tree


def kernel_cases() -> list[Case]:
    """Every kernel at the named shapes of its package, in bfloat16, called through its public function.

    The implementation is what "auto" takes on the current device of `pallas_kernels.device`. A program that several models share stands
    here once, under the first one's name.
    """
    cases: dict[Any, Case] = {}
    for case in named_cases():
        cases.setdefault(case.program(), case)
    return list(cases.values())


def named_cases() -> Iterator[Case]:
    """The cases of `kernel_cases`, with a shared program under each of its names."""
    dtype, float8 = jnp.bfloat16, (device.capability() or 0.0) >= device.FLOAT8_CAPABILITY

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    for name, shape in attention_shapes.SHAPES.items():
        function = functools.partial(paged_attention.paged_attention, causal=shape.causal, window=shape.window)
        for batch in (1,) if shape.queries > 64 else (1, 32):
            args: Any = jax.eval_shape(functools.partial(attention_bench.arguments, shape, batch, 4096))
            yield Case("paged_attention", f"{name} x {batch}", function, args, further=batch > 1)
            q, positions, pools, table, lengths, fresh, fresh_count, key_weight, _, through = args
            if not mosaic.unsupported(q, pools, fresh, key_weight, None, through) and mosaic.is_faster(q, key_weight, shape.window):
                triton = functools.partial(function, implementation="triton")
                yield Case("paged_attention", f"{name} x {batch}, Triton", triton, args, further=batch > 1)
            pools = jax.tree.map(lambda pool: array(*pool.shape, dtype=jnp.float8_e4m3fn), pools)
            args = (q, positions, pools, table, lengths, fresh, fresh_count, key_weight, array(2, dtype=jnp.float32), through)
            yield Case("paged_attention", f"{name} x {batch}, fp8", function, args, further=batch > 1)
    heads = {(s.kv_heads, s.group, s.head_dim, s.rotary, s.fresh * (1 if s.rotary else 2)) for s in attention_shapes.SHAPES.values()}
    for kv_heads, group, width, rotary, owned in sorted(heads):
        pools = [array(8, attention_shapes.PAGE, kv_heads, dims) for dims in (rotary or width, width)]
        one = array(1, dtype=jnp.int32)
        pages: Any = (*pools, array(1, 8, dtype=jnp.int32), one, one)
        turns = [array(1, 5, width // 2, dtype=jnp.float32)] * 2
        weights = array(width), array(width) if owned else None
        function = functools.partial(qkv.qkv, group=group, key_dims=rotary or width, eps=1e-6)
        args = (array(1, 5, kv_heads, group + owned, width), *turns, *weights, qkv.Pages(*pages) if owned else None)
        yield Case("qkv", f"{kv_heads} x {group} + {owned} of {width}", function, args)
        rows = [array(1, 512, *pool.shape[2:]) for pool in pools]
        yield Case(
            "qkv",
            f"{kv_heads} of {rotary or width} and {width}, write",
            functools.partial(_write),
            (*rows, qkv.Pages(*pages)),
            further=kv_heads > 1,
        )
    for (name, shape), rows in itertools.product(qkv_shapes.SHAPES.items(), (4, 8, 32, 40)):
        *others, k, v, table, start, count = shape.arguments(1, rows, dtype)
        function = functools.partial(qkv.projected, group=shape.group, key_dims=shape.dim, eps=1e-6)
        pages = None if table is None else qkv.Pages(k, v, table, start, count)
        yield Case("qkv", f"{name} x {rows}, projected", function, (*others, pages), further=rows in (8, 40))
    for name, shape in add_norm_shapes.SHAPES.items():
        x, y, weight, scalar, after = jax.eval_shape(functools.partial(add_norm_bench.inputs, shape, dtype))
        function = functools.partial(_add_norm, add_norm.add_norm)
        yield Case("add_norm", name, function, (x, y, weight, scalar, after))
        if name.startswith("31B") and len(after) == 1:
            for form in {"numbers": False, "codes": True} if float8 else {"numbers": False}:
                rounded = (add_norm.Float8(after[0], form == "codes"),)
                yield Case("add_norm", f"{name}, {form}", function, (x, y, weight, scalar, rounded), further=shape.rows > 160)
    for devices, rows in ((2, 5), (2, 40), (4, 5), (4, 40), (4, 160)):
        name, width, x = f"31B x {rows} over {devices}", array(5376), array(rows, 5376)
        mail: Any = array(devices + 1, 2, dtype=jnp.int32)
        parts: Any = array(2, *x.shape, dtype=jnp.float32)
        yield Case("all_reduce", name, functools.partial(_all_reduce), (x, mail))
        function = functools.partial(_add_norm, add_norm.add_norm)
        args = (x, all_reduce.Unsummed(parts, mail), width, array(1), (width,))
        yield Case("all_reduce", f"{name}, norm", function, args, further=rows > 5)
        pairs = array(2, rows, dtype=jnp.int32)
        yield Case("all_reduce", f"{name}, gather", functools.partial(_all_gather), (pairs, mail), further=rows > 5)
    for name, shape in linear_shapes.SHAPES.items():
        function = functools.partial(getattr(linear, shape.kind))
        every = range(8, 257, 8) if name in EVERY else ()
        for rows in dict.fromkeys((*ROWS, *every)):
            arguments = shape.arguments(rows, dtype)
            yield Case("linear", f"{name} x {rows}", function, arguments, further=rows not in ROWS)
            if rows == 40 and mosaic_products.is_fastest(rows, arguments[1], 2 if shape.kind == "gated" else 1):
                triton = functools.partial(function, implementation="triton")
                yield Case("linear", f"{name} x {rows}, Triton", triton, arguments, further=not name.startswith("31B"))
        rounded = itertools.product((linear_shapes.ROUNDED,), (*ROWS, 256))
        usual = itertools.product(linear_shapes.PACKINGS, ROWS)
        for packing, rows in dict.fromkeys((*usual, *itertools.product(("int4", "int8"), every), *rounded)):
            arguments, further = shape.arguments(rows, dtype, packing), not _first(name, packing, rows)
            yield Case("linear", f"{name} x {rows}, {packing}", function, arguments, further=further)
            if packing == linear_shapes.ROUNDED and shape.kind == "gated":
                codes = functools.partial(linear.gated, codes=True)
                yield Case("linear", f"{name} x {rows}, {packing}, codes", codes, arguments, further=further)
        for packing in linear_shapes.PACKINGS:
            x, w, *_ = shape.arguments(1024, dtype, packing)
            yield Case(
                "linear", f"{name}, unpacked, {packing}", functools.partial(linear.unpacked), (w, x), further=not _first(name, packing, 5)
            )
    heads = lm_head_shapes.SHAPES | {f"E4B x {rows}": lm_head_shapes.of("E4B", rows) for rows in range(8, 161, 8)}
    for name, shape in heads.items():
        sampling = array(shape.rows, 2, dtype=jnp.uint32), array(shape.rows, dtype=jnp.float32)
        function = functools.partial(lm_head.lm_head, softcap=shape.softcap)
        args = (array(shape.rows, shape.hidden), array(shape.vocab, shape.hidden), *sampling)
        between = min(lm_head_shapes.HIDDEN_SIZES.values()) < shape.hidden < max(lm_head_shapes.HIDDEN_SIZES.values())
        yield Case("lm_head", name, function, args, further=between)
        if mosaic_head.LEAST_ROWS <= shape.rows <= lm_head.MOST_ROWS and mosaic_head.most_rows(args[1]):
            triton = functools.partial(function, implementation="triton")
            yield Case("lm_head", f"{name}, Triton", triton, args, further=between)
        if shape.rows <= guided_head.MOST_ROWS:
            function_of_guide = functools.partial(_guided, function)
            guide = lm_head.abstract_guide(args[1])
            yield Case("lm_head", f"{name}, guided", function_of_guide, (*args, guide), further=between)
        if shape.rows <= guided_head.MOST_LIKELY_ROWS:
            most = array(shape.rows, dtype=jnp.int32)
            likely = functools.partial(lm_head.likely_logits)
            yield Case("lm_head", f"{name}, likely logits", likely, (*args[:2], guide, most), further=between)
        for packing in ("int8", "int8 of 16 float16"):
            table = linear_shapes.packed((shape.vocab, shape.hidden), packing, dtype)
            yield Case("lm_head", f"{packing} {name}", function, (args[0], table, *sampling), further=between)
            if not packed_mosaic.unsupported(args[0], table):
                triton = functools.partial(function, implementation="triton")
                yield Case("lm_head", f"{packing} {name}, Triton", triton, (args[0], table, *sampling), further=between)
    logits = array(320, lm_head_shapes.VOCAB, dtype=jnp.float32)
    sampling = array(320, 2, dtype=jnp.uint32), array(320, dtype=jnp.float32)
    yield Case("lm_head", "logits x 320", functools.partial(lm_head.choose, softcap=30.0), (logits, *sampling))
    for name, shape in float8_rows_shapes.SHAPES.items():
        x = array(*shape)
        yield Case("float8_rows", f"{name}, numbers", functools.partial(float8_rows.rounded), (x,), further="x 5376" not in name)
        if float8:
            yield Case("float8_rows", f"{name}, codes", functools.partial(float8_rows.codes), (x,), further="x 5376" not in name)
    for name, shape in layer_end_shapes.SHAPES.items():
        yield Case("layer_end", name, functools.partial(layer_end.layer_end, eps=1e-6), shape.arguments(dtype))
    for name, shape in centroid_head_shapes.SHAPES.items():
        ordering = array(shape.vocab, dtype=jnp.int32)
        args = array(shape.rows, shape.hidden), array(shape.centroids, shape.hidden), ordering, array(shape.vocab, shape.hidden)
        sampling = array(shape.rows, 2, dtype=jnp.uint32), array(shape.rows, dtype=jnp.float32)
        yield Case("centroid_head", f"{name}, candidates", functools.partial(centroid_head.candidates, top_k=shape.top_k), args)
        yield Case("centroid_head", f"{name}, choice", functools.partial(centroid_head.choose, top_k=shape.top_k), (*args, *sampling))
    for name, shape in moe_shapes.SHAPES.items():
        yield Case("moe", name, functools.partial(_experts, moe, shape), shape.layer(dtype))
        for packing in linear_shapes.PACKINGS:
            function, further = functools.partial(_experts, moe, shape), packing not in ("int8", "int4 affine float16")
            yield Case("moe", f"{name}, {packing}", function, shape.layer(dtype, packing), further=further)
    for name, shape in top_candidates_shapes.SHAPES.items():
        function = functools.partial(top_candidates.top_candidates, k=shape.k)
        logits = array(shape.rows, shape.vocab, dtype=jnp.float32)
        yield Case("top_candidates", name, function, (logits,), further=shape.rows > 1)
        if shape.k == top_candidates.triton.MOST:
            settings = jax.eval_shape(functools.partial(top_candidates_shapes.filters, shape.rows))
            function = functools.partial(top_candidates.choose, k=shape.k, softcap=30.0)
            logits = array(shape.rows, 1, shape.vocab, dtype=jnp.float32)
            yield Case("top_candidates", f"{name}, choice", function, (logits, *settings), further=shape.rows > 1)
    for name, shape in byte_walk_shapes.SHAPES.items():
        pool = array(shape.states, 257, dtype=jnp.uint16), array(shape.vocab, shape.longest, dtype=jnp.uint8)
        ids = array(shape.vocab, dtype=jnp.int32), *[array(shape.rows, dtype=jnp.int32)] * 2
        yield Case("byte_walk", name, functools.partial(byte_walk.byte_walk), (*pool, *ids), further=shape.rows > 1)


def _first(name: str, packing: str, rows: int) -> bool:
    """Whether a packed product is compiled without --all too: every form once, and the most common at all numbers of rows."""
    every = packing in ("int4", linear_shapes.ROUNDED)
    return name in ("31B gate_up", "31B down", "26B down", "E2B per-layer gate") and (every or rows == 40)


def _add_norm(add_norm: Any, x: Any, y: Any, weight: Any, scalar: Any, next_weights: Any) -> Any:
    return add_norm(x, y, weight, scalar=scalar, next_weights=next_weights, eps=1e-6)


def _guided(head: Any, hidden: Any, table: Any, keys: Any, temperature: Any, guide: Any) -> Any:
    return head(hidden, table, keys, temperature, guide=guide)


def _write(k: Any, v: Any, pages: Any) -> Any:
    return qkv.write(pages, k, v)


def _all_reduce(x: Any, mail: Any) -> Any:
    return all_reduce.all_reduce(x, "tensor", mail)


def _all_gather(x: Any, mail: Any) -> Any:
    return all_reduce.all_gather(x, "tensor", mail)


def _experts(moe: Any, shape: Any, x: Any, gate_up: Any, down: Any, scores: Any, per_expert: Any) -> Any:
    weights, ids, groups = moe.route(scores, per_expert, shape.top_k, scale=shape.scale)
    return moe.experts(x, gate_up, down, weights, ids, groups, activation=shape.activation)


def step_case(name: str, dtype: str) -> Case:
    """`decode_loop` of a model and its MTP drafter, with one sequence and K = 4.

    name: "pocket", or a key of `released.TARGETS`. dtype: of the weights; "auto" is the current device's default.
    """
    config = released.target_config(name)
    numbers = jnp.dtype(device.float_dtype(config.dtype) if dtype == "auto" else dtype)
    target: Any = abstract_target(config, numbers)
    # The assistant where one was released, else modules.
    made = "pocket-mtp" if name == "pocket" else next(n for n in ("mtp", "modules") if released.has_drafter(n, name))
    drafter = released.abstract_drafter(made, name, config, numbers)
    if lm_head.guide_pays():
        target, drafter = guided(target), guided(drafter)
    settings = {"slots": 1, "max_len": 4096, "num_draft_tokens": 4}
    state = jax.eval_shape(functools.partial(decode.init_state, **settings), target, drafter)
    slots, steps = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    loop = functools.partial(decode.decode_loop, round=decode.Round(4))
    return Case(STEP, f"{name}, {numbers.name}", loop, (target, drafter, state, slots, steps), donate=(2,))
