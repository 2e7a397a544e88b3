"""An LLM that goes on with other weights gives what an LLM gives that was loaded with them."""

import gc
import json
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import Learn, SamplingParams
from jaxspec.checkpoint import from_floats, given, packing
from jaxspec.engine import new_weights
from jaxspec.engine.programs import Programs

pytestmark = pytest.mark.usefixtures("quick_to_compile", "shared_programs")
SIZES = {"max_slots": 4, "max_len": 96, "progress": False}
PROMPTS = np.random.default_rng(0).integers(100, 4000, (6, 20)).tolist()
PARAMS = [SamplingParams(max_tokens=10, seed=i, temperature=float(i % 2), ignore_eos=True) for i in range(6)]
WEIGHTS = "model.safetensors"


def drawn(folder, to, seed):
    """The same model with other weights."""
    shutil.copytree(folder, to)
    rng = np.random.default_rng(seed)
    found = load_file(folder / WEIGHTS)
    new = {key: (x + 0.1 * rng.standard_normal(x.shape)).astype(x.dtype) if x.dtype.kind == "f" else x for key, x in found.items()}
    save_file(new, to / WEIGHTS, {"format": "pt"})
    return to


@pytest.fixture(scope="module")
def other(folders, tmp_path_factory):
    return drawn(folders[0], tmp_path_factory.mktemp("other") / "target", 7)


def texts(llm):
    return [made.token_ids for made in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def expected(folders, other):
    """Texts of both, by a target alone."""
    found = []
    for target in (folders[0], other):
        with jaxspec.load(target, **SIZES) as llm:
            found.append(texts(llm))
    assert found[0] != found[1]
    return found


def tree_of(folder):
    with jaxspec.load(folder, **SIZES) as llm:
        return jax.tree.map(jnp.copy, llm.target)


FORMS = {
    "folder": lambda folder: folder,
    "numpy": lambda folder: load_file(folder / WEIGHTS),
    "jax": lambda folder: {f"module.{key}": jnp.asarray(x) for key, x in load_file(folder / WEIGHTS).items()},
    "torch": lambda folder: {
        key.replace("language_model.", ""): torch.nn.Parameter(torch.from_numpy(x)) for key, x in load_file(folder / WEIGHTS).items()
    },
    "tree": tree_of,
}


@pytest.fixture(scope="module")
def pair(folders):
    with jaxspec.load(*folders, **SIZES) as llm:
        yield llm


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_those_of_the_new_weights(form, pair, folders, other, expected, monkeypatch):
    """Whatever prompts were kept. Nothing is compiled again."""
    assert texts(pair) == expected[0]
    monkeypatch.setattr(Programs, "_compiler", None)
    pair.update_weights(FORMS[form](other))
    assert texts(pair) == expected[1] == texts(pair)
    assert pair.name.endswith(str(other) if form == "folder" else f"{folders[0]} with new weights")
    pair.update_weights(folders[0])
    assert texts(pair) == expected[0]


def test_a_tree_is_taken_as_it_is(pair, folders, other):
    tree = tree_of(other)
    pair.update_weights(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(pair.target), jax.tree.leaves(tree), strict=True))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    pair.update_weights(half)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(pair.target))
    np.testing.assert_array_equal(pair.target.norm.weight, np.asarray(half.norm.weight, np.float32))
    by_numpy = jax.tree.map(np.array, tree)
    pair.update_weights(by_numpy)
    by_numpy.norm.weight[:] = 0
    same(pair.target, tree)
    pair.update_weights(folders[0])


def test_arrays_on_a_device_stay_there(pair, folders, other, expected, monkeypatch):
    """The host sees none of their numbers."""
    tensors = FORMS["jax"](other)
    monkeypatch.setattr(given._Given, "_on_host", None)
    pair.update_weights(tensors)
    norms = pair.target.norm.weight, tensors["module.model.language_model.norm.weight"]
    assert norms[0].unsafe_buffer_pointer() == norms[1].unsafe_buffer_pointer()
    assert texts(pair) == expected[1]
    pair.update_weights(folders[0])


def test_bfloat16_of_every_library(folders):
    """NumPy's by ml_dtypes, JAX's, and PyTorch's, which NumPy does not know."""
    stored = load_file(folders[0] / WEIGHTS)
    forms = (
        {key: x.astype(jnp.bfloat16) for key, x in stored.items()},
        {key: jnp.asarray(x, jnp.bfloat16) for key, x in stored.items()},
        {key: torch.from_numpy(x).to(torch.bfloat16) for key, x in stored.items()},
    )
    with jaxspec.load(folders[0], dtype="bfloat16", **SIZES) as llm:
        before = llm.target
        for form in forms:
            llm.update_weights(form)
            same(llm.target, before)


