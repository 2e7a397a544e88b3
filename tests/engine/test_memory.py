"""The memory plan: it counts what a state really holds, and what is chosen fits."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
import tiny

from jaxspec import cli, loading
from jaxspec import released as shapes
from jaxspec.drafters.base import NoDraft
from jaxspec.engine import memory
from jaxspec.engine.admission import init_state
from jaxspec.info import cards
from jaxspec.info import describe as info
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.sharding.placement import abstract_placement_of
from jaxspec.targets import abstract_target
from jaxspec.trees import nbytes

GIB = 2**30


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Configs of the 31B and its assistant, without weights."""
    root = tmp_path_factory.mktemp("configs")
    for name, config in {"target": shapes.TARGETS["31b"], "assistant": shapes.drafter_config("mtp", "31b")}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root / "target", root / "assistant"


@functools.cache
def sizes(max_len=4096, num_draft_tokens=4, **settings):
    target = gemma4.abstract(shapes.target_config("31b"), jnp.bfloat16)
    drafter = shapes.abstract_drafter("mtp", "31b", target.config, jnp.bfloat16)
    return memory.sizes_of(target, drafter, max_len=max_len, num_draft_tokens=num_draft_tokens, **settings)


@pytest.mark.parametrize("drafter", ["mtp", "eagle3", None])
def test_sizes_add_up_to_what_the_arrays_take(drafter):
    target = gemma4.abstract(shapes.target_config("e2b"), jnp.bfloat16)
    draft = NoDraft() if drafter is None else shapes.abstract_drafter(drafter, "e2b", target.config, jnp.bfloat16)
    count = 0 if drafter is None else 3
    found = memory.sizes_of(target, draft, max_len=1000, num_draft_tokens=count)
    init = functools.partial(init_state, target, draft, slots=5, max_len=1000, num_draft_tokens=count, full_pages=77)
    assert found.kept(5, 77) == nbytes((target, draft)) + nbytes(jax.eval_shape(init))
    assert found.width == 16


def test_sizes_of_the_31b_by_hand():
    found = sizes()
    # 10 full layers of 4 KV heads: 128 rotary numbers of a key and 512 of a value; a page's place in the free list and its holders.
    assert found.page == 64 * 10 * 4 * (128 + 512) * 2 + 8
    # 50 sliding layers of 16 KV heads of 256, in a ring of 1,024 + 4 positions, which 17 pages hold.
    assert found.rings == 17 * 64 * 50 * 16 * 2 * 256 * 2 and found.slot - found.rings < 2**20
    assert found.width == 64
    # Of one logit of 5 rows; and 512 rows of two times 21,504 and four times 5,376 numbers, which a compiled prefill takes 69.8 MiB for.
    assert found.decode == 21 * 5 * 262_144
    assert found.prefill == 512 * (2 * 21_504 + 4 * 5376) * 2
    # What XLA's attention gathers and scores: a compiled prefill of 8 x 64 rows takes 535 MiB, a decode step of 8 slots 400.
    xla = sizes(kernels=False)
    assert xla.prefill / 2**20 == pytest.approx(535, rel=0.35)
    assert 8 * (xla.decode - found.decode) / 2**20 == pytest.approx(360, rel=0.35)


def test_the_largest_matrix_is_unpacked_whole_where_prompts_have_more_rows_than_kernels_multiply():
    def unpacking(config, quantise="int4", drafter=None, **settings):
        found = shapes.target_config(config)
        target = abstract_target(found, jnp.bfloat16, shapes.target_quantisation(config, found, jnp.bfloat16, quantise, None, None))
        return memory.sizes_of(target, drafter or NoDraft(), max_len=4096, num_draft_tokens=0, **settings).unpacking

    assert unpacking("12b") == 2 * 15_360 * 3840 * 2
    assert (
        unpacking("31b") == unpacking("12b", kernels=False) == unpacking("12b", placement=abstract_placement_of("tensor=4")) == 96 * 2**20
    )
    dspark = shapes.abstract_drafter("dspark", "12b", shapes.target_config("12b"), jnp.bfloat16, "int4")
    assert unpacking("12b", None, dspark) == 2 * 15_360 * 3840 * 2  # at most: of its matrices, prompts pass `fc` and those of K and V


