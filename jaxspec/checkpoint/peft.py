"""LoRA adapters as PEFT saves them: from a folder to what becomes of the weights that they were trained on.

An adapter is merged as PEFT's `merge_and_unload` does: W + scaling * B A in float32, rounded once to the dtype of W. scaling is
lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (LoRA: 2106.09685; rsLoRA: 2312.03732).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.checkpoint.changes import Change
from jaxspec.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, pickled_weights, read_json, refuse_pickle
from jaxspec.checkpoint.hub import ADAPTER, Hub, located
from jaxspec.checkpoint.layout import dead_keys, layouts_of, listed
from jaxspec.checkpoint.quantisation import EMBEDDING
from jaxspec.checkpoint.safetensors import FLOATS, Stored, read_header, same_numbers
from jaxspec.trees import leaves_by_path

TABLE, HEAD = f"{EMBEDDING}.weight", "lm_head"
ROOT = "base_model.model."
# A key behind ROOT: the module, how deep PEFT nested it, and what is stored of it.
KEY = re.compile(
    r"(?P<module>.+?)(?P<nested>(\.base_layer)*)\.((?P<side>lora_[AB])\.weight|(?P<table>lora_embedding_[AB])|"
    r"(?P<rows>token_adapter\.trainable_tokens_delta)|(?P<other>[^.]+))"
)
# Ways to begin that leave the target's weights as they are; others change them before they train.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Settings that say how it was trained or are read below. Any other that is set may mean other arithmetic.
KNOWN = frozenset(
    """
    alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode
    init_lora_weights layers_pattern layers_to_transform lora_alpha lora_dropout loftq_config megatron_config megatron_core
    modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters
    task_type trainable_token_indices use_rslora velora_config
    """.split()
)
REASONS = {
    "use_dora": "DoRA, which scales every row of the merged weights anew",
    "alora_invocation_tokens": "an activated LoRA, which changes only what follows its invocation",
    "lora_bias": "biases, and the target's matrices have none",
    "layer_replication": "repeated layers, which is another model",
}


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter, unread. name: what the user called it."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    def changes(self, tree: Any, prefixes: Sequence[str], unread: Sequence[str], way: int = 0) -> dict[str, Change]:
        """What it makes of each weight, by the weight's key without a prefix.

        tree: the float target. prefixes: what may stand before its paths in a checkpoint's keys. unread: beginnings of keys of parts that
        the target does without, of which an adapter may have some too, or nothing else. way: which of the tree's `layouts` has the names.
        Raises ValueError that lists all that does not fit: tensors that match no weight or are no whole pair, matrices that were to be
        adapted and are not there, other ranks and shapes.
        """
        return _Matching(self, tree, prefixes, unread, way).changes()

    def of(self, part: Callable[[str], bool]) -> Adapter:
        """The tensors of an adapter that this says are wanted, by their keys."""
        return dataclasses.replace(self, tensors={key: tensor for key, tensor in self.tensors.items() if part(key)})


def read_adapter(name: str | os.PathLike[str], hub: Hub) -> Adapter:
    """The adapter in a folder, or of a hub id. Raises FileNotFoundError or ValueError for what is none, or of a kind that cannot be merged,
    by its name; and as `hub.resolve` does."""
    folder, text = located(name, hub.of_others, ADAPTER), os.fspath(name)
    if not (folder / ADAPTER_CONFIG).is_file():
        # PEFT gives an adapter of a name of its own a folder of that name, and trainers each of their checkpoints.
        within = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
        expected = f"one of the adapters in it: {', '.join(within)}" if within else "a folder that PEFT's save_pretrained wrote"
        raise FileNotFoundError(f"the adapter {text!r} has no {ADAPTER_CONFIG}; expected {expected}")
    config = read_json(folder / ADAPTER_CONFIG)
    _refuse_kinds(text, config)
    _check_settings(text, config)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickles = pickled_weights(path.name for path in folder.iterdir())
        if pickles:
            raise ValueError(refuse_pickle(pickles, ADAPTER_WEIGHTS))
    return Adapter(text, config, read_header(folder / ADAPTER_WEIGHTS))


def _refuse_kinds(name: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind is None and "fine_tune_type" in config:
        raise ValueError(f"the adapter {name!r} is one for MLX; expected a folder that PEFT's save_pretrained wrote")
    if kind != "LORA":
        raise ValueError(f"the adapter {name!r} has peft_type {kind!r}; served is 'LORA', merge others with PEFT's merge_and_unload")
    for setting, reason in REASONS.items():
        if config.get(setting):
            raise ValueError(f"the adapter {name!r} has {setting}, {reason}; merge it with PEFT's merge_and_unload where that can be done")
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"the adapter {name!r} has init_lora_weights {start!r}, which changed the target's weights before it trained; expected one "
            "that PEFT converted: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    others = sorted(setting for setting, value in config.items() if value and setting not in KNOWN and setting not in REASONS)
    if others:
        raise ValueError(f"the adapter {name!r} has {others[0]} {config[others[0]]!r}, which is not known here; expected a plain LoRA")


def _whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _rank(value: Any) -> bool:
    return _whole(value, 1)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def _list(value: Any, test: Any) -> bool:
    return isinstance(value, list) and all(map(test, value))


def _one_or_list(value: Any, test: Any) -> bool:
    return test(value) or _list(value, test)


def _by_name(value: Any, test: Any) -> bool:
    return isinstance(value, Mapping) and all(_pattern(name) and test(held) for name, held in value.items())


def _token_ids(value: Any) -> bool:
    return _list(value, _whole) or _by_name(value, lambda ids: _list(ids, _whole))


# Settings that are read here, how their values are told, and what is expected. A null is none.
SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("r", _rank, "a whole number of at least 1"),
    ("lora_alpha", _number, "a finite number"),
    ("target_modules", lambda x: _pattern(x) or _list(x, lambda name: isinstance(name, str)), "a regular expression or a list of names"),
    ("exclude_modules", lambda x: _pattern(x) or _list(x, lambda name: isinstance(name, str)), "a regular expression or a list of names"),
    ("modules_to_save", lambda x: _list(x, _pattern), "a list of names"),
    ("target_parameters", lambda x: _list(x, lambda name: isinstance(name, str)), "a list of names"),
    ("layers_to_transform", lambda x: _one_or_list(x, _whole), "the number of a layer or a list of them"),
    ("layers_pattern", lambda x: _one_or_list(x, _pattern), "a name or a list of names"),
    ("rank_pattern", lambda x: _by_name(x, _rank), "an object of regular expressions to whole numbers of at least 1"),
    ("alpha_pattern", lambda x: _by_name(x, _number), "an object of regular expressions to finite numbers"),
    ("trainable_token_indices", _token_ids, "a list of token ids, or an object of names to such lists"),
)


def _check_settings(name: str, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that is read here and has another type than PEFT writes, or is no regular expression."""
    for setting, test, expected in SETTINGS:
        value = config.get(setting, 8 if setting in ("r", "lora_alpha") else None)
        if not test(value) and (value is not None or setting in ("r", "lora_alpha")):
            raise ValueError(f"{ADAPTER_CONFIG} of the adapter {name!r} has {setting} {value!r}; expected {expected}")


