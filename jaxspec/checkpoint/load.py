"""Reading a checkpoint into a tree of weights: leaf by leaf, so that the host holds one fused matrix at a time, and of a larger tensor a
chunk, never a model.
"""

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
from jaxspec.checkpoint.safetensors import DTYPES, FLOATS, INTEGERS, Stored, read_folder, same_bytes
from jaxspec.trees import leaves as leaves_of

QUANTISED = re.compile(r"\.(weight_packed|weight_scale(_2|_inv)?|weight_global_scale|qweight)$")


def load_weights(folder: Path, abstract: Any, *, prefixes: Sequence[str] = ("",), skip: Sequence[str] = (), progress: bool = True) -> Any:
    """Reads a checkpoint into the shapes, dtypes and shardings of a tree of ShapeDtypeStructs.

    abstract: the tree; where it has a member `layouts`, that says how a file holds its leaves: see `layout.layouts_of`. prefixes: what
    the file's keys may have before our paths; the first that occurs is taken. skip: beginnings of keys that are not ours. A tensor is
    cast on the host to its leaf's dtype. progress: show a bar, by bytes. A converted folder holds our paths alone.

    Raises ValueError that lists every missing, unknown and misshapen tensor, before any is read. Two kinds of tensor are
    superfluous yet accepted: K and V weights of a target's layers that share KV, and an lm_head.weight whose bytes equal
    embed_tokens.weight.
    """
    folder = Path(folder)
    if (folder / CONVERTED).exists():
        return fused.restore(folder, abstract, progress=progress)
    stored = {key: tensor for key, tensor in read_headers(folder).items() if not key.startswith(tuple(skip))}
    leaves = leaves_of(abstract)
    prefix = next((p for p in prefixes if any(key.startswith(p) for key in stored)), prefixes[-1])
    plan = _plan(folder, stored, leaves, prefix, layouts_of(abstract))
    # In the order of the files, so that a disk reads forward.
    order = sorted(plan, key=lambda path: min((str(t.file), t.offset) for _, t in plan[path]))
    from tqdm.auto import tqdm

    loaded = {}
    total = sum(tensor.nbytes for parts in plan.values() for _, tensor in parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Loading {folder.name}", disable=not progress) as bar:
        for path in order:
            loaded[path] = placed(leaves[path], plan[path], bar.update)
    return jax.tree.unflatten(jax.tree.structure(abstract), [loaded[path] for path in leaves])


def read_headers(folder: Path, layouts: Layouts = layouts) -> dict[str, Stored]:
    """Every tensor of a checkpoint: see `safetensors.read_folder`. Of a converted folder, those that it was made from, as `layouts`
    says: see `layout.layouts_of`."""
    return _converted_headers(folder, layouts) if (folder / CONVERTED).exists() else read_folder(folder)


def _converted_headers(folder: Path, layouts: Layouts) -> dict[str, Stored]:
    """What the checkpoint held that a converted folder was made from, as far as anything reads it; not to be read from there."""
    leaves = fused.describe(folder)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        part.key: Stored(folder / fused.WEIGHTS, names[leaf.dtype], part.shape, 0, math.prod(part.shape) * leaf.dtype.itemsize)
        for path, leaf in leaves.items()
        for part in layouts(path, shapes)[0]
    }


def _plan(
    folder: Path, stored: Mapping[str, Stored], leaves: Mapping[str, Any], prefix: str, layouts: Layouts
) -> dict[str, list[tuple[Part, Stored]]]:
    """Which tensors make up each leaf. Raises ValueError with all that does not fit."""
    quantised = [key for key in stored if QUANTISED.search(key)]
    if quantised:
        raise ValueError(f"{folder} holds quantised weights ({quantised[0]}); only float checkpoints can be loaded")
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    plan, problems, known = {}, [], set()
    for path, leaf in leaves.items():
        choices = layouts(path, shapes)
        parts = next((c for c in choices if any(prefix + part.key in stored for part in c)), choices[0])
        known.update(prefix + key for key in [*(part.key for part in parts), *dead_keys(path, shapes)])
        wanted = INTEGERS if jnp.issubdtype(leaf.dtype, jnp.integer) else FLOATS
        plan[path] = []
        for part in parts:
            key, tensor = prefix + part.key, stored.get(prefix + part.key)
            if tensor is None:
                problems.append(f"{key}: missing, expected {list(part.shape)}")
            elif tensor.shape != part.shape:
                problems.append(f"{key}: found {list(tensor.shape)}, expected {list(part.shape)}")
            elif tensor.dtype not in wanted:
                problems.append(f"{key}: found {tensor.dtype}, expected one of {', '.join(wanted)}")
            else:
                plan[path].append((part, tensor))
    for key in sorted(stored.keys() - known):
        tied = [path for path in leaves if path.endswith("embed_tokens.weight")] if key == "lm_head.weight" else []
        embedding = stored.get(prefix + tied[0]) if tied else None
        if embedding is None:
            problems.append(f"{key}: unknown, found {stored[key].describe()}")
        elif not same_bytes(stored[key], embedding):
            problems.append(f"{key}: differs from {prefix}{tied[0]}; expected none, as the two are tied")
    raise_misfits(folder, problems)
    return plan
