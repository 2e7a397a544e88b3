"""Compiles every kernel and one `spec_step` for GPUs that need not be there: `python -m jaxspec.compile_check`.

Where JAX's CUDA plug-in and its compiler are installed (`pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm`,
the first two with --no-deps and of jaxlib's version), programs are compiled to the end for a device that is described in numbers.
Printed are the shared memory, registers and spilled bytes of each kernel, the most of all its shapes, and the memory of a step.
Without the plug-in programs are lowered for CUDA, which finds what the Triton dialect refuses. Nothing runs, and nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import glob
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEPS = ("pocket", "e2b", "26b", "31b")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA asks of a device, from its vendor's data sheet and CUDA's table of technical specifications. memory: bytes; bandwidth:
    bytes a second; shared: bytes of a multiprocessor, of which a program may use 1 KiB less where it may use more than 64 KiB."""

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    threads: int
    shared: int
    l2: int
    memory: int
    bandwidth: int
    clock_ghz: float

    @property
    def program_shared(self) -> int:
        return self.shared if self.shared <= 65_536 else self.shared - 1024

    def description(self) -> str:
        """The device as text of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.program_shared}
  shared_memory_per_core: {self.shared}
  threads_per_core_limit: {self.threads}
  core_count: {self.multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.kind}"
"""


