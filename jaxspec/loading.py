"""`load`: from the names of a target and a drafter to an LLM. Everything about a model is checked here, before its weights are read."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec import checkpoint, drafters, sharding
from jaxspec.audio import Sounds
from jaxspec.audio.sounds import check_libraries
from jaxspec.checkpoint.hub import TOKENIZER, Hub, located
from jaxspec.checkpoint.peft import read_adapter
from jaxspec.checks import cache_folder, integer, path
from jaxspec.decode.accept import Rule, rule_of
from jaxspec.decode.round import check_tree_rule
from jaxspec.drafters.base import Drafter
from jaxspec.engine.device_lock import DeviceLock
from jaxspec.engine.learn import Origin, check_left, check_out
from jaxspec.engine.learn import check as check_learning
from jaxspec.engine.llm import LLM
from jaxspec.engine.memory import check_limits, memory_limit, memory_used
from jaxspec.engine.new_weights import Reader
from jaxspec.engine.params import MAX_SEED
from jaxspec.engine.settings import Settings, adaptive_obstacle, check_pages, in_kernels
from jaxspec.foreign_names import answers_foreign_names
from jaxspec.interrupts import heeded
from jaxspec.learning.settings import Learn, learn_of
from jaxspec.media.tower import rooms_of
from jaxspec.model.draft_tree import DraftTree, tree_of
from jaxspec.planning import KV_DTYPES, pair_of, plan, with_head_guides
from jaxspec.progress import watched
from jaxspec.sharding.placement import Placement, placement_of
from jaxspec.targets import abstract_target, eos_token_ids, load_target, max_len_of, quantisation_of, weights_dtype
from jaxspec.text import load_tokenizer
from jaxspec.vision import Images, Videos
from jaxspec.vision.images import check_pillow
from pallas_kernels import dialect, lm_head

MAX_SLOTS = 8  # where a device does not say how much memory it has


WITH_TOWERS = {"images=True": Images, "audio=True": Sounds}  # how `load` is asked to read them


@answers_foreign_names
@heeded()
def load(
    target: str | os.PathLike[str],
    drafter: str | os.PathLike[str] | Drafter | None = None,
    *,
    num_draft_tokens: int | None = None,
    adaptive_verification: bool | None = None,
    tree: int | Sequence[Sequence[int]] | DraftTree | None = None,
    dtype: Any = "auto",
    quantize: str | None = None,
    quantize_embedding: str | None = None,
    quantize_activations: str | None = None,
    quantize_drafter: str | None = None,
    head_guide: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
    tensor: int | None = None,
    max_slots: int | None = None,
    max_len: int | None = None,
    accept: str | Rule = "coupled",
    attention: str = "auto",
    draft_attention: str = "auto",
    kv_dtype: str = "auto",
    kv_pages: int | None = None,
    memory_fraction: float = 0.9,
    seed: int = 0,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    learn: float | Learn | None = None,
    images: bool | int = False,
    videos: bool | int = False,
    audio: bool = False,
    progress: bool | None = None,
) -> LLM:
    """Loads a target, and a drafter that guesses for it, and returns an LLM.

    target: a Hugging Face hub id, a checkpoint folder, a bundled name ("pocket"), a GGUF file, or owner/name:Q4_0 for one on the hub.

    drafter: the same ("pocket-mtp"; a target serves as a draft model), "same" for the one in the target's own checkpoint (its MTP layers,
    or what was converted with it), "ngram" to look guesses up in what sequences have said, a Drafter object, or None to decode one token
    a step.

    num_draft_tokens: tokens guessed in each round. By default what the drafter's generation_config.json says, else what its kind was
    made for (the rows of a DFlash or DSpark block that guess, the number in an EAGLE-3 speculator's config, one for each MTP module),
    else 4.

    adaptive_verification: whether calls after `LLM.warmup` choose how many tokens a round guesses, up to num_draft_tokens, and how many of
    the guesses it verifies: those that are most likely accepted, by the drafter's confidence (DSpark has one) or by what was accepted so
    far. Texts are the same. By default they do if num_draft_tokens is not given; without, each round guesses and verifies just as many.

    tree: what rounds guess and verify where at most 4 sequences decode: a tree of drafts, with more than one candidate after a token. A
    number of nodes, such as 15, or a list of paths of ranks: [[0], [1], [0, 0]] has the drafter's two best candidates, and the best one
    after the first of them. Texts are the same. For the MTP assistant, EAGLE-3 and DSpark and the rule "coupled", on one device.
    More sequences get chains. None: chains alone.

    dtype: of weights and cache, "float32" or "bfloat16". "auto" is the checkpoint's own on GPUs, and float32 elsewhere and for float16,
    whose range activations exceed.

    quantize: "int8" or "fp8" (e4m3; a scale for each output) or "int4" (a scale for 32 inputs) quantises the target's float weights as
    they are read: the matrices of its layers, not embeddings, head, norms and routers. Products are those of the dequantised weights; what
    they are multiplied with stays float, unless quantize_activations says otherwise. None takes the weights as the checkpoint has them,
    which may be quantised already.

    quantize_embedding: "int8" quantises the target's float token embedding, which is its head too, with a scale for each token, and the
    per-layer embeddings of E2B and E4B, with a scale for 64 numbers; alone or beside matrices that are quantised in any way. None takes
    them as the checkpoint has them.

    quantize_activations: "fp8" rounds what the target's fp8 weights are multiplied with to fp8 too: each row to e4m3 times the least power
    of two by which it fits. It needs such weights, by quantize="fp8" or in the checkpoint; routed experts, routers, embeddings and heads
    take their inputs as they are. It is a little less exact, and texts may depend a little on the drafter and the batch, since the last bit
    of a sum may decide how a number is rounded. None, the default, leaves activations float, also where the checkpoint's config has them
    rounded.

    quantize_drafter: "int8", "int4" or "fp8" quantises the drafter's float weights in the same way, as they are read from its checkpoint;
    texts stay the same. Its heads have 8 bits ("int8") in all three, be it an assistant's or draft model's token embedding, a head of a
    draft vocabulary, MTP modules' heads or DSpark's Markov output; what is gathered from stays float: centroid heads, other embeddings, and
    DFlash2's codebooks. A drafter whose weights are quantised already is read as it is, without it. It may not learn.

    head_guide: whether kernels that choose the tokens of few rows read an 8-bit copy of the head, and of the head itself only the tokens
    that the copy leaves in question. Texts are the same, and half as much is read. A copy takes half as much memory as its head; heads of
    targets and assistants have one if they are float and the token embedding too. By default on Hopper GPUs, where the copies take little
    of the memory that weights leave.

    mesh: devices to spread weights and slots over: a Mesh with axes "data" and "tensor", as `jaxspec.mesh(data=2, tensor=4)` makes it;
    one device by default. Over several processes, only "tensor" may be spread. tensor: short for a mesh of so many devices along
    "tensor".

    max_slots: sequences in flight. By default as many as memory allows, at most 64, and 8 where a device does not say what it has.
    All data shards have equally many, so the number is rounded up to a multiple of that of the shards.

    max_len: tokens of a sequence, its prompt included. By default the model's maximum, but at most 4096.

    accept: the acceptance rule. "coupled" keeps a draft exactly when it is what the target chooses. "standard" and "block" are rejection
    sampling: they keep a little more at temperatures above 0 and make texts depend on the drafter. `accept.synthetic(rates)` is for
    benchmarks.

    attention: implementation of attention and of the kernels around it, "xla" or "triton" (GPUs of compute capability 8.0 and newer).
    "auto" takes the kernels where they run. draft_attention: the same for the drafter. With "auto", a drafter that reads the target's
    cache takes `attention`, and any other chooses for itself.

    kv_dtype: of the target's cache, "float32", "bfloat16" or "fp8" (e4m3: half the memory of bfloat16, at some cost in accuracy). "auto"
    is the dtype of the weights.

    kv_pages: pages of 64 tokens that the full-attention layers of all sequences share, on each data shard; at least what a sequence of
    max_len takes. By default as many as all slots can fill, or as fit. With fewer than all can fill, the youngest sequence is preempted
    when they run out, and computed again later.

    memory_fraction: the share that weights and cache may take of the memory that JAX takes of a device: 75 % of a GPU's, unless
    XLA_CLIENT_MEM_FRACTION says otherwise when JAX starts. seed: from which seeds are drawn for requests that
    name none. progress: whether to show progress bars; None: if stderr is a terminal, or in a notebook.

    adapter: a LoRA adapter of PEFT for the target, a folder or a hub id. It is merged into the float weights as they are read, in float32,
    rounded to the dtype of the checkpoint's weights, and before `quantize`: see `checkpoint.peft`.

    tokenizer: a checkpoint whose tokenizer and chat template are read, a hub id, a folder or a bundled name; the target's own by default.

    revision: a branch, tag or commit of the target, if it is a hub's; of any hub id, owner/name@revision says the same. token: of the
    account that may read the models, by default the one that is logged in. cache_dir: where the hub's models are kept, by default where
    HF_HOME says. local_files_only: take what is there, and ask no hub. The last three hold for the drafter, the adapter and
    the tokenizer too.

    learn: the share of the time spent generating in which the drafter learns from the texts that are written, such as 0.05, or all
    settings as a `Learn`; texts stay the same. Slots are planned beside what it takes. See `LLM.learn`, which begins it later. None: the
    drafter stays as it is.

    images: whether prompts may have images: True, or how many tokens of one at most, 70, 140, 280, 560 or 1120 (True takes what the
    checkpoint says, 280 as a rule). Then the checkpoint's image tower is read beside the text model, in the same dtype, and prompts of
    `generate` and `chat` may hold images. It needs Pillow.

    videos: whether prompts may have videos, of which the image tower reads some frames: True, or how many of one at most (True takes what
    the checkpoint says, 32 as a rule). They may have images too then. It needs Pillow and PyAV.

    audio: whether prompts may have sounds, for which the checkpoint's audio tower is read in the same way: E2B, E4B and 12B
    hear. It needs soundfile and soxr.

    Raises FileNotFoundError, PermissionError (a gated model), ValueError or TypeError that says what was found and what was expected: for a
    checkpoint that is missing, damaged or of another kind, weights that are to be quantised and are already, activations that are to be and
    whose weights are not in fp8, a drafter or an adapter that does not fit, a setting out of range; ImportError for images without
    Pillow, for videos without PyAV, and for sounds without soundfile and soxr.
    An argument that vLLM or transformers has is answered with its name here.
    """
    path("target", target, "a hub id, a folder or a bundled name")
    if adapter is not None:
        path("adapter", adapter, "a folder or a hub id")
    if tokenizer is not None:
        path("tokenizer", tokenizer, "a hub id, a folder, a bundled name or None")
    rule = rule_of(accept)
    check_names(attention=attention, draft_attention=draft_attention, kv_dtype=kv_dtype)
    check_limits(memory_fraction, max_slots)
    seed, progress = integer("seed", seed, 0, MAX_SEED - 1), watched(progress)
    placement, learning = _placement(mesh, tensor), None if learn is None else learn_of(learn)
    grown = None if tree is None else tree_of(tree)
    for name, given in (("images", images), ("videos", videos)):
        if not isinstance(given, bool):
            integer(name, given, 1)
    if not isinstance(audio, bool):
        raise TypeError(f"audio is {audio!r}, expected True or False")

    hub = Hub(revision, token, cache_dir, local_files_only)
    asked = {"quantize": quantize, "quantize_embedding": quantize_embedding, "quantize_activations": quantize_activations}
    dtype_of = functools.partial(weights_dtype, dtype)
    pair = pair_of(target, drafter, hub, dtype=dtype_of, adapter=adapter, quantize_drafter=quantize_drafter, **asked)
    config, max_len = pair.config, max_len_of(pair.config, max_len)
    count = pair.num_draft_tokens(num_draft_tokens, max_len)
    rule.check(count)
    if learning is not None:
        check_learning(learning, pair.drafter, rule.name, count)
        check_out(learning, pair.drafter_folder)  # this and the next: before weights are read, which takes long
        check_left(learning, pair.drafter, config, pair.dtype)
    if adaptive_verification not in (None, True, False):
        raise TypeError(f"adaptive_verification is {adaptive_verification!r}, expected True, False or None")
    if adaptive_verification and (obstacle := adaptive_obstacle(rule, count)):
        raise ValueError(f"adaptive_verification is True and {obstacle}")
    if grown is not None:
        check_tree_rule(rule)
        pair.check_tree(grown)
        if not count:
            raise ValueError("tree is given and num_draft_tokens is 0; expected drafts")
        if placement.size > 1:
            raise ValueError(f"tree is given and there are {placement.size} devices; expected one")
    if kv_pages is not None:
        check_pages(integer("kv_pages", kv_pages, 1), max_len)
    shards = placement.shards
    wanted = None if max_slots is None else -(-max_slots // shards)
    longest = count if grown is None else max(count, grown.depth)
    assert pair.folder is not None
    towers, seen = _towers(pair.folder, pair.dtype, images, videos, audio)
    changes = {kind: {} if adapter is None else tower.changes(read_adapter(adapter, hub)) for kind, tower in towers.items()}
    if adapter is not None and not (pair.changes or any(changes.values())):
        left = [f"{own.noun}, load with {name}" for name, own in WITH_TOWERS.items() if own not in map(type, towers.values())]
        otherwise = f"; if it changes the {', and if it changes the '.join(left)}" if left else ""
        raise ValueError(f"the adapter {os.fspath(adapter)!r} changes none of the target's text weights{otherwise}")
    rooms = rooms_of(towers.values())
    sizes = {"max_len": max_len, "num_draft_tokens": longest, "kv_dtype": kv_dtype, "slots": wanted, "pages": kv_pages}
    sizes["insert_rows"] = max(rooms, default=0)
    with DeviceLock(placement.summing_devices)():  # kernels that add up over devices may be tried
        kernels = in_kernels(attention)
        room, used = _room(memory_fraction)
        if room is not None:
            room -= sum(tower.bytes_needed(dialect.obstacle() is None) for tower in towers.values())
        pays = attention != "xla" and lm_head.guide_pays()
        placement = with_head_guides(placement, pair.target, pair.drafter, head_guide, room, pays=pays)
        sizes |= {"kernels": kernels, "default_slots": MAX_SLOTS, "learn": learning, "used": used}
        _, chosen = plan(pair, room, placement=placement, **sizes)
    settings = Settings(
        num_draft_tokens=count,
        max_slots=chosen.slots * shards,
        max_len=max_len,
        accept=rule,
        attention=attention,
        draft_attention=draft_attention,
        kv_dtype=KV_DTYPES[kv_dtype],
        kv_pages=chosen.pages,
        prefix_bytes=chosen.prefix_bytes,
        adaptive=num_draft_tokens is None if adaptive_verification is None else adaptive_verification,
        tree=grown,
        insert_rows=rooms,
        seed=seed,
        progress=progress,
    )

    folder = checkpoint.resolve(target, hub)  # only now, since a target's weights are a long download
    found_tokenizer = load_tokenizer(folder if tokenizer is None else located(tokenizer, hub.of_others, TOKENIZER))
    enable_compilation_cache()
    quantisation = quantisation_of(folder, config, pair.dtype, **asked)  # again: the weights' headers may say more than the config
    abstract = placement.place(abstract_target(config, pair.dtype, quantisation))
    weights = load_target(folder, abstract, quantisation, pair.changes, progress=progress)
    if pair.drafter_folder is not None:
        settings_of_drafter = {"quantize": quantize_drafter, "place": placement.place, "progress": progress}
        loaded = drafters.load_drafter(pair.drafter_folder, config, pair.dtype, **settings_of_drafter)
    else:
        loaded = placement.put(pair.drafter)
    read = {kind: tower.with_weights(folder, changes[kind]) for kind, tower in towers.items()}
    llm = LLM(
        placement.spread(weights),
        placement.spread(loaded),
        found_tokenizer,
        settings,
        eos_token_ids=eos_token_ids(config, pair.generation),
        defaults=pair.defaults,
        placement=placement,
        name=os.fspath(target) + (f"@{revision}" if revision else "") + (f" with {os.fspath(adapter)}" if adapter else ""),
        origin=Origin(loaded, pair.drafter_folder, config),
        towers=read if seen is None else {**read, "video": seen.with_tower(read["image"].tower)},
        reader=Reader(
            name=os.fspath(target),
            config=config,
            dtype=pair.dtype,
            quantisation=quantisation,
            asked=asked,
            quantize_drafter=quantize_drafter,
            placement=placement,
            hub=hub,
            towers=tuple(towers.values()),
            progress=progress,
        ),
    )
    if learning is not None:
        try:
            llm.learn(learning)
        except BaseException:
            llm.close()  # gives the devices' memory back
            raise
    return llm


def check_names(**chosen: str) -> None:
    """Raises ValueError for an implementation or a kv_dtype that does not exist, or that cannot run here."""
    implementations = ("auto", *dialect.IMPLEMENTATIONS)
    offered = {"attention": implementations, "draft_attention": implementations, "kv_dtype": tuple(KV_DTYPES)}
    for name, value in chosen.items():
        if value not in offered[name]:
            raise ValueError(f"{name} is {value!r}; available: {', '.join(map(repr, offered[name]))}")
        if value == "triton" and (obstacle := dialect.obstacle()):
            raise ValueError(f"{name} is 'triton', but {obstacle}")


def _placement(mesh: jax.sharding.Mesh | None, tensor: int | None) -> Placement:
    """Where `load` was told to put everything. Raises TypeError or ValueError."""
    if tensor is not None:
        if mesh is not None:
            raise ValueError(f"tensor is {tensor} and mesh is given too; expected one of them")
        mesh = sharding.mesh(tensor=integer("tensor", tensor, 1))
    placement = placement_of(mesh)
    placement.check()
    return placement


def _towers(
    folder: Path, dtype: Any, images: bool | int, videos: bool | int, audio: bool
) -> tuple[dict[str, Images | Sounds], Videos | None]:
    """What is to make rows of images and sounds, by kind, and of videos, with the tower of images; of the towers there are shapes alone."""
    found, seen = dict[str, Images | Sounds](), None
    if images or videos:
        check_pillow()
        found["image"] = tower = Images.read(folder, dtype, None if isinstance(images, bool) else images)
        seen = Videos.read(folder, tower, None if videos is True else videos) if videos else None
    if audio:
        check_libraries()
        found["audio"] = Sounds.read(folder, dtype)
    return found, seen


def _room(fraction: float) -> tuple[int | None, int]:
    """Bytes of a device that may be taken, None where it does not say, and those that are in use."""
    device = jax.local_devices()[0]
    limit = memory_limit(device)
    if limit is None:
        return None, 0
    used = memory_used(device)
    return int(fraction * limit) - used, used


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, in JAXSPEC_CACHE_DIR or ~/.cache/jaxspec, unless JAX was told a folder."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
        # JAX decides once whether it has a cache; if anything was compiled before, it decided without a folder.
        compilation_cache.reset_cache()
