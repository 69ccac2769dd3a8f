"""Read one CSV file (RFC 4180) as typed Arrow batches; report by line what does not match the declaration.

A quote inside a quoted value is doubled, a quoted value may hold line ends, a backslash is a character. An empty value
is null unless it is quoted; so is one equal to `nullValue`. One of a column's own `nulls` is null, quoted or not. Knows
nothing of Spark: workers read and check with it.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from sparkring.conf.plain_text import count_of
from sparkring.conf.sources.files import CsvOptions
from sparkring.etl.sources.values import TEXTS, convert

BLOCK_BYTES = 8 << 20  # the longest record; Arrow reads a handful of them ahead
HEADER_BYTES = 1 << 20
SHOWN = 80  # characters of a wrong line or value in a message
UNDECODED = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of bytes that are not of the encoding
_CONVERT = "convert the file, or set options.encoding to what it is"
_QUOTING = "a quoted value ends with its quote, and a quote within it is doubled"
_TORN = "a carriage return without a line feed, which ends a line; a value that holds one stands in quotes"
Types = dict[str, str]  # column -> Spark type
Opener = Callable[[], Any]  # -> a readable binary file, from its beginning


@dataclass
class Wrong:
    """Lines or values with one kind of fault: how many, and the first."""

    count: int = 0
    first: int = 0  # a line or the index of a record
    shown: str = ""

    def add(self, first: int, shown: str, count: int = 1) -> None:
        if not self.count:
            self.first, self.shown = first, repr(shown if len(shown) <= SHOWN else shown[:SHOWN] + "...")
        self.count += count

    def __str__(self) -> str:
        return self.shown + self.others()

    def others(self) -> str:
        return f" (and {self.count - 1} more)" if self.count > 1 else ""


def read(opener: Opener, options: CsvOptions, types: Types) -> Iterator[pa.RecordBatch]:
    """Read typed batches of a file that `check` accepted. ValueError if it has a fault now."""
    for batch in _texts(_Source(opener(), options), options, types):
        columns = [convert(batch.column(name), kind) for name, kind in types.items()]
        if any(bad for _, bad in columns):
            raise ValueError("the file changed while it was read")
        yield pa.RecordBatch.from_arrays([array for array, _ in columns], names=list(types))


def check(opener: Opener, options: CsvOptions, types: Types) -> list[str]:
    """List every way in which the file is not the declared table, each with its first line and value."""
    if problems := header_problems(opener, options, list(types)):
        return problems
    stream, failure, records = _Source(opener(), options), "", 0
    wrong = {name: Wrong() for name in types}
    try:
        for batch in _texts(stream, options, types):
            for name, kind in types.items():
                texts = batch.column(name)
                if bad := convert(texts, kind)[1]:
                    wrong[name].add(records + bad[0], texts[bad[0]].as_py(), len(bad))
            records += batch.num_rows
    except (pa.ArrowInvalid, UnicodeError) as error:
        failure = f"a line is longer than {BLOCK_BYTES} bytes" if "straddling" in str(error) else str(error)
    found = {name: w for name, w in wrong.items() if w.count}
    if not (found or failure or stream.has_quotes or len(types) == 1):
        return []
    problems, lines = _scan(opener, options, len(types), {w.first for w in found.values()})
    if failure and not problems:
        return [failure]
    return problems + [
        f"line {lines[w.first]}: column {name!r} is {types[name]}, and cannot keep {w}"
        for name, w in found.items()
        if w.first in lines
    ]


def _texts(stream: _Source, options: CsvOptions, types: Types) -> Iterator[pa.RecordBatch]:
    """Read batches of the values as strings."""
    reader = pacsv.open_csv(
        stream,
        read_options=pacsv.ReadOptions(
            use_threads=False, block_size=BLOCK_BYTES, column_names=list(types), skip_rows_after_names=1
        ),
        parse_options=pacsv.ParseOptions(
            delimiter=options.sep,
            quote_char=options.quote or False,
            newlines_in_values=bool(options.quote),
            ignore_empty_lines=len(types) > 1,
        ),
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys(types, pa.string()),
            null_values=["", options.nullValue],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    # Quotes tell a text from a null; what is no text cannot be an empty value, however it is quoted.
    of_kind = {name: [] if kind in TEXTS else ["", options.nullValue] for name, kind in types.items()}
    nulls = [pa.array([*words, *options.nulls.get(name, [])], pa.string()) for name, words in of_kind.items()]
    for batch in reader:
        columns = [
            pc.if_else(pc.is_in(array, words), None, array) if len(words) else array
            for array, words in zip(batch.columns, nulls, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, names=list(types))


class _Source(io.RawIOBase):
    """The file in UTF-8, its last line ended, and whether a quote was read: without one there is no quoting to check.

    Where the last line has no end, Arrow takes an empty last value as quoted if the value before it was.
    """

    def __init__(self, stream: Any, options: CsvOptions) -> None:
        if not _is_utf8(options):
            stream = pa.transcoding_input_stream(pa.PythonFile(stream, "r"), options.encoding, "utf-8")
        self.stream, self.has_quotes, self.ahead = stream, False, b""
        self.quote = options.quote.encode()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        assert size > 1  # what Arrow asks for
        data: bytes = self.ahead or self.stream.read(size - 1)  # one is left for the line end
        self.ahead = self.stream.read(size - 1)
        self.has_quotes = self.has_quotes or (bool(self.quote) and self.quote in data)
        unended = data and not self.ahead and data[-1:] not in b"\r\n"
        return data + b"\n" if unended else data


def header_problems(opener: Opener, options: CsvOptions, declared: list[str]) -> list[str]:
    """List what differs between a file's header and the declared columns."""
    text = opener().read(HEADER_BYTES).decode(options.encoding, errors="replace")
    ends: list[str] = []
    try:
        found: list[str] | None = next(_records(_noted(io.StringIO(text, newline=""), ends), options), None)
    except csv.Error as error:
        return [f"line 1: {error}; {_QUOTING}"]
    if not found:
        return [f"{'is' if found is None else 'line 1 is'} empty; a csv file begins with its header"]
    if any("\ufffd" in name for name in found):
        return [f"line 1: the header {found} is not {options.encoding}; set options.encoding, such as windows-1252"]
    if found != declared and ends[-1] == "\r" and "\n" in text:
        return [f"line 1: the header {found} ends with {_TORN}"]
    missing, extra = [c for c in declared if c not in found], [c for c in found if c not in declared]
    if missing and len(missing) == len(declared):
        return [f"has none of the declared columns; its header is {found}; are sep and encoding those of the file?"]
    problems = [f"has no column {', '.join(map(repr, missing))}; its header is {found}"] if missing else []
    if extra:
        problems.append(f"has a column {', '.join(map(repr, extra))} that is not declared; add it to columns")
    if problems or found == declared:
        return problems
    return [f"columns stand in another order, {found}, than declared, {declared}"]