GPUS = {
    "t4": Gpu("Tesla T4", (7, 5), 40, 1024, 64 << 10, 4 << 20, 15 * 10**9, 320 * 10**9, 1.59),
    "a100": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 2048, 164 << 10, 40 << 20, 40 * 10**9, 1555 * 10**9, 1.41),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 1536, 100 << 10, 48 << 20, 23 * 10**9, 300 * 10**9, 2.04),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 2048, 228 << 10, 50 << 20, 141 * 10**9, 4800 * 10**9, 1.98),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program. args: trees of ShapeDtypeStructs. donate: which of them it may overwrite."""

    kernel: str
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def kernel_cases() -> Iterator[Case]:
    """Every kernel at the named shapes of its package, through its public function, in bfloat16."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import add_norm, centroid_head, linear, lm_head, moe, paged_attention, qkv, top_candidates
    from pallas_kernels.add_norm import bench as add_norm_bench
    from pallas_kernels.add_norm import shapes as add_norm_shapes
    from pallas_kernels.centroid_head import shapes as centroid_head_shapes
    from pallas_kernels.linear import shapes as linear_shapes
    from pallas_kernels.lm_head import shapes as lm_head_shapes
    from pallas_kernels.moe import shapes as moe_shapes
    from pallas_kernels.paged_attention import bench as attention_bench
    from pallas_kernels.paged_attention import shapes as attention_shapes
    from pallas_kernels.top_candidates import shapes as top_candidates_shapes

    dtype, kernel = jnp.bfloat16, {"implementation": "triton"}

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    for name, shape in attention_shapes.SHAPES.items():
        function = functools.partial(paged_attention.paged_attention, causal=shape.causal, window=shape.window, **kernel)
        for batch in (1,) if shape.queries > 64 else (1, 32):
            args: Any = jax.eval_shape(functools.partial(attention_bench.arguments, shape, batch, 4096))
            yield Case("paged_attention", f"{name} x {batch}", function, args)
            q, positions, pools, *others, _ = args
            pools = jax.tree.map(lambda pool: array(*pool.shape, dtype=jnp.float8_e4m3fn), pools)
            yield Case("paged_attention", f"{name} x {batch}, fp8", function, (q, positions, pools, *others, array(2, dtype=jnp.float32)))
    heads = {(s.kv_heads, s.group, s.head_dim, s.rotary, s.fresh * (1 if s.rotary else 2)) for s in attention_shapes.SHAPES.values()}
    for kv_heads, group, width, rotary, owned in sorted(heads):
        pools = [array(8, attention_shapes.PAGE, kv_heads, dims) for dims in (rotary or width, width)]
        one = array(1, dtype=jnp.int32)
        pages: Any = (*pools, array(1, 8, dtype=jnp.int32), one, one)
        turns = [array(1, 5, width // 2, dtype=jnp.float32)] * 2
        weights = array(width), array(width) if owned else None
        function = functools.partial(qkv.qkv, group=group, key_dims=rotary or width, eps=1e-6, **kernel)
        args = (array(1, 5, kv_heads, group + owned, width), *turns, *weights, qkv.Pages(*pages) if owned else None)
        yield Case("qkv", f"{kv_heads} x {group} + {owned} of {width}", function, args)
    for name, shape in add_norm_shapes.SHAPES.items():
        x, y, weight, scalar, after = jax.eval_shape(functools.partial(add_norm_bench.inputs, shape, dtype))
        function = functools.partial(_add_norm, add_norm.add_norm)
        yield Case("add_norm", name, function, (x, y, weight, scalar, after))
    for name, shape in linear_shapes.SHAPES.items():
        for rows in (5, 40):
            function = functools.partial(getattr(linear, shape.kind), **kernel)
            yield Case("linear", f"{name} x {rows}", function, shape.arguments(rows, dtype))
    for name, shape in lm_head_shapes.SHAPES.items():
        sampling = array(shape.rows, 2, dtype=jnp.uint32), array(shape.rows, dtype=jnp.float32)
        function = functools.partial(lm_head.lm_head, softcap=shape.softcap, **kernel)
        yield Case("lm_head", name, function, (array(shape.rows, shape.hidden), array(shape.vocab, shape.hidden), *sampling))
    for name, shape in centroid_head_shapes.SHAPES.items():
        ordering = array(shape.vocab, dtype=jnp.int32)
        args = array(shape.rows, shape.hidden), array(shape.centroids, shape.hidden), ordering, array(shape.vocab, shape.hidden)
        sampling = array(shape.rows, 2, dtype=jnp.uint32), array(shape.rows, dtype=jnp.float32)
        yield Case("centroid_head", name, functools.partial(centroid_head.candidates, top_k=shape.top_k, **kernel), args)
        yield Case("centroid_head", name, functools.partial(centroid_head.choose, top_k=shape.top_k, **kernel), (*args, *sampling))
    for name, shape in moe_shapes.SHAPES.items():
        yield Case("moe", name, functools.partial(_experts, moe, shape.top_k), shape.layer(dtype))
    for name, shape in top_candidates_shapes.SHAPES.items():
        function = functools.partial(top_candidates.top_candidates, k=shape.k, **kernel)
        yield Case("top_candidates", name, function, (array(shape.rows, shape.vocab, dtype=jnp.float32),))


def _add_norm(add_norm: Any, x: Any, y: Any, weight: Any, scalar: Any, next_weights: Any) -> Any:
    return add_norm(x, y, weight, scalar=scalar, next_weights=next_weights, eps=1e-6, implementation="triton")


def _experts(moe: Any, top_k: int, x: Any, gate_up: Any, down: Any, scores: Any, scale: Any) -> Any:
    weights, ids, groups = moe.route(scores, scale, top_k, implementation="triton")
    return moe.experts(x, gate_up, down, weights, ids, groups, implementation="triton")


def step_case(name: str, dtype: str) -> Case:
    """`spec_step` of a model and its assistant at one sequence and K = 4. dtype: "auto" is the current device's default."""
    import jax
    import jax.numpy as jnp

    from jaxspec import checkpoint, decode, gemma4, shapes
    from jaxspec.config import AssistantConfig, Gemma4Config
    from jaxspec.drafters import gemma4_mtp
    from pallas_kernels import device

    if name == "pocket":
        configs = [checkpoint.read_config(checkpoint.resolve(folder)) for folder in ("pocket", "pocket-mtp")]
    else:
        configs = [shapes.TARGETS[name], shapes.ASSISTANTS[name]]
    config, assistant = Gemma4Config.from_hf(configs[0]), AssistantConfig.from_hf(configs[1])
    numbers = jnp.dtype(device.float_dtype(config.dtype) if dtype == "auto" else dtype)
    target, drafter = gemma4.abstract(config, numbers), gemma4_mtp.abstract(gemma4_mtp.bind(assistant, config), numbers)
    settings = {"slots": 1, "max_len": 4096, "num_draft_tokens": 4}
    state = jax.eval_shape(functools.partial(decode.init_state, **settings), target, drafter)
    step = functools.partial(decode.spec_step, num_draft_tokens=4)
    return Case("step", f"{name}, {numbers.name}", step, (target, drafter, state, jax.ShapeDtypeStruct((1,), jnp.int32)), donate=(2,))


@dataclasses.dataclass
class Figures:
    """Of a kernel, the most of all programs. programs: how many hold it. None where they were only lowered."""

    programs: int = 0
    shared: int | None = None
    registers: int | None = None
    spilled: int | None = None

    def add(self, **found: int) -> None:
        for name, value in found.items():
            setattr(self, name, max(getattr(self, name) or 0, value))


class Compiler:
    """Compiles for one GPU. dump: where XLA leaves what it makes, or None where no plug-in is and programs are lowered alone."""

    def __init__(self, gpu: Gpu, dump: Path | None):
        import jax
        from jax.experimental import topologies
        from jax.sharding import NamedSharding, PartitionSpec

        from pallas_kernels.device import Described

        self.gpu, self.dump = gpu, dump
        if dump is None:
            self.device: Any = Described(gpu.kind, ".".join(map(str, gpu.capability)))
            self.sharding = None
        else:
            topology = topologies.get_topology_desc(platform="cuda", target_config=gpu.description(), topology="1x1x1")
            self.device = topology.devices[0]
            self.sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
        # What was traced for another device holds the tiles that were chosen for it.
        jax.clear_caches()

    @contextlib.contextmanager
    def decisions(self) -> Iterator[None]:
        """Tracing within is for this GPU."""
        import jax

        from pallas_kernels.device import described_as

        with contextlib.ExitStack() as stack:
            stack.enter_context(described_as(self.device))
            if jax.__version_info__ >= (0, 11):  # from here on, a kernel is lowered for a GPU that is named
                kind = jax.sharding.AbstractDevice(device_kind=self.gpu.kind, num_cores=None, platform="gpu")
                stack.enter_context(jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind)))
            yield

    def __call__(self, case: Case, kernels: dict[str, Figures]) -> Any:
        """The compiled program, or None if it was only lowered. Adds what its kernels use to `kernels`, by name."""
        import jax

        def place(x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding)

        jitted, args = jax.jit(case.function, donate_argnums=case.donate), jax.tree.map(place, case.args)
        lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",)) if self.dump is None else jitted.lower(*args)
        names = set(re.findall(r'name = "(\w+)", num_stages', lowered.as_text()))
        for name in names:
            kernels.setdefault(name, Figures()).programs += 1
        if self.dump is None:
            return None
        for path in self.dump.iterdir():
            path.unlink()
        compiled = lowered.compile()
        for name, shared in re.findall(r" (\w+) grid: .*shared_memory: (\d+) bytes", self._dumped("thunk_sequence.txt")):
            if name in names:
                kernels[name].add(shared=int(shared))
        for name, spilled, registers in self._assembled():
            if name in names:
                kernels[name].add(registers=registers, spilled=spilled)
        return compiled

    def _dumped(self, end: str) -> str:
        assert self.dump is not None
        return "".join(path.read_text() for path in self.dump.glob(f"*{end}"))

    def _assembled(self) -> Iterator[tuple[str, int, int]]:
        """(kernel, bytes spilled, registers) of all that was compiled, from NVIDIA's assembler."""
        assembler = next(iter(_installed("bin/ptxas")), shutil.which("ptxas"))
        assert self.dump is not None
        for path in self.dump.glob("*.ptx") if assembler else ():
            target = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
            if target is None:  # a module of constants
                continue
            command = [assembler, "-v", f"-arch={target[1]}", path, "-o", os.devnull]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
            pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
            yield from ((name, int(spilled), int(registers)) for name, spilled, registers in re.findall(pattern, said, re.DOTALL))


