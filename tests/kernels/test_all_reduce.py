"""Sums and gathers over devices: the protocol of the kernels on fake devices, with mailboxes in host memory, and `jax.lax` elsewhere."""

import contextlib
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from lowering import for_cuda

from pallas_kernels import all_reduce
from pallas_kernels.add_norm import add_norm
from pallas_kernels.add_norm import triton as add_norm_triton
from pallas_kernels.all_reduce import Unsummed, mailboxes, triton

BASES = [2**44 + 3 * 2**33 * i + 0x90000000 * (i % 2) for i in range(8)]  # some in the upper half of 32 bits


class Mailboxes:
    """What the kernels' assembly does, on memory that is made of messages by address."""

    def __init__(self, monkeypatch, devices):
        self.devices = devices
        self.slow = mailboxes.mailbox_table(BASES[:2])[0, 0, 0]  # a device that others wait for
        self.turns, self.messages, self.unread = {}, {}, set()
        monkeypatch.setattr(triton, "_inline", self.inline)

    def inline(self, asm, *args):
        act = self.add_up if isinstance(asm, functools.partial) else functools.partial(self.act, asm)
        return jax.pure_callback(act, jax.ShapeDtypeStruct(args[0].shape, jnp.int32), *args)

    def add_up(self, bits, places, low, high, turn, rank, after):
        devices, stride, own = self.devices, triton.MOST_ROWS * triton.LINE, int(rank[0])
        lines = [np.where(places < 0, places, places + n * stride) for n in range(devices - 1)]
        got = [np.asarray(bits), *(self.act(triton._receive, line, low, high, turn, after) for line in lines)]
        total = np.zeros(bits.shape, np.float32)
        for device in range(devices):
            total += got[(own - device) % devices].view(np.float32)
        return total.view(np.int32)

    def act(self, asm, *args):
        args = [np.asarray(x) for x in args]
        address = lambda low, high, at: (int(high) << 32 | int(low) & 0xFFFFFFFF) + int(at)  # noqa: E731
        if asm is triton._turn:
            return np.array([self.turns.get(address(*(x[0] for x in args)), 0)], np.int32)
        if asm is triton._count:
            self.turns[address(*(x[0] for x in args[:3]))] = int(args[3][0])
            return np.zeros(1, np.int32)
        sends = asm is triton._send
        places, low, high, turn = args[1:] if sends else args[:4]
        groups, lows, highs = (x.reshape(-1, triton.MESSAGE) for x in (places, low, high))
        assert (groups == groups[:, :1]).all()  # a message is one place
        out = np.zeros((len(groups), triton.MESSAGE), np.int32)
        if not sends and low[0] == self.slow:
            time.sleep(0.02)
        for i, place in enumerate(groups[:, 0]):
            if place >= 0:
                at = address(lows[i, 0], highs[i, 0], place)
                if sends:
                    assert at not in self.unread
                    self.unread.add(at)
                    self.messages[at] = (int(turn[0]), args[0].reshape(out.shape)[i] & -65536)
                else:
                    late = time.monotonic() + 20
                    while self.messages.get(at, (0,))[0] != turn[0]:
                        assert time.monotonic() < late, "a message was overwritten, or never sent"
                        time.sleep(0.001)
                    out[i] = self.messages[at][1]
                    self.unread.discard(at)
        return np.zeros_like(places) if sends else out.reshape(-1)


def on(devices, function, *args, mail=True):
    """What function(table, rank, *args) gives on each device, as [D, ...]."""
    mesh, spec = Mesh(np.asarray(jax.devices()[:devices]), ("tensor",)), PartitionSpec("tensor")

    def local(mail, rank, *args):
        out = function(None if mail is None else mail[0], rank[0], *args)
        return jax.tree.map(lambda x: x[None], out)

    tables = mailboxes.mailbox_table(BASES[:devices]) if mail else None
    specs = (spec if mail else None, spec, *[PartitionSpec()] * len(args))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    run = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    return run(tables, np.arange(devices, dtype=np.int32), *args)


