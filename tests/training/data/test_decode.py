"""Images of binary columns."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from sparkring.conf.manifest import Column
from sparkring.training.data.decode import decode_image, decode_into, decode_rows

COLUMN = Column(name="image", dtype="binary", layout="binary", shape=(4, 5, 3))


def png(mode: str, color: object = 7) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (5, 4), color).save(out, "PNG")  # type: ignore[arg-type]
    return out.getvalue()


def test_images_are_rgb_or_gray() -> None:
    assert decode_image(png("RGB", (1, 2, 3)))[0, 0].tolist() == [1, 2, 3]
    assert decode_image(png("L")).shape == (4, 5)
    assert decode_image(png("P")).shape == decode_image(png("RGBA", (1, 2, 3, 4))).shape == (4, 5, 3)


def test_bytes_that_are_no_image_name_their_column() -> None:
    with pytest.raises(ValueError, match=r"column 'image': 3 bytes cannot be decoded .*; row 1 of its part"):
        list(decode_rows(COLUMN, [png("RGB", (0, 0, 0)), b"???"]))


def test_images_are_decoded_in_place_if_they_have_the_declared_shape() -> None:
    out = np.zeros((2, 4, 5, 3), np.uint8)
    decode_into(COLUMN, [png("RGB", (1, 1, 1)), png("RGB", (2, 2, 2))], out)
    assert (out[0] == 1).all() and (out[1] == 2).all()
    with pytest.raises(
        ValueError, match=r"column 'image': decoded to shape \(4, 5\), the manifest declares \(4, 5, 3\)"
    ):
        decode_into(COLUMN, [png("L")], out[:1])