def test_as_many_slots_are_chosen_as_fit_at_half_their_length():
    found = sizes(16384)
    for room in (62 * GIB, 80 * GIB, 100 * GIB, 125 * GIB):
        chosen = memory.fit(found, room)
        assert 256 <= chosen.pages <= 256 * chosen.slots
        # An eighth of what pages share with prompts' snapshots, at most 1 GiB, is left to those.
        used = found.kept(chosen.slots, chosen.pages) + found.work(chosen.slots)
        assert used + chosen.prefix_bytes <= room < used + 1.1 * GIB and chosen.prefix_bytes > 0.1 * GIB
        more = chosen.slots + 1
        assert more > memory.AUTO_SLOTS or found.kept(more, 128 * more) + found.work(more) > room
    # More than can all grow to max_len.
    assert memory.fit(found, 125 * GIB).slots == 53 and memory.most_slots(found, 125 * GIB, 64) == 40
    assert memory.fit(found, 400 * GIB) == memory.MemoryPlan(64, 64 * 256, GIB)
    assert memory.most_slots(found, 50 * GIB, 64) == 0


def test_what_is_asked_for_is_taken_if_it_fits():
    found = sizes()
    assert memory.fit(found, None) == memory.MemoryPlan(8, 512, GIB) and memory.fit(found, None, 100) == memory.MemoryPlan(100, 6400, GIB)
    assert memory.fit(found, 100 * GIB, 20) == memory.MemoryPlan(20, 20 * 64, GIB)
    fewer = memory.fit(found, 80 * GIB, 23)
    assert fewer.slots == 23 and 64 < fewer.pages < 23 * 64
    assert memory.fit(found, 100 * GIB, 20, 70) == memory.MemoryPlan(20, 70, GIB)
    alone = memory.fit(found, 100 * GIB, pages=64).slots
    assert found.kept(alone, 64) + found.work(alone) <= 100 * GIB < found.kept(alone + 1, 64) + found.work(alone + 1)
    with pytest.raises(
        ValueError,
        match=r"the weights take 58\.05 GiB and the state 33\.\d\d GiB \(slots: 40, pages: 64\) of a device; there is 80\.00 GiB",
    ):
        memory.fit(found, 80 * GIB, 40)
    with pytest.raises(ValueError, match=r"\(slots: 1, pages: 64\) of a device; there is 0\.00 MiB of it"):
        memory.fit(found, -5)


