"""Images of a checkpoint: opened, made to fit, and turned into rows by its tower."""

from __future__ import annotations

import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import os
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint
from jaxspec.checkpoint.changes import Change
from jaxspec.checkpoint.files import CONVERTED, IMAGES
from jaxspec.checkpoint.layout import layouts_of
from jaxspec.checkpoint.load import QUANTISED
from jaxspec.checkpoint.peft import Adapter
from jaxspec.checkpoint.safetensors import FLOATS
from jaxspec.checks import type_name
from jaxspec.trees import leaves_by_path, nbytes
from jaxspec.vision import gemma4_tower, unified_embedder
from jaxspec.vision.config import TowerConfig, VisionConfig, vision_config
from jaxspec.vision.preprocessing import Preprocessing, read_preprocessing

AHEAD = 8  # images whose rows are on their way into prompts
KEPT = 16  # images whose rows are kept, on the device
ORIENTATION = 0x0112  # the EXIF tag that says how an image is turned
READING = threading.Lock()  # prompts may share a Pillow image, whose file is read when it is first used and by one thread at a time
TIMEOUT = 60.0  # seconds without an answer from a server
SHOWN = 200  # characters of a text, in an error
EXPECTED = (
    "expected a PIL image, a NumPy array [height, width, 3] of uint8, the path or the bytes of an image file, or a URL that begins with "
    "data:, file://, http:// or https://"
)
# The first module of a tower's tensor, after what may stand before it, such as "model.".
TOWER = re.compile(r"^((?:\w+\.)*?)(?:vision_tower|vision_embedder|embed_vision)\.")


def is_part(key: str) -> bool:
    """Whether a tensor of this name, in a checkpoint or an adapter, is one of a tower."""
    return TOWER.match(key) is not None


@dataclasses.dataclass(frozen=True)
class Source:
    """An image that is known to be one, as far as its beginning tells. name: what an error calls it. data: a PIL image, an array, the bytes
    of a file, or a path. width, height: before it is turned as its EXIF data say, which makes no difference to how many rows it has."""

    name: str
    data: Any
    width: int
    height: int


class Coming(str):
    """The URL of an image that is being fetched."""

    def __new__(cls, url: str, answer: concurrent.futures.Future[bytes]) -> Self:
        """answer: what `fetched` gives for it."""
        found = super().__new__(cls, url)
        found.answer = answer
        return found

    answer: concurrent.futures.Future[bytes]


class Prepared(NamedTuple):
    """An image at the size that a tower reads. pixels: [height, width, 3] uint8. digest: equal for images with the same pixels alone."""

    pixels: np.ndarray
    digest: bytes


def source_of(image: Any) -> Source:
    """Looks at an image without decoding it; one behind a URL is fetched.

    image: a PIL image, a NumPy array [height, width, 3] of uint8, a path, the bytes of an image file, or a URL that begins with data:,
    file://, http:// or https://; a `Source` stays as it is. Raises ImportError without Pillow, TypeError for something else, and
    ValueError, which names the image, for what cannot be read.
    """
    if isinstance(image, Source):
        return image
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


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raises ValueError, with the name of an image, in place of what Pillow and others raise where they cannot read it."""
    from PIL import Image

    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # of many types: Pillow's readers raise whatever they come upon in a broken file
        unknown = isinstance(error, Image.UnidentifiedImageError)  # whose text has the address of an object
        reason = "Pillow knows no such kind of image" if unknown else str(error) or type_name(error)
        raise ValueError(f"{name} cannot be read as an image: {reason}; {EXPECTED}") from error


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
    if isinstance(image, bytes | bytearray | memoryview):
        return f"{memoryview(image).nbytes} bytes"
    if isinstance(image, str | os.PathLike):
        text = os.fsdecode(image)
        return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
    raise TypeError(f"an image is of type {type_name(image)}; {EXPECTED}")


def _data(image: Any) -> Any:
    """What an image is read from: a URL's bytes; anything else as it is."""
    if isinstance(image, np.ndarray) and (image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size):
        raise ValueError("it is not [height, width, 3] of uint8")
    if not isinstance(image, str | os.PathLike):
        return image
    text = os.fsdecode(image)
    if is_remote(text):
        return image.answer.result() if isinstance(image, Coming) else fetched(text)
    if text.startswith("data:"):
        head, _, data = text.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("the data of a data: URL must be in base64, after 'data:image/png;base64,'")
        return base64.b64decode("".join(data.split()), validate=True)
    if text.startswith("file://"):
        return urllib.request.url2pathname(urllib.parse.urlsplit(text).path)
    return os.path.expanduser(text)


def is_remote(image: Any) -> bool:
    """Whether it is a URL that is fetched from a server."""
    return isinstance(image, str) and image.startswith(("http://", "https://"))


def fetched(url: str) -> bytes:
    """What a server has there. Raises what urllib raises."""
    asked = urllib.request.Request(url, headers={"User-Agent": "jaxspec"})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:  # it is an answer too
        error.close()
        raise


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


def home(folder: Path) -> Path:
    """Where a checkpoint has its tower. Raises ValueError for a converted one without."""
    if not (folder / CONVERTED).exists():
        return folder
    if not (folder / IMAGES).is_dir():
        raise ValueError(f"{folder} has no image tower: it was converted without one")
    return folder / IMAGES


