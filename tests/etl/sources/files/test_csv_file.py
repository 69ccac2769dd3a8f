"""CSV files, whole and broken: every value as it was written, or a refusal by line; beside DuckDB and pandas."""

import gzip
import io
import random
import tracemalloc

import duckdb
import pandas as pd
import pytest
from pydantic import ValidationError

from sparkring.conf.sources.files import CsvOptions
from sparkring.etl.sources.files import csv_file
from sparkring.etl.sources.files.csv_file import BLOCK_BYTES, check, read

CELLS = ["", "x", 'he said "hi"', "tail\\", '\\"', '"', '""', "a,b", "two\nlines", "crlf\r\nin", "cr\rin", " blank "]
CELLS += ["\t", "NA", "null", "#c", "é", "日本", "\ufeff", "0", "1.50", "'", "\\N", "\u2028", "\x0b", "\x1f", "\x85"]
DUCK = duckdb.connect(config={"threads": 1})
BREAKS = [b'"', b",", b"\n", b"", b"\\", b'"\n', b"\r", b"\xff"]


def ours(data, types, **options):
    """Rows, or the problems as one text."""
    if not isinstance(types, dict):
        types = dict.fromkeys(types, "string")
    problems = check(lambda: io.BytesIO(data), CsvOptions(**options), types)
    if problems:
        return "\n".join(problems)
    batches = read(lambda: io.BytesIO(data), CsvOptions(**options), types)
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def duck(data, names, path):
    path.write_bytes(data)
    columns = ", ".join(f"'{n}': 'VARCHAR'" for n in names)
    options = "header=true, auto_detect=false, delim=',', quote='\"', escape='\"', strict_mode=true"
    try:
        return DUCK.sql(f"SELECT * FROM read_csv('{path}', {options}, columns={{{columns}}})").fetchall()
    except duckdb.Error:
        return "refused"


def pandas(data):
    try:
        frame = pd.read_csv(io.BytesIO(data), dtype=str, keep_default_na=False, index_col=False)
        return list(frame.itertuples(index=False, name=None))
    except (ValueError, UnicodeError):
        return "refused"


def without_nulls(rows):
    return rows if isinstance(rows, str) else [tuple(v or "" for v in row) for row in rows]


def written(rng, rows):
    """The rows by RFC 4180: quoted where they must be, or everywhere."""
    everywhere, end = rng.random() < 0.3, rng.choice(["\n", "\r\n", "\r"])

    def cell(text):
        quoted = everywhere or any(c in text for c in '",\r\n')
        return '"' + text.replace('"', '""') + '"' if quoted else text

    return "".join(",".join(map(cell, row)) + end for row in rows).encode()


def tables(count):
    rng = random.Random(7)
    for _ in range(count):
        names = "abcd"[: rng.randint(2, 4)]
        rows = [tuple(rng.choice(CELLS) for _ in names) for _ in range(rng.randint(0, 5))]
        yield rng, names, rows, written(rng, [tuple(names), *rows])


def test_nasty_files_are_read_as_they_were_written_and_as_duckdb_and_pandas_read_them(tmp_path):
    for _, names, rows, data in tables(150):
        assert without_nulls(ours(data, names)) == rows, data
        assert without_nulls(duck(data, names, tmp_path / "t.csv")) == rows, data
        assert without_nulls(pandas(data)) == rows, data


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp037"])
def test_texts_and_nulls_are_the_same_with_and_without_a_mark_in_front_and_an_end_of_the_last_line(encoding):
    rng = random.Random(11)

    def cell(text):
        quoted = text is not None and (rng.random() < 0.3 or text == "" or any(c in text for c in '",\r\n'))
        return '"' + text.replace('"', '""') + '"' if quoted else text or ""

    for _ in range(60):
        names = rng.sample(["a", "C,", 'q"q', "n\nl", "z"], rng.randint(2, 4))
        rows = [tuple(rng.choice([None, None, "", "x", 'q"', "a,b"]) for _ in names) for _ in range(rng.randint(0, 4))]
        text = "\n".join(",".join(map(cell, row)) for row in [names, *rows])
        for whole in (text, text + "\n", "\ufeff" + text):
            if encoding != "cp037" or not whole.startswith("\ufeff"):
                assert ours(whole.encode(encoding), names, encoding=encoding) == rows, whole


