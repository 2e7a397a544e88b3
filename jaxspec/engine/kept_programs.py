"""Compiled programs that are kept between runs, so that a start neither traces nor lowers them.

JAX's own cache finds a program by its lowered text, and to make that text takes longer than all else: some seconds for each loop of a large
model, whose kernels Python writes out one by one. Here a program is found by what it is made from: this package's source, versions, the
device, the settings, and the shapes of weights and state. The files lie beside JAX's, in a folder of their own.

Like JAX's cache this folder is trusted: a file in it is code that will run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import platform
import re
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from pallas_kernels import dialect

FOLDER = "jaxspec-programs"  # in JAX's
MOST_BYTES = 4 * 2**30  # of all files; the ones that were not used for longest go first
# Variables that change what is compiled. Mosaic's are not among them: JAX sets some itself, others dump and trace.
VARIABLES = re.compile(r"(XLA_|JAX_|JAXSPEC_|TRITON_|NVIDIA_TF32)(?!.*(CACHE|CLIENT))")
# JAX's settings that change no program, by a part of their names.
NO_MATTER = ("cache", "traceback", "profiler", "log_")


class KeptPrograms:
    """The programs of one engine. facts: what they depend on beside themselves, as text."""

    def __init__(self, folder: Path, devices: Sequence[Any], facts: Iterable[str]):
        self._folder, self._devices = folder, devices
        self._facts = hashlib.sha256("\n".join(facts).encode()).hexdigest()

    def path(self, name: str) -> Path:
        """Where the program of a name is kept that this thread would lower now, under JAX's settings of this moment."""
        values = jax.config.values
        names = (name for name in sorted(values) if not any(part in name for part in NO_MATTER))
        settings = [(name, repr(getattr(jax.config, name, values[name]))) for name in names]  # a thread may have a value of its own
        variables = sorted((name, value) for name, value in os.environ.items() if VARIABLES.match(name))
        return self._folder / hashlib.sha256(f"{self._facts}\n{settings}\n{variables}\n{name}".encode()).hexdigest()

    def read(self, path: Path) -> Any:
        """The program that is kept there, None for a file that cannot be used, which is removed."""
        try:
            if dialect.mosaic_obstacle() is None:
                dialect.mosaic()  # its import tells XLA of the kernels' custom call
            found = serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()), execution_devices=self._devices)
        except Exception as error:  # of any kind: a file that was cut off, a driver that refuses it
            warnings.warn(f"the kept program {path} cannot be used and is compiled anew: {error}", RuntimeWarning, stacklevel=2)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # where others' files may only be read, or another process has just removed it
            os.utime(path)
        return found

    def keep(self, path: Path, compiled: Any) -> None:
        """Writes a program there, if it is of a kind that can be written."""
        # What cannot be serialised, or a full disk, costs the next start its time and nothing else.
        with contextlib.suppress(Exception):
            content = pickle.dumps(serialize_executable.serialize(compiled))
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                try:
                    file.write(content)
                    file.flush()  # a full disk may not show before
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._tidy()

    def _tidy(self) -> None:
        files = sorted(((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(self._folder)), reverse=True)
        total = 0
        for _, size, path in files:
            total += size
            if total > MOST_BYTES:
                os.unlink(path)


def kept_programs(target: Any, drafter: Any, devices: Sequence[Any], facts: Iterable[Any]) -> KeptPrograms | None:
    """Where programs of this target and drafter on these devices are kept; None where they are not: without JAX's cache, on anything but
    GPUs of one process, and for models of another package, whose source is not known.

    facts: the settings, and the shapes and places of all that the programs take."""
    config: Any = jax.config
    cache = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    device, told = devices[0], [*map(str, facts)]
    ours = all(type(tree).__module__.startswith("jaxspec.") for tree in (target, drafter))
    if not cache or "://" in cache or not _serves(device) or not ours or any(map(by_address, told)):
        return None
    versions = [platform.python_version(), *(importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax"))]
    kind = f"{device.device_kind} {getattr(device, 'compute_capability', None)} {device.client.platform_version}"
    ids = f"devices {[device.id for device in devices]}"  # a file names them
    return KeptPrograms(Path(cache) / FOLDER, devices, [_source(), *versions, kind, ids, *told])


def by_address(text: str) -> bool:
    """Whether something shows itself by its address alone, so that programs are not known by it."""
    return " at 0x" in text


def _serves(device: Any) -> bool:
    return device.platform == "gpu" and jax.process_count() == 1


@functools.cache
def _source() -> str:
    """A digest of the source of both packages."""
    digest = hashlib.sha256()
    for root in (Path(__file__).parents[1], Path(str(dialect.__file__)).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
