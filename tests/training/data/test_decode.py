"""Cells of binary columns: images by Pillow, to one shape; others by a function of the recipe's."""

from __future__ import annotations

import hashlib
import io
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sparkring.conf.manifest import Column
from sparkring.training.data.decoding.cells import (
    ImageDecoder,
    decode_image,
    decode_into,
    decode_rows,
    decoded,
    make_decoders,
)

COLUMN = Column(name="image", dtype="binary", layout="binary", shape=(4, 5, 3))
NOISE = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(mode: str, color: object = 7) -> bytes:
    return encoded(Image.new(mode, (5, 4), color))  # type: ignore[arg-type]


def test_images_are_rgb_or_gray() -> None:
    assert decode_image(png("RGB", (1, 2, 3)))[0, 0].tolist() == [1, 2, 3]
    assert decode_image(png("L")).shape == (4, 5)
    assert decode_image(png("P")).shape == decode_image(png("RGBA", (1, 2, 3, 4))).shape == (4, 5, 3)


def test_bytes_that_are_no_image_name_their_column_and_how_to_leave_them_out() -> None:
    digest = hashlib.sha256(b"???").hexdigest()
    message = rf"column 'image': 3 bytes of sha256 {digest} cannot be decoded .*NOT IN \('{digest}'\)\"}}$"
    with pytest.raises(ValueError, match=message):
        list(decode_rows(COLUMN, decode_image, [png("RGB", (0, 0, 0)), b"???"]))


def test_images_are_decoded_in_place_if_they_have_the_declared_shape() -> None:
    out = np.zeros((2, 4, 5, 3), np.uint8)
    decode_into(COLUMN, decode_image, [png("RGB", (1, 1, 1)), png("RGB", (2, 2, 2))], out)
    assert (out[0] == 1).all() and (out[1] == 2).all()
    with pytest.raises(
        ValueError, match=r"column 'image': decoded to shape \(4, 5\), the manifest declares \(4, 5, 3\)"
    ):
        decode_into(COLUMN, decode_image, [png("L")], out[:1])


@pytest.mark.parametrize("fit", ["resize", "crop", "exact"])
def test_an_image_of_the_declared_size_keeps_its_pixels(fit: str) -> None:
    found = ImageDecoder((6, 10, 3), fit)(encoded(Image.fromarray(NOISE)))
    assert found.dtype == np.uint8 and np.array_equal(found, NOISE)


def test_other_sizes_are_stretched_or_cut_in_the_middle() -> None:
    wide = encoded(Image.fromarray(NOISE))
    stretched = Image.fromarray(NOISE).resize((5, 3), Image.Resampling.BILINEAR)
    assert np.array_equal(ImageDecoder((3, 5, 3), "resize")(wide), np.asarray(stretched))
    assert np.array_equal(ImageDecoder((6, 6, 3), "crop")(wide), NOISE[:, 2:8])
    with pytest.raises(ValueError, match="6 x 10 pixels, not 3 x 3"):
        ImageDecoder((3, 3, 3), "exact")(wide)


@pytest.mark.parametrize(("channels", "pixel"), [(1, [18]), (3, [10, 20, 30]), (4, [10, 20, 30, 255])])
def test_channels_are_those_that_are_declared(channels: int, pixel: list[int]) -> None:
    found = ImageDecoder((4, 5, channels), "exact")(png("RGB", (10, 20, 30)))
    assert found.shape == (4, 5, channels) and found[0, 0].tolist() == pixel


def test_a_photo_is_turned_as_its_camera_says_and_16_bits_are_refused() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    turned = ImageDecoder((10, 6, 3), "exact")(encoded(Image.fromarray(NOISE), exif=exif))
    assert np.array_equal(turned, np.rot90(NOISE, -1))
    with pytest.raises(ValueError, match=r"mode I;16: more than 8 bits per channel"):
        ImageDecoder((4, 5, 1), "resize")(png("I;16"))


def raw_pixels(cell: bytes) -> np.ndarray:
    return np.frombuffer(cell, np.uint8).reshape(4, 5, 3)


def test_a_decoder_of_the_recipe_comes_before_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(pixels=raw_pixels, number=3))
    states = [{"name": "image", "shape": [4, 5, 3], "fit": "resize"}, {"name": "x", "kind": "numeric"}]
    found = make_decoders(states, ["image"], {"image": "own:pixels"})
    assert list(found) == ["image"]
    assert decoded(COLUMN, found["image"], [bytes(range(60))])[0, 0, 1].tolist() == [3, 4, 5]
    assert isinstance(make_decoders(states, ["image"], {"image": "image"})["image"], ImageDecoder)
    assert make_decoders(states, ["x"], {}) == {}
    with pytest.raises(ValueError, match=r"data.decoders.image = 'own:other': cannot be imported"):
        make_decoders(states, ["image"], {"image": "own:other"})
    with pytest.raises(ValueError, match=r"data.decoders.image = 'own:number': is 3, no function"):
        make_decoders(states, ["image"], {"image": "own:number"})


@pytest.mark.parametrize(
    ("decode", "what"),
    [(lambda cell: np.zeros((4, 5, 3)), "an array of float64"), (lambda cell: [1], "list")],
)
def test_a_decoder_gives_bytes_of_pixels(decode: Callable[[bytes], Any], what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"its decoder gave {what}, not a uint8 array")):
        decoded(COLUMN, decode, [b"0"])