def _installed(path: str) -> list[str]:
    """Files of NVIDIA's packages for Python."""
    return [found for entry in sys.path for found in glob.glob(os.path.join(entry, "nvidia", "cu*", path))]


def _has_plugin() -> bool:
    try:
        import jax_plugins  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(jax_plugins.__path__))


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if anything did not compile, else 0."""
    parser = argparse.ArgumentParser(prog="python -m jaxspec.compile_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", default=",".join(GPUS), help=f"some of {','.join(GPUS)} (default: all)")
    parser.add_argument("--kernels", default="", help="only cases whose kernel and name hold this")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"models whose step is compiled (default: {','.join(STEPS)})")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of the steps (default: auto)")
    options = parser.parse_args(arguments)
    gpus, steps = ([name for name in text.split(",") if name] for text in (options.gpus, options.steps))
    if unknown := sorted(set(gpus) - set(GPUS)):
        parser.error(f"unknown GPU {', '.join(unknown)}; available: {', '.join(GPUS)}")
    with tempfile.TemporaryDirectory(prefix="compile-check-") as dump:
        plugin = _has_plugin() and "jax" not in sys.modules
        if plugin:
            os.environ["JAX_PLATFORMS"] = "cpu"
            compiler = [f"--xla_gpu_cuda_data_dir={folder}" for folder in _installed("")[:1]]
            flags = ["--xla_gpu_autotune_level=0", f"--xla_dump_to={dump}", *compiler]
            os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
        else:
            print("No CUDA plug-in to compile with: programs are only lowered.")
        folder = Path(dump) if plugin else None
        failures = [failure for name in gpus for failure in _check(GPUS[name], folder, options.kernels, steps, options.dtype)]
    print(f"{len(failures)} programs failed." if failures else "All programs compiled." if plugin else "All programs were lowered.")
    return bool(failures)


def _check(gpu: Gpu, dump: Path | None, wanted: str, steps: list[str], dtype: str) -> list[str]:
    """Prints what one GPU makes of all cases; returns the names of those that failed."""
    from pallas_kernels import device

    compiler, failures = Compiler(gpu, dump), []
    kernels: dict[str, Figures] = {}

    def compiled(case: Case, kernels: dict[str, Figures]) -> Any:
        try:
            return compiler(case, kernels)
        except Exception as error:  # whatever a compiler raises
            failures.append(f"{case.kernel}: {case.name}")
            print(f"  FAILED {failures[-1]}: {' '.join(str(error).split())[:300]}", flush=True)

    print(f"\n{gpu.kind}, compute capability {'.'.join(map(str, gpu.capability))}, {gpu.program_shared:,} bytes of shared memory a program")
    with compiler.decisions():
        if reason := device.obstacle():
            print(f"  no kernels: {reason}")
        else:
            for case in kernel_cases():
                if wanted in f"{case.kernel} {case.name}":
                    compiled(case, kernels)
            print(f"  {'kernel':24} {'programs':>8} {'shared bytes':>12} {'registers':>9} {'spilled bytes':>13}")
            for name, figures in sorted(kernels.items()):
                shared, registers, spilled = ("-" if x is None else f"{x:,}" for x in dataclasses.astuple(figures)[1:])
                print(f"  {name:24} {figures.programs:8} {shared:>12} {registers:>9} {spilled:>13}", flush=True)
        for name in steps:
            inside: dict[str, Figures] = {}
            program = compiled(case := step_case(name, dtype), inside)
            print(f"  step of {case.name}: {', '.join(sorted(inside)) or 'no kernels'}", flush=True)
            if program is not None:
                memory = program.memory_analysis()
                held, spare = memory.argument_size_in_bytes / 1e9, memory.temp_size_in_bytes / 1e9
                fits = "" if held + spare < gpu.memory / 1e9 else f", more than the {gpu.memory / 1e9:.0f} GB of one device"
                print(f"    weights and state {held:.2f} GB, temporary {spare:.3f} GB{fits}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
