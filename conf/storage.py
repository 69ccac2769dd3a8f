"""Open a storage URI; the one atomic, hashed write (`Storage.create`) and the one lock (`lock_file`) of the project.

Nothing here renames folders: a dataset or checkpoint becomes visible by one `put_atomic` of its manifest or marker,
which local disks (write next to, fsync, `os.replace`) and object stores (a PUT is atomic) both give.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, urlsplit

from sparkring.conf.uris import ARROW_SCHEMES, check_below, check_uri, local_path, without_options

if TYPE_CHECKING:
    import pyarrow.fs as pafs

CHUNK_BYTES = 4 << 20
LOOK_UP_AT_ONCE, LOOK_UP_THREADS = 100, 16  # files
PART = ".part"
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # as pyarrow counts them
AZURE = (".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net")
TRUSTED = "SPARKRING_TRUSTED_SERVERS"  # that stored files and MLflow may name: `host` or `host:port`, commas between


@dataclass(frozen=True)
class Storage:
    """A folder on some filesystem. `root` has no scheme; `open_storage(uri)` gives the same folder on any host.

    `remote`: its filesystem; None on a local disk, where commands that read a few small files need no pyarrow.
    """

    remote: pafs.FileSystem | None
    root: str
    uri: str

    @property
    def is_local(self) -> bool:
        return self.remote is None

    @property
    def fs(self) -> pafs.FileSystem:
        import pyarrow.fs as pafs

        return pafs.LocalFileSystem() if self.remote is None else self.remote

    def path(self, relative: str = "") -> str:
        """Return the absolute path. ValueError if `relative` would leave this folder."""
        return f"{self.root}/{check_below(relative)}".rstrip("/") if relative else self.root

    def at(self, relative: str) -> Storage:
        """Return the folder `relative` below this one."""
        base = without_options(self.uri)
        return Storage(self.remote, self.path(relative), f"{base.rstrip('/')}/{relative}{self.uri[len(base) :]}")

    @property
    def parent(self) -> Storage:
        """The folder that this one is in."""
        base = without_options(self.uri)
        above = base.rstrip("/").rpartition("/")[0]
        return Storage(self.remote, self.root.rpartition("/")[0] or "/", above + self.uri[len(base) :])

    def exists(self, relative: str = "") -> bool:
        path = self.path(relative)
        if self.remote is not None:
            return bool(self.remote.get_file_info(path).type.name != "NotFound")
        try:
            os.stat(path)
        except OSError as error:
            if error.errno in NOT_THERE:
                return False
            raise
        return True

    def size_bytes(self, relative: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        info = self.fs.get_file_info(self.path(relative))
        return info.size if info.is_file else None

    def sizes_bytes(self, relatives: Sequence[str]) -> list[int | None]:
        """Return `size_bytes` of many files; an object store is asked by several threads."""
        pieces = [relatives[start : start + LOOK_UP_AT_ONCE] for start in range(0, len(relatives), LOOK_UP_AT_ONCE)]

        def look_up(piece: Sequence[str]) -> list[pafs.FileInfo]:
            return self.fs.get_file_info([self.path(relative) for relative in piece])

        with ThreadPoolExecutor(LOOK_UP_THREADS) as pool:
            infos = [info for found in pool.map(look_up, pieces) for info in found]
        return [info.size if info.is_file else None for info in infos]

    def read_bytes(self, relative: str) -> bytes:
        if self.is_local:
            return Path(self.path(relative)).read_bytes()
        with self.fs.open_input_stream(self.path(relative)) as stream:
            data: bytes = stream.read()
        return data

    def put_atomic(self, relative: str, data: bytes) -> None:
        """Write a file so that a reader sees all of it or none of it, and a crash leaves the previous one."""
        with self.create(relative) as file:
            file.write(data)

    def put_new(self, relative: str, data: bytes) -> bool:
        """Write a file whole unless there is one; False if there is.

        On a local disk one of several writers wins. Other storage is asked first whether the file exists, so two
        writers that ask at the same time may both get True.
        """
        target = self.path(relative)
        if self.exists(relative):
            return False
        if not self.is_local:
            self.put_atomic(relative, data)
            return True
        os.makedirs(os.path.dirname(target), exist_ok=True)
        part = f"{target}.{uuid.uuid4().hex}{PART}"
        with _part_file(part) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.link(part, target)  # unlike a rename, it does not replace
            except FileExistsError:
                return False
            finally:
                os.unlink(part)
        _sync_folder(target)
        return True

    @contextmanager
    def create(self, relative: str, on_progress: Callable[[], None] = lambda: None) -> Iterator[HashingFile]:
        """Write a file that appears whole when the block ends; on a local disk not at all when the block raises.

        `on_progress()` is called after each piece of at most CHUNK_BYTES has been written.
        """
        target = self.path(relative)
        if not self.is_local:
            stream = self.fs.open_output_stream(target)
            yield HashingFile(stream, on_progress)
            stream.close()  # an object appears when its stream is closed
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        part = f"{target}.{uuid.uuid4().hex}{PART}"
        try:
            with _part_file(part) as file:
                yield HashingFile(file, on_progress)
                publish(file, part, target)
        except BaseException as error:
            if os.path.exists(part):
                os.unlink(part)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = target  # a failed write does not name its file
            raise

    def sweep(self, relative: str = "") -> list[str]:
        """Delete the part files that killed writers left below `relative`; returns their paths.

        A live writer holds the lock of its part file, which is left alone. Object stores never have part files.
        """
        if not self.is_local:
            return []
        left = [path for path in self.own_files(relative) if re.search(rf"\.[0-9a-f]{{32}}{PART}$", path)]
        return [path for path in sorted(left) if _delete_unlocked(self.path(path))]

    def list_files(self, relative: str = "") -> list[str]:
        """List all files below `relative`, as sorted relative paths; [] if the folder is missing."""
        prefix = len(self.root) + 1
        return sorted(info.path[prefix:] for info in self._listed(relative, recursive=True) if info.is_file)

    def own_files(self, relative: str = "") -> dict[str, int]:
        """Return the size in bytes of each file below `relative`; links and mount points are skipped."""
        prefix = len(self.root) + 1
        if self.is_local:
            if self.way_out_on(relative):
                return {}
            mounts, inside = self._mounts(), list[str]()
            for folder, below, names in os.walk(self.path(relative)):
                below[:] = [name for name in below if os.path.join(folder, name)[prefix:] not in mounts]
                paths = (os.path.join(folder, name) for name in names)
                inside += [path for path in paths if path[prefix:] not in mounts and not os.path.islink(path)]
            infos = self.fs.get_file_info(inside)
        else:
            infos = self._listed(relative, recursive=True)
        return {info.path[prefix:]: info.size for info in infos if info.is_file}

    def way_out_on(self, relative: str) -> str:
        """Return the first symbolic link or mount point on the way to `relative`; "" if there are only folders.

        What is behind it is not ours. This folder itself may be one.
        """
        if not self.is_local or not relative:
            return ""
        names, mounts = relative.split("/"), self._mounts()
        ways = ("/".join(names[: count + 1]) for count in range(len(names)))
        return next((self.path(way) for way in ways if way in mounts or os.path.islink(self.path(way))), "")

    def _mounts(self) -> set[str]:
        """Mount points below this folder, relative to it."""
        real = os.path.realpath(self.root).rstrip("/") + "/"
        return {path.removeprefix(real) for path in mount_points() if path.startswith(real) and path != real}

    def list_folders(self) -> list[str]:
        """List the names of the folders directly below this one, sorted."""
        if self.is_local:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir()) if self.exists() else []
        return sorted(info.base_name for info in self._listed("", recursive=False) if info.type.name == "Directory")

    def _listed(self, relative: str, recursive: bool) -> list[pafs.FileInfo]:
        """List the files and folders below `relative`; [] if the folder is missing."""
        import pyarrow.fs as pafs

        return self.fs.get_file_info(pafs.FileSelector(self.path(relative), allow_not_found=True, recursive=recursive))

    def delete(self, relative: str) -> None:
        """Delete a file or a folder; silent where it is already gone.

        Of a symbolic link the link itself goes; what is behind links and mount points is not ours and stays.
        """
        path = self.path(relative)
        if way_out := self.way_out_on(relative):
            if way_out == path and os.path.islink(path):
                os.unlink(path)
            return
        info = self.fs.get_file_info(path)
        if info.type.name == "Directory":
            mounts = {f"{self.root}/{mount}" for mount in self._mounts()} if self.is_local else set[str]()
            if any(mount.startswith(f"{path}/") for mount in mounts):
                _delete_around(path, mounts)
            else:
                self.fs.delete_dir(path)
        elif info.is_file:
            self.fs.delete_file(path)

    def rename_file(self, relative: str, new: str) -> None:
        """Give a file another name; on a local disk at once, elsewhere it is copied first and then deleted."""
        self.fs.move(self.path(relative), self.path(new))

    def sha256(self, relative: str, on_progress: Callable[[], None] = lambda: None) -> str:
        """Hash a file; `on_progress()` is called before each piece is read: a large file takes minutes."""
        hasher = hashlib.sha256()
        with self.fs.open_input_stream(self.path(relative), compression=None) as stream:
            while True:
                on_progress()
                piece = stream.read(CHUNK_BYTES)
                if not piece:
                    return hasher.hexdigest()
                hasher.update(piece)


def copy_files(source: Storage, target: Storage, names: Iterable[str]) -> None:
    """Copy files from folder to folder, from any storage to any other."""
    for name in names:
        with source.fs.open_input_stream(source.path(name), compression=None) as stream, target.create(name) as copy:
            while chunk := stream.read(CHUNK_BYTES):
                copy.write(chunk)


class HashingFile(io.RawIOBase):
    """Write-only file that passes bytes on in pieces, and counts (`bytes`) and hashes (`sha256`) them."""

    def __init__(self, under: Any, on_progress: Callable[[], None] = lambda: None) -> None:
        self._under, self._on_progress, self._hasher = under, on_progress, hashlib.sha256()
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._hasher.update(piece)
            self._under.write(piece)
            self.bytes += len(piece)
            self._on_progress()
        return len(view)

    @property
    def sha256(self) -> str:
        """Hex digest of everything written so far."""
        return self._hasher.hexdigest()


def mount_points() -> list[str]:
    """List the paths at which filesystems, folders or files are mounted, as this process sees them."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []
    # a blank, tab, line break or backslash is written as \040
    return [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines]


