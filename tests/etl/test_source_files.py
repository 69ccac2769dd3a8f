"""Which files a declared path means, and folders of table formats it may not reach into. No Spark."""

import pytest

from conf.schema_etl import SourceConfig
from etl.errors import EtlError
from etl.source import find_source


def files_of(path, kind="parquet"):
    columns = {} if kind == "text" else {"a": "int"}
    return [f.path for f in find_source("t", SourceConfig(path=str(path), format=kind, columns=columns)).files]


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    root = tmp_path_factory.mktemp("lake")
    signs = ["delta/_delta_log/0.json", "ice/metadata/00001-a.metadata.json", "hadoop/metadata/v1.metadata.json"]
    signs += ["hudi/.hoodie/hoodie.properties", "plain/metadata/notes.json"]
    for table in ("delta", "ice", "hadoop", "hudi", "plain"):
        signs += [f"{table}/a.{kind}" for kind in ("parquet", "csv", "txt")] + [f"{table}/data/day=1/b.parquet"]
    for sign in signs:
        (root / sign).parent.mkdir(parents=True, exist_ok=True)
        (root / sign).write_text("a\n")
    return root


TABLES = {"delta": "Delta", "ice": "Iceberg", "hadoop": "Iceberg", "hudi": "Hudi"}
PATHS = ["{}", "{}/*.parquet", "{}/a.parquet", "{}/data", "{}/data/day=1/b.parquet", "{}*/a.parquet"]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("path", PATHS)
def test_a_path_into_a_table_of_a_lake_is_refused_with_its_name_and_a_remedy(lake, table, path):
    with pytest.raises(EtlError, match=rf"sources\.t\.path = .*/{table}/ is a table of {TABLES[table]}; .* Export the"):
        files_of(lake / path.format(table))


@pytest.mark.parametrize("kind", ["csv", "text"])
def test_so_it_is_whatever_format_the_files_are_declared_as(lake, kind):
    with pytest.raises(EtlError, match="is a table of Delta"):
        files_of(lake / "delta", kind)
    with pytest.raises(EtlError, match="is a table of Delta"):
        files_of(lake / "delta/_delta_log/*.json", "text") if kind == "text" else files_of(lake / "d*/**/a.csv", kind)


def test_folders_beside_such_a_table_are_read(lake):
    assert files_of(lake / "plain") == ["a.parquet", "data/day=1/b.parquet"]
    assert files_of(lake / "pl*/a.parquet") == ["plain/a.parquet"]