def test_what_is_under_way_goes_on(pair, folders, other, expected):
    """What it leaves behind serves no prompt: neither of the new weights, nor of the old ones when these come back."""
    stream = pair.stream(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    began = next(stream).token_ids
    pair.update_weights(other)
    assert texts(pair) == expected[1]
    rest = [token for chunk in stream for token in chunk.token_ids]
    assert len(began) + len(rest) == 40
    chat = [*PROMPTS[0], *began, *rest]
    for folder in (other, folders[0]):
        pair.update_weights(folder)
        with jaxspec.load(folder, **SIZES) as alone:
            wanted = alone.generate(chat, PARAMS[0])[0].token_ids
        assert pair.generate(chat, PARAMS[0])[0].token_ids == wanted


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"quantize": "fp8"}, marks=pytest.mark.slow),
        {"quantize": "int4", "quantize_embedding": "int8"},
        {"quantize": "int8", "tensor": 2},
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        {"data": 2},
    ],
)
@pytest.mark.parametrize("form", ["folder", "jax"])
def test_they_are_quantised_and_spread_as_those_before(form, settings, folders, other, monkeypatch):
    if form == "jax":
        monkeypatch.setattr(given._Given, "_on_host", None)  # they stay on the device
        for module in (from_floats, packing):
            monkeypatch.setattr(module, "ON_DEVICES", 3000)  # in pieces
    if "data" in settings:
        settings = {"mesh": jaxspec.mesh(data=2)}
    with jaxspec.load(other, **settings, **SIZES) as llm:
        wanted = [runner.target for runner in llm._shards.runners]
    with jaxspec.load(*folders, **settings, **SIZES) as llm:
        llm.update_weights(FORMS[form](other))
        for runner, target in zip(llm._shards.runners, wanted, strict=True):
            same(runner.programs.target, target)


def test_a_guide_of_the_head_is_made_anew(tmp_path):
    target = tiny.tiny_target(tmp_path / "target", hidden_size=128)
    other = drawn(target, tmp_path / "other", 7)
    wanted, llm = (jaxspec.load(folder, head_guide=True, **SIZES) for folder in (other, target))
    assert llm.target.head_guide is not None
    for form in (other, wanted.target, load_file(other / WEIGHTS)):
        llm.update_weights(form)
        same(llm.target, wanted.target)


@pytest.mark.parametrize("settings", [pytest.param({"tensor": 2}, marks=pytest.mark.slow), {"data": 2}])  # as above, but for texts
def test_texts_on_a_mesh(settings, folders, other, expected):
    with jaxspec.load(folders[0], mesh=jaxspec.mesh(**settings), **SIZES) as llm:
        llm.update_weights(tree_of(other))
        assert texts(llm) == expected[1]


def same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for leaf, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert (leaf.dtype, leaf.sharding) == (wanted.dtype, wanted.sharding)
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))


def test_another_drafter(pair, folders, expected, tmp_path):
    drafter = drawn(folders[1], tmp_path / "drafter", 9)
    before = pair.drafter
    pair.update_weights(drafter=drafter)
    assert texts(pair) == expected[0]
    leaves = zip(jax.tree.leaves(pair.drafter), jax.tree.leaves(before), strict=True)
    assert any(not np.array_equal(a, b) for a, b in leaves)
    pair.update_weights(drafter=before)
    assert jax.tree.leaves(pair.drafter)[0] is jax.tree.leaves(before)[0]


def test_a_drafter_follows_a_target_that_changes(folders, other, expected):
    learn = Learn(share=0.9, batch=2, length=32, anchors=4, rate=1e-2, every=1, patience=1000)
    with jaxspec.load(*folders, learn=learn, **SIZES) as llm:
        assert texts(llm) == expected[0]
        llm.update_weights(other)
        while llm.learning.stats.updates < 3:
            assert texts(llm) == expected[1]
        leaves = zip(jax.tree.leaves(llm.target), jax.tree.leaves(llm.learning._learner.target), strict=True)
        assert all(a is b for a, b in leaves)
        with pytest.raises(RuntimeError, match="the drafter learns"):
            llm.update_weights(drafter=folders[1])
        llm.learning.close()
        llm.update_weights(drafter=folders[1])
        assert texts(llm) == expected[1]


