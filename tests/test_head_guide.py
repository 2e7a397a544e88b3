"""`load(head_guide=...)`: the same texts with guides as without, on one device and on meshes; when guides are there by default; and that
whoever plans memory or replaces weights knows of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxspec
from jaxspec import checkpoint, cli, planning
from jaxspec.bench import roofline
from jaxspec.decode import rows
from jaxspec.drafters import assistant, base
from jaxspec.engine import memory
from jaxspec.learning.settings import Learn
from jaxspec.model.gemma4_config import AssistantConfig
from jaxspec.model.head_guides import guide_for, guided, has_guide
from jaxspec.sampling.choice import choose_by_head, likely_logits
from jaxspec.sharding.placement import ONE_DEVICE, abstract_placement_of
from jaxspec.trees import nbytes, weight_count
from pallas_kernels import device
from pallas_kernels.lm_head import guide_of
from pallas_kernels.lm_head import guided as kernels

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SETTINGS = {"max_slots": 2, "max_len": 48, "num_draft_tokens": 3, "adaptive_verification": False, "progress": False}
SAMPLED = {"max_tokens": 12, "seed": 3, "ignore_eos": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PARAMS = [jaxspec.SamplingParams(temperature=t, **SAMPLED) for t in (0.0, 0.9)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny target and an assistant whose heads are all of a token embedding with rows of a whole block."""
    root, width = tmp_path_factory.mktemp("models"), 64
    target = tiny.tiny_target(root / "target", hidden_size=width)
    config = {**tiny.ASSISTANT, "backbone_hidden_size": width, "use_ordered_embeddings": False}
    config["text_config"] = {**config["text_config"], "hidden_size": width}
    weights = tiny.random_weights(assistant.abstract(AssistantConfig.from_hf(config), jnp.float32), seed=1)
    checkpoint.save_weights(root / "assistant", weights, config)
    return target, root / "assistant"


@pytest.fixture
def interpreted(monkeypatch):
    """Heads' kernels run in the interpreter, all else in XLA. Gives the list of the numbers of rows that read guides."""

    def interpreting(*args, **settings):
        return choose_by_head(*args, **settings | {"implementation": "triton-interpret" if settings["guide"] is not None else "xla"})

    for module in (rows, assistant, base):
        monkeypatch.setattr(module, "choose_by_head", interpreting)
    run, seen = kernels.lm_head, []

    def counted(hidden, *args, **settings):
        seen.append(hidden.shape[0])
        return run(hidden, *args, **settings)

    monkeypatch.setattr(kernels, "lm_head", counted)
    return seen


def texts(llm):
    return [done.token_ids for done in llm.generate(["def f(x):", "class A:"], PARAMS)]


@pytest.mark.slow  # tests/kernels/test_guided_head.py has the choice of a head with a guide
@pytest.mark.parametrize("drafter", [1, pytest.param(0, marks=pytest.mark.slow)], ids=["assistant", "a draft model"])
def test_texts_are_the_same(drafter, models, interpreted):
    """Greedy and sampled; the rows of the target and those of the drafter read guides."""
    plain = jaxspec.load(models[0], models[drafter], **SETTINGS)
    wanted = texts(plain)
    assert not has_guide((plain.target, plain.drafter)) and not interpreted
    llm = jaxspec.load(models[0], models[drafter], head_guide=True, **SETTINGS)
    jax.tree.map(np.testing.assert_array_equal, llm.target.head_guide, guide_of(llm.target.embed_tokens.weight))
    assert texts(llm) == wanted and has_guide(llm.drafter)
    assert llm.text_settings == plain.text_settings and weight_count(llm.target) == weight_count(plain.target)
    assert llm.stats.acceptance_length == plain.stats.acceptance_length
    assert {2, 8} <= set(interpreted)


