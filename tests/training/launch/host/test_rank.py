"""Inside a rank's process: what it runs, and what it says of an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkring.training.launch.child import ChildState
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.host.rank import describe_error, has_files_of, load_function
from sparkring.training.launch.messages import ChildEnded
from sparkring.training.launch.topology import Child

ENTRY = "sparkring.training.worker.train_trees:train"


def test_a_folder_is_the_drivers_where_every_file_has_the_same_bytes(tmp_path: Path) -> None:
    import zipfile

    folder, archive = tmp_path / "there", tmp_path / "a.zip"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/m.py").write_text("x = 1")
    (folder / "more.txt").write_text("of this host only")
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("sub/m.py", "x = 1")
    assert has_files_of(folder, archive)
    (folder / "sub/m.py").write_text("x = 2")
    assert not has_files_of(folder, archive)
    assert not has_files_of(tmp_path / "nowhere", archive)


def test_an_error_is_described_even_where_it_cannot_be_printed() -> None:
    class Odd(ValueError):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    found = describe_error(Odd(), Child("rank", 3), 2)
    assert (found.child.index, found.attempt, found.is_value_error) == (3, 2, True)
    assert found.message == "<its __str__ raised RuntimeError>"


class Absent:
    """Finds no xgboost, as where it is not installed, whichever of its modules is imported first."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "xgboost":
            raise ModuleNotFoundError("No module named 'xgboost'", name=name)


@pytest.mark.parametrize("broken", ["raise OSError('libgomp.so.1: cannot open')", None])
def test_a_package_that_only_this_host_lacks_is_one_line_with_the_host_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    imported = ("xgboost", "sparkring.training.trees", ENTRY.partition(":")[0])
    for name in [name for name in sys.modules if name.startswith(imported)]:
        monkeypatch.delitem(sys.modules, name)
    if broken is None:
        monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
        why = "ModuleNotFoundError: No module named 'xgboost'"
    else:
        (tmp_path / "xgboost.py").write_text(broken)
        monkeypatch.syspath_prepend(tmp_path)
        why = "OSError: libgomp.so.1: cannot open"
    with pytest.raises(ImportError) as caught:
        load_function(ENTRY)
    rank, error = Child("rank", 1), caught.value
    assert "in test_a_package" in describe_error(error, rank, 1).traceback, "called by code of a user's"
    assert error.__traceback__ is not None
    called_by_the_rank = describe_error(error.with_traceback(error.__traceback__.tb_next), rank, 1)
    failure = ChildState(rank, "agent-1", "host-b", error=called_by_the_rank).raised(
        ChildEnded(rank, 1, 1, "exited with code 1"), "exception"
    )
    assert failure is not None and failure.error_type == "ImportError"
    assert str(WorkerFailed(failure)) == (
        f"rank 1 on host-b raised ImportError: this host lacks what sparkring.training.worker.train_trees imports "
        f"({why}); install the packages of the driver for {sys.executable} there, with its extras, such as "
        "sparkring[trees] for xgboost"
    )
