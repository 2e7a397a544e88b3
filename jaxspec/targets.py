"""Targets by their checkpoints: configs, weights, and what a config says of lengths, dtypes and ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec import checkpoint, drafters
from jaxspec.checks import integer
from jaxspec.model import gemma4
from jaxspec.model.config import Gemma4Config
from pallas_kernels import device

MAX_LEN = 4096
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def read_target(folder: Path) -> tuple[Gemma4Config, dict[str, Any]]:
    """The config and generation config of a target's folder. Raises FileNotFoundError or ValueError."""
    raw = checkpoint.read_config(folder)
    try:
        config = Gemma4Config.from_hf(raw)
    except ValueError as error:
        hint = "; it is a drafter, to be given as drafter=" if drafters.is_drafter(raw) else ""
        raise ValueError(f"the target {folder} cannot be loaded: {error}{hint}") from error
    return config, checkpoint.read_generation_config(folder)


def load_target(folder: Path, abstract: gemma4.Gemma4, *, progress: bool = True) -> gemma4.Gemma4:
    """A target's weights in the shapes, dtypes and shardings of `gemma4.abstract`."""
    return checkpoint.load_weights(folder, abstract, prefixes=gemma4.CHECKPOINT_PREFIXES, skip=gemma4.TOWERS, progress=progress)


def max_len_of(config: Gemma4Config, asked: int | None) -> int:
    """Positions of a sequence: what was asked for, by default the model's maximum, but at most 4096."""
    longest = config.max_position_embeddings
    return min(longest, MAX_LEN) if asked is None else integer("max_len", asked, 2, longest)


def eos_token_ids(config: Gemma4Config, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends a sequence: the generation config's eos_token_id, else the config's."""
    value = generation.get("eos_token_id")
    if value is None:
        return config.eos_token_id
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def weights_dtype(dtype: Any, checkpoint_dtype: str) -> Any:
    """The dtype of weights: what was asked for, a name or a dtype; "auto" is the checkpoint's where the device computes with it.

    Raises ValueError for one that is not offered."""
    if isinstance(dtype, str) and dtype == "auto":
        return DTYPES[device.float_dtype(checkpoint_dtype)]
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; available: 'auto', {', '.join(map(repr, DTYPES))}")
    return DTYPES[name]
