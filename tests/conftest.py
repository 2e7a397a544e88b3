"""What every test runs under: 8 fake CPU devices, strict dtype promotion, no rank promotion, float32 products in float32.

JAXSPEC_TEST_PLATFORM=gpu (set by `make test-gpu`) leaves the GPU in sight for tests marked `gpu`. These are all in the folder gpu; the
others, some of which need torch, are not even read.
"""

import gc
import importlib.metadata
import os
import signal
import sys
from pathlib import Path

import hypothesis

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu"}

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could choose its devices: find the pytest plugin that imports it")
# Some tests interrupt themselves. Processes that a shell starts in the background ignore that, unless told otherwise.
signal.signal(signal.SIGINT, signal.default_int_handler)
platform = os.environ.get("JAXSPEC_TEST_PLATFORM", "cpu")
if platform not in PLATFORMS:
    raise ValueError(f"JAXSPEC_TEST_PLATFORM is {platform!r}, expected one of {sorted(PLATFORMS)}")
folders = [path.name for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name != "gpu"]
collect_ignore_glob = ["test_*.py", *folders] if platform == "gpu" else []
# In the environment rather than in jax.config, so that the command line's tests hand them on to their processes.
os.environ["JAX_PLATFORMS"] = PLATFORMS[platform]
flags = ["--xla_force_host_platform_device_count=8"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # XLA's older code generator compiles faster; later releases have it no more. Programs are too small to be cut up and compiled in parts.
    flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), *flags]))
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches for a hub, not even by mistake
# Compiled programs are kept from run to run, and the processes that tests start share them. JAX is told no limit of size: with one it reads
# the whole folder under a lock for each program that it adds, and adds none any more once a process without the limit has added one.
CACHE, CACHE_BYTES = Path(__file__).parent.parent / ".cache" / "xla", 2**31
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_traceback_in_locations_limit", 0)  # programs are lowered sooner without a traceback for every operation

# Tracing makes many objects and hardly any garbage: look for it once in 50,000 objects rather than in 700.
gc.freeze()
gc.set_threshold(50_000, 10, 10)

# The same examples every time, and no limit on how long one takes: the first call of a jitted function compiles it.
hypothesis.settings.register_profile("jaxspec", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jaxspec")


# Of which each takes one process ten seconds or more: begun last, one of them would leave the other processes idle.
LONG = """
step3p5_doors llm structured decode_loop mesh_tokens every_kind completions paged_attention losses round_shape lossless
packed_products learning step3p5_modules quantised vllm cli readme dspark bench tuning lowering sharding structured_kinds gemma4_parity
draft_model learning_kinds mtp_modules automata ngram learn step3p5_parity calls verification requests tree_requests generator info
quantised_drafters in_place assistant quantize_embedding quantize_activations quantised_target
""".split()


def pytest_configure(config):
    """Once in a run, forgets the programs that were added longest ago if all take too much room."""
    if hasattr(config, "workerinput") or not CACHE.exists():
        return
    room = CACHE_BYTES
    for path in sorted((path for path in CACHE.iterdir() if path.is_file()), key=lambda path: path.stat().st_mtime, reverse=True):
        room -= path.stat().st_size
        if room < 0:
            path.unlink(missing_ok=True)


def pytest_collection_modifyitems(items):
    """The files that take longest come first."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


@pytest.fixture(autouse=True, scope="session")
def processes_without_torch():
    """Those that tests start; not those of pytest-xdist, which are there before any test begins."""
    folders = [str(Path(__file__).parent / "alone"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The checkpoints of a tiny target and of its assistant, which no test changes."""
    import tiny

    root = tmp_path_factory.mktemp("models")
    return tiny.tiny_target(root / "target"), tiny.tiny_assistant(root / "assistant")


@pytest.fixture(scope="module")
def unoptimised():
    """Code that compiles in half the time and computes the same, more slowly: for modules whose models are tiny."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def quick_to_compile(unoptimised):
    """Such code, and few programs: for modules that run whole engines."""
    from quick import few_programs

    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


@pytest.fixture(scope="module")
def shared_programs():
    """Programs that LLMs of a module share: for modules that load many alike, and whose tests replace no code that programs are made of."""
    import quick

    with pytest.MonkeyPatch.context() as patch:
        quick.shared_programs(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module():
    """Drops a module's compiled programs at its end: a process may have only so many memory maps (65,530 on Linux by default), each
    program takes some, and the compiler crashes when there are no more."""
    yield
    jax.clear_caches()
