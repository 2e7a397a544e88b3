"""Sums of few rows over GPUs that reach each other's memory, as one kernel in the Triton dialect. A program holds one row.

Each GPU has a mailbox (see `mailboxes`). A program stores its row in the other GPUs' mailboxes and waits for their rows in its own. Every
8 bytes hold two bfloat16 numbers and the turn's number, so a reader sees by itself whether they have arrived, and no barrier is needed.
NCCL calls this protocol LL (https://github.com/NVIDIA/nccl).

More than two GPUs sum many rows in two steps, which send less: each GPU adds up its share of a row and sends the others the sums.

Even and odd turns have places of their own. A GPU sends turn t + 2 only after it has received turn t + 1 from the others, which sent that
after their kernel of turn t had ended. So whatever turn t + 2 overwrites has been read.

A program counts its turns in the mailbox, so kernels in CUDA graphs, loops and several programs can follow one another. All GPUs have to
run the same kernels in the same order, one at a time, as one `shard_map` after another does.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl, plgpu

MOST_ROWS = 256
MOST_DEVICES = 4  # with eight, a thread holds more than its registers
LEAST_WIDTH, MOST_WIDTH, ALIGNMENT = 256, 8192, 8
THREADS, WARP = 32, 512  # threads of a warp, and numbers of a row that it takes at once: a thread has two loads of 16 bytes in flight
MESSAGE = 4  # numbers in a message of 16 bytes
LEAST_IN_TWO_STEPS = 32  # rows
SHARE = 64  # numbers of a row that one device adds up, before those of the next device: each has some of the narrowest row
COUNTERS = 4 * MOST_ROWS  # bytes at the start of a mailbox, which count the turns of each program
LINE = 4 * MOST_WIDTH  # bytes of a row's messages


def mailbox_bytes(devices: int) -> int:
    """Bytes of a mailbox in a group of so many devices. It must be zeroed at first."""
    return COUNTERS + 2 * (devices - 1) * MOST_ROWS * LINE


def unsupported(rows: int, width: int, dtype: Any) -> str | None:
    """Why the kernel cannot serve such rows, or None."""
    if dtype != jnp.bfloat16:
        return f"numbers are {dtype}; the kernel takes bfloat16"
    if not 0 < rows <= MOST_ROWS:
        return f"there are {rows} rows; the kernel takes at most {MOST_ROWS}"
    if width % ALIGNMENT or not LEAST_WIDTH <= width <= MOST_WIDTH:
        return f"a row has {width} numbers; the kernel takes multiples of {ALIGNMENT} from {LEAST_WIDTH} to {MOST_WIDTH}"
    return None


def in_two_steps(rows: int, devices: int) -> bool:
    """Whether so many rows are summed in two steps."""
    return devices > 2 and rows >= LEAST_IN_TWO_STEPS


def num_warps(width: int, two_steps: bool = False) -> int:
    """Warps of a program whose row has `width` numbers. In two steps a thread has twice as many: then a multiprocessor runs two programs of
    the widest rows at once, and none of 160 waits for others to end."""
    return max(1, pl.next_power_of_2(width) // (2 * WARP if two_steps else WARP))


def all_reduce(x, mail, *, interpret=False):
    """See `pallas_kernels.all_reduce.all_reduce`. x: [N, W] bfloat16."""
    return _call(_sum, "all_reduce", x, mail, x.shape, interpret)


def all_gather(x, mail, *, interpret=False):
    """All devices' x, in their order. x: [N, W] uint16 -> [D, N, W]; mail as for `pallas_kernels.all_reduce.all_reduce`."""
    return _call(_gather, "all_gather", x, mail, (mail.shape[0] - 1, *x.shape), interpret)


def _call(kernel, name, x, mail, shape, interpret):
    return dialect.call(
        kernel,
        name=name,
        grid=(x.shape[0],),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        num_warps=num_warps(x.shape[1], kernel is _sum and in_two_steps(x.shape[0], mail.shape[0] - 1)),
        num_stages=1,
        interpret=interpret,
    )(x, mail)


