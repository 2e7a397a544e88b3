"""The bundled pocket models: their configs and recipes. One command trains a model:

    python -m jaxspec.train.pocket target --data DIR --out DIR
    python -m jaxspec.train.pocket mtp --data DIR --out DIR    # or dflash, dflash2, dspark, eagle3, modules, draft

Another prints the figures of the model card, which are measured on the held-out modules:

    python -m jaxspec.train.pocket measure [--drafter pocket-mtp] [--quantize int8] [--quantize-drafter int4] [--k 4]

--data is what `python -m jaxspec.train.pocket.corpus` wrote. Training takes at most 8 minutes a model on one H200.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint
from jaxspec.learning.losses import Batch, target_loss
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.train import distil
from jaxspec.train.data import batch_of, windows
from jaxspec.train.kinds import initial
from jaxspec.train.loop import Run, fit
from jaxspec.train.pocket.unlikelihood import break_loops
from jaxspec.train.tuning import save_target, scores

ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
LEARNT = 0.95  # share of the stream that the target trains on; the rest is for prompts, whose continuations it must not know
COMMON_CONFIG = {
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
TARGET_CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    **COMMON_CONFIG,
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
MTP_CONFIG = {
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
        **COMMON_CONFIG,
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
# A decoder like Llama's or Qwen3's, as wide as the target.
DECODER_CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "num_target_layers": 8,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DFLASH_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **DECODER_CONFIG,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": 128,
    "use_sliding_window": True,
    "block_size": 8,
    "dflash_config": {
        "mask_token_id": 4,
        "target_layer_ids": [1, 3, 5, 7],
        "final_logit_softcapping": 30.0,
        "input_embedding_scale": 1.0,
    },
}
BLOCK_CONFIG = {  # as speculators lays it out
    "transformer_layer_config": {
        "model_type": "qwen3",
        **DECODER_CONFIG,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "sliding_window": 128,
        "use_sliding_window": True,
    },
    "aux_hidden_state_layer_ids": [2, 4, 6, 8],
    "block_size": 8,
    "draft_vocab_size": 4096,
    "mask_token_id": 4,
    "num_target_layers": 8,
    "sliding_window_non_causal": True,
    "dflash_config": {"final_logit_softcapping": 30.0},
    "dtype": "bfloat16",
}
DFLASH2_CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "speculators_model_type": "dflash2",
    **BLOCK_CONFIG,
    "sample_from_anchor": False,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 64,
    "selector_top_k": 16,
}
DSPARK_CONFIG = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    **BLOCK_CONFIG,
    "sample_from_anchor": True,
    "markov_rank": 64,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    **DECODER_CONFIG,
    "num_hidden_layers": 1,
    "draft_vocab_size": 3072,
    "eagle_aux_hidden_state_layer_ids": [2, 5, 8],
}
MODULES_CONFIG = {
    "architectures": ["Gemma4MTPModules"],
    "model_type": "gemma4_mtp_modules",
    "num_nextn_predict_layers": 2,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text",
        **COMMON_CONFIG,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "layer_types": [*TARGET_CONFIG["layer_types"], SLIDING, FULL],
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 0,
        "hidden_size_per_layer_input": 0,
    },
}
DRAFT_CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    **COMMON_CONFIG,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A drafter's config, and how it is trained."""

    kind: str  # as for `distil`
    config: dict[str, Any]
    steps: int  # updates
    batch: int = 64  # texts
    length: int = 320  # tokens of a text
    self_generate: int = 8192  # texts that the target writes for it
    objective: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what differs from the kind's default
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # generation_config.json, where the kind has none


RECIPES = {
    "mtp": Recipe("mtp", MTP_CONFIG, 6000, batch=96, length=384, self_generate=16384, objective={"anchors": 128}),
    # Blocks of 4 drafts, which is the default K. A later place is reached less often, and its weight falls by the same rate.
    "dflash": Recipe("dflash", DFLASH_CONFIG, 6000, self_generate=16384, objective={"steps": 4, "decay": 0.65}),
    "dflash2": Recipe("dflash2", DFLASH2_CONFIG, 5000, self_generate=16384, objective={"steps": 4, "decay": 0.65}),
    # Cross-entropy teaches more in so few steps than the distance that the kind is made for.
    "dspark": Recipe(
        "dspark",
        DSPARK_CONFIG,
        7000,
        self_generate=16384,
        objective={"steps": 4, "decay": 0.65, "soft": 1.0, "hard": 1.0, "tv": 0.0, "confidence": 0.3},
        generation={"num_assistant_tokens": 4},  # a guess that it has not learnt misleads those after it
    ),
    "eagle3": Recipe("eagle3", EAGLE3_CONFIG, 3500),
    "modules": Recipe("mtp-modules", MODULES_CONFIG, 5500),
    "draft": Recipe("draft-model", DRAFT_CONFIG, 3000),
}


def train_drafter(name: str, args: argparse.Namespace) -> None:
    """Trains the drafter of a recipe. args: of the command, which override the recipe."""
    recipe = RECIPES[name]
    distil(
        args.target,
        recipe.kind,
        init=recipe.config,
        data=args.data / "train.npy",
        held_out=args.data / "val.npy",
        out=args.out,
        self_generate=recipe.self_generate if args.self_generate is None else args.self_generate,
        objective=recipe.objective,
        steps=args.steps or recipe.steps,
        batch=args.batch or recipe.batch,
        length=args.length or recipe.length,
        peak=args.peak,
        seed=args.seed,
        every=args.every,
        save_every=0,
    )
    if recipe.generation:
        checkpoint.save_json(args.out / "generation_config.json", recipe.generation)


