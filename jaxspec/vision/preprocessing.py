"""From an image's pixels to patches and their places, with Pillow and NumPy alone.

Facts: transformers `image_processing_pil_gemma4.py` 5.24, whose numbers these are, and `image_processing_gemma4_unified.py`, which
does the same with patches of another size.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checks import integer, number
from jaxspec.media.processor import settings_of
from jaxspec.vision.config import VisionConfig

SOFT_TOKENS = (70, 140, 280, 560, 1120)  # what max_soft_tokens may be
BICUBIC = 3  # Pillow's number for it
IDENTITY = {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images are made to fit. patch: pixels a side of a patch; pool: patches a side of the square that becomes one soft token;
    max_soft_tokens: the most of an image, one of SOFT_TOKENS, else ValueError; resample: the filter, by Pillow's number; rescale_factor:
    from 0 .. 255 to 0 .. 1."""

    patch: int
    pool: int
    max_soft_tokens: int = 280
    resample: int = BICUBIC
    rescale_factor: float = 1 / 255

    def __post_init__(self) -> None:
        if integer("max_soft_tokens", self.max_soft_tokens, 1) not in SOFT_TOKENS:
            raise ValueError(f"max_soft_tokens is {self.max_soft_tokens}; expected one of {', '.join(map(str, SOFT_TOKENS))}")

    @property
    def patches(self) -> int:
        """The most patches of an image, to which all are padded."""
        return self.max_soft_tokens * self.pool**2

    @property
    def levels(self) -> np.ndarray:
        """What a tower reads for each value of a pixel: [256] float32."""
        return (np.arange(256) * self.rescale_factor).astype(np.float32)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing: the largest whole squares of soft tokens that keep the aspect ratio and are few enough. A side
        that would be none is one."""
        side = self.pool * self.patch
        factor = math.sqrt(self.patches * self.patch**2 / (height * width))
        columns, rows = math.floor(factor * width / side), math.floor(factor * height / side)
        if rows == 0:
            columns, rows = min(width // height, self.max_soft_tokens), 1
        elif columns == 0:
            columns, rows = 1, min(height // width, self.max_soft_tokens)
        return columns * side, rows * side

    def count(self, width: int, height: int) -> int:
        """The soft tokens of an image of this size, or of one that is turned by a quarter."""
        return math.prod(self.size(width, height)) // (self.pool * self.patch) ** 2

    def resized(self, image: Any) -> np.ndarray:
        """A PIL image in RGB at the size that it is patched at: [height, width, 3] uint8."""
        size = self.size(*image.size)
        return np.asarray(image if size == image.size else image.resize(size, resample=self.resample))

    def patched(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Patches [patches, patch * patch * 3] uint8, row by row, and their places [patches, 2] int32, which are column and row. Those past
        the image's own are zeros at -1, -1. pixels: what `resized` returns."""
        rows, columns = (length // self.patch for length in pixels.shape[:2])
        cut = pixels.reshape(rows, self.patch, columns, self.patch, 3).swapaxes(1, 2).reshape(rows * columns, -1)
        patches = np.zeros((self.patches, cut.shape[1]), np.uint8)
        patches[: len(cut)] = cut
        positions = np.full((self.patches, 2), -1, np.int32)
        positions[: len(cut), 0] = np.tile(np.arange(columns), rows)
        positions[: len(cut), 1] = np.repeat(np.arange(rows), columns)
        return patches, positions


def read_preprocessing(
    folder: Path,
    config: VisionConfig,
    max_soft_tokens: int | None = None,
    part: str = "image_processor",
    default: int = Preprocessing.max_soft_tokens,
) -> Preprocessing:
    """What a checkpoint's folder says about preprocessing, and the published settings for what it does not say.

    max_soft_tokens: in place of the checkpoint's. part: of the processor that is asked. default: the tokens of an image where it does not
    say. Raises TypeError or ValueError for what is not served.
    """
    file, found = settings_of(folder, part)
    for name, expected in (("patch_size", config.patch_size), ("pooling_kernel_size", config.pooling_kernel_size)):
        if found.get(name, expected) != expected:
            raise ValueError(f"{file}: {name} is {found[name]!r}, but that of vision_config is {expected}")
    for name in ("do_resize", "do_rescale"):
        if not found.get(name, True):
            raise ValueError(f"{file}: {name} is {found[name]!r}; expected true")
    if found.get("do_normalize", False):
        for name, expected in IDENTITY.items():
            if found.get(name, expected) != expected:
                raise ValueError(f"{file}: {name} is {found[name]!r}; expected {expected}")
    most = found.get("max_soft_tokens", default) if max_soft_tokens is None else max_soft_tokens
    made = Preprocessing(
        patch=config.patch,
        pool=config.pool,
        max_soft_tokens=most,
        resample=integer(f"{file}: resample", found.get("resample", BICUBIC), 0, 5),
        rescale_factor=number(f"{file}: rescale_factor", found.get("rescale_factor", 1 / 255), 0, above=True),
    )
    longest = most * config.pool
    if longest > config.max_position:
        raise ValueError(f"max_soft_tokens is {most}, for images {longest} patches long; the tower has {config.max_position} positions")
    return made
