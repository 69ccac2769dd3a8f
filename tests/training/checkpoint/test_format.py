"""The bytes of a checkpoint: the place_chunks of safetensors files, and values as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.format import (
    CheckpointError,
    Chunk,
    decode_value,
    encode_value,
    place_chunks,
    raw_bytes,
    read_rows,
)


def test_a_file_has_the_layout_of_safetensors_and_a_part_is_named_by_its_offset(tmp_path: Path) -> None:
    whole, part = torch.arange(6.0).reshape(2, 3), torch.ones(1, 3, dtype=torch.bfloat16)
    chunks = [
        Chunk("w", whole.dtype, (2, 3), (0, 0), (2, 3)),
        Chunk("v", part.dtype, (4, 3), (2, 0), (1, 3)),
    ]
    header, placed = place_chunks(chunks, "f", {"note": "x"})
    (tmp_path / "f").write_bytes(header + raw_bytes(whole) + raw_bytes(part))
    length = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + length and length % 8 == 0
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt", "note": "x"},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "v@2,0": {"dtype": "BF16", "shape": [1, 3], "data_offsets": [24, 30]},
    }
    assert [(c.begin - len(header), c.end - len(header)) for c in placed] == [(0, 24), (24, 30)]
    folder = open_storage(str(tmp_path))
    assert torch.equal(read_rows(folder, placed[0], (1, 1), (1, 2)), whole[1:, 1:])
    (tmp_path / "f").write_bytes(header + raw_bytes(whole))
    with pytest.raises(CheckpointError, match="v ends before its last byte"):
        read_rows(folder, placed[1], (0, 0), (1, 3))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(alphabet="abc"), inner),
    max_leaves=8,
)


@given(plain)
def test_values_survive_json(value: Any) -> None:
    assert decode_value(json.loads(json.dumps(encode_value(value, "v"), allow_nan=False))) == value


@pytest.mark.parametrize("value", [{"__float__": None}, {"__none__": 1}, {"__tuple__": 3}, {"__bytes__": "a"}])
def test_values_of_no_kind(value: Any) -> None:
    with pytest.raises(ValueError, match=r"__|base64"):
        decode_value(value)


def test_arrays_come_back_with_their_dtype_and_what_is_no_plain_data_is_named() -> None:
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    found = decode_value(encode_value({"a": [array]}, "v"))["a"][0]
    assert found.dtype == array.dtype and (found == array).all()
    with pytest.raises(CheckpointError, match=r"v\.a\.1: a object cannot be checkpointed"):
        encode_value({"a": [1, object()]}, "v")
