"""An LLM beside transformers, which runs the same checkpoint on the CPU: log-probabilities of texts, and what was written with drafts."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import checkpoint
from jaxspec.checkpoint.files import CONVERTED
from jaxspec.checkpoint.tensors import gguf_in
from jaxspec.checks import integer, type_name
from jaxspec.engine.llm import LLM
from jaxspec.engine.params import SamplingParams

# Of several sorts. Together and repeated they are longer than a window.
TEXTS = (
    "The ferry left at six, while the harbour was still dark. Anna had bought two tickets, and now she stood at the rail alone and watched "
    "the lights of the town get smaller. She would write to him from the island, she thought, or perhaps she would not.",
    "def mean_and_deviation(values):\n    if not values:\n        raise ValueError('expected a value')\n    mean = sum(values) / "
    "len(values)\n    squares = sum((value - mean) ** 2 for value in values)\n    return mean, (squares / len(values)) ** 0.5\n",
    "Das Museum ist dienstags bis sonntags von 10 bis 18 Uhr geöffnet. Der Eintritt kostet 8 Euro, für Kinder unter zwölf Jahren ist er "
    "frei. Führungen beginnen um 11 und um 15 Uhr am Haupteingang.",
    "窓の外では雨が降り続いていた。彼は机の上の手紙をもう一度読み、それから静かに引き出しにしまった。",
    '{"order": 1047, "items": [{"name": "lamp", "price": 39.5, "count": 2}, {"name": "desk", "price": 210.0, "count": 1}], "total": 289.0}',
    "Question: A train leaves at 14:20 and arrives at 17:05. How long does the journey take?\nAnswer: From 14:20 to 17:05 it is 2 hours "
    "and 45 minutes, which are 165 minutes.\n",
)
BEYOND = 64  # tokens of the longest text past a window


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    reference: the model of transformers. drafts: what guessed, in words. exact: whether both compute in float32, with float weights. here,
    there: the log-probabilities of the texts' tokens by the LLM and by the reference, [tokens] float32. same: before which of them both
    would choose the same, [tokens] bool. gaps: of each token that the LLM wrote, by how much the reference's own choice is likelier in its
    log-probabilities, [written] float32; 0 where they are one.
    """

    reference: str
    drafts: str
    exact: bool
    here: np.ndarray
    there: np.ndarray
    same: np.ndarray
    gaps: np.ndarray

    @property
    def differences(self) -> np.ndarray:
        """Of the texts' log-probabilities, [tokens] float32."""
        return np.abs(self.here - self.there)

    @property
    def limits(self) -> tuple[float, float]:
        """What rounding may make of the mean difference, and of a gap. Logits near 30 are 0.125 apart in bfloat16."""
        return (1e-3, 1e-2) if self.exact else (0.1, 0.5)

    @property
    def agrees(self) -> bool:
        """Whether both may be the same model, as far as rounding lets them tell. NaN never is."""
        mean, gap = self.limits
        return bool(self.differences.mean() <= mean and self.gaps.max() <= gap)

    def __str__(self) -> str:
        mean, gap = self.limits
        found = self.differences
        chosen = int((self.gaps == 0).sum())
        others = f", and the others are up to {self.gaps.max():.4f} less likely there" if chosen < len(self.gaps) else ""
        return "\n".join(
            (
                f"reference   {self.reference}",
                f"texts       {len(found):,} tokens: log-probabilities differ by {found.mean():.5f} in the mean, {found.max():.5f} at most",
                f"            in the mean they are {self.here.mean():.4f} here and {self.there.mean():.4f} there",
                f"            before {100 * self.same.mean():.1f} % of the tokens both would choose the same",
                f"written     {len(self.gaps):,} tokens with {self.drafts}: {chosen:,} are the reference's choice{others}",
                f"result      {'they agree' if self.agrees else 'THEY DIFFER'} (limits: {mean} in the mean, {gap} for a choice)",
            )
        )


