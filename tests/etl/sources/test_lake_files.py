"""The files a lake table's log lists, without Spark: selection, what is gone, content. Rows: tests/spark."""

from dataclasses import replace

import numpy as np
import pytest
from pyspark.sql.types import ArrayType, DateType, IntegerType, LongType, MapType, StringType, StructField, StructType

from sparkring.conf.storage import open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.lake_files import (
    LakeFile,
    LakeFiles,
    LakeSchema,
    map_fields,
    plain_field,
    quoted,
    select_columns,
)


def fields(**kinds) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


TEXTS = ArrayType(StringType())
COLUMNS = fields(a=LongType(), day=DateType(), s=fields(x=IntegerType(), y=TEXTS))
STORED = fields(col1=LongType(), day=DateType(), col3=fields(col4=IntegerType(), col5=TEXTS))
SCHEMA = LakeSchema(COLUMNS, STORED, ("day",))


@pytest.fixture
def files(tmp_path) -> LakeFiles:
    (tmp_path / "p=%20").mkdir()
    for name in ("p=%20/0.parquet", "1.parquet"):
        (tmp_path / name).write_bytes(b"12345")
    listed = (LakeFile("1.parquet", 5, (None,)), LakeFile("p=%20/0.parquet", 5, ("None",), np.array([1, 2])))
    return LakeFiles(open_storage(str(tmp_path)), SCHEMA, listed)


def test_columns_are_selected_in_their_order_with_the_names_in_files():
    found = select_columns("k", ["s", "a"], SCHEMA)
    assert found.columns == StructType([COLUMNS["s"], COLUMNS["a"]])
    assert found.stored == StructType([STORED["col3"], STORED["col1"]]) and found.partitions == ()
    assert select_columns("k", ["day"], SCHEMA).partitions == ("day",)
    assert select_columns("k", [], SCHEMA) == SCHEMA


def test_columns_that_the_table_does_not_have_are_named():
    with pytest.raises(EtlError) as caught:
        select_columns("etl.sources.t", ["a", "A", "x"], SCHEMA)
    wanted = "etl.sources.t.columns: the table has no column ['A', 'x']; it has ['a', 'day', 's']"
    assert str(caught.value) == wanted


def test_files_that_are_missing_or_of_another_size_are_gone(files):
    assert files.gone() == []
    with open(f"{files.storage.root}/1.parquet", "ab") as file:
        file.write(b"6")
    assert files.gone() == ["1.parquet"]
    files.storage.delete("p=%20")
    assert files.gone() == ["1.parquet", "p=%20/0.parquet"]


def test_a_file_that_is_listed_twice_is_refused(files):
    with pytest.raises(EtlError, match=r"the log of this table lists 1\.parquet twice"):
        replace(files, files=(*files.files, files.files[0]))


def test_content_is_all_that_decides_the_rows_and_not_the_place(files, tmp_path):
    first, second = files.files
    moved = replace(files, storage=open_storage(str(tmp_path / "elsewhere")))
    assert moved.content() == files.content()
    others = [
        replace(files, files=(first,)),
        replace(files, files=(first, replace(second, path="2.parquet"))),
        replace(files, files=(first, replace(second, bytes=6))),
        replace(files, files=(first, replace(second, partition=(None,)))),
        replace(files, files=(first, replace(second, deleted=np.array([1, 3])))),
        replace(files, schema=replace(SCHEMA, partitions=())),
        replace(files, schema=replace(SCHEMA, stored=COLUMNS)),
    ]
    found = [files.content(), *(other.content() for other in others)]
    assert all(one != other for n, one in enumerate(found) for other in found[:n])


def test_fields_are_changed_within_structs_arrays_and_maps():
    inner = StructType([StructField("x", IntegerType(), False, {"id": 1})])
    kind = StructType(
        [StructField("m", MapType(inner, ArrayType(inner, False), False), False), StructField("l", inner)]
    )
    found = map_fields(kind, lambda field, changed: StructField(field.name * 2, changed))
    new = StructType([StructField("xx", IntegerType())])
    assert found == StructType([StructField("mm", MapType(new, ArrayType(new))), StructField("ll", new)])
    plain = map_fields(kind, plain_field)
    assert plain["l"] == StructField("l", StructType([StructField("x", IntegerType())]))


@pytest.mark.parametrize("name", ["a", "a b", "a`b", "a.b", "é"])
def test_a_quoted_name_is_one_column(name):
    assert quoted(name) == "`" + name.replace("`", "``") + "`"