@pytest.mark.parametrize(
    "devices, many", [(3, triton.LEAST_IN_TWO_STEPS), (2, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 2), (4, 3)))]
)
def test_the_protocol_adds_up_and_gathers_turn_after_turn(monkeypatch, devices, many):
    """Sums of several shapes follow one another, alone and with the norm that reads them, and gathers; some turns are past 2**32. So
    `many` rows are summed in two steps."""
    jax.clear_caches()  # kernels are traced once for all calls
    monkeypatch.setattr(triton, "LEAST_IN_TWO_STEPS", many)
    boxes, turns = Mailboxes(monkeypatch, devices), 4
    boxes.turns = {base + 4 * row: -3 for base in BASES for row in range(3)}  # the next are -2, -1, 2, 3, ...
    rng = np.random.default_rng(0)
    shapes = {1000: (3, 1000), 600: (2, 600)}
    rows = {width: jnp.asarray(rng.normal(size=(turns, devices, *shape)), jnp.bfloat16) for width, shape in shapes.items()}
    stream, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2, 600), (600,)))

    def run(mail, rank, rows):
        def after(x):  # a kernel's table once the kernel before is done: the count of its turns is in no array
            return jnp.where(jnp.isnan(x.astype(jnp.float32).sum()), 0, mail)

        def turn(before, rows):
            wide, narrow = rows[1000][rank], rows[600][rank]
            total = triton.all_reduce(wide, after(before), interpret=True)
            parts = jnp.stack([narrow.astype(jnp.float32) - 0.5, jnp.full(narrow.shape, 0.5, jnp.float32)])
            normed = add_norm_triton.add_norm(stream, Unsummed(parts, after(total)), weight, None, (weight,), 1e-6, interpret=True)
            halves = jax.lax.bitcast_convert_type(wide[:1, :256], jnp.uint16)
            every = triton.all_gather(halves, after(normed[1]), interpret=True)
            return every, (total, normed, every)

        return jax.lax.scan(turn, jnp.zeros((devices, 1, 256), jnp.uint16), rows)[1]

    def add_up(x):
        total = np.zeros(x.shape[1:], np.float32)
        for of_one in np.asarray(x, np.float32):
            total += of_one
        return jnp.asarray(total).astype(jnp.bfloat16)

    total, normed, every = on(devices, run, rows)
    norms = functools.partial(add_norm, eps=1e-6, implementation="triton-interpret")
    for turn in range(turns):
        wide, narrow = rows[1000][turn], rows[600][turn]
        plain = norms(stream, add_up(narrow), weight, next_weights=(weight,))
        for device in range(devices):
            np.testing.assert_array_equal(total[device, turn], add_up(wide))
            np.testing.assert_array_equal(every[device, turn], jax.lax.bitcast_convert_type(wide[:, :1, :256], jnp.uint16))
            for a, b in zip(normed, plain, strict=True):
                np.testing.assert_array_equal(a[device, turn], b)
    ended = [[boxes.turns[base + 4 * row] for row in range(3)] for base in BASES[:devices]]
    assert ended == [[11, 7, 3]] * devices  # of the rows that three kernels, two and one had


def test_without_mailboxes_jax_adds_up_and_gathers():
    """CPUs have none; nor are rows of other dtypes, widths and numbers for the kernel."""
    assert all_reduce.mailbox_tables([jax.devices()[:2]]) is None and all_reduce.mailbox_tables([jax.devices()[:1]]) is None
    x = np.arange(3 * 2 * 5, dtype=np.int32).reshape(3, 2, 5)

    def run(mail, rank, x):
        wide = jnp.ones((257, 512), jnp.bfloat16)
        own = x[rank]
        kinds = all_reduce.all_reduce(own, "tensor", mail), all_reduce.all_gather(own, "tensor", None)
        return *kinds, all_reduce.all_reduce(wide, "tensor", mail), all_reduce.all_reduce(jnp.float32(1), "tensor", mail)

    total, every, wide, one = on(3, run, x)
    for device in range(3):
        np.testing.assert_array_equal(total[device], x.sum(0))
        np.testing.assert_array_equal(every[device], x)
    assert (np.asarray(wide, np.float32) == 3).all() and one.tolist() == [3, 3, 3]
    for rows, width, dtype, found in [
        (1, 512, "float32", "numbers are float32; the kernel takes bfloat16"),
        (257, 512, "bfloat16", "there are 257 rows; the kernel takes at most 256"),
        (1, 516, "bfloat16", "a row has 516 numbers; the kernel takes multiples of 8 from 256 to 8192"),
        (1, 8200, "bfloat16", "a row has 8200 numbers"),
        (1, 248, "bfloat16", "a row has 248 numbers"),
    ]:
        assert (triton.unsupported(rows, width, jnp.dtype(dtype)) or "").startswith(found)
    assert triton.unsupported(256, 8192, jnp.dtype("bfloat16")) is None