def _scan(opener: Opener, options: CsvOptions, width: int, asked: set[int]) -> tuple[list[str], dict[int, int]]:
    """List what makes the file no CSV of `width` columns, and the line on which each record of `asked` begins.

    A second opinion, by Python's strict reader: slower, but it knows lines, and Arrow takes quotes as they come.
    """
    text = io.TextIOWrapper(opener(), options.encoding, errors="surrogateescape", newline="")
    ends: list[str] = []
    records = _records(_noted(text, ends), options)
    widths, torn, blank, undecoded, lines = Wrong(), Wrong(), Wrong(), Wrong(), {}
    record, line = 0, 1
    limit = csv.field_size_limit(BLOCK_BYTES)
    try:
        header = next(records)
        line, before = records.line_num + 1, ends[-1]
        is_torn = before == "\r"  # or all lines end so, as on an old Macintosh
        for row in records:
            if not row and width == 1:
                blank.add(line, "")
            elif row and len(row) != width:
                if is_torn and "\n" in ends[-1]:
                    torn.add(1, options.sep.join(header))
                elif "\r" in (before, ends[-1]) and not is_torn:
                    torn.add(line, options.sep.join(row))
                else:
                    widths.add(line, options.sep.join(row))
            elif row:
                if UNDECODED.search(options.sep.join(row)):
                    undecoded.add(line, options.sep.join(row))
                if record in asked:
                    lines[record] = line
                record += 1
            line, before = records.line_num + 1, ends[-1]
    except csv.Error as error:
        return [f"line {line}: {error}; {_QUOTING}"], {}
    except UnicodeError as error:
        return [f"after line {line}: {error}; {_CONVERT}"], {}
    finally:
        csv.field_size_limit(limit)
    quoting = f"; a value that holds {options.sep!r} or a line end stands in quotes" if options.quote else ""
    faults = {
        f"begins or ends with {_TORN}": torn,
        f"is not a line of {count_of(width, 'field')}, as the header is{quoting}": widths,
        f"is not {options.encoding}; {_CONVERT}": undecoded,
        "is empty, which in a table of one column may be a null or nothing; write the null as nullValue": blank,
    }
    return [f"line {w.first}: {w} {what}" for what, w in faults.items() if w.count], lines


def _noted(stream: Iterable[str], ends: list[str]) -> Iterator[str]:
    """Yield lines; `ends` is the end of the latest."""
    for text in stream:
        ends[:] = [text[len(text.rstrip("\r\n")) :]]
        yield text


def _records(stream: Iterable[str], options: CsvOptions) -> Any:
    lines = (text if number else text.removeprefix("\ufeff") for number, text in enumerate(stream))
    if not options.quote:
        return csv.reader(lines, delimiter=options.sep, quoting=csv.QUOTE_NONE)
    return csv.reader(lines, delimiter=options.sep, quotechar=options.quote, strict=True)


def _is_utf8(options: CsvOptions) -> bool:
    return codecs.lookup(options.encoding).name == "utf-8"
