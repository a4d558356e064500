"""Images in RGB."""

from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import ExifTags, Image

from trimtab_common.images import to_pil


def half_red() -> Image.Image:
    """An opaque red pixel, a transparent one and a half transparent one."""
    pixels = [[[255, 0, 0, 255], [255, 0, 0, 0], [255, 0, 0, 128]]]
    return Image.fromarray(np.array(pixels, dtype=np.uint8))


def test_transparent_pixels_are_white():
    assert np.asarray(to_pil(half_red())).tolist() == [[[255, 0, 0], [255, 255, 255], [255, 127, 127]]]


@pytest.mark.parametrize("mode", ["LA", "P"])
def test_transparent_pixels_of_other_modes_are_white(mode: str):
    image = half_red().convert("LA") if mode == "LA" else Image.new("P", (3, 1))
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 0, 0])
        image.info["transparency"] = 0
    assert to_pil(image).getpixel((1, 0)) == (255, 255, 255)


def test_opaque_pixels_stay():
    red = Image.new("RGB", (2, 2), "red")
    assert np.array_equal(np.asarray(to_pil(red)), np.asarray(red))
    assert to_pil(Image.new("L", (1, 1), 90)).getpixel((0, 0)) == (90, 90, 90)


@pytest.mark.parametrize("kind", ["png", "jpg", "webp"])
def test_a_turned_photograph_is_upright_as_datasets_decodes_it(kind: str, tmp_path: Path):
    exif, file = Image.Exif(), str(tmp_path / f"turned.{kind}")
    exif[ExifTags.Base.Orientation] = 6
    Image.effect_noise((4, 2), 50).convert("RGB").save(file, exif=exif)
    decoded = datasets.Dataset.from_dict({"image": [file]}).cast_column("image", datasets.Image())[0]["image"]
    opened = to_pil(Image.open(file))
    assert opened.size == decoded.size == (2, 4)
    assert opened.tobytes() == to_pil(decoded).tobytes() == to_pil(opened).tobytes() == decoded.tobytes()


@pytest.mark.parametrize("value", ["a.png", Path("a.png"), {"bytes": b"", "path": "a.png"}, None])
def test_what_is_no_picture_is_named_with_the_way_to_read_files(value: object):
    with pytest.raises(ValueError, match=rf"\({type(value).__name__}\) came in; a PIL image or an array.*cast_column"):
        to_pil(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_values_that_8_bits_cannot_hold_are_refused(kind: type):
    """PIL makes black and white of them."""
    image = Image.fromarray(np.arange(0, 65536, 16, dtype=kind).reshape(64, 64))
    with pytest.raises(ValueError, match=f"an image of mode {image.mode} came in, with more than 8 bits"):
        to_pil(image)
