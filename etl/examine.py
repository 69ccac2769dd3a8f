"""Find what is wrong with the tables of a recipe before anything is built: files, footers, headers. Without Spark.

Of a table of many files some are looked at; the build looks at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.errors import first_line
from sparkring.conf.sources import CsvOptions, DeltaSource, FilesSource, IcebergSource, SourceConfig
from sparkring.etl.errors import EtlError, NoFiles
from sparkring.etl.sources import csv_file
from sparkring.etl.sources.file_source import list_source
from sparkring.etl.sources.files import FileList
from sparkring.etl.sources.footers import check_footers
from sparkring.etl.sources.pin import pin
from sparkring.etl.sources.read import line_format
from sparkring.etl.sources.types import known_schema
from sparkring.etl.windows.interval import window_of
from sparkring.etl.windows.window import cut_source

LOOKED_AT, SHOWN = 16, 5  # files of a table, and problems of it in a message
T = TypeVar("T")


@dataclass(frozen=True)
class Examined:
    """What was found. `files` and `bytes` by table; `rows` of tables whose footers were all read."""

    problems: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def examine_sources(etl: EtlConfig, pinned_soon: bool = False) -> Examined:
    """Examine every table that can be without Spark.

    Of a table that is read by intervals, the last interval. `pinned_soon`: leave those alone that the pin of a job,
    which is about to come, costs no more than this: Delta, Iceberg, and files that are known by `stat`.
    """
    found = Examined()
    for name, source in etl.sources.items():
        try:
            found.problems.extend(_examine(name, _of_last_interval(name, source, etl), pinned_soon, found))
        except NoFiles as error:
            if etl.interval is None or name not in etl.interval.sources:  # else the whole window is asked
                found.problems.append(str(error))
        except (EtlError, OSError) as error:
            text = str(error) if isinstance(error, EtlError) else f"etl.sources.{name}: {first_line(error)}"
            found.problems.append(text)
    return found


def _of_last_interval(name: str, source: SourceConfig, etl: EtlConfig) -> SourceConfig:
    if etl.interval is None or name not in etl.interval.sources:
        return source
    return cut_source(source, etl.interval.sources[name], window_of(etl.interval)[-1])


def _examine(name: str, source: SourceConfig, pinned_soon: bool, found: Examined) -> Iterator[str]:
    """Yield the problems of one table, and note its size in `found`. EtlError where there is no such table."""
    key = f"etl.sources.{name}"
    if isinstance(source, DeltaSource | IcebergSource) and not pinned_soon:
        pin(name, source)
    if not isinstance(source, FilesSource) or (pinned_soon and source.fingerprint == "stat"):
        return
    if source.format in ("csv", "json"):
        line_format(key, source, known_schema(source.columns))
    listed = list_source(name, source)
    found.files[name], found.bytes[name] = len(listed.files), listed.bytes
    problems = _file_problems(source, FileList(listed.storage, spread(listed.files, LOOKED_AT)))
    yield from (f"{key}: {problem}" for problem in problems[:SHOWN])
    if len(problems) > SHOWN:
        yield f"{key}: and {len(problems) - SHOWN} more differences"
    if source.format == "parquet" and not problems and len(listed.files) <= LOOKED_AT:
        found.rows[name] = sum(_rows(listed, file.full) for file in listed.files)


def spread(values: Sequence[T], most: int) -> tuple[T, ...]:
    """At most so many of the values, from the first to the last, at equal distances."""
    if len(values) <= most:
        return tuple(values)
    return tuple(values[i * (len(values) - 1) // (most - 1)] for i in range(most))


def _file_problems(source: FilesSource, listed: FileList) -> list[str]:
    """How the files differ from the declared columns."""
    if source.format == "csv":
        return [
            f"{file.path}: {problem}"
            for file in listed.files
            for problem in csv_file.header_problems(
                partial(listed.storage.fs.open_input_stream, file.full, compression="detect"),
                source.options or CsvOptions(),
                [*source.columns],
            )
        ]
    if source.format not in ("parquet", "orc"):
        return []
    columns, partitions = known_schema(source.columns), known_schema(source.partitions)
    may_lack = source.missing_columns == "null"
    footers = check_footers(listed, source.format, columns, partitions, may_lack)
    return [problem for footer in footers for problem in footer.problems]


def _rows(listed: FileList, path: str) -> int:
    try:
        with listed.storage.fs.open_input_file(path) as stream:
            return int(pq.ParquetFile(stream).metadata.num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        raise EtlError(f"{path}: {first_line(error)}") from error
