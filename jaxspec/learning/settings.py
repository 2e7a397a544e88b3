"""The settings of learning while an LLM works."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxspec.checks import flag, integer, number, path, unknown
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.registry import KINDS
from jaxspec.drafters.training import Objective
from jaxspec.trees import packed_kinds

FIELDS = [field.name for field in dataclasses.fields(Objective)]
PART = 2**25  # logits of a draft step that are computed at a time, about: see `parts`


@dataclasses.dataclass(frozen=True)
class Learn:
    """How a drafter learns from the texts that an LLM writes. Raises ValueError or TypeError for values that make no sense."""

    share: float = 0.05
    """The share of the time spent generating that goes into learning, at most."""
    out: str | os.PathLike[str] | None = None
    """Folder for the drafter, as a checkpoint that `load` takes, in the dtype that its config.json names, and for what a killed run needs
    to resume. None writes nothing."""
    resume: bool = False
    """Whether to go on from what `out` holds, if it holds anything."""
    batch: int = 4
    """Texts of an update."""
    length: int = 512
    """Tokens of a text at most. Of a longer one, a part of this length is drawn."""
    anchors: int = 32
    """Places of each text that draft, drawn anew for each update."""
    rate: float = 5e-4
    """The learning rate, reached after WARM updates. From there it falls as the inverse square root of the number of updates."""
    texts: int = 1024
    """Texts to learn from that are remembered. Each new one takes the place of one at random."""
    every: int = 8
    """Updates, at least, before the newest weights are compared with those in use; twice as many after each comparison without gain."""
    patience: int = 6
    """Comparisons in a row that gain nothing, after which learning ends."""
    save_seconds: float = 120.0
    """Time spent generating, in seconds, between two writings to `out`."""
    seed: int = 0
    """For everything that is drawn at random."""
    objective: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `Objective` that shall differ from the kind's; its draft steps are those of the LLM."""

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise TypeError(f"share is {self.share!r}, expected a number above 0 and below 1")
        if not 0 < self.share < 1:
            raise ValueError(f"share is {self.share}, expected more than 0 and less than 1")
        for name, least in {"batch": 1, "length": 8, "anchors": 1, "texts": 1, "every": 1, "patience": 1, "seed": 0}.items():
            integer(name, getattr(self, name), least)
        number("rate", self.rate, 0, above=True)
        number("save_seconds", self.save_seconds, 0)
        flag("resume", self.resume)
        if self.out is not None:
            path("out", self.out, "a folder or None")
        if not isinstance(self.objective, Mapping):
            raise TypeError(f"objective is {self.objective!r}, expected a dict of fields of Objective")
        for name in self.objective:
            if name not in FIELDS:
                raise unknown("the objective", name, FIELDS)
        fixed = {"steps", "anchors"} & set(self.objective)
        if fixed:
            raise ValueError(f"the objective names {', '.join(sorted(fixed))}; expected other fields, since drafts and `anchors` say these")


def learn_of(learn: float | Learn) -> Learn:
    """The settings that a share or settings stand for."""
    return learn if isinstance(learn, Learn) else Learn(share=learn)


def learnable(drafter: Any) -> Kind:
    """The kind of a drafter that can learn. Raises ValueError for others."""
    kind = next((kind for kind in KINDS.values() if type(drafter) is kind.made), None)
    if kind is None or kind.objective is None:
        able = ", ".join(sorted(kind.made.__name__ for kind in KINDS.values() if kind.objective is not None))
        raise ValueError(f"the drafter is a {type(drafter).__name__}, which has nothing to learn; expected one of {able}")
    if kinds := packed_kinds(drafter):
        raise ValueError(
            f"the drafter's weights are quantised ({', '.join(kinds)}), and only float weights learn; expected a float drafter"
        )
    check_tokens(drafter)
    return kind


def objective_of(learn: Learn, drafter: Any, num_draft_tokens: int) -> Objective:
    """What a drafter learns towards. Raises ValueError as `learnable`, and ValueError or TypeError for an objective that makes no sense."""
    kind = learnable(drafter)
    assert kind.objective is not None
    return dataclasses.replace(kind.objective, **{**learn.objective, "steps": num_draft_tokens, "anchors": learn.anchors})


def check_tokens(drafter: Any) -> None:
    """Raises ValueError for a drafter whose own tables lack tokens of the target, which would have to be learnt."""
    if getattr(drafter, "narrower", False):
        raise ValueError("the drafter has fewer tokens than the target, so it drafts for it but cannot learn from it; expected as many")


def parts(learn: Learn, vocab_size: int, shards: int) -> tuple[int, int]:
    """(parts, texts of a part): a batch of an update, in parts that are small enough for their logits, and that the data shards divide."""
    texts = max(min(learn.batch // shards, PART // (learn.anchors * vocab_size)), 1)
    return -(-learn.batch // (texts * shards)), texts * shards
