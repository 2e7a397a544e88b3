"""Conversations about Python code, made from sources (ast) and documentation pages (reStructuredText), rendered by a chat template."""

import ast
import inspect
import random
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxspec.train.pocket.documents import Document

LONGEST_ANSWER = 2500  # characters
SYSTEM = (
    "You are a helpful assistant.",
    "You are a Python expert.",
    "Answer questions about the Python standard library.",
    "Be brief. Answer with code where code is asked for.",
)
DESCRIBE = ("What does `{0}` do?", "Explain `{0}`.", "Describe `{0}`.", "What is `{0}` for?", "How do I use `{0}`?", "Tell me about `{0}`.")
WRITE = (
    "Write a Python {1} `{0}`: {2}",
    'Write a {1} `{0}` with the docstring "{2}"',
    "Implement `{0}` in Python. {2}",
    "I need a Python {1} `{0}`. It should do this: {2}",
)
EXPLAIN = ("What does this {0} do?", "Explain this {0}.", "Write a docstring for this {0}.", "Summarise this {0}.")
COMPLETE = ("Complete this {0}.", "Finish this {0}:", "Continue this Python code.")
_DIRECTIVE = re.compile(r"^( *)\.\. (function|class|method|exception|attribute|data|decorator|classmethod|staticmethod|opcode):: (.+)$")


def conversations(documents: Iterable[Document], apply_chat_template: Callable[..., Any], budget: int, seed: int) -> list[str]:
    """Rendered conversations, each of one to three questions about one file; at most `budget` characters in all."""
    rng = random.Random(seed)
    groups = []
    for d in documents:
        pairs = list(page_pairs(d.text, rng)) if d.kind == "docs" else []
        if d.kind == "library":
            pairs = list(source_pairs(d.text, d.name, rng))
        rng.shuffle(pairs)
        while pairs:
            count = rng.choice((1, 1, 1, 2, 2, 3))
            groups.append(pairs[:count])
            del pairs[:count]
    rng.shuffle(groups)
    rendered = []
    for group in groups:
        system = rng.choice(SYSTEM) if rng.random() < 0.2 else None
        text = render(system, group, apply_chat_template)
        if len(text) > budget:
            break
        budget -= len(text)
        rendered.append(text)
    return rendered


def render(system: str | None, pairs: list[tuple[str, str]], apply_chat_template: Callable[..., Any]) -> str:
    """A conversation as text, without bos: what the model sees before it writes the last answer, then that answer and the end of its turn.

    system: the system message, or None. pairs: (question, answer), at least one.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    last = messages.pop()["content"]
    prompt = apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return f"{prompt.removeprefix('<bos>')}{last.strip()}<turn|>\n"


def source_pairs(text: str, name: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields (question, answer) for the documented functions and classes of one source file. name: the file's path in the library."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if doc := ast.get_docstring(tree):
        yield rng.choice(DESCRIBE).format(module), _cut(doc)
    yield from _definitions(tree, text.splitlines(keepends=True), module, rng)


def _definitions(parent: ast.AST, lines: list[str], prefix: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}.{node.name}"
        doc = ast.get_docstring(node)
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node, lines, name, rng)
            if doc:
                yield rng.choice(DESCRIBE).format(name), _cut(doc)
            continue
        kind = "method" if isinstance(parent, ast.ClassDef) else "function"
        yield from _function_pairs(node, lines, name, kind, doc, rng)


def _function_pairs(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], name: str, kind: str, doc: str | None, rng: random.Random
) -> Iterator[tuple[str, str]]:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    source = textwrap.dedent("".join(lines[first : node.end_lineno])).strip()
    if len(source) > LONGEST_ANSWER or "```" in source:
        return
    body_lines = source.count("\n")
    if body_lines >= 6:
        head = "\n".join(source.split("\n")[: rng.randint(2, body_lines // 2)])
        yield f"{rng.choice(COMPLETE).format(kind)}\n\n{_fence(head)}", _fence(source)
    if not doc:
        return
    yield rng.choice(DESCRIBE).format(name), _cut(doc)
    if len(node.body) < 2:
        return
    signature = f"{node.name}({ast.unparse(node.args)})"
    summary = " ".join(doc.split("\n\n")[0].split())
    yield rng.choice(WRITE).format(signature, kind, summary), _fence(source)
    docstring = node.body[0]
    bare = lines[first : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    yield f"{rng.choice(EXPLAIN).format(kind)}\n\n{_fence(textwrap.dedent(''.join(bare)).strip())}", _cut(doc)


def page_pairs(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields (question, answer) for the functions, classes and other objects that a documentation page describes."""
    lines = text.split("\n")
    module = ""
    inside: list[tuple[int, str]] = []  # indentation and name of the objects around the current one
    for i, line in enumerate(lines):
        if named := re.match(r"\.\. (?:current)?module:: (\S+)", line):
            module = named[1]
        found = _DIRECTIVE.match(line)
        if found is None:
            continue
        indent, kind, signature = len(found[1]), found[2], found[3].strip().rstrip("\\")
        while inside and inside[-1][0] >= indent:
            inside.pop()
        owner = inside[-1][1] if inside else module
        if owner and kind != "opcode" and not signature.startswith((f"{owner}.", f"{module}.")):
            signature = f"{owner}.{signature.removeprefix(owner.split('.')[-1] + '.')}"
        name = signature.split("(")[0]
        inside.append((indent, name))
        body = _directive_body(lines[i + 1 :], indent)
        if len(body) >= 30:
            yield rng.choice(DESCRIBE).format(rng.choice((signature, name))), _cut(body)


def _directive_body(lines: list[str], indent: int) -> str:
    """The text under a directive at `indent`, up to its end or to the first object described in it. lines: those after the directive."""
    body = []
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= indent or _DIRECTIVE.match(line):
            break
        body.append(line)
    # Lines before the first empty one are further signatures and options.
    start = next((i for i, line in enumerate(body) if not line.strip()), len(body))
    return textwrap.dedent("\n".join(body[start:])).strip()


def _cut(text: str) -> str:
    """The first paragraphs of `text`, at most LONGEST_ANSWER characters."""
    text = inspect.cleandoc(text)
    while len(text) > LONGEST_ANSWER and "\n\n" in text:
        text = text[: text.rindex("\n\n")].rstrip()
    return text[:LONGEST_ANSWER]


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"
