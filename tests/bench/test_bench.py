"""What a step has to read and a prompt to compute, by hand; and a run of the command on tiny shapes."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxspec
from jaxspec import cli, released
from jaxspec.bench import kernel_times, random_weights, roofline, workload
from jaxspec.bench import report as bench_report
from jaxspec.decode.accept import COUPLED
from jaxspec.decode.round import Round
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters.base import NoDraft
from jaxspec.engine import cuda_graphs
from jaxspec.model import gemma4, traffic
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config
from jaxspec.model.head_guides import has_guide
from jaxspec.targets import abstract_target

pytestmark = pytest.mark.usefixtures("unoptimised")


@functools.cache
def pair(name: str):
    """A named target and its assistant, as released."""
    config = Gemma4Config.from_hf(released.TARGETS[name])
    assistant = gemma4_mtp.bind(AssistantConfig.from_hf(released.drafter_config("mtp", name)), config)
    return gemma4.abstract(config), gemma4_mtp.abstract(assistant)


@pytest.mark.parametrize(
    ("name", "target_gb", "draft_gb", "sliding", "full", "source_sliding", "source_full"),
    [
        # Bytes of K and V a position, over all layers that own them, then of the two layers that the assistant reads. Where K and V
        # are one projection, full layers store 640 numbers a head instead of 1,024.
        ("e2b", 4.560, 0.023, 12_288, 6_144, 1_024, 2_048),
        ("e4b", 9.289, 0.025, 40_960, 16_384, 2_048, 4_096),
        ("12b", 23.815, 0.846, 327_680, 10_240, 8_192, 1_280),
        ("26b", 7.645, 0.839, 204_800, 12_800, 8_192, 2_560),
        ("31b", 61.395, 0.939, 819_200, 51_200, 16_384, 5_120),
    ],
)
def test_bytes_of_a_step(name, target_gb, draft_gb, sliding, full, source_sliding, source_full):
    target, assistant = pair(name)
    one = roofline.step_bytes(target, NoDraft(), batch=1, num_draft_tokens=0, context=4096)
    assert round(one.target / 1e9, 3) == target_gb
    window = target.config.sliding_window
    assert one.target_kv == sliding * window + full * 4096
    assert (one.drafter, one.drafter_kv) == (0, 0)
    drafted = roofline.step_bytes(target, assistant, batch=1, num_draft_tokens=3, context=100)
    assert round(drafted.drafter / 3 / 1e9, 3) == draft_gb
    assert drafted.target_kv == (sliding + full) * 100
    assert drafted.drafter_kv == 3 * 100 * (source_sliding + source_full)
    assert drafted.total == drafted.target + drafted.target_kv + drafted.drafter + drafted.drafter_kv


def test_bytes_grow_with_the_experts_and_centroids_that_a_batch_chooses():
    target, assistant = pair("26b")
    # 5 rows choose 35.3 of 128 experts: 22,837,985,280 weights of all experts, 2,395,156,510 others, of 2 bytes.
    five = roofline.step_bytes(target, assistant, batch=1, num_draft_tokens=4, context=0)
    assert five.target == pytest.approx(2 * (2_395_156_510 + 22_837_985_280 * (1 - (15 / 16) ** 5)))
    assert traffic.expected_distinct(8, 128, 5) == pytest.approx(35.3, abs=0.05)
    many = roofline.step_bytes(target, assistant, batch=64, num_draft_tokens=4, context=0)
    assert many.target / 2 == pytest.approx(25_233_141_790, rel=1e-6)
    # A centroid head reads 128 rows of 256 bfloat16 and their ids for each of the 32 centroids of a sequence.
    target, assistant = pair("e2b")
    rest = 77_993_476 - 262_144 * 257
    for batch, centroids in ((1, 32), (32, 2048 * (1 - (63 / 64) ** 32))):
        size = roofline.step_bytes(target, assistant, batch=batch, num_draft_tokens=1, context=0).drafter
        assert size == pytest.approx(2 * rest + centroids * 128 * (2 * 256 + 4))


def test_bytes_of_other_drafters():
    target, _ = pair("31b")

    def read(name: str, k: int):
        drafter = released.abstract_drafter(name, "31b", target.config, jnp.bfloat16)
        size = roofline.step_bytes(target, drafter, batch=2, num_draft_tokens=k, context=3000)
        return size.drafter, size.drafter_kv

    head = 2 * 262_144 * 5376
    # One pass whatever K, over 1.54 B weights and the target's head; K and V of 8 heads of 128, four layers with a window of 2,048.
    taps, layer = 6 * 5376 * 5376, 2 * 64 * 128 * 5376 + 2 * 8 * 128 * 5376 + 3 * 5376 * 10_752 + 2 * 5376 + 2 * 128
    assert read("dflash", 15) == read("dflash", 4) == (2 * (taps + 5 * layer + 2 * 5376) + head, 2 * 4 * 8 * 128 * (4 * 2048 + 3000))
    # The features once, a layer (that reads embeddings too) and a head of 32,000 K times; d2t is of 4 bytes.
    layer = (32 + 2 * 8) * 128 * 2 * 5376 + 32 * 128 * 5376 + 3 * 5376 * 4 * 5376 + 3 * 5376
    each = 2 * (layer + 5376 + 32_000 * 5376) + 4 * 32_000
    assert read("eagle3", 3) == (2 * 3 * 5376 * 5376 + 3 * each, 2 * 3 * 4 * 8 * 128 * 3000)
    # E2B's weights and its cache, of which sliding layers see 512 positions, K times.
    assert read("e2b", 2) == (2 * 2 * 2_279_759_139, 2 * 2 * (12_288 * 512 + 6_144 * 3000))
    # A sliding layer of the target's, [H, 2 H], norms and a head for each draft.
    module = 2 * (3 * 5376 * 21_504 + 4 * 8192 * 5376 - 2 * 4096 * 5376 + 4 * 5376 + 2 * 256 + 1 + 2 * 5376 * 5376 + 3 * 5376) + head
    assert read("modules", 6) == (6 * module, 2 * 6 * 16_384 * 1024)
    # One pass over five layers that see all, with a head of 32,000 tokens, and of the Markov head what gives logits once a draft.
    layer = 2 * 32 * 256 * 5376 + 2 * 16 * 256 * 5376 + 3 * 5376 * 21_504 + 2 * 5376 + 2 * 256
    once = 2 * (5 * 5376 * 5376 + 5 * layer + 2 * 5376 + 32_000 * 5376) + 4 * 32_000
    assert read("dspark", 7) == (once + 7 * 2 * 32_000 * 256, 2 * 2 * 5 * 2 * 16 * 256 * 3000)
    # DFlash's with five taps, ten convolutions and the selector's projection, and 17 rows of its codebooks for each of 30 drafts.
    layer = 2 * 64 * 128 * 5376 + 2 * 8 * 128 * 5376 + 3 * 5376 * 10_752 + 2 * 5376 + 2 * 128 + 2 * (4 * 5376 + 1344 * 5376)
    weights = 2 * (5 * 5376 * 5376 + 5 * layer + 2 * 5376 + 256 * 5376) + head
    assert read("dflash2", 15) == (weights + 2 * 15 * 17 * 256 * 2, 2 * 4 * 8 * 128 * (4 * 2048 + 3000))
    assert read("ngram", 4) == read("none", 0) == (0, 0)


# The named shapes that are of one family, and what guesses for a target of the other, beside itself.
STEP = {"step3p5", "step3p5-15"}
OF_ANY = {"none", "ngram", "eagle3", "modules"}


@pytest.mark.parametrize("shape", released.TARGETS)
def test_every_named_drafter_fits_the_targets_that_it_is_there_for(shape):
    """The others say so: there is none for this target, its vocabulary is another, or it was made for layers of another kind or number."""
    made, config = set(), released.target_config(shape)
    refusals = (
        "is there for config",
        "the draft model has vocab_size",
        "modules for this target have",
        "for a target of num_hidden_layers",
    )
    for name in released.drafter_names():
        try:
            released.abstract_drafter(name, shape, config, jnp.bfloat16)
        except ValueError as error:
            assert any(refusal in str(error) for refusal in refusals), error
        else:
            made.add(name)
    published = {"12b": {"dspark"}, "26b": {"dflash"}, "31b": {"dflash", "dflash2", "dspark"}}
    gemma = set(released.drafter_names()) - STEP - ({"dflash", "dflash2", "dspark"} - published.get(shape, set()))
    assert made == (OF_ANY | {shape} if shape in STEP else gemma)


def test_a_step_of_experts_behind_dense_layers():
    """The bytes of Step-3.5-Flash by its published sizes: what every row reads, the experts that random rows choose, three modules."""
    target = abstract_target(released.target_config("step3p5"), jnp.bfloat16)
    modules = released.abstract_drafter("modules", "step3p5", target.config, jnp.bfloat16)
    size = roofline.step_bytes(target, modules, batch=8, num_draft_tokens=3, context=4096)
    assert released.abstract_drafter("same", "step3p5", target.config, jnp.bfloat16) == modules
    experts = 42 * 288 * (1 - (1 - 8 / 288) ** 32) * 2 * 15_728_640
    assert size.target == pytest.approx(12.35e9 + experts, rel=1e-3) and size.target == pytest.approx(238.4e9, rel=1e-3)
    assert size.drafter == pytest.approx(3 * 1.619e9, rel=1e-3)
    assert size.target_kv == 8 * 4096 * (12 * 4096 + 33 * 512) and size.drafter_kv == 8 * 3 * 4096 * 512


def test_operations_of_a_prompt():
    config = Gemma4Config.from_hf({**tiny.TARGET, "text_config": {**tiny.TEXT, "hidden_size_per_layer_input": 0}})
    target = gemma4.abstract(config)
    # q and kv or k, o, and the three matrices of the feed-forward, of a sliding and a full layer: 32 wide.
    sliding = 32 * (2 * 8 + 2 * 8) + 16 * 32 + 3 * 32 * 48
    full = 32 * (2 * 16 + 16) + 32 * 32 + 3 * 32 * 48
    attention = 4 * 2 * 8 * (36 + 2 * 8) + 4 * 2 * 16 * 55  # 10 rows; the window is 8
    assert roofline.prefill_flops(target, 10, taps=(2,)) == 2 * 10 * (sliding + full) + attention + 2 * 32 * 4096
    last_row = 2 * (10 * sliding + full + 9 * 32 * 16) + 4 * 2 * 8 * (36 + 2 * 8) + 4 * 2 * 16 * 10  # but for the k of the full layer
    assert roofline.prefill_flops(target, 10) == last_row + 2 * 32 * 4096
    seen = 4 * 2 * 8 * 8 + 4 * 2 * 16 * 55
    step = roofline.step_flops(target, batch=2, num_draft_tokens=4, context=55)
    assert step == 2 * 5 * (2 * (sliding + full) + seen + 2 * 32 * 4096)
    # Of 128 experts a row is multiplied with 8: 3.8 of 25.2 billion weights, the embedding as the head.
    moe = roofline.step_flops(pair("26b")[0], batch=1, num_draft_tokens=0, context=0)
    assert moe == pytest.approx(2 * (2_395_156_510 + 22_837_985_280 * 8 / 128), rel=1e-3)


def test_only_the_last_row_goes_on_once_all_keys_are_there():
    text = {**tiny.TEXT, "hidden_size_per_layer_input": 0, "attention_k_eq_v": False, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    text["layer_types"] = tiny.TEXT["layer_types"] * 2
    target = gemma4.abstract(Gemma4Config.from_hf({**tiny.TARGET, "text_config": text}))
    sliding, full = 2 * (2 * 32 * 16 + 3 * 32 * 48), 2 * (2 * 32 * 32 + 3 * 32 * 48)  # without K and V
    seen = 4 * 2 * 8 * 8 + 2 * 4 * 2 * 16 * 10
    all_rows = roofline.prefill_flops(target, 10, taps=(2,))
    seen_by_all = 4 * 2 * 8 * (36 + 2 * 8) + 2 * 4 * 2 * 16 * 55
    assert all_rows - roofline.prefill_flops(target, 10) == 9 * (sliding + 2 * full) + seen_by_all - seen


def test_random_weights():
    config = Gemma4Config.from_hf({**tiny.TARGET, "text_config": {**tiny.TEXT, "enable_moe_block": True, **MOE}})
    trees = gemma4.abstract(config), gemma4_mtp.abstract(AssistantConfig.from_hf(tiny.ASSISTANT))
    target, drafter = random_weights.random_weights(trees)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (target, drafter)) == jax.tree.map(lambda x: (x.shape, x.dtype), trees)
    for ones in (target.norm.weight, target.layers[0].layer_scalar, target.layers[0].router.per_expert_scale):
        assert (ones == 1).all()
    assert (drafter.masked_embedding.token_ordering == jnp.arange(tiny.VOCAB)).all()
    table = np.asarray(target.embed_tokens.weight, np.float32)
    assert abs(table.mean()) < 3e-4 and table.std() == pytest.approx(0.02, rel=0.01)
    assert np.abs(np.corrcoef(table[:, :8].T) - np.eye(8)).max() < 0.1
    gates = [np.asarray(layer.mlp.gate_up_proj.weight, np.float32) for layer in target.layers]
    assert (gates[0] != gates[1]).mean() > 0.9


MOE = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and an assistant of which there is only config.json."""
    root = tmp_path_factory.mktemp("shapes")
    for name, config in (("target", tiny.TARGET), ("assistant", tiny.ASSISTANT)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def test_a_run_from_end_to_end(folders, capsys, monkeypatch):
    used, without, traced = iter([True, False, False]), cuda_graphs.without, []
    monkeypatch.setattr(cuda_graphs, "used_on", lambda devices: next(used))  # as if the greedy run's were a GPU
    monkeypatch.setattr(cuda_graphs, "without", lambda *args: traced.append(args) or without(*args))
    model = ["--config", str(folders / "target"), "--drafter", str(folders / "assistant"), "--dtype", "float32", "--k", "2"]
    work = ["--batch", "4", "--context", "20", "--tokens", "40", "--acceptance", "0.9,0.5", "--prefill", "24", "--prefill-chunk", "16"]
    work += ["--temperature", "0,0.8", "--top-k", "9", "--top-p", "0.9", "--structured", "5"]
    out = ["--repeats", "2", "--json", str(folders / "out.json"), "--profile", str(folders / "trace")]
    written, write = [], bench_report.write_json
    monkeypatch.setattr(bench_report, "write_json", lambda found, path: written.append((found.decode, found.prefill)) or write(found, path))
    compiled = []  # seconds that XLA took for each loop

    def listen(event, seconds, **more):
        if event.endswith("backend_compile_duration") and "flat_call" in more.get("fun_name", ""):
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    assert cli.main(["bench", *model, *work, *out]) == 0
    report = json.loads((folders / "out.json").read_text())
    (greedy, step), (prompt,) = report["decode"], report["prefill"]
    assert (greedy["temperature"], step["temperature"]) == (0.0, 0.8) and greedy["steps"] == step["steps"]
    # Twice ceil(40 / 2.4) rounds, and two more, of 4 sequences: the mean of 152 draws of 1, 2 or 3 tokens with deviation 0.66.
    assert step["steps"] == 34
    assert step["acceptance_length"] == pytest.approx(2.4, abs=0.2)
    assert 20 + 1 + 9 + 19 < step["context"] < 20 + 1 + 27 + 57
    assert 0 < step["step_ms"]["min"] <= step["step_ms"]["median"] <= step["step_ms"]["max"]
    assert step["tokens_per_s"] == pytest.approx(4e3 * step["acceptance_length"] / step["step_ms"]["median"])
    needs = sum(step["bytes"].values()) / report["copy_bytes_per_s"], step["flops"] / report["matmul_flops_per_s"]
    assert step["floor_ms"] == pytest.approx(1e3 * max(needs))
    assert step["ratio"] == pytest.approx(step["step_ms"]["median"] / step["floor_ms"])
    for cell in (greedy, step):
        assert any(took <= cell["loop"]["compile_s"] < took + 0.5 for took in compiled)
    assert report["jax"] == jax.__version__
    # Where there are CUDA graphs, a program without them is traced. Its operations are counted by round.
    assert len(traced) == 1
    for cell in (greedy, step):
        assert 1.0 in {kernel["count"] for kernel in cell["kernels"] if kernel["operation"].startswith("verify/")}
        assert cell["context"] < cell["traced_context"]
    assert prompt["tokens_per_s"] == pytest.approx(24e3 / prompt["ms"]["median"])
    products = [kernel["count"] for kernel in prompt["kernels"] if "dot_general" in kernel["operation"]]
    assert products and all(count % 2 == 0 for count in products)  # 24 tokens are two calls
    printed = capsys.readouterr().out
    assert [tuple(map(len, known)) for known in written] == [(0, 0), (1, 0), (2, 0), (2, 1)]  # each as soon as it is known
    assert printed.count("batch  temp") == printed.count("prompt  chunk") == 1
    for wanted in (
        "where a temperature is, top_k 9 and top_p 0.9",
        "acceptance 0.9, 0.5",
        f"{step['step_ms']['median']:8.3f}",
        f"{prompt['ms']['median']:8.2f}",
        f"traced at a context of {step['traced_context']:.0f}",
        "kernels of a step",
        "kernels of a prompt",
    ):
        assert wanted in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "70b"], "config '70b' is neither a folder"),
        (["--config", "e2b", "--drafter", "medusa"], "drafter 'medusa' is neither a folder"),
        (["--config", "pocket", "--drafter", "same"], "drafter is 'same', but the config.json in "),
        (
            ["--config", "pocket", "--drafter", "mtp"],
            "drafter 'mtp' is there for config e2b, e4b, 12b, 26b, 31b; for 'pocket' name a folder",
        ),
        (["--config", "e2b", "--drafter", "dflash"], "drafter 'dflash' is there for config 26b, 31b; for 'e2b' name a folder"),
        (["--config", "pocket", "--k", "2"], "num_draft_tokens is 2 but there is no drafter; expected 0, or a drafter"),
        (["--config", "pocket", "--drafter", "pocket-mtp", "--k", "5"], "synthetic acceptance has 4 rates for 5 drafts"),
        (["--config", "pocket", "--acceptance", "0.5,0.7"], "rates[1] is 0.7, expected at most 0.5"),
        (["--config", "pocket", "--acceptance", "typical"], "accept is 'typical'; available: 'coupled', 'standard', 'block'"),
        (["--config", "pocket", "--temperature", "1e39"], "temperature is 1e+39, expected a finite number of at least 0 and at most 1e+30"),
        (["--config", "pocket", "--top-k", "-1"], "top_k is -1, expected at least 0"),
        (["--config", "pocket", "--top-k", "99999999999"], "top_k is 99999999999, expected 0 .. 2147483647"),
        (["--config", "pocket", "--top-p", "0"], "top_p is 0.0, expected more than 0 and at most 1"),
        (["--config", "pocket", "--dtype", "float16"], "dtype is 'float16'; available: 'float32', 'bfloat16'"),
        (["--config", "pocket", "--temperature", "-1"], "temperature is -1.0, expected a finite number of at least 0"),
        (["--config", "pocket", "--draft-attention", "flash"], "draft_attention is 'flash'; available: 'auto', 'xla', "),
        (["--config", "pocket", "--attention", "triton"], "attention is 'triton', but the device is a CPU"),
        (["--config", "pocket", "--rows", "0"], "rows is 0, expected at least 1"),
        (["--config", "pocket", "--tree", "7"], "the drafter NoDraft drafts one token after the other and no tree"),
        (["--config", "pocket", "--drafter", "pocket-mtp", "--tree", "7", "--k", "4"], "num_draft_tokens is 4 and tree is given too"),
        (["--config", "pocket", "--drafter", "pocket-mtp", "--tree", "99"], "the tree has 99 nodes; expected 2 .. 31"),
        (
            ["--config", "pocket", "--drafter", "pocket-mtp", "--tree", "2", "--acceptance", "0.9,0.8"],
            "the acceptance rule is 'synthetic'",
        ),
        (["--config", "pocket", "--rows", "2"], "rows is 2 for 1 sequences of 0 drafts; expected 1 .. 1: one for each sequence"),
        (
            [
                "--config",
                "pocket",
                "--drafter",
                "pocket-mtp",
                "--tokens",
                "8",
                "--context",
                "64",
                "--batch",
                "8",
                "--rows",
                "9",
                "--acceptance",
                "block",
            ],
            "rows is 9 and the acceptance rule is 'block', which needs a row for each draft; expected 'coupled'",
        ),
        (["--config", "pocket", "--repeats", "0"], "repeats is 0, expected at least 1"),
        (["--config", "pocket", "--batch", "8,0"], "batch is 0, expected at least 1"),
        (["--config", "e2b", "--context", "131000"], "context 131000 and 3 timed calls of 128 steps may take 131411 positions; the config"),
    ],
)
def test_what_the_user_got_wrong(capsys, options, message):
    assert cli.main(["bench", *options]) == 2
    assert capsys.readouterr().err.startswith(f"jaxspec: {message}")


