"""Reading a checkpoint into a tree of weights: the host holds a few leaves at a time, and of a large tensor chunks."""

from __future__ import annotations

import functools
import itertools
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint import fused, jobs
from jaxspec.checkpoint.changes import Change
from jaxspec.checkpoint.files import CONVERTED
from jaxspec.checkpoint.layout import Layouts, Part, dead_keys, layouts, layouts_of, raise_misfits, unwrapped
from jaxspec.checkpoint.onto_devices import placing
from jaxspec.checkpoint.packing import Source, packed_placing
from jaxspec.checkpoint.quantisation import UNPACKED, Quantisation, Wanted
from jaxspec.checkpoint.safetensors import FLOATS, INTEGERS, NUMPY_DTYPES, Stored, same_numbers
from jaxspec.checkpoint.tensors import read_folder
from jaxspec.trees import leaves_by_path
from pallas_kernels.packed import Packed

HEAD = "lm_head.weight"
FIRST_BYTES = 4096  # of a tensor, that `fingerprint` reads
# How keys of a quantised matrix end where a float one's would end in ".weight", those of a converted folder among them.
CODES = re.compile(r"\.(weight_packed|qweight|weight\.words)$")
QUANTISED = re.compile(r"\.(weight_packed|weight_scale(_2|_inv)?|weight_global_scale|qweight)$")
# Of a cache of 8 bits: `read_quantisation` reads those of keys and values.
CACHE_SCALE = re.compile(r"\bself_attn\.((attn|[kv]_proj)\.)?(q|k|v|prob)_(scale|zero_point)$")


def load_weights(
    folder: Path,
    abstract: Any,
    *,
    prefixes: Sequence[str] = ("",),
    skip: Sequence[str] = (),
    quantisation: Quantisation | None = None,
    changes: Mapping[str, Change] = MappingProxyType({}),
    progress: bool = True,
) -> Any:
    """Reads a checkpoint into the shapes, dtypes and shardings of a tree of ShapeDtypeStructs.

    abstract: the tree; where it has a member `layouts`, that says how a file holds its leaves: see `layout.layouts_of`. prefixes: what
    may stand before our paths in the file's keys; we take the first that occurs. The file's may lack "model.", as of a model that
    transformers saved without its head, or begin with a wrapper's name, such as "language_model.".
    skip: keys that start with any of these are ignored. quantisation: how a file holds the matrices that are a `Packed` in the tree. These
    three are unused for a converted folder.
    changes: by key without a prefix, what an adapter makes of float weights, before they are quantised.
    progress: show a bar, by bytes. The host casts a float tensor to its leaf's dtype.

    Raises ValueError that lists every missing, unknown and misshapen tensor, before it reads any. Two kinds of tensor may be there
    although nothing reads them: K and V weights of a target's layers that share KV, and an lm_head.weight of the same numbers as
    embed_tokens.weight. Of a quantised checkpoint these are scales of activations and of a cache, too. Without an embed_tokens.weight, the
    lm_head.weight is read in its place. Contents of a quantised matrix that do not fit raise ValueError when they are read.
    """
    settings = {"prefixes": prefixes, "skip": skip, "quantisation": quantisation, "changes": changes, "progress": progress}
    return planned(folder, abstract, **settings)()


def planned(
    folder: Path,
    abstract: Any,
    *,
    prefixes: Sequence[str] = ("",),
    skip: Sequence[str] = (),
    quantisation: Quantisation | None = None,
    changes: Mapping[str, Change] = MappingProxyType({}),
    progress: bool = True,
    given: Mapping[str, Stored] | None = None,
) -> Callable[[], Any]:
    """What does `load_weights`, to be called once. All that needs no numbers is checked here. given: what is read in place of a
    checkpoint's tensors, as `read_headers` gives those; the folder is then named in errors alone."""
    folder = Path(folder)
    if given is None and (folder / CONVERTED).exists():
        return functools.partial(fused.restore, folder, abstract, changes, progress=progress)
    leaves = leaves_by_path(abstract, whole=(Packed,))
    tops = tuple({f"{path.partition('.')[0]}." for path in leaves})
    possible = (*prefixes, *(prefix.removeprefix("model.") for prefix in prefixes))
    stored = read_headers(folder) if given is None else given
    stored = unwrapped(stored, [p + path for path in leaves if path.endswith("embed_tokens.weight") for p in possible])
    stored = {key: tensor for key, tensor in stored.items() if not key.startswith(tuple(skip))}
    prefix = next((p for p in possible if any(key.startswith(p) and key.startswith(tops, len(p)) for key in stored)), prefixes[-1])
    stored = _with_table(stored, leaves, prefix)
    sources = _sources(folder, stored, leaves, prefix, layouts_of(abstract), quantisation)
    sources = _changed(folder, sources, changes)
    tensors = {path: [tensor for source in found for tensor in _tensors(source)] for path, found in sources.items()}
    # In the order of the files, so that a disk reads forward.
    order = sorted(sources, key=lambda path: min((str(t.file), t.offset) for t in tensors[path]))
    how = {path: (packed_placing if isinstance(sources[path][0], Source) else placing)(leaves[path], sources[path]) for path in order}
    total = sum(tensor.nbytes for found in tensors.values() for tensor in found)

    def read() -> Any:
        from tqdm.auto import tqdm

        with tqdm(total=total, unit="B", unit_scale=True, desc=f"Loading {folder.name}", disable=not progress) as bar:
            made = iter(jobs.results([job for path in order for job in how[path].jobs], bar.update))
        loaded = {path: how[path].array(list(itertools.islice(made, len(how[path].jobs)))) for path in order}
        structure = jax.tree.structure(abstract, is_leaf=lambda node: isinstance(node, Packed))
        return jax.tree.unflatten(structure, [loaded[path] for path in leaves])

    return read


