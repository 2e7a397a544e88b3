"""Batch generation in Apache Beam: a ModelHandler for RunInference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from apache_beam.ml.inference.base import ModelHandler  # pyright: ignore[reportMissingImports]

from jaxspec.generator import Generator


class JaxspecModelHandler(ModelHandler[dict[str, Any], dict[str, Any], Generator]):
    """Completes rows, which are dicts: `RunInference(JaxspecModelHandler("google/gemma-4-E2B-it", id_column="id"))`.

    Each result is its row with what `Generator` adds. Arguments are those of Generator, which is made once in each worker process.
    batch_size: most rows of a batch; take several times the slots of the model.
    """

    def __init__(self, target: Any, drafter: Any = None, *, batch_size: int = 256, **arguments: Any):
        super().__init__(max_batch_size=batch_size, large_model=True)  # the processes of a worker share one model
        self._arguments = {"target": target, "drafter": drafter, **arguments}

    def load_model(self) -> Generator:
        return Generator(**self._arguments)

    def run_inference(
        self, batch: Sequence[dict[str, Any]], model: Generator, inference_args: Mapping[str, Any] | None = None
    ) -> Iterable[dict[str, Any]]:
        return model.rows(batch)