@pytest.mark.parametrize("options", [["--batch", "1,two"], ["--prefill", ""], ["--acceptance", "0.5,high"]])
def test_options_that_are_no_numbers(capsys, options):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--config", "pocket", *options])
    assert stopped.value.code == 2
    assert f"argument {options[0]}: found {options[1]!r}, expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sampling", "scope"),
    [
        ({"top_k": 64, "top_p": 0.95}, "plain"),  # greedy
        ({"temperature": 1.0}, "plain"),
        ({"temperature": 1.0, "top_k": 64, "top_p": 0.95}, "top"),
        ({"temperature": 1.0, "top_k": 129}, "search"),
        ({"temperature": 1.0, "top_p": 0.95}, "search"),
    ],
)
def test_filters_that_do_nothing_are_not_compiled(sampling, scope):
    assert workload.Workload(4, COUPLED, **sampling).round.needs.scope == scope


def test_a_round_of_few_rows_reads_and_computes_less():
    target, drafter = pair("26b")
    shape = {"batch": 8, "num_draft_tokens": 15, "context": 512}
    whole, few = (roofline.step_flops(target, **shape, rows=rows) for rows in (None, 32))
    assert whole == pytest.approx(4 * few)
    sizes = [roofline.step_bytes(target, drafter, **shape, rows=rows) for rows in (None, 128, 32)]
    assert sizes[0] == sizes[1] and sizes[2].target < sizes[0].target and sizes[2].target_kv == sizes[0].target_kv


