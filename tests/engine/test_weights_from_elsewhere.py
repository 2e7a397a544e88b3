"""Arrays that lie where a trainer has them become an LLM's weights; what has no numbers is refused before anything changes."""

import jax
import numpy as np
import pytest
import tiny
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import jaxspec
from jaxspec import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_to_compile", "shared_programs")
SIZES = {"max_slots": 2, "max_len": 64, "progress": False}
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
NORM = "model.language_model.norm.weight"


@pytest.fixture(scope="module")
def llm(folders):
    with jaxspec.load(folders[0], **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def tensors(folders):
    """Other weights than those that the LLM was loaded with, by their names."""
    return {key: 1.5 * x for key, x in load_file(folders[0] / "model.safetensors").items()}


def of_mesh(kind):
    """Halves of each array on two devices, neither of which is the first."""
    mesh = Mesh(np.array(jax.devices()[2:4]), ("fsdp",), axis_types=(kind,))

    def put(i, x):
        axis = next((axis for axis, size in enumerate(x.shape) if size % 2 == 0), None)
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "fsdp")))

    return put


PLACES = {
    "another device": lambda i, x: jax.device_put(x, jax.devices()[3]),
    "one device each": lambda i, x: jax.device_put(x, jax.devices()[i % 3]),
    "a mesh": of_mesh(AxisType.Auto),
    "a mesh with explicit axes": of_mesh(AxisType.Explicit),
}
# Every place and both ways, and of all pairs every second one.
CASES = [
    pytest.param(place, mesh, marks=pytest.mark.slow if (n + bool(mesh)) % 2 else ())
    for n, place in enumerate(PLACES)
    for mesh in ({}, {"tensor": 2})
]


@pytest.mark.parametrize(("place", "mesh"), CASES)
def test_they_come_to_where_the_llm_computes(place, mesh, llm, folders, tensors):
    """And what the LLM had before comes back there."""
    llm.update_weights(tensors)
    tree = jax.tree.map(np.asarray, llm.target)
    leaves, structure = jax.tree.flatten(tree)
    placed = jax.tree.unflatten(structure, [PLACES[place](i, x) for i, x in enumerate(leaves)])
    expected = llm.generate([[5, 6, 7]], PARAMS)[0].token_ids
    with jaxspec.load(folders[0], mesh=jaxspec.mesh(**mesh) if mesh else None, **SIZES) as other:
        before = other.generate([[5, 6, 7]], PARAMS)[0].token_ids
        shardings = [x.sharding for x in jax.tree.leaves(other.target)]
        for given in (placed, {key: PLACES[place](i, x) for i, (key, x) in enumerate(tensors.items())}):
            other.update_weights(given)
            assert [x.sharding for x in jax.tree.leaves(other.target)] == shardings
            assert other.generate([[5, 6, 7]], PARAMS)[0].token_ids == expected
            other.update_weights(folders[0])
            assert other.generate([[5, 6, 7]], PARAMS)[0].token_ids == before


@pytest.mark.parametrize("guide", [pytest.param(False, marks=pytest.mark.slow), True])
def test_weights_of_an_llm_whose_kv_heads_are_repeated(guide, tmp_path):
    """On its mesh a device has a copy of the only KV head. An LLM like it takes them, and so does the same one."""
    target, drafter = (
        tiny.tiny_target(tmp_path / "target", hidden_size=128),
        tiny.tiny_assistant(tmp_path / "drafter", backbone_hidden_size=128),
    )
    settings = {"mesh": jaxspec.mesh(tensor=2), "head_guide": guide, **SIZES}
    with jaxspec.load(target, drafter, **settings) as llm, jaxspec.load(target, drafter, **settings) as like:
        llm.update_weights({key: 1.5 * x for key, x in load_file(target / "model.safetensors").items()})
        expected = llm.generate([[5, 6, 7]], PARAMS)[0].token_ids
        for taker in (llm, like):
            taker.update_weights(llm.target, llm.drafter)
            assert jax.tree.structure(taker.target) == jax.tree.structure(llm.target)
            assert taker.generate([[5, 6, 7]], PARAMS)[0].token_ids == expected


def deleted(x):
    array = jax.numpy.array(x)
    array.delete()
    return array


@pytest.mark.parametrize(
    "empty", [deleted, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lambda x: torch.empty(x.shape, device="meta")]
)
def test_tensors_without_numbers_are_refused_by_name(empty, llm, tensors):
    before = llm.target
    with pytest.raises(ValueError, match=f"the tensor '{NORM}' has no numbers"):
        llm.update_weights(tensors | {NORM: empty(tensors[NORM])})
    assert llm.target is before


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (deleted, "found an array that was donated or deleted"),
        (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), "found jax.*ShapeDtypeStruct, expected an array of JAX or NumPy"),
        (lambda x: torch.from_numpy(np.array(x)), "found torch.Tensor, expected an array of JAX or NumPy"),
        (lambda x: 1.0, "found float, expected an array of JAX or NumPy"),
    ],
)
def test_leaves_of_a_tree_that_are_no_arrays_are_listed(leaf, message, llm):
    before = llm.target
    with pytest.raises(ValueError, match=rf"the new target does not fit, 1 problem:\n  norm.weight: {message}"):
        llm.update_weights(before.replace(norm=before.norm.replace(weight=leaf(before.norm.weight))))
    assert llm.target is before


def test_an_error_shows_little_of_what_was_given(llm, tensors):
    with pytest.raises(ValueError, match="expected a hub id, a folder, tensors by their names") as found:
        llm.update_weights(list(tensors.items()))
    assert len(str(found.value)) < 600
