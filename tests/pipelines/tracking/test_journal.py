from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sparkring.pipelines.tracking.journal import Journal, abandoned_journals
from sparkring.pipelines.tracking.ops import Op, Tags


def said(text: str) -> Op:
    return Tags(key="job", at=1.0, tags={"said": text})


def texts(journal: Journal, most: int = 500) -> list[str]:
    return [op.tags["said"] for op, _ in journal.pending(most) if isinstance(op, Tags)]


def test_operations_come_back_in_order_from_where_they_were_applied(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, "job")
    for n in range(5):
        journal.append(said(str(n)))
    first = journal.pending(2)
    assert texts(journal, 2) == ["0", "1"]
    journal.state["runs"]["job"] = "r1"
    journal.done(first[0][1])
    journal.close(delete=False)
    (again,) = abandoned_journals(tmp_path)
    assert texts(again) == ["1", "2", "3", "4"] and again.state["runs"] == {"job": "r1"}
    again.close(delete=True)
    assert list(abandoned_journals(tmp_path)) == [] and list((tmp_path / "buffer").iterdir()) == []


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, "job")
    journal.append(said("whole"))
    with open(journal.folder / "ops.jsonl", "ab") as file:
        file.write(b'{"op": "cu')
    assert texts(journal) == ["whole"]
    journal.close(delete=True)


def test_what_a_driver_writes_can_be_read(tmp_path: Path) -> None:
    """Half a surrogate pair too, as in a file name of another encoding that a log line quotes."""
    journal = Journal.create(tmp_path, "job")
    journal.append(said("a\udcffb"))
    assert texts(journal) == ["a?b"]
    journal.close(delete=True)


def test_a_journal_with_an_unreadable_state_does_not_hold_up_those_after_it(tmp_path: Path, caplog: Any) -> None:
    folders = []
    for name in ("broken", "good"):
        journal = Journal.create(tmp_path, name)
        journal.append(said(name))
        journal.close(delete=False)
        folders.append(journal.folder)
    (folders[0] / "state.json").write_text('{"done": 0, "ru')
    os.utime(folders[0], (1, 1))
    (found,) = abandoned_journals(tmp_path)
    assert found.folder == folders[1] and f"damaged~{folders[0].name}" in caplog.text
    found.close(delete=True)


@pytest.mark.parametrize("beyond", [1, 10**9, 2**63 - 1])
def test_a_journal_that_is_shorter_than_what_was_applied_is_set_aside(tmp_path: Path, beyond: int, caplog: Any) -> None:
    """Its last lines are lost, as in a power cut: it is kept, since what was sent of it is not known."""
    journal = Journal.create(tmp_path, "job")
    journal.append(said("unsent"))
    size = (journal.folder / "ops.jsonl").stat().st_size
    journal.done(min(size + beyond, 2**63 - 1))
    name = journal.folder.name
    journal.close(delete=False)
    assert list(abandoned_journals(tmp_path)) == [] and "but ops.jsonl has" in caplog.text
    assert "unsent" in (tmp_path / f"buffer/damaged~{name}/ops.jsonl").read_text()


def test_a_living_owner_is_left_alone(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, "job")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(len(list(abandoned_journals(tmp_path)))).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 10) == b"0"
    os.close(read), os.close(write)
    journal.close(delete=False)
    found = list(abandoned_journals(tmp_path))
    assert len(found) == 1
    found[0].close(delete=True)


def test_a_closed_journal_is_free_though_a_process_that_is_starting_has_its_files(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, "job")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # until the test has looked
        os._exit(0)
    try:
        journal.close(delete=False)
        found = list(abandoned_journals(tmp_path))
        assert [each.folder for each in found] == [journal.folder]
        found[0].close(delete=True)
    finally:
        os.close(write), os.close(read)
        os.waitpid(pid, 0)


def test_files_are_copied_at_once(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, "job")
    source = tmp_path / "figure.png"
    source.write_bytes(b"old")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_bytes(b"w")
    one, two = journal.add_file(source, "figure.png"), journal.add_file(tmp_path / "model", "data")
    source.write_bytes(b"new")
    assert journal.file(one).read_bytes() == b"old" and (journal.file(two) / "w").read_bytes() == b"w"
    assert journal.file(journal.add_file(b"text", "a.txt")).name == "a.txt"
    journal.close(delete=True)
