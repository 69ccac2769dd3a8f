"""Checkpoints that were damaged, or made by somebody else with hashes that fit: one error, and nothing is touched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.conf.digest import digest
from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.catalog import committed
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.format import CheckpointError
from sparkring.training.checkpoint.policy import Retention

Change = Callable[[Any], Any]


def saved(folder: Path, steps: int = 1, **options: Any) -> Checkpointer:
    checkpointer = Checkpointer(open_storage(str(folder)), keep=Retention(last=9), asynchronous=False, **options)
    state = {"w": torch.ones(4, 3), "b": torch.ones(3), "kind": "x"}
    for step in range(1, steps + 1):
        trainer = {"cursor": 96 * step, "best": float("inf")}
        checkpointer.save(step, state, trainer, metric=-step, rank_state={"codec": np.arange(3)})
    return checkpointer


def forge(folder: Path, name: str, change: Change, step: int = 1) -> None:
    """Change one JSON file (or its bytes, where `change` gives bytes) and sign it as whoever wrote it would."""
    marker_file = folder / f"step-{step}/COMMIT.json"
    marker = json.loads(marker_file.read_text())
    if name == "COMMIT.json":
        marker = change(marker)
    else:
        path = next(p for p in marker["files"] if p.endswith(name))
        file = folder / f"step-{step}" / path
        made = change(json.loads(file.read_bytes()))
        data = made if isinstance(made, bytes) else json.dumps(made).encode()
        file.write_bytes(data)
        marker["files"][path] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(marker, dict):
        marker.pop("digest", None)
        marker["digest"] = digest(marker)
    marker_file.write_text(json.dumps(marker))


def put(*path: Any) -> Change:
    """Set the value at a path of keys: `put("tensors", "w", "shape", -1)`."""

    def change(content: Any) -> Any:
        here = content
        for key in path[:-2]:
            here = here[key]
        here[path[-2]] = path[-1]
        return content

    return change


def drop(key: str) -> Change:
    return lambda content: {k: v for k, v in content.items() if k != key}


CHUNK = ("tensors", "w", "chunks", 0)
DAMAGES: list[tuple[str, str, Change]] = [
    ("index.json", "not JSON", lambda _: b"\xff{"),
    ("index.json", "a list", lambda _: []),
    ("index.json", "nested deeply", lambda _: b"[" * 100_000),
    ("index.json", "no tensors", drop("tensors")),
    ("index.json", "a chunk in a foreign file", put(*CHUNK, "file", "../../outside")),
    ("index.json", "a chunk in a file not listed", put(*CHUNK, "file", "other.safetensors")),
    ("index.json", "bytes beyond the file", lambda c: put(*CHUNK, "begin", c["tensors"]["w"]["chunks"][0]["end"])(c)),
    ("index.json", "a negative offset", put(*CHUNK, "offsets", [-4, 0])),
    ("index.json", "a chunk twice", lambda c: put("tensors", "w", "chunks", c["tensors"]["w"]["chunks"] * 2)(c)),
    ("index.json", "no such dtype", put("tensors", "w", "dtype", "F1024")),
    ("index.json", "a shape of text", put("tensors", "w", "shape", "4,3")),
    ("index.json", "a huge shape", put("tensors", "w", "shape", [10**30, 3])),
    ("trainer.json", "empty", lambda _: b""),
    ("trainer.json", "of no kind", put("trainer", "best", {"__float__": []})),
    ("trainer.json", "a list", put("trainer", [])),
    ("rank-00000.json", "no random state", drop("rng")),
    ("rank-00000.json", "a state of another size", put("rng", "torch", {"__bytes__": "AAAA"})),
    ("rank-00000.json", "a position outside", lambda c: put("rng", "numpy", "__tuple__", 2, 10**6)(c)),
    ("rank-00000.json", "an array of objects", put("state", "codec", "dtype", "|O8")),
    ("rank-00000.json", "an array of text", put("state", "codec", {"__array__": 3, "dtype": "<i8", "shape": [1]})),
    ("rank-00000.json", "an array of another size", put("state", "codec", "shape", [7])),
]


@pytest.mark.parametrize(("name", "change"), [(n, c) for n, _, c in DAMAGES], ids=[f"{n}: {t}" for n, t, _ in DAMAGES])
def test_a_damaged_checkpoint_is_an_error_that_names_the_file_before_a_tensor_is_touched(
    tmp_path: Path, name: str, change: Change
) -> None:
    checkpointer = saved(tmp_path)
    forge(tmp_path, name, change)
    state = {"w": torch.zeros(4, 3), "b": torch.zeros(3), "kind": "y"}
    info = checkpointer.latest()
    assert info is not None, "its hashes are right"
    with pytest.raises(CheckpointError, match=name):
        checkpointer.load(info, state)
    assert not state["w"].any() and not state["b"].any() and state["kind"] == "y"


@pytest.mark.parametrize(("name", "change"), [(n, c) for n, _, c in DAMAGES], ids=[f"{n}: {t}" for n, t, _ in DAMAGES])
def test_the_newest_checkpoint_that_can_be_loaded_is_taken_whatever_the_newer_ones_hashes_say(
    tmp_path: Path, name: str, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = saved(tmp_path, 3)
    for step in (2, 3):
        forge(tmp_path, name, change, step)
    latest, best, unverified = checkpointer.latest(), checkpointer.best(), checkpointer.latest(verify=False)
    assert latest is not None and best is not None and unverified is not None
    assert latest.step == best.step == unverified.step == 1
    assert [reason.split(":")[0] for reason in latest.skipped] == ["step-3", "step-2"]
    assert "checkpoint skipped: step-3: " in caplog.text and name in caplog.text
    checkpointer.load(latest, {"w": torch.zeros(4, 3), "b": torch.zeros(3), "kind": "y"})


def test_a_checkpoint_that_training_cannot_go_on_from_is_passed_over(tmp_path: Path) -> None:
    def check(trainer: dict[str, Any], tables: Any) -> None:
        if trainer["cursor"] > 96:
            raise ValueError(f"cursor {trainer['cursor']} is beyond the end")

    latest = saved(tmp_path, 2, check=check).latest()
    assert latest is not None and latest.step == 1 and "cursor 192 is beyond the end" in latest.skipped[0]


@pytest.mark.parametrize(
    "change",
    [
        put("files", {}),
        put("format", 3),
        put("step", -1),
        put("step", 3),
        put("world", 10**15),
        put("world", 2),
        put("generation", "../../elsewhere"),
        put("metric", {"__array__": 1}),
        lambda marker: put("files", marker["files"] | {"../../x": next(iter(marker["files"].values()))})(marker),
        lambda marker: put("files", {path: {"bytes": 1} for path in marker["files"]})(marker),
        lambda marker: put("files", {path: {"bytes": -1, "sha256": "0" * 64} for path in marker["files"]})(marker),
        lambda marker: put("files", {path: {"bytes": 1, "sha256": "../x"} for path in marker["files"]})(marker),
        put("needs", {"../../x": {"bytes": 1, "sha256": "0" * 64}}),
        lambda _: [],
    ],
)
def test_a_marker_that_does_not_say_what_a_checkpoint_has_is_passed_over(tmp_path: Path, change: Change) -> None:
    saved(tmp_path)
    forge(tmp_path, "COMMIT.json", change)
    good, bad = committed(open_storage(str(tmp_path)))
    assert good == [] and list(bad) == [1] and "step-1/COMMIT.json" in bad[1]


def test_what_the_loop_cannot_go_on_from_is_found_before_a_tensor_is_touched(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path)
    state = {"w": torch.zeros(4, 3), "b": torch.zeros(3), "kind": "y"}
    info = checkpointer.latest()
    assert info is not None

    def check(trainer: dict[str, Any]) -> None:
        raise ValueError(f"cursor {trainer['cursor']} is odd")

    with pytest.raises(CheckpointError, match="cursor 96 is odd"):
        checkpointer.load(info, state, check=check)
    assert not state["w"].any()
