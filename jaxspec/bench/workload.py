"""What `jaxspec bench` is to time. Everything is checked before any weight is made."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec import decode, released
from jaxspec.checks import integer, number
from jaxspec.decode.accept import COUPLED, Rule, rule_of, synthetic
from jaxspec.drafters.base import check_tree, num_draft_tokens_of
from jaxspec.engine.buckets import PREFILL_ROWS, prefill_rows
from jaxspec.engine.memory import memory_limit
from jaxspec.engine.settings import in_kernels
from jaxspec.model.draft_tree import DraftTree, tree_of
from jaxspec.model.head_guides import guided
from jaxspec.model.target import TargetConfig
from jaxspec.planning import with_head_guides
from jaxspec.sampling.choice import PLAIN, Needs
from jaxspec.sampling.filters import CANDIDATES
from jaxspec.sharding.layout import Layout
from jaxspec.sharding.placement import ONE_DEVICE, OneDeviceLayout, Placement, placement_of
from jaxspec.targets import DTYPES, abstract_target
from jaxspec.trees import bytes_per_device, packed_kinds
from pallas_kernels import dialect, lm_head
from pallas_kernels.dialect import IMPLEMENTATIONS
from pallas_kernels.lm_head.guided import MOST_LIKELY_ROWS

RATES = (0.92, 0.78, 0.67, 0.57)  # how often draft positions 1, 2, ... are accepted together with all before them
QUEUED = 5  # timed calls of a round that are queued one behind the other
WARM_UPS, WARM_UP_STEPS = 3, 3  # a CUDA graph is recorded in the second run of a program's loop body
MEMORY_FRACTION = 0.95  # of what JAX may use; the rest is for temporary arrays


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the model does while it is timed."""

    num_draft_tokens: int
    accept: Rule
    rows: int | None = None  # of the target's pass, for all sequences of a data shard together; None for K + 1 of each
    tree: DraftTree | None = None  # of drafts, K being its depth; None for a chain
    context: int = 512  # tokens of a prompt
    tokens: int = 128  # new tokens of a sequence in a timed call, about
    temperature: float = 0.0  # of every sequence, as top_k and top_p are
    top_k: int = 0  # 0 for all tokens
    top_p: float = 1.0  # 1 for all tokens
    structured: int = 0  # states of the automaton that texts follow; 0 for free texts
    attention: str = "auto"
    draft_attention: str = "auto"
    repeats: int = 3  # timed calls
    prefill_chunk: int = PREFILL_ROWS  # most rows of a prefill call
    seed: int = 0
    profile: str | None = None  # folder for traces

    @property
    def steps(self) -> int:
        """How many more rounds a long timed call has than a short one, which has a single round."""
        expected = 1 + sum(self.accept.rates[: self.num_draft_tokens])
        return max(math.ceil(self.tokens / expected), 1)

    @property
    def rows_each(self) -> int:
        """Rows of the target's pass of each sequence, where all drafts have one."""
        return self.num_draft_tokens + 1 if self.tree is None else self.tree.rows

    @property
    def max_len(self) -> int:
        """Positions of a sequence: enough for every round to accept all drafts."""
        rounds = WARM_UPS * WARM_UP_STEPS + self.repeats * (2 + self.steps) + 2 * QUEUED + (self.profile is not None) * (1 + self.steps)
        return self.context + 2 + rounds * (self.num_draft_tokens + 1)

    @property
    def round(self) -> decode.Round:
        """What a timed round is compiled for."""
        plain = not self.temperature or (not self.top_k and self.top_p == 1)
        needs = PLAIN if plain else Needs("top" if 0 < self.top_k <= CANDIDATES else "search")
        needs = dataclasses.replace(needs, structured=self.structured > 0)
        return decode.Round(self.num_draft_tokens, self.accept, needs, self.attention, self.draft_attention, self.rows, self.tree)

    def init_state(self, target: Any, drafter: Any, *, slots: int, max_len: int) -> decode.DecodeState:
        """An empty state for this workload."""
        return decode.init_state(target, drafter, slots=slots, max_len=max_len, num_draft_tokens=self.num_draft_tokens)


