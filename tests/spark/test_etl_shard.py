"""Shards: equal, exact, in an order that is the same whatever the partitions; every type whole or refused."""

import hashlib
import tracemalloc
from bisect import bisect_left
from contextlib import closing
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.sql import functions as F

from sparkring.conf.blocks.etl import ShardConfig
from sparkring.conf.storage import open_storage
from sparkring.etl.columns.types import ColumnOptions, manifest_column, stored_expression
from sparkring.etl.errors import EtlError
from sparkring.etl.shards import layout, shard
from sparkring.etl.shards.layout import Cut, cut_table
from sparkring.etl.shards.shard import Buckets, ShardPlan, Target, number_rows, plan_files, with_order, write_shards
from sparkring.etl.split import SPLIT
from sparkring.training.data.batch import Ragged
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import ReadRequest
from tests.helpers.codegen import COMPILED
from tests.helpers.datasets import manifest_of

pytestmark = pytest.mark.spark


def write(spark, rows, folder, key, shards=None, row_group=None, counts=None, depth=None, **options):
    """Write `rows` (SPLIT where they have one, else all `train`); `options` by column go to manifest_column.

    `depth`: bits of the hash that rows are counted by before they are numbered.
    """
    rows = rows if SPLIT in rows.columns else rows.withColumn(SPLIT, F.lit("train"))
    fields = [f for f in rows.schema.fields if f.name != SPLIT]
    columns = [manifest_column(f.name, f.dataType, "feature", ColumnOptions(**options.get(f.name, {}))) for f in fields]
    counts = counts or {r[SPLIT]: r["count"] for r in rows.groupBy(SPLIT).count().collect()}
    config = ShardConfig(shards=shards, row_group=row_group)
    stored = [
        stored_expression(F.col(f.name), f.dataType, c).alias(f.name) for f, c in zip(fields, columns, strict=True)
    ]
    keyed = with_order(rows, key or [f.name for f in fields], 0)
    made = plan_files(rows.select(*stored), dict(sorted(counts.items(), reverse=True)), columns, config)
    numbered = number_rows(keyed, made.shards, depth and Buckets(depth, shard._counted(keyed, depth)))
    frame = numbered.select(*stored, *[c for c in numbered.columns if c.startswith("__")])
    (files,) = write_shards(frame, columns, [Target("", "d", made)], open_storage(str(folder)))
    return files, columns


def table(folder, files):
    return pa.concat_tables([pq.read_table(folder / f.path) for f in files])


def tensors(folder, files, columns):
    """What a training process gets of these files: every column of all rows, in one batch."""
    rows = sum(f.rows for f in files)
    manifest = manifest_of(columns=columns, files=files)
    with closing(ParquetReader(ReadRequest(open_storage(str(folder)), manifest, "train", None, rows))) as reader:
        (batch,) = reader.batches(0)
    return batch.columns


def row(value, number):
    """Row `number` of a column of a batch, as plain Python."""
    if not isinstance(value, Ragged):
        return value[number].tolist() if isinstance(value, torch.Tensor) else value[number]
    rows = value.values.tolist()
    for offsets in value.offsets:
        rows = [rows[a:b] for a, b in pairwise(offsets.tolist())]
    return rows[number]


def skewed(spark, partitions, aqe):
    """5,000 rows, 80 % of them with one `hot` value; the input's partitioning as uneven as it gets."""
    session = spark.newSession()
    session.conf.set("spark.sql.adaptive.enabled", str(aqe).lower())
    rows = session.range(5000).selectExpr("id", "if(id % 5 = 0, id, 0) as hot", "cast(id as float) / 7 as x")
    rows = rows.withColumn(SPLIT, F.when(F.col("id") % 10 == 3, "test").otherwise("train"))
    return session, rows.coalesce(1) if partitions == 1 else rows.repartition(partitions, "hot")


PLAIN = (1, True, layout.MOST_HASHES, None)  # partitions, AQE, hashes collected at once, bits counted by before
WAYS = [PLAIN, (7, False, 0, None), (16, True, 40, None), (7, True, 40, 5)]


