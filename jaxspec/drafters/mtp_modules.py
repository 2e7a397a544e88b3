"""Multi-token prediction with one module for each draft step.

Every module is one whole decoder layer of the target's kind, with K and V and a head of its own. Draft step s uses module s mod M.
At the row of position p it reads the token s + 1 places further on and, beside it, a hidden state of the same row: module 0 the
target's (`TargetModel.feature`), any other what the module before it gave, not normed. Positions do not advance: the guess of every step
is read at row P, the target's last. So K and V of module k at row p depend on tokens up to p + k + 1, and near the end of the text on
guesses. Facts: Step-3.5-Flash and vLLM `step3p5_mtp` with its multi-module speculator; DeepSeek-V3 (arXiv 2412.19437) section 2.2.

The schedule. The pages of every module hold the rows before the last M, all of whose tokens are known: they depend on the text alone,
not on what was guessed, nor on K. The last M rows, and those committed since the last `draft`, are kept as tokens and hidden states.
Each of the first M steps runs its module over all kept rows and stores those that are not among the last M; each later step runs the
last M rows again over the same pages, takes what the step before it gave, and stores nothing. Where this differs from the published
proposer: that one stores K and V of guesses too and computes them again after a rejection, and with K > M its modules leave in the
cache what their last step wrote, which depends on K (it wants K to be a multiple of M; this one does not).

A module's layer, its norms and how a checkpoint holds them are the family's: `model.target.ModulesFamily`. Module i is
`model.layers.{N + i}` with N the target's layers, made of a decoder layer's tensors, `enorm`, `hnorm`, `eh_proj`, `shared_head.norm` and
`shared_head.output`. The checkpoint is the target's own, or one of modules alone, whose config.json has a `model_type` of their own and
`num_nextn_predict_layers` M.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxspec.checkpoint import layout
from jaxspec.collectives import TENSOR
from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.training import XLA, Guess, Objective, pick
from jaxspec.model import paged_kv as paged
from jaxspec.model import traffic
from jaxspec.model.families import FAMILIES, MODULES_TYPES, family_of, family_of_modules
from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.layers import Linear, RMSNorm, softcap
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.model.rows import Hidden, Keys, take_row
from jaxspec.model.split import PARTITIONS
from jaxspec.model.target import Block, ModulesConfig, ModulesFamily, TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, draw
from jaxspec.trees import nbytes, told


@struct.dataclass
class SharedHead:
    """norm: [H]; output: [V, H]. One for each module, in spite of its name."""

    norm: RMSNorm
    output: Linear


@struct.dataclass
class Module:
    """One draft step. enorm, hnorm: [H]; eh_proj: [H, 2 H], of [embedding, hidden]; mtp_block: the layer."""

    enorm: RMSNorm
    hnorm: RMSNorm
    eh_proj: Linear
    mtp_block: Block
    shared_head: SharedHead

    gathers: ClassVar[tuple[str, ...]] = ("eh_proj",)

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, positions: jax.Array, keys: Keys, attention: str = "auto"
    ) -> tuple[jax.Array, Keys]:
        """embedded: [B, T, H], of each row's token (its scale does not matter: it is normed); hidden: [B, T, H]; positions: [B, T]
        int32. Returns the block's output [B, T, H] and the keys with the rows' own."""
        dtype = self.eh_proj.weight.dtype
        both = [self.enorm(embedded.astype(dtype)), self.hnorm(hidden.astype(dtype))]
        return self.mtp_block(self.eh_proj(jnp.concatenate(both, axis=-1)), positions, keys, attention)


@struct.dataclass
class MTPModel:
    """layers: a module by its index in the checkpoint, which goes on where the target's layers end."""

    layers: dict[str, Module]


@struct.dataclass
class PendingRows:
    """Rows whose K and V are not in the pages: R at most, of which the first are real.

    base: [B] int32, the position of the first, which is how many positions the pages hold. hidden: [B, R, H], the target's
    `feature`. ids: [B, R] int32, the token after each row.
    """

    base: jax.Array
    hidden: jax.Array
    ids: jax.Array

    def of(self, slots: jax.Array) -> PendingRows:
        return jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), self)

    def put(self, slots: jax.Array, rows: PendingRows) -> PendingRows:
        """slots: [B] int32; ids >= slots are ignored."""
        width = self.ids.shape[1]
        fitting = PendingRows(rows.base, rows.hidden[:, :width].astype(self.hidden.dtype), rows.ids[:, :width])
        return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), self, fitting)

    def without(self, count: jax.Array) -> PendingRows:
        """The rows after the first `count`, [B] int32."""
        at = count[:, None] + jnp.arange(self.ids.shape[1], dtype=jnp.int32)[None, :]
        ids = jnp.take_along_axis(self.ids, at, axis=1, mode="clip")
        return PendingRows(self.base + count, jnp.take_along_axis(self.hidden, at[..., None], axis=1, mode="clip"), ids)


