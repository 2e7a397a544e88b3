"""Hugging Face checkpoints: folders, configs, and safetensors to and from our trees of weights.

The path of a field is its Hugging Face key; `layouts` names the few fused matrices that are several tensors, or another shape, in a
file. A tree is read leaf by leaf, so that the host holds one fused matrix at a time, and of a larger tensor a
chunk, never a model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec.checkpoint.onto_devices import placed

TARGET_PREFIXES = ("model.language_model.", "model.")  # conditional generation; text only
# The image and audio parts of a target's checkpoint, which the text path does without.
TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.", "model.vision_embedder.")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONVERTED = "jaxspec.json"  # what tells a folder that `jaxspec convert` wrote
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "mask_embedding.pt"]  # the last to be refused, not overlooked
CONFIGS = ["config.json", "generation_config.json"]
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
INTEGERS = {"I64": np.int64, "I32": np.int32}
DTYPES = {name: np.dtype(kind) for name, kind in (FLOATS | INTEGERS).items()}
QUANTISED = re.compile(r"\.(weight_packed|weight_scale(_2|_inv)?|weight_global_scale|qweight)$")
MAX_LISTED = 20
COMPARED = 1 << 20  # bytes of two tensors at a time


def resolve(name: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The folder of a checkpoint: a bundled name such as "pocket", a local folder, or a hub id, which is downloaded. weights: whether all
    of it is, or its configs alone.

    Raises FileNotFoundError if it is none of them or cannot be downloaded, ValueError for a single file.
    """
    text = os.fspath(name)
    bundled = _bundled()
    if text in bundled:
        return bundled[text]
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path
    if path.suffix in PICKLES:
        raise ValueError(_refuse_pickle(path.name))
    if path.is_file():
        raise ValueError(f"{text!r} is a file; expected the folder that holds it and its config.json")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text):
        raise FileNotFoundError(
            f"{text!r} is neither a folder, nor a hub id (owner/name), nor bundled ({', '.join(sorted(bundled))}), nor the drafter 'ngram'"
        )
    import huggingface_hub  # here, because it takes a while to import and only downloads need it

    try:
        folder = huggingface_hub.snapshot_download(text, allow_patterns=DOWNLOADED if weights else CONFIGS, ignore_patterns=["*/*"])
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{text!r} is no folder, and the hub did not give a model of that id: {error}") from error
    return Path(folder)