@pytest.mark.parametrize(
    ("key", "ways"),
    [(["id"], WAYS), (["hot"], [PLAIN, (16, False, 40, 5)]), ([], [PLAIN, (16, True, 40, None)])],
    ids=["unique", "hot", "all"],
)
def test_bytes_do_not_depend_on_partitions_skew_or_aqe(spark, tmp_path, monkeypatch, key, ways):
    """Nor on how many passes over the key it takes to find where shards begin, nor on whether Spark compiles plans."""
    made = []
    for index, (partitions, aqe, hashes, depth) in enumerate(ways):
        session, rows = skewed(spark, partitions, aqe)
        for setting, value in COMPILED.items() if index == 1 else ():
            session.conf.set(setting, value)
        monkeypatch.setattr(layout, "MOST_HASHES", hashes)
        files, _ = write(session, rows, tmp_path / str(index), key, {"train": 4, "test": 3}, row_group=100, depth=depth)
        made.append(files)
    assert all([f.sha256 for f in made[0]] == [f.sha256 for f in other] for other in made[1:])
    train = [f for f in made[0] if f.split == "train"]
    assert [f.rows for f in train] == [1125] * 4 and sum(f.rows for f in made[0]) == 5000
    assert {f.rows for f in made[0] if f.split == "test"} == {166, 167}
    for file in made[0]:
        assert file.row_groups[:-1] == (100,) * (len(file.row_groups) - 1) and sum(file.row_groups) == file.rows
        assert file.sha256 == hashlib.sha256((tmp_path / "0" / file.path).read_bytes()).hexdigest()
    stored = table(tmp_path / "0", made[0])["id"].to_pylist()
    assert sorted(stored) == list(range(5000))
    if key == ["id"]:  # a hot key's equal hashes stand together by design; a unique key shuffles
        assert abs(np.corrcoef(np.arange(4500), table(tmp_path / "0", train)["id"].to_numpy())[0, 1]) < 0.05


def test_a_split_of_identical_rows_is_still_cut_evenly(spark, tmp_path):
    files, _ = write(spark, spark.range(1000).selectExpr("cast(1 as int) as one"), tmp_path, [], {"train": 7}, 64)
    assert (
        sorted(f.rows for f in files) == [142] + [143] * 6 and table(tmp_path, files)["one"].to_pylist() == [1] * 1000
    )


@pytest.mark.usefixtures("compiled_plans")
def test_spark_finds_a_row_among_tens_of_thousands_of_cuts(spark):
    rng = np.random.default_rng(0)
    hashes = rng.integers(-(1 << 63), (1 << 63) - 1, 20_000).tolist()
    cuts = sorted({(h, 0) for h in hashes} | {(hashes[0], 2), (hashes[0], 5), (-(1 << 63), 1), ((1 << 63) - 1, 3)})
    tied = {value for value, below in cuts if below}
    asked = [*hashes[:500], *(h - 1 for h in hashes[:500]), *tied, *rng.integers(-(1 << 63), 1 << 63 - 1, 500).tolist()]
    rows = [(value, rank) for value in asked for rank in (range(1, 7) if value in tied else (0,))]
    table = cut_table([[Cut(*cut) for cut in cuts], [Cut(5, 0)], []], [9, 70_000, 80_000])
    values = spark.createDataFrame(rows, "value long, rank int")
    places = [(value, below or -1) for value, below in cuts]
    frame = values.withColumn("shard", F.expr(table.sql("0", "value", "rank")))
    assert [row["shard"] for row in frame.collect()] == [9 + bisect_left(places, row) for row in rows]
    assert frame.schema["shard"].dataType.simpleString() == "int"
    numbers = [F.expr(table.sql(f"int({split})", "value", "rank")).alias(f"of_{split}") for split in (1, 2)]
    other = values.select(*numbers).collect()
    assert [tuple(row) for row in other] == [(70_000 + (value > 5), 80_000) for value, _ in rows]


def test_another_seed_is_another_order(spark):
    rows = spark.range(100)
    first, second = (with_order(rows, ["id"], seed).orderBy("__order").toArrow()["id"].to_pylist() for seed in (0, 1))
    assert first != second and sorted(first) == sorted(second)


