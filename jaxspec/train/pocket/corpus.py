"""The pocket models' corpus, which is the Python standard library's sources and documentation as token streams, and their tokenizer.

    python -m jaxspec.train.pocket.corpus --stdlib LIB --docs SOURCES --train-tokenizer FOLDER    # tokenizer.json, tokenizer_config.json
    python -m jaxspec.train.pocket.corpus --stdlib LIB --docs SOURCES --out FOLDER                # train.npy, val.npy, manifest.json

LIB is the folder of a Python's standard library with its test suite (default: the running Python's). SOURCES is the `_sources` folder
of its HTML documentation (Debian: python3.11-doc). The same inputs give the same bytes.
"""

import argparse
import ast
import fnmatch
import hashlib
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxspec.train.pocket import chat_pairs
from jaxspec.train.pocket.documents import Document

TARGET_FOLDER = Path(__file__).parents[2] / "pocket" / "target"
VOCAB_SIZE = 4096
EOS, BOS = 1, 2
SEED = 20
# Ids below 107 are Gemma 4's. The others of them, which Gemma 4 leaves unused or pocket has no use for, are `<unusedN>`.
SPECIAL_IDS = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49,
    "<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98, "<|channel>": 100, "<channel|>": 101,
    "<|turn>": 105, "<turn|>": 106,
}  # fmt: skip
NEWLINE = 107

# Newlines and the indentation after them are one piece. A word has the space, dot or underscore before it. Digits are pieces of their own.
PIECES = "|".join([r"(?:[ \t]*\n)+[ \t]*", r"[^\S\n]+(?=[^\S\n])", r"[ ._]?\p{L}+", r" ?\p{N}", r" ?[^\s\p{L}\p{N}]+", r"\s"])

# Modules kept out of training, each with its tests and its page of the documentation, which are kept out too.
# All exist in Python 3.11, 3.12 and 3.13.
HELD_OUT = {
    "asyncio/queues.py": ("test/test_asyncio/test_queues.py", "library/asyncio-queue.rst"),
    "bisect.py": ("test/test_bisect.py", "library/bisect.rst"),
    "calendar.py": ("test/test_calendar.py", "library/calendar.rst"),
    "colorsys.py": ("test/test_colorsys.py", "library/colorsys.rst"),
    "csv.py": ("test/test_csv.py", "library/csv.rst"),
    "fnmatch.py": ("test/test_fnmatch.py", "library/fnmatch.rst"),
    "fractions.py": ("test/test_fractions.py", "library/fractions.rst"),
    "getopt.py": ("test/test_getopt.py", "library/getopt.rst"),
    "graphlib.py": ("test/test_graphlib.py", "library/graphlib.rst"),
    "heapq.py": ("test/test_heapq.py", "library/heapq.rst"),
    "html/parser.py": ("test/test_htmlparser.py", "library/html.parser.rst"),
    "json/decoder.py": ("test/test_json/test_decode.py", "library/json.rst"),
    "netrc.py": ("test/test_netrc.py", "library/netrc.rst"),
    "plistlib.py": ("test/test_plistlib.py", "library/plistlib.rst"),
    "queue.py": ("test/test_queue.py", "library/queue.rst"),
    "reprlib.py": ("test/test_reprlib.py", "library/reprlib.rst"),
    "sched.py": ("test/test_sched.py", "library/sched.rst"),
    "selectors.py": ("test/test_selectors.py", "library/selectors.rst"),
    "shlex.py": ("test/test_shlex.py", "library/shlex.rst"),
    "textwrap.py": ("test/test_textwrap.py", "library/textwrap.rst"),
    "timeit.py": ("test/test_timeit.py", "library/timeit.rst"),
    "tomllib/_parser.py": ("test/test_tomllib/*", "library/tomllib.rst"),
    "urllib/robotparser.py": ("test/test_robotparser.py", "library/urllib.robotparser.rst"),
    "zipapp.py": ("test/test_zipapp.py", "library/zipapp.rst"),
}

# Tables, generated files, files that are meant not to parse, third-party packages, and the changelog.
LEFT_OUT = (
    "site-packages/*", "encodings/*", "_sysconfigdata*", "config-*", "pydoc_data/*", "*/cjkencodings/*", "*/encoded_modules/*",
    "lib2to3/tests/data/*", "test/test_lib2to3/data/*", "test/tokenizedata/*", "*/bad_*", "*/badsyntax_*", "msilib/*",
    "idlelib/NEWS*", "whatsnew/changelog.rst", "test/test_importlib/data*", "*lextab*", "*symbols*.txt",
)  # fmt: skip
TEST_FOLDERS = {"test", "tests", "idle_test"}
LONGEST_LINE = 2000  # characters
SEEN_SHARE = 0.6  # a file is a near-copy if more of its lines than this are in earlier files
LETTER_SHARE = 0.4  # a file is data if fewer of its characters than this are letters, spaces not counted
TEST_SHARE = 0.5  # most that tests may be of the sources and pages, in characters
CHAT_SHARE = 0.14  # most that conversations may be of everything, in characters