def _sum(x_ref, mail_ref, out_ref):
    mail = read_mail(mail_ref)
    row, column, inside, x = _loaded(x_ref)
    total, turn = sum_over_devices(x.astype(jnp.float32), column, inside, mail, x_ref.shape[0])
    inside &= turn_ends(turn, jnp.sum(total), mail)
    plgpu.store(out_ref.at[row, column], total.astype(out_ref.dtype), mask=inside)


def _gather(x_ref, mail_ref, out_ref):
    mail = read_mail(mail_ref)
    row, column, inside, x = _loaded(x_ref)
    turn, place = _turn_begins(column, mail)
    every = _swap(x.astype(jnp.int32) << 16, inside, mail, turn, place)
    inside &= turn_ends(turn, jnp.max(_either(every)), mail)
    for rank, of_one in enumerate(every):
        of_one = jax.lax.shift_right_logical(of_one, jnp.full_like(of_one, 16))
        plgpu.store(out_ref.at[rank, row, column], of_one.astype(out_ref.dtype), mask=inside)


def _loaded(x_ref):
    row, column = pl.program_id(0), jnp.arange(pl.next_power_of_2(x_ref.shape[1]), dtype=jnp.int32)
    inside = column < x_ref.shape[1]
    x = plgpu.load(x_ref.at[row, column], mask=inside, other=jnp.zeros((), x_ref.dtype))
    return row, column, inside, x


def read_mail(mail_ref):
    """The rows of a device's table (see `mailboxes.mailbox_tables`). A program reads them before anything else."""
    return [(mail_ref[i, 0], mail_ref[i, 1]) for i in range(mail_ref.shape[0])]