def compare(llm: LLM, folder: Path, *, texts: Sequence[str] = TEXTS, tokens: int = 32, dtype: str = "auto") -> Comparison:
    """Compares an LLM with transformers, which reads the checkpoint in `folder` anew and runs it on the CPU.

    texts: of which log-probabilities are compared, and after each of which `tokens` tokens are written greedily, with the LLM's drafter;
    they are cut to what fits. One more is made of all, which is longer than a window if that fits. dtype: of the reference, "float32",
    "bfloat16" or "auto", the checkpoint's. Raises what `reference_class` raises, and ValueError for texts that are too short.
    """
    kind, most = reference_class(folder), max(llm.max_len - integer("tokens", tokens, 1) - 1, 0)
    prompts = [llm.tokenizer.encode(text)[:most] for text in texts]
    longest = min(getattr(llm.config, "sliding_window", 0) + BEYOND, most)
    prompts.append(list(itertools.islice(itertools.cycle(itertools.chain(*prompts)), longest)))
    if any(len(ids) < 2 for ids in prompts):
        raise ValueError(f"a text has fewer than two tokens, or max_len, {llm.max_len}, has no room for two and for {tokens} others")
    params = SamplingParams(temperature=0, max_tokens=tokens, prompt_logprobs=1, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    for answer in answers:
        if answer.error is not None:
            raise ValueError(f"a text could not be continued: {answer.error}")
    try:
        model = _read(kind, folder, dtype)
        found = [_compared(model, ids, answer) for ids, answer in zip(prompts, answers, strict=True)]
    except Exception as error:  # whatever PyTorch and readers of formats raise
        raise ValueError(f"transformers cannot run {folder}: {str(error) or type_name(error)}") from error
    name = str(model.dtype).removeprefix("torch.")
    count, steps = llm.settings.num_draft_tokens, sum(answer.stats.steps for answer in answers)
    length = sum(len(answer.token_ids) - 1 for answer in answers) / steps if steps else 1.0  # a first token is of no step
    return Comparison(
        f"{kind.__name__} of transformers {importlib.metadata.version('transformers')}, {name} on the CPU",
        f"{count} drafts a step, {length:.2f} tokens a step" if count else "no drafts",
        name == llm.target.dtype.name == "float32" and llm.text_settings["quantised"] is None,
        *(np.concatenate(parts) for parts in zip(*found, strict=True)),
    )


def reference_class(folder: Path) -> Any:
    """The class of transformers for a checkpoint. Raises ImportError without PyTorch, ValueError for a checkpoint that transformers cannot
    read."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError("transformers runs models with PyTorch: pip install torch") from error
    import transformers

    if (folder / CONVERTED).exists():
        raise ValueError(f"{folder} was converted, and transformers cannot read it; expected the checkpoint that it was made from")
    if gguf_in(folder) is not None:
        raise ValueError(f"{folder} holds a GGUF file, which transformers does not read as it is; expected the checkpoint it was made from")
    named = checkpoint.read_config(folder).get("architectures") or ["none"]
    found = getattr(transformers, str(named[0]), None)
    if found is None:
        version = importlib.metadata.version("transformers")
        raise ValueError(f"{folder}: transformers {version} has no model {named[0]!r}, which its config.json names")
    return found


def _read(kind: Any, folder: Path, dtype: str) -> Any:
    """A model of transformers. Raises ValueError where transformers would draw weights at random, since it does not find them."""
    model, report = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"it finds no {missing[0]} there, which is 1 of {len(missing)} missing weights")
    return model.eval()


def _compared(model: Any, ids: list[int], answer: Any) -> tuple[np.ndarray, ...]:
    """(here, there, same, gaps) of a text and what was written after it: see `Comparison`."""
    import torch

    written, rows = answer.token_ids, answer.prompt_logprobs[1:]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids + written]), use_cache=False).logits[0, :-1].float()
    following = torch.tensor(ids[1:] + written)
    of_token, best = logits.gather(1, following[:, None])[:, 0], logits.max(dim=1)
    there, gaps, choice = ((of_token - logits.logsumexp(1)).numpy(), (best.values - of_token).numpy(), best.indices.numpy())
    count = len(rows)
    here = np.array([row[token].logprob for row, token in zip(rows, ids[1:], strict=True)], np.float32)
    own = [next(token for token, found in row.items() if found.rank == 1) for row in rows]
    return here, there[:count], choice[:count] == own, gaps[count:]
