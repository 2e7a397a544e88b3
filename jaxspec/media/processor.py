"""What a checkpoint's files say about how images, sounds and videos are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.files import PREPROCESSOR, PROCESSOR, VIDEOS, read_json

# Of a processor: for images, for sounds and for videos; and the older file that is of it alone, or of it or another.
PARTS = {"image_processor": PREPROCESSOR, "feature_extractor": PREPROCESSOR, "video_processor": VIDEOS}


def settings_of(folder: Path, part: str) -> tuple[str, Mapping[str, Any]]:
    """(the name of a file, the settings that it has of a part of the processor); no settings where no file has some. The older file is of
    one part alone, whose name it may say."""
    for name in (PROCESSOR, PARTS[part]):
        if (folder / name).exists():
            found = read_json(folder / name)
            if name == PROCESSOR:
                found = found.get(part)
            elif any(f"{other}_type" in found for other in PARTS if other != part):
                continue
            if isinstance(found, Mapping):
                return name, found
    return PROCESSOR, {}
