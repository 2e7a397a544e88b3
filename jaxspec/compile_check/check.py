"""Compiles every kernel and a loop of steps for GPUs that this machine need not have: `python -m jaxspec.compile_check`.

With JAX's CUDA plug-in and its compiler (`pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink`, the
first two with --no-deps and in jaxlib's version) it compiles programs completely, for a device that is described in numbers. It prints the
shared memory, registers and spilled bytes of each kernel, the most over all its shapes, in how many programs products of the tensor cores
wait for each other because a thread has too few registers, and the memory of a step. If a GPU has kernels, a step must be one CUDA graph.
Without the plug-in it lowers programs for CUDA, which finds what the Triton dialect refuses. It runs nothing and times nothing.

A GPU's programs use the implementation that "auto" takes there. If that is a Mosaic kernel, the Triton kernel is compiled too.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import glob
import importlib.metadata
import itertools
import multiprocessing
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.compile_check.cases import Case

STEP_MODELS = ("pocket", "e2b", "26b", "31b", "step3p5-15")
GRAPH = "kCommandBuffer"  # XLA's name for a CUDA graph
MOSAIC = "mosaic"  # kernels in this dialect are counted under this name
STDOUT_FILE = "stdout"  # receives what a process that compiles prints


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA has to know of a device. The numbers are from its data sheet and from CUDA's table of technical specifications."""

    kind: str
    capability: tuple[int, int]  # compute capability
    multiprocessors: int
    threads: int  # most on a multiprocessor
    shared: int  # bytes of shared memory of a multiprocessor
    l2: int  # bytes
    memory: int  # bytes
    bandwidth: int  # bytes a second
    clock_ghz: float

    @property
    def program_shared(self) -> int:
        """Bytes of shared memory that a program may use: 1 KiB less than a multiprocessor has, if that is more than 64 KiB."""
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
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 2048, 228 << 10, 126 << 20, 180 * 10**9, 8000 * 10**9, 1.97),
    "rtxpro6000": Gpu("NVIDIA RTX PRO 6000", (12, 0), 188, 1536, 100 << 10, 128 << 20, 96 * 10**9, 1792 * 10**9, 2.62),
}


@dataclasses.dataclass
class KernelFigures:
    """What a kernel uses: the most over all programs that hold it, None if these were only lowered."""

    shared: int | None = None  # bytes of shared memory
    registers: int | None = None  # of a thread
    spilled: int | None = None  # bytes that did not fit into registers
    waiting: int | None = None  # 1 if products of the tensor cores wait for each other, else 0

    def add(self, **found: int | None) -> None:
        """Raises each figure to what was found in another program."""
        for name, value in found.items():
            if value is not None:
                setattr(self, name, max(getattr(self, name) or 0, value))


@dataclasses.dataclass
class Outcome:
    """How compiling a case ended."""

    kernels: dict[str, KernelFigures] = dataclasses.field(default_factory=dict)  # by name; {} if XLA serves without a kernel
    memory: tuple[int, int] | None = None  # bytes of a compiled program's arguments and of its temporary arrays
    failure: str | None = None  # why it did not compile, or what is wrong with it


class Compiler:
    """Compiles for one GPU. Called with a `Case`, it returns an `Outcome`."""

    def __init__(self, gpu: Gpu, dump: Path | None):
        """dump: the folder that XLA dumps to. None without the plug-in: then programs are only lowered."""
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
        # A cached trace for another GPU has that one's tiles.
        jax.clear_caches()

    @contextlib.contextmanager
    def decisions(self) -> Iterator[None]:
        """A context in which programs are traced for this GPU."""
        import jax

        from pallas_kernels.device import described_as

        with contextlib.ExitStack() as stack:
            stack.enter_context(described_as(self.device))
            if jax.__version_info__ >= (0, 11):  # since then, lowering a kernel needs the name of a GPU
                kind = jax.sharding.AbstractDevice(device_kind=self.gpu.kind, num_cores=None, platform="gpu")
                stack.enter_context(jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind)))
            yield

    def __call__(self, case: Case) -> Outcome:
        try:
            return self._compiled(case)
        except Exception as error:  # whatever a compiler raises
            return Outcome(failure=" ".join(str(error).split())[:300])

    def _compiled(self, case: Case) -> Outcome:
        import jax

        from jaxspec.compile_check.cases import STEP

        def place(x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding)

        jitted, args = jax.jit(case.function, donate_argnums=case.donate), jax.tree.map(place, case.args)
        lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",)) if self.dump is None else jitted.lower(*args)
        text = lowered.as_text()
        outcome = Outcome({name: KernelFigures() for name in re.findall(r'name = "(\w+)", num_stages', text)})
        if "@mosaic_gpu" in text:  # its modules are bytecode, which has no readable names
            outcome.kernels[MOSAIC] = KernelFigures()
        if self.dump is None or not (outcome.kernels or case.kernel == STEP):
            return outcome
        for path in self.dump.iterdir():
            os.truncate(path, 0) if path.name == STDOUT_FILE else path.unlink()
        memory: Any = lowered.compile().memory_analysis()
        outcome.memory = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        commands = loop_commands(self._dumped("thunk_sequence_after_thunk_passes.txt"))
        if case.kernel == STEP and outcome.kernels and commands != [GRAPH]:
            outcome.failure = f"a step is {len(commands)} commands ({', '.join(sorted(set(commands)))}), expected one CUDA graph"
        for name, shared in re.findall(r" (\w+) grid: .*shared_memory: (\d+) bytes", self._dumped("thunk_sequence.txt")):
            if name in outcome.kernels:
                outcome.kernels[name].add(shared=int(shared))
        ctypes.CDLL(None).fflush(None)
        for said in (self._dumped(STDOUT_FILE), *self._assembled()):
            for entry, figures in reported(said).items():
                name = MOSAIC if entry.endswith("_mosaic_gpu_kernel") else entry
                if name in outcome.kernels:
                    outcome.kernels[name].add(**dataclasses.asdict(figures))
        return outcome

    def _dumped(self, end: str) -> str:
        """The text of the dumped files whose names end so."""
        assert self.dump is not None
        return "".join(path.read_text() for path in self.dump.glob(f"*{end}"))

    def _assembled(self) -> Iterator[str]:
        """Yields what NVIDIA's assembler reports about each module that XLA made. XLA runs the assembler too, but drops its report."""
        assembler = next(iter(_installed("bin/ptxas")), shutil.which("ptxas"))
        assert self.dump is not None
        for path in self.dump.glob("*.ptx") if assembler else ():
            target = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
            if target is None:  # a module of constants
                continue
            command = [assembler, "-v", f"-arch={target[1]}", path, "-o", os.devnull]
            yield subprocess.run(command, check=True, capture_output=True, text=True).stderr