@pytest.mark.slow  # tests/kernels/test_guided_head.py has the logits that filters choose among
@pytest.mark.parametrize("axes", [None, {"tensor": 2}], ids=["one device", "two"])
def test_texts_with_filters_are_the_same(axes, models, monkeypatch):
    """The target's rows read the guide where nothing but filters is asked for, and the table for whoever needs all logits."""
    filters = {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "ignore_eos": True, "max_tokens": 12}
    asked = [[{}, {"seed": 1}], [{"logprobs": 2}, {"presence_penalty": 0.5}], [{"top_k": 0}, {}], [{"temperature": 0.0}, {"top_k": 100}]]
    calls = [[jaxspec.SamplingParams(**{"seed": 3, **filters, **one}) for one in both] for both in asked]

    def found(llm):
        return [[done.token_ids for done in llm.generate(["def f(x):", "class A:"], params)] for params in calls]

    wanted = found(jaxspec.load(*models, **SETTINGS))
    run, seen = kernels.likely_logits, []

    def counted(hidden, *args, **settings):
        seen.append(hidden.shape[0])
        return run(hidden, *args, **settings)

    def interpreting(*args, **settings):
        return likely_logits(*args, **settings | {"implementation": "triton-interpret"})

    monkeypatch.setattr(kernels, "likely_logits", counted)
    monkeypatch.setattr(rows, "likely_logits", interpreting)
    llm = jaxspec.load(*models, head_guide=True, mesh=axes and jaxspec.mesh(**axes), **SETTINGS)
    assert found(llm) == wanted and 8 in seen


@pytest.mark.slow
def test_dflash_drafts_by_the_targets_guide(interpreted):
    plain = jaxspec.load("pocket", "pocket-dflash", **SETTINGS)
    llm = jaxspec.load("pocket", "pocket-dflash", head_guide=True, **SETTINGS)
    assert texts(llm) == texts(plain) and not has_guide(llm.drafter)
    assert llm.stats.acceptance_length == plain.stats.acceptance_length
    assert {6, 8} <= set(interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2}], ids=str)
def test_guides_lie_where_their_tables_do(axes, models, interpreted):
    """Each device has that of its part of the vocabulary, and chooses among that part."""
    wanted = texts(jaxspec.load(*models, **SETTINGS))
    llm = jaxspec.load(*models, head_guide=True, mesh=jaxspec.mesh(**axes), **SETTINGS)
    table, guide, parts = llm.target.embed_tokens.weight, llm.target.head_guide, axes.get("tensor", 1)
    assert guide.distance.addressable_shards[0].data.shape == (table.shape[0] // parts,)
    assert guide.codes.words.addressable_shards[0].data.shape[0] == table.shape[0] // 64 // parts
    np.testing.assert_array_equal(guide.distance, guide_of(jnp.asarray(np.asarray(table))).distance)
    assert texts(llm) == wanted and interpreted


def test_learnt_weights_come_with_guides_of_their_own(models):
    """Those on trial have the same shapes as those in use, so that programs serve both."""
    llm = jaxspec.load(*models, head_guide=True, **SETTINGS)
    origin, placement = llm._whole.origin, llm._whole.placement
    found = placement.spread(jax.tree.map(lambda x: x * 2, origin.weights))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, llm.drafter)
    embedding = found.model.embed_tokens
    jax.tree.map(np.testing.assert_array_equal, embedding.guide, guide_of(embedding.weight))


def pair(name, drafter="mtp", **asked):
    found = planning.released_pair(name, drafter, **asked)
    return found.target, found.drafter


def test_by_default_hopper_gpus_with_room_have_guides():
    """At most a sixteenth of what the weights leave: 1.7 GB of copies beside the 31B's 64 GB of weights."""
    trees = pair("31b")
    without, guides = map(nbytes, (trees, tuple(map(guided, trees))))
    assert guides - without == pytest.approx(262_144 * (5376 + 1024), rel=0.01)

    def chosen(asked, room, pays):
        return planning.with_head_guides(ONE_DEVICE, *trees, asked, room, pays=pays).head_guides

    least = without + 16 * (guides - without)
    assert chosen(None, least, True) and not chosen(None, least - 32, True)
    assert not chosen(None, least, False) and not chosen(None, None, True)
    assert chosen(True, 0, False) and not chosen(False, least, True)
    with pytest.raises(TypeError, match="head_guide is 'int8', expected True, False or None"):
        chosen("int8", least, True)


