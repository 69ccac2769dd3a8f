"""Decodes binary cells, in the reader's threads and where a model serves: by Pillow, or a user's function."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from sparkring.conf.features import State
from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of
from sparkring.conf.references import load_reference
from sparkring.training.data.decoding.columns import DataError

Decoder = Callable[[bytes], NDArray[Any]]
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by channels
DEEP = ("I", "F")  # modes, or the first letter of modes, of more than 8 bits per channel


def decode_image(data: bytes) -> NDArray[np.uint8]:
    """Decode JPEG, PNG, ... to uint8 (H, W, 3), or (H, W) for a gray image."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes images to one shape (height, width, channels), turned as their EXIF says. Threads share it."""

    shape: tuple[int, ...]
    fit: str  # as conf/blocks/etl.py says

    def __call__(self, data: bytes) -> NDArray[np.uint8]:
        """Decode one image. ValueError for more than 8 bits per channel, and for another size where `fit` is exact."""
        height, width, channels = self.shape
        with Image.open(io.BytesIO(data)) as opened:
            if opened.mode.startswith(DEEP):
                raise ValueError(f"mode {opened.mode}: more than 8 bits per channel; convert it, or name a decoder")
            image = ImageOps.exif_transpose(opened)
            image = image if image.mode == MODES[channels] else image.convert(MODES[channels])
            if image.size != (width, height):
                if self.fit == "exact":
                    raise ValueError(f"{image.height} x {count_of(image.width, 'pixel')}, not {height} x {width}")
                fitted = image.resize if self.fit == "resize" else lambda size, how: ImageOps.fit(image, size, how)
                image = fitted((width, height), Image.Resampling.BILINEAR)
            return np.asarray(image).reshape(self.shape)


def make_decoders(states: Iterable[State], columns: Iterable[str], named: Mapping[str, str]) -> dict[str, Decoder]:
    """Make the decoders of the `columns` that have one.

    Args:
        states: states of all features; those with `fit` are images.
        columns: names of tensors that are read.
        named: decoders of the recipe, `data.decoders`. ValueError for a function that cannot be imported.
    """
    read = {*columns}
    found: dict[str, Decoder] = {
        state["name"]: ImageDecoder(tuple(state["shape"]), state["fit"])
        for state in states
        if "fit" in state and state["name"] in read
    }
    for name, reference in named.items():
        if reference == "image":
            found.setdefault(name, decode_image)
        else:
            found[name] = own_decoder(name, reference)
    return found


def own_decoder(column: str, reference: str) -> Decoder:
    """Import the recipe's decoder of a column. ValueError names the key and what is wrong."""
    key = f"data.decoders.{column} = {reference!r}"
    try:
        found = load_reference(reference)
    except (ImportError, AttributeError) as error:
        why = f"cannot be imported ({error}); it must be on the Python path of the workers"
        raise ValueError(f"{key}: {why}") from error
    if not callable(found):
        raise ValueError(f"{key}: is {found!r}, no function of a cell's bytes")
    decoder: Decoder = found
    return decoder


def decode_rows(column: Column, decode: Decoder, rows: Sequence[bytes]) -> Iterator[NDArray[Any]]:
    """Decode each row. DataError names the column of one that cannot be, and how to leave it out."""
    for data in rows:
        try:
            decoded = decode(data)
            if not isinstance(decoded, np.ndarray) or decoded.dtype != np.uint8:
                raise TypeError(f"its decoder gave {describe(decoded)}, not a uint8 array")
        except Exception as error:  # decoders raise what they like
            digest = hashlib.sha256(data).hexdigest()
            raise DataError(
                f"column {column.name!r}: {count_of(len(data), 'byte')} of sha256 {digest} cannot be decoded "
                f"({error}); leave the row out by etl.checks: "
                f"{{name: readable, kind: expression, level: row, sql: \"sha2(THE_COLUMN, 256) NOT IN ('{digest}')\"}}"
            ) from error
        yield decoded


def describe(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def decode_into(column: Column, decode: Decoder, rows: Sequence[bytes], out: NDArray[np.uint8]) -> None:
    """Decode each row into its place of `out` (n, *shape).

    Threads that allocate every image wait for each other in the kernel, and spend two thirds more CPU time.
    """
    for place, row in zip(out, decode_rows(column, decode, rows), strict=True):
        if row.shape != place.shape:
            raise DataError(
                f"column {column.name!r}: decoded to shape {row.shape}, the manifest declares {column.shape}"
            )
        place[...] = row


def decoded(column: Column, decode: Decoder, rows: Sequence[bytes]) -> NDArray[np.uint8]:
    """Decode rows (n, *shape)."""
    out = np.empty((len(rows), *column.shape), np.uint8)
    decode_into(column, decode, rows, out)
    return out