def train_target(args: argparse.Namespace) -> None:
    """Trains the target on windows of the stream, then against repeating itself, on prompts from the end of the stream.

    args: of the command.
    """
    config = Gemma4Config.from_hf(TARGET_CONFIG)
    stream, held = (np.load(args.data / f"{part}.npy") for part in ("train", "val"))
    learnt, rest = np.split(stream, [int(LEARNT * len(stream))])
    length = args.length or 1024
    run = Run(args.steps or 1400, args.batch or 64, length, args.peak, every=args.every, save_every=0, seed=args.seed)
    weights = gemma4.FAMILY.fresh(initial(gemma4.abstract(config, jnp.float32), args.seed, config.hidden_size))

    def loss(model: gemma4.Gemma4, _: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return target_loss(model, batch)

    rows = [held[at : at + length] for at in range(0, len(held) - length + 1, length)]
    score = scores(batch_of(rows, [0] * len(rows), length), loss, run.batch)

    def evaluate(model: gemma4.Gemma4) -> dict[str, float]:
        return score(model, ())

    texts, prompts, out = windows(learnt, length, run.batch, args.seed), windows(rest, 128, 256, args.seed + 1), args.out
    weights = fit(loss, weights, (), texts, run, out=out / "likelihood", evaluate=evaluate)
    run = dataclasses.replace(run, steps=args.unlikelihood_steps, peak=args.peak / 4)
    weights = break_loops(weights, texts, prompts, run, out=out / "unlikelihood", evaluate=evaluate)
    save_target(out, weights, TARGET_CONFIG)


def print_acceptance(
    target: str, drafter: str, *, ks: Sequence[int], prompt_tokens: int = 160, new_tokens: int = 128, **quantised: str | None
) -> None:
    """Prints acceptance length by K and temperature, and the share of distinct 8-grams in the new text.

    target, drafter, quantised (`quantize`, `quantize_embedding`, `quantize_activations`, `quantize_drafter`): as for `load`; in float32.
    The prompts are the beginning of each held-out module and its tokens from 400 on.
    """
    from jaxspec import SamplingParams, load
    from jaxspec.train.pocket.corpus import BOS, held_out_texts

    print("temperature  K  acceptance length  distinct 8-grams")
    for k in ks:
        sizes: dict[str, Any] = {"num_draft_tokens": k, "max_slots": 8, "max_len": prompt_tokens + new_tokens}
        llm = load(target, drafter, **quantised, dtype="float32", progress=False, **sizes)
        texts = [llm.tokenizer.encode(text) for text in held_out_texts().values()]
        prompts = [[BOS, *ids[at + 1 : at + prompt_tokens]] for ids in texts for at in (0, 400)]
        for temperature in (0.0, 1.0):
            outs = llm.generate(prompts, SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=0))
            steps, accepted = (sum(getattr(out.stats, name) for out in outs) for name in ("steps", "accepted"))
            grams = [tuple(out.token_ids[i : i + 8]) for out in outs for i in range(len(out.token_ids) - 7)]
            print(f"{temperature:11.1f}  {k}  {1 + accepted / steps:17.2f}  {len(set(grams)) / len(grams):16.2f}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec.train.pocket", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="model", required=True)
    for name in ("target", *RECIPES):
        command = commands.add_parser(name)
        command.add_argument("--data", type=Path, required=True, help="folder with train.npy and val.npy")
        command.add_argument("--out", type=Path, required=True, help="folder for config.json and model.safetensors")
        command.add_argument("--steps", type=int, help="by default the recipe's")
        command.add_argument("--batch", type=int, help="likewise")
        command.add_argument("--length", type=int, help="tokens of a text, likewise")
        command.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
        command.add_argument("--every", type=int, default=500, help="steps between rows of metrics")
        command.add_argument("--seed", type=int, default=0)
        if name == "target":
            command.add_argument("--unlikelihood-steps", type=int, default=900, help="steps against repeating itself, at the end")
        else:
            command.add_argument("--target", default="pocket", help="folder of the target")
            command.add_argument("--self-generate", type=int, help="texts that the target writes to train on, likewise")
    command = commands.add_parser("measure")
    command.add_argument("--target", default="pocket")
    command.add_argument("--drafter", default="pocket-mtp")
    command.add_argument("--quantize", help="int8, int4 or fp8: quantise the target's weights")
    command.add_argument("--quantize-embedding", help="int8: quantise its token embedding")
    command.add_argument("--quantize-activations", help="fp8: round what fp8 weights are multiplied with")
    command.add_argument("--quantize-drafter", help="int8, int4 or fp8: quantise the drafter's weights")
    command.add_argument("--k", type=int, nargs="+", default=(1, 2, 4, 7), help="numbers of drafts (default: 1 2 4 7)")
    args = parser.parse_args(argv)
    if args.model == "measure":
        quantised = {name: getattr(args, name) for name in ("quantize", "quantize_embedding", "quantize_activations", "quantize_drafter")}
        print_acceptance(args.target, args.drafter, ks=args.k, **quantised)
    elif args.model == "target":
        train_target(args)
    else:
        train_drafter(args.model, args)
