"""Which versions a Delta log has, which of them is asked for, and what is refused, each by its name."""

import datetime as dt
import itertools
import json
import os
import tomllib
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.sources import DeltaSource
from sparkring.conf.storage import open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.delta.log import (
    INSTALL,
    READER_FEATURES,
    DeltaLog,
    list_log,
    object_store,
    open_version,
    version_at,
    whole_checkpoints,
)
from tests.etl.sources.delta.tables import adds, commit, commit_path, delete_rows, last, rewrite

KEY = "etl.sources.t"
NO_RETENTION = {"delta.logRetentionDuration": "interval 0 days"}


def write(root: Path, values: list[int], **how) -> deltalake.DeltaTable:
    deltalake.write_deltalake(str(root), pa.table({"a": values}), mode="append", **how)
    return deltalake.DeltaTable(str(root))


def opened(root: Path, **asked):
    return open_version(KEY, DeltaSource(format="delta", path=str(root), **asked), open_storage(str(root)))


def minute(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, 0, number, tzinfo=dt.UTC)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Versions 0 to 4 with one row more each, committed at the minutes 0 to 4 of the year 2026."""
    root = tmp_path / "table"
    for version in range(5):
        write(root, [version], configuration=NO_RETENTION if version == 0 else None)
        os.utime(commit_path(root, version), (minute(version).timestamp(),) * 2)
    return root


@pytest.fixture
def cleaned(table: Path) -> Path:
    """The same table after a checkpoint of version 3, and a clean-up of the log before it."""
    deltalake.DeltaTable(str(table), version=3).create_checkpoint()
    for version in range(3):
        commit_path(table, version).unlink()
    return table


# --- Pure


@pytest.mark.parametrize(
    ("commits", "checkpoints", "versions"),
    [
        ({0, 1, 2}, set(), range(3)),
        ({0, 1, 2}, {1}, range(3)),
        ({3, 4}, {2}, range(2, 5)),
        ({3, 4}, {3, 4}, range(3, 5)),
        ({0, 1, 4, 5}, {4}, range(4, 6)),
        ({0, 1, 4, 5}, {2}, range(0)),
        ({3}, set(), range(0)),
    ],
)
def test_a_version_can_be_read_from_the_first_or_a_checkpoint_with_every_commit_after_it(
    tmp_path, commits, checkpoints, versions
):
    log = DeltaLog(open_storage(str(tmp_path)), dict.fromkeys(commits, 0), frozenset(checkpoints))
    assert list(log.versions) == list(versions)


def test_a_checkpoint_in_parts_counts_when_all_are_there():
    zeros, uuid = "0" * 19, "80a083e8-7026-4e79-81be-64bd76c43a11"
    names = [f"{zeros}1.checkpoint.parquet", f"{zeros}2.checkpoint.{uuid}.json", f"{zeros}3.checkpoint.{uuid}.parquet"]
    names += [f"{zeros}{n}.checkpoint.{part:010}.{2:010}.parquet" for n, part in ((4, 1), (5, 1), (5, 2))]
    names += ["_last_checkpoint", f"{zeros}6.checkpoint.parquet.tmp", f"{zeros}7.json", f"{zeros}8.crc"]
    assert whole_checkpoints(names) == {1, 2, 3, 5}


def test_a_commit_that_looks_older_than_the_one_before_counts_as_a_millisecond_later(tmp_path):
    log = DeltaLog(open_storage(str(tmp_path)), {0: 50, 1: 40, 2: 51, 3: 90}, frozenset())
    assert log.times_ms() == {0: 50, 1: 51, 2: 52, 3: 90}


@pytest.mark.parametrize(("at_ms", "version"), [(9, None), (10, 4), (19, 4), (20, 5), (1000, 6)])
def test_a_time_means_the_last_version_committed_by_then(at_ms, version):
    assert version_at(range(4, 7), at_ms, {4: 10, 5: 20, 6: 30}.__getitem__) == version


def test_the_storage_options_of_a_uri_are_those_of_deltalake():
    query = "endpoint_override=127.0.0.1:9000&scheme=http&region=eu-west-1&request_timeout=2.5&connect_timeout=1"
    options = {"region": "eu-west-1", "endpoint_url": "http://127.0.0.1:9000", "allow_http": "True"}
    options |= {"timeout": "2500ms", "connect_timeout": "1000ms"}
    assert object_store(open_storage(f"s3://lake/a b?{query}")) == ("s3://lake/a b", options)
    assert object_store(open_storage("s3://lake/t?endpoint_override=h:1&region=r"))[1]["endpoint_url"] == "https://h:1"
    assert object_store(open_storage("/lake/a b")) == ("file:///lake/a%20b", {})


def test_the_command_that_installs_deltalake_has_the_version_the_tests_ran_with():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = INSTALL.removeprefix("pip install ")
    assert extras["delta"] == [pinned] and pinned in extras["dev"] and pinned.endswith(f"=={deltalake.__version__}")


# --- Which version


def test_the_latest_version_is_found_without_an_option(table):
    assert opened(table).version == 4 and opened(table, versionAsOf=1).version == 1


@pytest.mark.parametrize(
    ("at", "version"),
    [("2026-01-01T00:00:00Z", 0), ("2026-01-01 00:02:59.999", 2), ("2026-01-01T04:03+04:00", 3), ("2026-02-01", 4)],
)
def test_a_timestamp_is_utc_unless_it_has_an_offset(table, at, version):
    assert opened(table, timestampAsOf=at).version == version


def test_a_timestamp_before_the_first_version_is_refused_with_that_version(table):
    with pytest.raises(EtlError) as caught:
        opened(table, timestampAsOf="2025-12-31")
    assert str(caught.value) == (
        "etl.sources.t.timestampAsOf = '2025-12-31': is before version 0, of 2026-01-01T00:00:00.000+00:00; "
        "the versions that can be read are 0 to 4"
    )


def test_a_timestamp_in_the_future_is_refused_since_the_table_may_change_until_then(table):
    tomorrow = (dt.datetime.now(dt.UTC) + dt.timedelta(days=1)).isoformat()
    with pytest.raises(EtlError, match=r"timestampAsOf = .* is in the future"):
        opened(table, timestampAsOf=tomorrow)


def test_commits_that_say_their_time_are_found_by_it_and_earlier_ones_by_their_file(table):
    """Every file is of minute 0 to 4; the commits say 10 to 12 from version 2 on, where the property was set."""
    for version in (2, 3, 4):
        said = int(minute(8 + version).timestamp() * 1000)
        rewrite(table, version, commitInfo={"inCommitTimestamp": said})
        os.utime(commit_path(table, version), (minute(version).timestamp(),) * 2)
    since = {"delta.inCommitTimestampEnablementVersion": "2"}
    since["delta.inCommitTimestampEnablementTimestamp"] = str(int(minute(10).timestamp() * 1000))
    first = last(table, "metaData")
    properties = {**first["configuration"], **since, "delta.enableInCommitTimestamps": "true"}
    commit(table, [{"metaData": {**first, "configuration": properties}}])
    rewrite(table, 5, commitInfo={"inCommitTimestamp": int(minute(13).timestamp() * 1000)})
    asked = {minute(n): opened(table, timestampAsOf=minute(n).isoformat()).version for n in (0, 1, 9, 10, 11, 12, 13)}
    assert list(asked.values()) == [0, 1, 4, 2, 3, 4, 5]


def test_a_version_that_does_not_exist_is_refused_with_those_that_do(cleaned):
    with pytest.raises(EtlError, match=r"t\.versionAsOf = 5: there is no such version; .* are 3 to 4$"):
        opened(cleaned, versionAsOf=5)


def test_a_version_whose_log_was_cleaned_up_is_refused_as_such(cleaned):
    with pytest.raises(EtlError, match=r"t\.versionAsOf = 2: its log was cleaned up .* are 3 to 4$"):
        opened(cleaned, versionAsOf=2)
    assert [opened(cleaned, versionAsOf=v).version for v in (3, 4)] == [3, 4]
    with pytest.raises(EtlError, match=r"is before version 3, of 2026-01-01T00:03:00\.000\+00:00; .* are 3 to 4$"):
        opened(cleaned, timestampAsOf="2026-01-01T00:02:00Z")


def test_deltalakes_own_clean_up_leaves_the_versions_we_say(table):
    deltalake.DeltaTable(str(table)).create_checkpoint()
    deltalake.DeltaTable(str(table)).cleanup_metadata()
    log = list_log(open_storage(str(table)))
    assert list(log.versions) == [4] and len(opened(table).files()) == 5


def test_a_folder_without_commits_and_a_log_without_beginning_are_refused(tmp_path, cleaned):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(EtlError, match=r"t\.path = .*is not a Delta table: it has no commits in _delta_log/"):
            opened(folder)
    for checkpoint in (cleaned / "_delta_log").glob("*checkpoint*"):
        checkpoint.unlink()
    with pytest.raises(EtlError, match="lacks version 2, and has no whole checkpoint from there on"):
        opened(cleaned)


def test_a_commit_that_is_missing_among_the_others_is_named(table):
    commit_path(table, 1).unlink()
    with pytest.raises(EtlError, match="_delta_log/ lacks version 1, and has no whole checkpoint from there on"):
        opened(table)


# --- What deltalake reads of a version


def test_files_have_the_paths_on_disk_and_the_values_of_the_log(tmp_path):
    root = tmp_path / "t é+#"
    names, days = ["a b/c=d", "é:%+#?", "__HIVE_DEFAULT_PARTITION__", None], [dt.date(2024, 2, 29), None]
    for number, (name, day) in enumerate(itertools.product(names, days)):  # in one write null and the text are mixed up
        row = pa.table({"n": pa.array([name], pa.string()), "d": pa.array([day], pa.date32()), "a": [number]})
        deltalake.write_deltalake(str(root), row, partition_by=["n", "d"], mode="append")
    files = opened(root).files()
    assert len(files) == 8
    for file in files:
        assert (root / file.path).stat().st_size == file.bytes and not len(file.deleted)
        number = pq.ParquetFile(root / file.path).read()["a"][0].as_py()
        assert file.partition == {"n": names[number // 2], "d": days[number % 2]}


@pytest.mark.parametrize("on_disk", [False, True])
def test_deletion_vectors_say_which_rows_of_which_file_are_gone(tmp_path, on_disk):
    rows = pa.table({"n": ["é:%"] * 3 + ["b c"] * 3, "a": list(range(6))})
    deltalake.write_deltalake(str(tmp_path / "a b"), rows, partition_by=["n"])
    first, second = sorted(adds(tmp_path / "a b"), key=lambda add: add["path"])
    delete_rows(tmp_path / "a b", {first["path"]: [0, 2]}, on_disk)
    delete_rows(tmp_path / "a b", {first["path"]: [0, 1, 2], second["path"]: [1]}, on_disk)
    assert [f.deleted.tolist() for f in opened(tmp_path / "a b", versionAsOf=1).files()] == [[0, 2], []]
    assert [f.deleted.tolist() for f in opened(tmp_path / "a b").files()] == [[0, 1, 2], [1]]


@pytest.mark.parametrize("sidecar", [False, True])
def test_v2_checkpoints_are_read(table, sidecar):
    """As the protocol has them: a checkpoint in JSON that lists the files, or names a Parquet file that does."""
    metadata = last(table, "metaData")
    features = {"readerFeatures": ["v2Checkpoint"], "writerFeatures": ["v2Checkpoint"]}
    head = [{"checkpointMetadata": {"version": 4}}, {"metaData": metadata}]
    head.append({"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}})
    names = ("path", "partitionValues", "size", "modificationTime", "dataChange", "stats")
    files = [{name: add[name] for name in names} for add in adds(table)]
    body = [{"add": file} for file in files]
    uuid = "80a083e8-7026-4e79-81be-64bd76c43a11"
    if sidecar:
        place = table / "_delta_log" / "_sidecars" / f"{uuid}.parquet"
        place.parent.mkdir()
        kinds = [pa.string(), pa.map_(pa.string(), pa.string()), pa.int64(), pa.int64(), pa.bool_(), pa.string()]
        kind = pa.struct(list(zip(names, kinds, strict=True)))
        pq.write_table(pa.table({"add": pa.array([{**file, "partitionValues": []} for file in files], kind)}), place)
        size = {"sizeInBytes": place.stat().st_size, "modificationTime": 0}
        body = [{"sidecar": {"path": place.name, **size}}]
    lines = "\n".join(map(json.dumps, [*head, *body])) + "\n"
    (table / "_delta_log" / f"{4:020}.checkpoint.{uuid}.json").write_text(lines)
    for version in range(4):
        commit_path(table, version).unlink()
    found = opened(table)
    assert found.version == 4 and [(f.path, f.bytes) for f in found.files()] == sorted(
        (add["path"], add["size"]) for add in files
    )
    assert found.table.protocol().reader_features == ["v2Checkpoint"]


def test_columns_are_mapped_where_the_protocol_has_the_feature_and_not_by_the_property_alone(tmp_path):
    """deltalake leaves the feature out where it adds that of timestamp_ntz, and writes the table's own names."""
    moment = pa.array([dt.datetime(2024, 1, 1)], pa.timestamp("us"))
    for name, columns in {"mapped": {"a": [1]}, "idle": {"a": [1], "b": moment}}.items():
        mapping = {"delta.columnMapping.mode": "name"}
        deltalake.write_deltalake(str(tmp_path / name), pa.table(columns), configuration=mapping)
    assert opened(tmp_path / "mapped").column_mapping == "name"
    idle = opened(tmp_path / "idle")
    assert idle.column_mapping == "none" and idle.properties["delta.columnMapping.mode"] == "name"
    assert pq.read_schema(tmp_path / "idle" / idle.files()[0].path).names == ["a", "b"]
    delete_rows(tmp_path / "mapped", {adds(tmp_path / "mapped")[0]["path"]: [0]})
    assert opened(tmp_path / "mapped").column_mapping == "name"


