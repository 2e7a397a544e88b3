"""A drafter's matrices in few bits: as its checkpoint has them, or as `load` is asked to make them of float weights.

Texts do not depend on it: a guess is kept where it is what the target chooses. What each class leaves float, its member `unquantised`
says: see `base.Drafter`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec import checkpoint
from jaxspec.checkpoint import from_floats
from jaxspec.checkpoint.files import CONVERTED
from jaxspec.checkpoint.formats import headers
from jaxspec.checkpoint.formats.rules import names_of
from jaxspec.checkpoint.quantisation import Format, Quantisation
from jaxspec.checkpoint.safetensors import FLOATS


def checkpoint_part(drafter: Any) -> Any:
    """The part of a drafter that a checkpoint holds, whose paths are the checkpoint's keys."""
    field = getattr(drafter, "checkpoint_field", None)
    return drafter if field is None else getattr(drafter, field)


def with_checkpoint_part(drafter: Any, part: Any) -> Any:
    """The drafter with another such part."""
    field = getattr(drafter, "checkpoint_field", None)
    return part if field is None else dataclasses.replace(drafter, **{field: part})


def stored_quantisation(folder: Path, config: Mapping[str, Any], drafter: Any) -> Quantisation | None:
    """What a drafter's checkpoint says of quantised weights, None if nothing. What it holds in float is so, whatever config.json says.

    config: its config.json. drafter: of ShapeDtypeStructs. Raises ValueError for a format that is not read here, by its name; and the
    result's `format_of` for matrices that this class of drafters takes in float alone."""
    found = checkpoint.read_quantisation(folder, config)
    if found is None or found.dense or (folder / CONVERTED).exists():
        return found
    unquantised, name = getattr(drafter, "unquantised", None), type(drafter).__name__
    if unquantised is None:
        raise ValueError(f"its weights are quantised ({found.name}); those of a {name} have to be float")
    stored = headers(folder) or {}  # none of a target's own drafter, before the weights are there

    def format_of(module: str) -> Format | None:
        held = (stored.get(key) for name in names_of(module) for key in (f"{name}.weight", name))
        if any(tensor is not None and tensor.dtype in FLOATS for tensor in held):
            return None
        form = found.format_of(module)
        if form is None or not any(re.search(pattern, module) for pattern in unquantised):
            return form
        if stored:
            raise ValueError(f"{module} is quantised ({found.name}); that of a {name} has to be float")
        return None

    return dataclasses.replace(found, format_of=format_of)


def asked_quantisation(
    quantize: str, drafter: Any, config: Mapping[str, Any], dtype: Any, folder: Path | None = None, found: Quantisation | None = None
) -> Quantisation:
    """How float weights become quantised as they are read, as `load` is asked.

    quantize: as `quantize_drafter` for `load`. drafter: of ShapeDtypeStructs. config: its config.json. dtype: of the weights that stay
    float. folder: of its checkpoint. found: how that is quantised already. Raises ValueError for a `quantize` that does not exist, for
    weights that are quantised already or were converted as float ones, and for a class of drafters that takes float weights alone."""
    unquantised = getattr(drafter, "unquantised", None)
    if unquantised is None:
        raise ValueError(f"quantize_drafter is {quantize!r}, but a {type(drafter).__name__} has no weights to quantise; expected None")
    if found is not None:
        raise ValueError(
            f"quantize_drafter is {quantize!r}, but the weights in {folder} are quantised already ({found.name}); expected None"
        )
    if folder is not None and (folder / CONVERTED).exists():
        raise ValueError(
            f"quantize_drafter is {quantize!r}, but {folder} was converted with float weights; convert the original with quantize_drafter"
        )
    text = config.get("text_config") or {}
    told = (where.get(name) for where in (config, text) for name in ("dtype", "torch_dtype"))
    scales = from_floats.scale_dtype(next(filter(None, told), "bfloat16"), dtype)
    return from_floats.quantisation_of_drafter(quantize, scales, unquantised)


def quantised(drafter: Any, quantisation: Quantisation | None) -> Any:
    """A drafter of ShapeDtypeStructs with a `Packed` in place of every matrix that is quantised. Raises ValueError as
    `Quantisation.applied` and `format_of` do."""
    if quantisation is None:
        return drafter
    prefix = getattr(drafter, "key_prefixes", ("",))[0]
    return with_checkpoint_part(drafter, quantisation.applied(checkpoint_part(drafter), prefix))
