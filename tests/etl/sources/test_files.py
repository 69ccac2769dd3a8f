"""Which files a declared path means, and folders of table formats it may not reach into. No Spark."""

import pytest

from sparkring.conf.sources import FilesSource
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files import _split_glob, list_files


def files_of(path, kind="parquet"):
    columns = {} if kind == "text" else {"a": "int"}
    return [f.path for f in list_files("t", FilesSource(path=str(path), format=kind, columns=columns)).files]


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


def test_a_folder_gives_the_files_of_its_format_and_a_glob_what_it_says(tmp_path):
    for name in ("x.csv", "y.CSV.gz", "z.json", "sub/x.csv", "sub/deep/x.csv", ".hidden/x.csv", "_new/x.csv"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text("a\n")
    assert files_of(tmp_path / "d", "csv") == ["sub/deep/x.csv", "sub/x.csv", "x.csv", "y.CSV.gz"]
    assert files_of(tmp_path / "d/*.csv", "csv") == ["x.csv"]
    assert files_of(tmp_path / "d/*/?.csv", "csv") == ["sub/x.csv"]
    assert files_of(tmp_path / "d/**/x.csv", "csv") == ["sub/deep/x.csv", "sub/x.csv", "x.csv"]
    assert files_of(tmp_path / "d/z.json", "csv") == ["z.json"] and len(files_of(tmp_path / "d", "text")) == 5
    with pytest.raises(EtlError, match=r"no files named \*\.parquet below it \(7 files lie there, such as"):
        files_of(tmp_path / "d", "parquet")
    with pytest.raises(EtlError, match=r"no file matches it .*`\*\*` stands for any folders"):
        files_of(tmp_path / "d/*/deep.csv", "csv")


@pytest.mark.parametrize(
    ("path", "root", "pattern"),
    [
        ("s3://b/raw/x.csv?endpoint_override=h:1", "s3://b/raw/x.csv?endpoint_override=h:1", None),
        ("s3://b/raw/*.csv?endpoint_override=h:1", "s3://b/raw?endpoint_override=h:1", ["*.csv"]),
        ("data/x?.csv", "data", ["x?.csv"]),
        ("file:///data/x?.csv", "file:///data", ["x?.csv"]),
        ("/*.csv", "/", ["*.csv"]),
        ("*.csv", ".", ["*.csv"]),
    ],
)
def test_a_question_mark_begins_the_options_of_a_uri(path, root, pattern):
    assert _split_glob(path) == (root, pattern)


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.csv"])
def test_a_missing_table_is_one_clear_error(tmp_path, path):
    with pytest.raises(EtlError, match=r"etl\.sources\.t\.path.*the table 't' is missing"):
        list_files("t", FilesSource(path=str(tmp_path / path), columns={"a": "int"}))
