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
    pipeline = beam.Pipeline(runner="DirectRunner")
    found = pipeline | beam.Create(ROWS) | RunInference(JaxspecModelHandler(*folders, **SETTINGS, batch_size=7))
    assert_that(
        found | beam.Map(lambda row: (row["id"], row["text"], row["error"])),
        equal_to([(r["id"], r["text"], r["error"]) for r in expected]),
    )
    result = pipeline.run()
    result.wait_until_finish()
    (sizes,) = result.metrics().query(beam.metrics.MetricsFilter().with_name("inference_request_batch_size"))["distributions"]
    assert (sizes.committed.count, sizes.committed.max) == (3, 7)


def test_what_makes_no_sense_is_said_before_a_pipeline_runs():
    from apache_beam.ml.inference.base import RunInference

    from jaxspec.beam import JaxspecModelHandler

    for settings, error in (
        ({"sampling_params": SamplingParams(seed=1)}, "seed is 1, which all rows would share"),
        ({"id_column": 5}, "id_column is 5, expected the name of a column"),
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            JaxspecModelHandler("no such folder", **settings)
    with pytest.raises(ValueError, match="inference_args has 'max_tokens', expected none"):
        beam.Pipeline() | beam.Create(ROWS) | RunInference(JaxspecModelHandler("pocket"), inference_args={"max_tokens": 5})
