"""Names to folders: bundled models, local folders and the Hugging Face hub."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoint import gguf
from jaxspec.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODELOPT_CONFIG, PICKLES, PROCESSORS, refuse_pickle
from jaxspec.checkpoint.foreign import refuse_file, refuse_foreign
from jaxspec.checks import expanded

# mask_embedding.pt is a pickle: we download it so that loading refuses it, where it would otherwise be missed silently.
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "mask_embedding.pt"]
CONFIGS = ["config.json", "generation_config.json", MODELOPT_CONFIG, ADAPTER_CONFIG, *PROCESSORS]
ADAPTER = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
TOKENIZER = ["tokenizer*", "*.jinja", "special_tokens_map.json"]
# Of a model that the hub has as GGUF files, a variant says which: Q4_0, say.
HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^@:]+))?(:(?P<variant>[\w.-]+))?")


@dataclasses.dataclass(frozen=True)
class Hub:
    """How models are fetched from the Hugging Face hub."""

    revision: str | None = None
    """A branch, a tag or a commit; None for the main branch."""
    token: str | bool | None = dataclasses.field(default=None, repr=False)
    """Of an account; None for the one that is logged in (`hf auth login`, or HF_TOKEN), False for none."""
    cache_dir: str | os.PathLike[str] | None = None
    """Where downloads are kept; by default where HF_HOME says."""
    local_files_only: bool = False
    """Whether to take what has been downloaded and ask no hub."""

    @property
    def of_others(self) -> Hub:
        """The same for another model, which has revisions of its own."""
        return dataclasses.replace(self, revision=None)


HUB = Hub()  # as nobody asks for anything


def resolve(name: str | os.PathLike[str], hub: Hub = HUB, *, weights: bool = True) -> Path:
    """The folder of a checkpoint.

    name: a bundled name such as "pocket", a local folder, a folder `models--owner--name` of a hub's cache, or a hub id, owner/name or
    owner/name@revision, which is downloaded. Also a GGUF file, or owner/name:variant for one of those that the hub has of a model; then
    the folder is one that its config and tokenizer are written to. weights: False downloads the configs alone, where they are by
    themselves.

    Raises FileNotFoundError if the name is none of these or cannot be downloaded, PermissionError for a model whose conditions have not
    been accepted, ValueError for a revision of what has none and for what is known to be no such checkpoint: see `foreign`.
    """
    path = expanded(name)
    if path.is_file() and gguf.is_gguf(path):
        _without_revision(hub, os.fspath(name))
        return gguf.folder_of(path)
    folder = located(name, hub, DOWNLOADED if weights else CONFIGS)
    if not any(folder.glob("*.safetensors")) and not all((folder / own).exists() for own in ("config.json", "tokenizer.json")):
        if (file := gguf.model_in(folder)) is not None:
            return gguf.folder_of(file)
    refuse_foreign(folder, os.fspath(name))
    return folder


def located(name: str | os.PathLike[str], hub: Hub, patterns: Sequence[str]) -> Path:
    """The folder of that name, whatever is in it. patterns: of the files to download. Raises as `resolve` does."""
    text = os.fspath(name)
    found = bundled()
    path = found.get(text) or expanded(text)
    if text and path.is_dir():
        if path.name.startswith("models--") and (path / "snapshots").is_dir():
            return _snapshot(path, hub.revision)
        _without_revision(hub, text)
        return path
    if path.suffix in PICKLES:
        raise ValueError(refuse_pickle([path.name]))
    if path.is_file():
        refuse_file(path)
    match = HUB_ID.fullmatch(text)
    if not match:
        rest = "; it is a drafter, to be given as drafter=" if text == "ngram" else ", nor the drafter 'ngram'"
        raise FileNotFoundError(f"{text!r} is neither a folder, nor a hub id (owner/name), nor bundled ({', '.join(sorted(found))}){rest}")
    if match["revision"]:
        if hub.revision not in (None, match["revision"]):
            raise ValueError(f"revision is {hub.revision!r}, but {text!r} names another; expected one of them")
        hub = dataclasses.replace(hub, revision=match["revision"])
    return _downloaded(match["id"], hub, patterns, match["variant"])


def _without_revision(hub: Hub, name: str) -> None:
    if hub.revision is not None:
        raise ValueError(f"revision is {hub.revision!r}, but {name!r} is no model of a hub, and has no revisions")


def _snapshot(folder: Path, revision: str | None) -> Path:
    """The snapshot in a model's folder of a hub's cache. revision: None for main, or the only one that is there."""
    snapshots, wanted = folder / "snapshots", revision or "main"
    ref = folder / "refs" / wanted
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else wanted
    there = sorted(path.name for path in snapshots.iterdir())
    if commit in there:
        return snapshots / commit
    if revision is None and len(there) == 1:
        return snapshots / there[0]
    raise FileNotFoundError(f"{folder} has no snapshot of revision {wanted!r}; found {', '.join(there) or 'none'}")


def _downloaded(model: str, hub: Hub, patterns: Sequence[str], variant: str | None) -> Path:
    """The folder of a model of the hub, with the files of these patterns; or that of its GGUF file, where it has no others."""
    of_models = patterns in (DOWNLOADED, CONFIGS)
    if of_models and (variant is not None or "gguf" in model.lower()):
        files = _listed(model, hub)
        if variant is not None or any(map(gguf.is_model, files)):
            return _downloaded_gguf(model, hub, files, variant)
    folder = _fetched(model, hub, patterns, ["*/*"])
    if of_models and not any(path.is_file() for path in folder.iterdir()) and any(map(gguf.is_model, files := _listed(model, hub))):
        return _downloaded_gguf(model, hub, files, variant)
    return folder


def _downloaded_gguf(model: str, hub: Hub, files: Sequence[str], variant: str | None) -> Path:
    """The folder of a GGUF file of the hub. files: those that the model has there. Raises ValueError where none is meant, or several."""
    if not files:
        _fetched(model, hub, [], [])  # raises if there is no such model
    found = gguf.chosen(files, variant)
    if len(found) != 1:
        name, names = model if variant is None else f"{model}:{variant}", ", ".join(gguf.chosen(files, None))
        of_these = f"holds {len(found)} GGUF models" if variant is None else f"names {len(found)} of the GGUF models there"
        raise ValueError(f"{name!r} {of_these} ({names or 'none'}); expected one, as {model}:Q4_0 names that with Q4_0 in its name")
    folder = _fetched(model, hub, gguf.names_of_parts(found[0]), [])
    return gguf.folder_of(folder / found[0])


def _fetched(model: str, hub: Hub, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
    """The folder of a model of the hub, with the files of these patterns. Raises as `resolve` does."""
    import huggingface_hub  # here, because it takes a while to import and only downloads need it
    from huggingface_hub import errors

    given: dict[str, Any] = {"revision": hub.revision, "token": hub.token, "cache_dir": hub.cache_dir}
    given = {name: value for name, value in given.items() if value is not None}
    if hub.local_files_only:
        given["local_files_only"] = True
    try:
        folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=[*patterns], ignore_patterns=[*ignored], **given))
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{model!r} is gated: accept its conditions at https://huggingface.co/{model}, then log in with `hf auth login`, set HF_TOKEN, "
            f"or give the account's token as token="
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"the hub has no model {model!r}, or it is private; for a private one log in with `hf auth login`, set HF_TOKEN, or give token="
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{model!r} has no revision {hub.revision!r} on the hub") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        where = "the hub's cache" if hub.cache_dir is None else os.fspath(hub.cache_dir)
        raise FileNotFoundError(
            f"{model!r} is not in {where}, or not whole, and no hub could be asked ({_why_no_hub(hub, error)}); download it first, or name "
            "a folder"
        ) from error
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{model!r} is not a folder, and the hub did not provide a model of that id: {error}") from error
    return folder


def _why_no_hub(hub: Hub, error: Exception) -> str:
    from huggingface_hub import constants

    if hub.local_files_only:
        return "local_files_only"
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else str(error.__cause__ or error).partition("\n")[0]


def _listed(model: str, hub: Hub) -> list[str]:
    """The names of a model's files on the hub, or where that says nothing of those in its cache."""
    import huggingface_hub

    if not hub.local_files_only:
        with contextlib.suppress(OSError, ValueError):
            return huggingface_hub.HfApi(token=hub.token).list_repo_files(model, revision=hub.revision)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        folder = _fetched(model, dataclasses.replace(hub, local_files_only=True), [], [])
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return []


def bundled() -> dict[str, Path]:
    """The bundled checkpoints, by name: pocket/target is "pocket", and pocket/X is "pocket-X" if it has a config.json."""
    root = Path(__file__).parent.parent / "pocket"
    folders = (path.parent for path in root.glob("*/config.json"))
    return {"pocket": root / "target"} | {f"pocket-{path.name}": path for path in folders if path.name != "target"}
