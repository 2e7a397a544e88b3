"""What a device's memory holds: weights, slots, pages of full attention, and room to work in. From shapes alone; nothing is loaded.

A slot has its sliding rings, its tokens and the drafter's state, whatever its length; pages of full attention are shared by all slots.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from typing import Any

import jax

from jaxspec import sharding
from jaxspec.checks import integer
from jaxspec.engine.runner import PAGE, PREFILL_CHUNK, PREFILL_ROWS, PREFIX_BYTES, Runner
from jaxspec.model.config import FULL, SLIDING, LayerSpec
from jaxspec.model.target import TargetConfig

# Slots that are taken without being asked for: with 4 drafts each, what they verify is about what keeps a GPU's arithmetic as busy as its
# memory, and more of them gain little.
AUTO_SLOTS = 64
SHARE = 2  # of max_len, one in so many positions is counted on for a slot; where that is too few, sequences give way and are computed again
# Bytes of temporaries for each logit of a decode call, of [B, K + 1, V]. XLA's programs for an H200 have 4, the float32 itself, where
# nothing is filtered, and 16 to 21 with every filter, penalty and log-probability (31B and 26B-A4B, B = 8 and 64).
LOGIT = 21


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on each device.

    target, drafter: weights. fixed: of the state, what all slots share. slot: what a slot takes beside its pages; rings: those of
    sliding layers, of which it is most. page: one page of 64 positions in all full layers. width: pages of a sequence of max_len.
    decode: temporaries of a decode call for each slot. prefill: those of a prefill call.
    """

    target: int
    drafter: int
    fixed: int
    slot: int
    rings: int
    page: int
    width: int
    decode: int
    prefill: int

    @property
    def weights(self) -> int:
        return self.target + self.drafter

    def work(self, slots: int) -> int:
        """Temporaries of the largest call, of which one runs at a time."""
        return max(slots * self.decode, self.prefill)

    def kept(self, slots: int, pages: int) -> int:
        """What stays between calls: weights and state."""
        return self.weights + self.fixed + slots * self.slot + pages * self.page


