"""Batch generation in a Beam pipeline, by the direct runner."""

import pytest

import jaxspec
from jaxspec import SamplingParams

beam = pytest.importorskip("apache_beam", reason="needs apache-beam, whose pins other packages of the tests do not meet")

pytestmark = [pytest.mark.usefixtures("unoptimised"), pytest.mark.filterwarnings("ignore")]
SETTINGS = {"sampling_params": SamplingParams(max_tokens=8, temperature=0.8), "id_column": "id", "max_slots": 4, "max_len": 64}
ROWS = [{"id": f"r{i}", "prompt": "" if i == 3 else "def f():"[: 1 + i % 8]} for i in range(20)]


def test_rows_go_through_a_pipeline(folders):
    from apache_beam.ml.inference.base import RunInference
    from apache_beam.testing.util import assert_that, equal_to

    from jaxspec.beam import JaxspecModelHandler

    with jaxspec.Generator(*folders, **SETTINGS) as generator:
        expected = generator.rows(ROWS)
    with beam.Pipeline(runner="DirectRunner") as pipeline:
        found = pipeline | beam.Create(ROWS) | RunInference(JaxspecModelHandler(*folders, **SETTINGS, batch_size=7))
        assert_that(
            found | beam.Map(lambda row: (row["id"], row["text"], row["error"])),
            equal_to([(r["id"], r["text"], r["error"]) for r in expected]),
        )
