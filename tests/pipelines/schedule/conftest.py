from __future__ import annotations

import uuid
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from sparkring.conf.storage import Storage, open_storage


@pytest.fixture(scope="package")
def s3_address() -> Iterator[str]:
    """host:port of a server that speaks S3, with the bucket `bucket`."""
    server = ThreadedMotoServer(port=0, ip_address="127.0.0.1")
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_bucket(Bucket="bucket")
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def s3_folder(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    options = f"endpoint_override={s3_address}&scheme=http&region=us-east-1"
    return open_storage(f"s3://bucket/{uuid.uuid4().hex}?{options}")


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest) -> Storage:
    """An empty folder of each kind of storage that can hold a lease."""
    if request.param == "s3":
        found: Storage = request.getfixturevalue("s3_folder")
        return found
    return open_storage(str(request.getfixturevalue("tmp_path")))
