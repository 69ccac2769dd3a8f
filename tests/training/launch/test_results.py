"""What comes back from the ranks: values, files of large ones, and what is refused before a process is started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from sparkring.training.launch import results
from sparkring.training.launch.channel.frames import decode, encode
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.results import pack, unpack, unreturnable


@dataclass
class Point:
    x: int
    near: list[Point] = field(default_factory=list)
    at: torch.Tensor | None = None


VALUES = [
    None, True, 1, 1.5, "é", [1, "a"], {"a": {"b": [None]}}, {"loss": float("inf")},
    torch.arange(3), torch.ones(2, dtype=torch.bfloat16), {"w": torch.eye(2), "steps": [1, 2]}, b"raw", 1j, {1, 2},
    np.arange(3), np.float32(1.5), {"a": np.array(["x", "yy"])}, np.array([1, 2], dtype="datetime64[s]"),
    np.ones((2, 3), order="F"), {"weight": torch.nn.Parameter(torch.eye(2)).detach(), "bias": torch.zeros(2)},
]  # fmt: skip


@pytest.mark.parametrize("limit", [1 << 20, 0], ids=["in a message", "through a file"])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_result_comes_back_as_it_was(value: Any, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_SENT_BYTES", limit)
    message = decode(encode(pack(value, "f", str(tmp_path) if limit == 0 else None))[4:])[0]
    found = unpack(message)
    assert repr(found) == repr(value) and type(found) is type(value)
    assert not list(tmp_path.iterdir()), "the file of a large result is left"


def test_a_dataclass_comes_back_as_a_dict_with_tensors_in_it() -> None:
    found = unpack(pack(Point(1, [Point(2)], torch.ones(1)), "f", None))
    near = {"x": 2, "near": [], "at": None}
    assert found == {"x": 1, "near": [near], "at": torch.ones(1)}
    assert unpack(pack(Point(2), "f", None)) == near


def test_a_value_that_cannot_come_back_is_pickled_into_a_file_that_the_error_names(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"f returned a Linear that cannot come back .*torch\.nn") as caught:
        pack(torch.nn.Linear(2, 2), "f", str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert str(file) in str(caught.value)
    with pytest.raises(TypeError, match=r"a dict that cannot come back .*cannot be pickled either"):
        pack({"lock": threading.Lock()}, "f", str(tmp_path))


def test_a_large_result_that_the_driver_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_SENT_BYTES", 0)
    message = pack([1], "f", str(tmp_path))
    assert message.stored is not None
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(RuntimeError, match=rf"{tmp_path}.* on {message.stored.host}.*JobSpec\(results=\.\.\.\)"):
        unpack(message)


def annotated(kind: Any) -> Callable[..., Any]:
    def entry(ctx: Any) -> Any: ...

    entry.__annotations__["return"] = kind
    return entry


@pytest.mark.parametrize(
    "kind",
    [
        *(Any, object, None, int, float | None, list, list[torch.Tensor], dict[str, np.ndarray], tuple[int, ...]),
        *(Point, Literal["a"], torch.nn.Parameter, np.float32, "Missing", "dict[str, Any]"),
    ],
    ids=repr,
)
def test_a_declared_result_that_may_come_back_is_let_through(kind: Any) -> None:
    assert unreturnable(annotated(kind)) is None


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (torch.nn.Module, "torch.nn.modules.module.Module"),
        (torch.nn.Linear | None, "torch.nn.modules.linear.Linear"),
        (dict[str, list[threading.Event]], "threading.Event"),
        (tuple[int, Path], rf"{Path.__module__}\.Path"),
        ("JobSpec", None),  # a dataclass: it is looked into
    ],
)
def test_a_declared_result_that_cannot_come_back_is_refused_before_anything_starts(kind: Any, named: str) -> None:
    if named is None:
        assert unreturnable(annotated(kind)) is None
        return
    with pytest.raises(TypeError, match=rf"declared to return .*{named} cannot come back"):
        JobSpec(annotated(kind)).check()
