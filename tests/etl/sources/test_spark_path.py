from __future__ import annotations

import pytest

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.spark_path import as_glob
from sparkring.etl.spark_platform.paths import HOST


@pytest.mark.parametrize("path", ["/a/b.parquet", "s3a://bucket/a b/ü", "file:/a/x=10:00/b"])
def test_a_plain_path_stays_as_it_is(path: str) -> None:
    assert as_glob(path) == path


@pytest.mark.parametrize("sign", "[]{}*?\\")
def test_each_sign_of_a_pattern_is_escaped(sign: str) -> None:
    assert as_glob(f"s3a://bucket/a{sign}x/{sign}") == f"s3a://bucket/a\\{sign}x/\\{sign}"


def test_a_pattern_with_a_colon_is_refused() -> None:
    with pytest.raises(EtlError, match=r"/a:b/\[x\]: Spark opens no path with a colon and one of"):
        as_glob("/a:b/[x]")


@pytest.mark.parametrize("uri", ["s3a://bucket:9000/a:b", "file:/a:b", "hdfs:///a:b", "/a:b"])
def test_scheme_and_host_are_taken_off(uri: str) -> None:
    assert HOST.sub("", uri) == "/a:b"
