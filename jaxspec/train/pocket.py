"""Trains the bundled pocket models. One command a model:

    python -m jaxspec.train.pocket target --data DIR --out DIR
    python -m jaxspec.train.pocket mtp --target DIR --data DIR --out DIR

and the figures of the card, on the held-out modules:

    python -m jaxspec.train.pocket measure

--data is what `python -m jaxspec.train.corpus` wrote. Training takes at most 8 minutes a model on one H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint, gemma4
from jaxspec.config import FULL, SLIDING, AssistantConfig, Gemma4Config
from jaxspec.drafters import gemma4_mtp
from jaxspec.layers import init_weights
from jaxspec.train.generate import corpus
from jaxspec.train.loop import train, windows
from jaxspec.train.losses import mtp_loss, target_loss
from jaxspec.train.unlikelihood import break_loops

ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
# The end of the stream is kept for prompts, so that the target has not learnt what follows them.
LEARNT = 0.95
COMMON = {
    "vocab_size": 4096,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "sliding_window": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "enable_moe_block": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}
TARGET = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    **COMMON,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 2,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 4096,
    "hidden_size_per_layer_input": 16,
}
MTP = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 256,
    "use_ordered_embeddings": True,
    "num_centroids": 64,
    "centroid_intermediate_top_k": 8,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text",
        **COMMON,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "vocab_size_per_layer_input": 0,
        "hidden_size_per_layer_input": 0,
    },
}


def initial(abstract: Any, key: jax.Array) -> Any:
    """Random float32 weights. Gemma's attention has no 1 / sqrt(D), so the query norm starts there."""
    weights = init_weights(abstract, key, std=0.05)

    def scale(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf * leaf.shape[0] ** -0.5 if re.search(r"q_norm", jax.tree_util.keystr(path)) else leaf

    return jax.tree_util.tree_map_with_path(scale, weights)


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


def train_target(args: argparse.Namespace, stream: np.ndarray, held_out: np.ndarray) -> None:
    config = Gemma4Config.from_hf(TARGET)
    weights = initial(gemma4.abstract(config, jnp.float32), jax.random.key(args.seed))
    learnt, prompts = np.split(stream, [int(LEARNT * len(stream))])
    weights = train(target_loss, weights, learnt, held_out, **_settings(args))
    weights = break_loops(weights, learnt, prompts, held_out, **_settings(args) | {"steps": args.unlikelihood_steps})
    checkpoint.save_weights(args.out, weights, TARGET, prefix="model.", dtype=jnp.bfloat16)


def train_mtp(args: argparse.Namespace, stream: np.ndarray, held_out: np.ndarray) -> None:
    target_config = Gemma4Config.from_hf(checkpoint.read_config(args.target))
    target = checkpoint.load_weights(args.target, gemma4.abstract(target_config), prefixes=("model.",), progress=False)
    config = gemma4_mtp.bind(AssistantConfig.from_hf(MTP), target_config)
    weights = initial(gemma4_mtp.abstract(config, jnp.float32), jax.random.key(args.seed))
    ordering = balanced_clusters(np.asarray(target.embed_tokens.weight, np.float32), config.num_centroids, args.seed)
    fixed = jnp.asarray(ordering)
    assert weights.masked_embedding is not None
    weights = dataclasses.replace(weights, masked_embedding=dataclasses.replace(weights.masked_embedding, token_ordering=None))

    # Half of each batch is text that the target wrote itself: greedy text is what greedy drafts will meet.
    prompt_length = args.length // 3
    written = corpus(
        target,
        stream[int(LEARNT * len(stream)) :],
        sequences=args.self_generate,
        prompt_length=prompt_length,
        new_tokens=args.length - prompt_length,
        seed=args.seed,
    )

    def draw(_: Any, stream: jax.Array, key: jax.Array) -> jax.Array:
        own = jax.random.choice(jax.random.fold_in(key, 1), written, (args.batch // 2,))
        return jnp.concatenate([windows(stream, key, args.batch - len(own), args.length), own])

    def loss(assistant: gemma4_mtp.Gemma4MTP, ids: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return mtp_loss(assistant, target, ids, args.unroll, fixed)

    weights = train(loss, weights, stream, held_out, draw=draw, **_settings(args))
    weights = dataclasses.replace(weights, masked_embedding=dataclasses.replace(weights.masked_embedding, token_ordering=fixed))
    checkpoint.save_weights(args.out, weights, MTP, dtype=jnp.bfloat16)
    generation = {"num_assistant_tokens": args.unroll - 1, "num_assistant_tokens_schedule": "constant"}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def measure(target: str, drafter: str, prompt_tokens: int = 160, new_tokens: int = 128) -> None:
    """Prints acceptance length by K and temperature, and the share of distinct 8-grams of the greedy text.

    Continues each held-out module at its beginning and from its token 400 on; float32.
    """
    from jaxspec import SamplingParams, load
    from jaxspec.train.corpus import BOS, held_out_texts

    print("temperature  K  acceptance length  distinct 8-grams")
    for k in (1, 2, 4, 7):
        llm = load(target, drafter, num_draft_tokens=k, dtype="float32", max_slots=8, max_len=prompt_tokens + new_tokens, progress=False)
        texts = [llm.tokenizer.encode(text) for text in held_out_texts().values()]
        prompts = [[BOS, *ids[at + 1 : at + prompt_tokens]] for ids in texts for at in (0, 400)]
        for temperature in (0.0, 1.0):
            outs = llm.generate(prompts, SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=0))
            steps, accepted = (sum(getattr(out.stats, name) for out in outs) for name in ("steps", "accepted"))
            grams = [tuple(out.token_ids[i : i + 8]) for out in outs for i in range(len(out.token_ids) - 7)]
            print(f"{temperature:11.1f}  {k}  {1 + accepted / steps:17.2f}  {len(set(grams)) / len(grams):16.2f}", flush=True)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("steps", "batch", "length", "peak", "seed", "log")}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="model", required=True)
    for name, steps, batch, length in (("target", 1400, 64, 1024), ("mtp", 6000, 96, 384)):
        command = commands.add_parser(name)
        command.add_argument("--data", type=Path, required=True, help="folder with train.npy and val.npy")
        command.add_argument("--out", type=Path, required=True, help="folder for config.json and model.safetensors")
        command.add_argument("--log", type=Path, help="JSON lines of metrics (default: train.jsonl in --out)")
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--batch", type=int, default=batch)
        command.add_argument("--length", type=int, default=length, help="tokens in a window")
        command.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
        command.add_argument("--seed", type=int, default=0)
        if name == "target":
            command.add_argument("--unlikelihood-steps", type=int, default=900, help="steps against repeating itself, at the end")
        if name == "mtp":
            command.add_argument("--target", type=Path, required=True, help="folder of the target")
            command.add_argument("--unroll", type=int, default=5, help="draft steps to train")
            command.add_argument("--self-generate", type=int, default=16384, help="sequences that the target writes to train on")
    command = commands.add_parser("measure")
    command.add_argument("--target", default="pocket")
    command.add_argument("--drafter", default="pocket-mtp")
    args = parser.parse_args(argv)
    if args.model == "measure":
        return measure(args.target, args.drafter)
    args.log = args.log or args.out / "train.jsonl"
    args.log.unlink(missing_ok=True)
    stream, held_out = (np.load(args.data / f"{part}.npy") for part in ("train", "val"))
    {"target": train_target, "mtp": train_mtp}[args.model](args, stream, held_out)


if __name__ == "__main__":
    main()
