"""Reading a checkpoint into a tree of weights, leaf by leaf: the host holds one fused matrix at a time, or a chunk of a large tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint import fused
from jaxspec.checkpoint.hub import CONVERTED
from jaxspec.checkpoint.layout import Layouts, Part, dead_keys, layouts, layouts_of, raise_misfits
from jaxspec.checkpoint.onto_devices import placed
from jaxspec.checkpoint.quantisation import Quantisation
from jaxspec.checkpoint.safetensors import FLOATS, INTEGERS, NUMPY_DTYPES, Stored, read_folder, same_bytes
from jaxspec.trees import leaves_by_path

QUANTISED = re.compile(r"\.(weight_packed|weight_scale(_2|_inv)?|weight_global_scale|qweight)$")


def load_weights(
    folder: Path,
    abstract: Any,
    *,
    prefixes: Sequence[str] = ("",),
    skip: Sequence[str] = (),
    quantisation: Quantisation | None = None,
    progress: bool = True,
) -> Any:
    """Reads a checkpoint into the shapes, dtypes and shardings of a tree of ShapeDtypeStructs.

    abstract: the tree; where it has a member `layouts`, that says how a file holds its leaves: see `layout.layouts_of`. prefixes: what
    may stand before our paths in the file's keys; we take the first that occurs. skip: keys that start with any of these are ignored.
    quantisation: how a file holds the matrices that are a `Packed` in the tree. These three are unused for a converted folder.
    progress: show a bar, by bytes. The host casts a float tensor to its leaf's dtype.

    Raises ValueError that lists every missing, unknown and misshapen tensor, before it reads any. Two kinds of tensor may be there
    although nothing reads them: K and V weights of a target's layers that share KV, and an lm_head.weight whose bytes equal those of
    embed_tokens.weight.
    """
    folder = Path(folder)
    if (folder / CONVERTED).exists():
        return fused.restore(folder, abstract, progress=progress)
    stored = {key: tensor for key, tensor in read_headers(folder).items() if not key.startswith(tuple(skip))}
    leaves = leaves_by_path(abstract)
    prefix = next((p for p in prefixes if any(key.startswith(p) for key in stored)), prefixes[-1])
    sources = _sources(folder, stored, leaves, prefix, layouts_of(abstract))
    # In the order of the files, so that a disk reads forward.
    order = sorted(sources, key=lambda path: min((str(t.file), t.offset) for _, t in sources[path]))
    from tqdm.auto import tqdm

    loaded = {}
    total = sum(tensor.nbytes for parts in sources.values() for _, tensor in parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Loading {folder.name}", disable=not progress) as bar:
        for path in order:
            loaded[path] = placed(leaves[path], sources[path], bar.update)
    return jax.tree.unflatten(jax.tree.structure(abstract), [loaded[path] for path in leaves])


def read_headers(folder: Path, layouts: Layouts = layouts) -> dict[str, Stored]:
    """Every tensor of a checkpoint, by key, unread. For a converted folder: the tensors that it was made from, as far as anything
    reads them, for their shapes and dtypes alone; `layouts` says what they were, see `layout.layouts_of`. Raises as
    `safetensors.read_folder` and `fused.stored_shapes` do."""
    return _converted_headers(folder, layouts) if (folder / CONVERTED).exists() else read_folder(folder)


def _converted_headers(folder: Path, layouts: Layouts) -> dict[str, Stored]:
    leaves = fused.stored_shapes(folder)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    return {
        part.key: Stored(folder / fused.ARRAYS_FOLDER, names[leaf.dtype], part.shape, 0, math.prod(part.shape) * leaf.dtype.itemsize)
        for path, leaf in leaves.items()
        for part in layouts(path, shapes)[0]
    }


def _sources(
    folder: Path, stored: Mapping[str, Stored], leaves: Mapping[str, Any], prefix: str, layouts: Layouts
) -> dict[str, list[tuple[Part, Stored]]]:
    """The tensors that make up each leaf, by the leaf's path. Raises ValueError that lists all that does not fit."""
    quantised = [key for key in stored if QUANTISED.search(key)]
    if quantised:
        raise ValueError(f"{folder} holds quantised weights ({quantised[0]}); only float checkpoints can be loaded")
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    sources, problems, known = {}, [], set()
    for path, leaf in leaves.items():
        possible = layouts(path, shapes)
        parts = next((p for p in possible if any(prefix + part.key in stored for part in p)), possible[0])
        known.update(prefix + key for key in [*(part.key for part in parts), *dead_keys(path, shapes)])
        wanted = INTEGERS if jnp.issubdtype(leaf.dtype, jnp.integer) else FLOATS
        sources[path] = []
        for part in parts:
            key, tensor = prefix + part.key, stored.get(prefix + part.key)
            if tensor is None:
                problems.append(f"{key}: missing, expected {list(part.shape)}")
            elif tensor.shape != part.shape:
                problems.append(f"{key}: found {list(tensor.shape)}, expected {list(part.shape)}")
            elif tensor.dtype not in wanted:
                problems.append(f"{key}: found {tensor.dtype}, expected one of {', '.join(wanted)}")
            else:
                sources[path].append((part, tensor))
    for key in sorted(stored.keys() - known):
        tied = [path for path in leaves if path.endswith("embed_tokens.weight")] if key == "lm_head.weight" else []
        embedding = stored.get(prefix + tied[0]) if tied else None
        if embedding is None:
            problems.append(f"{key}: unknown, found {stored[key].describe()}")
        elif not same_bytes(stored[key], embedding):
            problems.append(f"{key}: differs from {prefix}{tied[0]}; expected none, as the two are tied")
    raise_misfits(folder, problems)
    return sources