def reported(said: str) -> dict[str, KernelFigures]:
    """What NVIDIA's assembler reports about a module's kernels, by name."""
    pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    waiting = re.findall(r"wgmma.mma_async instructions are serialized .* function '(\w+)'", said)
    return {
        name: KernelFigures(registers=int(registers), spilled=int(spilled), waiting=int(name in waiting))
        for name, spilled, registers in re.findall(pattern, said, re.DOTALL)
    }


def loop_commands(dumped: str) -> list[str]:
    """The commands that the body of a program's loop runs, in order: `GRAPH`, or kinds of kernels and copies. dumped: XLA's thunks."""
    _, _, body = dumped.partition("body:\n")
    depth = min((len(indent) for indent in re.findall(r"^( *)\d+: k\w+", body, re.MULTILINE)), default=0)
    return re.findall(rf"^ {{{depth}}}\d+: (\w+)", body, re.MULTILINE)


def _installed(path: str) -> list[str]:
    """Where NVIDIA's Python packages have this file or folder."""
    return [found for entry in sys.path for found in glob.glob(os.path.join(entry, "nvidia", "cu*", path))]


def _has_plugin() -> bool:
    try:
        import jax_plugins  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(jax_plugins.__path__))


def _start(folder: str) -> None:
    """Prepares a process that compiles, before it imports JAX. Its standard output, to which Mosaic prints reports, goes to a file."""
    global _dump
    _dump = Path(tempfile.mkdtemp(dir=folder))
    compiler = [f"--xla_gpu_cuda_data_dir={path}" for path in _installed("")[:1]]
    flags = ["--xla_gpu_autotune_level=0", f"--xla_dump_to={_dump}", *compiler]
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) >= (0, 12):
        flags.append("--xla_dump_emitter_re=.*")  # since then PTX is dumped only if one asks
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    # Without the last one, LLVM runs llvm-symbolizer, where that is installed, for the names in each stack trace, which takes minutes.
    os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "LLVM_DISABLE_SYMBOLIZATION": "1"}
    os.dup2(os.open(_dump / STDOUT_FILE, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)


_dump: Path | None = None  # the folder of a process that compiles


@functools.lru_cache(maxsize=1)
def compiler_and_cases(gpu: str) -> tuple[Compiler, list[Case]]:
    """The compiler for a GPU, a key of GPUS, and its cases of kernels."""
    from jaxspec.compile_check.cases import kernel_cases
    from pallas_kernels import device

    compiler = Compiler(GPUS[gpu], _dump)
    with compiler.decisions():
        return compiler, [] if device.obstacle() else kernel_cases()


def _compile_case(work: tuple[str, int | str, str]) -> Outcome:
    """Compiles one case. work: a GPU, the number of one of its kernels' cases or the model of a step, and a step's dtype."""
    from jaxspec.compile_check.cases import step_case

    gpu, case, dtype = work
    compiler, cases = compiler_and_cases(gpu)
    with compiler.decisions():
        return compiler(cases[case] if isinstance(case, int) else step_case(case, dtype))


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 1 if a program failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m jaxspec.compile_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", default=",".join(GPUS), help=f"some of {','.join(GPUS)} (default: all)")
    parser.add_argument("--kernels", default="", help="only kernels' cases that hold this in kernel and name, all of them")
    parser.add_argument("--steps", help=f"models whose step is compiled, of {','.join(STEP_MODELS)} (default: those that fit)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of the steps (default: auto)")
    parser.add_argument("--all", action="store_true", help="also shapes and steps much like others: batches, more widths, larger models")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile (default: as many as there are cores)")
    options = parser.parse_args(arguments)
    gpus = [name for name in options.gpus.split(",") if name]
    if unknown := sorted(set(gpus) - set(GPUS)):
        parser.error(f"unknown GPU {', '.join(unknown)}; available: {', '.join(GPUS)}")
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}, expected at least 1")
    with contextlib.ExitStack() as stack:
        run: Any = map
        if plugin := _has_plugin():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="compile-check-"))
            os.environ["JAX_PLATFORMS"] = "cpu"
            settings = {"mp_context": multiprocessing.get_context("spawn"), "initializer": _start, "initargs": (folder,)}
            run = stack.enter_context(concurrent.futures.ProcessPoolExecutor(options.jobs, **settings)).map
        else:
            print("No CUDA plug-in to compile with: programs are only lowered.")
        wanted = {name: wanted_cases(name, options) for name in gpus}
        work = [(name, case, options.dtype) for name in gpus for case in wanted[name]]
        outcomes = run(_compile_case, work)
        failed = sum(_print(name, wanted[name], itertools.islice(outcomes, len(wanted[name]))) for name in gpus)
    print(f"{failed} of {len(work)} programs failed." if failed else f"{len(work)} programs {'compiled' if plugin else 'were lowered'}.")
    return bool(failed)


