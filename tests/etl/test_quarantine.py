"""Quarantined rows are streamed into one file per rule. The whole way: tests/spark/test_etl_build.py."""

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.etl.quarantine import _write


def batch(*rules):
    return pa.RecordBatch.from_pydict({"x": list(range(len(rules))), "rule": list(rules)})


def test_each_rule_has_one_file_whatever_the_batches(tmp_path):
    batches = [batch("a", "a"), batch("a", "b"), batch("c")]
    records = [r for found in _write(str(tmp_path), "q", iter(batches)) for r in found.to_pylist()]
    assert records == [{"rule": "a", "rows": 3}, {"rule": "b", "rows": 1}, {"rule": "c", "rows": 1}]
    assert pq.read_table(tmp_path / "q/a.parquet").to_pydict() == {"x": [0, 1, 0], "rule": ["a"] * 3}
    assert sorted(p.name for p in (tmp_path / "q").iterdir()) == ["a.parquet", "b.parquet", "c.parquet"]


def test_an_empty_partition_writes_nothing(tmp_path):
    assert list(_write(str(tmp_path), "q", iter([]))) == [] and not list(tmp_path.iterdir())
