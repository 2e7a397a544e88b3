"""The command `jaxspec info`: a checkpoint is described, or what fits a GPU."""

from __future__ import annotations

import argparse
from typing import Any

from jaxspec.cli import environment, errors, options

QUANTISED = ("quantize", "quantize_embedding", "quantize_activations", "quantize_drafter")


def add_parser(commands: Any, hub: argparse.ArgumentParser) -> None:
    """Adds the command. hub: the options that say how models are fetched."""
    text = "Prints what a checkpoint contains and how much memory it needs; without one, which of the released models fit a device."
    info = commands.add_parser("info", parents=[hub], help="describe a checkpoint, or what fits a GPU", description=text)
    text = "hub id, folder or bundled name; e2b, e4b, 12b, 26b or 31b for a released shape; or a GPU's name (default: none)"
    info.add_argument("target", metavar="MODEL", nargs="?", help=text)
    info.add_argument("--drafter", help="also say whether this drafter fits: a checkpoint, or a kind such as mtp for a released shape")
    info.add_argument("--adapter", help="also say whether this LoRA adapter fits")
    info.add_argument("--quantize", metavar="KIND", help="as if the target's float weights were quantised: int8, int4 or fp8")
    info.add_argument("--quantize-embedding", metavar="KIND", help="as if its float token embedding were quantised: int8")
    info.add_argument("--quantize-activations", metavar="KIND", help="as if the inputs of its fp8 weights were rounded: fp8")
    info.add_argument("--quantize-drafter", metavar="KIND", help="as if the drafter's float weights were quantised: int8, int4 or fp8")
    info.add_argument("--mesh", metavar="AXIS=N,...", help="print what each device of a mesh holds, such as tensor=4 or data=2,tensor=4")
    text = "print how load would use a device's memory; the options below imply it"
    info.add_argument("--plan", action="store_true", help=text)
    info.add_argument("--memory", metavar="M", help="for --plan: a device's memory, such as 80GB, or a GPU's name (default: this device)")
    info.add_argument("--memory-fraction", type=float, default=0.9, metavar="F", help="for --plan: share of JAX's memory (default: 0.9)")
    info.add_argument("--kv-dtype", metavar="DTYPE", help="for --plan: dtype of the target's cache: auto, float32, bfloat16 or fp8")
    info.add_argument("--max-len", type=int, metavar="N", help="for --plan: most tokens of a sequence, including its prompt")
    info.add_argument("--max-slots", type=int, metavar="N", help="for --plan: most sequences at a time")
    info.add_argument("--k", type=int, metavar="K", help="for --plan: number of tokens to draft in each round")
    info.add_argument("--learn", action="store_true", default=None, help="for --plan: with a drafter that learns while it works")
    text = "for --plan: with prompts that have images, of at most N tokens each"
    info.add_argument("--images", type=int, nargs="?", const=True, metavar="N", help=text)
    info.add_argument("--audio", action="store_true", default=None, help="for --plan: with prompts that have sounds")
    info.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> None:
    with errors.door():
        lines = _lines(args, environment.memory_share())
    print("\n".join(lines))


def _lines(args: argparse.Namespace, jax_fraction: float) -> list[str]:
    """What the command prints. jax_fraction: the share of a device's memory that JAX takes. Raises what `describe.read` and
    `describe.describe_plan` raise."""
    from jaxspec.info import describe
    from jaxspec.info.cards import card_named
    from jaxspec.learning.settings import Learn

    named = None if args.target is None else card_named(args.target)
    card, shares = _card(args, named, jax_fraction)
    if args.target is None or named is not None:
        about = ("drafter", "adapter", *QUANTISED, "mesh", "kv_dtype", "max_len", "max_slots", "k", "learn", "images", "audio")
        given = [name for name in about if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} is about a model, and none is named")
        if card is None:
            raise ValueError("neither a model is named nor --memory given, and this device does not say what memory it has")
        return list(describe.describe_card(card, **shares))
    asked = {name: getattr(args, name) for name in ("adapter", *QUANTISED)}
    pair = describe.read(args.target, args.drafter, options.hub_of(args), **asked)
    shown = {} if args.memory is None else {"show": card.show}
    found = list(describe.describe(pair, args.target, args.drafter, **shown, kv_dtype=args.kv_dtype or "auto"))
    if args.mesh is not None:
        found += describe.describe_mesh(pair, args.mesh, **shown)
    settings = {"num_draft_tokens": args.k, "max_len": args.max_len, "max_slots": args.max_slots, "kv_dtype": args.kv_dtype}
    if args.learn:
        settings["learn"] = Learn()
    towers = [] if args.images is None else [describe.images_of(args.target, pair, None if args.images is True else args.images)]
    towers += [describe.sounds_of(args.target, pair)] if args.audio else []
    settings["towers"] = towers or None
    settings = {name: value for name, value in settings.items() if value is not None}
    if args.plan or args.memory is not None or settings:
        found += describe.describe_plan(pair, card, **shares, **settings, mesh=args.mesh)
    return found


def _card(args: argparse.Namespace, named: Any, jax_fraction: float) -> tuple[Any, dict[str, float]]:
    """(the device that a plan is made for, or None where this one does not say what memory it has; the shares of it that are taken)."""
    from jaxspec.info.cards import Card, card_of

    if named is not None and args.memory is not None:
        raise ValueError(f"{args.target!r} is a GPU, and --memory is {args.memory!r} too; expected one of them")
    if named is not None or args.memory is not None:
        return named or card_of(str(args.memory)), {"jax_fraction": jax_fraction, "memory_fraction": args.memory_fraction}
    import jax

    from jaxspec.engine.memory import memory_limit
    from pallas_kernels import device, lm_head

    here = jax.devices()[0]
    memory = memory_limit(here)
    card = None if memory is None else Card(here.device_kind, memory, device.obstacle() is None, hopper=lm_head.guide_pays())
    return card, {"memory_fraction": args.memory_fraction}
