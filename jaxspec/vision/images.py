"""Images of a checkpoint: opened, made to fit, and turned into rows by its tower."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.files import IMAGES
from jaxspec.checks import type_name
from jaxspec.media.files import explained, file_in, name_of, read_from, reason_of
from jaxspec.media.tower import AHEAD, KEPT, Media, Prepared, jitted
from jaxspec.vision import gemma4_tower, unified_embedder
from jaxspec.vision.config import TowerConfig, VisionConfig, vision_config
from jaxspec.vision.preprocessing import Preprocessing, read_preprocessing

ORIENTATION = 0x0112  # the EXIF tag that says how an image is turned
READING = threading.Lock()  # prompts may share a Pillow image, whose file is read when it is first used and by one thread at a time
EXPECTED = (
    "expected a PIL image, a NumPy array [height, width, 3] of uint8, the path or the bytes of an image file, or a URL that begins with "
    "data:, file://, http:// or https://"
)


@dataclasses.dataclass(frozen=True)
class Source:
    """An image that is known to be one, as far as its beginning tells. name: what an error calls it. data: a PIL image, an array, the bytes
    of a file, or a path. width, height: before it is turned as its EXIF data say, which makes no difference to how many rows it has."""

    name: str
    data: Any
    width: int
    height: int


def source_of(image: Any) -> Source:
    """Looks at an image without decoding it; one behind a URL is fetched.

    image: a PIL image, a NumPy array [height, width, 3] of uint8, a path, the bytes of an image file, a dict with "bytes" or "path", as
    datasets have it, or a URL that begins with data:, file://, http:// or https://; a `Source` stays as it is. Raises ImportError without
    Pillow, TypeError for something else, and ValueError, which names the image, for what cannot be read.
    """
    if isinstance(image, Source):
        return image
    image = file_in(image)
    name = _name(image)
    with _explained(name):
        data = _data(image)
        with _found(data) as found:
            width, height = found.size  # not of its EXIF data, which may lie behind the pixels
        if not width or not height:
            raise ValueError(f"it has {width} x {height} pixels")
    return Source(name, data, width, height)


def opened(image: Any) -> Any:
    """An image as a PIL image in RGB, turned as its EXIF data say, as transformers' `load_image` does it: of a transparent one, alpha is
    dropped. Argument and errors are those of `source_of`."""
    from PIL import ImageOps

    source = source_of(image)
    with _explained(source.name), _found(source.data) as found, READING if found is source.data else contextlib.nullcontext():
        turned = ImageOps.exif_transpose(found) if found.getexif().get(ORIENTATION, 1) != 1 else found
        turned.load()  # a file is read now
        return turned if turned.mode == "RGB" else turned.convert("RGB")


def _reason(error: Exception) -> str:
    """What an error says. Pillow's about a file that it does not know has the address of an object."""
    from PIL import Image

    return "Pillow knows no such kind of image" if isinstance(error, Image.UnidentifiedImageError) else reason_of(error)


_explained = functools.partial(explained, kind="an image", expected=EXPECTED, reason=_reason)


def check_pillow() -> None:
    """Raises ImportError without Pillow."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError("images need Pillow: pip install pillow") from error


def _name(image: Any) -> str:
    """What an error calls an image. Raises ImportError without Pillow, TypeError for what is none of those that `source_of` takes."""
    check_pillow()
    from PIL import Image

    if isinstance(image, Image.Image):
        return f"a PIL image of mode {image.mode!r}"
    if isinstance(image, np.ndarray):
        return f"an array {list(image.shape)} of {image.dtype}"
    name = name_of(image)
    if name is not None:
        return name
    raise TypeError(f"an image is of type {type_name(image)}; {EXPECTED}")


def _data(image: Any) -> Any:
    """What an image is read from: a URL's bytes; anything else as it is."""
    if isinstance(image, np.ndarray) and (image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size):
        raise ValueError("it is not [height, width, 3] of uint8")
    return read_from(image, "image")


@contextlib.contextmanager
def _found(data: Any) -> Iterator[Any]:
    """A PIL image of what `_data` gives, perhaps unread. A file is closed afterwards."""
    from PIL import Image

    if isinstance(data, Image.Image):
        yield data
    elif isinstance(data, np.ndarray):
        yield Image.fromarray(data)
    else:
        with Image.open(data if isinstance(data, str) else io.BytesIO(data)) as found:
            yield found