class Images:
    """What makes rows of images: the preprocessing and the tower of a checkpoint. Threads may share it."""

    source = staticmethod(source_of)

    def __init__(self, config: VisionConfig, preprocessing: Preprocessing, tower: Any):
        self.config = config
        self.preprocessing = preprocessing
        self.tower = tower
        self._kept = collections.OrderedDict[bytes, jax.Array]()  # the last to be used comes last
        self._lock = threading.Lock()

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a checkpoint has an image tower, of whatever kind."""
        if (folder / CONVERTED).exists():
            return (folder / IMAGES).is_dir()
        return checkpoint.read_config(folder).get("vision_config") is not None and any(map(is_part, checkpoint.read_headers(folder)))

    @classmethod
    def load(cls, folder: Path, dtype: Any, max_soft_tokens: int | None = None) -> Images:
        """Reads what a checkpoint says about images, and its tower onto the default device. Arguments and errors are those of `read` and
        `with_weights`."""
        return cls.read(folder, dtype, max_soft_tokens).with_weights(folder)

    @classmethod
    def read(cls, folder: Path, dtype: Any, max_soft_tokens: int | None = None) -> Images:
        """What a checkpoint's configs say about images; of the tower there are shapes alone.

        dtype: of the weights and rows, jnp.float32 or jnp.bfloat16. max_soft_tokens: the most rows of an image, one of 70, 140, 280, 560
        and 1120; by default the checkpoint's. Raises ValueError that says what is not served, for a checkpoint without an image tower too.
        """
        folder = home(Path(folder))
        config = vision_config(checkpoint.read_config(folder))
        if config is None:
            raise ValueError(f"{folder} has no image tower: its config.json has no vision_config")
        return cls.of(config, read_preprocessing(folder, config, max_soft_tokens), dtype)

    @classmethod
    def of(cls, config: VisionConfig, preprocessing: Preprocessing, dtype: Any) -> Images:
        """The same without a checkpoint."""
        family = gemma4_tower if isinstance(config.tower, TowerConfig) else unified_embedder
        return cls(config, preprocessing, family.abstract(config, dtype))

    def changes(self, adapter: Adapter) -> dict[str, Change]:
        """What an adapter makes of the tower's weights, to be given to `with_weights`. Raises ValueError for one that does not fit."""
        own = adapter.of(is_part)
        if not own.tensors:
            return {}
        shapes, layouts = {path: tuple(leaf.shape) for path, leaf in leaves_by_path(self.tower).items()}, layouts_of(self.tower)
        names = {layouts(path, shapes)[-1][0].key: layouts(path, shapes)[0][0].key for path in shapes}  # an adapter has transformers'
        return {names[key]: change for key, change in own.changes(self.tower, ("model.",), (), way=-1).items()}

    def with_weights(self, folder: Path, changes: Mapping[str, Change] = MappingProxyType({})) -> Images:
        """The same with the tower's weights on the default device. changes: those of an adapter. Raises ValueError that names what is
        missing or not served: a quantised tower, tensors that are missing or of another shape."""
        folder = home(Path(folder))
        stored = checkpoint.read_headers(folder)
        found = {key: match[1] for key in stored if (match := TOWER.match(key))}
        if not found:
            raise ValueError(f"{folder} has no image tower: its config.json has a vision_config, but its weights have no vision_tower")
        for key in found:
            if stored[key].dtype not in FLOATS or QUANTISED.search(key):
                raise ValueError(
                    f"{folder} holds its image tower quantised ({key} is {stored[key].describe()}); expected {' or '.join(FLOATS)}"
                )
        tower = checkpoint.load_weights(
            folder,
            self.tower,
            prefixes=tuple(dict.fromkeys(found.values())),
            skip=[key for key in stored if key not in found],
            changes=changes,
            progress=False,
        )
        return Images(self.config, self.preprocessing, tower)

    @property
    def max_soft_tokens(self) -> int:
        """The most rows of an image."""
        return self.preprocessing.max_soft_tokens

    @property
    def image_token_id(self) -> int:
        """The token that stands in a prompt for each row."""
        return self.config.image_token_id

    @property
    def nbytes(self) -> int:
        """Bytes of the tower's weights."""
        return nbytes(self.tower)

    def bytes_needed(self, kernels: bool) -> int:
        """Bytes of a device for the weights, for what they compute of one image, and for rows of images. kernels: whether attention runs in
        them, and holds no scores."""
        patches, tower = self.preprocessing.patches, self.config.tower
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
        """Decodes an image and makes it fit. Argument and errors are those of `opened`."""
        pixels = self.preprocessing.resized(opened(image))
        return Prepared(pixels, hashlib.sha256(b"%d %d " % pixels.shape[:2] + pixels.tobytes()).digest())

    def tokens(self, count: int) -> list[int]:
        """The tokens of an image of so many rows in a prompt: its beginning, one for each row, its end."""
        return [self.config.boi_token_id, *[self.config.image_token_id] * count, self.config.eoi_token_id]

    def rows(self, image: Any) -> jax.Array:
        """What a target reads in place of an image's token embeddings: [max_soft_tokens, text hidden] in the tower's dtype, of which the
        first `count` are the image's. Those of the last images are kept. image: what `prepared` gives or takes."""
        pixels, digest = image if isinstance(image, Prepared) else self.prepared(image)
        with self._lock:
            rows = self._kept.pop(digest, None)
        if rows is None:
            rows = self.computed(*self.preprocessing.patched(pixels))
        with self._lock:
            self._kept[digest] = rows
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return rows

    def warmup(self) -> None:
        """Compiles the tower, by an image of one soft token."""
        side = self.preprocessing.pool * self.preprocessing.patch
        jax.block_until_ready(self.computed(*self.preprocessing.patched(np.zeros((side, side, 3), np.uint8))))

    def computed(self, patches: np.ndarray, positions: np.ndarray) -> jax.Array:
        """What the tower makes of what `Preprocessing.patched` gives."""
        return _run(self.tower, self.preprocessing.levels, patches, positions)


@jax.jit
def _run(tower: Any, levels: jax.Array, patches: jax.Array, positions: jax.Array) -> jax.Array:
    return tower(jnp.take(levels, patches, axis=0), positions)
