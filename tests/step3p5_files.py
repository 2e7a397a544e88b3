"""Step-3.5 checkpoints in the layout of stepfun-ai/Step-3.5-Flash: the golden ones, and random ones of any config."""

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def golden(name):
    """(description, tensors without their leading "checkpoint.", all other tensors) of a golden case."""
    meta, tensors = json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")
    weights = {key.removeprefix("checkpoint."): x for key, x in tensors.items() if key.startswith("checkpoint.")}
    return meta, weights, {key: x for key, x in tensors.items() if not key.startswith("checkpoint.")}


def write(folder, config, tensors):
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: np.ascontiguousarray(x) for key, x in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_config(**changes):
    """A small config of all that the released one has, with a window that wraps and an odd vocabulary."""
    kinds = ["full_attention", *["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 3]
    other = {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 8, "true_head_dim": 8}
    return {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 8,
        "attention_other_setting": other,
        "layer_types": kinds,
        "sliding_window": 8,
        "rope_theta": [2000.0 if kind == "full_attention" else 10000.0 for kind in kinds],
        "partial_rotary_factors": [0.5 if kind == "full_attention" else 1.0 for kind in kinds],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
        },
        "yarn_only_types": ["full_attention"],
        "max_position_embeddings": 256,
        "max_seq_len": 256,
        "rms_norm_eps": 1e-5,
        "zero_centered": True,
        "use_qk_norm": True,
        "use_head_wise_attn_gate": True,
        "use_rope_layers": [],
        "sink": False,
        "moe_layers_enum": "3,4",
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "moe_intermediate_size": 16,
        "share_expert_dim": 24,
        "moe_router_activation": "sigmoid",
        "use_moe_router_bias": True,
        "norm_expert_weight": True,
        "need_fp32_gate": True,
        "moe_router_scaling_factor": 3.0,
        "swiglu_limits": [0.0, 0.0, 0.0, 0.0, 0.9, 0.0, 0.0, 0.0],
        "swiglu_limits_shared": [0.0, 0.7, 0.0, 0.0, 1.1, 0.0, 0.0, 0.0],
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 3,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        **changes,
    }


def shapes(config):
    """The shape of every tensor of a checkpoint by key, as the release has them: written from its description, not from our code."""
    hidden, vocab, count = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    routed = {int(i) for i in config["moe_layers_enum"].split(",") if i}
    found = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)}

    def mlp(stem, inner):
        return {
            f"{stem}gate_proj.weight": (inner, hidden),
            f"{stem}up_proj.weight": (inner, hidden),
            f"{stem}down_proj.weight": (hidden, inner),
        }

    for i in range(count + config["num_nextn_predict_layers"]):
        full = i < count and config["layer_types"][i] == "full_attention"
        heads = config if full else config["attention_other_setting"]
        dim, groups = heads["head_dim"], heads["num_attention_groups"]
        queries, stem = heads["num_attention_heads"], f"model.layers.{i}."
        found |= {stem + name: (hidden,) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        attention = {
            "q_proj": (queries * dim, hidden), "k_proj": (groups * dim, hidden), "v_proj": (groups * dim, hidden),
            "o_proj": (hidden, queries * dim), "g_proj": (queries, hidden), "q_norm": (dim,), "k_norm": (dim,),
        }  # fmt: skip
        found |= {f"{stem}self_attn.{name}.weight": shape for name, shape in attention.items()}
        if i in routed:
            experts, inner = config["moe_num_experts"], config["moe_intermediate_size"]
            found |= {f"{stem}moe.gate.weight": (experts, hidden), f"{stem}moe.router_bias": (experts,)}
            found |= {f"{stem}moe.{name}.weight": (experts, inner, hidden) for name in ("gate_proj", "up_proj")}
            found |= {f"{stem}moe.down_proj.weight": (experts, hidden, inner)} | mlp(f"{stem}share_expert.", config["share_expert_dim"])
        else:
            found |= mlp(f"{stem}mlp.", config["intermediate_size"])
        if i >= count:
            found |= {f"{stem}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "transformer.shared_head.norm")}
            found |= {f"{stem}eh_proj.weight": (hidden, 2 * hidden), f"{stem}transformer.shared_head.output.weight": (vocab, hidden)}
    return found


def random_tensors(config, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)

    def draw(shape):
        deviation = 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        return (deviation * rng.standard_normal(shape)).astype(dtype)

    return {key: draw(shape) for key, shape in shapes(config).items()}


def is_module(key, config):
    """Whether a tensor belongs to the MTP layers."""
    return key.startswith("model.layers.") and int(key.split(".")[2]) >= config["num_hidden_layers"]
