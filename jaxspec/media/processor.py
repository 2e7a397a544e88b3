"""What a checkpoint's files say about how images and sounds are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.files import PREPROCESSOR, PROCESSOR, read_json

PARTS = ("image_processor", "feature_extractor")  # of a processor: for images, and for sounds


def settings_of(folder: Path, part: str) -> tuple[str, Mapping[str, Any]]:
    """(the name of a file, the settings that it has of a part of the processor); no settings where no file has some. The older of the two
    files is of one part alone, whose name it may say."""
    for name in (PROCESSOR, PREPROCESSOR):
        if (folder / name).exists():
            found = read_json(folder / name)
            if name == PROCESSOR:
                found = found.get(part)
            elif any(f"{other}_type" in found for other in PARTS if other != part):
                continue
            if isinstance(found, Mapping):
                return name, found
    return PROCESSOR, {}
