"""What is deleted of builds that were killed. Rows on their way to shards: tests/spark/test_etl_build.py."""

import os
import time

import pytest

from sparkring.conf.storage import open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.rows import check_one_per, delete_dead_builds


def test_only_old_folders_that_nothing_lists_are_deleted(tmp_path):
    used, dead, young = (f"data-{letter * 12}" for letter in "abc")
    for name in (used, dead, young, "data-raw", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000.parquet").write_bytes(b"x")
        if name != young:
            for path in (tmp_path / name / "train-00000.parquet", tmp_path / name):
                os.utime(path, (time.time() - 90_000,) * 2)
    delete_dead_builds(open_storage(str(tmp_path)), {used})
    assert sorted(p.name for p in tmp_path.iterdir()) == [used, young, "data-raw", "notes"]


@pytest.mark.parametrize(("rows", "verb"), [(9, "lost"), (11, "multiplied")])
def test_joins_that_change_the_number_of_rows_are_refused(rows, verb):
    check_one_per("flights", 10, 10)
    with pytest.raises(EtlError, match=rf"the table has 10 rows, etl.rows {rows}: joins {verb} rows"):
        check_one_per("flights", 10, rows)
