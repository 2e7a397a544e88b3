"""What a device's memory holds: weights, slots, pages of full attention, and room to work in. From shapes alone; nothing is loaded.

A slot has its sliding rings, its tokens and the drafter's state, whatever its length; pages of full attention are shared by all slots.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint.from_floats import HEAD
from jaxspec.checks import integer
from jaxspec.engine.admission import init_state
from jaxspec.engine.buckets import PREFILL_CHUNK, PREFILL_ROWS, insert_chunk, prefill_rows
from jaxspec.engine.settings import PAGE, PREFIX_BYTES
from jaxspec.learning.settings import Learn, parts
from jaxspec.model.head_guides import guided
from jaxspec.model.layer_spec import FULL, SLIDING, LayerSpec
from jaxspec.model.layers import Linear
from jaxspec.model.target import TargetConfig
from jaxspec.sharding.placement import ONE_DEVICE, Placement
from jaxspec.trees import bytes_per_device, is_packed, leaves_by_path, nbytes, weights_of
from pallas_kernels.linear import most_rows
from pallas_kernels.linear.reference import UNPACKED_BYTES

# The most slots that are chosen when nobody asks for a number. With 4 drafts each, the rows that they verify keep a GPU's arithmetic about
# as busy as its memory, and more slots gain little.
AUTO_SLOTS = 64
SHARE = 2  # pages are planned for sequences of max_len / SHARE; if they grow longer and pages run out, the youngest is preempted
# Bytes of temporaries for each of the [B, K + 1, V] logits of a decode call. XLA's programs for an H200 take 4, the float32 itself, where
# nothing is filtered, and 16 to 21 with every filter, penalty and log-probability (31B and 26B-A4B, B = 8 and 64).
LOGIT = 21
# Bytes of temporaries of a product with a packed matrix in XLA, which unpacks a piece at a time: its codes, numbers and weights. XLA's
# program for 512 rows and the 31B's largest matrix takes 70 to 80 MiB beside its result. A kernel unpacks whole matrices: see `_unpacked`.
UNPACKING = 3 * UNPACKED_BYTES
# By how much calls may exceed the room: their temporaries are the most that any need, and memory_fraction leaves a tenth of the memory.
OVER = 9 / 8
# Arrays of the logits of a draft step, float32, that an update holds at a time: some, and some for each draft step. XLA's program for an
# H200 and the E2B's assistant takes 7 of them where 4 tokens are drafted.
LOGITS, LOGITS_STEP = 4, 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What each device holds. All but `width` are bytes."""

    target: int  # the target's weights
    drafter: int  # the drafter's weights
    fixed: int  # the part of the state that all slots share
    slot: int  # what each slot takes beside its pages
    rings: int  # of `slot`, what sliding layers take, which is most of it
    page: int  # one page of 64 positions in all full layers
    width: int  # pages of a sequence of max_len
    decode: int  # temporaries of a decode call, for each slot
    prefill: int  # temporaries of a prefill call
    unpacking: int  # temporaries of either, of products with packed matrices
    learnt: int = 0  # of a drafter that learns: master weights, the optimiser's moments, and weights on trial
    learning: int = 0  # temporaries of an update

    @property
    def weights(self) -> int:
        return self.target + self.drafter

    def work(self, slots: int) -> int:
        """Temporaries of the largest call, of which one runs at a time."""
        return max(slots * self.decode, self.prefill, self.learning) + self.unpacking

    def kept(self, slots: int, pages: int) -> int:
        """What stays between calls: weights and state."""
        return self.weights + self.learnt + self.fixed + slots * self.slot + pages * self.page


