"""The end of a layer with per-layer inputs in the Mosaic GPU dialect, for Hopper.

A cluster of eight programs serves eight rows. Each has an eighth of the stream's columns, of which a warpgroup has a block of 64, and
copies an eighth of both matrices to shared memory. Its first product is a part of the gate's sums, which programs exchange, and its second
one its own columns of the projection. So what would be four kernels after one another, each of which takes longer to start than to
compute, is one.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, read_once
from pallas_kernels.activation import GELU
from pallas_kernels.clusters import Mail
from pallas_kernels.dialect import pl
from pallas_kernels.layer_end.exchange import PROGRAMS, ROWS, Exchange
from pallas_kernels.packed import Packed

BLOCK = 64  # columns of a warpgroup
INPUTS = 256  # per-layer inputs of a row
GATES = INPUTS // BLOCK
MOST_BLOCKS = 5  # of a program
MOST_ROWS = 64  # of as many clusters as surely run at once
SHARED_MEMORY = 230_000  # of a program, without its barriers
SINCE = (0, 12)  # of JAX: before, a CUDA graph launches such a kernel after the end of the one before, and as a graph of its own
FIRST, PARTS, GATED, OWN, NEXT = range(EXCHANGES := 5)


def unsupported(x: Any, gate: Any, projection: Any, inputs: Any) -> str | None:
    """Why the kernel cannot serve these arrays, or None."""
    if reason := dialect.mosaic_obstacle():
        return reason
    if isinstance(gate, Packed) or isinstance(projection, Packed):
        return "the gate or the projection is packed; the kernel needs both in bfloat16"
    dtypes = {a.dtype.name for a in (x, gate, projection, inputs)}
    if dtypes != {"bfloat16"}:
        return f"the arrays are {', '.join(sorted(dtypes))}; the kernel needs bfloat16"
    rows, width, least = math.prod(x.shape[:-1]), x.shape[-1], PROGRAMS * BLOCK
    if width % least or width > MOST_BLOCKS * least:
        return f"x has {width} columns; the kernel takes multiples of {least} up to {MOST_BLOCKS * least}"
    if gate.shape != (INPUTS, width) or projection.shape != (width, INPUTS):
        found, needed = (list(gate.shape), list(projection.shape)), ([INPUTS, width], [width, INPUTS])
        return f"the gate is {found[0]}, the projection {found[1]}; the kernel needs {needed[0]}, {needed[1]}"
    if rows > MOST_ROWS:
        return f"x has {rows} rows; the kernel takes at most {MOST_ROWS}"
    return None


@jax.jit(static_argnames=("eps", "launch_dependents"))
def layer_end(x, y, weight, gate, inputs, index, projection, norm, scalar, next_weight, eps, *, launch_dependents=False):
    """See `pallas_kernels.layer_end.layer_end`. y: parts [S, N, H]."""
    mosaic, width = dialect.mosaic(), x.shape[1]
    blocks = width // PROGRAMS // BLOCK
    read = {"x": x, "y": y, "inputs": inputs, "weight": weight, "gate": gate, "projection": projection, "norm": norm, "scalar": scalar}
    if next_weight is not None:
        read["next_weight"] = next_weight
    read["index"] = index.reshape(1)
    written = ["out", *(["normed"] if next_weight is not None else [])]
    names = (*read, *written)
    transforms = mosaic.TilingTransform((8, BLOCK)), mosaic.SwizzleTransform(128)

    def tiles(*shape):
        return mosaic.SMEM(shape, x.dtype, transforms=transforms)

    # What is sent later takes the place of what all have read by then.
    scratch = {
        "rows": tiles(max(blocks, GATES), ROWS, BLOCK),
        "parts": mosaic.SMEM((INPUTS, ROWS), jnp.float32),
        "sums": mosaic.SMEM((4 * blocks * PROGRAMS, ROWS), jnp.float32),
        "mail": mosaic.SMEM((2 * EXCHANGES,), jnp.int32),
        "gate_there": mosaic.Barrier(num_barriers=GATES),
        "gate_read": mosaic.Barrier(num_arrivals=GATES),
        "rows_there": mosaic.Barrier(num_arrivals=blocks),
        "projection_there": mosaic.Barrier(num_barriers=blocks),
    }
    matrices = tiles(GATES, BLOCK, blocks * BLOCK), tiles(blocks, BLOCK, INPUTS)
    taken = (max(blocks, GATES) * BLOCK * 2 + INPUTS * 4 + 4 * blocks * PROGRAMS * 4) * ROWS
    both = taken + 2 * blocks * BLOCK * INPUTS * 2 <= SHARED_MEMORY
    scratch |= dict(zip(("gate_tiles", "projection_tiles"), matrices, strict=True)) if both else {"tiles": mosaic.RefUnion(*matrices)}

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        if not both:
            refs["gate_tiles"], refs["projection_tiles"] = refs["tiles"]
        mail = Mail(mosaic, refs["mail"])
        _serve(mosaic, refs, mail, Exchange(mosaic, transforms, mail), blocks, both, eps, launch_dependents)

    found = mosaic.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * len(written),
        scratch_types=scratch,
        grid=(pl.cdiv(x.shape[0], ROWS),),
        grid_names=("program",),
        cluster=(PROGRAMS,),
        cluster_names=("member",),
        num_threads=max(blocks, GATES),
        thread_name="warpgroup",
        kernel_name="layer_end",
        compiler_params=mosaic.CompilerParams(
            approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(*read.values())
    return found[0], (found[1] if next_weight is not None else None)


def _serve(mosaic, refs, mail, cluster, blocks, both, eps, launch_dependents):
    warpgroup, member, row = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("member"), jax.lax.axis_index("program") * ROWS
    width, dtype = refs["x"].shape[1], refs["x"].dtype
    column = (member * blocks + warpgroup) * BLOCK
    sums, more_sums = refs["sums"], refs["parts"].at[pl.ds(0, 4 * blocks * PROGRAMS)]
    of_sums, of_rows = 4 * blocks * PROGRAMS * ROWS * 4, ROWS * INPUTS * 2

    def copy_gate():
        source = refs["gate"].at[pl.ds(warpgroup * BLOCK, BLOCK), pl.ds(member * blocks * BLOCK, blocks * BLOCK)]
        read_once.copy(mosaic, source, refs["gate_tiles"].at[warpgroup], refs["gate_there"].at[warpgroup])

    def copy_projection():
        source = refs["projection"].at[pl.ds(column, BLOCK)]
        read_once.copy(mosaic, source, refs["projection_tiles"].at[warpgroup], refs["projection_there"].at[warpgroup])

    def load(name):
        return cluster.load(refs[name], column).astype(jnp.float32)

    def load_inputs():
        return cluster.load(refs["inputs"], member * (INPUTS // PROGRAMS), row, index, half=True)

    # All that no kernel writes is read before the kernel waits for the one before.
    pl.when(warpgroup < GATES)(copy_gate)
    if both:
        pl.when(warpgroup < blocks)(copy_projection)
    index, scalar = refs["index"][0], refs["scalar"][0].astype(jnp.float32)
    mail.begin(of_sums, INPUTS * ROWS * 4, of_rows, of_sums, of_sums)

    def product(name, count):
        def multiply(accumulator):
            mosaic.barrier_wait(refs[f"{name}_there"].at[warpgroup])
            for k in range(count):
                left = refs[f"{name}_tiles"].at[warpgroup, :, pl.ds(k * BLOCK, BLOCK)]
                mosaic.wgmma(accumulator, left, dialect.mosaic_transposed(refs["rows"].at[k]))
            return accumulator[...]

        return pl.run_scoped(multiply, mosaic.ACC((BLOCK, ROWS), jnp.float32))

    def rounded(value):
        return value.astype(dtype).astype(jnp.float32)

    def gate_product():
        mosaic.barrier_wait(refs["rows_there"])
        total = product("gate", blocks)
        if not both:
            mosaic.barrier_arrive(refs["gate_read"])
        cluster.send_parts(total, refs["parts"], PARTS, member, warpgroup)

    def let_through(inputs):
        mail.wait(PARTS)
        cluster.send_rows(GELU(cluster.parts(refs["parts"]).astype(dtype), inputs), refs["rows"], GATED, member)

    @pl.when(warpgroup < blocks)
    def _columns():
        def send(value, held, exchange):
            cluster.send_sums(value * value, held, exchange, member * blocks + warpgroup)

        def norm(value, weight, held, exchange):
            mail.wait(exchange)
            return rounded(value * jax.lax.rsqrt(cluster.sums(held) / width + eps) * weight)

        weight, own_weight = load("weight"), load("norm")
        next_weight = load("next_weight") if "next_weight" in refs else None
        dialect.mosaic_wait(launch_dependents)
        parts = [cluster.load(refs["y"].at[i], column, row).astype(jnp.float32) for i in range(refs["y"].shape[0])]
        x = cluster.load(refs["x"], column, row).astype(jnp.float32)
        inputs = load_inputs() if blocks >= GATES else None
        y = rounded(sum(parts[1:], parts[0]))
        send(y, sums, FIRST)
        x = rounded(x + norm(y, weight, sums, FIRST))
        held = dialect.mosaic_transposed(refs["rows"].at[warpgroup])
        held[...] = mosaic.layout_cast(x.astype(dtype), mosaic.Layout.WGMMA_TRANSPOSED)
        mosaic.commit_smem()
        mosaic.barrier_arrive(refs["rows_there"])
        pl.when(warpgroup < GATES)(gate_product)
        if not both:
            mosaic.barrier_wait(refs["gate_read"])
            copy_projection()
        if blocks >= GATES:
            pl.when(warpgroup == 0)(lambda: let_through(inputs))
        mail.wait(GATED)
        mosaic.commit_smem()
        y = rounded(product("projection", GATES))
        send(y, sums, OWN)
        x = rounded(rounded(x + norm(y, own_weight, sums, OWN)) * scalar)
        if next_weight is not None:
            send(x, more_sums, NEXT)
        cluster.store(x.astype(dtype), refs["out"], column, row)
        if next_weight is not None:
            cluster.store(norm(x, next_weight, more_sums, NEXT).astype(dtype), refs["normed"], column, row)

    if blocks < GATES:

        @pl.when(warpgroup >= blocks)
        def _gates():
            dialect.mosaic_wait(launch_dependents)
            inputs = load_inputs()
            gate_product()
            pl.when(warpgroup == GATES - 1)(lambda: let_through(inputs))