def test_a_step_reads_guides_in_place_of_heads():
    """Not where filters of many rows or an acceptance rule need all logits of the target."""

    def read(batch=1, **settings):
        plan = workload.plan_bench("pocket", "pocket-draft", num_draft_tokens=3, context=64, tokens=32, **settings)
        trees = plan.read(4 * batch)
        return [has_guide(tree) for tree in trees], roofline.step_bytes(*trees, batch=batch, num_draft_tokens=3, context=64)

    filters = {"head_guide": True, "temperature": 1.0, "top_k": 64}
    (none, whole), (both, few) = read(head_guide=False), read(head_guide=True)
    assert (none, both) == ([False, False], [True, True])
    assert few.target < whole.target and few.drafter < whole.drafter
    assert read(**filters) == (both, few)
    of_drafter, some = read(**filters, acceptance="standard")
    assert of_drafter == [False, True] and (some.target, some.drafter) == (whole.target, few.drafter)
    assert read(2, **filters)[0] == both and read(3, **filters)[0] == of_drafter  # 8 and 12 rows
    assert read(**filters | {"top_k": 129})[0] == of_drafter


def test_a_plan_says_how_a_checkpoint_is_quantised(tmp_path):
    asked = {"quantize": "int4", "quantize_drafter": "int8"}
    pair = jaxspec.convert("pocket", tmp_path / "pair", drafter="pocket-mtp", progress=False, **asked)
    settings = {"context": 16, "tokens": 8, "batches": (1,)}
    of_folder = workload.plan_bench(str(pair), str(pair / "drafter"), **settings)
    of_floats = workload.plan_bench("pocket", "pocket-mtp", **settings)
    assert (of_folder.quantize, of_folder.quantize_drafter) == ("int4", "int8")
    assert (of_floats.quantize, of_floats.quantize_drafter) == (None, None)


