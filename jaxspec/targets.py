"""Targets by their checkpoints: configs, weights, and what a config says about lengths, dtypes and end tokens."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint, drafters
from jaxspec.checkpoint import from_floats
from jaxspec.checkpoint.changes import Change
from jaxspec.checkpoint.files import CONVERTED
from jaxspec.checkpoint.hub import Hub
from jaxspec.checkpoint.load import planned
from jaxspec.checkpoint.peft import read_adapter
from jaxspec.checkpoint.quantisation import Quantisation, with_rounded_inputs
from jaxspec.checkpoint.safetensors import FLOATS, Stored
from jaxspec.checks import integer
from jaxspec.model.families import family_named, family_of
from jaxspec.model.target import TargetConfig, TargetModel
from pallas_kernels import device

DEFAULT_MAX_LEN = 4096
Target = TypeVar("Target", bound=TargetModel)
ACTIVATIONS = ("fp8",)  # what `quantize_activations` may be
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}  # that weights may have


def read_target(folder: Path) -> tuple[TargetConfig, dict[str, Any]]:
    """The config and the generation config in a target's folder. Where the config names no dtype, it is the weights', if they are there.
    Raises FileNotFoundError, or ValueError for what is no target."""
    raw = checkpoint.read_config(folder)
    if not any(part.get(name) for part in (raw, raw.get("text_config")) if isinstance(part, Mapping) for name in ("dtype", "torch_dtype")):
        raw = raw | _dtype_of_weights(folder)
    try:
        config = family_named(raw.get("model_type")).read(raw)
        checkpoint.read_quantisation(folder, raw)  # raises for a format that is not served
    except (ValueError, TypeError) as error:
        hint = "; it is a drafter, to be given as drafter=" if drafters.is_drafter(raw) else ""
        raise ValueError(f"the target {folder} cannot be loaded: {error}{hint}") from error
    return config, checkpoint.read_generation_config(folder)


def _dtype_of_weights(folder: Path) -> dict[str, str]:
    """The dtype that most of a checkpoint's float numbers have, as a config names it; nothing where there are no weights."""
    try:
        stored = checkpoint.read_headers(folder)
    except (FileNotFoundError, ValueError):  # raised again, with more about it, where weights are read
        return {}
    bytes_of = collections.Counter[str]()
    for tensor in stored.values():
        bytes_of[tensor.dtype] += tensor.nbytes
    found = max((name for name in FLOATS if bytes_of[name]), key=lambda name: bytes_of[name], default=None)
    return {} if found is None else {"dtype": np.dtype(FLOATS[found]).name}


def read_quantisation(folder: Path) -> Quantisation | None:
    """How a target's checkpoint is quantised, None where its weights are float. What the config does not say is read from the weights'
    headers if they are there. Raises ValueError for a format that is not read here, by its name."""
    return checkpoint.read_quantisation(folder, checkpoint.read_config(folder))


def quantisation_of(
    folder: Path,
    config: TargetConfig,
    dtype: Any,
    quantize: str | None = None,
    quantize_embedding: str | None = None,
    quantize_activations: str | None = None,
) -> Quantisation | None:
    """How a target's matrices are quantised in memory: as its checkpoint says, or as `load` is asked to quantise float weights.

    dtype: of the weights that stay float. quantize, quantize_embedding, quantize_activations: as for `load`. Raises ValueError for one of
    these that does not exist, and for weights that are quantised already or were converted as float ones.
    """
    found = read_quantisation(folder)
    asked = asked_quantisation(config, dtype, quantize, quantize_embedding, quantize_activations, found)
    if quantize is not None and found is not None and not found.dense:
        raise ValueError(f"quantize is {quantize!r}, but the weights in {folder} are quantised already ({found.name}); expected None")
    if quantize_embedding is not None and found is not None and found.embedding is not None:
        raise ValueError(f"quantize_embedding is {quantize_embedding!r}, but the embedding in {folder} is quantised already; expected None")
    for name, value in (("quantize", quantize), ("quantize_embedding", quantize_embedding)):
        if value is not None and (folder / CONVERTED).exists():
            weights = "float weights" if name == "quantize" else "a float embedding"
            raise ValueError(f"{name} is {value!r}, but {folder} was converted with {weights}; convert the original with {name}")
    return asked


def asked_quantisation(
    config: TargetConfig,
    dtype: Any,
    quantize: str | None = None,
    quantize_embedding: str | None = None,
    quantize_activations: str | None = None,
    found: Quantisation | None = None,
) -> Quantisation | None:
    """What `load` is asked to make of a target's float weights and of its activations, beside what is quantised already (`found`). Raises
    ValueError for a `quantize`, `quantize_embedding` or `quantize_activations` that does not exist."""
    scales = from_floats.scale_dtype(config.dtype, dtype)
    if quantize is not None:
        found = dataclasses.replace(from_floats.quantisation(quantize, scales), kv_scales=found.kv_scales if found is not None else {})
    found = found if quantize_embedding is None else from_floats.with_embedding(found, quantize_embedding, scales)
    return found if quantize_activations is None else _with_activations(found, quantize_activations)


