"""The Gemma 4 MTP assistant: a small decoder without K and V of its own, which reads the target's cache.

Each draft step embeds the previous token with the target's table beside a hidden state (the target's after its final norm, then the
assistant's own feedback), and attends from the constant position P of the target's last row, over keys 0 .. P of the target's last
sliding and last full layer that own K and V. Nothing is written. Facts: vLLM `gemma4_mtp.py` and its speculator, transformers
`Gemma4AssistantForCausalLM`.
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

from jaxspec import checkpoint
from jaxspec.collectives import over_vocabulary, suppress
from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.drafters.branching import Branching
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.training import XLA, Centroids, Guess, Objective, pick
from jaxspec.model import traffic
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.gemma4_config import AssistantConfig
from jaxspec.model.gemma4_fresh import narrow, text_config, with_query_norms
from jaxspec.model.gemma4_layer import DecoderLayer, abstract_layer, decoder_layer, next_weights
from jaxspec.model.head_guides import bytes_read_of
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.layers import Embedding, Linear, RMSNorm, Weight, head_logits, softcap
from jaxspec.model.rows import Hidden, Keys
from jaxspec.model.split import PARTITIONS
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, choose, choose_by_head, draw
from jaxspec.trees import nbytes, told
from pallas_kernels import centroid_head
from pallas_kernels.noise import row_keys


@struct.dataclass
class AssistantModel:
    """The decoder. embed_tokens: [V, h] serves as the head only."""

    embed_tokens: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm


@struct.dataclass
class MaskedEmbedding:
    """The centroid head of ordered embeddings. centroids: [C, h]; token_ordering: [V] int32, the ids of each centroid in turn."""

    centroids: Linear
    token_ordering: Weight


@struct.dataclass
class MTPState:
    """hidden: [slots, H], the target's hidden state after its final norm at each slot's last computed row."""

    hidden: jax.Array


@struct.dataclass
class Gemma4MTP:
    """The assistant's weights; paths are Hugging Face keys. pre_projection: [h, 2 H], post_projection: [H, h], with h the
    assistant's width and H the target's. suppress_tokens: ids that are never drafted."""

    takes_parts: ClassVar[bool] = True

    model: AssistantModel
    pre_projection: Linear
    post_projection: Linear
    masked_embedding: MaskedEmbedding | None
    config: AssistantConfig = struct.field(pytree_node=False)
    suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    __repr__ = told

    @property
    def unquantised(self) -> tuple[str, ...]:
        """A centroid head is gathered from."""
        return () if self.masked_embedding is None else (r"\bmasked_embedding\.", r"\bembed_tokens$")

    @property
    def dtype(self) -> Any:
        """Of the float weights."""
        return self.model.norm.weight.dtype

    @property
    def partitions(self) -> tuple[tuple[str, PartitionSpec], ...]:
        # The MLPs are so narrow that a sum takes longer than reading them. Centroids need a few rows of the table, in any order.
        whole = [r"\bmlp\."] if self.masked_embedding is None else [r"\bmlp\.", r"^model\.embed_tokens\."]
        return (*((pattern, PartitionSpec()) for pattern in whole), *PARTITIONS)

    def with_head_guide(self) -> Gemma4MTP:
        """The same with a guide for its head: see `head_guides`. Of a centroid head a few rows are read anyway."""
        if self.masked_embedding is not None:
            return self
        return dataclasses.replace(self, model=dataclasses.replace(self.model, embed_tokens=self.model.embed_tokens.with_guide()))

    @property
    def draft_vocab_size(self) -> int:
        return self.config.text.vocab_size

    @property
    def narrower(self) -> bool:
        """Whether the target has more tokens."""
        return self.config.target_vocab_size not in (None, self.draft_vocab_size)

    def bind(self, target: TargetConfig) -> Gemma4MTP:
        return dataclasses.replace(self, config=bind(self.config, target))

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> MTPState:
        return MTPState(jnp.zeros((slots, self.config.backbone_hidden_size), self.dtype))

    def observe(self, state: MTPState, rows: Observed) -> MTPState:
        newest = rows.committed > 0 if rows.last is None else (rows.committed > 0) & rows.last
        slots = jnp.where(newest, rows.slots, state.hidden.shape[0])
        return MTPState(state.hidden.at[slots].set(rows.hidden.astype(state.hidden.dtype), mode="drop"))

    def draft(self, state: MTPState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, MTPState]:
        keys, hidden, position, attention = self._begun(state, target)
        token, steps = target.anchor[:, None], []
        for k in range(1, num_draft_tokens + 1):
            out, hidden = self.step(target.model.embed(token), hidden, position, keys, attention)
            logits, ids = self.candidates(out, attention, self._centroid_bias(sampling))
            if sampling.constraint is None:
                token = self.choose(out, (logits, ids), target.length[:, None] + k, sampling, attention)
            else:
                token, logits, sampling = draw(logits, target.length[:, None] + k, sampling, ids)
            steps.append((token, logits, ids))
        return Drafts.joined(steps, target.slots.shape[0]), state

    def draft_tree(self, state: MTPState, target: Target, sampling: Sampling, tree: DraftTree) -> tuple[Drafts, MTPState]:
        """See `Drafter`. Nothing is written, so the nodes of one depth are rows of one pass, all at the same position."""
        keys, hidden, position, attention = self._begun(state, target)
        token, nodes, branching = target.anchor[:, None], [], Branching.begun(sampling)
        for depth, level in enumerate(tree.levels, start=1):
            token, hidden = token[:, level.inner], hidden[:, level.inner]
            out, hidden = self.step(target.model.embed(token), hidden, jnp.broadcast_to(position, token.shape), keys, attention)
            at, hidden = target.length + depth, hidden[:, level.parent]
            logits, ids = self.candidates(out, attention, self._centroid_bias(branching.of_rows(level), token.shape[1]))
            if branching.states is None and level.width == 1:  # by the kernels that need no logits in memory
                at = jnp.broadcast_to(at[:, None], token.shape)
                token = self.choose(out, (logits, ids), at, sampling, attention)[:, level.parent]
            else:
                token, branching = branching.choose(logits, at, level, ids)
            nodes.append(token)
        return Drafts(jnp.concatenate(nodes, axis=1)), state

    def _begun(self, state: MTPState, target: Target) -> tuple[dict[str, Keys], jax.Array, jax.Array, str]:
        """What a round's first draft step has: the target's keys by kind of layer, the target's hidden state [B, 1, H], the position of its
        last row [B, 1], and the implementation."""
        keys = {
            spec.kind: target.model.cached_keys(target.cache, spec.kv_source, target.slots, target.length, jnp.zeros_like(target.length))
            for spec in self.config.text.layers
            if spec.kv_source is not None
        }
        hidden = jnp.take(state.hidden, target.slots, axis=0, mode="clip")[:, None]
        attention = target.attention if target.draft_attention == "auto" else target.draft_attention
        return keys, hidden, jnp.maximum(target.length - 1, 0)[:, None], attention

    def step(
        self, embedded: jax.Array, hidden: jax.Array, positions: jax.Array, keys: dict[str, Keys], attention: str = "auto"
    ) -> tuple[jax.Array, jax.Array]:
        """One draft step of rows that each stand at their own position.

        embedded: [B, T, H], the target's embedding of the newest token. hidden: [B, T, H]. positions: [B, T] int32, P of each row.
        keys: by kind of layer, the target's K and V. Returns the output after the final norm [B, T, h] and the feedback [B, T, H].
        """
        both = jnp.concatenate([embedded.astype(self.dtype), hidden.astype(self.dtype)], axis=-1)
        x = self.pre_projection(both, implementation=attention)
        layers, out = self.model.layers, self.model.layers[0].input_layernorm(x)
        following = (*layers[1:], None)
        for layer, next_layer, next_weight in zip(layers, following, next_weights(layers, self.model.norm), strict=True):
            read_by_kernel = next_layer is not None and next_layer.enters_kernel(x, attention)
            theirs = keys[layer.self_attn.spec.kind]
            x, out, _ = decoder_layer(layer, x, out, positions, theirs, None, next_weight, attention, read_by_kernel)
        return out, self.post_projection(out, implementation=attention)

    def candidates(
        self, out: jax.Array, implementation: str = "auto", centroid_bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Float32 logits of an output, and the token ids that they belong to.

        out: [B, T, h]. centroid_bias: [B * T, C] float32, added to the products that a centroid head chooses centroids by. With such a
        head: the tokens of the best centroids, [B, T, C] each; else all tokens, [B, T, V] and None.
        """
        if self.masked_embedding is None:
            logits = head_logits(out, self.model.embed_tokens.weight_to_guess_by(out, implementation), implementation)
            logits = softcap(logits, self.config.text.final_logit_softcapping)
            if self.suppress_tokens:
                logits = suppress(logits, self.suppress_tokens, self.model.embed_tokens.shard)
            vocab_size = self.config.target_vocab_size or self.config.text.vocab_size
            return over_vocabulary(logits, self.model.embed_tokens.shard, vocab_size), None
        rows = out.reshape(-1, out.shape[-1])
        settings = {**self._centroid_settings, "bias": centroid_bias, "implementation": implementation}
        logits, ids = centroid_head.candidates(rows, *self._centroid_head, **settings)
        return logits.reshape(*out.shape[:2], -1), ids.reshape(*out.shape[:2], -1)

    def _centroid_bias(self, sampling: Sampling, count: int = 1) -> jax.Array | None:
        """For `count` rows of each sequence the largest bias of a token of each centroid, -inf where none may come: [B * count, C] float32.
        None where the call has neither edits nor structured texts, or without a centroid head."""
        constraint, tables, head = sampling.constraint, sampling.tables, self.masked_embedding
        if head is None or constraint is None and tables is None:
            return None
        bias = jnp.zeros((1, head.token_ordering.shape[0]), jnp.float32)
        if tables is not None:
            bias = jnp.repeat(jnp.take(tables.bias, head.token_ordering, axis=1), count, axis=0)
        if constraint is not None:
            bias = jnp.where(constraint.allowed(head.token_ordering), bias, -jnp.inf)
        return jnp.max(bias.reshape(bias.shape[0], self.config.num_centroids, -1), axis=-1)

    def choose(
        self,
        out: jax.Array,
        candidates: tuple[jax.Array, jax.Array | None],
        positions: jax.Array,
        sampling: Sampling,
        implementation: str = "auto",
    ) -> jax.Array:
        """The drafts at `positions` [B, T], drawn from the output's `candidates` as the target draws: [B, T] int32.

        Where nothing but a temperature applies and no acceptance rule needs the candidates, drafts come straight from the output, and
        XLA drops the candidates: the head is read once either way.
        """
        if not sampling.by_temperature_alone:
            logits, ids = candidates
            return choose(logits, positions, sampling, ids)
        if self.masked_embedding is None:
            embedding = self.model.embed_tokens
            settings = {"softcap": self.config.text.final_logit_softcapping, "suppressed": self.suppress_tokens, "guide": embedding.guide}
            sampling = dataclasses.replace(sampling, shard=embedding.shard)
            return choose_by_head(out, embedding.weight, positions, sampling, **settings, implementation=implementation)[0]
        rows = out.reshape(-1, out.shape[-1])
        keys = row_keys(jnp.broadcast_to(sampling.seed[:, None, :], (*positions.shape, 2)), positions).reshape(-1, 2)
        temperature = jnp.broadcast_to(sampling.temperature[:, None], positions.shape).reshape(-1)
        arrays = (*self._centroid_head, keys, temperature)
        chosen = centroid_head.choose(rows, *arrays, **self._centroid_settings, implementation=implementation)
        return chosen.reshape(positions.shape)

    def check_weights(self, folder: Path) -> None:
        if self.masked_embedding is not None:
            ids, vocab = np.asarray(self.masked_embedding.token_ordering), self.config.text.vocab_size
            if ids.min() < 0 or ids.max() >= vocab:
                raise ValueError(f"token_ordering of the drafter {folder} has ids {ids.min()} .. {ids.max()}; expected 0 .. {vocab - 1}")
            if (different := len(np.unique(ids))) != vocab:
                raise ValueError(f"token_ordering of the drafter {folder} has {different} different ids; expected all {vocab}")

    def bytes_read(self, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
        """A pass for each draft. Of a centroid head those rows are counted that random centroids are expected to offer."""
        config, embedding = self.config, self.model.embed_tokens
        size = float(nbytes(self) - nbytes(embedding) + bytes_read_of(embedding.weight, embedding.guide, batch))
        if self.masked_embedding is not None:
            table, ordering = self.model.embed_tokens.weight, self.masked_embedding.token_ordering
            chosen = traffic.expected_distinct(config.centroid_intermediate_top_k, config.num_centroids, batch)
            size -= (1 - chosen / config.num_centroids) * nbytes((table, ordering))
        sources = {spec.kv_source for spec in config.text.layers}
        kv = traffic.visible_kv((target.config.layers[i] for i in sources if i is not None), target.dtype, context)
        return num_draft_tokens * size, num_draft_tokens * batch * kv

    def guesses(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        keys = {spec.kind: out.keys[spec.kv_source] for spec in self.config.text.layers if spec.kv_source is not None}
        hidden = pick(out.hidden, at)
        drafter = dataclasses.replace(self, suppress_tokens=())  # a guess of zero probability would be infinitely far
        for k in range(1, steps + 1):
            y, hidden = drafter.step(target.embed(pick(ids, at + k)), hidden, at, keys, XLA)
            if self.masked_embedding is None:
                yield Guess(drafter.candidates(y, XLA)[0])
            else:  # all tokens, so that those of centroids which were not chosen learn too
                logits, head = Linear(self.model.embed_tokens.weight)(y, dtype=jnp.float32), self.masked_embedding
                scores, top_k = head.centroids(y, dtype=jnp.float32), self.config.centroid_intermediate_top_k
                yield Guess(logits, centroids=Centroids(scores, head.token_ordering, top_k))

    def fresh(self, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray, seed: int) -> Gemma4MTP:
        """Centroids have tokens that the target's embeddings have near each other."""
        begun = with_query_norms(self)
        if begun.masked_embedding is None:
            return begun
        ordering = jnp.asarray(balanced_clusters(table, self.config.num_centroids, seed))
        return dataclasses.replace(begun, masked_embedding=dataclasses.replace(begun.masked_embedding, token_ordering=ordering))

    @property
    def _centroid_head(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        assert self.masked_embedding is not None
        return self.masked_embedding.centroids.weight, self.masked_embedding.token_ordering, self.model.embed_tokens.weight

    @property
    def _centroid_settings(self) -> dict[str, Any]:
        return {"top_k": self.config.centroid_intermediate_top_k, "suppressed": self.suppress_tokens}


def bind(config: AssistantConfig, target: TargetConfig) -> AssistantConfig:
    """The config with each layer reading the target's last owning layer of its kind.

    Raises ValueError, naming both numbers, if the assistant does not fit the target.
    """
    text = config.text
    if config.backbone_hidden_size != target.hidden_size:
        raise ValueError(
            f"the assistant was made for a target of hidden_size {config.backbone_hidden_size}, this target has {target.hidden_size}"
        )
    if text.vocab_size > target.vocab_size:
        raise ValueError(f"the assistant has vocab_size {text.vocab_size}, the target {target.vocab_size}; expected at most as many")
    layers = []
    for i, spec in enumerate(text.layers):
        owner = target.last_owner(spec.kind)
        if owner is None:
            raise ValueError(f"assistant layer {i} is of type {spec.kind!r}; the target has no layer of that type that owns K and V")
        theirs = target.layers[owner]
        for field in ("num_kv_heads", "head_dim", "window", "rope_theta", "rotary_angles"):
            if getattr(spec, field) != getattr(theirs, field):
                raise ValueError(
                    f"assistant layer {i} ({spec.kind}) has {field} {getattr(spec, field)}, target layer {owner}, whose K and V it reads, "
                    f"has {getattr(theirs, field)}"
                )
        layers.append(dataclasses.replace(spec, kv_source=owner))
    return dataclasses.replace(config, text=dataclasses.replace(text, layers=tuple(layers)), target_vocab_size=target.vocab_size)


def abstract(config: AssistantConfig, dtype: Any = jnp.bfloat16, suppress_tokens: tuple[int, ...] = ()) -> Gemma4MTP:
    """The assistant as a tree of ShapeDtypeStructs."""

    def leaf(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    text, backbone = config.text, config.backbone_hidden_size
    centroids = None
    if config.use_ordered_embeddings:
        centroids = MaskedEmbedding(Linear(leaf(config.num_centroids, text.hidden_size)), leaf(text.vocab_size, dtype=jnp.int32))
    return Gemma4MTP(
        model=AssistantModel(
            embed_tokens=Embedding(leaf(text.vocab_size, text.hidden_size)),
            layers=tuple(abstract_layer(spec, dtype) for spec in text.layers),
            norm=RMSNorm(leaf(text.hidden_size), text.rms_norm_eps),
        ),
        pre_projection=Linear(leaf(text.hidden_size, 2 * backbone)),
        post_projection=Linear(leaf(backbone, text.hidden_size)),
        masked_embedding=centroids,
        config=config,
        suppress_tokens=suppress_tokens,
    )


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: TargetConfig, dtype: Any) -> Gemma4MTP:
    """The assistant that a config.json tells of, as a tree of ShapeDtypeStructs. Its generation_config.json names tokens that are never
    drafted. Raises ValueError if it cannot be used with the target."""
    generation = {} if folder is None else checkpoint.read_generation_config(folder)
    bound = bind(AssistantConfig.from_hf(config), target)
    return abstract(bound, dtype, tuple(generation.get("suppress_tokens") or ()))


def default_config(raw: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The config.json of a fresh assistant, like google/gemma-4-31B-it-assistant. raw: the target's."""
    kinds = [kind for kind in (SLIDING, SLIDING, SLIDING, FULL) if target.last_owner(kind) is not None]
    width = narrow(target.hidden_size)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_kv_shared_layers": len(kinds), "final_logit_softcapping": None}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "text_config": text_config(raw, target, kinds, **sizes),
    }


# Of the assistants that were released: width, query heads, and whether they have a centroid head. Assembled from public code, E2B's from
# its config; they agree with the sizes of their checkpoints.
RELEASED = {"e2b": (256, 4, True), "e4b": (256, 4, True), "12b": (1024, 16, False), "26b": (1024, 16, False), "31b": (1024, 32, False)}


def released(name: str | None, raw: Mapping[str, Any] | None, target: TargetConfig) -> dict[str, Any] | None:
    """The config.json of the assistant that was released for a target: see `Kind.released`."""
    if name not in RELEASED or raw is None:
        return None
    width, heads, ordered = RELEASED[name]
    absent = dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size", "final_logit_softcapping"))
    text = {
        **raw["text_config"],
        **absent,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "hidden_size": width,
        "intermediate_size": 8 * width,
        "num_attention_heads": heads,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    }
    return {
        "model_type": f"{raw['model_type']}_assistant",
        "text_config": text,
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": ordered,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }


def balanced_clusters(rows: np.ndarray, count: int, seed: int, rounds: int = 10) -> np.ndarray:
    """k-means with clusters of equal size: the row ids of each cluster in turn, [N] int32. rows: [N, D]; count divides N."""
    rng = np.random.default_rng(seed)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-6)
    size = len(rows) // count
    centres = rows[rng.choice(len(rows), count, replace=False)]
    owner = np.empty(len(rows), np.int64)
    for _ in range(rounds):
        similarity = rows @ centres.T
        owner[:], room = -1, np.full(count, size)
        for flat in np.argsort(-similarity, axis=None, kind="stable"):
            row, centre = divmod(int(flat), count)
            if owner[row] < 0 and room[centre]:
                owner[row], room[centre] = centre, room[centre] - 1
        centres = np.stack([rows[owner == centre].mean(axis=0) for centre in range(count)])
    return np.argsort(owner, kind="stable").astype(np.int32)


KIND = Kind(
    name="mtp",
    config_names=("gemma4_assistant", "gemma4_unified_assistant"),
    made=Gemma4MTP,
    from_checkpoint=from_checkpoint,
    released=released,
    objective=Objective(steps=5, decay=0.9, hard=1.0),
    default_config=default_config,
    generation={"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"},
)