# --- Refused


@pytest.mark.parametrize(
    "feature",
    ["typeWidening", "typeWidening-preview", "variantType", "variantShredding-preview"],
)
def test_a_feature_that_is_not_done_here_is_refused_by_its_name(table, feature):
    features = sorted(READER_FEATURES | {feature})
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    commit(table, [{"protocol": protocol}])
    with pytest.raises(EtlError) as caught:
        opened(table)
    message = str(caught.value)
    assert f"etl.sources.t: version 5 needs the Delta feature {feature} of its readers" in message
    assert "ALTER TABLE ... DROP FEATURE" in message
    assert opened(table, versionAsOf=4).version == 4


@pytest.mark.parametrize("feature", ["fromTheFuture", "catalogManaged"])
def test_a_feature_that_deltalake_refuses_is_refused_with_its_words(table, feature):
    features = {"readerFeatures": [feature], "writerFeatures": [feature]}
    commit(table, [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}])
    named = "catalog-managed" if feature == "catalogManaged" else feature
    with pytest.raises(
        EtlError, match=rf"cannot read the log of version 5: .*{named}.*ALTER TABLE \.\.\. DROP FEATURE"
    ):
        opened(table)


@pytest.mark.parametrize("left_out", ["vacuumProtocolCheck", "deletionVectors"])
def test_every_feature_that_is_done_here_opens(table, left_out):
    names = sorted(READER_FEATURES - {left_out})
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": names, "writerFeatures": names}
    commit(table, [{"protocol": protocol}])
    found = opened(table)
    assert found.version == 5 and len(found.files()) == 5


