"""Structured texts on a mesh are those on one device."""

import pytest

import jaxspec
from jaxspec import SamplingParams

ASKED = [
    {"regex": "(ab|abc){1,4}é?"},
    None,
    {"choice": ["yes", "yes, please", "no"]},
    {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 5}},
]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_structured_texts_on_a_mesh_are_those_on_one_device(folders, axes):
    def texts(**more):
        with jaxspec.load(*folders, max_slots=4, max_len=128, progress=False, **more) as llm:
            asked = [SamplingParams(temperature=1.0, seed=i, max_tokens=60, structured_outputs=s) for i, s in enumerate(ASKED)]
            return [(c.token_ids, c.finish_reason) for c in llm.generate([[5, 6, 7]] * len(asked), asked)]

    found = texts(mesh=jaxspec.mesh(**axes))
    assert found == texts() and all(reason == "stop" for (_, reason), s in zip(found, ASKED, strict=True) if s)
