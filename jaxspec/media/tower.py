"""A tower of a checkpoint: read beside its text model, and run over images or sounds."""

from __future__ import annotations

import abc
import collections
import copy
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np

from jaxspec import checkpoint
from jaxspec.checkpoint.changes import Change
from jaxspec.checkpoint.files import CONVERTED
from jaxspec.checkpoint.layout import layouts_of
from jaxspec.checkpoint.load import QUANTISED
from jaxspec.checkpoint.peft import Adapter
from jaxspec.checkpoint.safetensors import FLOATS
from jaxspec.trees import leaves_by_path, nbytes
from jaxspec.xla_options import known

AHEAD = 8  # media whose rows are on their way into prompts
KEPT = 16  # media whose rows are kept, on the device
# Products by cuBLAS alone. By default XLA also makes kernels of its own for each and times them, which takes 5 to 9 s a program, and its
# choice was slower.
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False}


class Prepared(NamedTuple):
    """A medium that is decoded: what a tower reads of it. digest: equal for equal data of one shape alone."""

    data: np.ndarray
    digest: bytes

    @classmethod
    def of(cls, data: np.ndarray) -> Prepared:
        return cls(data, hashlib.sha256(f"{data.shape} ".encode() + data.tobytes()).digest())


class Run(NamedTuple):
    """So many rows of a medium that stand one after the other in a prompt, such as those of a frame of a video. before: the tokens between
    them and the rows before, or the medium's beginning."""

    before: list[int]
    count: int


@functools.cache
def jitted(run: Callable[..., Any], *static: str) -> Callable[..., Any]:
    """A function that computes rows, to be called in place of it. static: names of arguments that are no arrays."""
    return jax.jit(run, static_argnames=static, compiler_options=known(BY_CUBLAS))