def test_where_there_is_no_room_for_both(folders, other, expected, monkeypatch):
    """The old weights go first. If the new ones then cannot be read, the LLM has none, and is closed."""
    monkeypatch.setattr(new_weights, "memory_limit", lambda device: 1)
    read = new_weights.planned_target

    def noted(*args, **more):
        reads = read(*args, **more)

        def checked():
            assert llm._runner.target is None and llm._runner.programs._weights == []
            return reads()

        return checked

    monkeypatch.setattr(new_weights, "planned_target", noted)
    llm = jaxspec.load(*folders, **SIZES)
    llm.update_weights(other)
    assert texts(llm) == expected[1]
    with pytest.raises(ValueError, match="is another model"):  # before anything is given up
        llm.update_weights("pocket")
    assert texts(llm) == expected[1]

    def fails(*_, **__):
        raise OSError("the disk is gone")

    monkeypatch.setattr(new_weights, "planned_target", lambda *args, **more: fails)
    with pytest.raises(OSError, match="the disk is gone") as found:
        llm.update_weights(other)
    assert "the old weights had been given up for the new ones" in found.value.__notes__[0]
    with pytest.raises(RuntimeError, match="is closed"):
        texts(llm)


def without(tensors, key):
    return {name: x for name, x in tensors.items() if name != key}


NORM = "model.language_model.norm.weight"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (lambda found: {}, ValueError, r"the weights in the given tensors do not fit the model, \d+ problems"),
        (lambda found: without(found, NORM), ValueError, rf"{NORM}: missing, expected \[32\]"),
        (lambda found: found | {NORM: np.ones(31, np.float32)}, ValueError, rf"{NORM}: found \[31\], expected \[32\]"),
        (
            lambda found: found | {"model.language_model.x": np.ones(1, np.float32)},
            ValueError,
            r"language_model.x: unknown, found F32 \[1\]",
        ),
        (
            lambda found: found | {NORM: [1.0]},
            TypeError,
            "the tensor 'model.language_model.norm.weight' is of type list; expected arrays of",
        ),
        (lambda found: found | {NORM: np.ones(32, complex)}, TypeError, "is an array of complex128"),
        (lambda found: found | {3: found[NORM]}, TypeError, "the tensor 3 is"),
        (lambda found: 5, ValueError, "the new target is 5, and the LLM's is Gemma4"),
        (lambda found: None, TypeError, "no weights are given; expected a target, an adapter or a drafter"),
        (lambda found: "pocket", ValueError, r"pocket is another model than the LLM's target.*\n.*hidden_size: found \d+, expected 32"),
        (lambda found: "no such folder", FileNotFoundError, "no such folder"),
    ],
)
def test_what_does_not_fit_changes_nothing(changed, error, message, pair, folders, expected):
    with pytest.raises(error, match=message):
        pair.update_weights(changed(load_file(folders[0] / WEIGHTS)))
    assert texts(pair) == expected[0]


def test_trees_and_drafters_that_do_not_fit(pair, folders, tmp_path):
    wrong = pair.target.replace(norm=pair.target.norm.replace(weight=jnp.ones(31)))
    with pytest.raises(
        ValueError, match=r"the new target does not fit, 1 problem:\n  norm.weight: found float32 \[31\], expected float32 \[32\]"
    ):
        pair.update_weights(wrong)
    with pytest.raises(
        ValueError, match="the new drafter is Gemma4.*; expected a hub id, a folder, or a tree of weights such as llm.drafter$"
    ):
        pair.update_weights(drafter=pair.target)
    with pytest.raises(ValueError, match="drafter is 'ngram', which has no weights to be taken; expected a hub id, a folder, or a tree"):
        pair.update_weights(drafter="ngram")
    narrow = tiny.tiny_assistant(tmp_path / "narrow", intermediate_size=16)
    with pytest.raises(ValueError, match="is another drafter"):
        pair.update_weights(drafter=narrow)
    with pytest.raises(TypeError, match="adapter is 3"):
        pair.update_weights(adapter=3)
    with pytest.raises(TypeError, match="an adapter is given with dict"):
        pair.update_weights(load_file(folders[0] / WEIGHTS), adapter="anything")


