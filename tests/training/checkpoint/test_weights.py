"""The exported file: what is written is read, and damage is named."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.training.checkpoint.weights import FILE, read_weights, write_weights
from sparkring.training.parallel.state import TensorInfo

STATE = {
    "embed": torch.arange(12.0).reshape(4, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "steps": torch.tensor(7),
    "none": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
}


def written(folder: Path) -> Path:
    described = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in STATE.items()]
    write_weights(open_storage(str(folder)), described, iter(STATE.values()), {"head": "embed"})
    return folder / FILE


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    found = read_weights(open_storage(str(tmp_path)))
    assert list(found) == [*STATE, "head"] and found["head"] is found["embed"]
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    """Cut anywhere, or with any byte of its header changed, it gives one error or what was written in other names."""
    path = written(tmp_path)
    good = path.read_bytes()
    header = int.from_bytes(good[:8], "little")
    damaged = [good[:length] for length in range(0, len(good), 7)]
    damaged += [good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :] for at in range(8 + header)]
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            read_weights(open_storage(str(tmp_path)))
        except StoredError as error:
            assert FILE in str(error) and "no weights" in str(error)
            refused += 1
    assert refused > len(damaged) / 2