class Media(abc.ABC):
    """What makes rows of images, or of sounds: how a checkpoint prepares them, and its tower. Threads may share it."""

    noun: ClassVar[str]  # what errors call the tower
    section: ClassVar[str]  # of config.json, which says what it is
    modules: ClassVar[tuple[str, ...]]  # the first modules of its tensors' names, after what may stand before these, such as "model."
    folder: ClassVar[str]  # that a converted checkpoint has it in

    see_one_another: ClassVar[bool]  # whether all rows of a medium do, so that one call computes them
    together = 1  # media that a call of the tower reads, at most
    tower: Any  # weights or their shapes

    def __init__(self, tower: Any):
        self.tower = tower
        self._kept = collections.OrderedDict[bytes, jax.Array]()  # the last to be used comes last
        self._lock = threading.Lock()

    @classmethod
    @abc.abstractmethod
    def read(cls, folder: Path, dtype: Any) -> Self:
        """What a checkpoint's configs say; of the tower there are shapes alone. dtype: of the weights and rows, jnp.float32 or
        jnp.bfloat16. Raises ValueError that says what is not served, for a checkpoint without such a tower too."""

    @property
    @abc.abstractmethod
    def opening(self) -> list[int]:
        """The tokens before a medium's rows in a prompt."""

    @property
    @abc.abstractmethod
    def closing(self) -> list[int]:
        """The tokens after a medium's rows in a prompt."""

    @abc.abstractmethod
    def count(self, medium: Any) -> int:
        """How many rows a medium has."""

    @property
    @abc.abstractmethod
    def rooms(self) -> tuple[int, ...]:
        """For how many rows of a medium calls have room, ascending. With more, one whose rows do not see one another has parts."""

    @property
    @abc.abstractmethod
    def largest(self) -> str:
        """The media that memory is planned for, in words."""

    @abc.abstractmethod
    def bytes_needed(self, kernels: bool) -> int:
        """Bytes of a device for the weights, for what they compute of the largest medium, and for rows of media. kernels: whether attention
        may run in them, and hold no scores."""

    @abc.abstractmethod
    def prepared(self, medium: Any) -> Prepared:
        """Decodes a medium. Raises TypeError or ValueError for what is none."""

    @abc.abstractmethod
    def computed(self, several: Sequence[Prepared]) -> Sequence[jax.Array]:
        """What the tower makes of prepared media, `together` at most, in one call: rows [R, text hidden] of each, of which the first are
        the medium's."""

    def runs(self, medium: Any, encode: Callable[[str], list[int]]) -> list[Run]:
        """All rows of a medium, one after the other."""
        return [Run(self.opening, self.count(medium))]

    def decoded(self, medium: Any) -> list[Prepared]:
        """The prepared medium of its only run."""
        return [self.prepared(medium)]

    @classmethod
    def prefix_of(cls, key: str) -> str | None:
        """What stands before the tower's first module in the name of a tensor, in a checkpoint or an adapter; None if it is none of it."""
        found = re.match(rf"((?:\w+\.)*?)(?:{'|'.join(cls.modules)})\.", key)
        return None if found is None else found[1]

    @classmethod
    def is_part(cls, key: str) -> bool:
        """Whether a tensor of this name is the tower's."""
        return cls.prefix_of(key) is not None

    @classmethod
    def home(cls, folder: Path) -> Path:
        """Where a checkpoint has its tower. Raises ValueError for a converted one without."""
        if not (folder / CONVERTED).exists():
            return folder
        if not (folder / cls.folder).is_dir():
            raise ValueError(f"{folder} has no {cls.noun}: it was converted without one")
        return folder / cls.folder

    @classmethod
    def config_of(cls, folder: Path) -> Mapping[str, Any]:
        """The config.json of a folder that `home` gave. Raises ValueError for one that says nothing of such a tower."""
        config = checkpoint.read_config(folder)
        if config.get(cls.section) is None:
            raise ValueError(f"{folder} has no {cls.noun}: its config.json has no {cls.section}")
        return config

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether a checkpoint has such a tower, of whatever kind."""
        if (folder / CONVERTED).exists():
            return (folder / cls.folder).is_dir()
        return checkpoint.read_config(folder).get(cls.section) is not None and any(map(cls.is_part, checkpoint.read_headers(folder)))

    @classmethod
    def load(cls, folder: Path, dtype: Any, *settings: Any) -> Self:
        """Reads what a checkpoint says, and its tower onto the default device. Arguments and errors are those of `read` and
        `with_weights`."""
        return cls.read(folder, dtype, *settings).with_weights(folder)

    def changes(self, adapter: Adapter) -> dict[str, Change]:
        """What an adapter makes of the tower's weights, to be given to `with_weights`. Raises ValueError for one that does not fit."""
        own = adapter.of(self.is_part)
        if not own.tensors:
            return {}
        shapes, layouts = {path: tuple(leaf.shape) for path, leaf in leaves_by_path(self.tower).items()}, layouts_of(self.tower)
        ways = [layouts(path, shapes) for path in shapes]
        names = {theirs.key: ours.key for way in ways for theirs, ours in zip(way[-1], way[0], strict=True)}  # an adapter has transformers'
        return {names[key]: change for key, change in own.changes(self.tower, ("model.",), (), way=-1).items()}

    def with_weights(self, folder: Path, changes: Mapping[str, Change] = MappingProxyType({})) -> Self:
        """The same with the tower's weights on the default device. changes: those of an adapter. Raises ValueError that names what is
        missing or not served: a quantised tower, tensors that are missing or of another shape."""
        folder = self.home(Path(folder))
        stored = checkpoint.read_headers(folder)
        found = {key: prefix for key in stored if (prefix := self.prefix_of(key)) is not None}
        if not found:
            raise ValueError(f"{folder} has no {self.noun}: its config.json has {self.section}, but its weights have no {self.modules[0]}")
        for key in found:
            if stored[key].dtype not in FLOATS or QUANTISED.search(key):
                raise ValueError(
                    f"{folder} holds its {self.noun} quantised ({key} is {stored[key].describe()}); expected {' or '.join(FLOATS)}"
                )
        tower = checkpoint.load_weights(
            folder,
            self.tower,
            prefixes=tuple(dict.fromkeys(found.values())),
            skip=[key for key in stored if key not in found],
            changes=changes,
            progress=False,
        )
        return self.with_tower(tower)

    def with_tower(self, tower: Any) -> Self:
        """The same with another tower of these shapes."""
        made = copy.copy(self)
        Media.__init__(made, tower)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the tower's weights."""
        return nbytes(self.tower)

    def rows(self, medium: Any, then: Sequence[Prepared] = ()) -> jax.Array:
        """What a target reads in place of a medium's token embeddings: [R, text hidden] in the tower's dtype, of which the first `count`
        are the medium's. Those of the last ones are kept, as far as memory is planned for it. medium: what `prepared` gives or takes.
        then: those whose rows are wanted next, some of which may be computed with it."""
        prepared = medium if isinstance(medium, Prepared) else self.prepared(medium)
        with self._lock:
            rows = self._kept.pop(prepared.digest, None)
            unknown = {each.digest: each for each in (prepared, *then) if each.digest not in self._kept}
        if rows is not None:
            found = {prepared.digest: rows}
        else:
            several = list(unknown.values())[: self.together]
            found = dict(zip((each.digest for each in several), self.computed(several), strict=True))
        with self._lock:
            self._kept |= found
            # The last stays whatever its size: its parts are asked for one after the other.
            while len(self._kept) > 1 and (len(self._kept) > KEPT or sum(map(len, self._kept.values())) > KEPT * self.rooms[-1]):
                self._kept.popitem(last=False)
        return found[prepared.digest]


def rooms_of(towers: Iterable[Media]) -> tuple[int, ...]:
    """For how many rows of a medium calls have room where prompts have media of all these. They are few: a program is compiled for each."""
    towers = list(towers)
    whole = max((tower.rooms[-1] for tower in towers if tower.see_one_another), default=0)
    parts = {max(room, whole) for tower in towers if not tower.see_one_another for room in tower.rooms}
    return tuple(sorted(parts or ({whole} if whole else set())))