def held_out_texts() -> dict[str, str]:
    """The beginnings of the HELD_OUT modules in CPython 3.12.1, by name, whatever Python runs."""
    return json.loads((TARGET_FOLDER.parent / "held_out.json").read_text(encoding="utf-8"))


def collect(stdlib: Path, docs: Path | None = None) -> tuple[list[Document], list[Document]]:
    """The documents to train on, without conversations and near-copies, and the held-out sources and pages. Both have a fixed order.

    Raises FileNotFoundError for folders that are not what the command expects.
    """
    if not (stdlib / "os.py").is_file():
        raise FileNotFoundError(f"--stdlib {stdlib}: expected a standard library's folder, found no os.py in it")
    found = _sources(stdlib) + _topics(stdlib)
    if docs is not None:
        pages = [Document(_relative(p, docs).removesuffix(".txt"), "docs", _read(p)) for p in docs.rglob("*.rst.txt")]
        if not pages:
            raise FileNotFoundError(f"--docs {docs}: expected reStructuredText pages (*.rst.txt), found none")
        found += pages
    found = [d for d in found if d.text.strip() and not any(fnmatch.fnmatchcase(d.name, pattern) for pattern in LEFT_OUT)]
    rank = {"library": 0, "docs": 1, "tests": 2}
    found.sort(key=lambda d: (rank[d.kind], d.name))

    beside = [pattern for patterns in HELD_OUT.values() for pattern in patterns]
    held = [d for d in found if d.name in HELD_OUT or d.kind == "docs" and d.name in beside]
    rest = [d for d in found if d.name not in HELD_OUT and not any(fnmatch.fnmatchcase(d.name, pattern) for pattern in beside)]
    # The held-out files come first, so that near-copies of them are dropped too.
    seen: set[str] = set()
    for d in held:
        seen |= _lines(d.text)
    kept = []
    for d in rest:
        lines = _lines(d.text)
        if _mostly_data(d.text) or len(lines & seen) > SEEN_SHARE * len(lines):
            continue
        seen |= lines
        kept.append(d)
    return _cap_tests(kept), held


def _sources(stdlib: Path) -> list[Document]:
    documents = []
    for path in stdlib.rglob("*.py"):
        name = _relative(path, stdlib)
        if name.startswith("site-packages/"):
            continue
        kind = "tests" if TEST_FOLDERS & set(name.split("/")[:-1]) else "library"
        documents.append(Document(name, kind, _read(path)))
    return documents