def test_heads_that_are_packed_or_no_embeddings_have_none():
    """The E2B's assistant has a centroid head, and Step-3.5 a head of its own."""
    target, centroids = pair("e2b")
    assert has_guide(guided(target)) and not has_guide(guided(centroids))
    assert not has_guide(guided(pair("31b", quantize_embedding="int8")[0]))
    step, _ = pair("step3p5", "modules")
    assert not has_guide(guided(step)) and step.head_guide is None


@pytest.mark.parametrize(("devices", "some"), [(2, True), (64, True), (128, False)])
def test_a_mesh_that_cannot_cut_the_blocks_has_none(devices, some):
    """4,096 tokens are 64 blocks: 128 devices would have half a block each."""
    table = abstract_placement_of(f"tensor={devices}").place(pair("31b")[0]).embed_tokens.weight
    small = jax.ShapeDtypeStruct((64 * 64, 64), table.dtype, sharding=table.sharding)
    found = guide_for(small)
    assert (found is not None) == some
    if found is not None:
        assert found.distance.sharding.shard_shape(found.distance.shape) == (64 * 64 // devices,)


def test_logits_of_drafts_come_from_the_guide_where_a_kernel_reads_it():
    """Filters and acceptance rules that weigh drafts need logits, of whatever the drafts are chosen by."""
    drafter = guided(pair("31b")[1])
    embedding = drafter.model.embed_tokens

    def read(rows, implementation="auto"):
        return embedding.weight_to_guess_by(jax.ShapeDtypeStruct((rows, 1, 1024), jnp.bfloat16), implementation)

    assert read(1) is read(1, "xla") is embedding.weight
    with device.described_as(device.Described("NVIDIA H200", "9.0")):
        assert read(1) is read(48, "triton") is embedding.guide.codes
        assert read(49) is read(1, "xla") is embedding.weight
        assert (
            pair("31b")[1].model.embed_tokens.weight_to_guess_by(jax.ShapeDtypeStruct((1, 1024), jnp.bfloat16), "auto").dtype
            == jnp.bfloat16
        )


def test_memory_is_planned_with_guides(capsys):
    trees = pair("31b")
    sizes = {"max_len": 4096, "num_draft_tokens": 4, "learn": Learn()}
    guiding = planning.with_head_guides(ONE_DEVICE, *trees, True, None, pays=False)
    plain, found = (memory.sizes_of(*trees, placement=placement, **sizes) for placement in (ONE_DEVICE, guiding))
    more = [nbytes(guided(tree)) - nbytes(tree) for tree in trees]
    assert (found.target - plain.target, found.drafter - plain.drafter) == tuple(more)
    assert found.learnt - plain.learnt == more[1] and found.unpacking == plain.unpacking == 0
    for card, expected in (("H200", True), ("H100", False), ("A100", False)):
        cli.main(["info", "31b", "--drafter", "mtp", "--memory", card])
        assert ("with guides of heads" in capsys.readouterr().out) == expected


def test_the_floor_counts_what_is_read():
    """The guide's bytes for few rows, the head's for more."""
    plain, drafter = pair("31b")

    def read(target, batch):
        return roofline.step_bytes(target, drafter, batch=batch, num_draft_tokens=4, context=512).target

    target = guided(plain)
    saved = nbytes(plain.embed_tokens) - nbytes(target.head_guide)
    assert (read(plain, 1) - read(target, 1), read(plain, 10) - read(target, 10)) == (saved, 0)
    _, block = pair("31b", "dflash")

    def drafted(target, batch):
        return roofline.step_bytes(target, block, batch=batch, num_draft_tokens=15, context=512).drafter

    assert (drafted(plain, 3) - drafted(target, 3), drafted(plain, 4) - drafted(target, 4)) == (saved, 0)
