"""Runs the notebooks and stores them with what they show: `python notebooks/run.py [01 03 ...]`, by default all of them.

Each runs from top to bottom in a new kernel. A notebook that fails or warns stays as it was. Its metadata says from which code the
outputs come, as a hash, and on what device. Needs nbclient, nbformat, ipykernel and matplotlib: the extra `notebooks`.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
KEY = "jaxspec"  # in the metadata of a notebook
DEVICE = "import os, jax; print(jax.devices()[0].device_kind if jax.default_backend() != 'cpu' else f'{os.cpu_count()} CPU cores')"


def fingerprint(notebook: Any) -> str:
    """A hash of the code, apart from the first cell, which installs the package and runs nothing."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"][1:]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def run(path: Path) -> None:
    """Executes a notebook and writes it with its outputs. Raises RuntimeError for one that warns."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, 4)
    kept = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
        where = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=3600, kernel_name="python3", resources=where, record_timing=False, coalesce_streams=True)
        with client.setup_kernel():
            for i, cell in enumerate(notebook.cells):
                client.execute_cell(cell, i)
            asked = nbformat.v4.new_code_cell(DEVICE)
            client.nb = nbformat.v4.new_notebook(cells=[asked])
            client.execute_cell(asked, 0)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_bar(output)]
            warned = [output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stderr"]
            if warned:
                raise RuntimeError(f"{path.name} warns: {warned[0]}")
    device = asked.outputs[0].text.strip()
    notebook.metadata = nbformat.from_dict(kept | {KEY: {"code": fingerprint(notebook), "device": device}})
    nbformat.write(notebook, path)


def _is_bar(output: Any) -> bool:
    """Whether an output is a progress bar, which is a widget that no stored notebook can show."""
    return any("widget" in kind for kind in output.get("data", {}))


def main() -> None:
    chosen = sys.argv[1:] or [""]
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.name.startswith(tuple(chosen)):
            print(path.name, flush=True)
            run(path)


if __name__ == "__main__":
    main()