def wanted_cases(gpu: str, options: argparse.Namespace) -> dict[int | str, str]:
    """The cases to compile for a GPU: the number of a kernel's case or the model of a step -> what is printed for it.

    Steps come first, since they take longest. options: of the command.
    """
    import jax

    from jaxspec.compile_check.cases import step_case

    compiler, cases = compiler_and_cases(gpu)
    named = options.steps is not None
    steps = options.steps.split(",") if named else [] if options.kernels else STEP_MODELS
    wanted: dict[int | str, str] = {}
    with compiler.decisions():
        for step in filter(None, steps):
            case = step_case(step, options.dtype)
            held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(case.args))
            if options.all or named or held < GPUS[gpu].memory:
                wanted[step] = f"{case.kernel} of {case.name}"
    for i, case in enumerate(cases):
        if options.kernels in f"{case.kernel} {case.name}" and (options.all or options.kernels or not case.further):
            wanted[i] = f"{case.kernel}: {case.name}"
    return wanted


def _print(gpu: str, wanted: dict[int | str, str], outcomes: Iterator[Outcome]) -> int:
    """Prints the outcomes of a GPU's cases, and returns how many failed. wanted: as `wanted_cases` returns it."""
    from pallas_kernels import device

    compiler, described = compiler_and_cases(gpu)[0], GPUS[gpu]
    capability = ".".join(map(str, described.capability))
    print(f"\n{described.kind}, compute capability {capability}, {described.program_shared:,} bytes of shared memory a program")
    with compiler.decisions():
        if reason := device.obstacle():
            print(f"  no kernels: {reason}")
    programs, waiting, most, worst = collections.Counter[str](), collections.Counter[str](), dict[str, KernelFigures](), dict[str, str]()
    failed = 0
    for (case, name), outcome in zip(wanted.items(), outcomes, strict=True):
        if outcome.failure is not None:
            failed += 1
            print(f"  FAILED {name}: {outcome.failure}", flush=True)
        elif isinstance(case, str):
            print(f"  {name}: {', '.join(sorted(outcome.kernels)) or 'no kernels'}", flush=True)
            if outcome.memory is not None:
                held, spare = (count / 1e9 for count in outcome.memory)
                fits = "" if held + spare < described.memory / 1e9 else f", more than the {described.memory / 1e9:.0f} GB of one device"
                print(f"    weights and state {held:.2f} GB, temporary {spare:.3f} GB{fits}", flush=True)
        for kernel, figures in outcome.kernels.items():
            programs[kernel] += 1
            waiting[kernel] += figures.waiting or 0
            highest = most.setdefault(kernel, KernelFigures())
            if (figures.spilled or 0) > (highest.spilled or 0):
                worst[kernel] = f"  in {name}"
            highest.add(**dataclasses.asdict(figures))
    if most:
        print(f"  {'kernel':24} {'programs':>8} {'shared bytes':>12} {'registers':>9} {'waiting':>7} {'spilled bytes':>13}")
    for kernel, figures in sorted(most.items()):
        if figures.waiting is not None:
            figures.waiting = waiting[kernel]
        shared, registers, spilled, waits = ("-" if x is None else f"{x:,}" for x in dataclasses.astuple(figures))
        line = f"  {kernel:24} {programs[kernel]:8} {shared:>12} {registers:>9} {waits:>7} {spilled:>13}"
        print(f"{line}{worst.get(kernel, '')}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
