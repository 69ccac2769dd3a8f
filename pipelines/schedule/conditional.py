"""A small file that is only written where nobody else wrote it meanwhile: on S3 and compatible stores, and local disks.

Each content must be written once only (a lease has a nonce and a counter): then reading the file back tells whether a
write whose answer was lost has succeeded.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from sparkring.conf.load import ConfigError
from sparkring.conf.storage import Storage, exclusive

REQUEST_TIMEOUT_S, REQUEST_ATTEMPTS = 10, 3
CONFLICTS, CONFLICT_WAIT_S = 8, 0.1  # S3 answers 409 while another conditional write to the key is under way
MISSING, REFUSED, CONFLICT = {"NoSuchKey", "404"}, {"PreconditionFailed", "412"}, {"ConditionalRequestConflict", "409"}


@dataclass(frozen=True)
class Found:
    """A file as it was read. `age_s`: seconds since it was written, by the storage's clock alone."""

    data: bytes
    version: str
    age_s: float


class ConditionalFile(ABC):
    """One file. Writes return the version written, or None where another was first."""

    uri: str

    @abstractmethod
    def read(self) -> Found | None:
        """Read the file; None if it does not exist."""

    @abstractmethod
    def create(self, data: bytes) -> str | None:
        """Write the file if it does not exist."""

    @abstractmethod
    def replace(self, data: bytes, version: str) -> str | None:
        """Write the file where it is still of this version."""


def conditional_file(storage: Storage, relative: str) -> ConditionalFile:
    """Return the file `relative` below a folder. ConfigError for storage without conditional writes."""
    if storage.is_local:
        return LocalFile(Path(storage.path(relative)))
    if urlsplit(storage.uri).scheme in ("s3", "s3a"):
        return S3File(storage.at(relative).uri)
    raise ConfigError(
        storage.uri,
        [
            "storage.runs: dates need a lease, which is kept on a local disk or on s3:// (any such server by "
            "endpoint_override)"
        ],
    )


class LocalFile(ConditionalFile):
    """A file on a disk; a lock (flock) is held while it is looked at and changed."""

    def __init__(self, path: Path) -> None:
        self.path, self.uri = path, str(path)
        self._lock = path.with_name(f".{path.name}.lock")

    def read(self) -> Found | None:
        if not self.path.parent.exists():  # which the lock would make
            return None
        with exclusive(self._lock):
            return self._found()

    def create(self, data: bytes) -> str | None:
        with exclusive(self._lock):
            return None if self.path.exists() else self._write(data)

    def replace(self, data: bytes, version: str) -> str | None:
        with exclusive(self._lock):
            found = self._found()
            return self._write(data) if found is not None and found.version == version else None

    def _found(self) -> Found | None:
        try:
            data, written = self.path.read_bytes(), self.path.stat().st_mtime
        except FileNotFoundError:
            return None
        os.utime(self._lock)  # a file server stamps it with its own clock
        return Found(data, _version(data), self._lock.stat().st_mtime - written)

    def _write(self, data: bytes) -> str:
        part = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        part.write_bytes(data)
        os.replace(part, self.path)
        return _version(data)


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class S3File(ConditionalFile):
    """An object, written with `If-None-Match: *` or `If-Match: <etag>`."""

    def __init__(self, uri: str, sleep: Callable[[float], None] = time.sleep) -> None:
        parts = urlsplit(uri)
        self.uri, self._sleep = uri, sleep
        self._where = {"Bucket": parts.netloc, "Key": parts.path.lstrip("/")}
        self._client = s3_client(dict(parse_qsl(parts.query)))

    def read(self) -> Found | None:
        from botocore.exceptions import ClientError

        with self._os_errors():
            try:
                answer = self._client.get_object(**self._where)
            except ClientError as error:
                if _code(error) in MISSING:
                    return None
                raise
            data: bytes = answer["Body"].read()
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Found(data, answer["ETag"], (now - answer["LastModified"]).total_seconds())

    def create(self, data: bytes) -> str | None:
        return self._put(data, {"IfNoneMatch": "*"})

    def replace(self, data: bytes, version: str) -> str | None:
        return self._put(data, {"IfMatch": version})

    def _put(self, data: bytes, condition: dict[str, str]) -> str | None:
        from botocore.exceptions import BotoCoreError, ClientError

        with self._os_errors():
            for _ in range(CONFLICTS):
                try:
                    etag: str = self._client.put_object(**self._where, **condition, Body=data)["ETag"]
                    return etag
                except BotoCoreError:  # no answer: it may have been written
                    if (version := self._ours(data)) is None:
                        raise
                    return version
                except ClientError as error:
                    if _code(error) in REFUSED | MISSING:  # refused may be a retry of the client's own first try
                        return self._ours(data)
                    if _code(error) not in CONFLICT:
                        raise
                    if (version := self._ours(data)) is not None:
                        return version
                    self._sleep(CONFLICT_WAIT_S)
        return None

    def _ours(self, data: bytes) -> str | None:
        """Return the version of the file if it holds `data`."""
        found = self.read()
        return found.version if found is not None and found.data == data else None

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Convert the store's errors to OSError, as pyarrow raises them."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise OSError(f"{self.uri}: {error}") from error


def _code(error: Any) -> str:
    code: str = error.response.get("Error", {}).get("Code", "")
    return code


def s3_client(options: dict[str, str]) -> Any:
    """Create a client with the options of a storage URI (`endpoint_override`, `scheme`, `region`)."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError(
            "storage.runs",
            ["a lease on S3 needs boto3, as pyarrow has no conditional writes: pip install 'sparkring[s3]'"],
        ) from error
    endpoint = options.get("endpoint_override")
    return boto3.client(
        "s3",
        endpoint_url=f"{options.get('scheme', 'https')}://{endpoint}" if endpoint else None,
        region_name=options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        config=Config(
            connect_timeout=float(options.get("connect_timeout", REQUEST_TIMEOUT_S)),
            read_timeout=float(options.get("request_timeout", REQUEST_TIMEOUT_S)),
            retries={"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS},
            s3={"addressing_style": "path"} if endpoint else {},
        ),
    )