def test_one_row(spark, tmp_path):
    files, _ = write(spark, spark.range(1), tmp_path, ["id"])
    assert [(f.rows, f.row_groups) for f in files] == [(1, (1,))]


TYPES = """
  id % 2 = 0 AS a_bool, cast(id AS byte) AS a_byte, cast(id AS short) AS a_short, cast(id AS int) AS an_int,
  id - 9007199254740993 AS a_long, cast(id / 3 AS float) AS a_float, cast(id AS double) / 3 AS a_double,
  cast(id AS float) / 3 AS a_half, cast(id / 8 AS decimal(10,3)) AS a_decimal,
  date_add(date'1969-12-30', cast(id AS int)) AS a_date,
  timestamp'1969-12-31T23:59:59.999999Z' + make_interval(0,0,0,0,0,0,id) AS a_time,
  timestamp_ntz'2024-01-01 00:00:00.000001' AS a_local_time,
  if(id = 1, null, id) AS a_nullable, if(id = 2, null, cast(id AS double)) AS a_filled,
  array(cast(id AS float), 2f) AS a_vector, array(array(id, 1), array(2, 3)) AS a_matrix,
  sequence(0, id) AS a_ragged, transform(sequence(0, id), i -> sequence(0, i)) AS a_nested,
  transform(sequence(0, id), i -> date_add(date'1970-01-01', cast(i AS int))) AS some_dates,
  cast(repeat('x', cast(id AS int)) AS binary) AS a_binary,
  if(id = 1, null, sequence(0, id)) AS a_gone_list, if(id = 1, null, cast('y' AS binary)) AS a_gone_blob,
  if(id = 2, null, array(id, id)) AS a_gone_vector
"""


def test_every_column_kind_end_to_end(spark, tmp_path):
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    rows = session.range(4).selectExpr("id", *[t.strip() for t in split_top(TYPES)])
    options = {
        "a_half": {"dtype": "float16"},
        "a_nullable": {"nulls": "mask"},
        "a_filled": {"nulls": "fill", "fill": -1.0},
        "a_gone_list": {"nulls": "mask"},
        "a_gone_blob": {"nulls": "mask"},
        "a_gone_vector": {"nulls": "fill", "fill": -7, "shape": [2]},
        "a_vector": {"shape": [2]},
        "a_matrix": {"shape": [2, 2]},
    }
    files, columns = write(session, rows, tmp_path, ["id"], {"train": 2}, 2, **options)
    batch = tensors(tmp_path, files, columns)
    place = {i: number for number, i in enumerate(batch["id"].tolist())}
    assert {name: row(value, place[3]) for name, value in batch.items()} == {
        "a_nullable__valid": True, "id": 3, "a_bool": False, "a_byte": 3, "a_short": 3, "an_int": 3,
        "a_long": -9007199254740990, "a_float": 1.0, "a_double": 1.0, "a_half": 1.0, "a_decimal": 0.375,
        "a_date": 1, "a_time": 2_999_999, "a_local_time": 1704067200_000001, "a_nullable": 3, "a_filled": 3.0,
        "a_vector": [3.0, 2.0], "a_matrix": [[3, 1], [2, 3]],
        "a_ragged": [0, 1, 2, 3], "a_nested": [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]],
        "some_dates": [0, 1, 2, 3], "a_binary": b"xxx",
        "a_gone_list": [0, 1, 2, 3], "a_gone_list__valid": True, "a_gone_blob": b"y", "a_gone_blob__valid": True,
        "a_gone_vector": [3, 3],
    }  # fmt: skip
    assert not batch["a_nullable__valid"][place[1]] and batch["a_filled"][place[2]] == -1.0
    for name, empty in {"a_gone_list": [], "a_gone_blob": b""}.items():
        assert row(batch[name], place[1]) == empty
        assert [bool(batch[f"{name}__valid"][place[i]]) for i in range(4)] == [True, False, True, True]
    assert row(batch["a_gone_vector"], place[2]) == [-7, -7]
    assert batch["a_half"].dtype == torch.float16 and batch["a_half"][place[1]] == float(np.float16(1 / 3))
    dtypes = {
        "a_bool": "bool", "a_byte": "int8", "a_short": "int16", "an_int": "int32", "a_long": "int64",
        "a_float": "float32", "a_double": "float64", "a_nullable": "int64",
    }  # fmt: skip
    for name, dtype in dtypes.items():
        assert str(batch[name].dtype) == f"torch.{dtype}", name
    kinds = {c.name: (c.dtype, c.layout, c.shape) for c in columns}
    assert kinds["a_time"] == ("int64", "scalar", ()) and kinds["a_date"][0] == "int32"
    assert kinds["a_half"] == ("float16", "scalar", ()) and kinds["a_matrix"] == ("int64", "vector", (2, 2))
    assert kinds["a_ragged"][1] == "ragged" and kinds["a_nested"] == ("int64", "nested", ())
    assert kinds["a_binary"] == ("binary", "binary", ()) and kinds["a_decimal"][0] == "float64"


