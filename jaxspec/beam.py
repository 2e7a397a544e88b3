"""Batch generation in Apache Beam: a ModelHandler for RunInference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from apache_beam.ml.inference.base import ModelHandler  # pyright: ignore[reportMissingImports]

from jaxspec.checks import integer
from jaxspec.generator import Generator, check_columns, check_params


class JaxspecModelHandler(ModelHandler[dict[str, Any], dict[str, Any], Generator]):
    """Completes rows, which are dicts: `RunInference(JaxspecModelHandler("google/gemma-4-E2B-it", id_column="id"))`.

    Each result is its row with what `Generator` adds. Arguments are those of Generator, which is made once on each machine: the processes
    of a worker share one model.

    batch_size: rows of a batch; take several times the slots of the model. Only the last batch of a bundle has fewer.

    Raises ValueError or TypeError for params, columns and a batch_size that make no sense, and for `inference_args` of RunInference. What
    else Generator raises ends the pipeline when the first worker starts.
    """

    def __init__(self, target: Any, drafter: Any = None, *, batch_size: int = 256, **arguments: Any):
        check_params(arguments.get("sampling_params"))
        prompts, prefix = arguments.get("prompt_column", "prompt"), arguments.get("output_prefix", "")
        check_columns(prompts, arguments.get("messages_column"), arguments.get("id_column"), prefix)
        integer("batch_size", batch_size, 1)
        # With a smaller least size, Beam chooses sizes by its own measurements, in which a first batch that compiles makes 1 look best.
        super().__init__(min_batch_size=batch_size, max_batch_size=batch_size, large_model=True)
        self._arguments = {"target": target, "drafter": drafter, **arguments}

    def load_model(self) -> Generator:
        return Generator(**self._arguments)

    def validate_inference_args(self, inference_args: Mapping[str, Any] | None) -> None:
        if inference_args:
            raise ValueError(f"inference_args has {', '.join(map(repr, inference_args))}, expected none: sampling_params are the handler's")

    def run_inference(
        self, batch: Sequence[dict[str, Any]], model: Generator, inference_args: Mapping[str, Any] | None = None
    ) -> Iterable[dict[str, Any]]:
        return model.rows(batch)