@pytest.mark.filterwarnings("ignore:Length of header")
def test_broken_files_are_refused_by_line_or_read_as_the_others_read_them(tmp_path):
    refused = 0
    for rng, names, _, data in tables(300):
        at = rng.randrange(2 * len(names), len(data) + 1)
        data = data[:at] + rng.choice(BREAKS) + data[at + rng.randint(0, 1) :]
        found = ours(data, names)
        if isinstance(found, str):
            refused += 1
            assert "line " in found or "column" in found, (data, found)
            continue
        found, other = without_nulls(found), without_nulls(duck(data, names, tmp_path / "t.csv"))
        assert other in ("refused", found), data
        assert without_nulls(pandas(data)) == found, data
    assert 80 < refused < 260


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'a,b\n1,2\n1,"open\n2,3\n', "line 3: unexpected end of data"),
        (b'a,b\n1,2\n1,"a"b\n', "line 3: ',' expected after '\"'; a quoted value ends with its quote"),
        (b'a,b\n"he said \\"hi\\"",2\n', "line 2: ',' expected"),
        (b'a,b\n"x\n\ny",2\nz\n1,2,3\n', "line 5: 'z' (and 1 more) is not a line of 2 fields"),
        (b"a,b\n1,2\nCaf\xe9,2\n", r"line 3: 'Caf\udce9,2' is not utf-8; convert the file, or set options.encoding"),
        (b"a,b\n1,2\n\xe9\n", "line 3:"),
        (b'"a,b\n1,2\n', "line 1: unexpected end of data"),
        (b"", "is empty; a csv file begins"),
        (b"\na,b\n1,2\n", "line 1 is empty; a csv file begins"),
        (
            b"Caf\xe9,b\n1,2\n",
            "line 1: the header ['Caf\ufffd', 'b'] is not utf-8; set options.encoding, such as windows",
        ),
        (b"a;b\n1;2\n", "has none of the declared columns; its header is ['a;b']; are sep and encoding those"),
        (b'\xef\xbb\xbf"C,",b\nx,1\n"y"z,2\n', "line 3: ',' expected after"),
        (b'a,b\n"' + b"x" * 200_000 + b'",2\nz\n', "line 3: 'z' is not a line of 2 fields"),
        (b"a,b\n" + b'"' + b"x" * (BLOCK_BYTES + 9) + b'",2\n', "line 2: field larger than"),
    ],
)
def test_what_is_no_table_is_refused_by_line(data, words):
    assert words in ours(data, ["C,", "b"] if b"C," in data else "ab")


LONE = "a carriage return without a line feed, which ends a line; a value that holds one stands in quotes"
QUOTED = "is not a line of 2 fields, as the header is; a value that holds ',' or a line end stands in quotes"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a,b\nx\ry,2\nz,3\n", f"line 2: 'x' begins or ends with {LONE}"),
        (b"a,b\r\n1,2\r\n\ry,2\r\n", None),  # an empty line, as other readers take it
        (b"a,b\n1,2\n1,2\rnote\n", f"line 4: 'note' begins or ends with {LONE}"),
        (b"a,b\n1,2\r,\r\n1\r,2\n", f"line 4: '1' begins or ends with {LONE}"),
        (b"a\rb,b\n1,2\n", f"line 1: the header ['a'] ends with {LONE}"),
        (b"a,b\rc,c\n1,2,3\n", f"line 1: 'a,b' begins or ends with {LONE}"),
        (b"a,b\r1,2\r3\r4,5\r", f"line 3: '3' {QUOTED}"),
        (b'a,b\r1,"x\ny"\r3,4', None),
        (b'a,b\n1,"x\ry"\r\r\n3,4\r\r\n', None),
        (b"a,b\n1\n", f"line 2: '1' {QUOTED}"),
        (b"a,b\n1,2,3\n", f"line 2: '1,2,3' {QUOTED}"),
        (b"a,b\n1,2\n\x1a", f"line 3: '\\x1a' {QUOTED}"),
        (b"a,b\n1,2\n\0\0\n", f"line 3: '\\x00\\x00' {QUOTED}"),
    ],
)
def test_a_line_that_ends_where_it_should_not_is_named_with_its_text_and_the_rule(data, words):
    assert ours(data, "ab") == words if words else not isinstance(ours(data, "ab"), str)