@dataclasses.dataclass(frozen=True)
class BenchPlan:
    """A model, and what to time of it."""

    config: str  # the target's name or folder
    drafter: str  # the drafter's
    dtype: str
    quantize: str | None  # how the target's float weights are quantised, or how its checkpoint's are
    quantize_embedding: str | None  # how its token embedding is
    quantize_activations: str | None  # what rows of products with its matrices are rounded to
    quantize_drafter: str | None  # how the drafter's are, in either way
    target_tree: Any  # of ShapeDtypeStructs
    drafter_tree: Any  # of ShapeDtypeStructs
    batches: tuple[int, ...]  # batch sizes to decode, each at each of the temperatures
    temperatures: tuple[float, ...]
    prefill: tuple[int, ...]  # lengths of prompts to time
    work: Workload  # its temperature is that of the timed prompts
    placement: Placement = ONE_DEVICE

    @property
    def shards(self) -> int:
        """The number of data shards that a batch is spread over."""
        return self.placement.shards

    @property
    def devices_of_a_shard(self) -> int:
        """The number of devices that hold one data shard."""
        return self.placement.size // self.placement.shards

    def placed(self) -> tuple[Any, Any]:
        """The target's and the drafter's tree with their shardings."""
        place, spread = self.placement.place, self.placement.spread
        return spread(place(self.target_tree)), spread(place(self.drafter_tree))

    def read(self, rows: int) -> tuple[Any, Any]:
        """The target's and the drafter's tree with the guides that a step reads in place of their heads. rows: of the target's pass. The
        target reads its whole head where more of its logits are needed than the choice or, of few rows, filters need: by an automaton, or
        a rule that does not share the noise."""
        if not self.placement.head_guides:
            return self.target_tree, self.drafter_tree
        needs = self.work.round.needs
        few = needs.choice_alone or (needs.likeliest_alone and rows <= MOST_LIKELY_ROWS)
        target = guided(self.target_tree) if few and self.work.accept.shares_noise else self.target_tree
        return target, guided(self.drafter_tree)

    def layout(self, target: Any, drafter: Any, slots: int, max_len: int) -> Layout | OneDeviceLayout:
        """How a state with this many slots, those of all data shards together, lies on the devices."""
        init = functools.partial(self.work.init_state, target, drafter, slots=slots // self.shards, max_len=max_len)
        return self.placement.layout(drafter, init)


def plan_bench(
    config: str,
    drafter: str = "none",
    *,
    num_draft_tokens: int | None = None,
    rows: int | None = None,
    tree: int | Sequence[Sequence[int]] | DraftTree | None = None,
    batches: Sequence[int] = (1,),
    temperatures: Sequence[float] = (0.0,),
    prefill: Sequence[int] = (),
    acceptance: Sequence[float] | str | None = None,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    quantize_embedding: str | None = None,
    quantize_activations: str | None = None,
    quantize_drafter: str | None = None,
    head_guide: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
    **workload: Any,
) -> BenchPlan:
    """Checks a request to time steps of each batch size at each temperature, and prompts of each length in `prefill`.

    config: a key of `released.TARGETS`, or a checkpoint folder, of which only config.json is read. drafter: "none", a name of
    `released.drafter_names`, a folder, or "same" for the one in the target's own checkpoint. num_draft_tokens: by default 4, 0 without a
    drafter. rows: of the target's pass, for all sequences together, which go to the drafts that are most likely accepted; by default every
    draft has one. tree: of drafts, as for `jaxspec.load`, in place of num_draft_tokens; a step is timed. acceptance: rates, by default
    `RATES`, as for `accept.synthetic`, or the name of a rule, by default "coupled" for a tree; a rule accepts hardly any random draft, but
    takes the time that it takes. quantize, quantize_embedding, quantize_activations, quantize_drafter: as in `jaxspec.load`; without them a
    folder's weights are quantised as its config says. head_guide: as there. mesh: from `sharding.mesh`; its data axis divides each of
    `batches`, and is 1 if prompts are timed. workload: other fields of `Workload`.

    Raises ValueError, TypeError or FileNotFoundError for what does not exist, does not fit together or does not fit the device's memory.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; available: {', '.join(map(repr, DTYPES))}")
    target_config = released.target_config(config)
    asked = quantize, quantize_embedding, quantize_activations
    quantisation = released.target_quantisation(config, target_config, DTYPES[dtype], *asked)
    target: Any = abstract_target(target_config, DTYPES[dtype], quantisation)
    draft: Any = released.abstract_drafter(drafter, config, target_config, DTYPES[dtype], quantize_drafter)
    drafting = num_draft_tokens_of(draft) > 0
    count = 4 * drafting if num_draft_tokens is None else integer("num_draft_tokens", num_draft_tokens, 0)
    grown = None if tree is None else tree_of(tree)
    if grown is not None:
        check_tree(draft, grown, target_config)
        if num_draft_tokens is not None:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens} and tree is given too; expected one of them")
        count = grown.depth
    acceptance = (RATES if grown is None else COUPLED.name) if acceptance is None else acceptance
    if count and not drafting:
        raise ValueError(f"num_draft_tokens is {count} but there is no drafter; expected 0, or a drafter")
    accept = rule_of(acceptance) if isinstance(acceptance, str) else synthetic(acceptance)
    accept.check(count)
    placement = placement_of(mesh)
    attention, limit = workload.get("attention", "auto"), memory_limit(jax.devices()[0])
    pays = attention != "xla" and lm_head.guide_pays()
    workload = {"prefill_chunk": prefill_rows(target, in_kernels(attention))} | workload
    room = None if limit is None else int(MEMORY_FRACTION * limit)
    placement = with_head_guides(placement, target, draft, head_guide, room, pays=pays)
    if rows is not None and integer("rows", rows, 1) % placement.shards:
        raise ValueError(f"rows is {rows} and the mesh has {placement.shards} data shards; expected a multiple of {placement.shards}")
    work = Workload(count, accept, None if rows is None else rows // placement.shards, grown, **workload)
    _check(work, target_config, batches, temperatures, prefill)
    cells = tuple(batches), tuple(temperatures), tuple(prefill)
    if quantize is None and (stored := released.target_quantisation(config, target_config, DTYPES[dtype], None, None, None)):
        quantize = None if stored.dense else stored.name
    quantize_drafter = quantize_drafter or " and ".join(packed_kinds(draft)) or None
    names = config, drafter, dtype, quantize, quantize_embedding, quantize_activations, quantize_drafter
    made = BenchPlan(*names, target, draft, *cells, work, placement)
    for batch in [*batches, *[1] * len(prefill)]:
        if batch % made.shards:
            raise ValueError(f"batch is {batch} and the mesh has {made.shards} data shards; expected a multiple of {made.shards}")
    for batch in batches:
        work.round.check(batch // made.shards)
    _check_memory(made)
    return made


def _check(work: Workload, config: TargetConfig, batches: Sequence[int], temperatures: Sequence[float], prefill: Sequence[int]) -> None:
    for name in ("context", "tokens", "repeats", "prefill_chunk"):
        integer(name, getattr(work, name), 1)
    for temperature in temperatures:
        number("temperature", temperature, 0)
    integer("top_k", work.top_k, 0)
    integer("structured", work.structured, 0, 60_000)
    if not 0 < work.top_p <= 1:
        raise ValueError(f"top_p is {work.top_p}, expected more than 0 and at most 1")
    for name in ("attention", "draft_attention"):
        if getattr(work, name) not in ("auto", *IMPLEMENTATIONS):
            raise ValueError(f"{name} is {getattr(work, name)!r}; available: {', '.join(map(repr, ('auto', *IMPLEMENTATIONS)))}")
        if getattr(work, name) == "triton" and (obstacle := dialect.obstacle()):
            raise ValueError(f"{name} is 'triton', but {obstacle}")
    longest = config.max_position_embeddings
    for batch in batches:
        integer("batch", batch, 1)
    for length in prefill:
        integer("prefill", length, 1, longest - 2)
    if batches and work.max_len > longest:
        raise ValueError(
            f"context {work.context} and {work.repeats} timed calls of {work.steps} steps may take {work.max_len} positions; "
            f"the config has max_position_embeddings {longest}"
        )


def _check_memory(plan: BenchPlan) -> None:
    """Raises ValueError if a device has no room for its share of the weights and of the largest state."""
    work, trees = plan.work, plan.placed()
    sizes = [(batch, work.max_len) for batch in plan.batches] + [(1, length + 2) for length in plan.prefill]

    def state_bytes(slots: int, max_len: int) -> int:
        return bytes_per_device(plan.layout(*trees, slots, max_len).shapes)

    state, slots, length = max(((state_bytes(*size), *size) for size in sizes), default=(0, 0, 0))
    device, gib = jax.devices()[0], 2**30
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device.platform == "cpu" else memory_limit(device)
    target, drafter = map(bytes_per_device, trees)
    needed = target + drafter + state
    if limit is not None and needed > MEMORY_FRACTION * limit:
        raise ValueError(
            f"{plan.config} needs {needed / gib:.2f} GiB: target {target / gib:.2f}, drafter {drafter / gib:.2f}, "
            f"{slots} slots of {length} positions {state / gib:.2f}; {device.device_kind} has {MEMORY_FRACTION * limit / gib:.2f}"
        )
