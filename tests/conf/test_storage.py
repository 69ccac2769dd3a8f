"""Whole-file writes: a reader sees all of a file or none of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs as pafs
import pytest

from sparkring.conf.storage import Storage, check_stored, open_storage


def test_put_atomic_leaves_the_previous_file_when_the_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_storage(str(tmp_path))
    folder.put_atomic("a/x.json", b"old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        folder.put_atomic("a/x.json", b"new")
    monkeypatch.undo()
    assert folder.read_bytes("a/x.json") == b"old"
    assert folder.list_files() == ["a/x.json"], "the unfinished part was left behind"


def test_listing_hash_size_and_delete(tmp_path: Path) -> None:
    folder = open_storage(f"file://{tmp_path}").at("sub")
    assert not folder.exists() and folder.list_files() == []
    folder.put_atomic("b", b"12345")
    assert folder.size_bytes("b") == 5 and folder.size_bytes("c") is None
    assert folder.sha256("b") == "5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5"
    assert folder.sizes_bytes(["c", *["b"] * 300, "c"]) == [None, *[5] * 300, None], "in the order asked for"
    assert folder.parent.sizes_bytes(["sub", "sub/b"]) == [None, 5], "a folder is no file"
    folder.delete("b")
    folder.delete("b")
    assert folder.list_files() == []


def test_deleting_and_sweeping_never_go_through_a_symbolic_link(tmp_path: Path) -> None:
    others, folder = tmp_path / "others", open_storage(str(tmp_path / "ours"))
    part = f"a.{'0' * 32}.part"
    for base in (others, tmp_path / "ours"):
        (base / "deep").mkdir(parents=True)
        for file in (part, f"deep/{part}", "deep/file"):
            (base / file).touch()
    (tmp_path / "ours/link").symlink_to(others)
    (tmp_path / "ours/deep/link").symlink_to(others / "deep")
    (tmp_path / "ours/deep/loop").symlink_to(tmp_path / "ours")
    before = sorted(others.rglob("*"))
    assert folder.sweep() == [part, f"deep/{part}"] and folder.sweep("link") == []
    assert folder.own_files() == {"deep/file": 0} and folder.own_files("link/deep") == {}
    for path in ("link/deep/file", "link/deep", f"deep/link/{part}", "link", "deep"):
        folder.delete(path)
    (tmp_path / "ours/gone").symlink_to(tmp_path / "nowhere")
    folder.delete("gone")
    assert list((tmp_path / "ours").iterdir()) == [] and sorted(others.rglob("*")) == before


IN_MOUNTS = """
import sys
from sparkring.conf.storage import check_stored, open_storage
folder = open_storage(sys.argv[1])
assert folder.own_files() == {"run/deep/file": 0, "run/own": 0} and folder.own_files("run/at one") == {}
assert folder.way_out_on("run/deep") == "" and folder.way_out_on("run/at one/x") == f"{folder.root}/run/at one"
for path in ("run/at one/kept", "run/at one", "run/deep/file-mount", "run", "disk"):
    folder.delete(path)
assert folder.own_files() == {}
behind = open_storage(f"{folder.root}/run/at one")  # the root may be a mount point, and what is in it is ours then
behind.delete("not-kept")
"""


def in_a_namespace(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose mounts nobody else sees; skip the test where none can be made."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root and mount namespaces")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_deleting_never_goes_through_a_mount_point(tmp_path: Path) -> None:
    """Of a folder of the same filesystem, a file, another filesystem; the folder itself is reached by a link."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    for path in ("ours/run/at one", "ours/run/deep", "ours/disk", "other"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("ours/run/own", "ours/run/deep/file", "ours/run/deep/file-mount", "other/kept", "other/not-kept"):
        (tmp_path / path).touch()
    (tmp_path / "link").symlink_to(ours)
    mounts = f"""
        mount --bind '{other}' '{ours}/run/at one'
        mount --bind '{other}/kept' '{ours}/run/deep/file-mount'
        mount -t tmpfs none '{ours}/disk'
        touch '{ours}/disk/kept'
        '{sys.executable}' -c '{IN_MOUNTS}' '{tmp_path}/link'
        test -e '{ours}/disk/kept'
    """
    done = in_a_namespace(mounts)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in other.iterdir()] == ["kept"]
    left = sorted(str(path.relative_to(ours)) for path in ours.rglob("*"))
    assert left == ["disk", "run", "run/at one", "run/deep", "run/deep/file-mount"]


def test_credentials_in_a_uri_are_refused() -> None:
    with pytest.raises(ValueError, match="holds a secret, which would be logged"):
        open_storage("s3://key:secret@bucket/x")


SERVERS = {  # URI -> the server that it chooses
    "s3://bucket/x?endpoint_override=evil.example:9000&scheme=http": "http://evil.example:9000",
    "gs://bucket/x?endpoint_override=evil.example": "https://evil.example",
    "abfss://box@account.evil.example/x": "https://account.evil.example",
    "abfs://box@127.0.0.1:10000/x": "https://127.0.0.1:10000",
    "abfss://box@account.core.windows.net.evil.example/x": "https://account.core.windows.net.evil.example",
    "abfss://box@account.dfs.core.windows.net/x?dfs_storage_authority=.evil.example": "https://.evil.example",
    "sftp://evil.example/x": "sftp://evil.example",
    "webhdfs://evil.example:9870/x": "webhdfs://evil.example:9870",
    "https://evil.example/x": "https://evil.example",
}
OF_THE_SDK = [
    "/x", "data/x", "file:///x", "s3://bucket/x?region=eu-central-1", "gs://bucket/x", "hdfs://namenode:8020/x",
    "abfss://box@account.dfs.core.windows.net/x", "abfs://box@account.blob.core.windows.net/x", "",
]  # fmt: skip