def _with_activations(found: Quantisation | None, name: str) -> Quantisation:
    """The same with rounded activations, for which `abstract_target` looks for weights. Raises ValueError for a name not in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        available = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"quantize_activations is {name!r}; available: {available}, or None for activations as they are")
    found = found or Quantisation("float weights", lambda module: None)
    return dataclasses.replace(found, name=f"{found.name}, {name} activations", inputs=name)


def abstract_target(config: TargetConfig, dtype: Any, quantisation: Quantisation | None = None) -> TargetModel:
    """A target as a tree of ShapeDtypeStructs of this dtype, with a `Packed` in place of every matrix that is quantised.

    Raises ValueError for a quantisation of embeddings or activations that this target cannot have."""
    family = family_of(config)
    tree = family.abstract(config, dtype)
    if quantisation is None:
        return tree
    if quantisation.embedding is not None and tree.head[0] is not tree.embed_tokens.weight:
        raise ValueError("quantize_embedding quantises a token embedding that is the head too; this target's head is another matrix")
    packed = quantisation.applied(tree, family.prefixes[0])
    packed = packed if quantisation.inputs is None else with_rounded_inputs(packed, quantisation.inputs)
    return packed.with_kv_scales(quantisation.kv_scales)


def adapter_changes(
    name: str | os.PathLike[str], hub: Hub, folder: Path, config: TargetConfig, quantisation: Quantisation | None
) -> dict[str, Change]:
    """What the adapter of a name makes of the weights in a target's folder, to be given to `load_target`. quantisation: of the weights
    there. Raises as `peft.read_adapter` does, and ValueError for an adapter that does not fit the target and for weights that are
    quantised already."""
    if quantisation is not None and not quantisation.dense:
        raise ValueError(
            f"the adapter {os.fspath(name)!r} cannot be merged into {folder}, whose weights are quantised ({quantisation.name}); expected "
            "the float weights, which quantize= can quantise once it is merged"
        )
    family = family_of(config)
    return read_adapter(name, hub).changes(family.abstract(config, jnp.float32), family.prefixes, family.unread(config))


def load_target(
    folder: Path,
    abstract: Target,
    quantisation: Quantisation | None = None,
    changes: Mapping[str, Change] | None = None,
    *,
    progress: bool = True,
) -> Target:
    """A target's weights in the shapes, dtypes and shardings of `abstract_target`, which was given the same quantisation. changes: those
    of an adapter. Raises ValueError for weights that do not fit them."""
    return planned_target(folder, abstract, quantisation, changes, progress=progress)()


def planned_target(
    folder: Path,
    abstract: Target,
    quantisation: Quantisation | None = None,
    changes: Mapping[str, Change] | None = None,
    *,
    progress: bool = True,
    given: Mapping[str, Stored] | None = None,
) -> Callable[[], Target]:
    """What does `load_target`, to be called once: see `checkpoint.load.planned`."""
    family = family_of(abstract.config)
    settings = {
        "prefixes": family.prefixes,
        "skip": family.unread(abstract.config),
        "quantisation": quantisation,
        "changes": changes or {},
        "progress": progress,
        "given": given,
    }
    return planned(folder, abstract, **settings)


def max_len_of(config: TargetConfig, asked: int | None) -> int:
    """The most positions of a sequence: `asked`, or by default the model's maximum, but at most 4096.

    Raises TypeError or ValueError if `asked` is no integer from 2 to the model's maximum.
    """
    longest = config.max_position_embeddings
    return min(longest, DEFAULT_MAX_LEN) if asked is None else integer("max_len", asked, 2, longest)


def eos_token_ids(config: TargetConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a sequence: the generation config's eos_token_id, or else the config's.
    Raises TypeError or ValueError for what is no token id."""
    value = generation.get("eos_token_id")
    if value is None:
        return config.eos_token_id
    return tuple(integer("eos_token_id", i, 0) for i in (value if isinstance(value, list) else [value]))


def weights_dtype(dtype: Any, checkpoint_dtype: str) -> Any:
    """The dtype of weights.

    dtype: a name or a dtype; "auto" is the checkpoint's if the device computes in it. Raises ValueError for a dtype not in DTYPES, and
    TypeError for what is none.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return DTYPES[device.float_dtype(checkpoint_dtype)]
    available = f"available: 'auto', {', '.join(map(repr, DTYPES))}"
    try:
        if dtype is None:  # which NumPy takes for float64
            raise TypeError
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        raise TypeError(f"dtype is {dtype!r} of type {type(dtype).__name__}; {available}") from None
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; {available}")
    return DTYPES[name]
