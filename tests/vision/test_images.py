"""Images are opened from whatever they come as, loaded towers are those of every way of saving, and every error names what is wrong."""

import base64
import concurrent.futures
import functools
import http.server
import io
import json
import shutil
import threading

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import vision_oracle
from PIL import Image
from safetensors.numpy import load_file, save_file
from transformers.image_utils import load_image

from jaxspec.media import tower
from jaxspec.vision import Images, images, opened

PIXELS = np.random.default_rng(0).integers(0, 256, (10, 14, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **settings) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


DATA = encoded(Image.fromarray(PIXELS))
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()


def closed() -> Image.Image:
    """A Pillow image whose file is closed before it is read."""
    with Image.open(io.BytesIO(DATA)) as image:
        return image


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(DATA)
    return path


@pytest.fixture(scope="module")
def server():
    """The address of a server that has one picture, and a page for everything else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path == "/picture.png"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(DATA if found else b"<html>no such picture</html>")

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_an_image_is_opened_from_whatever_it_comes_as(file, server, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    for image in (
        Image.fromarray(PIXELS),
        PIXELS,
        file,
        str(file),
        file.as_uri(),
        f"~/{file.name}",
        DATA,
        {"bytes": DATA, "path": "elsewhere.png"},
        {"bytes": None, "path": str(file)},
        bytearray(DATA),
        memoryview(DATA),
        URL,
        f"{URL[:90]}\n{URL[90:]}",
        f"{server}/picture.png",
    ):
        found = opened(image)
        assert found.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(found), PIXELS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_is_looked_at_and_decoded_later(kind):
    """The pixels are not needed for the number of rows, nor are EXIF data, which a PNG may have behind them."""
    image, exif = Image.fromarray(np.tile(PIXELS, (10, 20, 1))), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    data, turned = encoded(image, kind), encoded(image, kind, exif=exif)
    looked_at = images.source_of(data[: len(data) * 3 // 4])
    with pytest.raises(ValueError, match="bytes cannot be read as an image: "):
        opened(looked_at)
    assert (opened(data).size, opened(turned).size) == ((280, 100), (100, 280))
    assert loaded().count(turned) == loaded().count(looked_at) == loaded().preprocessing.count(100, 280)


def test_threads_read_one_pillow_image():
    """As prompts that share it do; its file is read when the first of them needs it."""
    data = encoded(Image.fromarray(np.tile(PIXELS, (40, 40, 1))), "JPEG")
    expected = np.asarray(opened(data))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            shared = Image.open(io.BytesIO(data))
            for found in pool.map(opened, [shared] * 4):
                np.testing.assert_array_equal(np.asarray(found), expected)


def test_an_image_is_turned_and_converted_as_transformers_does_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    cases = [Image.fromarray(PIXELS).convert(mode) for mode in ("L", "P", "RGBA", "LA", "CMYK", "1")]
    cases[2].putalpha(100)
    for number, data in enumerate([encoded(Image.fromarray(PIXELS), "JPEG", exif=exif), *(encoded(image, "TIFF") for image in cases)]):
        path = tmp_path / str(number)
        path.write_bytes(data)
        expected = np.asarray(load_image(str(path)))
        np.testing.assert_array_equal(np.asarray(opened(path)), expected)
        assert expected.shape == ((14, 10, 3) if number == 0 else (10, 14, 3))


@pytest.mark.parametrize(
    ("image", "error"),
    [
        (
            PIXELS.astype(np.float32),
            r"an array \[10, 14, 3\] of float32 cannot be read as an image: it is not \[height, width, 3\] of",
        ),
        (PIXELS[..., 0], r"an array \[10, 14\] of uint8 cannot be read"),
        (np.zeros((0, 3, 3), np.uint8), r"an array \[0, 3, 3\] of uint8 cannot be read"),
        (Image.new("RGB", (0, 5)), "a PIL image of mode 'RGB' cannot be read as an image: it has 0 x 5 pixels"),
        (b"no image", "8 bytes cannot be read as an image: Pillow knows no such kind of image"),
        (DATA[:100], "100 bytes cannot be read as an image: "),
        ("x" * 9000, "^'x{200}...' cannot be read as an image: File name too long; expected"),
        ("nowhere.png", "'nowhere.png' cannot be read as an image: .*No such file.*; expected a PIL image, a NumPy array"),
        ("no\0file", "'no.+file' cannot be read"),
        ("data:image/png;base64,????", r"'data:image/png;base64,\?{4}' cannot be read"),
        ("data:image/png,abc", "the data of a data: URL must be in base64"),
        ("http://127.0.0.1/no picture.png", "'http://127.0.0.1/no picture.png' cannot be read as an image: URL can't contain"),
        (closed(), r"a PIL image of mode 'RGB' cannot be read as an image: \w+"),
        (URL[:400], r"'data:image/png;base64,.{178}\.\.\.' cannot be read"),
    ],
)
def test_what_is_no_image_is_named(image, error):
    with pytest.raises(ValueError, match=error):
        opened(image)


def test_a_file_or_page_that_is_no_image_is_named(tmp_path, server):
    (tmp_path / "page.html").write_text("<html>")
    for place in (tmp_path / "page.html", tmp_path, f"{server}/page", "http://127.0.0.1:1/picture.png"):
        with pytest.raises(ValueError, match=f"{place}' cannot be read as an image: "):
            opened(place)


def test_what_an_image_cannot_be_is_refused_by_its_type():
    for image in (None, 3, [PIXELS], jnp.zeros((2, 2, 3))):
        with pytest.raises(TypeError, match="an image is of type .*; expected a PIL image, a NumPy array"):
            opened(image)


@functools.cache
def loaded(kind: str = "plain") -> Images:
    return Images.load(vision_oracle.saved(kind)[1], jnp.float32, 70)


def test_an_image_in_a_prompt():
    for kind in ("plain", "unified"):
        found = loaded(kind)
        assert (found.token_id, found.max_soft_tokens) == (258_880, 70)
        assert (found.opening, found.closing) == ([255_999], [258_882])
        assert 0 < found.count(PIXELS) == found.count(DATA) <= len(found.rows(PIXELS)) == 70


def test_what_is_warmed_up_compiles_nothing_more():
    found = loaded()
    run = tower.jitted(images._rows)
    run.clear_cache()
    found.warmup()
    compiled = run._cache_size()
    found.rows(PIXELS[:7])
    assert run._cache_size() == compiled == 1


def test_rows_of_the_last_images_are_kept(monkeypatch):
    """By what is in an image and by its size, whatever it comes as."""
    found, run = Images(loaded().config, loaded().preprocessing, loaded().tower), Images.computed
    runs = []
    monkeypatch.setattr(Images, "computed", lambda *args: runs.append(0) or run(*args))
    first = found.rows(PIXELS)
    assert found.rows(DATA) is first
    monkeypatch.setattr(tower, "KEPT", 2)
    grey = [np.full((height, 70 - height, 3), 9, np.uint8) for height in (10, 60)]
    assert [found.rows(image).shape for image in grey] == [(70, 24), (70, 24)] and len(runs) == 3
    assert found.rows(grey[0]) is found.rows(grey[0]) and len(runs) == 3
    np.testing.assert_array_equal(found.rows(PIXELS), first)
    assert len(runs) == 4
    found.rows(grey[1])
    assert len(runs) == 5


def test_threads_may_share_it():
    found = Images(loaded().config, loaded().preprocessing, loaded().tower)
    pictures = [np.full((9, 9, 3), value, np.uint8) for value in range(4)] * 4
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(found.rows, pictures))
    for picture, each in zip(pictures, rows, strict=True):
        np.testing.assert_array_equal(each, loaded().rows(picture))


@pytest.fixture
def changed(tmp_path):
    """A tiny target's folder with other tensors. change: from the tensors to what is saved."""

    def save(change, kind: str = "plain"):
        folder = tmp_path / "target"
        shutil.copytree(vision_oracle.saved(kind)[1], folder, dirs_exist_ok=True)
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
        return folder

    return save


RENAMED = [
    ("plain", lambda key: key.removeprefix("model.")),
    ("plain", lambda key: f"base_model.model.{key}"),
    ("unified", lambda key: key.removeprefix("model.")),
    (
        "unified",
        lambda key: key.replace("embed_vision.", "embed_vision.multimodal_embedder.").replace("vision_embedder.", "embed_vision."),
    ),
]


@pytest.mark.parametrize("number", range(len(RENAMED)))
def test_every_way_of_naming_loads(number, changed):
    kind, rename = RENAMED[number]
    before = load_file(vision_oracle.saved(kind)[1] / "model.safetensors")
    assert any(key.startswith("model.vision_embedder." if kind == "unified" else "model.vision_tower.") for key in before)
    folder = changed(lambda tensors: {rename(key): value for key, value in tensors.items()}, kind)
    np.testing.assert_array_equal(Images.load(folder, jnp.float32, 70).rows(PIXELS), loaded(kind).rows(PIXELS))


def test_bfloat16_files_load(changed):
    folder = changed(lambda tensors: {key: value.astype(ml_dtypes.bfloat16) for key, value in tensors.items()}, "clipped")
    assert Images.load(folder, jnp.bfloat16, 70).rows(PIXELS).dtype == ml_dtypes.bfloat16
    assert Images.load(folder, jnp.float32, 70).rows(PIXELS).dtype == np.float32


Q = "model.vision_tower.encoder.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({f"{Q}.linear.weight": None}, rf"{Q}.linear.weight: missing, expected \[32, 32\]"),
        ({f"{Q}.linear.weight": np.zeros((32, 16), np.float32)}, rf"{Q}.linear.weight: found \[32, 16\], expected \[32, 32\]"),
        ({f"{Q}.output_max": None}, rf"{Q}.output_max: missing, expected \[\]"),
        ({"model.embed_vision.embedding_projection.weight": None}, "embed_vision.embedding_projection.weight: missing"),
        ({f"{Q}.linear.bias": np.zeros(32, np.float32)}, rf"{Q}.linear.bias: unknown, found F32 \[32\]"),
        (
            {f"{Q}.linear.weight": None, f"{Q}.linear.weight_packed": np.zeros((32, 4), np.int32)},
            rf"holds its image tower quantised \({Q}.linear.weight_packed is I32 \[32, 4\]\); expected F64 or F32 or F16 or BF16",
        ),
        ({f"{Q}.linear.weight": np.zeros((32, 32), np.int8)}, rf"quantised \({Q}.linear.weight is I8 \[32, 32\]\)"),
        (
            {f"{Q}.linear.weight_scale": np.ones((32, 1), np.float32)},
            rf"quantised \({Q}.linear.weight_scale is F32 \[32, 1\]\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, error, changed):
    folder = changed(lambda tensors: {key: value for key, value in (tensors | change).items() if value is not None}, "clipped")
    with pytest.raises(ValueError, match=error):
        Images.load(folder, jnp.float32, 70)


def test_a_checkpoint_without_a_tower_says_so(changed):
    folder = changed(lambda tensors: {key: value for key, value in tensors.items() if "vision" not in key})
    with pytest.raises(ValueError, match="has no image tower: its config.json has vision_config, but its weights have no vision_tower"):
        Images.load(folder, jnp.float32, 70)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": None}))
    with pytest.raises(ValueError, match="has no image tower: its config.json has no vision_config"):
        Images.load(folder, jnp.float32, 70)
    (folder / "jaxspec.json").write_text("{}")
    with pytest.raises(ValueError, match="has no image tower: it was converted"):
        Images.load(folder, jnp.float32, 70)