def split_top(text):
    """Cut at the commas outside brackets."""
    depth, part = 0, ""
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            yield part
            part = ""
        else:
            part += character
    yield part


def test_ml_vectors(spark, tmp_path):
    from pyspark.ml.linalg import Vectors

    rows = spark.createDataFrame([(0, Vectors.dense([1.0, 2.0])), (1, Vectors.sparse(2, [1], [3.0]))], ["id", "v"])
    files, columns = write(spark, rows, tmp_path, ["id"], v={"shape": [2]})
    v = tensors(tmp_path, files, columns)["v"]
    assert sorted(v.tolist()) == [[0.0, 3.0], [1.0, 2.0]] and v.dtype == torch.float64
    with pytest.raises(EtlError, match=r"column 'v' is .*declare `shape: \[n\]`"):
        write(spark, rows, tmp_path, ["id"])


@pytest.mark.parametrize(
    ("sql", "options", "words"),
    [
        ("'a' AS c", {}, "'c' is string, which cannot be stored: make it a categorical feature"),
        ("cast(1 AS decimal(20,2)) AS c", {}, r"decimal\(20,2\).*cast\(c \* 100 as bigint\)"),
        ("struct(1 AS a) AS c", {}, "'c' is struct.*select its fields"),
        ("map(1, 2) AS c", {}, "'c' is map"),
        ("array('a') AS c", {}, "'c' is array<string>"),
        ("array(cast('a' AS binary)) AS c", {}, "one binary value per row"),
        ("interval 1 day AS c", {}, "'c' is interval"),
        ("1 AS c", {"shape": [2]}, "`shape` is for arrays"),
        ("array(1) AS c", {"shape": [2, 2]}, "2 sizes for 1 levels"),
        ("1 AS c", {"dtype": "float16"}, "float16 is for float"),
        ("1 AS c", {"nulls": "fill", "fill": 2.5}, "'c' is int.*fill 2.5 is no int32"),
        ("1Y AS c", {"nulls": "fill", "fill": 300}, "fill 300 is no int8"),
        ("true AS c", {"nulls": "fill", "fill": 1}, "fill 1 is no bool"),
        ("1f AS c", {"nulls": "fill", "fill": "none"}, "fill 'none' is no float32"),
        ("1f AS c", {"nulls": "fill", "fill": 1e5, "dtype": "float16"}, "fill 100000.0 is no float16"),
        ("array(1) AS c", {"nulls": "fill", "fill": 0}, "`nulls: mask`.*empty row"),
    ],
)
def test_types_without_a_tensor_are_refused_before_any_job(spark, tmp_path, sql, options, words):
    with pytest.raises(EtlError, match=words):
        write(spark, spark.range(1).selectExpr("id", sql), tmp_path, ["id"], counts={"train": 1}, c=options)


def test_values_a_column_cannot_hold_are_named_by_the_driver(spark, tmp_path):
    rows = spark.range(9).selectExpr("id", "if(id = 5, null, id) AS c")
    with pytest.raises(EtlError, match="column 'c' has nulls"):
        write(spark, rows, tmp_path, ["id"])


def test_rows_that_change_between_passes_are_caught(spark, tmp_path):
    with pytest.raises(EtlError, match="changed between two passes"):
        write(spark, spark.range(9), tmp_path, ["id"], {"train": 2}, counts={"train": 12})
    with pytest.raises(EtlError, match="9 rows were written, 8 were planned"):
        write(spark, spark.range(9), tmp_path, ["id"], {"train": 1}, counts={"train": 8})


