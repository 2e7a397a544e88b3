"""The config.json of MTP modules made of Gemma 4 layers: what is read of it, that of fresh modules, and that of made-up ones for
benchmarks. Nobody has published such a checkpoint; it is laid out like stepfun-ai/Step-3.5-Flash's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.model.gemma4_config import TEXT_TYPES, Gemma4Config
from jaxspec.model.gemma4_fresh import text_config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.target import ModulesConfig, TargetConfig

MODEL_TYPE = "gemma4_mtp_modules"


def read_modules(config: Mapping[str, Any]) -> ModulesConfig:
    """Reads config.json. Raises ValueError for another model type, or a value that this implementation does not have."""
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"model_type is {config.get('model_type')!r}; MTP modules of Gemma 4 layers have {MODEL_TYPE!r}")
    count, text = config.get("num_nextn_predict_layers"), config.get("text_config")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"num_nextn_predict_layers is {count!r}; expected at least 1")
    if not isinstance(text, Mapping) or text.get("model_type") not in TEXT_TYPES:
        raise ValueError(f"text_config must be the target's, with a model_type of {', '.join(map(repr, TEXT_TYPES))}")
    layers, kinds = text.get("num_hidden_layers"), list(text.get("layer_types") or ())
    if not isinstance(layers, int) or len(kinds) != layers + count:
        raise ValueError(f"layer_types has {len(kinds)} entries; expected {layers} of num_hidden_layers and {count} of the modules")
    # Modules own their K and V and have no per-layer inputs. A target's last layer is always full: one more keeps theirs as they are.
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
    read = Gemma4Config.from_hf({**text, **own, "num_hidden_layers": len(kinds) + 1, "layer_types": [*kinds, FULL]})
    sizes = {name: getattr(read, name) for name in ("hidden_size", "vocab_size", "final_logit_softcapping")}
    return ModulesConfig(read.layers[layers:-1], layers, **sizes, eps=read.rms_norm_eps, model_type=MODEL_TYPE)


def default_config(raw: Mapping[str, Any], target: TargetConfig, count: int = 3) -> dict[str, Any]:
    """The config.json of `count` fresh modules. raw: the target's."""
    text = text_config(
        raw,
        target,
        [*target.layer_types, *[SLIDING] * count],
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=target.num_hidden_layers,
        final_logit_softcapping=target.final_logit_softcapping,
    )
    config = {"architectures": ["Gemma4MTPModules"], "model_type": MODEL_TYPE, "num_nextn_predict_layers": count}
    return {**config, "dtype": "bfloat16", "text_config": text}


def made_up(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of four modules like the sliding layers of a released target, whose own is given."""
    text = raw["text_config"]
    text = {**text, "layer_types": [*text["layer_types"], *[SLIDING] * 4]}
    return {"model_type": MODEL_TYPE, "num_nextn_predict_layers": 4, "text_config": text}