def _delete_around(folder: str, mounts: Collection[str]) -> None:
    """Delete what is in a local folder but `mounts`, and the folders on the way to these."""
    for entry in os.scandir(folder):
        if entry.path in mounts:
            continue
        if entry.is_dir(follow_symlinks=False):
            _delete_around(entry.path, mounts)
        else:
            os.unlink(entry.path)
    if not any(mount.startswith(f"{folder}/") for mount in mounts):
        os.rmdir(folder)


def publish(file: BinaryIO, part: str, target: str) -> None:
    """Flush the open file `part` to the device and rename it to `target`, so that a power cut loses neither."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(part, target)
    _sync_folder(target)


def _sync_folder(target: str) -> None:
    """Flush the entry of a file in its folder to the device."""
    folder = os.open(os.path.dirname(target), os.O_RDONLY)
    try:
        os.fsync(folder)  # POSIX: the rename itself is in the folder's entry
    finally:
        os.close(folder)


@contextmanager
def _part_file(path: str) -> Iterator[BinaryIO]:
    """Create a file that is locked from before `sweep` could take its writer for dead."""
    while True:
        with open(path, "wb") as file:
            with contextlib.suppress(OSError):  # a filesystem without locks: its parts are never swept
                _flock(file.fileno(), wait=True)
            if os.fstat(file.fileno()).st_nlink:  # else it was swept between these two lines
                yield file
                return


def _delete_unlocked(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            if not _flock(file.fileno(), wait=False):  # being written
                return False
            os.unlink(path)
    except OSError:  # gone, or no locks here
        return False
    return True


def _flock(descriptor: int, wait: bool) -> bool:
    """Take the lock of an open file; False where another holds it and this call does not wait."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def lock_file(path: str | Path, wait: bool = False, mode: int = 0o600) -> int | None:
    """Lock `path` (flock), creating it with `mode`; None where another holds it and this call does not wait.

    Returns a descriptor that holds the lock until `unlock`, or until its process ends, however it ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    held = False
    try:
        held = _flock(descriptor, wait)
    finally:
        if not held:
            os.close(descriptor)
    return descriptor if held else None


def unlock(descriptor: int) -> None:
    """Release what `lock_file` gave.

    Closing alone does not: a process that another thread is just starting has a copy of the descriptor until it runs
    its program, and the lock with it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock between processes for the block, waiting for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = lock_file(path, wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        unlock(descriptor)


def open_storage(uri: str) -> Storage:
    """Open `/path`, `relative/path`, `file:///path` or a URI such as `s3://bucket/prefix?endpoint_override=host:port`.

    S3 credentials come from the environment or the instance, as pyarrow finds them; they may not stand in the URI.
    Raises ValueError for what `check_uri` refuses, and if a filesystem needs a package that is not installed.
    """
    check_uri(uri)
    if (path := local_path(uri)) is not None:
        # Absolute in the URI too: it is opened again on executors, whose working directory is another.
        path = os.path.abspath(path)
        return Storage(None, path, path)
    parts = urlsplit(uri)
    if parts.scheme in ("s3", "s3a"):
        return Storage(_s3(dict(parse_qsl(parts.query))), f"{parts.netloc}{parts.path}".rstrip("/"), uri)
    import pyarrow.fs as pafs

    try:
        fs, root = pafs.FileSystem.from_uri(uri)  # pyarrow decides the root: hdfs's has no host, abfss's no account
    except Exception as error:  # pyarrow raises several kinds here; fsspec is the second chance
        fs, root = _fsspec(uri, error)
    return Storage(fs, root.rstrip("/") or root, uri)


def open_stored(uri: str, found_in: Storage) -> Storage:
    """Open a URI that a stored file names. ValueError where `check_stored` refuses it."""
    check_stored(uri, found_in.uri)
    return open_storage(uri)


def check_stored(uri: str, named_in: str) -> None:
    """Raise ValueError for a URI of a server that only what is stored names: it would get the reader's keys.

    Args:
        uri: URI found in a stored file or a tracking store.
        named_in: URI of that file or store, as the user has named it.
    """
    server = _server(uri)
    if server and server != _server(named_in) and not is_trusted(server.partition("://")[2]):
        raise ValueError(
            f"{uri}: the server {server} is named in {named_in} alone, and would be sent this machine's credentials; "
            f"if you trust it, set {TRUSTED}={server.partition('://')[2]}"
        )


def is_trusted(server: str) -> bool:
    """Return whether the user lets stored files name this server, `host` or `host:port`."""
    trusted = {each.strip().lower() for each in os.environ.get(TRUSTED, "").split(",")} - {""}
    return not trusted.isdisjoint({server.lower(), re.sub(r":\d*$", "", server.lower())})


def _server(uri: str) -> str:
    """Return the server a URI chooses, `scheme://host:port`; "" where the storage's SDK knows it.

    Kerberos proves who asks and gives nothing away, so the name nodes of HDFS do not count.
    """
    if local_path(uri) is not None:
        return ""
    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query))
    chosen = options.get("endpoint_override") or next((v for k, v in options.items() if k.endswith("_authority")), "")
    if chosen:
        return f"{options.get('scheme', 'https')}://{chosen}"
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme in ("abfs", "abfss"):  # a container or account has no dot
        return "" if host.endswith(AZURE) or not re.search("[.:]", host) else f"https://{host}"
    return "" if parts.scheme in ARROW_SCHEMES or not host else f"{parts.scheme}://{host}"


def _s3(options: dict[str, str]) -> pafs.FileSystem:
    import pyarrow.fs as pafs

    settings: dict[str, Any] = dict(options)
    for key in ("request_timeout", "connect_timeout"):
        if key in settings:
            settings[key] = float(settings[key])
    return pafs.S3FileSystem(retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=8), **settings)


def _fsspec(uri: str, refused: Exception) -> tuple[pafs.FileSystem, str]:
    import fsspec
    import pyarrow.fs as pafs

    try:
        fs, root = fsspec.core.url_to_fs(uri)
    except Exception as error:  # of many types: some of fsspec's file systems wrap another, and need arguments
        raise ValueError(f"{uri}: cannot be opened by pyarrow ({refused}) nor by fsspec ({error})") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), str(root)