def test_a_round_of_a_tree_has_a_row_for_each_node():
    plan = workload.plan_bench("pocket", "pocket-mtp", tree=7, batches=(4,), context=64, tokens=32)
    assert plan.work.round == Round(3, tree=DraftTree.default(7)) and plan.work.rows_each == 8
    assert plan.work.num_draft_tokens == 3 and plan.work.accept.name == "coupled"


def test_rows_are_dealt_out_to_data_shards():
    settings = {"num_draft_tokens": 3, "batches": (8,), "context": 64, "mesh": jaxspec.mesh(data=2)}
    assert workload.plan_bench("pocket", "pocket-mtp", rows=20, **settings).work.round.rows == 10
    with pytest.raises(ValueError, match="rows is 19 and the mesh has 2 data shards; expected a multiple of 2"):
        workload.plan_bench("pocket", "pocket-mtp", rows=19, **settings)


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_made(capsys, monkeypatch):
    monkeypatch.setattr("jaxspec.bench.workload.MEMORY_FRACTION", 1e-6)
    assert cli.main(["bench", "--config", "31b", "--drafter", "mtp", "--batch", "1,8"]) == 2
    message = capsys.readouterr().err
    assert "31b needs 65.13 GiB: target 57.18, drafter 0.87, 8 slots of 1134 positions 7.08" in message and "cpu has 0.00" in message