def _topics(stdlib: Path) -> list[Document]:
    """The pages that help() shows, a document each. pydoc_data/topics.py is one dict of strings."""
    path = stdlib / "pydoc_data" / "topics.py"
    if not path.is_file():
        return []
    assignment = next(node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
    return [Document(f"topics/{name}", "docs", text) for name, text in ast.literal_eval(assignment.value).items()]


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _read(path: Path) -> str:
    """The file's text without overlong lines; "" if it is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
    return "".join(line for line in text.splitlines(keepends=True) if len(line) <= LONGEST_LINE)


def _lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) > 12}


def _mostly_data(text: str) -> bool:
    letters = sum(map(str.isalpha, text))
    return letters < LETTER_SHARE * (len(text) - sum(map(str.isspace, text)))


def _cap_tests(documents: list[Document]) -> list[Document]:
    """Drops tests at random until they are at most TEST_SHARE of the characters."""
    tests = [d for d in documents if d.kind == "tests"]
    others = sum(len(d.text) for d in documents if d.kind != "tests")
    room = int(others * TEST_SHARE / (1 - TEST_SHARE))
    random.Random(SEED).shuffle(tests)
    chosen = set()
    for d in tests:
        if len(d.text) <= room:
            room -= len(d.text)
            chosen.add(d.name)
    return [d for d in documents if d.kind != "tests" or d.name in chosen]


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains byte-level BPE. Its ids are Gemma 4's special tokens, newline at 107, the other 255 bytes, then merges up to `vocab_size`.

    Raises ValueError if the texts are too small for so many tokens.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = vocab_size - NEWLINE
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]

    names = {i: name for name, i in SPECIAL_IDS.items()}
    specials = [names.get(i, f"<unused{i}>") for i in range(NEWLINE)]
    newline = "Ċ"  # how the byte-level alphabet writes "\n"
    words = specials + [newline] + sorted(set(alphabet) - {newline}) + ["".join(pair) for pair in merges]
    if len(set(words)) != vocab_size:
        raise ValueError(f"tokenizer: found {len(set(words))} distinct tokens, expected {vocab_size}; the training text is too small")

    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return tokenizer


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
        "padding_side": "left",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    """The ids of each document, [N] uint16, bos first and eos last. A special token's name in the text stands for it in chat only."""
    ids = []
    for d in documents:
        tokenizer.encode_special_tokens = d.kind != "chat"
        ids.append(np.array([BOS, *tokenizer.encode(d.text, add_special_tokens=False).ids, EOS], np.uint16))
    tokenizer.encode_special_tokens = False
    return ids


def build(stdlib: Path, docs: Path | None, out: Path, tokenizer_folder: Path = TARGET_FOLDER) -> dict:
    """Writes train.npy and val.npy (uint16 token streams) and manifest.json into `out`, and returns the manifest."""
    from transformers import PreTrainedTokenizerFast  # here, because it takes seconds to import

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    template = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    training, held = collect(stdlib, docs)
    budget = int(sum(len(d.text) for d in training) * CHAT_SHARE / (1 - CHAT_SHARE))
    chat = chat_pairs.conversations(training, template.apply_chat_template, budget, SEED)
    training = training + [Document(f"chat/{i}", "chat", text) for i, text in enumerate(chat)]
    random.Random(SEED).shuffle(training)

    out.mkdir(parents=True, exist_ok=True)
    streams = {"train": (training, encode(tokenizer, training)), "val": (held, encode(tokenizer, held))}
    for name, (_, ids) in streams.items():
        np.save(out / f"{name}.npy", np.concatenate(ids))
    manifest = {
        "stdlib": stdlib.name,
        "docs": _newest_release(docs) if docs else None,
        "tokenizers": tokenizers.__version__,
        "seed": SEED,
        "train": _counts(*streams["train"]),
        "val": _counts(*streams["val"]),
        "held_out": list(HELD_OUT),
        # The place of each held-out document in val.npy: [start, stop].
        "val_spans": _spans(*streams["val"]),
        "sha256": {
            "tokenizer.json": _sha256(tokenizer_folder / "tokenizer.json"),
            **{f"{name}.npy": _sha256(out / f"{name}.npy") for name in streams},
        },
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _newest_release(docs: Path) -> str:
    """The newest Python that the documentation has a "What's new" page of, such as "3.11"."""
    releases = [p.name.removesuffix(".rst.txt") for p in docs.glob("whatsnew/[0-9]*.rst.txt")]
    return max(releases, key=lambda release: [int(part) for part in release.split(".")], default="unknown")


def _counts(documents: list[Document], ids: list[np.ndarray]) -> dict[str, dict[str, int]]:
    counts = {kind: {"documents": 0, "bytes": 0, "tokens": 0} for kind in ("library", "docs", "tests", "chat", "total")}
    for d, tokens in zip(documents, ids, strict=True):
        for row in (counts[d.kind], counts["total"]):
            row["documents"] += 1
            row["bytes"] += len(d.text.encode())
            row["tokens"] += len(tokens)
    return counts


def _spans(documents: list[Document], ids: list[np.ndarray]) -> dict[str, list[int]]:
    ends = np.cumsum([len(tokens) for tokens in ids])
    return {d.name: [int(end) - len(tokens), int(end)] for d, tokens, end in zip(documents, ids, ends, strict=True)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec.train.pocket.corpus", description="Make the pocket models' corpus or tokenizer."
    )
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a standard library, with Lib/test")
    parser.add_argument("--docs", type=Path, help="the _sources folder of its HTML documentation")
    parser.add_argument("--out", type=Path, help="write train.npy, val.npy and manifest.json here")
    parser.add_argument("--train-tokenizer", type=Path, help="train the tokenizer on the training text and write it here")
    options = parser.parse_args(arguments)
    if options.out is None and options.train_tokenizer is None:
        parser.error("found neither --out nor --train-tokenizer, expected one or both")
    if options.train_tokenizer is not None:
        training, _ = collect(options.stdlib, options.docs)
        save_tokenizer(train_tokenizer([d.text for d in training]), options.train_tokenizer)
    if options.out is not None:
        print(json.dumps(build(options.stdlib, options.docs, options.out), indent=1))


if __name__ == "__main__":
    main()
