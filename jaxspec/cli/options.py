"""Options that several commands have, and what they ask for: a model that is loaded, a hub, a mesh."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any


def hub_options() -> argparse.ArgumentParser:
    """A parent for the parsers of commands: how models are fetched."""
    hub = argparse.ArgumentParser(add_help=False)
    hub.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub's model; id@R says the same, also of a drafter")
    hub.add_argument("--token", metavar="T", help="token of a Hugging Face account (default: HF_TOKEN, or the one that is logged in)")
    hub.add_argument("--cache-dir", metavar="DIR", help="where the hub's models are kept (default: where HF_HOME says)")
    hub.add_argument("--local-files-only", action="store_true", help="take what has been downloaded, and ask no hub")
    return hub


def model_options(hub: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Another: what is loaded, and how it chooses tokens. hub: what `hub_options` returns."""
    model = argparse.ArgumentParser(add_help=False, parents=[hub])
    model.add_argument("--target", default="pocket", help="hub id, folder or bundled name (default: pocket)")
    model.add_argument("--drafter", help="hub id, folder or bundled name; same for the one in the target's checkpoint (default: none)")
    model.add_argument("--adapter", help="LoRA adapter of PEFT to merge into the target: folder or hub id (default: none)")
    model.add_argument("--tokenizer", help="checkpoint with the tokenizer: folder or hub id (default: the target)")
    model.add_argument("--k", type=int, metavar="K", help="number of tokens to draft in each round")
    text = "guess trees of N candidates, such as 15, where at most 4 sequences decode (default: chains)"
    model.add_argument("--tree", type=int, metavar="N", help=text)
    model.add_argument("--dtype", default="auto", help="dtype of the weights: auto, float32 or bfloat16 (default: auto)")
    add_quantize(model)
    text = "what the target's fp8 weights are multiplied with is rounded too: fp8 (default: activations stay float)"
    model.add_argument("--quantize-activations", metavar="KIND", help=text)
    text = "read an 8-bit copy of the head to choose tokens; texts are the same (default: on Hopper GPUs with enough memory)"
    model.add_argument("--head-guide", action=argparse.BooleanOptionalAction, help=text)
    model.add_argument("--kv-dtype", default="auto", help="dtype of the target's cache: auto, float32, bfloat16 or fp8 (default: auto)")
    model.add_argument("--max-len", type=int, metavar="N", help="most tokens of a sequence, including its prompt")
    model.add_argument("--max-tokens", type=int, metavar="N", help="most new tokens (default: up to max-len)")
    model.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's)")
    text = "choose among the N most likely tokens; 0 means all (default: the checkpoint's)"
    model.add_argument("--top-k", type=int, metavar="N", help=text)
    text = "choose among the most likely tokens whose probabilities add up to P; 1 means all (default: the checkpoint's)"
    model.add_argument("--top-p", type=float, metavar="P", help=text)
    text = "choose among tokens at least P times as likely as the most likely one; 0 means all (default: the checkpoint's)"
    model.add_argument("--min-p", type=float, metavar="P", help=text)
    model.add_argument("--repetition-penalty", type=float, metavar="R", help="1 means none (default: the checkpoint's)")
    model.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    model.add_argument("--accept", default="coupled", help="rule that accepts drafts: coupled, standard or block (default: coupled)")
    model.add_argument("--mesh", metavar="AXIS=N,...", help="devices to spread the model over, such as tensor=4 (default: one device)")
    model.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    text = """what a text must look like, such as '{"regex": "[0-9]+"}' or '{"json": {"type": "object", ...}}'"""
    model.add_argument("--structured-outputs", type=_object, metavar="JSON", help=text)
    model.add_argument("--ignore-eos", action="store_true", help="do not stop at the checkpoint's end tokens")
    model.add_argument("--stats", action="store_true", help="print speed and acceptance at the end")
    return model


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how float weights are quantised as they are read."""
    parser.add_argument("--quantize", metavar="KIND", help="quantise the target's float weights: int8, int4 or fp8 (default: as they are)")
    text = "quantise the target's embeddings, of which one is its head too: int8 (default: as they are)"
    parser.add_argument("--quantize-embedding", metavar="KIND", help=text)
    text = "quantise the drafter's float weights: int8, int4 or fp8 (default: as they are)"
    parser.add_argument("--quantize-drafter", metavar="KIND", help=text)


def without_mark(text: str) -> str:
    """What was read, without the byte order mark that some editors write before it."""
    return text.removeprefix("\ufeff")


def _object(text: str) -> Any:
    """A JSON object of the command line."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a JSON object")
    return found


def load_model(args: argparse.Namespace, **settings: Any) -> tuple[Any, Any]:
    """(llm, sampling params). settings: of `load`, beside those that every command has."""
    from jaxspec.engine.params import SamplingParams
    from jaxspec.loading import load

    names = (
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "stop",
        "seed",
        "ignore_eos",
        "structured_outputs",
    )
    params = SamplingParams(**{name: getattr(args, name) for name in names})
    progress = sys.stderr.isatty()
    llm = load(
        args.target,
        args.drafter,
        num_draft_tokens=args.k,
        tree=args.tree,
        dtype=args.dtype,
        quantize=args.quantize,
        quantize_embedding=args.quantize_embedding,
        quantize_activations=args.quantize_activations,
        quantize_drafter=args.quantize_drafter,
        head_guide=args.head_guide,
        kv_dtype=args.kv_dtype,
        max_len=args.max_len,
        accept=args.accept,
        mesh=mesh_of(args),
        adapter=args.adapter,
        tokenizer=args.tokenizer,
        progress=progress,
        **dataclasses.asdict(hub_of(args)),
        **settings,
    )
    return llm, params


def hub_of(args: argparse.Namespace) -> Any:
    """How models are fetched."""
    from jaxspec.checkpoint.hub import Hub

    return Hub(args.revision, args.token, args.cache_dir, args.local_files_only)


def mesh_of(args: argparse.Namespace) -> Any:
    """The mesh that was asked for, or None."""
    from jaxspec.sharding import meshes

    return None if args.mesh is None else meshes.mesh_of(args.mesh)