def _with_table(stored: Mapping[str, Stored], leaves: Mapping[str, Any], prefix: str) -> dict[str, Stored]:
    """The tensors of a file, with the token embedding under its own key. safetensors' save_model keeps one name of two that are tied, the
    first of the alphabet: that of the head."""
    table = next((prefix + path for path in leaves if path.endswith("embed_tokens.weight")), None)
    if table is None or table in stored or HEAD not in stored or any(path.endswith(HEAD) for path in leaves):
        return dict(stored)
    return {table if key == HEAD else key: tensor for key, tensor in stored.items()}


def _changed(folder: Path, sources: Mapping[str, list[Any]], changes: Mapping[str, Change]) -> dict[str, list[Any]]:
    """The sources, of which those that an adapter changes read as they will be. Raises ValueError for a change of what is no tensor of the
    files."""
    parts = {source.part.key if isinstance(source, Source) else source[0].key for found in sources.values() for source in found}
    raise_misfits(folder, [f"{key}: the adapter changes it, and it lies in several tensors" for key in sorted(changes.keys() - parts)])

    def changed(source: Source | tuple[Part, Stored]) -> Any:
        if isinstance(source, Source):
            change = changes.get(source.part.key)
            return source if change is None else source._replace(tensors={key: change.on(found) for key, found in source.tensors.items()})
        part, tensor = source
        return (part, changes[part.key].on(tensor)) if part.key in changes else source

    return {path: list(map(changed, found)) for path, found in sources.items()}


def _tensors(source: Source | tuple[Part, Stored]) -> list[Stored]:
    return [*source.tensors.values()] if isinstance(source, Source) else [source[1]]


def read_headers(folder: Path, layouts: Layouts = layouts) -> dict[str, Stored]:
    """Every tensor of a checkpoint, by key, unread. For a converted folder: the tensors that it was made from, as far as anything
    reads them, for their shapes and dtypes alone; `layouts` says what they were, see `layout.layouts_of`. Raises as
    `tensors.read_folder` and `fused.stored_shapes` do."""
    return _converted_headers(folder, layouts) if (folder / CONVERTED).exists() else read_folder(folder)


def fingerprint(folder: Path) -> str:
    """What tells a checkpoint from another that took its place, in hexadecimal digits: the CRC-32 of config.json and of each tensor's key,
    dtype, shape and first bytes; of a converted folder, that of config.json and of what it says of its files. Raises as `read_headers`
    does."""
    found = zlib.crc32((folder / "config.json").read_bytes())
    if (folder / CONVERTED).exists():
        return f"{zlib.crc32((folder / CONVERTED).read_bytes(), found):08x}"
    for key, tensor in sorted(read_folder(folder).items()):
        found = zlib.crc32(f"{key} {tensor.describe()}".encode(), found)
        found = zlib.crc32(tensor.beginning(FIRST_BYTES).data, found)
    return f"{found:08x}"