def _bundled() -> dict[str, Path]:
    """Bundled names: pocket/target is "pocket", any other folder with a config.json is "pocket-" and its name."""
    root = Path(__file__).parent.parent / "pocket"
    folders = (path.parent for path in root.glob("*/config.json"))
    return {"pocket": root / "target"} | {f"pocket-{path.name}": path for path in folders if path.name != "target"}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises FileNotFoundError or ValueError."""
    return _read_json(Path(folder) / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a checkpoint, or {} where there is none."""
    path = Path(folder) / "generation_config.json"
    return _read_json(path) if path.exists() else {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a file and its place in a leaf: leaf[index] has the tensor's elements in the tensor's order."""

    key: str
    shape: tuple[int, ...]
    index: tuple[Any, ...] = ()


def layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[Part]]:
    """The ways in which a checkpoint may hold the leaf at `path`; the first is the one that is written.

    shapes: of all leaves of the tree, by path. Keys come without the checkpoint's prefix.
    """
    choices = _layouts(path, shapes)
    if path.startswith("layers.0."):
        # EAGLE has another name for its only layer.
        first = [[dataclasses.replace(part, key=part.key.replace("layers.0.", "midlayer.", 1)) for part in parts] for parts in choices]
        choices = choices + first
    # The tensors of an MTP module's decoder layer lie beside its own.
    return [[dataclasses.replace(part, key=part.key.replace(".mtp_block.", ".")) for part in parts] for parts in choices]


def _layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[Part]]:
    shape = shapes[path]
    stem, _, name = path.rpartition("self_attn.")
    if name == "qkv_proj.weight":  # [KV, G + owned, D, H]
        kv, rows, head_dim, hidden = shape
        group = shapes[f"{stem}self_attn.o_proj.weight"][2]
        ends = [0, group, *range(group + 1, rows + 1)]
        return [
            [
                Part(f"{stem}self_attn.{name}_proj.weight", (kv * (high - low) * head_dim, hidden), (slice(None), slice(low, high)))
                for name, low, high in zip("qkv", ends, ends[1:], strict=False)
            ]
        ]
    if path == "kv_proj.weight":  # [layers, 2, KV, D, H], of a DFlash drafter
        layers, _, *heads, hidden = shape
        parts = [(i, j, f"layers.{i}.self_attn.{kind}_proj.weight") for i in range(layers) for j, kind in enumerate("kv")]
        return [[Part(key, (math.prod(heads), hidden), (i, j)) for i, j, key in parts]]
    if name == "q_proj.weight" and len(shape) == 4:  # [KV, G, D, H]
        return [[Part(path, (math.prod(shape[:-1]), shape[-1]))]]
    if name == "o_proj.weight" and len(shape) == 4:  # [H, KV, G, D]
        return [[Part(path, (shape[0], math.prod(shape[1:])))]]
    if path.endswith("experts.gate_up_proj"):  # [E, 2, I, H]
        stem, (experts, _, inner, hidden) = path.removesuffix("gate_up_proj"), shape
        unfused = [
            Part(f"{stem}{e}.{name}_proj.weight", (inner, hidden), (e, i)) for e in range(experts) for i, name in enumerate(("gate", "up"))
        ]
        return [[Part(path, (experts, 2 * inner, hidden))], unfused]
    if path.endswith("experts.down_proj"):  # [E, H, I]
        stem = path.removesuffix("down_proj")
        return [[Part(path, shape)], [Part(f"{stem}{e}.down_proj.weight", shape[1:], (e,)) for e in range(shape[0])]]
    if path.endswith("gate_up_proj.weight"):  # [2, I, H]
        stem = path.removesuffix("gate_up_proj.weight")
        return [[Part(f"{stem}gate_proj.weight", shape[1:], (0,)), Part(f"{stem}up_proj.weight", shape[1:], (1,))]]
    return [[Part(path, shape)]]


def _dead(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Keys beside the leaf at `path` that nothing reads: original releases keep K and V weights of a target's layers that share KV. An
    assistant with K and V of its own would be another kind of model."""
    if not (path.startswith("layers.") and path.endswith("self_attn.qkv_proj.weight")):
        return []
    stem = path.removesuffix("qkv_proj.weight")
    owned = shapes[path][1] - shapes[f"{stem}o_proj.weight"][2]
    return [] if owned else [f"{stem}{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path: fields and indices joined by dots."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file: dtype as safetensors names it, and where its bytes are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def describe(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def read(self) -> np.ndarray:
        """The whole tensor, in host memory of its own."""
        data = np.empty(self.nbytes, np.uint8)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset)
            done = 0
            while done < self.nbytes:
                count = file.readinto(data.data[done:])
                if not count:
                    raise ValueError(f"{self.file} ended while it was read: found {done} bytes of a tensor of {self.nbytes}")
                done += count
        return data.view(DTYPES[self.dtype]).reshape(self.shape)

    def part(self, shape: tuple[int, ...], start: int, stop: int) -> Stored:
        """The tensor as one of this shape, of as many elements: rows start .. stop - 1 of its first axis."""
        row = self.nbytes // shape[0]
        return dataclasses.replace(self, shape=(stop - start, *shape[1:]), offset=self.offset + start * row, nbytes=(stop - start) * row)


def read_header(file: Path) -> dict[str, Stored]:
    """What a safetensors file holds, without reading its tensors.

    Raises FileNotFoundError if it is missing, ValueError if it is truncated or no safetensors file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} has no {file.name}")
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            hint = " (a Git LFS pointer: fetch the file itself)" if size < 1024 and file.read_bytes().startswith(b"version ") else ""
            raise ValueError(f"{file} is truncated or no safetensors file{hint}: found {size} bytes, expected at least {8 + length}")
        text = opened.read(length)
    try:
        header = {
            name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0], _nbytes(entry))
            for name, entry in json.loads(text).items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"{file} has a header that is not safetensors': {error!r}") from error
    expected = max((tensor.offset + tensor.nbytes for tensor in header.values()), default=8 + length)
    if size != expected:
        raise ValueError(f"{file} is truncated or damaged: found {size} bytes, expected {expected}")
    return header


def _nbytes(entry: Mapping[str, Any]) -> int:
    """The size of a tensor in a header, which must agree with its shape where the dtype is one we read."""
    start, end = entry["data_offsets"]
    dtype = DTYPES.get(entry["dtype"])
    if not 0 <= start <= end or (dtype is not None and math.prod(entry["shape"]) * dtype.itemsize != end - start):
        raise ValueError(f"data_offsets {start}, {end} do not fit {entry['dtype']} {entry['shape']}")
    return end - start


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint: model.safetensors, or the files that model.safetensors.index.json names.

    Raises FileNotFoundError, or ValueError for a broken index, a file outside the folder, or weights that need pickle.
    """
    folder = Path(folder)
    if (folder / CONVERTED).exists():
        return _converted_headers(folder)
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise ValueError(_refuse_pickle(pickles[0]))
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}; found {sorted(p.name for p in folder.iterdir())}")
    index = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map of tensor to file name")
    headers = {name: read_header(_inside(folder, name)) for name in sorted(set(index.values()))}
    problems = [f"{key}: not in {name}, where {INDEX} has it" for key, name in index.items() if key not in headers[name]]
    problems += [f"{key}: in {name}, but not in {INDEX}" for name, held in headers.items() for key in held if index.get(key) != name]
    _raise_all(folder, problems)
    return {key: headers[name][key] for key, name in index.items()}


def _converted_headers(folder: Path) -> dict[str, Stored]:
    """What the checkpoint held that a converted folder was made from, as far as anything reads it; not to be read from there."""
    from jaxspec import converting

    leaves = converting.describe(folder)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        part.key: Stored(folder / converting.WEIGHTS, names[leaf.dtype], part.shape, 0, math.prod(part.shape) * leaf.dtype.itemsize)
        for path, leaf in leaves.items()
        for part in layouts(path, shapes)[0]
    }