def test_the_plan_of_a_checkpoint_is_shown(folders, capsys, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.95")
    options = ["--drafter", str(folders[1]), "--plan", "--memory", "141GB", "--max-len", "16384"]
    assert cli.main(["info", str(folders[0]), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("memory"))
    found, size = sizes(16384), cards.gigabytes  # as the memory was given
    chosen = memory.fit(found, int(0.9 * 0.95 * 141e9))
    kept, work = found.kept(chosen.slots, chosen.pages) + found.slot, found.work(chosen.slots)
    assert chosen.prefix_bytes > found.slot
    assert lines[at : at + 8] == [
        "memory      141.0 GB, of which JAX takes 0.95 (XLA_CLIENT_MEM_FRACTION); memory_fraction 0.9 of it is 120.6 GB",
        "weights     61.4 GB target, 939.0 MB drafter",
        f"slot        {size(found.slot)}: sliding rings 891.3 MB; all else {size(found.slot - 850 * 2**20)}",
        "page        3.3 MB: 64 positions of full layers; 256 pages for max_len 16384",
        f"calls       about {size(work)} for activations and logits, K = 4",
        f"plan        43 slots, {chosen.pages} pages, snapshots of 1 prompts",
        f"            {size(kept)} kept, {size(kept + work)} with calls",
        "lengths     slots that can all grow to a max_len",
    ]
    table = dict(map(int, line.split()) for line in lines[at + 8 :])
    assert list(table) == [1024, 4096, 16384, 65536, 262144]
    assert table[16384] == 33 and sorted(table.values(), reverse=True) == list(table.values())


def test_plans_that_make_no_sense_are_refused(folders, capsys):
    for options, message in {
        ("--memory", "80"): "'80' is not an amount of memory; expected a number and one of MB, GB, TB, MiB, GiB, TiB, such as 80GB",
        ("--memory", "40GB"): "the weights take 61.4 GB and the state 1.0 GB (slots: 1, pages: 64) of a device; ",
        ("--memory", "40GiB"): "the weights take 57.18 GiB and the state ",
        ("--memory", "1TB", "--max-len", "300000"): "max_len is 300000, expected 2 .. 262144",
        ("--memory", "1TB", "--k", "2"): "num_draft_tokens is 2 but there is no drafter; expected 0, or a drafter",
        ("--memory", "1TB", "--max-slots", "0"): "max_slots is 0, expected at least 1",
        ("--memory", "1TB", "--memory-fraction", "2"): "memory_fraction is 2.0, expected more than 0 and at most 1",
    }.items():
        assert cli.main(["info", str(folders[0]), "--plan", *options]) == 2
        assert capsys.readouterr().err.startswith(f"jaxspec: {message}")
    assert cards.card_of("1.5 GiB").memory == 3 * 2**29
    assert cards.card_of("80gb").memory == 80 * 10**9


def test_load_takes_the_slots_and_pages_that_the_device_has_memory_for(tmp_path, monkeypatch):
    target = tiny.tiny_target(tmp_path / "target")
    abstract = gemma4.abstract(Gemma4Config.from_hf(tiny.TARGET), jnp.float32)
    found = memory.sizes_of(abstract, NoDraft(), max_len=256, num_draft_tokens=0, kernels=False)
    room = found.kept(5, 20) + found.work(5)
    chosen = memory.fit(found, room)
    assert 4 * chosen.slots > chosen.pages > 2 * chosen.slots > 8
    monkeypatch.setattr(loading, "LLM", lambda *args, **_: (args[3].max_slots, args[3].kv_pages))
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: None)
    settings = {"max_len": 256, "progress": False, "memory_fraction": 0.5}
    monkeypatch.setattr(loading, "memory_limit", lambda device: 2 * room)
    assert loading.load(target, **settings) == (chosen.slots, chosen.pages)
    assert loading.load(target, max_slots=3, **settings) == (3, 12)
    monkeypatch.setattr(loading, "memory_limit", lambda device: None)
    assert loading.load(target, **settings) == (8, 32)


def test_what_lies_where_on_a_mesh_is_shown(folders, capsys):
    assert cli.main(["info", str(folders[0]), "--drafter", str(folders[1]), "--mesh", "tensor=4,data=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("mesh        data=2, tensor=4: 8 devices")
    target, drafter = (next(i for i, line in enumerate(lines) if i > at and line.startswith(name)) for name in ("target", "drafter"))
    rows = [line.split(maxsplit=5) for line in lines[target + 1 : drafter]]
    shown = {path: (amount, unit, count, spec) for amount, unit, count, _, path, spec in rows}
    # By hand, of bfloat16: 262,144 x 5,376 and, in each of 60 layers, 2 x 21,504 x 5,376, over 4 devices.
    assert shown["embed_tokens.weight"] == ("672.00", "MiB", "1", "P('tensor', None)")
    assert shown["layers.*.mlp.gate_up_proj.weight"] == ("6.46", "GiB", "60", "P(None, 'tensor', None)")
    assert shown["layers.*.self_attn.q_norm.weight"][2:] == ("60", "replicated")
    replicated = 2 * (60 * (4 * 5376 + 1) + 5376 + 50 * 2 * 256 + 10 * 2 * 512)
    assert lines[target] == f"target      14.30 GiB a device, {memory.size(replicated)} of it replicated"
    specs = [row[-1] for row in rows]
    assert specs == sorted(specs, key="replicated".__eq__)


def test_kv_heads_that_the_mesh_does_not_divide_are_shown_as_repeated(folders):
    lines = list(info.describe_mesh(info.read(str(folders[0])), "tensor=8"))
    # Full layers have 4 KV heads, each with a key of 512 x 5,376 that is stored once more for each of 10 layers.
    assert lines[1].endswith(f"; {memory.size(10 * 4 * 512 * 5376 * 2)} more than on one device, for repeated KV heads")


def test_meshes_that_make_no_sense_are_refused(folders, capsys):
    for text in ("tensor", "tensor=x", "rows=2", "tensor=0", "tensor=2,tensor=4"):
        assert cli.main(["info", str(folders[0]), "--mesh", text]) == 2
        assert (
            capsys.readouterr().err == f"jaxspec: the mesh is {text!r}; expected 'data=N', 'tensor=N' or both with a comma between them\n"
        )


def test_sizes_of_a_device_of_a_mesh(folders, capsys):
    alone, found = sizes(), sizes(placement=abstract_placement_of("data=2,tensor=4"))
    # 16 and 4 KV heads lie over 4 devices, and so does all of the target but norms; of the drafter's, attention and the embedding.
    assert 4 * found.rings == alone.rings and 4 * (found.page - 8) == alone.page - 8
    assert 0 < 4 * found.target - alone.target < 10 * 2**20
    assert alone.drafter / 4 < found.drafter < alone.drafter / 2
    assert (found.width, found.decode) == (alone.width, alone.decode)
    options = ["--drafter", str(folders[1]), "--plan", "--memory", "80GB", "--mesh", "data=2,tensor=4"]
    assert cli.main(["info", str(folders[0]), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"weights     {cards.gigabytes(found.target)} target, {cards.gigabytes(found.drafter)} drafter" in lines
    assert any(
        line.startswith("plan        64 slots, 4096 pages, snapshots of ") and line.endswith(" for each of 2 data shards") for line in lines
    )
