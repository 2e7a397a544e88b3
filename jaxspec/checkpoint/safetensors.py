"""safetensors files: their headers, and their tensors, whole or in rows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files import INDEX_FILE, WEIGHTS_FILE, pickled_weights, read_json, refuse_pickle, unmerged
from jaxspec.checkpoint.layout import raise_misfits

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
INTEGERS = {"I64": np.int64, "I32": np.int32}
CODES = {"U8": np.uint8, "I8": np.int8, "U32": np.uint32, "F8_E4M3": ml_dtypes.float8_e4m3fn}  # of quantised weights and their scales
NUMPY_DTYPES = {name: np.dtype(kind) for name, kind in (FLOATS | INTEGERS | CODES).items()}
WRAPPER = "module."  # which parallel training puts around a model
COMPILED = "_orig_mod."  # and torch.compile around a model or any part of it
UNMERGED = ".base_layer."  # and PEFT between a layer that it adapts and its weight
COMPARED = 1 << 20  # numbers of two tensors that are compared at a time


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file, unread."""

    file: Path
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes, from the start of the file
    nbytes: int

    def describe(self) -> str:
        """Dtype and shape, for errors."""
        return f"{self.dtype} {list(self.shape)}"

    @property
    def on_devices(self) -> Any:
        """The tensor as an array of JAX, where it is one already, and None in a file."""
        return None

    def read(self, into: np.ndarray | None = None) -> np.ndarray:
        """The tensor. into: where it is read to, an array of its dtype and size that is contiguous, which then is returned; by default host
        memory of its own. Raises ValueError if the file ends early."""
        data = np.empty(self.nbytes, np.uint8) if into is None else into.reshape(-1).view(np.uint8)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset)
            done = 0
            while done < self.nbytes:
                count = file.readinto(data.data[done:])
                if not count:
                    raise ValueError(f"{self.file} ended while it was read: found {done} bytes of a tensor of {self.nbytes}")
                done += count
        return data.view(NUMPY_DTYPES[self.dtype]).reshape(self.shape) if into is None else into

    def beginning(self, count: int) -> np.ndarray:
        """Its first bytes in the file, so many or all: [n] uint8."""
        count = min(count, self.nbytes)
        return Stored(self.file, "U8", (count,), self.offset, count).read()

    def rows(self, shape: tuple[int, ...], start: int, stop: int) -> Stored:
        """Rows start .. stop - 1 of the tensor reshaped to `shape`."""
        row = self.nbytes // shape[0]
        return dataclasses.replace(self, shape=(stop - start, *shape[1:]), offset=self.offset + start * row, nbytes=(stop - start) * row)


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by key, unread. Keys are those without what torch.compile puts into them.

    Raises FileNotFoundError if the file is missing, ValueError if it is truncated or not safetensors.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} has no {file.name}")
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            hint = " (a Git LFS pointer: fetch the file itself)" if size < 1024 and file.read_bytes().startswith(b"version ") else ""
            raise ValueError(f"{file} is truncated or not a safetensors file{hint}: found {size} bytes, expected at least {8 + length}")
        text = opened.read(length)
    try:
        header = {
            name.replace(COMPILED, ""): Stored(
                file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0], _nbytes(entry)
            )
            for name, entry in json.loads(text).items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"{file} has an invalid safetensors header: {error!r}") from error
    end, before = 8 + length, "the header"
    for name, tensor in sorted(header.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise ValueError(f"{file} has an invalid safetensors header: {name} begins {tensor.offset - end} bytes after {before} ends")
        end, before = end + tensor.nbytes, name
    if size != end:
        raise ValueError(f"{file} is truncated or damaged: found {size} bytes, expected {end}")
    return header


def _nbytes(entry: Mapping[str, Any]) -> int:
    """The size of a tensor by its header entry. Raises ValueError if it contradicts the shape, for a dtype that we read."""
    start, end = entry["data_offsets"]
    if not all(type(number) is int for number in (start, end, *entry["shape"])):
        raise ValueError(f"data_offsets {start}, {end} and shape {entry['shape']} are not all whole numbers")
    dtype = NUMPY_DTYPES.get(entry["dtype"])
    if not 0 <= start <= end or (dtype is not None and math.prod(entry["shape"]) * dtype.itemsize != end - start):
        raise ValueError(f"data_offsets {start}, {end} do not fit {entry['dtype']} {entry['shape']}")
    return end - start


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, by key, unread: those of model.safetensors, or of the files that model.safetensors.index.json names.
    Which tensors a file holds, its own header says: tools that change a checkpoint may leave the index as it was. Keys are those without
    the names of wrappers that all begin with, and what `read_header` leaves out.

    Raises FileNotFoundError if a file is missing, ValueError for a broken index, a file outside the folder, a tensor that is in two files
    with other numbers, weights in a pickle, or an adapter beside the weights that it was made for.
    """
    folder = Path(folder)
    stored = without_wrappers(read_header(folder / WEIGHTS_FILE) if (folder / WEIGHTS_FILE).exists() else _read_parts(folder))
    if (beside := next((key for key in stored if UNMERGED in key), None)) is not None:
        raise ValueError(
            f"{folder} holds a model and, in the same files, an adapter that PEFT has put around its layers ({beside}); expected a model: "
            "call merge_and_unload() before it is saved, or save the adapter by itself and give it as adapter="
        )
    return stored


def without_wrappers(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Tensors by their keys without what torch.compile puts into them, and without the names of wrappers that all begin with."""
    stored = {key.replace(COMPILED, ""): tensor for key, tensor in stored.items()}
    while stored and all(key.startswith(WRAPPER) for key in stored):
        stored = {key.removeprefix(WRAPPER): tensor for key, tensor in stored.items()}
    return stored


def _read_parts(folder: Path) -> dict[str, Stored]:
    """What is in the files that an index names."""
    if not (folder / INDEX_FILE).exists():
        pickles = pickled_weights(path.name for path in folder.iterdir())
        if pickles:
            raise ValueError(refuse_pickle(pickles))
        found = sorted(path.name for path in folder.iterdir())
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; found {found}{unmerged(found)}")
    index = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{folder / INDEX_FILE} has no weight_map of tensor to file name")
    stored, problems = dict[str, Stored](), list[str]()
    for name in sorted(set(index.values())):
        for key, tensor in read_header(_inside(folder, name)).items():
            first = stored.setdefault(key, tensor)
            if first is not tensor and not same_numbers(first, tensor):
                problems.append(f"{key}: in {first.file.name} and, with other numbers, in {name}")
    raise_misfits(folder, problems)
    return stored


def _inside(folder: Path, name: str) -> Path:
    """folder / name. Raises ValueError if that lies outside the folder. Links are followed, as those of the hub's cache."""
    if not name or "\0" in name or name == ".":
        raise ValueError(f"{folder / INDEX_FILE} names the file {name!r}; expected a file in its folder")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{folder / INDEX_FILE} names {name!r}, which is outside its folder")
    return folder / name


def same_numbers(a: Stored, b: Stored) -> bool:
    """Whether two tensors have the same shape and numbers; the dtypes of floats may differ. Reads both."""
    if a.shape != b.shape or (a.dtype != b.dtype and not {a.dtype, b.dtype} <= FLOATS.keys()):
        return False
    count = math.prod(a.shape)
    return all(_same(*(x.rows((count,), at, min(at + COMPARED, count)).read() for x in (a, b))) for at in range(0, count, COMPARED))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == b.dtype:
        return a.tobytes() == b.tobytes()
    return np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True)