def test_a_value_that_is_none_is_named_with_its_line_and_how_many_more_there_are():
    data = b'a,b\n"two\nlines",1\nx,1.5\ny,2\n\nz,seven\nw,16777217\n'
    assert ours(data, {"a": "string", "b": "int"}) == "line 4: column 'b' is int, and cannot keep '1.5' (and 1 more)"
    assert "line 8: column 'b' is float, and cannot keep '16777217'" not in ours(data, {"a": "string", "b": "float"})
    assert "line 7: column 'b' is float, and cannot keep 'seven' (and 1 more)" in ours(
        data, {"a": "string", "b": "float"}
    )


def test_quotes_tell_a_text_from_a_null():
    data = b'a,b\n"NA",NA\n"",\nx,"1"\n'
    assert ours(data, {"a": "string", "b": "int"}, nullValue="NA") == [("NA", None), ("", None), ("x", 1)]
    assert ours(data, {"a": "string", "b": "string"}) == [("NA", "NA"), ("", None), ("x", "1")]
    assert ours(b'a,b\n"","NA"\n', {"a": "int", "b": "date"}, nullValue="NA") == [(None, None)]


def test_an_empty_line_is_nothing_but_in_a_table_of_one_column():
    assert ours(b"a,b\n\n1,2\n\n\n3,4\n\n", "ab") == [("1", "2"), ("3", "4")]
    assert "line 3: '' is empty" in ours(b"a\n1\n\n2\n", "a")
    assert ours(b'a\n1\n""\nNA\n', {"a": "int"}, nullValue="NA") == [(1,), (None,), (None,)]


@pytest.mark.parametrize("data", [b"a,b", b"a,b\n", b"\xef\xbb\xbfa,b\r\n"])
def test_a_header_alone_is_a_table_without_rows(data):
    assert ours(data, "ab") == []


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16", "utf-16-le", "windows-1252"])
def test_files_of_other_encodings_are_what_the_options_say(encoding):
    data = 'a,b\né,"x ""y"""\n'.encode(encoding)
    assert ours(data, "ab", encoding=encoding) == [("é", 'x "y"')]
    if encoding not in ("utf-8", "latin-1", "windows-1252"):
        assert isinstance(ours(data + b"\x00", "ab", encoding=encoding), str)


def test_other_separators_and_quotes():
    assert ours(b"a;b\n'x;y';it''s\n'it''s';2\n", "ab", sep=";", quote="'") == [("x;y", "it''s"), ("it's", "2")]
    assert ours(b'a\tb\n"x\t5"\n', "ab", sep="\t", quote="") == [('"x', '5"')]
    for wrong in ({"sep": ""}, {"sep": "||"}, {"sep": '"'}, {"encoding": "klingon"}, {"escape": "\\"}):
        with pytest.raises(ValidationError):
            CsvOptions(**wrong)


def test_a_large_file_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr(csv_file, "BLOCK_BYTES", 1 << 18)  # Arrow may read 32 blocks ahead
    line = b"x" * 1000 + b",7\n"
    data = gzip.compress(b"a,b\n" + line * 60_000, 1)

    def opener():
        return gzip.open(io.BytesIO(data))

    types = {"a": "string", "b": "int"}
    tracemalloc.start()
    assert check(opener, CsvOptions(), types) == []
    assert sum(batch.num_rows for batch in read(opener, CsvOptions(), types)) == 60_000
    assert tracemalloc.get_traced_memory()[1] < 30 << 20  # of 60 MB
    tracemalloc.stop()
