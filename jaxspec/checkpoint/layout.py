"""How a checkpoint's tensors make up the leaves of our trees.

A leaf's path is its Hugging Face key. The exceptions stand here: fused leaves, which a file holds as several tensors or in another shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

MAX_LISTED = 20  # misfits in an error
Held = TypeVar("Held")


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a file and its place in a leaf."""

    key: str
    shape: tuple[int, ...]  # in the file
    index: tuple[Any, ...] = ()  # leaf[index] has the tensor's elements, in the tensor's order
    plus: float = 0.0  # what the elements of the leaf are more than the tensor's: norms that are stored less one

    @property
    def as_it_is(self) -> bool:
        """Whether the tensor is the whole leaf, up to its shape."""
        return not self.index and not self.plus


# (path of a leaf, shapes of all leaves of its tree by path) -> the ways in which a checkpoint may hold the leaf: see `layouts`.
Layouts = Callable[[str, Mapping[str, tuple[int, ...]]], list[list[Part]]]


def layouts_of(tree: Any) -> Layouts:
    """How a checkpoint holds the leaves of a tree: its member `layouts`, by default the function of that name here."""
    return getattr(tree, "layouts", layouts)


def renamed(choices: list[list[Part]], old: str, new: str) -> list[list[Part]]:
    """The same ways with a piece of every key replaced where it first occurs."""
    return [[dataclasses.replace(part, key=part.key.replace(old, new, 1)) for part in parts] for parts in choices]


def layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[Part]]:
    """The ways in which a checkpoint may hold the leaf at `path`. We write the first; the last names every matrix by its module.

    shapes: the shape of every leaf of the tree, by path. The keys of the returned parts lack the checkpoint's prefix.
    """
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
    if name == "q_proj.weight" and len(shape) == 4:  # [KV, G, D, H]
        return [[Part(path, (math.prod(shape[:-1]), shape[-1]))]]
    if name == "o_proj.weight" and len(shape) == 4:  # [H, KV, G, D]
        return [[Part(path, (shape[0], math.prod(shape[1:])))]]
    if path.endswith("experts.gate_up_proj"):  # [E, 2, I, H]
        stem, (experts, _, inner, hidden) = path.removesuffix("gate_up_proj"), shape
        which = [(e, i, name) for e in range(experts) for i, name in enumerate(("gate_proj", "up_proj"))]
        unfused = (
            [Part(f"{stem}{name}.weight", (inner, hidden), (e, i)) for (e, i, _), name in zip(which, names, strict=True)]
            for names in ([f"{name}.{e}" for e, _, name in which], [f"{e}.{name}" for e, _, name in which])
        )
        return [[Part(path, (experts, 2 * inner, hidden))], *unfused]
    if path.endswith("experts.down_proj"):  # [E, H, I]
        stem, experts = path.removesuffix("down_proj"), range(shape[0])
        unfused = (
            [Part(f"{stem}{name}.weight", shape[1:], (e,)) for e, name in enumerate(names)]
            for names in ([f"down_proj.{e}" for e in experts], [f"{e}.down_proj" for e in experts])
        )
        return [[Part(path, shape)], *unfused]
    if path.endswith("gate_up_proj.weight"):  # [2, I, H]
        stem = path.removesuffix("gate_up_proj.weight")
        return [[Part(f"{stem}gate_proj.weight", shape[1:], (0,)), Part(f"{stem}up_proj.weight", shape[1:], (1,))]]
    return [[Part(path, shape)]]


def unwrapped(stored: Mapping[str, Held], tables: Sequence[str]) -> dict[str, Held]:
    """The tensors of a file without what a module around the model put before their keys, as "language_model." or "base_model.model.".
    tables: the keys that the token embedding may have in a file without such a module, the longest first."""
    known = stored.keys() & set(tables)
    outer = "" if known else next((key.removesuffix(table) for table in tables for key in stored if key.endswith(f".{table}")), "")
    return {key.removeprefix(outer): tensor for key, tensor in stored.items()}


def dead_keys(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Keys that a file may hold beside the leaf at `path` although nothing reads them: K and V weights of a target's layers that share
    KV, which the original releases contain. shapes: as in `layouts`.

    An assistant has none of these: with K and V of its own it would be another kind of model.
    """
    if not (path.startswith("layers.") and path.endswith("self_attn.qkv_proj.weight")):
        return []
    stem = path.removesuffix("qkv_proj.weight")
    owned = shapes[path][1] - shapes[f"{stem}o_proj.weight"][2]
    return [] if owned else [f"{stem}{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]


def raise_misfits(folder: Path, problems: Sequence[str]) -> None:
    """Raises ValueError that lists the problems, if there are any."""
    if problems:
        raise ValueError(f"the weights in {folder} do not fit the model, {listed(problems)}")


def listed(problems: Sequence[str]) -> str:
    """Their number and a line for each. Of many, the first and the last: keys that are missing come first, and those that are unknown last,
    and where a prefix is wrong there are as many of both."""
    shown, cut = list(problems), len(problems) - MAX_LISTED
    if cut > 0:
        shown[MAX_LISTED // 2 : -MAX_LISTED // 2] = [f"... {cut} more"]
    return f"{len(problems)} problem{'' if len(problems) == 1 else 's'}:" + "".join(f"\n  {line}" for line in shown)