class Images(Media):
    """What makes rows of images."""

    noun, section, folder = "image tower", "vision_config", IMAGES
    modules = ("vision_tower", "vision_embedder", "embed_vision")
    source = staticmethod(source_of)
    see_one_another = True

    def __init__(self, config: VisionConfig, preprocessing: Preprocessing, tower: Any, together: int = 1):
        """together: images that a call of the tower reads."""
        super().__init__(tower)
        self.config = config
        self.preprocessing = preprocessing
        self.together = together

    @classmethod
    def read(cls, folder: Path, dtype: Any, max_soft_tokens: int | None = None) -> Images:
        """What a checkpoint's configs say about images; of the tower there are shapes alone.

        dtype: of the weights and rows, jnp.float32 or jnp.bfloat16. max_soft_tokens: the most rows of an image, one of 70, 140, 280, 560
        and 1120; by default the checkpoint's. Raises ValueError that says what is not served, for a checkpoint without an image tower too.
        """
        folder = cls.home(Path(folder))
        config = vision_config(cls.config_of(folder))
        assert config is not None
        return cls.of(config, read_preprocessing(folder, config, max_soft_tokens), dtype)

    @classmethod
    def of(cls, config: VisionConfig, preprocessing: Preprocessing, dtype: Any) -> Images:
        """The same without a checkpoint."""
        family = gemma4_tower if isinstance(config.tower, TowerConfig) else unified_embedder
        return cls(config, preprocessing, family.abstract(config, dtype))

    @property
    def max_soft_tokens(self) -> int:
        """The most rows of an image."""
        return self.preprocessing.max_soft_tokens

    @property
    def token_id(self) -> int:
        """The token that stands in a prompt for each row."""
        return self.config.image_token_id

    @property
    def opening(self) -> list[int]:
        return [self.config.boi_token_id]

    @property
    def closing(self) -> list[int]:
        return [self.config.eoi_token_id]

    @property
    def rooms(self) -> tuple[int, ...]:
        return (self.max_soft_tokens,)

    @property
    def largest(self) -> str:
        return f"images of {self.max_soft_tokens} tokens"

    @property
    def text_settings(self) -> dict[str, Any]:
        """By name, what texts with images depend on."""
        return {"images": self.max_soft_tokens}

    def bytes_needed(self, kernels: bool) -> int:
        patches, tower = self.together * self.preprocessing.patches, self.config.tower
        size = jax.tree.leaves(self.tower)[0].dtype.itemsize
        found = self.nbytes + (KEPT + AHEAD) * self.max_soft_tokens * self.config.text_hidden_size * size
        if not isinstance(tower, TowerConfig):
            return found + patches * (3 * self.config.patch**2 + 4 * tower.mm_embed_dim) * size
        scores = 0 if kernels else 2 * 4 * patches * min(patches, gemma4_tower.MOST_QUERIES)
        return found + scores + patches * (6 * tower.hidden_size + 3 * tower.intermediate_size) * size

    def count(self, image: Any) -> int:
        """How many rows an image has. Argument and errors are those of `source_of`."""
        source = self.source(image)
        return self.preprocessing.count(source.width, source.height)

    def prepared(self, image: Any) -> Prepared:
        """Decodes an image and makes it fit: pixels [height, width, 3] uint8. Argument and errors are those of `opened`."""
        return Prepared.of(self.preprocessing.resized(opened(image)))

    def warmup(self) -> list[jax.Array]:
        """Compiles the tower, by an image of one soft token. Returns its rows."""
        side = self.preprocessing.pool * self.preprocessing.patch
        (rows,) = self.computed([Prepared(np.zeros((side, side, 3), np.uint8), b"")])
        return [jax.block_until_ready(rows)]

    def computed(self, several: Sequence[Prepared]) -> Sequence[jax.Array]:
        found = [self.preprocessing.patched(each.data) for each in several]
        patches, positions = zip(*found, *found[:1] * (self.together - len(found)), strict=True)
        rows = jitted(_rows)(self.tower, self.preprocessing.levels, np.stack(patches), np.stack(positions))
        return rows[: len(several)]


def _rows(tower: Any, levels: jax.Array, patches: jax.Array, positions: jax.Array) -> list[jax.Array]:
    return list(tower(jnp.take(levels, patches, axis=0), positions))
