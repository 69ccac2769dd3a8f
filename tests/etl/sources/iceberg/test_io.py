"""What a table's author cannot do: choose code, a server or a credential, or name the files of other tables."""

from __future__ import annotations

import http.server
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.utils.config import Config

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.files import footers
from sparkring.etl.sources.iceberg.places import is_below
from tests.etl.sources.iceberg.tables import catalog_at, delete_by_position, paths, pinned
from tests.helpers.servers import answering

CHOICES = {
    "py-io-impl": "tests.etl.sources.iceberg.not_imported.Spy",
    "s3.endpoint": "http://attacker.invalid",
    "s3.proxy-uri": "http://attacker.invalid",
    "s3.signer": "S3V4RestSigner",
    "s3.signer.uri": "http://attacker.invalid",
    "s3.access-key-id": "theirs",
    "s3.retry-strategy-impl": "tests.etl.sources.iceberg.not_imported.Spy",
    "adls.connection-string": "BlobEndpoint=http://attacker.invalid",
    "gcs.service.host": "http://attacker.invalid",
    "hf.endpoint": "http://attacker.invalid",
    "warehouse": "http://attacker.invalid",
    "token": "theirs",
}


@pytest.fixture
def made(tmp_path):
    """A table of a catalog whose properties choose all that they can."""
    with catalog_at(tmp_path) as catalog:
        table = catalog.create_table("db.t", pa.schema([("n", pa.int64())]))
        table.append(pa.table({"n": [1, 2]}))
        rewrite(table.metadata_location, lambda found: found["properties"].update(CHOICES))
        yield table


