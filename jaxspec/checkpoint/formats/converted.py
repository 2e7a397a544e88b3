"""How the matrices of a converted checkpoint are quantised: an object in its jaxspec.json, whatever format they came from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.formats.matrices import SCALE_NAMES
from jaxspec.checkpoint.layout import layouts_of
from jaxspec.checkpoint.quantisation import EMBEDDING, PER_LAYER, Matrix, Quantisation, Scheme, Wanted
from jaxspec.checkpoint.safetensors import Stored
from jaxspec.trees import leaves_by_path
from pallas_kernels.packed import KINDS, Packed

KEY = "quantised"  # in jaxspec.json
EXPERT = re.compile(r"\bexperts\.\d+\.")


@dataclasses.dataclass(frozen=True)
class Converted:
    """A matrix that lies packed in a converted checkpoint, which has no tensors of it: it is a `quantisation.Format` by its scheme."""

    scheme: Scheme

    def tensors(self, key: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
        raise NotImplementedError

    def read(self, key: str, shape: tuple[int, ...], tensors: Mapping[str, Stored]) -> Matrix:
        raise NotImplementedError


def describe(quantisation: Quantisation, tree: Any, prefix: str) -> dict[str, Any]:
    """What `read` reads. tree: the target, with a Packed for each quantised matrix. prefix: stands before its paths in modules' names."""
    leaves, layouts = leaves_by_path(tree, whole=(Packed,)), layouts_of(tree)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    modules: dict[str, Scheme] = {}
    for path in (path for path, leaf in leaves.items() if isinstance(leaf, Packed)):
        for part in layouts(path, shapes)[-1]:
            name = prefix + part.key.removesuffix(".weight")
            scheme = quantisation.scheme_of(name)
            assert scheme is not None
            modules[EXPERT.sub("experts.*.", name)] = scheme  # of all experts of a layer, which share a matrix
    schemes = list(dict.fromkeys(modules.values()))
    return {
        "name": quantisation.name,
        "schemes": [dataclasses.asdict(scheme) for scheme in schemes],
        "modules": {name: schemes.index(scheme) for name, scheme in modules.items()},
        "kv_scales": {str(layer): list(scales) for layer, scales in quantisation.kv_scales.items()},
    }


def read(about: Mapping[str, Any]) -> Quantisation:
    """How the matrices of a converted checkpoint are quantised. about: what `describe` made. Raises ValueError, TypeError, AttributeError
    or LookupError for anything else."""
    formats = [Converted(Scheme(**scheme)) for scheme in about["schemes"]]
    if unknown := {form.scheme.kind for form in formats} - set(KINDS):
        raise ValueError(f"it has codes of {', '.join(sorted(map(str, unknown)))}; known are {', '.join(KINDS)}")
    for scheme in (form.scheme for form in formats):
        if not (scheme.group is None or type(scheme.group) is int and scheme.group > 0) or scheme.scale_dtype not in SCALE_NAMES:
            raise ValueError(f"it has groups of {scheme.group!r} with scales in {scheme.scale_dtype!r}")
    modules = {name: formats[index] for name, index in about["modules"].items()}
    tables = [next((form for name, form in modules.items() if name.endswith(table)), None) for table in (EMBEDDING, PER_LAYER)]
    scales = {int(layer): (keys, values) for layer, (keys, values) in about["kv_scales"].items()}
    held = (lambda name: modules.get(EXPERT.sub("experts.*.", name)), scales, *tables)
    return Quantisation(about["name"], *held, dense=not modules, converted=True)
