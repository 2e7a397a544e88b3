"""A mkdocs hook: every notebook is a page, with what it showed when it was last run."""

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def on_files(files: Files, *, config: Any) -> Files:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page(json.loads(path.read_text(encoding="utf-8")))))
    return files


def page(notebook: dict[str, Any]) -> str:
    """A notebook in Markdown. The badge of its first cell is an image of another site, so only its link stays."""
    cells = notebook["cells"]
    parts = [part for cell in cells for part in ([text(cell["source"])] if cell["cell_type"] == "markdown" else code(cell))]
    parts[0] = parts[0].replace("[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]", "[Open in Colab]")
    parts.insert(1, f"*Run on: {notebook['metadata']['jaxspec']['device']}.*")
    return "\n\n".join(parts)


def code(cell: dict[str, Any]) -> list[str]:
    return [f"```python\n{text(cell['source'])}\n```", *(shown(output) for output in cell["outputs"])]


def shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{text(output['text']).rstrip()}\n```"
    data = output["data"]
    if "image/png" in data:
        return f'<img alt="figure" src="data:image/png;base64,{text(data["image/png"]).strip()}">'
    if "text/html" in data:
        return "<div>" + text(data["text/html"]) + "</div>"
    return f"```text\n{text(data['text/plain'])}\n```"


def text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
