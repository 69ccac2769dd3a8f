"""Markers, and what of a folder is a checkpoint, damaged or left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.training.checkpoint.catalog import committed, damage, encode_marker, leftovers, parse_marker
from sparkring.training.checkpoint.layout import MARKER

FILES = {f"g/{name}": {"bytes": 1, "sha256": "0" * 64} for name in ("index.json", "trainer.json", "rank-00000.json")}


def test_a_marker_comes_back_and_a_changed_one_does_not() -> None:
    marker = encode_marker(7, "g", 1, float("inf"), FILES)
    info = parse_marker(marker, "u")
    assert (info.step, info.generation, info.world, info.metric, info.files) == (7, "g", 1, float("inf"), FILES)
    assert info.bytes == 3
    with pytest.raises(StoredError, match=f"u/{MARKER}: its digest does not match"):
        parse_marker(marker.replace(b'"step": 7', b'"step": 8'), "u")
    with pytest.raises(StoredError, match=r"files of 2 ranks are not all listed, such as rank-00001\.json"):
        parse_marker(encode_marker(7, "g", 2, None, FILES), "u")


def test_a_marker_in_the_folder_of_another_step_is_bad(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    for name in ("step-10", "step-9", "step-3"):
        step = 4 if name == "step-3" else int(name.removeprefix("step-"))
        folder.put_atomic(f"{name}/{MARKER}", encode_marker(step, "g", 1, None, FILES))
    good, bad = committed(folder)
    assert [info.step for info in good] == [9, 10] and list(bad) == [3] and "is of step 4" in bad[3]


def test_damage_is_a_missing_file_another_size_or_another_hash(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    folder.put_atomic("f", b"12345")
    want = {"bytes": 5, "sha256": folder.sha256("f")}
    assert damage(folder, "f", want) is None
    assert damage(folder, "x", want) == "x has no bytes, not 5"
    assert damage(folder, "f", want | {"bytes": 6}) == "f has 5 bytes, not 6"
    folder.put_atomic("f", b"12346")
    assert damage(folder, "f", want) == "f has another sha256 than its marker says"


def test_leftovers() -> None:
    paths = [
        "step-1/COMMIT.json",
        "step-1/g1/index.json",
        "step-1/g0/rank-00000.json",
        "step-1/COMMIT.json.abc.part",
        "step-2/g0/rank-00000.json",
        "step-3/COMMIT.json",
        "step-3/g0/index.json",
        "notes.txt",
        "other/g0/x",
    ]
    assert leftovers(paths, {"step-1": "g1"}) == ["step-1/COMMIT.json.abc.part", "step-1/g0", "step-2"]


def test_leftovers_that_a_checkpoint_needs_stay_and_nothing_beside_them() -> None:
    paths = [
        "step-1/COMMIT.json",
        "step-1/g0/a",
        "step-1/g0/b",
        "step-1/g1/a",
        "step-2/g/a",
        "step-2/g/b",
        "step-3/g/a",
    ]
    gone = leftovers(paths, {"step-1": "g1"}, {"step-1/g0/b", "step-2/g/a"})
    assert gone == ["step-1/g0/a", "step-2/g/b", "step-3"]