def sum_over_devices(x, column, inside, mail, rows):
    """The sum of x over devices, [W] float32, which is rounded to bfloat16 already if there are many rows, and the turn's number. The
    program must end the turn with `turn_ends`.

    x: [W] float32, with values that bfloat16 holds exactly. column: [W] int32, 0, 1, ... inside: [W] bool, the columns that exist. mail:
    see `read_mail`. rows: how many programs there are.
    """
    devices, (own_rank, _) = len(mail) - 1, mail[-1]
    turn, place = _turn_begins(column, mail)
    bits, distances = jax.lax.bitcast_convert_type(x, jnp.int32), range(1, devices)

    def sent(bits, which):
        """Sends numbers to all devices. Returns zeros."""
        return _either([_inline(_send, bits, place(d - 1, which), *_splat(column, *mail[d], turn)) for d in distances])

    def added(which, after):
        """The sum of this device's numbers and those that all others sent."""
        return _inline(functools.partial(_add_up, devices), bits, place(0, which), *_splat(column, *mail[0], turn, own_rank), after)

    if not in_two_steps(rows, devices):
        return _value(added(inside, sent(bits, inside))), turn
    share = _quotient(column, SHARE)
    distance = share - devices * _quotient(share, devices) - own_rank
    distance = jnp.where(distance < 0, distance + devices, distance)  # from this device to the one that adds the number up
    own, others = inside & (distance == 0), inside & (distance != 0)
    to = [
        functools.reduce(lambda found, d: jnp.where(distance == d, mail[d][i], found), distances, jnp.zeros_like(column)) for i in range(2)
    ]
    total = _value(added(own, _inline(_send, bits, place(distance - 1, others), *to, *_splat(column, turn))))
    total = jax.lax.bitcast_convert_type(total.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
    got = _inline(_receive, place(devices - distance - 1, others), *_splat(column, *mail[0], turn), sent(total, own))
    return _value(jnp.where(own, total, got)), turn


def _either(arrays):
    return functools.reduce(operator.or_, arrays)


def _value(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _turn_begins(column, mail):
    """The turn's number, [1] int32, and a function that gives the places of messages: (line, which) -> [W] int32, bytes from where the
    mailbox begins, or -1 where `which` is false. Lines are those of the devices that send, the next one before this one first."""
    row = pl.program_id(0)
    turn = _inline(_turn, *_single(*mail[0], 4 * row))
    # A new mailbox holds 0, so no turn may have that number. We take 2 in its place, which is even too.
    turn = jnp.where(turn == -1, 2, turn + 1)
    # A thread's two messages lie half a row apart, so that what threads store at the same time lies side by side.
    message, half = _quotient(column, MESSAGE), column.shape[0] // MESSAGE // 2
    at = COUNTERS + 16 * (_quotient(message, 2) + half * (message - 2 * _quotient(message, 2)))
    first = jnp.bitwise_and(turn, 1) * (len(mail) - 2)
    return turn, lambda line, which: jnp.where(which, at + ((first + line) * MOST_ROWS + row) * LINE, -1)


def _swap(bits, inside, mail, turn, place):
    """The rows of all devices, in the order of devices. bits: [W] int32, this device's row, with zeros in the lower half of each number."""
    devices, (own_rank, _) = len(mail) - 1, mail[-1]
    distances = range(1, devices)
    sent = _either([_inline(_send, bits, place(d - 1, inside), *_splat(bits, *mail[d], turn)) for d in distances])
    at_distance = [bits, *(_inline(_receive, place(d - 1, inside), *_splat(bits, *mail[0], turn), sent) for d in distances)]

    def of(rank):
        distance = own_rank - rank
        distance = jnp.where(distance < 0, distance + devices, distance)
        return functools.reduce(lambda found, d: jnp.where(distance == d, at_distance[d], found), distances, bits)

    return [of(rank) for rank in range(devices)]


def turn_ends(turn, seen, mail):
    """Counts the turn. Returns a condition that is always true; stores that depend on it keep the count from being optimised away.

    seen: [], a number computed from all that the program's threads have received, so that all of them have read the turn's number.
    """
    seen = jax.lax.bitcast_convert_type(seen, jnp.int32)
    zero = _inline(_count, *_single(*mail[0], 4 * pl.program_id(0)), turn, *_single(seen))
    return zero == 0


def _single(*scalars):
    """Scalars as arrays of one number, since assembly takes no scalars."""
    return [jnp.broadcast_to(scalar, (1,)) for scalar in scalars]


def _splat(like, *scalars):
    return [jnp.broadcast_to(scalar, like.shape) for scalar in scalars]


def _quotient(x, size):
    return jax.lax.div(x, jnp.full_like(x, size))


def _inline(asm, *args):
    """What assembly returns for int32 arrays of one shape.

    asm: makes the text, from the registers of the result and of each argument. A thread runs it once for all the numbers that it holds, so
    that it waits once; in two steps it holds twice as many, and runs it twice.
    """
    pack = max(1, min(WARP, args[0].size) // THREADS)
    registers = [[f"${pack * i + j}" for j in range(pack)] for i in range(1 + len(args))]
    (found,) = plgpu.elementwise_inline_asm(
        "{\n" + asm(*registers) + "\n}",
        args=args,
        constraints=",".join(["=r"] * pack + ["r"] * (pack * len(args))),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.int32)],
    )
    return found


def _turn(result, low, high, offset):
    return f"{_address(low[0], high[0], offset[0])} ld.volatile.global.b32 {result[0]}, [a];"


def _count(result, low, high, offset, turn, _):
    return f"{_address(low[0], high[0], offset[0])} st.volatile.global.b32 [a], {turn[0]}; mov.b32 {result[0]}, 0;"


def _address(low, high, offset):
    return f".reg .b64 a, o; mov.b64 a, {{{low}, {high}}}; cvt.u64.u32 o, {offset}; add.u64 a, a, o;"


def _messages(places, low, high):
    """How many messages a thread has, and the lines that set their addresses, a0, a1, ..., and whether they exist, p0, p1, ..."""
    count = len(places) // MESSAGE
    lines = [f".reg .b64 o, a<{count}>; .reg .pred q, p<{count}>;"]
    for i in range(count):
        first = MESSAGE * i
        lines.append(f"setp.ge.s32 p{i}, {places[first]}, 0; cvt.u64.u32 o, {places[first]};")
        lines.append(f"mov.b64 a{i}, {{{low[first]}, {high[first]}}}; add.u64 a{i}, a{i}, o;")
    return count, lines


def _send(result, bits, places, low, high, turn):
    count, lines = _messages(places, low, high)
    lines.append(".reg .b32 u, v;")
    for i in range(count):
        a, b, c, d = bits[MESSAGE * i : MESSAGE * i + MESSAGE]
        lines.append(f"prmt.b32 u, {a}, {b}, 0x7632; prmt.b32 v, {c}, {d}, 0x7632;")  # the upper halves, the first one below
        # A message needs four numbers in a row. A thread holds them so; if it ever does not, we trap.
        lines.append(f"setp.ne.b32 q, {places[MESSAGE * i]}, {places[MESSAGE * i + MESSAGE - 1]}; @q trap;")
        lines.append(f"@p{i} st.volatile.global.v4.b32 [a{i}], {{u, {turn[0]}, v, {turn[0]}}};")
    return "\n".join([*lines, *(f"mov.b32 {r}, 0;" for r in result)])


def _receive(result, places, low, high, turn, _):
    lines, (got,) = _arrived(1, places, low, high, turn)
    return "\n".join([*lines, *(f"mov.b32 {to}, {number};" for to, number in zip(result, got, strict=True))])


def _add_up(devices, result, bits, places, low, high, turn, rank, _):
    lines, got = _arrived(devices - 1, places, low, high, turn)
    # In the order of devices, so that all have the same sum.
    for own in range(devices):
        lines.append(f"setp.ne.s32 q, {rank[0]}, {own}; @q bra NOT{own};")
        first, *others = [bits if device == own else got[(own - device) % devices - 1] for device in range(devices)]
        for j in range(len(result)):
            lines += [f"add.f32 t{j}, {f't{j}' if n else first[j]}, {other[j]};" for n, other in enumerate(others)]
        lines.append(f"NOT{own}:")
    lines.insert(0, f".reg .b32 t<{len(result)}>;")
    return "\n".join([*lines, *(f"mov.b32 {to}, t{j};" for j, to in enumerate(result))])


def _arrived(senders, places, low, high, turn):
    """The lines that wait for the messages of so many devices, whose places follow one another, and registers with the numbers of each."""
    count, lines = _messages(places, low, high)
    every = [(sender * count + i, i, sender * MOST_ROWS * LINE) for sender in range(senders) for i in range(count)]
    lines.append(f".reg .b32 u<{len(every)}>, v<{len(every)}>, f<{len(every)}>, g<{len(every)}>, e<{MESSAGE * len(every)}>;")
    lines += [f"mov.b32 u{m}, 0; mov.b32 v{m}, 0; mov.b32 f{m}, {turn[0]}; mov.b32 g{m}, {turn[0]};" for m, _, _ in every]
    lines.append("WAIT:")
    lines += [f"@p{i} ld.volatile.global.v4.b32 {{u{m}, f{m}, v{m}, g{m}}}, [a{i}+{line}];" for m, i, line in every]
    lines.append("setp.ne.b32 q, 0, 0;")
    lines += [f"setp.ne.or.b32 q, {flag}{m}, {turn[0]}, q;" for m, _, _ in every for flag in "fg"]
    lines.append("@q bra WAIT;")
    numbers = [f"e{n}" for n in range(MESSAGE * len(every))]
    for m, _, _ in every:
        a, b, c, d = numbers[MESSAGE * m : MESSAGE * m + MESSAGE]
        lines.append(f"shl.b32 {a}, u{m}, 16; and.b32 {b}, u{m}, 0xffff0000; shl.b32 {c}, v{m}, 16; and.b32 {d}, v{m}, 0xffff0000;")
    return lines, [numbers[len(places) * sender : len(places) * (sender + 1)] for sender in range(senders)]