def test_a_file_that_is_not_what_was_written_is_caught(spark, tmp_path, monkeypatch):
    """Footers are read back: here another job has put its file of as many rows in the place of ours."""

    def spoil(storage, files, row_group):
        pq.write_table(pa.table({"id": list(range(50))}), tmp_path / files[0].path, row_group_size=10)
        verify(storage, files, row_group)

    verify = shard._verify_footers
    monkeypatch.setattr(shard, "_verify_footers", spoil)
    with pytest.raises(EtlError, match=r"train-00000.parquet: its footer has row groups \(10, 10, .* in \(25, 25"):
        write(spark, spark.range(50), tmp_path, ["id"], {"train": 1}, 25)


@pytest.mark.parametrize(
    ("wide", "rows"),
    [
        ("cast(repeat('x', 100000) AS binary)", 64),
        ("array_repeat(id, 12500)", 64),
        ("array(array(id), array(id))", 1024),
    ],
)
def test_row_groups_are_smaller_where_rows_are_wide(spark, wide, rows):
    """Measured where the width varies: 100 kB of bytes or of numbers make 8 MiB in 64 rows."""
    frame = spark.range(20).select("id", F.expr(wide).alias("wide"))
    columns = [manifest_column(f.name, f.dataType, "feature") for f in frame.schema.fields]
    made = plan_files(frame, {"train": 100_000}, columns, ShardConfig())
    assert made.row_group == rows
    assert len(made.shards) == {64: 150, 1024: 6}[rows]


def test_more_shards_than_rows_are_refused(spark, tmp_path):
    with pytest.raises(EtlError, match="only 3 rows"):
        write(spark, spark.range(3), tmp_path, ["id"], {"train": 4})


def test_shards_for_a_split_there_is_not(spark):
    with pytest.raises(EtlError, match=r"\['dev'\] are no splits"):
        plan_files(spark.range(3), {"train": 3}, [], ShardConfig(shards={"dev": 1}))
    assert isinstance(plan_files(spark.range(3), {"train": 3}, [], ShardConfig()), ShardPlan)


def sent_to_driver(spark, group):
    """Bytes of all task results of a group's jobs, as Spark's scheduler counted them."""
    context = spark.sparkContext
    tracker, scheduler = context.statusTracker(), context._jsc.sc()
    scheduler.listenerBus().waitUntilEmpty()
    stages = {stage for job in tracker.getJobIdsForGroup(group) for stage in tracker.getJobInfo(job).stageIds}
    ran = [stage for stage in stages if tracker.getStageInfo(stage) is not None]  # others were skipped
    return sum(scheduler.statusStore().lastStageAttempt(stage).resultSize() for stage in ran)


@pytest.mark.usefixtures("compiled_plans")
def test_the_driver_is_sent_no_more_for_more_rows(spark, tmp_path, monkeypatch):
    """16 times the rows in as many shards: as many bytes of results, and no more of Python's memory at the peak."""
    # Limits of a fraction, or reaching them would take a thousand times the rows.
    for limit, value in {"BUCKET_BITS": 8, "EXPECTED_HASHES": 1 << 14, "MOST_HASHES": 1 << 15}.items():
        monkeypatch.setattr(layout, limit, value)
    sent, peaks = {}, {}
    for rows in (1000, 150_000, 2_400_000):  # the first for what is imported and compiled once
        frame = spark.range(0, rows, 1, 4).selectExpr("id", "id % 7 as x")
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", f"{rows} rows")
        tracemalloc.start()
        try:
            files, _ = write(spark, frame, tmp_path / str(rows), ["id"], {"train": 16}, counts={"train": rows})
            peaks[rows] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
        assert sum(f.rows for f in files) == rows and len(files) == 16
        sent[rows] = sent_to_driver(spark, f"{rows} rows")
    few, many = sent[150_000], sent[2_400_000]
    assert few > 8 * 8_000, sent  # hashes were among it
    assert 0.8 * few < many < 1.2 * few, sent
    assert peaks[2_400_000] < 1.3 * peaks[150_000], peaks
