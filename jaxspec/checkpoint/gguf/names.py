"""The names of tensors in GGUF files, and those that the same tensors have in Hugging Face's layout.

Source: gguf-py's `tensor_mapping.py`, and llama.cpp's `conversion/` for what it renames there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxspec.checkpoint.safetensors import Stored

WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
OF_LAYER = re.compile(r"blk\.(?P<index>\d+)\.(?P<name>.+)")
UNREAD = {"rope_freqs.weight"}  # the config has it: see `gemma4`


def renamed(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a file under Hugging Face's names. Those that have none there keep their own, so that errors name them."""
    return {_name(name): tensor for name, tensor in tensors.items() if name not in UNREAD}


def _name(name: str) -> str:
    of_layer = OF_LAYER.fullmatch(name)
    if of_layer is None:
        return WHOLE.get(name, name)
    known = LAYER.get(of_layer["name"])
    return name if known is None else f"model.layers.{of_layer['index']}.{known}"
