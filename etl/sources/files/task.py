"""What a worker does with the files of a CSV or JSON table: check each against the declaration, then read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructField, StructType

from sparkring.conf.errors import first_line
from sparkring.conf.sources.files import CsvOptions
from sparkring.conf.storage import open_storage
from sparkring.etl.sources.files import csv_file, json_file
from sparkring.etl.sources.files.csv_file import Opener, Wrong
from sparkring.etl.sources.files.json_file import Findings
from sparkring.etl.sources.files.listing import SourceFile
from sparkring.etl.sources.values import arrow_type

MOST_KEYS = 100  # undeclared keys that are counted of one file: an object may be keyed by users
FOUND = "file int, problem string, key string, records long"  # what `check` gives: a problem, or an undeclared key


def unreadable(error: OSError) -> str:
    """Describe why a file cannot be read to its end: it is truncated, damaged or compressed otherwise."""
    return f"cannot be read ({first_line(error)}): it is cut or damaged, or its suffix names another compression"


class LineFormat(ABC):
    """How the files of one format are checked and read; `schema` is what each holds."""

    schema: StructType
    nulls_are_missing = False  # a file may leave a value out

    @abstractmethod
    def check(self, opener: Opener) -> Findings:
        """List what does not match the declaration."""

    @abstractmethod
    def read(self, opener: Opener) -> Iterator[pa.RecordBatch]:
        """Read a file that `check` accepted."""

    def reading(self, fields: list[StructField]) -> LineFormat:
        """Return the format restricted to these columns, all of which are in the file; here: all declared ones."""
        return self


@dataclass(frozen=True)
class CsvFormat(LineFormat):
    """CSV: every file has the declared columns and no others."""

    schema: StructType
    options: CsvOptions

    def check(self, opener: Opener) -> Findings:
        return Findings(csv_file.check(opener, self.options, self._types()))

    def read(self, opener: Opener) -> Iterator[pa.RecordBatch]:
        return csv_file.read(opener, self.options, self._types())

    def _types(self) -> csv_file.Types:
        return {f.name: f.dataType.simpleString() for f in self.schema}


@dataclass(frozen=True)
class JsonFormat(LineFormat):
    """JSON lines: a record may lack keys and have others."""

    schema: StructType
    nulls_are_missing = True

    def check(self, opener: Opener) -> Findings:
        return json_file.check(opener, self.schema)

    def read(self, opener: Opener) -> Iterator[pa.RecordBatch]:
        return json_file.read(opener, self.schema)

    def reading(self, fields: list[StructField]) -> LineFormat:
        return JsonFormat(StructType(fields))


@dataclass(frozen=True)
class FileTask:
    """What a worker needs to check or read files, which come as batches of their numbers.

    `columns` are the columns of the table in their order, with those of `partitions`.
    """

    root_uri: str
    files: tuple[SourceFile, ...]
    format: LineFormat
    partitions: StructType
    columns: tuple[str, ...]

    def check(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, file, opener in self._files(batches):
            try:
                findings = self.format.check(opener)
            except OSError as error:
                findings = Findings([unreadable(error)])
            problems = findings.problems or self._contradictions(file, opener, findings)
            keys = Counter({k: n for k, n in findings.unknown.items() if k not in self.partitions.names})
            rows: list[dict[str, Any]] = [{"problem": f"{file.path}: {problem}"} for problem in problems]
            rows += [{"key": key, "records": records} for key, records in keys.most_common(MOST_KEYS)]
            schema = pa.schema({"file": pa.int32(), "problem": pa.string(), "key": pa.string(), "records": pa.int64()})
            yield pa.RecordBatch.from_pylist([{"file": number, **row} for row in rows], schema)

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _, file, opener in self._files(batches):
            folder = self._folder_values(file)
            for batch in self.format.read(opener):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                columns |= {name: pa.repeat(value, batch.num_rows) for name, value in folder.items()}
                yield pa.RecordBatch.from_arrays([columns[name] for name in self.columns], names=list(self.columns))

    def _contradictions(self, file: SourceFile, opener: Opener, findings: Findings) -> list[str]:
        """List the partition columns that the file has itself with another value than its folder."""
        own = [f for f in self.partitions if f.name in self.format.schema.names or f.name in findings.unknown]
        if not own:
            return []
        format, folder, found = self.format.reading(own), self._folder_values(file), {f.name: Wrong() for f in own}
        if problems := format.check(opener).problems:
            return problems
        for batch in format.read(opener):
            for name, wrong in found.items():
                values = batch.column(name)
                if format.nulls_are_missing:
                    values = values.drop_null()
                for value in values.filter(_differ(values, folder[name])):
                    wrong.add(0, str(value) if value.is_valid else "null")
        return [
            f"has the partition column {name!r} itself, and there it is {wrong}"
            for name, wrong in found.items()
            if wrong.count
        ]

    def _folder_values(self, file: SourceFile) -> dict[str, pa.Scalar]:
        types = [arrow_type(f.dataType.simpleString()) for f in self.partitions]
        values = zip(self.partitions.names, file.partition, types, strict=True)
        return {name: pa.scalar(value, kind) for name, value, kind in values}

    def _files(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, SourceFile, Opener]]:
        fs = open_storage(self.root_uri).fs
        for batch in batches:
            for number in batch.column("file").to_pylist():
                file = self.files[number]
                yield number, file, partial(fs.open_input_stream, file.full, compression="detect")


def _differ(values: pa.Array, value: pa.Scalar) -> pa.Array:
    """Return a mask of the values that differ from `value`; null equals only null."""
    return pc.fill_null(pc.not_equal(values, value), True) if value.is_valid else pc.is_valid(values)
