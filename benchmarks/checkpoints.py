"""Time and host memory of loading a target's weights, from safetensors and as `jaxspec convert` writes them.

Weights of a model's shape, or of its first layers, are written to a folder and read in fresh processes, first with nothing of them in
the page cache, then with all. Processor time counts every thread, and is the steadier figure on a machine that others use. Extra
memory is the process's peak above what it held before and, on a CPU, what the weights take.

    python benchmarks/checkpoints.py --config 12b --layers 2 --folder /tmp/checkpoints
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", default="12b", help="e2b, e4b, 12b, 26b or 31b")
    parser.add_argument("--layers", type=int, help="how many layers, the first ones; all by default")
    parser.add_argument("--tensor", type=int, default=1, help="devices to spread the weights over")
    parser.add_argument("--rounds", type=int, default=1, help="how often all is read")
    parser.add_argument("--folder", type=Path, required=True, help="folder to work in; its subfolders are removed at the end")
    parser.add_argument("--read", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        _read(args.folder / args.read, args.tensor)
        return
    source, converted = args.folder / "safetensors", args.folder / "converted"
    readers = dict(os.environ)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leaves the memory of a GPU to those who read
    try:
        from jaxspec import convert

        _write(source, args.config, args.layers)
        start = time.perf_counter()
        convert(source, converted, progress=False)
        print(f"conversion: {time.perf_counter() - start:.1f} s", flush=True)
        for _, cached, folder in itertools.product(range(args.rounds), (False, True), (source, converted)):
            if not cached:
                _drop(folder)
            command = [sys.executable, __file__, "--folder", str(args.folder), "--read", folder.name, "--tensor", str(args.tensor)]
            out = subprocess.run(command, check=True, capture_output=True, text=True, env=readers).stdout
            print(f"{folder.name:<12} {'cached' if cached else 'cold':<7} {out.strip()}", flush=True)
    finally:
        for folder in (source, converted):
            shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, name: str, layers: int | None) -> None:
    """A released checkpoint's layout with meaningless weights: one file a layer, and one for the rest."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jaxspec import released
    from jaxspec.checkpoint import layout
    from jaxspec.checkpoint.files import INDEX_FILE
    from jaxspec.model import gemma4
    from jaxspec.model.gemma4_config import Gemma4Config
    from jaxspec.trees import leaves_by_path

    config = json.loads(json.dumps(released.TARGETS[name]))
    text = config.get("text_config", config)
    if layers:
        shared = max(0, layers - (text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0)))
        text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers], "num_kv_shared_layers": shared}
    leaves = leaves_by_path(gemma4.abstract(Gemma4Config.from_hf(config)))
    sizes = {path: leaf.shape for path, leaf in leaves.items()}
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for path in leaves:
        stem = path.split(".")
        file = f"model-{stem[1] if stem[0] == 'layers' else stem[0]}.safetensors"
        files.setdefault(file, {}).update({f"model.language_model.{part.key}": part.shape for part in layout.layouts(path, sizes)[0]})
    noise = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True)
    for file, tensors in files.items():
        save_file({key: np.resize(noise, shape) for key, shape in tensors.items()}, folder / file)
    index = {key: file for file, tensors in files.items() for key in tensors}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").touch()  # a conversion asks for it


def _drop(folder: Path) -> None:
    """Takes a folder's files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(folder: Path, tensor: int) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={tensor} {os.environ.get('XLA_FLAGS', '')}"
    import jax
    import jax.numpy as jnp
    import tensorstore  # noqa: F401 (so that its import is not timed)

    from jaxspec import sharding, targets
    from jaxspec.model import gemma4

    config, _ = targets.read_target(folder)
    abstract = gemma4.abstract(config, jnp.bfloat16)
    if tensor > 1:
        abstract = sharding.shard_tree(abstract, sharding.mesh(tensor=tensor))
    jax.block_until_ready(jnp.zeros(8) + 1)
    before, start, worked = _memory("VmRSS"), time.perf_counter(), time.process_time()
    weights = targets.load_target(folder, abstract, progress=False)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    shards = [shard.data for leaf in jax.tree.leaves(weights) for shard in leaf.addressable_shards]
    own = {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}  # a CPU's devices may share one
    extra = _memory("VmHWM") - before - (sum(own.values()) if jax.default_backend() == "cpu" else 0)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(weights))
    print(
        f"{seconds:6.2f} s, of processors {worked:6.2f} s; weights {sharding.nbytes(weights) / 1e9:.2f} GB, "
        f"largest array {largest / 1e9:.2f} GB, extra host memory {extra / 1e9:.2f} GB ({extra / largest:.2f} of it)"
    )


def _memory(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