def weight_keys(folder: Path, layouts: Layouts = layouts) -> set[str]:
    """The keys of a checkpoint's weights as if all were float. Arguments and errors are those of `read_headers`."""
    return {CODES.sub(".weight", key) for key in read_headers(folder, layouts)}


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
    folder: Path,
    stored: Mapping[str, Stored],
    leaves: Mapping[str, Any],
    prefix: str,
    layouts: Layouts,
    quantisation: Quantisation | None,
) -> dict[str, list[Any]]:
    """What makes up each leaf, by the leaf's path: (Part, Stored) of each of its tensors, or a Source for each part of one that the file
    holds quantised. Raises ValueError that lists all that does not fit."""
    quantised = [key for key in stored if QUANTISED.search(key)]
    if quantised and quantisation is None:
        raise ValueError(
            f"{folder} holds quantised weights ({quantised[0]}), and no config there says how; expected a quantization_config in "
            "config.json, or float weights"
        )
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    sources, problems, known = {}, [], set()
    for path, leaf in leaves.items():
        possible = layouts(path, shapes)
        dead = tuple(prefix + key for key in dead_keys(path, shapes))
        known.update(dead)
        if quantisation is not None and dead:
            known.update(key for key in stored if key.startswith(tuple(key.removesuffix("weight") for key in dead)))
        unpacked = None
        if quantisation is not None and UNPACKED.search(path):
            unpacked = quantisation.format_for(prefix + path.removesuffix(".weight"))
        if isinstance(leaf, Packed) or unpacked is not None:
            assert quantisation is not None
            sources[path] = _packed_sources(possible, stored, prefix, quantisation, problems, known)
            continue
        parts = next((p for p in possible if any(prefix + part.key in stored for part in p)), possible[0])
        known.update(prefix + part.key for part in parts)
        wanted = INTEGERS if jnp.issubdtype(leaf.dtype, jnp.integer) else FLOATS
        sources[path] = []
        for part in parts:
            tensor = _fitting(prefix + part.key, Wanted(part.shape, tuple(wanted)), stored, problems)
            if tensor is not None:
                sources[path].append((part, tensor))
    for key in sorted(stored.keys() - known):
        if quantisation is not None and CACHE_SCALE.search(key):
            continue
        tied = [path for path in leaves if path.endswith("embed_tokens.weight")] if key == HEAD else []
        embedding = stored.get(prefix + tied[0]) if tied else None
        if embedding is None:
            problems.append(f"{key}: unknown, found {stored[key].describe()}")
        elif not same_numbers(stored[key], embedding):
            problems.append(f"{key}: differs from {prefix}{tied[0]}; expected none, as the two are tied")
    raise_misfits(folder, problems)
    return sources


def _packed_sources(
    possible: Sequence[Sequence[Part]],
    stored: Mapping[str, Stored],
    prefix: str,
    quantisation: Quantisation,
    problems: list[str],
    known: set[str],
) -> list[Source]:
    """What makes up a quantised leaf. possible: the ways in which a file may hold it, in float. Adds to problems and to known keys."""
    named = [quantisation.format_for(prefix + part.key.removesuffix(".weight")) for part in possible[-1]]
    ways = []
    for parts in possible:
        # Of several experts in one tensor, all have the format of the first.
        formats = named if len(parts) == len(named) else [named[0]] * len(parts)
        way = []
        for part, form in zip(parts, formats, strict=True):
            assert form is not None
            try:
                way.append((part, form, form.tensors(prefix + part.key, part.shape)))
            except ValueError as error:
                problems.append(f"{prefix}{part.key}: cannot be quantised as {quantisation.name}, {error}")
        ways.append(way)
    chosen = next((way for way in ways if any(key in stored for _, _, wanted in way for key in wanted)), ways[-1])
    sources = []
    for part, form, wanted in chosen:
        known.update(wanted)
        found = {key: _fitting(key, want, stored, problems) for key, want in wanted.items()}
        sources.append(Source(prefix + part.key, part, form, {key: tensor for key, tensor in found.items() if tensor is not None}))
    return sources


def _fitting(key: str, wanted: Wanted, stored: Mapping[str, Stored], problems: list[str]) -> Stored | None:
    """The tensor of a key if it is as wanted. If it is not, adds to problems and returns None."""
    tensor = stored.get(key)
    if tensor is None:
        if not wanted.optional:
            problems.append(f"{key}: missing, expected {list(wanted.shape)}")
    elif tensor.shape != wanted.shape and not (wanted.shape == () and math.prod(tensor.shape) == 1):
        problems.append(f"{key}: found {list(tensor.shape)}, expected {list(wanted.shape)}")
    elif tensor.dtype not in wanted.dtypes:
        expected = wanted.dtypes[0] if len(wanted.dtypes) == 1 else f"one of {', '.join(wanted.dtypes)}"
        problems.append(f"{key}: found {tensor.dtype}, expected {expected}")
    else:
        return tensor
    return None
