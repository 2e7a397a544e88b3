"""What becomes of weights while they are read, as an adapter says: other weights in their place, and products of low rank added."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxspec.checkpoint.safetensors import Stored


@dataclasses.dataclass(frozen=True)
class Change:
    """What an adapter makes of one weight. Its rows are those of a matrix [rows, in]: an experts' tensor [E, out, in] has E * out.

    whole: the weight that takes its place first. rows: (ids, [n, in]), rows that take the place of those. a, b: what scale * B A is added
    of, [r, in] and [out, r], of experts [E * r, in] and [out, r * E]; with `flipped`, those of an embedding, [r, out] and [in, r].
    rank: r.
    """

    whole: Stored | None = None
    rows: tuple[tuple[int, ...], Stored] | None = None
    a: Stored | None = None
    b: Stored | None = None
    scale: float = 1.0
    flipped: bool = False
    rank: int = 0

    def on(self, tensor: Stored) -> Stored:
        """The tensor, which reads as it will be."""
        base = tensor if self.whole is None else self.whole
        fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(Stored)}
        return _Changed(**fields, change=self, start=base.offset, width=base.shape[-1])

    def applied(self, value: np.ndarray, first: int = 0) -> np.ndarray:
        """Rows first, first + 1, ... of the weight as they will be, without `whole`. value: [n, in], as they are."""
        if self.rows is not None:
            ids, table = self.rows
            value, new = value.copy(), table.read()
            for id, row in zip(ids, new, strict=True):
                if first <= id < first + len(value):
                    value[id - first] = row.astype(value.dtype)
        if self.a is None:
            return value
        return (value.astype(np.float32) + self._delta(first, first + len(value))).astype(value.dtype)

    def _delta(self, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 of scaling * B A, [stop - start, in] float32."""
        a, b = self.factors
        out, pieces = b.shape[0], []
        for expert in range(start // out, -(-stop // out)):
            low, high = max(start - expert * out, 0), min(stop - expert * out, out)
            pieces.append(b[low:high, :, expert] @ a[expert])
        return np.concatenate(pieces) * np.float32(self.scale)

    @property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """A [E, r, in] and B [out, r, E], float32; E is 1 but for experts."""
        assert self.a is not None and self.b is not None
        a, b = (side.read().astype(np.float32) for side in (self.a, self.b))
        if self.flipped:
            a, b = b.T, a.T
        experts = 1 if self.flipped else b.shape[1] // self.rank
        return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts)


@dataclasses.dataclass(frozen=True)
class _Changed(Stored):
    """A tensor, or rows of it, that a change is applied to as it is read. start: where the whole tensor begins. width: of its rows."""

    change: Change
    start: int
    width: int

    def read(self, into: np.ndarray | None = None) -> np.ndarray:
        value = super().read(into)
        first = (self.offset - self.start) // (value.itemsize * self.width)
        return self.change.applied(value.reshape(-1, self.width), first).reshape(self.shape)
