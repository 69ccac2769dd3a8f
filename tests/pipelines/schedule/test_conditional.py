from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from sparkring.conf.load import ConfigError
from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.schedule.conditional import ConditionalFile, S3File, conditional_file


def test_a_file_is_created_once_and_replaced_by_who_knows_it(folder: Storage) -> None:
    file = conditional_file(folder, "a/lease.json")
    assert file.read() is None
    first = file.create(b"one")
    assert first is not None and file.create(b"two") is None
    second = file.replace(b"three", first)
    assert second is not None and file.replace(b"four", first) is None
    found = file.read()
    assert found is not None and (found.data, found.version) == (b"three", second)
    assert file.replace(b"five", "of nobody") is None


def test_of_many_writers_one_wins(folder: Storage) -> None:
    files = [conditional_file(folder, "lease.json") for _ in range(8)]

    def race(write: Callable[[ConditionalFile, bytes], str | None]) -> int:
        with ThreadPoolExecutor(8) as pool:
            wrote = list(pool.map(write, files, [b"%d" % n for n in range(8)]))
        return sum(version is not None for version in wrote)

    assert race(lambda file, data: file.create(data)) == 1
    found = files[0].read()
    assert found is not None
    assert race(lambda file, data: file.replace(b"then " + data, found.version)) == 1


def test_the_age_of_a_file_is_the_storages(folder: Storage) -> None:
    file = conditional_file(folder, "lease.json")
    file.create(b"one")
    fresh = file.read()
    assert fresh is not None and fresh.age_s > -1  # S3 dates by whole seconds
    deadline = time.monotonic() + 120
    while (old := file.read()) is not None and old.age_s < fresh.age_s + 1:
        assert time.monotonic() < deadline, "it grows no older"
        time.sleep(0.1)
    assert old is not None and old.version == fresh.version


def test_an_hour_on_this_hosts_clock_changes_no_age(s3_folder: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    file = S3File(s3_folder.at("lease.json").uri)
    file.create(b"one")
    answer = file._client.get_object(**file._where)

    def an_hour_later(**_: Any) -> Any:
        return answer

    now = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(file, "_client", type("Client", (), {"get_object": staticmethod(an_hour_later)}))
    found = file.read()
    assert found is not None and abs(found.age_s) < 1800


class Flaky:
    """A client of S3 whose first writes end in these errors, before or after they have been done."""

    def __init__(self, client: Any, *errors: tuple[str, Exception]) -> None:
        self._client, self._errors = client, list(errors)

    def get_object(self, **words: Any) -> Any:
        return self._client.get_object(**words)

    def put_object(self, **words: Any) -> Any:
        if not self._errors:
            return self._client.put_object(**words)
        when, error = self._errors.pop(0)
        if when == "after":
            self._client.put_object(**words)
        raise error


TIMEOUT = ReadTimeoutError(endpoint_url="x")
CONFLICT = ClientError({"Error": {"Code": "ConditionalRequestConflict", "Message": ""}}, "PutObject")
REFUSED = ClientError({"Error": {"Code": "PreconditionFailed", "Message": ""}}, "PutObject")


def flaky(folder: Storage, *errors: tuple[str, Exception]) -> S3File:
    file = S3File(folder.at("lease.json").uri, sleep=lambda _: None)
    file._client = Flaky(file._client, *errors)
    return file


@pytest.mark.parametrize("error", [("after", TIMEOUT), ("after", REFUSED), ("after", CONFLICT), ("before", CONFLICT)])
def test_a_write_whose_answer_is_lost_is_looked_for(s3_folder: Storage, error: tuple[str, Exception]) -> None:
    """A client that tries again by itself is refused by what its first try wrote."""
    file = flaky(s3_folder, error)
    version = file.create(b"ours")
    found = file.read()
    assert found is not None and (found.data, found.version) == (b"ours", version)
    assert file.replace(b"next", found.version) is not None


def test_a_write_that_was_not_done_is_not_taken_for_one(s3_folder: Storage) -> None:
    other = conditional_file(s3_folder, "lease.json")
    with pytest.raises(OSError, match=r"lease\.json.*Read timeout"):
        flaky(s3_folder, ("before", TIMEOUT)).create(b"ours")
    other.create(b"theirs")
    assert flaky(s3_folder, ("before", REFUSED)).create(b"ours") is None
    assert flaky(s3_folder, ("before", CONFLICT)).create(b"ours") is None
    assert flaky(s3_folder, *[("before", CONFLICT)] * 9).replace(b"ours", "x") is None
    found = other.read()
    assert found is not None and found.data == b"theirs"


def test_an_answer_that_refuses_us_is_an_error(s3_folder: Storage) -> None:
    denied = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "PutObject")
    with pytest.raises(OSError, match="AccessDenied"):
        flaky(s3_folder, ("before", denied)).create(b"ours")


def test_storage_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage\.runs: dates need a lease, which is kept on a local disk or on s3"):
        conditional_file(open_storage(f"memory://{tmp_path.name}"), "lease.json")