def test_kernels_are_added_up_by_what_they_compute(monkeypatch, tmp_path):
    """Kernels of a GPU's trace, by the instruction that each names, or by a name that is an instruction's."""
    program = """
  %gemm_fusion_dot.7 = bf16[5,16]{1,0} fusion(%a), metadata={op_name="jit(decode_loop)/while/body/verify/dot_general" source_line=1}
  ROOT %gemm_fusion_dot.12 = (bf16[5,16]{1,0}, s8[64]{0}) custom-call(), metadata={op_name="jit(f)/while/body/verify/dot_general"}
  %gemm_fusion_dot.20 = bf16[5,8]{1,0} fusion(%a), metadata={op_name="jit(decode_loop)/while/body/draft/dot_general"}
"""
    (tmp_path / "a.xplane.pb").touch()
    events = [
        ("gemm_fusion_dot_7", {}, 1e6),
        ("gemm_fusion_dot_12", {"hlo_op": "gemm_fusion_dot.12"}, 3e6),
        ("nvjet_tst", {"hlo_op": "gemm_fusion_dot.20"}, 10e6),
        ("MemcpyD2D", {}, 2e6),
    ]
    trace = Trace([("Stream #1(Compute)", events), ("XLA Ops", events)])
    monkeypatch.setattr(jax.profiler, "ProfileData", Named("ProfileData", from_file=lambda path: trace))
    found = kernel_times.read_trace(tmp_path, program, 2)
    assert [(k.kernel, k.operation, k.ms, k.count) for k in found] == [
        ("nvjet_tst", "draft/dot_general bf16[5,8]", 5.0, 0.5),
        ("gemm_fusion_dot", "verify/dot_general bf16[5,16]", 2.0, 1.0),
        ("MemcpyD2D", "", 1.0, 0.5),
    ]
    kernels = "kernels of a step: 8.000 ms in all, without CUDA graphs; a step takes"
    columns = f"{'ms':>9} {'share':>6} {'count':>7} {'us each':>9}  kernel: operation"
    for step_ms in (7.0, 9.4):
        lines = list(kernel_times.kernel_lines(found, step_ms))
        assert lines[:2] == [f"{kernels} {step_ms:.3f} ms, the ratio is {8 / step_ms:.2f}", columns]
    with pytest.raises(RuntimeError, match="left no trace"):
        kernel_times.read_trace(tmp_path / "none", program, 2)


