"""GGUF files: their metadata, and their tensors, unread.

Source: docs/gguf.md of ggml, versions 2 and 3. A file holds a model's weights and, as metadata, its config and its tokenizer.
"""

from __future__ import annotations

import functools
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.checkpoint.gguf.blocks import KINDS, OTHERS, stored
from jaxspec.checkpoint.safetensors import Stored

MAGIC, SUFFIX = b"GGUF", ".gguf"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, where the metadata does not say
# The types of metadata that have one size, by number, as `struct` names them.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
AXES = 4  # of a tensor, at most
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")  # the name of a file that holds a part of the tensors
BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # files beside a model's: towers, and what a quantiser measured


class Contents(NamedTuple):
    """What a file says before its tensors' numbers."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]  # by their names in the file


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF, by its name or its first bytes."""
    with open(path, "rb") as opened:
        return path.suffix == SUFFIX or opened.read(len(MAGIC)) == MAGIC


def is_model(name: str) -> bool:
    """Whether a file of this name is a GGUF with a model's weights, or a part of one."""
    return name.endswith(SUFFIX) and not BESIDE.search(name)


def stem_of(name: str) -> str:
    """The name of a model's file without its end, and without which part it is."""
    stem = name.removesuffix(SUFFIX)
    split = SPLIT.fullmatch(stem)
    return split["stem"] if split else stem


def model_name(name: str) -> str:
    """The name of a link to a model's file, whatever that is called: one by which `is_model` knows it."""
    return name if is_model(name) else f"model{name.removeprefix(stem_of(name)) or SUFFIX}"


def names_of_parts(name: str) -> list[str]:
    """The names of the files that hold a model, of which `name` is one."""
    split = SPLIT.fullmatch(name.removesuffix(SUFFIX))
    if split is None:
        return [name]
    return [f"{split['stem']}-{number:05}-of-{split['count']}{SUFFIX}" for number in range(1, int(split["count"]) + 1)]


def parts_of(file: Path) -> list[Path]:
    """The files that hold a model, of which `file` is one. Raises FileNotFoundError if one is missing."""
    parts = [file.with_name(name) for name in names_of_parts(file.name)]
    if len(parts) == 1 and not file.exists():
        raise FileNotFoundError(f"{file} is a link to {file.readlink()}, which is not there" if file.is_symlink() else f"{file} is missing")
    if missing := [part.name for part in parts if not part.exists()]:
        raise FileNotFoundError(f"{file} is one of {len(parts)} parts of a model; {', '.join(missing)} must lie beside it")
    return parts


def firsts(names: Iterable[str]) -> list[str]:
    """The first file of each model among files of these names, sorted."""
    found: dict[str, str] = {}
    for name in sorted(name for name in names if is_model(name)):
        found.setdefault(stem_of(name), name)
    return list(found.values())


def chosen(names: Iterable[str], variant: str | None) -> list[str]:
    """The models that a variant may mean among files of these names: those whose names end with it, else those that have it in them. None
    means all."""
    found = firsts(names)
    if variant is None:
        return found
    wanted = re.escape(variant.lower())
    ways = (rf"(.*[-._/])?{wanted}", rf"(.*[-._/])?{wanted}([-._/].*)?")
    return next((those for way in ways if (those := [name for name in found if re.fullmatch(way, stem_of(name).lower())])), [])


def read_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of a model's files, by their names there, unread. Raises ValueError for a file that is damaged or is no GGUF, and for a
    tensor that is in two files."""
    found = dict[str, Stored]()
    for file in files:
        about = file.stat()
        for name, tensor in _tensors(file, about.st_size, about.st_mtime_ns).items():
            if name in found:
                raise ValueError(f"{name} is in {found[name].file.name} and in {file.name}; expected it in one of them")
            found[name] = tensor
    return found


@functools.lru_cache(maxsize=16)  # a part of a model is asked for several times while it is loaded
def _tensors(file: Path, size: int, changed: int) -> Mapping[str, Stored]:
    return read(file, strings=False).tensors


def read(file: Path, *, strings: bool = True) -> Contents:
    """What a file says. strings: whether lists of strings are read, such as a vocabulary; else their lengths stand in their place.

    Raises ValueError for a file that is damaged, is no GGUF or has tensors of a type that is not known."""
    with open(file, "rb") as opened:
        try:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            raise ValueError(f"{file} is no GGUF file: it is empty") from None
    with data:
        if data[:4] != MAGIC:
            pointer = "; it is a Git LFS pointer, so fetch the file itself" if data[:8] == b"version " else ""
            raise ValueError(f"{file} is no GGUF file: it begins with {data[:4]!r}, expected {MAGIC!r}{pointer}")
        try:
            return _Reader(file, data).contents(strings)
        except (struct.error, UnicodeDecodeError, OverflowError, LookupError, RecursionError) as error:
            raise ValueError(f"{file} is truncated or damaged: {error}") from error


class _Reader:
    def __init__(self, file: Path, data: mmap.mmap):
        self.file, self.data, self.at = file, data, 4

    def contents(self, strings: bool) -> Contents:
        version = self.number("I")
        if version not in VERSIONS:
            order = " (its bytes are in another order)" if version and version & 0xFFFF == 0 else ""
            raise ValueError(f"{self.file} is a GGUF of version {version}{order}; expected {' or '.join(map(str, VERSIONS))}")
        count, pairs = self.number("Q"), self.number("Q")
        metadata = dict[str, Any]()
        for _ in range(pairs):
            key = self.string()
            metadata[key] = self.value(self.number("I"), strings)
        entries = [self.entry() for _ in range(count)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"{self.file} is damaged: general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors = {name: self.tensor(name, shape, kind, start + offset) for name, shape, kind, offset in entries}
        if len(tensors) < count:
            raise ValueError(f"{self.file} is damaged: it names {count} tensors, of which {count - len(tensors)} have the name of another")
        return Contents(metadata, tensors)

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def string(self) -> str:
        length = self.number("Q")
        self.move(length)
        return self.data[self.at - length : self.at].decode()

    def move(self, length: int) -> None:
        self.at += length
        if self.at > len(self.data):
            raise LookupError(f"it ends at byte {len(self.data)} and should go on to byte {self.at} at least")

    def value(self, kind: int, strings: bool) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise LookupError(f"it has metadata of type {kind}, which no GGUF has")
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            form = f"<{count}{NUMBERS[kind]}"
            begin = self.at
            self.move(struct.calcsize(form))
            return list(struct.unpack_from(form, self.data, begin))
        if kind != STRING:
            return [self.value(kind, strings) for _ in range(count)]
        if strings:
            return [self.string() for _ in range(count)]
        for _ in range(count):
            self.move(self.number("Q"))
        return count

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self.string(), self.number("I")
        if axes > AXES:
            raise LookupError(f"{name} has {axes} axes; expected at most {AXES}")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]  # a file names the fastest axis first
        return name, shape, self.number("I"), self.number("Q")

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Stored:
        if kind not in KINDS:
            held, served = OTHERS.get(kind, f"number {kind}"), ", ".join(each.name for each in KINDS.values())
            raise ValueError(f"{self.file} holds {name} in the type {held}; served are {served}")
        try:
            made = stored(self.file, KINDS[kind], shape, offset)
        except ValueError as error:
            raise ValueError(f"{self.file} is damaged: {name}: {error}") from error
        if made.offset + made.nbytes > len(self.data):
            raise LookupError(f"it ends at byte {len(self.data)}, and {name} at byte {made.offset + made.nbytes}")
        return made