@pytest.mark.parametrize(("uri", "server"), SERVERS.items())
def test_a_stored_uri_chooses_no_server(uri: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = re.escape(f"the server {server} is named in /runs/1 alone")
    with pytest.raises(ValueError, match=f"{words}.*SPARKRING_TRUSTED_SERVERS="):
        check_stored(uri, "/runs/1")
    check_stored(uri, uri.replace("/x", "/runs"))  # where the user has named it
    monkeypatch.setenv("SPARKRING_TRUSTED_SERVERS", f"other, {server.partition('://')[2]}")
    check_stored(uri, "/runs/1")


@pytest.mark.parametrize("uri", OF_THE_SDK)
def test_a_stored_uri_of_storage_whose_server_the_sdk_knows_is_opened(uri: str) -> None:
    check_stored(uri, "/runs/1")


@pytest.mark.parametrize("scheme", ["dir", "asyncwrapper", "dbfs", "reference", "arrow_hdfs", "simplecache", "cached"])
def test_file_systems_that_need_more_than_a_uri_are_refused_in_one_line(scheme: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be opened by pyarrow|no filesystem for scheme"):
        open_storage(f"{scheme}://host/x")


@pytest.mark.parametrize(
    "uri", ["nosuch://bucket/x", "s3://bucket/x?nonsense=1", "simplecache::http://host/x", "reference::https://host/x"]
)
def test_unknown_schemes_and_options_say_so(uri: str) -> None:
    with pytest.raises(ValueError, match=r"no filesystem for scheme|unknown option|chains file systems"):
        open_storage(uri)


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("abfss://container@account.dfs.core.windows.net/x/y/", "container/x/y"),
        ("hdfs://nn:9000/x/y", "/x/y"),
        ("memory://a/b", "/a/b"),
    ],
)
def test_the_filesystem_says_what_the_root_is(uri: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if uri.startswith("hdfs"):  # its library is not here; this is what pyarrow makes of such a URI
        arrow = SimpleNamespace(from_uri=lambda _: (pafs.LocalFileSystem(), "/x/y"))
        monkeypatch.setattr("pyarrow.fs.FileSystem", arrow)
    assert open_storage(uri).root == root


def test_a_filesystem_that_cannot_be_opened_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: object) -> None:
        raise OSError("Unable to load libjvm")

    monkeypatch.setattr("pyarrow.fs.FileSystem", SimpleNamespace(from_uri=no_library))
    monkeypatch.setattr("fsspec.core.url_to_fs", no_library)
    with pytest.raises(ValueError, match=r"hdfs://nn/x: cannot be opened by pyarrow \(Unable to load libjvm\)"):
        open_storage("hdfs://nn/x")


def test_a_relative_uri_means_the_same_folder_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = open_storage("data").at("x")
    monkeypatch.chdir("/")
    assert open_storage(folder.uri).root == folder.root == f"{tmp_path}/data/x"


def test_of_several_writers_of_a_new_file_one_wins(tmp_path: Path) -> None:
    folder, won = open_storage(str(tmp_path)), list[int]()
    barrier = threading.Barrier(8)

    def write(number: int) -> None:
        barrier.wait()
        if folder.put_new("a/marker", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and folder.read_bytes("a/marker") == b"%d" % won[0]
    assert not folder.put_new("a/marker", b"late") and folder.list_files() == ["a/marker"]


@pytest.mark.parametrize(
    ("uri", "above"),
    [("/d/sets/x", "/d/sets"), ("s3://bucket/sets/x?scheme=http", "s3://bucket/sets?scheme=http")],
)
def test_the_folder_above(uri: str, above: str) -> None:
    parent = open_storage(uri).parent
    assert (parent.root, parent.uri) == (open_storage(above).root, above)
    assert parent.at("x").uri == uri


ODD_NAMES = ["a?b", "a#b", "a%25b", "a b", "[a]", "u:p@h", "a;b", "a*b", "a&b=c", "?", "#", "%2F", "x:", "::", "é"]


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("spelled", ["{}", "file://{}", "file:{}"])
def test_a_local_path_is_no_url(tmp_path: Path, name: str, spelled: str) -> None:
    folder = open_storage(spelled.format(tmp_path / name / "run"))
    folder.at("model").put_atomic("config.json", b"1")
    folder.at("a/b").parent.put_atomic("c", b"2")
    assert open_storage(folder.at("model").uri).read_bytes("config.json") == b"1"
    assert (tmp_path / name / "run/model/config.json").exists() and (tmp_path / name / "run/a/c").exists()
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_options_of_a_uri_stay_behind_the_folder_below_it() -> None:
    bucket = Storage(pafs.LocalFileSystem(), "b/p", "s3://b/p?region=eu&scheme=http")
    assert bucket.at("run").uri == "s3://b/p/run?region=eu&scheme=http"
    assert bucket.at("run").parent.uri == bucket.uri