@struct.dataclass
class ModulesState:
    """cache: one layer for each module in use. kept: for every slot.

    drafted: `draft` has run since the last `observe` and left room for a block's rows. It is a property of the program, never of the
    data: false in any state that a program takes or gives.
    """

    cache: PagedKV
    kept: PendingRows
    drafted: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class MTPModules:
    """The modules' weights; paths are the checkpoint's keys, but for `mtp_block`. page_size: positions in a page of their cache."""

    model: MTPModel
    config: ModulesConfig = struct.field(pytree_node=False)
    page_size: int = struct.field(pytree_node=False, default=64)

    __repr__ = told

    unquantised: ClassVar[tuple[str, ...]] = (r"\beh_proj$",)  # small beside a layer and a head
    partitions: ClassVar[tuple[tuple[str, PartitionSpec], ...]] = (
        (r"\b(shared_head\.output|eh_proj)\.weight$", PartitionSpec(TENSOR, None)),
        (r"\bg_proj\.weight$", PartitionSpec(TENSOR, None, None)),
        *PARTITIONS,
    )

    def layouts(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[layout.Part]]:
        """As the family's checkpoints hold a module's tensors."""
        layers = {self.config.num_hidden_layers + i: spec for i, spec in enumerate(self.config.layers)}
        return self._family.layouts(layers, path, shapes)

    @property
    def unread(self) -> tuple[str, ...]:
        """What is the target's, in whose checkpoint the modules may be."""
        return self._family.unread(self.config)

    @property
    def _family(self) -> ModulesFamily:
        return family_of_modules(self.config.model_type).modules

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.num_hidden_layers,)

    @property
    def modules(self) -> tuple[Module, ...]:
        first = self.config.num_hidden_layers
        return tuple(self.model.layers[str(first + i)] for i in range(len(self.config.layers)))

    @property
    def num_draft_tokens(self) -> int:
        """One for each module."""
        return len(self.config.layers)

    def bind(self, target: TargetConfig) -> MTPModules:
        bind(self.config, target)
        return self

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> ModulesState:
        used = self.config.layers[: max(num_draft_tokens, 1)]  # a later module is never reached
        dtype = self.modules[0].eh_proj.weight.dtype
        sizes = {"slots": slots, "max_len": max_len, "num_draft_tokens": num_draft_tokens, "page_size": self.page_size}
        cache = paged.fixed(paged.init(used, **sizes, dtype=dtype))
        rows = len(used) + num_draft_tokens + 1
        hidden = jnp.zeros((slots, rows, self.config.hidden_size), dtype)
        return ModulesState(cache, PendingRows(jnp.zeros((slots,), jnp.int32), hidden, jnp.zeros((slots, rows), jnp.int32)))

    def observe(self, state: ModulesState, rows: Observed) -> ModulesState:
        used, width = len(state.cache.layers), state.kept.ids.shape[1]
        live, start = rows.committed > 0, rows.positions[:, 0]
        kept = state.kept.of(rows.slots)
        base = jnp.where(start == 0, 0, kept.base)
        before = jnp.clip(start - base, 0, width)
        # Each row's next token: the block's own, and after the last committed row the anchor.
        block = jnp.arange(rows.ids.shape[1], dtype=jnp.int32)[None, :]
        following = jnp.where(block == rows.committed[:, None] - 1, rows.anchor[:, None], jnp.roll(rows.ids, -1, axis=1))
        hidden = rows.model.feature(rows.taps[0]).astype(kept.hidden.dtype)
        # The block's rows go right behind those kept before.
        row = jnp.arange(width + rows.ids.shape[1], dtype=jnp.int32)[None, :]
        at = jnp.where(row < before[:, None], row, jnp.minimum(row - before[:, None], rows.ids.shape[1] - 1) + width)
        ids = jnp.take_along_axis(jnp.concatenate([kept.ids, following], axis=1), at, axis=1)
        hidden = jnp.take_along_axis(jnp.concatenate([kept.hidden, hidden], axis=1), at[..., None], axis=1)
        kept, cache = PendingRows(base, hidden, ids), state.cache
        if not state.drafted:
            done = jnp.where(live, jnp.maximum(before + rows.committed - used, 0), 0)
            x, longest = hidden[:, :-used], row.shape[1] - used
            ids = jnp.pad(ids, ((0, 0), (0, used)))
            for s in range(used):
                x, keys = self._run(s, rows.model.embed(ids[:, s : s + longest]), x, base, done, cache, rows.slots, rows.draft_attention)
                cache = _store(cache, s, keys, base, done, after=x)
            kept = kept.without(done)
        slots = jnp.where(live, rows.slots, state.kept.base.shape[0])
        return ModulesState(cache, state.kept.put(slots, kept))

    def draft(self, state: ModulesState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, ModulesState]:
        if num_draft_tokens == 0:
            return Drafts.joined([], target.slots.shape[0]), state
        used, cache = len(state.cache.layers), state.cache
        kept = state.kept.of(target.slots)
        base, x, width = kept.base, kept.hidden, kept.ids.shape[1]
        count = jnp.clip(target.length - base, 0, width)
        done = jnp.where(target.slots < cache.slots, jnp.maximum(count - used, 0), 0)
        # The kept rows' tokens, the anchor last, then room for the guesses and for the rows that a module never run for a guess reads.
        ids = jnp.pad(kept.ids, ((0, 0), (0, max(num_draft_tokens, used))))
        steps = []
        for s in range(max(num_draft_tokens, used)):
            if s == used:
                at = done[:, None] + jnp.arange(ids.shape[1] - width + used, dtype=jnp.int32)[None, :]
                ids = jnp.take_along_axis(ids, at, axis=1, mode="clip")
                x = jnp.take_along_axis(x, at[:, :used, None], axis=1, mode="clip")
                base, count, width = base + done, jnp.minimum(count, used), used
            embedded = target.model.embed(ids[:, s : s + width])
            x, keys = self._run(s, embedded, x, base, count, cache, target.slots, target.draft_attention)
            if s < used:
                cache = _store(cache, s, keys, base, done, after=x)
            if s < num_draft_tokens:
                logits = self.logits(s, take_row(x, jnp.maximum(count - 1, 0)), target.draft_attention)
                token, logits, sampling = draw(logits, target.length[:, None] + s + 1, sampling)
                steps.append((token, logits, None))
                column = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
                ids = jnp.where(column == count[:, None] + s, token, ids)
        after = ModulesState(cache, state.kept.put(target.slots, kept.without(done)), drafted=True)
        return Drafts.joined(steps, target.slots.shape[0]), after

    def _run(
        self,
        step: int,
        embedded: jax.Array,
        hidden: jax.Array,
        base: jax.Array,
        count: jax.Array,
        cache: PagedKV,
        slots: jax.Array,
        attention: str,
    ) -> tuple[jax.Array, Keys]:
        """The module of a step over rows that follow the `base` positions in its pages; `count` of them are real."""
        m = step % len(cache.layers)
        module = self.modules[m]
        keys = Keys(*cache.pages_of(m, slots), base, None, count, module.mtp_block.self_attn.key_weight)
        positions = base[:, None] + jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]
        return module(embedded, hidden, positions, keys, attention)

    def logits(self, step: int, hidden: jax.Array, implementation: str = XLA) -> jax.Array:
        """What the module of a step makes of its block's output: [B, T, H] -> [B, T, V] float32. implementation: of a packed head's
        product."""
        head = self.modules[step % len(self.modules)].shared_head
        logits = head.output(head.norm(hidden), dtype=jnp.float32, implementation=implementation)
        return softcap(logits, self.config.final_logit_softcapping)

    def bytes_read(self, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
        """A module for each draft, in turn."""
        modules = self.modules
        turns = [i % len(modules) for i in range(num_draft_tokens)]
        blocks = [modules[i].mtp_block for i in turns]
        size = sum(nbytes(modules[i]) for i in turns) + sum(block.weights_read(batch) - nbytes(block) for block in blocks)
        layers = [self.config.layers[i] for i in turns]
        return size, batch * traffic.visible_kv(layers, modules[0].eh_proj.weight.dtype, context)

    def guesses(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        """The first M steps run their modules over all rows; each later one runs the last M rows up to every place again, over the keys
        that its module made before them."""
        batch, length = ids.shape
        slots, zero = jnp.arange(batch, dtype=jnp.int32), jnp.zeros((batch,), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], ids.shape)
        x, made, count = target.feature(out.taps[0]), [], len(self.modules)
        for s, module in enumerate(self.modules[:steps]):
            keys = Keys(None, None, zero, None, zero + length, module.mtp_block.self_attn.key_weight)
            x, keys = module(target.embed(jnp.roll(ids, -1 - s, axis=1)), x, positions, keys, XLA)
            assert keys.fresh is not None
            made.append(LayerKV(*keys.fresh))
            yield Guess(self.logits(s, pick(x, at)))
        base = jnp.maximum(at + 1 - count, 0)
        last = jnp.arange(count, dtype=jnp.int32)
        again = pick(x, (base[:, :, None] + last[None, None, :]).reshape(batch, -1)).reshape(*at.shape, count, -1)
        for s in range(count, steps):

            def rows(at: jax.Array, base: jax.Array, x: jax.Array, s: int = s) -> tuple[jax.Array, jax.Array]:
                module, places = self.modules[s % count], base[:, None] + last[None, :]
                weight = module.mtp_block.self_attn.key_weight
                keys = Keys(made[s % count], slots[:, None], base, None, jnp.minimum(at + 1, count), weight)
                x, _ = module(target.embed(pick(ids, places + s + 1)), x, places, keys, XLA)
                return x, take_row(x, at - base)[:, 0]

            again, x = jax.vmap(rows, in_axes=1, out_axes=1)(at, base, again)
            yield Guess(self.logits(s, x))

    def fresh(self, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray, seed: int) -> MTPModules:
        """Every module begins with the target's last norm and head, as copies of its own."""

        def begun(module: Module) -> Module:
            first = dataclasses.replace(module.shared_head.norm, weight=jnp.asarray(norm).copy())
            return dataclasses.replace(module, shared_head=SharedHead(first, Linear(jnp.asarray(table).copy())))

        modules = family_of_modules(self.config.model_type).fresh(self.model.layers)
        return dataclasses.replace(self, model=MTPModel({name: begun(module) for name, module in modules.items()}))


def _store(cache: PagedKV, layer: int, keys: Keys, start: jax.Array, count: jax.Array, after: jax.Array) -> PagedKV:
    """Writes the first `count` of the fresh rows. after: see `pallas_kernels.qkv.write`."""
    assert keys.pools is not None and keys.table is not None and keys.fresh is not None
    layers = list(cache.layers)
    layers[layer] = paged.write(keys.pools, keys.table, start, count, *keys.fresh, after=after)
    return dataclasses.replace(cache, layers=tuple(layers))


def read_config(config: Mapping[str, Any]) -> ModulesConfig:
    """What a config.json says of modules. Raises ValueError for one that tells of none, or a value that its family does not have."""
    return family_of_modules(config.get("model_type")).modules.read(config)


def bind(config: ModulesConfig, target: TargetConfig) -> ModulesConfig:
    """The config, if the modules were made for this target. Raises ValueError, naming both numbers, if they were not."""
    other = next((family for family in FAMILIES if isinstance(target, family.config)), None)
    if other is not None and other is not family_of_modules(config.model_type):
        expected = ", ".join(map(repr, other.modules.model_types))
        raise ValueError(f"the modules have model_type {config.model_type!r}; modules for this target have {expected}")
    for field in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if getattr(config, field) != getattr(target, field):
            raise ValueError(
                f"the modules were made for a target of {field} {getattr(config, field)}, this target has {getattr(target, field)}"
            )
    return config


def abstract(config: ModulesConfig, dtype: Any = jnp.bfloat16) -> MTPModules:
    """The modules as a tree of ShapeDtypeStructs."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    family, hidden = family_of_modules(config.model_type).modules, config.hidden_size

    def norm() -> RMSNorm:
        return family.norm(hidden, config.eps, dtype)

    def module(spec: LayerSpec) -> Module:
        return Module(
            enorm=norm(),
            hnorm=norm(),
            eh_proj=Linear(leaf(hidden, 2 * hidden)),
            mtp_block=family.block(spec, dtype),
            shared_head=SharedHead(norm(), Linear(leaf(config.vocab_size, hidden))),
        )

    return MTPModules(MTPModel({str(config.num_hidden_layers + i): module(spec) for i, spec in enumerate(config.layers)}), config)


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: TargetConfig, dtype: Any) -> MTPModules:
    """The modules that a config.json tells of, as a tree of ShapeDtypeStructs."""
    return abstract(read_config(config), dtype)


def default_config(raw: Mapping[str, Any], target: TargetConfig, count: int = 3) -> dict[str, Any]:
    """The config.json of `count` fresh modules. raw: the target's."""
    return family_of(target).modules.default_config(raw, target, count)


def released(name: str | None, raw: Mapping[str, Any] | None, target: TargetConfig) -> Mapping[str, Any] | None:
    """The config.json of modules for a released target: see `Kind.released`."""
    return None if raw is None else family_of(target).modules.released(raw)


KIND = Kind(
    name="mtp-modules",
    bench_name="modules",
    config_names=MODULES_TYPES,
    within=lambda config: any(family.modules.within(config) for family in FAMILIES),
    made=MTPModules,
    from_checkpoint=from_checkpoint,
    released=released,
    objective=Objective(steps=4, decay=0.8, hard=1.0),
    default_config=default_config,
)