def test_deleted_rows_that_deltalake_does_not_tell_are_refused_when_the_table_is_opened(table):
    names = ["deletionVectors", "vacuumProtocolCheck"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": names, "writerFeatures": names}
    commit(table, [{"protocol": protocol}])
    with pytest.raises(EtlError, match=r"version 5 has the Delta features deletionVectors and vacuumProtocolCheck"):
        opened(table)


def test_a_shallow_clone_is_refused(table):
    elsewhere = {**adds(table)[0], "path": "s3://other/table/part-0.parquet"}
    commit(table, [{"add": elsewhere}])
    with pytest.raises(EtlError, match="version 5 has files of another table, such as s3://other/table/part-0"):
        opened(table).files()


def test_a_folder_whose_name_deltalake_decodes_is_refused(tmp_path):
    """It reads `a b` for `a%20b`: another table, without a word."""
    write(tmp_path / "a b", [1])
    write(tmp_path / "x", [2])
    (tmp_path / "x").rename(tmp_path / "a%20b")
    with pytest.raises(EtlError, match=r"deltalake decodes '.*/a b' from it, another folder; rename"):
        opened(tmp_path / "a%20b")


def test_what_deltalake_raises_is_an_error_with_the_key(tmp_path):
    write(tmp_path, [1])
    delete_rows(tmp_path, {adds(tmp_path)[0]["path"]: [0]}, on_disk=True)
    next(tmp_path.glob("deletion_vector_*.bin")).unlink()
    found = opened(tmp_path)
    with pytest.raises(EtlError, match=r"^etl\.sources\.t: deltalake cannot read the log of version 1: .*not found"):
        found.files()


def test_without_deltalake_the_command_that_installs_it_is_named(table, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "deltalake", None)
    with pytest.raises(EtlError, match=r"etl\.sources\.t: Delta tables are read with .*: pip install deltalake==1\.6"):
        opened(table)


@pytest.mark.parametrize("path", ["../other/a.parquet", "%2e%2e/other/a.parquet", "x/../../other/a.parquet", "a%00b"])
def test_a_log_names_no_file_outside_the_tables_folder(table, path):
    commit(table, [{"add": {**adds(table)[0], "path": path}}])
    with pytest.raises(EtlError, match="has files of another table, such as"):
        opened(table).files()


def test_no_property_of_a_table_chooses_where_its_files_are_read(table):
    metadata = last(table, "metaData")
    chosen = {"AWS_ENDPOINT_URL": "http://attacker.invalid", "delta.storage.endpoint": "http://attacker.invalid"}
    commit(table, [{"metaData": {**metadata, "configuration": {**metadata["configuration"], **chosen}}}])
    found = opened(table)
    assert len(found.files()) == 5 and found.table._storage_options in ({}, None)
