"""Inside a rank's process: what it runs, and what it says of an error."""

from __future__ import annotations

from pathlib import Path

from sparkring.training.launch.host.rank import describe_error, has_files_of
from sparkring.training.launch.topology import Child


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
