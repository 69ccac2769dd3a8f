"""The data path over S3: a real S3-speaking server, and a proxy before it that throttles, drops and delays."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest

from sparkring.conf.blocks.data import CacheConfig, DataConfig
from sparkring.conf.manifest import MANIFEST_NAME, DatasetManifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.order import epoch_ids
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import ReadRequest
from tests.helpers.servers import answering

MakeDataset = Callable[..., DatasetManifest]
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Faults:
    """Which of the GETs for data go wrong: every `throttle`-th is a 503, every `drop`-th breaks off halfway."""

    def __init__(self) -> None:
        self.throttle = self.drop = 0
        self.delay_s = 0.0
        self.gets = self.throttled = self.dropped = 0
        self._lock = threading.Lock()

    def next(self) -> str:
        with self._lock:
            self.gets += 1
            if self.throttle and self.gets % self.throttle == 0:
                self.throttled += 1
                return "throttle"
            if self.drop and self.gets % self.drop == 0:
                self.dropped += 1
                return "drop"
        return ""


def make_proxy(target_port: int, faults: Faults) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = faults.next() if self.command == "GET" and ".parquet" in self.path else ""
            time.sleep(faults.delay_s)
            if fault == "throttle":
                self._send(503, [("Content-Type", "application/xml")], SLOW_DOWN)
                return
            upstream = http.client.HTTPConnection("127.0.0.1", target_port, timeout=60)
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            data = answer.read()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
            upstream.close()
            if fault == "drop":
                self._send(answer.status, headers, data[: len(data) // 2], length=len(data))
                self.close_connection = True
                return
            self._send(answer.status, headers, data)

        def _send(self, status: int, headers: list[tuple[str, str]], data: bytes, length: int | None = None) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() != "content-length":
                    self.send_header(name, value)
            given = {k.lower(): v for k, v in headers}.get("content-length")
            size = given if self.command == "HEAD" and given else str(len(data) if length is None else length)
            self.send_header("Content-Length", size)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """moto's server on a port of its own choosing, ended with the module."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        ports: list[int] = []
        while not ports and time.monotonic() < deadline:
            time.sleep(0.2)
            assert process.poll() is None, "moto's server ended"
            ports = [c.laddr.port for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"]
        assert ports, "moto's server does not listen"
        yield ports[0]
    finally:
        process.terminate()
        process.wait(300)


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def bucket(s3_port: int, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Storage]]:
    """Uploads a dataset folder, and opens it through the proxy."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    proxy = make_proxy(s3_port, faults)
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_port}", region_name="us-east-1")
    client.create_bucket(Bucket="lake")

    def upload(folder: Path) -> Storage:
        for path in folder.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "lake", f"sets/{folder.name}/{path.relative_to(folder)}")
        port = proxy.server_address[1]
        return open_storage(
            f"s3://lake/sets/{folder.name}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        )

    with answering(proxy):
        yield upload


def read_epoch(storage: Storage, cache: CacheConfig) -> tuple[list[list[int]], ParquetReader]:
    manifest = DatasetManifest.from_json(storage.read_bytes(MANIFEST_NAME).decode(), storage.uri)
    reader = make_reader(
        DataConfig(cache=cache, lanes=4, audit=True), ReadRequest(storage, manifest, "train", None, 20)
    )
    assert isinstance(reader, ParquetReader)
    batches = [b.ids.tolist() for b in reader.batches(0)]  # type: ignore[union-attr]
    reader.close()
    return batches, reader


ALONE = [pytest.param(fault, marks=pytest.mark.slow) for fault in ({"throttle": 3}, {"drop": 4}, {"delay_s": 0.05})]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("fault", [{}, *ALONE, {"throttle": 4, "drop": 5, "delay_s": 0.01}], ids=str)
def test_every_row_once_over_s3_whatever_goes_wrong_between(
    make_dataset: MakeDataset,
    tmp_path: Path,
    bucket: Callable[[Path], Storage],
    faults: Faults,
    cached: bool,
    fault: dict[str, Any],
) -> None:
    folder = tmp_path / f"set{abs(hash((cached, str(fault))))}"
    make_dataset(folder, [[50, 50]] * (4 if cached else 1))  # of a file that is cached there is one request
    storage = bucket(folder)
    for name, value in fault.items():
        setattr(faults, name, value)
    batches, reader = read_epoch(storage, CacheConfig(files=str(tmp_path / "c") if cached else None))
    assert [i for batch in batches for i in batch] == epoch_ids(reader.plan, 0).tolist()
    assert faults.gets > 0
    assert ("throttle" not in fault or faults.throttled) and ("drop" not in fault or faults.dropped)


def test_a_cache_spares_the_second_epoch_every_request(
    make_dataset: MakeDataset, tmp_path: Path, bucket: Callable[[Path], Storage], faults: Faults
) -> None:
    make_dataset(tmp_path / "again", [[50, 50]] * 4)
    storage = bucket(tmp_path / "again")
    first, _ = read_epoch(storage, CacheConfig(files=str(tmp_path / "c")))
    asked = faults.gets
    second, _ = read_epoch(storage, CacheConfig(files=str(tmp_path / "c")))
    assert first == second and asked > 0 and faults.gets == asked


def test_a_damaged_object_is_named(
    make_dataset: MakeDataset, tmp_path: Path, bucket: Callable[[Path], Storage]
) -> None:
    manifest = make_dataset(tmp_path / "bad", [[50], [50]])
    path = tmp_path / "bad" / manifest.files[1].path
    path.write_bytes(b"?" + path.read_bytes()[1:])
    storage = bucket(tmp_path / "bad")
    for cache in (CacheConfig(), CacheConfig(files=str(tmp_path / "c"))):
        with pytest.raises(ValueError, match=r"train-00001.parquet.*: sha256 is"):
            read_epoch(storage, cache)


@pytest.mark.slow  # eight attempts with growing pauses, twice
def test_storage_that_stays_away_is_an_error_that_names_the_file(
    make_dataset: MakeDataset, tmp_path: Path, bucket: Callable[[Path], Storage], faults: Faults
) -> None:
    make_dataset(tmp_path / "gone", [[50]])
    storage = bucket(tmp_path / "gone")
    faults.drop = 1
    with pytest.raises(ValueError, match=r"train-00000.parquet: cannot be read from s3://lake"):
        read_epoch(storage, CacheConfig())
    config = DataConfig(on_corrupt="quarantine")  # a storage that fails is no reason to leave out its files
    manifest = DatasetManifest.from_json(storage.read_bytes(MANIFEST_NAME).decode(), storage.uri)
    with pytest.raises(ValueError, match=r"train-00000.parquet: cannot be read from s3://lake"):
        make_reader(config, ReadRequest(storage, manifest, "train", None, 20))
