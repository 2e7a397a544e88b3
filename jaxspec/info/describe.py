"""`jaxspec info`: what a checkpoint is and what it needs, as lines of text. It reads only configs, and asks no device."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import checkpoint, released
from jaxspec.audio import Sounds
from jaxspec.checkpoint.hub import HUB, Hub
from jaxspec.drafters import without_checkpoints
from jaxspec.drafters.base import NoDraft
from jaxspec.engine.memory import Sizes, check_limits, fit, most_slots, size, sizes_of
from jaxspec.engine.settings import PAGE
from jaxspec.info.cards import Card, gigabytes
from jaxspec.learning.settings import Learn, learnable
from jaxspec.loading import MAX_SLOTS, check_names
from jaxspec.media.tower import rooms_of
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.target import TargetConfig
from jaxspec.planning import KV_DTYPES, Pair, pair_of, plan, released_pair, with_head_guides
from jaxspec.sharding.placement import abstract_placement_of
from jaxspec.targets import max_len_of
from jaxspec.trees import bytes_per_device, leaves_by_path, nbytes, packed_kinds, weight_count
from jaxspec.vision import Images
from pallas_kernels.packed import Packed

LENGTHS = tuple(1024 * 4**i for i in range(6))
OFFERED_LEN = 4096  # tokens of a sequence at most, in the table of what fits a card


def read(target: str, drafter: str | None = None, hub: Hub = HUB, *, adapter: str | None = None, **asked: Any) -> Pair:
    """What the lines are about: a target under any name that `load` takes, or a released one such as "e4b", and a drafter for it.

    asked: quantize, quantize_embedding, quantize_activations and quantize_drafter. Raises as `load` does for what cannot be used and for a
    drafter that does not fit.
    """
    if target in released.TARGETS:
        if adapter is not None:
            raise ValueError(f"{target!r} is a released shape without weights, which no adapter can be merged into; expected a checkpoint")
        return released_pair(target, drafter, hub, **asked)
    if target.lower() in released.TARGETS and not Path(target).exists():
        raise FileNotFoundError(f"{target!r} is no folder; for the released shape expected {target.lower()!r}")
    return pair_of(target, drafter, hub, adapter=adapter, **asked)


def images_of(target: str, pair: Pair, max_soft_tokens: int | None = None) -> Images:
    """What reads images for a target, under the name that `read` had. Raises as `Images.read` does."""
    if pair.folder is not None:
        return Images.read(pair.folder, pair.dtype, max_soft_tokens)
    return released.images_of(target, pair.dtype, *([] if max_soft_tokens is None else [max_soft_tokens]))


def sounds_of(target: str, pair: Pair) -> Sounds:
    """The same of sounds."""
    return released.sounds_of(target, pair.dtype) if pair.folder is None else Sounds.read(pair.folder, pair.dtype)


def describe(
    pair: Pair, target: str, drafter: str | None = None, show: Callable[[int], str] = size, *, kv_dtype: str = "auto"
) -> Iterator[str]:
    """Yields lines about a target and a drafter. target, drafter: what the user called them. Sizes are of the text model, but for those of
    its image and audio towers. show: how bytes are told. kv_dtype: as in `jaxspec.load`, errors too."""
    check_names(kv_dtype=kv_dtype)
    config, tree, dtype = pair.config, pair.target, pair.dtype
    sliding, full = (sum(layer.kind == kind for layer in config.layers) for kind in (SLIDING, FULL))
    window = max(layer.window or 0 for layer in config.layers)
    shared = config.num_hidden_layers - len(config.kv_owners)
    experts = max(layer.num_experts for layer in config.layers)
    yield f"target      {pair.folder or target}"
    yield f"layers      {sliding} sliding (window {window}), {full} full" + (f"; {shared} share K and V" if shared else "")
    yield f"width       hidden {config.hidden_size}, feed-forward {config.intermediate_size}" + (f", {experts} experts" if experts else "")
    for kind in (SLIDING, FULL):
        spec = next((layer for layer in config.layers if layer.kind == kind), None)
        if spec is not None:
            name = kind.removesuffix("_attention")
            equal = ", K = V" if spec.k_eq_v else ""
            yield f"{name:<11} {spec.num_heads} heads, {spec.num_kv_heads} KV heads of {spec.head_dim}{equal}"
    yield f"vocabulary  {config.vocab_size}; positions {config.max_position_embeddings}; generation {pair.generation or 'unset'}"
    inputs = _embeddings(tree)
    yield f"parameters  {weight_count(tree):,}" + (f", of which {inputs:,} are per-layer embeddings" if inputs else "")
    yield f"weights     {show(nbytes(tree))} in {' and '.join([*packed_kinds(tree), jnp.dtype(dtype).name])}"
    if pair.quantisation is not None:
        yield f"quantised   {pair.quantisation.name}"
    if pair.changes:
        yield f"adapter     changes {len(pair.changes)} weights"
    cached = jnp.dtype(KV_DTYPES[kv_dtype] or dtype).itemsize
    per_token = {kind: kv_bytes_per_token(config, kind, cached) for kind in (SLIDING, FULL)}
    yield f"KV cache    sliding {per_token[SLIDING]:,} bytes a token, for the window; full {per_token[FULL]:,} bytes a token"
    with contextlib.suppress(TypeError, ValueError):  # no image tower, or one that cannot be read: `load` says why
        images = images_of(target, pair)
        tower = f"{weight_count(images.tower):,} parameters, {show(images.nbytes)}"
        yield f"vision      {tower}; with images=True, up to {images.max_soft_tokens} tokens an image"
    with contextlib.suppress(TypeError, ValueError):
        sounds = sounds_of(target, pair)
        yield f"audio       {weight_count(sounds.tower):,} parameters, {show(sounds.nbytes)}; with audio=True"
    if drafter in without_checkpoints():
        yield f"drafter     {drafter}, without weights; fits every target"
    elif drafter is not None:
        draft, folder = pair.drafter, pair.drafter_folder
        count = "unset" if folder is None else checkpoint.read_generation_config(folder).get("num_assistant_tokens", "unset")
        yield f"drafter     {folder or drafter}"
        kind = type(draft).__name__
        if readings := getattr(draft, "readings", ()):
            yield f"            its config.json leaves open {' or '.join(readings)}: the first rounds try both"
        held = f" in {' and '.join([*kinds, jnp.dtype(dtype).name])}" if (kinds := packed_kinds(draft)) else ""
        if (known := getattr(draft, "draft_vocab_size", None) or config.vocab_size) < config.vocab_size:
            yield f"            guesses {known:,} of the target's {config.vocab_size:,} tokens"
        yield f"            {kind}, fits; {weight_count(draft):,} parameters, {show(nbytes(draft))}{held}; num_assistant_tokens {count}"


def describe_plan(
    pair: Pair,
    card: Card | None = None,
    *,
    jax_fraction: float = 1.0,
    memory_fraction: float = 0.9,
    num_draft_tokens: int | None = None,
    max_len: int | None = None,
    max_slots: int | None = None,
    kv_dtype: str = "auto",
    mesh: str | None = None,
    learn: Learn | None = None,
    towers: Sequence[Images | Sounds] = (),
) -> Iterator[str]:
    """Yields lines about how `jaxspec.load` would use a device's memory, in the checkpoint's dtype.

    card: the device, of whose memory JAX takes jax_fraction; None shows only what each part takes, with kernels. mesh: such as
    "data=2,tensor=4"; the lines are about one of its devices. towers: what `Images.read` and `Sounds.read` give. All else is as in
    `jaxspec.load`, errors too.
    """
    check_limits(memory_fraction, max_slots)
    check_names(kv_dtype=kv_dtype)
    config, max_len, placement = pair.config, max_len_of(pair.config, max_len), abstract_placement_of(mesh)
    count, show = pair.num_draft_tokens(num_draft_tokens, max_len), size if card is None else card.show
    if learn is not None:
        learnable(pair.drafter)
    kernels, wanted = card is None or card.kernels, None if max_slots is None else -(-max_slots // placement.shards)
    room = None if card is None else int(memory_fraction * jax_fraction * card.memory)
    pays = card is not None and card.hopper
    limit = room
    if room is not None:
        room -= sum(tower.bytes_needed(kernels) for tower in towers)
    placement = with_head_guides(placement, pair.target, pair.drafter, None, room, pays=pays)
    settings: dict[str, Any] = {"num_draft_tokens": count, "kernels": kernels, "placement": placement, "learn": learn}
    settings["insert_rows"] = max(rooms_of(towers), default=0)
    sizes, chosen = plan(pair, room, max_len=max_len, kv_dtype=kv_dtype, slots=wanted, default_slots=MAX_SLOTS, show=show, **settings)
    slots, pages = chosen.slots, chosen.pages
    snapshots = min(chosen.prefix_bytes // sizes.slot, slots)  # as Runner takes them
    kept = sizes.kept(slots, pages) + snapshots * sizes.slot
    if card is not None and room is not None:
        yield _memory_line(card, jax_fraction, memory_fraction, limit or 0)
        if not kernels:
            yield f"            no kernels: the {card.name} runs XLA, whose attention takes more memory"
    with_guides = ", with guides of heads" if placement.head_guides else ""
    yield f"weights     {show(sizes.target)} target, {show(sizes.drafter)} drafter{with_guides}"
    for tower in towers:
        work = tower.bytes_needed(kernels) - tower.nbytes
        yield f"{tower.folder:<11} {show(tower.nbytes)} tower, {show(work)} for {tower.largest}"
    if learn is not None:
        yield f"learning    {show(sizes.learnt)} kept, {show(sizes.learning)} for an update of {learn.batch} texts of {learn.length} tokens"
    yield f"slot        {show(sizes.slot)}: sliding rings {show(sizes.rings)}; all else {show(sizes.slot - sizes.rings)}"
    yield f"page        {show(sizes.page)}: {PAGE} positions of full layers; {sizes.width} pages for max_len {max_len}"
    yield f"calls       about {show(sizes.work(slots))} for activations and logits, K = {count}"
    each = "" if placement.shards == 1 else f" for each of {placement.shards} data shards"
    yield f"plan        {slots} slots, {pages} pages, snapshots of {snapshots} prompts{each}"
    yield f"            {show(kept)} kept, {show(kept + sizes.work(slots))} with calls"
    if room is None:
        return
    yield "lengths     slots that can all grow to a max_len"
    for length in LENGTHS:
        if length <= config.max_position_embeddings:
            at = sizes_of(pair.target, pair.drafter, max_len=length, kv_dtype=KV_DTYPES[kv_dtype], **settings)
            yield f"            {length:>7} {most_slots(at, room, 10**6):>6}"


def describe_card(card: Card, *, jax_fraction: float = 1.0, memory_fraction: float = 0.9) -> Iterator[str]:
    """Yields lines about which released targets fit a card, each with its assistant: bytes of the weights of both, and how many sequences
    of up to OFFERED_LEN tokens `load` runs at a time by default. Settings as for `describe_plan`."""
    check_limits(memory_fraction, None)
    room = int(memory_fraction * jax_fraction * card.memory)
    yield _memory_line(card, jax_fraction, memory_fraction, room)
    yield f"target         weights   sequences of up to {OFFERED_LEN} tokens, with the assistant"
    for name, quantize in ((name, kind) for name, kinds in released.OFFERED.items() for kind in kinds):
        sizes, label = _offered(name, quantize, card.kernels), name.upper() + (f", {quantize}" if quantize else "")
        try:
            slots: int | str = fit(sizes, room).slots
        except ValueError:
            slots = "does not fit"
        yield f"{label:<12} {gigabytes(sizes.weights):>9}   {slots}"


def _memory_line(card: Card, jax_fraction: float, memory_fraction: float, room: int) -> str:
    """What a card has, and what of it weights and cache may take: `room` bytes."""
    taken = f", of which JAX takes {jax_fraction} (XLA_CLIENT_MEM_FRACTION)" if jax_fraction < 1 else ""
    return f"memory      {card.show(card.memory)}{taken}; memory_fraction {memory_fraction} of it is {card.show(room)}"


@functools.cache
def _offered(name: str, quantize: str | None, kernels: bool) -> Sizes:
    """What a released target needs with its assistant."""
    pair = released_pair(name, "mtp", quantize=quantize)
    count = pair.num_draft_tokens(None, OFFERED_LEN)
    return sizes_of(pair.target, pair.drafter, max_len=OFFERED_LEN, num_draft_tokens=count, kernels=kernels)


def describe_mesh(pair: Pair, text: str, show: Callable[[int], str] = size) -> Iterator[str]:
    """Yields lines about how the weights of a target and a drafter lie on a mesh such as "data=2,tensor=4".

    Weights that differ only in their layer share a line: how many they are, their PartitionSpec, and what a device holds of them. Raises
    as `meshes.mesh_of` does.
    """
    placement = abstract_placement_of(text)
    trees: dict[str, Any] = {"target": pair.target}
    if not isinstance(pair.drafter, NoDraft):
        trees["drafter"] = pair.drafter
    axes = ", ".join(f"{axis}={count}" for axis, count in placement.axes.items())
    yield f"mesh        {axes}: {placement.size} devices"
    for name, tree in trees.items():
        placed = placement.spread(placement.place(tree))
        groups: dict[tuple[str, Any], list[Any]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
            group = re.sub(r"\.\d+\.", ".*.", jax.tree_util.keystr(path, simple=True, separator="."))
            groups.setdefault((group, leaf.sharding.spec), []).append(leaf)
        whole = [group for group in groups if all(axis is None for axis in group[1])]
        replicated, repeated = (nbytes([groups[group] for group in whole]), nbytes(placed) - nbytes(tree))
        more = f"; {show(repeated)} more than on one device, for repeated KV heads" if repeated else ""
        yield f"{name:<11} {show(bytes_per_device(placed))} a device, {show(replicated)} of it replicated{more}"
        for group in [*(group for group in groups if group not in whole), *whole]:
            leaves = groups[group]
            spec = "replicated" if group in whole else f"P({', '.join(map(repr, group[1]))})"
            yield f"            {show(bytes_per_device(leaves)):>12}  {len(leaves):>3} x {group[0]}  {spec}"


def kv_bytes_per_token(config: TargetConfig, kind: str, itemsize: int) -> int:
    """Bytes that a token adds to the cache, over all layers of `kind` that own K and V. itemsize: bytes of an element."""
    owners = (config.layers[i] for i in config.kv_owners)
    return sum(spec.num_kv_heads * (spec.key_dims + spec.head_dim) * itemsize for spec in owners if spec.kind == kind)


def _embeddings(tree: Any) -> int:
    leaves = leaves_by_path(tree, whole=(Packed,))
    return sum(leaf.size for path, leaf in leaves.items() if path.startswith("embed_tokens_per_layer."))
