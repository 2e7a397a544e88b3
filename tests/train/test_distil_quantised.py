"""A drafter learns to guess for a quantised target."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
import tiny

import jaxspec
from jaxspec.train import distil
from jaxspec.train.loop import read_metrics

pytestmark = pytest.mark.usefixtures("unoptimised")
SOURCE = Path(jaxspec.__file__)
RUN = {"steps": 2, "every": 2, "batch": 2, "length": 16, "dtype": "float32", "save_every": 0, "progress": False}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    folder = tiny.tiny_target(tmp_path_factory.mktemp("target"), hidden_size_per_layer_input=0)
    return jaxspec.convert(folder, tmp_path_factory.mktemp("converted") / "int4", dtype="float32", quantize="int4", progress=False)


@pytest.mark.slow  # test_tuning.py trains a drafter, and tests/drafters/test_quantised_target.py has such a target's drafts
def test_a_drafter_is_trained(quantised, tmp_path):
    """Its config says nothing of the target's quantisation, and it guesses for the target that it was trained for."""
    objective = {"steps": 2, "anchors": 6}
    out = distil(quantised, "mtp", data=SOURCE, held_out=SOURCE, out=tmp_path / "drafter", objective=objective, num_draft_tokens=2, **RUN)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    first, last = read_metrics(out)
    assert last["held_out_loss"] < first["held_out_loss"]
    llm = jaxspec.load(quantised, out, max_slots=1, max_len=24, progress=False)
    assert llm.target.layers[0].mlp.down_proj.weight.words.dtype == jnp.uint32
    (done,) = llm.generate(["def f"], jaxspec.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    assert len(done.token_ids) == 6