@pytest.mark.parametrize("wrong_turn", [None, 0, mailboxes.TRIALS - 1])
def test_a_trial_finds_a_wrong_sum_or_gather(monkeypatch, wrong_turn):
    """On one device of three, in one turn."""
    turns = {"sum of 2": 0, f"sum of {triton.LEAST_IN_TWO_STEPS}": 0, "gather": 0}

    def spoiled(name, x):
        def count(rank, x):
            if rank != 1:
                return x
            turns[name] += 1
            return x + x.dtype.type(turns[name] - 1 == wrong_turn)

        return jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("devices"), x)

    monkeypatch.setattr(
        mailboxes,
        "all_reduce",
        lambda x, mail: spoiled(f"sum of {len(x)}", jax.lax.psum(x.astype(jnp.float32), "devices").astype(x.dtype)),
    )
    monkeypatch.setattr(mailboxes, "all_gather", lambda x, mail: spoiled("gather", jax.lax.all_gather(x, "devices")))
    found = mailboxes._wrong(tuple(jax.devices()[:3]), mailboxes.mailbox_table(BASES[:3]))
    assert found == (wrong_turn is not None) and turns == dict.fromkeys(turns, mailboxes.TRIALS)


def test_programs_for_gpus_hold_the_kernels():
    """Sums of few rows are one kernel, with the norm too; a gather of a few numbers is one as well. Two equal sums are lowered once."""
    mail, x = mailboxes.mailbox_table(BASES[:2])[0], jax.ShapeDtypeStruct((5, 1024), jnp.bfloat16)
    weight = jnp.ones(1024, jnp.bfloat16)

    def run(mail, x):
        total = all_reduce.all_reduce(x, "tensor", mail)
        several = ((Unsummed(x[None].astype(jnp.float32), mail), weight), (total, weight))
        (normed,) = add_norm(x, Unsummed(x[None].astype(jnp.float32), mail), weight, eps=1e-6, implementation="triton")
        (twice,) = add_norm(normed, several, weight, eps=1e-6, implementation="triton")
        return twice, all_reduce.all_gather(jnp.ones((2, 1, 5), jnp.int32), "tensor", mail)

    text = for_cuda(jax.jit(run), mail, x)
    assert sorted(re.findall(r'name = "(\w+)", num_stages', text)) == ["add_norm", "add_norm", "all_gather", "all_reduce"]
    assert "stablehlo.all_reduce" not in text
    shapes = [x.shape for x in jax.tree.leaves(jax.eval_shape(run, mail, x))]
    assert shapes == [(5, 1024), (2, 2, 1, 5)]


def test_a_table_names_the_mailboxes_from_each_device_on():
    table = mailboxes.mailbox_table(BASES[:3]).view(np.uint32).astype(np.uint64)
    addresses = (table[..., 1] << np.uint64(32)) | table[..., 0]
    for rank in range(3):
        assert addresses[rank, :3].tolist() == [BASES[(rank + d) % 3] for d in range(3)] and addresses[rank, 3] == rank


def test_a_kernel_is_tried_before_it_serves(monkeypatch):
    monkeypatch.setattr(mailboxes, "addresses", lambda devices: tuple(BASES[: len(devices)]))

    def broken(x, mail):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction\nand more")

    tries = {
        "GPUs \\[0, 1\\] add up by jax.lax, as the kernel fails: 100 of 100 sums or gathers are wrong": lambda x, mail: x,
        "as the kernel fails: INTERNAL: no such instruction$": broken,
        None: lambda x, mail: jax.lax.psum(x.astype(jnp.float32), "devices").astype(x.dtype),
    }
    monkeypatch.setattr(mailboxes, "all_gather", lambda x, mail: jax.lax.all_gather(x, "devices"))
    for warning, kernel in tries.items():
        mailboxes._tried.cache_clear()
        monkeypatch.setattr(mailboxes, "all_reduce", kernel)
        with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
            found = all_reduce.mailbox_tables([jax.devices()[:2]] * 2)
        assert found is None if warning else (found == mailboxes.mailbox_table(BASES[:2])).all() and found.shape == (2, 2, 3, 2)
    mailboxes._tried.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=concurrent")
    assert all_reduce.mailbox_tables([jax.devices()[:2]]) is None