def local(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def rewrite(location: str, change) -> None:
    file = local(location)
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


@contextmanager
def rest_catalog(table):
    """The catalog `prod` served over HTTP: it answers with the table's metadata, and a configuration of its own."""
    answers = {
        "/v1/config": {"defaults": {}, "overrides": {"py-io-impl": CHOICES["py-io-impl"], "s3.region": "eu-1"}},
        "/v1/namespaces/db/tables/t": {
            "metadata-location": table.metadata_location,
            "metadata": json.loads(local(table.metadata_location).read_text()),
            "config": {"s3.access-key-id": "vended", "py-io-impl": CHOICES["py-io-impl"]},
        },
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(answers[self.path.partition("?")[0]]).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with answering(server), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYICEBERG_CATALOG__PROD__URI", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "rest")
        patch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
        yield


def used_properties(**options) -> dict[str, str]:
    """The properties by which a table's files are opened, which are opened with them."""
    snapshot = pinned(**options)
    assert [schema.names for schema in footers("k", snapshot.version, snapshot.files)] == [["n"]]
    assert type(snapshot.version.io._by_scheme["file"]).__name__ == "PyArrowFileIO"
    return {name: value for name, value in snapshot.version.io.properties.items() if CHOICES.get(name) == value}


def test_no_property_of_a_table_chooses_how_its_files_are_opened(made):
    assert used_properties() == {}
    assert used_properties(path=made.metadata_location) == {}


def test_a_catalogs_server_gives_credentials_and_names_no_class(made):
    with rest_catalog(made):
        assert used_properties() == {}
        found = pinned().version.io.properties
    assert found["s3.access-key-id"] == "vended" and found["s3.region"] == "eu-1"


def test_the_class_that_the_reader_configures_opens_the_files(made, monkeypatch):
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__PY_IO_IMPL", "pyiceberg.io.fsspec.FsspecFileIO")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    snapshot = pinned()
    footers("k", snapshot.version, snapshot.files)
    assert type(snapshot.version.io._by_scheme["file"]).__name__ == "FsspecFileIO"


# --- whose files


@pytest.fixture
def two(tmp_path):
    """A private table and one of a stranger, as folders of metadata and data, and the catalog of both."""
    with catalog_at(tmp_path) as catalog:
        tables = [catalog.create_table(f"db.{name}", pa.schema([("n", pa.int64())])) for name in ("private", "t")]
        for table in tables:
            table.append(pa.table({"n": [1, 2, 3]}))
        delete_by_position(tables[0], paths(tables[0])[0], [0])
        yield tables


def named(theirs, what: str) -> None:
    """Let a stranger's metadata name files of the private table."""
    private, table = theirs
    found = json.loads(local(private.metadata_location).read_text())

    def change(own) -> None:
        if what == "location":
            own["location"] = found["location"]
        for key in ("snapshots", "refs", "snapshot-log", "current-snapshot-id", "last-sequence-number"):
            own[key] = found[key]

    rewrite(table.metadata_location, change)


@pytest.mark.parametrize("what", ["manifest list", "location"])
def test_metadata_that_names_another_tables_files_is_refused_unless_the_recipe_allows_them(two, what):
    private, table = two
    named(two, what)
    for options in ({}, {"path": table.metadata_location}):
        with pytest.raises(EtlError, match=r"names file://.*/private/.*not below .*/t, .*allowed_folders: \["):
            pinned(**options)
        assert len(pinned(**options, allowed_folders=[private.location()]).files) == 1


@pytest.mark.parametrize("kind", ["manifest", "data"])
def test_a_list_or_manifest_that_names_another_tables_files_is_refused(two, kind):
    """The private table's list, or manifest too, copied below the stranger's folder."""
    private, table = two
    named(two, "manifest list")
    snapshot = json.loads(local(private.metadata_location).read_text())["snapshots"][-1]
    lists = local(snapshot["manifest-list"])
    copy = local(table.location()) / "metadata" / lists.name
    shutil.copy(lists, copy)
    rewrite(table.metadata_location, lambda own: own["snapshots"][-1].update({"manifest-list": f"file://{copy}"}))
    allowed = [] if kind == "manifest" else [f"{private.location()}/metadata"]
    with pytest.raises(EtlError, match=rf"names file://.*/private/{'metadata' if kind == 'manifest' else 'data'}/"):
        pinned(allowed_folders=allowed)


def test_a_link_in_a_tables_folder_leads_to_no_other_tables_file(two):
    private, table = two
    own = local(paths(table)[0])
    own.unlink()
    os.symlink(local(paths(private)[0]), own)
    with pytest.raises(EtlError, match=r"which is not below"):
        pinned()


@pytest.mark.parametrize("way", ["link", "relative", "dots", "slashes"])
def test_a_table_may_be_declared_by_any_spelling_of_its_folder(two, tmp_path, monkeypatch, way):
    """Its metadata has the one of its writer."""
    monkeypatch.chdir(tmp_path)
    os.symlink(tmp_path / "lake", tmp_path / "link")
    folder = {"link": f"{tmp_path}/link", "relative": "lake", "dots": f"{tmp_path}/./link/../lake"}
    folder |= {"slashes": f"{tmp_path}//lake"}
    table = two[1]
    path = str(local(table.metadata_location)).replace(f"{tmp_path}/lake", folder[way])
    assert pinned(path=path).fingerprint == pinned().fingerprint
    named(two, "manifest list")
    with pytest.raises(EtlError, match=r"names file://.*/private/.*not below"):
        pinned(path=path)
    assert pinned(path=path, allowed_folders=[local(two[0].location()).as_posix().replace("/lake/", "/link/")]).files


def test_a_link_in_a_tables_folder_may_lead_to_an_allowed_one(two, tmp_path):
    data = local(two[1].location()) / "data"
    data.rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", data)
    with pytest.raises(EtlError, match=r"not below"):
        pinned()
    assert len(pinned(allowed_folders=[str(tmp_path / "elsewhere")]).files) == 1


@pytest.mark.parametrize(
    ("location", "inside"),
    [
        ("s3://lake/t/data/a", True),
        ("s3a://lake/t/data/a", True),
        ("s3://lake/t2/data/a", False),
        ("s3://lake/t/../u/a", False),
        ("s3://lake/t/./a", False),
        ("s3://other/t/a", False),
        ("s3://lake@other/t/a", False),
        ("gs://lake/t/a", False),
        ("/lake/t/a", False),
        ("http://lake/t/a", False),
    ],
)
def test_a_file_is_below_a_folder_by_store_bucket_and_path(location, inside):
    assert is_below(location, ["s3://lake/t"]) == inside


def test_a_path_without_a_root_is_below_no_folder(tmp_path, monkeypatch):
    """Where it leads depends on who opens it."""
    monkeypatch.chdir(tmp_path)
    assert is_below(f"{tmp_path}/t/a", ["t"]) and not is_below("t/a", ["t"])
