"""The Gemma 4 MTP assistant: a small decoder without K and V of its own, which reads the target's cache.

Each draft step embeds the previous token with the target's table beside a hidden state (the target's after its final norm, then the
assistant's own feedback), and attends from the constant position P of the target's last row, over keys 0 .. P of the target's last
sliding and last full layer that own K and V. Nothing is written. Facts: vLLM `gemma4_mtp.py` and its speculator, transformers
`Gemma4AssistantForCausalLM`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.collectives import without
from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.model.config import AssistantConfig, Gemma4Config
from jaxspec.model.gemma4 import DecoderLayer, abstract_layer, decoder_layer, next_weights
from jaxspec.model.layers import Embedding, Linear, RMSNorm, Weight, softcap
from jaxspec.model.rows import Keys
from jaxspec.sampling.choice import Sampling, choose, choose_by_head
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

    model: AssistantModel
    pre_projection: Linear
    post_projection: Linear
    masked_embedding: MaskedEmbedding | None
    config: AssistantConfig = struct.field(pytree_node=False)
    suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def bind(self, target: Gemma4Config) -> Gemma4MTP:
        return dataclasses.replace(self, config=bind(self.config, target))

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> MTPState:
        return MTPState(jnp.zeros((slots, self.config.backbone_hidden_size), self.post_projection.weight.dtype))

    def observe(self, state: MTPState, rows: Observed) -> MTPState:
        slots = jnp.where(rows.committed > 0, rows.slots, state.hidden.shape[0])
        return MTPState(state.hidden.at[slots].set(rows.hidden.astype(state.hidden.dtype), mode="drop"))

    def draft(self, state: MTPState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, MTPState]:
        keys = {
            spec.kind: target.model.cached_keys(target.cache, spec.kv_source, target.slots, target.length, jnp.zeros_like(target.length))
            for spec in self.config.text.layers
            if spec.kv_source is not None
        }
        hidden = jnp.take(state.hidden, target.slots, axis=0, mode="clip")[:, None]
        position = jnp.maximum(target.length - 1, 0)[:, None]
        attention = target.attention if target.draft_attention == "auto" else target.draft_attention
        token, steps = target.anchor[:, None], []
        for k in range(1, num_draft_tokens + 1):
            out, hidden = self.step(target.model.embed(token), hidden, position, keys, attention)
            candidates = self.candidates(out, attention)
            token = self.choose(out, candidates, target.length[:, None] + k, sampling, attention)
            steps.append((token, *candidates))
        return Drafts.joined(steps, target.slots.shape[0]), state

    def step(
        self, embedded: jax.Array, hidden: jax.Array, positions: jax.Array, keys: dict[str, Keys], attention: str = "auto"
    ) -> tuple[jax.Array, jax.Array]:
        """One draft step of rows that each stand at their own position.

        embedded: [B, T, H], the target's embedding of the newest token. hidden: [B, T, H]. positions: [B, T] int32, P of each row.
        keys: by kind of layer, the target's K and V. Returns the output after the final norm [B, T, h] and the feedback [B, T, H].
        """
        dtype = self.pre_projection.weight.dtype
        x = self.pre_projection(jnp.concatenate([embedded.astype(dtype), hidden.astype(dtype)], axis=-1))
        layers, out = self.model.layers, self.model.layers[0].input_layernorm(x)
        for layer, next_weight in zip(layers, next_weights(layers, self.model.norm), strict=True):
            x, out, _ = decoder_layer(layer, x, out, positions, keys[layer.self_attn.spec.kind], None, next_weight, attention)
        return out, self.post_projection(out)

    def candidates(self, out: jax.Array, implementation: str = "auto") -> tuple[jax.Array, jax.Array | None]:
        """Float32 logits of an output, and the token ids that they belong to.

        out: [B, T, h]. With a centroid head: the tokens of the best centroids, [B, T, C] each; else all tokens, [B, T, V] and None.
        """
        if self.masked_embedding is None:
            logits = softcap(Linear(self.model.embed_tokens.weight)(out, dtype=jnp.float32), self.config.text.final_logit_softcapping)
            if self.suppress_tokens:
                logits = without(logits, self.suppress_tokens, self.model.embed_tokens.shard)
            return logits, None
        rows = out.reshape(-1, out.shape[-1])
        logits, ids = centroid_head.candidates(rows, *self._centroid_head, **self._centroid_settings, implementation=implementation)
        return logits.reshape(*out.shape[:2], -1), ids.reshape(*out.shape[:2], -1)

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
        if sampling.weighed or sampling.filters is not None or sampling.tables is not None:
            logits, ids = candidates
            return choose(logits, positions, sampling, ids)
        if self.masked_embedding is None:
            settings = {"softcap": self.config.text.final_logit_softcapping, "suppressed": self.suppress_tokens}
            embedding = self.model.embed_tokens
            sampling = dataclasses.replace(sampling, shard=embedding.shard)
            return choose_by_head(out, embedding.weight, positions, sampling, **settings, implementation=implementation)[0]
        rows = out.reshape(-1, out.shape[-1])
        keys = row_keys(jnp.broadcast_to(sampling.seed[:, None, :], (*positions.shape, 2)), positions).reshape(-1, 2)
        temperature = jnp.broadcast_to(sampling.temperature[:, None], positions.shape).reshape(-1)
        arrays = (*self._centroid_head, keys, temperature)
        chosen = centroid_head.choose(rows, *arrays, **self._centroid_settings, implementation=implementation)
        return chosen.reshape(positions.shape)

    @property
    def _centroid_head(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        assert self.masked_embedding is not None
        return self.masked_embedding.centroids.weight, self.masked_embedding.token_ordering, self.model.embed_tokens.weight

    @property
    def _centroid_settings(self) -> dict[str, Any]:
        return {"top_k": self.config.centroid_intermediate_top_k, "suppressed": self.suppress_tokens}


def bind(config: AssistantConfig, target: Gemma4Config) -> AssistantConfig:
    """The config with each layer reading the target's last owning layer of its kind.

    Raises ValueError, naming both numbers, if the assistant does not fit the target.
    """
    text = config.text
    if config.backbone_hidden_size != target.hidden_size:
        raise ValueError(
            f"the assistant was made for a target of hidden_size {config.backbone_hidden_size}, this target has {target.hidden_size}"
        )
    if text.vocab_size != target.vocab_size:
        raise ValueError(f"the assistant has vocab_size {text.vocab_size}, the target {target.vocab_size}")
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
    return dataclasses.replace(config, text=dataclasses.replace(text, layers=tuple(layers)))


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