def sizes_of(
    target: Any,
    drafter: Any,
    *,
    max_len: int,
    num_draft_tokens: int,
    kv_dtype: Any = None,
    kernels: bool = True,
    placement: Placement = ONE_DEVICE,
    learn: Learn | None = None,
    insert_rows: int = 0,
) -> Sizes:
    """What a target and a drafter need of a device, slots and pages being those of one data shard.

    target, drafter: abstract weights, or real ones. kernels: whether attention runs in kernels, which keep their scores to themselves;
    XLA's attention gathers keys and values of max_len. learn: how the drafter learns, None if it does not. insert_rows: of an image, or
    of a part of a sound, at most; 0 where prompts have neither.
    """
    learnt, learning = (0, 0) if learn is None else learning_bytes(target.config, drafter, learn, num_draft_tokens, max_len, placement)
    packed = any(map(is_packed, weights_of((target, drafter))))  # guides of heads are packed too, but never unpacked
    target, drafter = (placement.spread(placement.place(tree)) for tree in (target, drafter))
    sizes = {"max_len": max_len, "num_draft_tokens": num_draft_tokens, "kv_dtype": kv_dtype, "page_size": PAGE}
    init = functools.partial(init_state, target, drafter, **sizes)

    @functools.cache  # a trace takes tens of milliseconds for a target of many layers
    def shapes(slots: int, pages: int) -> Any:
        return placement.layout(drafter, functools.partial(init, slots=slots, full_pages=pages)).shapes

    def state(slots: int, pages: int) -> int:
        return bytes_per_device(shapes(slots, pages))

    def rings(slots: int) -> int:
        layers = zip(shapes(slots, 1).cache.layers, target.config.layers, strict=True)
        return bytes_per_device([layer for layer, spec in layers if spec.kind == SLIDING])

    one = state(1, 1)
    slot, page = state(2, 1) - one, state(1, 2) - one
    config, rows, itemsize = target.config, num_draft_tokens + 1, target.dtype.itemsize
    with_insert = insert_chunk(insert_rows) if insert_rows else 0
    largest = max(prefill_rows(target, kernels), with_insert)
    prefill = _activations(config, largest) * itemsize
    decode = LOGIT * rows * config.vocab_size
    if not kernels:
        decode += _attention(config, 1, rows, max_len, itemsize)
        calls = (PREFILL_ROWS // PREFILL_CHUNK, PREFILL_CHUNK), (1, with_insert)
        prefill += max(_attention(config, *call, max_len, itemsize) for call in calls)
    return Sizes(
        target=bytes_per_device(target),
        drafter=bytes_per_device(drafter),
        fixed=one - slot - page,
        slot=slot,
        rings=rings(2) - rings(1),
        page=page,
        width=math.ceil(max_len / PAGE),
        decode=decode,
        prefill=prefill,
        unpacking=max(UNPACKING * packed, _unpacked(target, drafter, largest)),
        learnt=learnt,
        learning=learning,
    )


def learning_bytes(
    config: TargetConfig, drafter: Any, learn: Learn, num_draft_tokens: int, max_len: int, placement: Placement
) -> tuple[int, int]:
    """(what stays between updates, temporaries of one), bytes of each device."""
    placed = placement.place(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), drafter))
    floats = [x for x in jax.tree.leaves(placed) if jnp.issubdtype(x.dtype, jnp.floating)]
    own, master = bytes_per_device(floats), sum(4 * bytes_per_device([x]) // x.dtype.itemsize for x in floats)
    count, texts = parts(learn, config.vocab_size, placement.shards)
    texts, length = texts // placement.shards, min(learn.length, max_len)
    logits = 4 * (LOGITS + LOGITS_STEP * num_draft_tokens) * texts * learn.anchors * config.vocab_size
    scores = 6 * texts * length * length * max(spec.num_heads for spec in config.layers)
    rows = 4 * _activations(config, texts * length)
    guide = bytes_per_device(guided(placed)) - bytes_per_device(placed) if placement.head_guides else 0
    # Three float32 of each weight stay, and the weights in use before the next trial, which have a guide of their own. An update has
    # gradients, and the weights as the drafter has them; of a batch in parts, the sum of its gradients too.
    return 3 * master + 2 * own + guide, (1 + (count > 1)) * master + own + logits + scores + rows


def _activations(config: TargetConfig, rows: int) -> int:
    """Numbers that a layer's pass over so many rows holds: gate and up, the experts' rows, a few times the hidden state, and the inputs of
    all layers, which are made before the first."""

    def layer(spec: LayerSpec) -> int:
        experts = spec.top_k_experts * (2 * spec.moe_intermediate_size + spec.hidden_size)
        return 2 * spec.intermediate_size + experts + 4 * spec.hidden_size

    return rows * (max(map(layer, config.layers)) + 2 * sum(spec.per_layer_input for spec in config.layers))


def _unpacked(target: Any, drafter: Any, rows: int) -> int:
    """Bytes of the largest matrix that a kernel unpacks whole for products of so many rows, those of prompts: of a layer, or of a drafter
    and no head."""
    found = leaves_by_path((target.layers, drafter), whole=(Linear,))
    packed = [part.weight for path, part in found.items() if isinstance(part, Linear) and is_packed(part.weight) and not HEAD.search(path)]
    whole = [w for w in packed if w.inputs is None and rows > most_rows(w)]
    return max((w.size * bytes_per_device(w.words) // nbytes(w.words) for w in whole), default=0) * target.dtype.itemsize


def _attention(config: TargetConfig, batch: int, rows: int, max_len: int, itemsize: int) -> int:
    """Bytes of XLA's attention: gathered keys and values, and scores one and a half times."""
    full = [spec for spec in config.layers if spec.kind == FULL]
    gathered = max((2 * spec.num_kv_heads * spec.head_dim for spec in full), default=0) * max_len * itemsize
    return batch * (gathered + 6 * rows * max((spec.num_heads for spec in full), default=0) * max_len)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a data shard makes of its memory."""

    slots: int  # sequences that run at a time
    pages: int  # full-attention pages for all of them together
    prefix_bytes: int  # bytes for snapshots of prompts


def fit(
    sizes: Sizes,
    room: int | None,
    slots: int | None = None,
    pages: int | None = None,
    *,
    default_slots: int = 8,
    show: Callable[[int], str] | None = None,
) -> MemoryPlan:
    """What to make of so much room. room: bytes of a device that may be taken, None where it does not say, which gives `default_slots`.

    slots: what was asked for; None for as many as fit beside the calls' temporaries when sequences are half as long as max_len on
    average, at most 64. pages: what was asked for; None for what all slots can fill, or as many as fit beside prompts' snapshots in
    an eighth of the memory that they share. show: how bytes are told, by default as `size` does. Raises ValueError with the numbers if
    weights, slots, the pages of one sequence of max_len and, about, the calls' temporaries do not fit.
    """
    if slots is None:
        slots = default_slots if room is None else most_slots(sizes, room, AUTO_SLOTS, pages, SHARE) or 1
    left = None if room is None else max(room - sizes.kept(slots, 0) - sizes.work(slots), 0)
    if pages is None:
        pages = slots * sizes.width
        if left is not None:
            pages = min(pages, max((left - min(PREFIX_BYTES, left // 8)) // sizes.page, sizes.width))
    if room is not None and max(sizes.kept(slots, pages), (sizes.kept(slots, pages) + sizes.work(slots)) / OVER) > room:
        told = size if show is None else show
        learning = f", learning {told(sizes.learnt)}" if sizes.learnt else ""
        state = sizes.kept(slots, pages) - sizes.weights - sizes.learnt
        calls = f", calls {told(sizes.work(slots))}" if sizes.kept(slots, pages) <= room else ""
        raise ValueError(
            f"the weights take {told(sizes.weights)}{learning} and the state {told(state)} (slots: {slots}, pages: {pages}) of a "
            f"device{calls}; there is {told(max(room, 0))} of it. Fewer max_slots or a smaller max_len take less, a larger "
            "memory_fraction, or XLA_CLIENT_MEM_FRACTION before JAX starts, allows more"
        )
    return MemoryPlan(slots, pages, PREFIX_BYTES if left is None else min(PREFIX_BYTES, max(left - pages * sizes.page, 0)))


def check_limits(memory_fraction: float, slots: int | None) -> None:
    """Raises TypeError or ValueError for what `jaxspec.load` does not take."""
    if isinstance(memory_fraction, bool) or not isinstance(memory_fraction, numbers.Real):
        raise TypeError(f"memory_fraction is {memory_fraction!r} of type {type(memory_fraction).__name__}, expected a number")
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


def memory_used(device: Any) -> int:
    """Bytes of it that are in use, 0 where the device does not say. Garbage is collected first: an LLM refers to itself, and one that
    nobody has any more would count."""
    gc.collect()
    return (device.memory_stats() or {}).get("bytes_in_use", 0)
