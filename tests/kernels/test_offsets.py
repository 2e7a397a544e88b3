"""Offsets into large arrays, as kernels are lowered for the largest pools that default plans have. Signed numbers of 32 bits end at 2**31
elements: one that is larger would be read and written elsewhere."""

import functools
import importlib
import math
import re
import types

import jax
import jax.numpy as jnp
import pytest
from lowering import triton_kernels

from jaxspec import released
from jaxspec.compile_check.cases import kernel_cases
from jaxspec.compile_check.check import GPUS
from jaxspec.engine import memory
from jaxspec.engine.settings import PAGE
from jaxspec.model.layer_spec import FULL
from jaxspec.targets import abstract_target
from pallas_kernels import device, dialect

MEMORY = (24, 40, 48, 80, 94, 141)  # GB of a device
NARROW = 2**31  # elements that signed offsets of 32 bits reach
FP8 = jnp.dtype(jnp.float8_e4m3fn)
H200 = device.Described(GPUS["h200"].kind, "9.0")


def size(array):
    return math.prod(array.shape)


@functools.cache
def planned():
    """(KV heads, dims of a key, dims of a value) -> the pools of a full layer in float8, [K, V] by plan. All released models."""
    found = {}
    for name in released.TARGETS:
        config = released.target_config(name)
        target, max_len = abstract_target(config, jnp.bfloat16), config.max_position_embeddings
        drafter = released.abstract_drafter("mtp" if released.has_drafter("mtp", name) else "modules", name, config, jnp.bfloat16)
        sizes = memory.sizes_of(target, drafter, max_len=max_len, num_draft_tokens=4, kv_dtype=FP8)
        spec = next(spec for spec in config.layers if spec.kind == FULL)
        for room in (int(0.9e9 * size) for size in MEMORY):
            if sizes.kept(1, sizes.width) + sizes.work(1) <= room:
                shape = memory.fit(sizes, room).pages, PAGE, spec.num_kv_heads
                pair = [jax.ShapeDtypeStruct((*shape, dims), FP8) for dims in (spec.key_dims, spec.head_dim)]
                found.setdefault((spec.num_kv_heads, spec.key_dims, spec.head_dim), []).append(pair)
    return found


def hardest(pools):
    """Of several pools the largest that have no more than 2**32 elements, if that is more than 2**31, else the largest of all."""
    beyond = [pair for pair in pools if any(NARROW < size(pool) <= 2**32 for pool in pair)]
    return max(beyond or pools, key=lambda pair: size(pair[1]))


def with_pools(case):
    """The arguments of a case, with planned pools of float8 if it has pages of full layers; None if it has others."""
    place = {"paged_attention": 2, "qkv": -1}.get(case.kernel)
    if place is None:
        return case.args
    args = list(case.args)
    k, v = args[place][:2] if args[place] is not None else (None, None)
    pools = planned().get((v.shape[2], k.shape[3], v.shape[3])) if k is not None else None
    if pools is None or (case.kernel == "paged_attention" and k.dtype != FP8):
        return None
    pair = hardest(pools)
    args[place] = args[place]._replace(k=pair[0], v=pair[1]) if case.kernel == "qkv" else pair
    return args


def large_programs():
    """(case, arguments) of every kernel that has an array of more than 2**31 elements."""
    with device.described_as(H200):
        cases = [case for case in kernel_cases() if not case.further]
    programs = [(case, with_pools(case)) for case in cases]
    return [(case, args) for case, args in programs if any(size(leaf) > NARROW for leaf in jax.tree.leaves(args))]


def offsets(arrays, text):
    """(elements, bits of an offset) of every place where a kernel adds to the address of an array. arrays: the types of its arguments."""
    names = re.search(r"tt\.func.*?\((.*)\) ", text)[1]
    arguments = re.findall(r"(%\w+): !tt\.ptr", names)
    sizes = {name: size(kind) for name, kind in zip(arguments, arrays, strict=True)}
    found = []
    for line in text.splitlines():
        if splat := re.search(r"(%\w+) = tt\.splat (%\w+) :", line):
            sizes[splat[1]] = sizes.get(splat[2])
        elif added := re.search(r"tt\.addptr (%\w+), %\w+ : .*?(?:x|, )i(\d+)>?$", re.sub(r" loc\(.*", "", line)):
            found.append((sizes[added[1]], int(added[2])))
    assert len(found) == text.count("tt.addptr") > 0
    return found


def test_offsets_into_large_arrays_have_64_bits():
    reached, kernels = set(), set()
    for case, args in large_programs():
        with device.described_as(H200):
            for name, arrays, text in triton_kernels(jax.jit(case.function), *args):
                for elements, bits in offsets(arrays, text):
                    assert bits == 64 or elements <= NARROW, f"{case.name}: offsets of {name} into {elements} elements have {bits} bits"
                    if elements > NARROW:
                        reached.add(elements)
                        kernels.add(name)
    # Among them are pools of numbers of one byte with between 2**31 and 2**32 of them, and 288 experts of a layer.
    assert kernels == {"paged_attention", "qkv", "moe_gate_up"} and any(elements <= 2**32 for elements in reached), (kernels, reached)


@pytest.mark.parametrize("elements", [2**31, 2**31 + 1])
def test_a_jax_that_is_not_known_to_compute_them_is_refused(monkeypatch, elements):
    """With the numbers: what such a program reads would be from elsewhere, and nobody would know."""
    monkeypatch.setattr(importlib, "import_module", lambda name: types.ModuleType(name))
    monkeypatch.setattr(dialect, "widen_offsets", dialect.widen_offsets.__wrapped__)

    def copy(x):
        settings = {"num_warps": 4, "num_stages": 1, "interpret": False, "out_shape": jax.ShapeDtypeStruct((1,), x.dtype)}
        return dialect.call(lambda x, out: None, name="copy", grid=(1,), **settings)(x)

    array = jax.ShapeDtypeStruct((elements,), FP8)
    if elements <= NARROW:
        assert jax.eval_shape(copy, array).shape == (1,)
    else:
        with pytest.raises(NotImplementedError, match="'copy' has 2,147,483,649 elements of one byte, which need offsets of 64"):
            jax.eval_shape(copy, array)
