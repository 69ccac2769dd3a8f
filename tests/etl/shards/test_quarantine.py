"""Quarantined rows are streamed into one file per rule. The whole way: tests/spark/test_etl_build.py."""

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.etl.shards.quarantine import _write


def batch(*rules, portion=0):
    rows = len(rules)
    return pa.RecordBatch.from_pydict(
        {"__portion": pa.array([portion] * rows, pa.int32()), "x": list(range(rows)), "rule": list(rules)}
    )


def test_each_rule_has_one_file_in_each_portion_whatever_the_batches(tmp_path):
    batches = [batch("a", "a"), batch("a", "b"), batch("c"), batch("c", portion=1)]
    records = [
        list(r.values()) for found in _write(str(tmp_path), ["q", "p/q"], iter(batches)) for r in found.to_pylist()
    ]
    assert records == [[0, "a", 3], [0, "b", 1], [0, "c", 1], [1, "c", 1]]
    assert pq.read_table(tmp_path / "q/a.parquet").to_pydict() == {"x": [0, 1, 0], "rule": ["a"] * 3}
    assert sorted(p.name for p in (tmp_path / "q").iterdir()) == ["a.parquet", "b.parquet", "c.parquet"]
    assert pq.read_table(tmp_path / "p/q/c.parquet").to_pydict() == {"x": [0], "rule": ["c"]}


def test_an_empty_partition_writes_nothing(tmp_path):
    assert list(_write(str(tmp_path), ["q"], iter([]))) == [] and not list(tmp_path.iterdir())
