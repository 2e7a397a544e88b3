"""A mkdocs hook: where a page says <!-- modules of FOLDER -->, it says what the package is for and, for each module, its first sentence."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"<!-- modules of ([\w/]+) -->")


def first_paragraph(path: Path) -> str:
    """Of a module's docstring, in one line. Raises ValueError for a module without one."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path} has no docstring, so nobody can say what it is for")
    return " ".join(text.split("\n\n")[0].split())


def first_sentence(path: Path) -> str:
    return re.split(r"(?<=\.)\s(?=[A-Z`])", first_paragraph(path))[0]  # not behind "et al."


def table(folder: str) -> str:
    """A row for each module of a package; a package inside it is one row, by the docstring of its __init__.py."""
    found = []
    for path in sorted((ROOT / folder).iterdir()):
        module = path / "__init__.py" if path.is_dir() else path
        if module.is_file() and module.suffix == ".py" and path.name not in ("__init__.py", "__main__.py"):
            found.append(f"| `{folder}/{path.name}{'/' if path.is_dir() else ''}` | {first_sentence(module).replace('|', chr(92) + '|')} |")
    if not found:
        raise ValueError(f"{folder} has no modules")
    about = [first_paragraph(ROOT / folder / "__init__.py"), ""] if "/" in folder else []
    return "\n".join([*about, "| file | what it is for |", "|---|---|", *found])


def on_page_markdown(markdown: str, **_: object) -> str:
    return MARK.sub(lambda match: table(match[1]), markdown)
