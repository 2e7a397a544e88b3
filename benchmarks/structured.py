"""Times how requests for structured outputs are admitted: `python benchmarks/structured.py e2b`.

Weights are random and of a released model's shape, and so is the number of tokens: their texts are made up. A schema is timed when it is
new (its automaton is built, put into the device's pool, and the allowed tokens of its states are computed) and when it is known. The
largest one also comes among many short free texts: then the longest time between two of these that end counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jaxspec import SamplingParams, released
from jaxspec.bench.random_weights import random_weights
from jaxspec.drafters.base import NoDraft
from jaxspec.engine.llm import LLM
from jaxspec.engine.settings import Settings
from jaxspec.targets import abstract_target
from jaxspec.text import load_tokenizer

REPEATS = 5
SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def schema(strings: int, longest: int | None, number: int) -> dict[str, Any]:
    """A schema that is different for every number: an object of strings, of at most `longest` characters where that is given."""
    kind: dict[str, Any] = {"type": "string"} if longest is None else {"type": "string", "maxLength": longest}
    names = [f"field{i}of{number}" for i in range(strings)]
    return {"type": "object", "properties": dict.fromkeys(names, kind), "required": names, "additionalProperties": False}


def made_tokenizer(folder: Path, count: int) -> Any:
    """A tokenizer of `count` tokens, in bytes: single ones, then made-up words."""
    alphabet = [bytes([b]).decode("latin-1") for b in range(33, 127)]
    rng, words = np.random.default_rng(0), dict.fromkeys(["<eos>", "Ġ", *alphabet])
    letters = np.asarray(list("abcdefghijklmnopqrstuvwxyz0123456789,:"))
    while len(words) < count:
        size = min(int(rng.geometric(0.2)) + 1, 40)
        words[("Ġ" if rng.random() < 0.4 else "") + "".join(rng.choice(letters, size))] = None
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}))
    return load_tokenizer(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="e2b, e4b, 12b, 26b, 31b, or a folder with a config.json")
    parser.add_argument("--slots", type=int, default=8, help="sequences in flight (default: 8)")
    args = parser.parse_args()
    config = released.target_config(args.config)
    target = random_weights(abstract_target(config, jnp.bfloat16), 0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = made_tokenizer(Path(folder), config.vocab_size)
    llm = LLM(target, NoDraft(), tokenizer, Settings(num_draft_tokens=0, max_slots=args.slots, max_len=1024, progress=False))
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}: {args.config}, {config.vocab_size:,} tokens; milliseconds, the median of {REPEATS}")
    numbers = itertools.count()

    def asked(strings: int, longest: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=1, temperature=0, structured_outputs={"json": schema(strings, longest, next(numbers))})

    def taken(params: SamplingParams) -> float:
        begun = time.perf_counter()
        llm.generate([[0]], params, use_tqdm=False)
        return 1e3 * (time.perf_counter() - begun)

    first = asked(1, None)
    llm.warmup(first)
    llm.warmup(SHORT)
    print(f"the bytes of all tokens, and the first schema of an LLM: {taken(first):.1f}")
    for strings, longest in ((2, None), (10, 100)):
        rows = []
        for _ in range(REPEATS):
            params = asked(strings, longest)
            new, again = taken(params), min(taken(params) for _ in range(3))
            free = min(taken(SamplingParams(max_tokens=1, temperature=0)) for _ in range(3))
            begun = time.perf_counter()
            llm.check([0], params)
            rows.append((new - again, again - free, 1e3 * (time.perf_counter() - begun)))
        new, known, check = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{strings} strings: new {new:.1f}, known {known:.2f} more than a free text, of it the door {check:.2f}")

    for busy in (False, True):
        others = [([0], SHORT)] * 400
        if busy:
            others.insert(100, ([0], asked(10, 100)))
        times = [time.perf_counter()]
        for _ in llm.as_completed(others):
            times.append(time.perf_counter())
        gaps = 1e3 * np.diff(times)[args.slots :]
        beside = "while the largest schema comes" if busy else "alone"
        print(f"short free texts {beside}: {np.max(gaps):.1f} at most between two that end")


if __name__ == "__main__":
    main()