def _inside(folder: Path, name: str) -> Path:
    """folder / name, if that is a file of this folder. A hub's cache links its snapshots to its own blobs, and that is inside too."""
    path, roots = folder / name, [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        roots.append(folder.resolve().parents[1] / "blobs")
    if Path(name).is_absolute() or ".." in Path(name).parts or not any(path.resolve().is_relative_to(root) for root in roots):
        raise ValueError(f"{folder / INDEX} names {name!r}, which is outside its folder")
    return path


def _refuse_pickle(name: str) -> str:
    convert = f"save_file(torch.load('{name}', weights_only=True), '{WEIGHTS}', {{'format': 'pt'}})"
    return (
        f"{name} is a pickle, which can run code when it is read; expected safetensors. To convert it, where you trust it: "
        f'python -c "import torch; from safetensors.torch import save_file; {convert}"'
    )


def _raise_all(folder: Path, problems: Sequence[str]) -> None:
    if problems:
        more = f"\n  ... and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        listed = "".join(f"\n  {line}" for line in problems[:MAX_LISTED])
        raise ValueError(f"the weights in {folder} do not fit the model, {len(problems)} problems:{listed}{more}")


def load_weights(folder: Path, abstract: Any, *, prefixes: Sequence[str] = ("",), skip: Sequence[str] = (), progress: bool = True) -> Any:
    """Reads a checkpoint into the shapes, dtypes and shardings of a tree of ShapeDtypeStructs.

    prefixes: what the file's keys may have before our paths; the first that occurs is taken. skip: beginnings of keys that are not
    ours. A tensor is cast on the host to its leaf's dtype. progress: show a bar, by bytes. A converted folder holds our paths alone.

    Raises ValueError that lists every missing, unknown and misshapen tensor, before any is read. Two kinds of tensor are
    superfluous yet accepted: K and V weights of a target's layers that share KV, and an lm_head.weight whose bytes equal
    embed_tokens.weight.
    """
    folder = Path(folder)
    if (folder / CONVERTED).exists():
        from jaxspec import converting

        return converting.restore(folder, abstract, progress=progress)
    stored = {key: tensor for key, tensor in read_headers(folder).items() if not key.startswith(tuple(skip))}
    leaves = _leaves(abstract)
    prefix = next((p for p in prefixes if any(key.startswith(p) for key in stored)), prefixes[-1])
    plan = _plan(folder, stored, leaves, prefix)
    # In the order of the files, so that a disk reads forward.
    order = sorted(plan, key=lambda path: min((str(t.file), t.offset) for _, t in plan[path]))
    from tqdm.auto import tqdm

    loaded = {}
    total = sum(tensor.nbytes for parts in plan.values() for _, tensor in parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Loading {folder.name}", disable=not progress) as bar:
        for path in order:
            loaded[path] = placed(leaves[path], plan[path], bar.update)
    return jax.tree.unflatten(jax.tree.structure(abstract), [loaded[path] for path in leaves])


def _plan(folder: Path, stored: Mapping[str, Stored], leaves: Mapping[str, Any], prefix: str) -> dict[str, list[tuple[Part, Stored]]]:
    """Which tensors make up each leaf. Raises ValueError with all that does not fit."""
    quantised = [key for key in stored if QUANTISED.search(key)]
    if quantised:
        raise ValueError(f"{folder} holds quantised weights ({quantised[0]}); only float checkpoints can be loaded")
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    plan, problems, known = {}, [], set()
    for path, leaf in leaves.items():
        choices = layouts(path, shapes)
        parts = next((c for c in choices if any(prefix + part.key in stored for part in c)), choices[0])
        known.update(prefix + key for key in [*(part.key for part in parts), *_dead(path, shapes)])
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
        elif not _same_bytes(stored[key], embedding):
            problems.append(f"{key}: differs from {prefix}{tied[0]}; expected none, as the two are tied")
    _raise_all(folder, problems)
    return plan


def _same_bytes(a: Stored, b: Stored) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with open(a.file, "rb") as left, open(b.file, "rb") as right:
        left.seek(a.offset)
        right.seek(b.offset)
        counts = (min(COMPARED, a.nbytes - at) for at in range(0, a.nbytes, COMPARED))
        return all(left.read(count) == right.read(count) for count in counts)


def save_weights(folder: Path, tree: Any, config: Mapping[str, Any], *, prefix: str = "", dtype: Any = None) -> None:
    """Writes config.json and model.safetensors in Hugging Face's layout: one file, made in host memory.

    tree: of arrays. prefix: put before our paths, such as "model." for a text-only target. dtype: of float weights, by default
    their own; integers are written as int64, as released checkpoints have them.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    leaves = _leaves(tree)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    tensors = {}
    for path, leaf in leaves.items():
        value = np.asarray(leaf)
        value = value.astype(np.int64 if value.dtype.kind == "i" else dtype or value.dtype)
        for part in layouts(path, shapes)[0]:
            tensors[prefix + part.key] = np.ascontiguousarray(value[part.index].reshape(part.shape))
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    # Under another name first, so that a run that is killed leaves no half file that looks whole.
    unfinished = folder / f".{WEIGHTS}.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / WEIGHTS)
