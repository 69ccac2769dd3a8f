"""Which files a declared path means, and folders of table formats it may not reach into. No Spark."""

import pyarrow.fs as pafs
import pytest
import yaml

from sparkring.conf.sources import DeltaSource, FilesSource
from sparkring.conf.storage import Storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.files.listing import _address, _split_glob, list_files


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
REMEDIES = {"Delta": 't: {format: delta, path: "', "Iceberg": "t: {format: iceberg, ", "Hudi": "Export the rows"}
PATHS = ["{}", "{}/*.parquet", "{}/a.parquet", "{}/data", "{}/data/day=1/b.parquet", "{}*/a.parquet"]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("path", PATHS)
def test_a_path_into_a_table_of_a_lake_is_refused_with_its_name_and_a_remedy(lake, table, path):
    kind = TABLES[table]
    with pytest.raises(EtlError, match=rf"sources\.t\.path = .*/{table}/ is a table of {kind}; ") as caught:
        files_of(lake / path.format(table))
    assert REMEDIES[kind] in str(caught.value)


@pytest.mark.parametrize("path", PATHS[:-1])
def test_the_remedy_for_a_delta_table_is_a_source_that_can_be_declared(lake, path):
    with pytest.raises(EtlError) as caught:
        files_of(lake / path.format("delta"))
    declared = yaml.safe_load(str(caught.value).splitlines()[-1])["t"]
    assert DeltaSource.model_validate(declared) == DeltaSource(format="delta", path=str(lake / "delta"))


def test_the_remedy_for_an_iceberg_table_is_its_folder_where_its_files_are_numbered_else_its_name(lake):
    with pytest.raises(EtlError, match=r"\n  t: \{format: iceberg, table: catalog.namespace.table\}$"):
        files_of(lake / "ice")
    with pytest.raises(EtlError, match=rf"\n  t: \{{format: iceberg, path: \"{lake}/hadoop\"\}}$"):
        files_of(lake / "hadoop")


@pytest.mark.parametrize(
    ("root", "uri", "folder", "address"),
    [
        ("b/lake/t", "s3://b/lake/t?region=x", "b/lake/t", "s3://b/lake/t?region=x"),
        ("b/lake/t/data", "s3://b/lake/t/data?region=x", "b/lake/t", "s3://b/lake/t?region=x"),
        ("b/lake", "s3://b/lake/", "b/lake/t", "s3://b/lake/t"),
        ("/lake/t/data", "hdfs://name:8020/lake/t/data", "/lake/t", "hdfs://name:8020/lake/t"),
    ],
)
def test_the_remedy_names_the_table_as_a_uri_of_its_storage(root, uri, folder, address):
    assert _address(Storage(pafs.SubTreeFileSystem("/", pafs.LocalFileSystem()), root, uri), folder) == address


@pytest.mark.parametrize("kind", ["csv", "text"])
def test_so_it_is_whatever_format_the_files_are_declared_as(lake, kind):
    with pytest.raises(EtlError, match="is a table of Delta"):
        files_of(lake / "delta", kind)
    with pytest.raises(EtlError, match="is a table of Delta"):
        files_of(lake / "delta/_delta_log/*.json", "text") if kind == "text" else files_of(lake / "d*/**/a.csv", kind)


@pytest.mark.parametrize("kind", ["orc", "json"])
def test_so_it_is_where_it_has_no_file_of_the_declared_format(lake, kind):
    with pytest.raises(EtlError, match=r"is a table of Iceberg; .*\n  t: \{format: iceberg, "):
        files_of(lake / "hadoop", kind)


def test_a_folder_that_is_no_such_table_has_no_file_of_the_declared_format(lake):
    with pytest.raises(EtlError, match=r"no files named \*\.orc"):
        files_of(lake / "plain", "orc")


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
    with pytest.raises(EtlError, match=r"no files named \*\.parquet below it \(7 files are there, such as"):
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


@pytest.mark.parametrize("suffix", ["xz", "XZ", "lzma", "zip", "7z", "snappy", "deflate", "tgz", "Z"])
@pytest.mark.parametrize("kind", ["csv", "json", "text"])
@pytest.mark.parametrize("form", ["file", "glob", "partitions"])
def test_a_compression_that_is_not_read_is_named_before_a_row_is(tmp_path, kind, suffix, form):
    folder = tmp_path / "day=2024-01-31" if form == "partitions" else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / f"a.{kind}.gz").write_bytes(b"")
    name = f"b.{kind}.{suffix}" if form != "partitions" or kind == "text" else f"b.{suffix}.{kind}"
    (folder / name).write_bytes(b"")
    path = {"file": tmp_path / name, "glob": tmp_path / "*", "partitions": tmp_path}[form]
    columns, partitions = {} if kind == "text" else {"a": "int"}, {"day": "date"} if form == "partitions" else {}
    source = FilesSource(path=str(path), format=kind, columns=columns, partitions=partitions)
    if name.endswith(kind):
        assert len(list_files("t", source).files) == 2
    else:
        with pytest.raises(EtlError, match=rf"b\.{kind}\.{suffix}: \.{suffix} is not read; decompress it, or .*\.gz"):
            list_files("t", source)


def test_lz4_is_read_where_arrow_decompresses_and_not_where_spark_does(tmp_path):
    (tmp_path / "a.txt.lz4").write_bytes(b"")  # Spark's own lz4 filled the memory of its JVM with one of 20 kB
    path = str(tmp_path / "*")
    assert list_files("t", FilesSource(path=path, format="csv", columns={"a": "int"})).files
    assert list_files("t", FilesSource(path=path, format="binaryFile")).files
    with pytest.raises(EtlError, match=r"a\.txt\.lz4: \.lz4 is not read; decompress it, or compress it as \.gz, \.bz2"):
        list_files("t", FilesSource(path=path, format="text"))