def sizes_of(
    target: Any,
    drafter: Any,
    *,
    max_len: int,
    num_draft_tokens: int,
    kv_dtype: Any = None,
    kernels: bool = True,
    mesh: Any = None,
) -> Sizes:
    """target, drafter: abstract weights, or real ones. kernels: whether attention runs in kernels, which keep scores to themselves;
    XLA's attention gathers keys and values of max_len. mesh: a Mesh or an AbstractMesh, over whose "tensor" axis a device's part is
    counted; slots and pages are then those of one entry of its "data" axis."""
    if mesh is not None:
        target, drafter = (sharding.spread(sharding.shard_tree(tree, mesh), mesh) for tree in (target, drafter))
    init = functools.partial(
        Runner.init_state, target, drafter, max_len=max_len, num_draft_tokens=num_draft_tokens, kv_dtype=kv_dtype, page_size=PAGE
    )

    def shapes(slots: int, pages: int) -> Any:
        made = functools.partial(init, slots=slots, full_pages=pages)
        return jax.eval_shape(made) if mesh is None else sharding.Layout.of(mesh, drafter, made).shapes

    def state(slots: int, pages: int) -> int:
        return sharding.bytes_per_device(shapes(slots, pages))

    def rings(slots: int) -> int:
        layers = zip(shapes(slots, 1).cache.layers, target.config.layers, strict=True)
        return sharding.bytes_per_device([layer for layer, spec in layers if spec.kind == SLIDING])

    one = state(1, 1)
    slot, page = state(2, 1) - one, state(1, 2) - one
    config, rows, itemsize = target.config, num_draft_tokens + 1, target.dtype.itemsize
    prefill = _activations(config, PREFILL_ROWS) * itemsize
    decode = LOGIT * rows * config.vocab_size
    if not kernels:
        decode += _attention(config, 1, rows, max_len, itemsize)
        prefill += _attention(config, PREFILL_ROWS // PREFILL_CHUNK, PREFILL_CHUNK, max_len, itemsize)
    return Sizes(
        target=sharding.bytes_per_device(target),
        drafter=sharding.bytes_per_device(drafter),
        fixed=one - slot - page,
        slot=slot,
        rings=rings(2) - rings(1),
        page=page,
        width=math.ceil(max_len / PAGE),
        decode=decode,
        prefill=prefill,
    )


def _activations(config: TargetConfig, rows: int) -> int:
    """Numbers that a layer's pass over so many rows holds: gate and up, the experts' rows, and a few times the hidden state."""

    def layer(spec: LayerSpec) -> int:
        experts = spec.top_k_experts * (2 * spec.moe_intermediate_size + spec.hidden_size)
        return 2 * spec.intermediate_size + experts + 4 * spec.hidden_size

    return rows * max(map(layer, config.layers))


def _attention(config: TargetConfig, batch: int, rows: int, max_len: int, itemsize: int) -> int:
    """Bytes of XLA's attention: gathered keys and values, and scores one and a half times."""
    full = [spec for spec in config.layers if spec.kind == FULL]
    gathered = max((2 * spec.num_kv_heads * spec.head_dim for spec in full), default=0) * max_len * itemsize
    return batch * (gathered + 6 * rows * max((spec.num_heads for spec in full), default=0) * max_len)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many slots, pages for all of them together, and bytes for snapshots of prompts."""

    slots: int
    pages: int
    prefix_bytes: int


def fit(sizes: Sizes, room: int | None, slots: int | None = None, pages: int | None = None, *, default_slots: int = 8) -> Plan:
    """What to make of so much room. room: bytes of a device that may be taken, None where it does not say, which gives `default_slots`.

    slots: what was asked for; None for as many as fit beside the calls' temporaries when sequences are half as long as max_len on
    average, at most 64. pages: what was asked for; None for what all slots can fill, or as many as fit beside prompts' snapshots in
    an eighth of the memory that they share. Raises ValueError with the numbers if weights, slots and the pages of one sequence of
    max_len do not fit.
    """
    if slots is None:
        slots = default_slots if room is None else most_slots(sizes, room, AUTO_SLOTS, pages, SHARE) or 1
    left = None if room is None else max(room - sizes.kept(slots, 0) - sizes.work(slots), 0)
    if pages is None:
        pages = slots * sizes.width
        if left is not None:
            pages = min(pages, max((left - min(PREFIX_BYTES, left // 8)) // sizes.page, sizes.width))
    if room is not None and sizes.kept(slots, pages) > room:
        raise ValueError(
            f"the weights take {size(sizes.weights)} and {slots} slots with {pages} pages {size(sizes.kept(slots, pages) - sizes.weights)} "
            f"of a device; there is {size(max(room, 0))} of it. Fewer max_slots or a smaller max_len take less, a larger memory_fraction "
            "allows more"
        )
    return Plan(slots, pages, PREFIX_BYTES if left is None else min(PREFIX_BYTES, max(left - pages * sizes.page, 0)))


def check(memory_fraction: float, slots: int | None) -> None:
    """Raises TypeError or ValueError for what `jaxspec.load` does not take."""
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction is {memory_fraction}, expected more than 0 and at most 1")
    if slots is not None:
        integer("max_slots", slots, 1)


def most_slots(sizes: Sizes, room: int, limit: int, pages: int | None = None, share: int = 1) -> int:
    """How many slots, up to a limit, fit with so many pages in all; None for as many as they fill when
    each is max_len / share long."""

    def exceeds(slots: int) -> bool:
        count = max(-(-slots * sizes.width // share), sizes.width) if pages is None else pages
        return sizes.kept(slots, count) + sizes.work(slots) > room

    return bisect.bisect_left(range(1, limit + 1), True, key=exceeds)


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def memory_limit(device: Any) -> int | None:
    """Bytes of a device's memory that JAX may use, or None where the device does not say (a CPU)."""
    return (device.memory_stats() or {}).get("bytes_limit")
