"""Predictions of an interval are of one run, whenever a reader looks and whoever was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.predict import publish
from sparkring.pipelines.predict.publish import (
    MANIFEST,
    PredictionFile,
    PredictionsTaken,
    PublishedPredictions,
    check_own,
    read_predictions,
    staged,
)

ROOT = Path(__file__).parents[3]


def version_hex(version: int) -> str:
    return f"{version:032x}"


def write(target: Storage, version: int, files: int = 3) -> None:
    """Publish a version whose files and manifest say which one it is."""
    with staged(target) as staging:
        names = [f"part-{n:05d}-{version_hex(version)}-{n}.parquet" for n in range(files)]
        for name in names:
            staging.put_atomic(name, b"%d" % version)
        publish.publish(target, staging, described(version, names))


def described(version: int, names: list[str]) -> PublishedPredictions:
    sha = "ab" * 32
    return PublishedPredictions(
        interval="2013-03-01", scored_at="now", model="m", model_name="m", model_version=str(version), model_run_id="",
        weights_sha256=sha, mlflow_run_id=None, config_digest=sha, commit="", rows="r", sources={}, rows_in=3,
        rows_out=3, refused={}, files=tuple(PredictionFile(name, 1, 1, sha) for name in names),
    )  # fmt: skip


def versions(folder: Path) -> set[str]:
    """The versions of the files that a reader finds in the folder. FileNotFoundError where one of them has gone."""
    names = os.listdir(folder)
    contents = {name: (folder / name).read_bytes() for name in names}
    assert {int(name.split("-")[2], 16) for name in names if name != MANIFEST} == {
        int(content) for name, content in contents.items() if name != MANIFEST
    }
    return {name.split("-")[2] for name in names if name != MANIFEST}


def test_a_reader_never_sees_two_versions_nor_a_missing_folder(tmp_path: Path) -> None:
    """One that lists the folder as it is replaced may be told that a file has gone, and then looks again."""
    target, folder = open_storage(str(tmp_path / "day=2013-03-01")), tmp_path / "day=2013-03-01"
    write(target, 0)
    seen, stop, missing = list[set[str]](), threading.Event(), list[str]()

    def look() -> None:
        while not stop.is_set():
            try:
                seen.append(versions(folder))
            except FileNotFoundError as error:
                missing.append(str(error.filename))

    reader = threading.Thread(target=look)
    reader.start()
    for version in range(1, 40):
        write(target, version, files=1 + version % 3)
    stop.set()
    reader.join()
    assert str(folder) not in missing and max(map(len, seen)) == 1 and len({*map(str, seen)}) > 5
    assert read_predictions(target).model_version == "39" and versions(folder) == {version_hex(39)}
    assert not list(tmp_path.glob(".*.staging"))


PROGRAM = """
import itertools, sys
from sparkring.conf.storage import open_storage
from tests.pipelines.predict.test_publish import write
target = open_storage(sys.argv[1])
print("begun", flush=True)
for version in itertools.count(int(sys.argv[2])):
    write(target, version)
"""


def test_a_writer_killed_at_any_moment_leaves_one_version(tmp_path: Path) -> None:
    folder = tmp_path / "day=2013-03-01"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    write(open_storage(str(folder)), 0)
    left = 0
    for number in range(6):
        command = [sys.executable, "-c", PROGRAM, str(folder), str(1000 * number)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.05 + 0.013 * number)
            process.send_signal(signal.SIGKILL)
        (version,) = versions(folder)
        found = read_predictions(open_storage(str(folder)))
        assert version_hex(int(found.model_version)) == version
        assert {file.path for file in found.files} == {p.name for p in folder.glob("part-*")}
        left += len(list(tmp_path.glob(".*.staging")))
    assert left, "no writer was killed in the middle"
    write(open_storage(str(folder)), 7)
    assert not list(tmp_path.glob(".*.staging"))


def test_a_target_that_is_a_symbolic_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others/mine").touch()
    (tmp_path / "day=2013-03-01").symlink_to(tmp_path / "others")
    (tmp_path / f".day=2013-03-01.{'0' * 32}.staging").symlink_to(tmp_path / "others")  # left by a killed process
    target = open_storage(str(tmp_path / "day=2013-03-01"))
    for version in (1, 2):
        write(target, version)
    assert versions(tmp_path / "day=2013-03-01") == {version_hex(2)}
    assert not list(tmp_path.glob(".*.staging")) and [p.name for p in (tmp_path / "others").iterdir()] == ["mine"]


def test_one_process_at_a_time_writes_an_interval(tmp_path: Path) -> None:
    target = open_storage(str(tmp_path / "day=2013-03-01"))
    with staged(target), pytest.raises(PredictionsTaken, match="another process is writing there"):
        write(target, 1)
    with staged(open_storage(str(tmp_path / "day=2013-03-02"))):
        write(target, 1)
        write(open_storage(str(tmp_path / "day=2013-03-0")), 1)
        assert len(list(tmp_path.glob(".day=2013-03-02.*.staging"))) == 1  # not swept with its neighbors'
    assert versions(tmp_path / "day=2013-03-01") == {version_hex(1)}


def test_a_folder_of_others_is_not_replaced(tmp_path: Path) -> None:
    target = open_storage(str(tmp_path / "data"))
    check_own(target)
    write(target, 1)
    check_own(target)
    target.put_atomic("day=2013-03-01/table.parquet", b"")
    with pytest.raises(StoredError, match=r"holds 'day=2013-03-01/table.parquet', which `predict` did not write"):
        check_own(target)


def test_a_filesystem_that_cannot_exchange_folders_still_gets_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    target = open_storage(str(tmp_path / "day=2013-03-01"))
    for version in (1, 2):
        write(target, version)
    assert versions(tmp_path / "day=2013-03-01") == {version_hex(2)} and len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="lake")
    yield f"s3://lake/predictions?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    server.stop()


def test_on_an_object_store_the_manifest_names_one_version_all_along(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_storage(bucket).at("day=2013-03-01")
    write(target, 1)
    target.put_atomic("note.txt", b"not ours")
    with pytest.raises(OSError, match="killed"), monkeypatch.context() as killed:
        killed.setattr(publish, "publish", fail)
        write(target, 2)
    found = read_predictions(target)
    assert found.model_version == "1" and {f.path for f in found.files} <= {*target.list_files()}
    assert len(target.list_files()) == 3 + 3 + 2
    write(target, 3)
    listed = {file.path for file in read_predictions(target).files}
    assert {*target.list_files()} == {*listed, MANIFEST, "note.txt"} and all(version_hex(3) in name for name in listed)


def fail(*_: Any) -> None:
    raise OSError("killed")