@pytest.mark.parametrize(
    ("step_ms", "ratio", "reasons"),
    [
        # A loop of 20 rounds that is one CUDA graph, of which a profiler sees one round.
        (40.0, "0.05", "a step waits between kernels, or kernels are missing in the trace"),
        (1.5, "1.33", "those of a step overlap more than the trace's, or were slower in the trace"),
    ],
)
def test_kernels_that_do_not_add_up_to_the_step_are_no_table_to_trust(step_ms, ratio, reasons):
    kernels = [kernel_times.KernelTime("gemm", "verify/dot_general bf16[5,16]", 2.0, 1.0)]
    first, second, *_ = kernel_times.kernel_lines(kernels, step_ms)
    assert first.endswith(f"a step takes {step_ms:.3f} ms, the ratio is {ratio}")
    assert second == f"the kernels do not add up to the step, within 15%: {reasons}"


class Named:
    def __init__(self, name, **fields):
        self.name = name
        self.__dict__.update(fields)


class Trace:
    def __init__(self, lines):
        made = [Named(name, events=[Named(n, stats=stats.items(), duration_ns=ns) for n, stats, ns in events]) for name, events in lines]
        self.planes = [Named("/host:CPU", lines=[]), Named("/device:GPU:0", lines=made)]


def test_no_random_weight_is_infinite():
    """Billions are drawn: the rarest bits come up too."""
    drawn = np.asarray(random_weights.normal_of(jnp.asarray([0, 1, 2**31, 2**32 - 2, 2**32 - 1], jnp.uint32)))
    assert np.isfinite(drawn).all() and drawn[0] == -drawn[-1] and 5 < drawn[-1] < 6