class _Matching:
    """An adapter's tensors beside a target's weights."""

    def __init__(self, adapter: Adapter, tree: Any, prefixes: Sequence[str], unread: Sequence[str], way: int):
        self.name, self.config, self.unread = adapter.name, adapter.config, tuple(unread)
        # As the class was saved, and as the part of it without a head would have been.
        self.prefixes = (*prefixes, *(prefix.removeprefix("model.") for prefix in prefixes))
        self.problems: list[str] = []
        shapes, layouts = {path: tuple(leaf.shape) for path, leaf in leaves_by_path(tree).items()}, layouts_of(tree)
        self.shapes = {part.key: part.shape for path in shapes for part in layouts(path, shapes)[way]}
        self.modules = {key.rpartition(".")[0] for key in self.shapes}
        self.dead = {key.removesuffix(".weight") for path in shapes for key in dead_keys(path, shapes)}
        self.pairs: dict[tuple[str, str], dict[str, Stored]] = {}  # by (module, how it is nested)
        self.whole: dict[str, Stored] = {}  # weights that are there themselves, by key
        self.rows: dict[str, Stored] = {}  # rows of tables, by module
        self.class_prefix = self.prefixes[0]
        self.leaves_out = False  # whether some of it is of parts that the target does without
        for key, tensor in sorted(adapter.tensors.items()):
            self._sort(key, tensor)

    def _sort(self, key: str, tensor: Stored) -> None:
        found = KEY.fullmatch(key.removeprefix(ROOT))
        if not key.startswith(ROOT) or not found:
            self.problems.append(f"{key}: unknown")
            return
        module = found["module"]
        if f"{module}.".startswith(self.unread) or f"model.{module}.".startswith(self.unread):
            self.leaves_out = True
            return
        if module != HEAD:
            prefix = next(prefix for prefix in self.prefixes if module.startswith(prefix))
            module = module.removeprefix(prefix)
            self.class_prefix = prefix if module in self.modules else self.class_prefix
        if module in self.dead:
            return
        if tensor.dtype not in FLOATS:
            self.problems.append(f"{key}: found {tensor.dtype}, expected one of {', '.join(FLOATS)}")
        elif side := found["side"] or found["table"]:
            self.pairs.setdefault((module, found["nested"]), {})[side] = tensor
        elif found["rows"]:
            self.rows[module] = tensor
        else:
            self.whole[f"{module}.{found['other']}"] = tensor

    def changes(self) -> dict[str, Change]:
        changes = self._replaced()
        for (module, nested), pair in self.pairs.items():
            found = self._low_rank(module, nested, pair)
            if found is None:
                continue
            key, change = found
            if key in changes and changes[key].a is not None:
                self._second_of_table(changes[key], change)
                continue
            before = changes.get(key, change)
            changes[key] = dataclasses.replace(change, whole=before.whole, rows=before.rows)
        self._missing({key for key, change in changes.items() if change.a is not None})
        if not changes and not self.problems and not self.leaves_out:
            self.problems.append("it changes none of the target's weights")
        if self.problems:
            made = self.config.get("base_model_name_or_path")
            made = f", which was made for {made!r}," if made else ""
            raise ValueError(f"the adapter {self.name!r}{made} does not fit the target, {listed(self.problems)}")
        self._warn_of_table()
        return changes

    def _replaced(self) -> dict[str, Change]:
        """Weights, and rows of them, that are stored whole."""
        changes, head = {}, self.whole.pop(f"{HEAD}.weight", None)
        table = self.whole.get(TABLE)
        if head is not None and (table is None or not same_numbers(head, table)):
            # A base layer that was saved along is the target's own.
            if table is not None or (HEAD, "") not in self.pairs:
                self.problems.append(f"{HEAD}.weight: differs from {TABLE}; expected none, as the two are tied")
            else:
                changes[TABLE] = Change(whole=head)
        for key, tensor in self.whole.items():
            if key not in self.shapes:
                self.problems.append(f"{key}: unknown, found {tensor.describe()}")
            elif tensor.shape != self.shapes[key]:
                self.problems.append(f"{key}: found {list(tensor.shape)}, expected {list(self.shapes[key])}")
            else:
                changes[key] = Change(whole=tensor)
        saved = any(re.search(rf"(^|\.){EMBEDDING}$", name) for name in self.config.get("modules_to_save") or ())
        if table is not None and head is None and saved and not self.config.get("ensure_weight_tying"):
            self.problems.append(f"{TABLE}: trained without the head, which is the same table here; expected both, or ensure_weight_tying")
        for module, tensor in self.rows.items():
            ids = self._rows_of(module)
            shape = self.shapes.get(f"{module}.weight", (0, 0))
            if module == HEAD:  # which is the embedding's table here
                other = self.rows.get(EMBEDDING)
                if other is None or self._rows_of(EMBEDDING) != ids or not same_numbers(other, tensor):
                    self.problems.append(
                        f"{HEAD}.token_adapter: not that of {EMBEDDING}, which is the same table; expected rows of both alike"
                    )
            elif tensor.shape != (len(ids), shape[-1]) or any(not 0 <= id < shape[0] for id in ids):
                self.problems.append(
                    f"{module}.token_adapter: found {tensor.describe()} for trainable_token_indices {list(ids)}; expected rows of "
                    f"{list(shape)}"
                )
            else:
                changes[f"{module}.weight"] = dataclasses.replace(changes.get(f"{module}.weight", Change()), rows=(ids, tensor))
        return changes

    def _rows_of(self, module: str) -> tuple[int, ...]:
        named = self.config.get("trainable_token_indices") or ()
        if isinstance(named, Mapping):
            # Names may be of another class of the model, with other modules around the table.
            named = next((ids for name, ids in named.items() if name.rpartition(".")[2] == module.rpartition(".")[2]), ())
        return tuple(map(int, named))

    def _low_rank(self, module: str, nested: str, pair: Mapping[str, Stored]) -> tuple[str, Change] | None:
        """The weight's key and its change. None, with a problem, for a pair that does not fit."""
        name, flipped = f"{module}{nested}", "lora_embedding_A" in pair or "lora_embedding_B" in pair
        sides = ("lora_embedding_A", "lora_embedding_B") if flipped else ("lora_A", "lora_B")
        if set(pair) != set(sides):
            self.problems.append(f"{name}: found {', '.join(pair)} alone, expected {' and '.join(sides)}")
            return None
        a, b = (pair[side] for side in sides)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            self.problems.append(f"{name}: found A {list(a.shape)} and B {list(b.shape)}, expected [r, in] and [out, r]")
            return None
        out, width = (a.shape[1], b.shape[0]) if flipped else (b.shape[0], a.shape[1])
        possible = [TABLE] if module == HEAD else [f"{module}.weight"]
        # Parameters that are no modules, as of experts, are named by their module.
        inside = [key for key, shape in self.shapes.items() if key.rpartition(".")[0] == module and len(shape) == 3]
        possible = [key for key in (*possible, *inside) if key in self.shapes]
        if not possible:
            self.problems.append(f"{name}: matches no weight of the target")
            return None
        key = next((key for key in possible if self.shapes[key][-2:] == (out, width)), None)
        if key is None:
            expected = " or ".join(str(list(self.shapes[key])) for key in possible)
            self.problems.append(f"{name}: made for a matrix of {[out, width]}, the target's is {expected}")
            return None
        targeted = module if key not in inside else key
        if not self._targeted(targeted, parameter=key in inside):
            self.problems.append(f"{name}: is not among what {ADAPTER_CONFIG} says was adapted (target_modules and the like)")
            return None
        full = self._full(targeted)
        rank, alpha = (
            self._by_pattern(f"{what}_pattern", full, self.config.get(default, 8))
            for what, default in (("rank", "r"), ("alpha", "lora_alpha"))
        )
        experts = math.prod(self.shapes[key][:-2])
        if a.shape[0] != rank * experts:
            self.problems.append(
                f"{name}: found A {list(a.shape)}, expected rank {rank}{f' for each of {experts} experts' if experts > 1 else ''}"
            )
            return None
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return key, Change(a=a, b=b, scale=scale, flipped=flipped, rank=rank)

    def _full(self, module: str) -> str:
        """A module's name in the class that was adapted, as patterns were matched with it."""
        return module if module == HEAD else f"{self.class_prefix}{module}"

    def _by_pattern(self, setting: str, module: str, default: Any) -> Any:
        patterns = self.config.get(setting) or {}
        return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)

    def _targeted(self, module: str, *, parameter: bool = False) -> bool:
        """Whether the config says that a module was adapted, or a parameter."""
        if module == HEAD and self.config.get("ensure_weight_tying") and self._targeted(EMBEDDING):
            return True
        full, config = self._full(module), self.config
        if parameter:
            return _ends_with(full, config.get("target_parameters") or ())
        excluded = config.get("exclude_modules") or ()
        if re.fullmatch(excluded, full) if isinstance(excluded, str) else _ends_with(full, excluded):
            return False
        targets = config.get("target_modules") or ()
        if targets == "all-linear":
            return module not in (EMBEDDING, HEAD)
        if isinstance(targets, str):
            return bool(re.fullmatch(targets, full))
        if _ends_with(full, config.get("target_parameters") or (), ".weight"):
            return True
        # A module that is named whole is meant whatever its layer.
        return full in targets or (_ends_with(full, targets) and self._of_layers(full))

    def _of_layers(self, full: str) -> bool:
        """Whether a module is in one of layers_to_transform."""
        layers = self.config.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self.config.get("layers_pattern") or [r"[^.]*"]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        found = next(filter(None, (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", full) for pattern in patterns)), None)
        return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)

    def _missing(self, changed: set[str]) -> None:
        """Adds what was to be adapted and is not there."""
        saved = self.config.get("modules_to_save") or ()
        for key, shape in self.shapes.items():
            module = key.removesuffix(".weight")
            matrix = len(shape) == 2 and key.endswith(".weight") and EMBEDDING not in key
            if key in changed or not matrix or any(re.match(rf"(^|.*\.){name}($|\..*)", self._full(module)) for name in saved):
                continue
            if self._targeted(module):
                self.problems.append(f"{module}: missing, and {ADAPTER_CONFIG} says that it was adapted")

    def _second_of_table(self, first: Change, second: Change) -> None:
        """Embedding and head were adapted: alike, or it is a problem."""
        (a, b), (c, d) = first.factors, second.factors
        if first.scale != second.scale or not (np.array_equal(a, c) and np.array_equal(b, d)):
            self.problems.append(
                f"{TABLE}: embedding and head are one table here, and were adapted in two ways; expected ensure_weight_tying, and the same "
                f"alpha and rank for both (their scales are {first.scale:g} and {second.scale:g})"
            )

    def _warn_of_table(self) -> None:
        uses = {module for module, _ in self.pairs if module in (EMBEDDING, HEAD)}
        if len(uses) == 1 and not self.config.get("ensure_weight_tying"):
            warnings.warn(
                f"the adapter {self.name!r} was trained on {uses.pop()} alone; embedding and head are one table, and both change, as with "
                "PEFT's merge_and_unload",
                UserWarning,
                stacklevel=2,
            )


def _ends_with(full: str, names: Sequence[str], more: str = "") -> bool:
    return any(f".{full}{more}".endswith(f".{name}") for name in names)