def test_settings_that_are_not_computed_with_may_differ(pair, folders, other, expected, tmp_path):
    """Such as the dtype that a trainer saves in; not what the text depends on."""
    half, edited = tmp_path / "half", tmp_path / "edited"
    for to, change in ((half, {"dtype": "float32", "eos_token_id": [1, 106]}), (edited, {"sliding_window": 16})):
        shutil.copytree(other, to)
        config = json.loads((to / "config.json").read_text())
        config["text_config"] |= change
        (to / "config.json").write_text(json.dumps(config))
    pair.update_weights(half)
    assert texts(pair) == expected[1]
    with pytest.raises(ValueError, match="sliding_window: found 16, expected 8"):
        pair.update_weights(edited)
    pair.update_weights(folders[0])


def test_a_closed_llm_takes_none(folders):
    llm = jaxspec.load(folders[0], **SIZES)
    llm.close()
    with pytest.raises(RuntimeError, match="is closed"):
        llm.update_weights(folders[0])


@pytest.mark.parametrize("settings", [{}, pytest.param({"data": 2}, marks=pytest.mark.slow)])
def test_old_weights_are_given_back(settings, folders, other):
    """Nothing holds them, but for what was seen of them."""
    with jaxspec.load(*folders, mesh=jaxspec.mesh(**settings) if settings else None, **SIZES) as llm:
        for change in (lambda: llm.update_weights(other), lambda: llm.sleep("drop")):
            texts(llm)
            old = [weakref.ref(leaf) for leaf in jax.tree.leaves(llm.target)]
            change()
            gc.collect()
            assert not any(leaf() is not None for leaf in old)


@pytest.mark.parametrize("settings", [{}, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ({"data": 2}, {"tensor": 2}))])
def test_an_llm_sleeps_and_goes_on(settings, folders, other, expected):
    mesh = jaxspec.mesh(**settings) if settings else None
    with jaxspec.load(*folders, mesh=mesh, **SIZES) as llm:
        assert texts(llm) == expected[0]
        state = [leaf for runner in llm._shards.runners for leaf in jax.tree.leaves(runner.programs.state)]
        llm.sleep()
        assert all(leaf.is_deleted() for leaf in state)
        assert texts(llm) == expected[0]
        before = llm.target
        llm.sleep("host")
        assert repr(llm) == f"LLM({str(folders[0])!r}, asleep)" and llm._repr_html_() is None
        for call in (lambda: texts(llm), llm.warmup, lambda: next(llm.stream("a")), lambda: llm.target):
            with pytest.raises(RuntimeError, match=r"sleeps, and has no weights; call wake_up\(\) or update_weights"):
                call()
        assert llm.stats.tokens
        llm.sleep("host"), llm.wake_up(), llm.wake_up()
        same(llm.target, before)
        assert texts(llm) == expected[0]
        llm.sleep("drop")
        with pytest.raises(RuntimeError, match="the target's weights were dropped; update_weights takes others"):
            llm.wake_up()
        llm.update_weights(other)
        assert texts(llm) == expected[1]


def test_it_does_not_sleep_while_texts_are_under_way(pair, expected):
    stream = pair.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    with pytest.raises(RuntimeError, match="texts are under way"):
        pair.sleep()
    stream.close()
    pair.sleep()
    with pytest.raises(ValueError, match="weights is 'gone'; available: 'keep', 'host', 'drop'"):
        pair.sleep("gone")
    assert texts(pair) == expected[0]


@pytest.mark.slow  # above, a drafter follows a target that changes
def test_a_drafter_that_learns_sleeps_too(folders, other, expected):
    learn = Learn(share=0.9, batch=2, length=32, anchors=4, rate=1e-2, every=1, patience=1000)
    with jaxspec.load(*folders, learn=learn, **SIZES) as llm:
        while llm.learning.stats.updates < 2:
            assert texts(llm) == expected[0]
        llm.sleep("host")
        llm.wake_up()
        before = llm.learning.stats.updates
        while llm.learning.stats.updates < before + 2:
            assert texts(llm) == expected[0]


@pytest.mark.slow  # structures and new weights have their tests apart
def test_structures_are_there_again(pair):
    params = SamplingParams(max_tokens=8, temperature=0, structured_outputs={"choice": ["yes", "no"]})
    before = pair.generate("Is it? ", params)[0].text
    pair.sleep()
    assert pair.generate("Is it? ", params)[0].text == before and before in ("yes", "no")


def test_what_was_kept_is_forgotten(pair, expected):
    prompt, params = PROMPTS[0] * 4, SamplingParams(max_tokens=2, temperature=0)

    def cached(*ends):
        return [made.num_cached_tokens for made in pair.generate([[*prompt, end] for end in ends], params)]

    assert cached(5, 6)[1] and cached(7)[0]
    pair.reset_prefix_cache()
    assert not cached(8)[0]
