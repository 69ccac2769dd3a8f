"""Caches: whole or absent under kill -9, shared by jobs, bounded, never a reason to stop."""

from __future__ import annotations

import errno
import logging
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.blocks.data import CacheConfig, DataConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch
from sparkring.training.data.build import make_reader
from sparkring.training.data.cache import CachedFiles, DiskCache
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import ReadRequest

MakeDataset = Callable[..., DatasetManifest]
ROOT = Path(__file__).resolve().parents[3]


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def reader_of(folder: Path, manifest: DatasetManifest, cache: CacheConfig, **data: Any) -> ParquetReader:
    config = DataConfig(cache=cache, lanes=4, tail="pad", audit=True, **data)
    reader = make_reader(config, ReadRequest(open_storage(str(folder)), manifest, "train", None, 10))
    assert isinstance(reader, ParquetReader)
    return reader


def epoch(reader: ParquetReader, number: int = 0) -> tuple[list[Batch], dict[str, float]]:
    batches = list(reader.batches(number * reader.epochs.samples))
    return batches, reader.meter.take()


def test_files_are_fetched_once_and_served_from_the_copy(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path / "d", [[50, 50]] * 4)
    cache = tmp_path / "cache"
    reader = reader_of(tmp_path / "d", manifest, CacheConfig(files=str(cache)))
    _, first = epoch(reader)
    assert first["cache_miss"] == 4 and first["cache_fetched_bytes"] == sum(f.bytes for f in manifest.files)
    assert entries(cache) == sorted(f.sha256 for f in manifest.files)
    for file in manifest.files:
        (tmp_path / "d" / file.path).unlink()  # only the copies are left
    batches, second = epoch(reader, 1)
    assert sorted(i for b in batches for i in b.columns["id"].tolist() if i < 400) == list(range(400))
    assert "cache_miss" not in second
    reader.close()


def test_data_larger_than_the_cache_does_not_thrash(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path / "d", [[50]] * 8)
    size = max(f.bytes for f in manifest.files)
    reader = reader_of(tmp_path / "d", manifest, CacheConfig(files=str(tmp_path / "c"), files_max_bytes=4 * size + 10))
    epoch(reader)
    kept = entries(tmp_path / "c")
    assert len(kept) == 4
    _, again = epoch(reader, 1)
    assert entries(tmp_path / "c") == kept and again["cache_hit"] >= 4 and "cache_miss" not in again
    reader.close()


def test_what_no_job_uses_makes_room(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for owner, key in (("old", "old-1"), ("old", "old-2")):
        assert DiskCache(str(folder), 250, [owner]).fill(key, 100, lambda f: f.write(b"x" * 100) and None)
    mine = DiskCache(str(folder), 250, ["new"], idle_s=600)
    assert mine.fill("new-1", 100, lambda f: f.write(b"y" * 100) and None) is None  # the others may be in use
    os.utime(folder / "old-1", (time.time() - 1000,) * 2)
    assert mine.fill("new-1", 100, lambda f: f.write(b"y" * 100) and None)
    assert entries(folder) == ["new-1", "old-2"]


def test_a_damaged_copy_is_fetched_again(
    make_dataset: MakeDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = make_dataset(tmp_path / "d", [[50, 50]])
    config = CacheConfig(files=str(tmp_path / "c"))
    first = reader_of(tmp_path / "d", manifest, config)
    epoch(first)
    first.close()
    copy = tmp_path / "c" / manifest.files[0].sha256
    copy.write_bytes(copy.read_bytes()[:-9] + b"?" * 9)
    second = reader_of(tmp_path / "d", manifest, config)
    _, taken = epoch(second)
    assert taken["cache_miss"] == 1 and "is damaged and is fetched again" in caplog.text
    second.close()


def test_a_damaged_source_is_named_and_leaves_no_copy(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path / "d", [[50], [50]])
    path = tmp_path / "d" / manifest.files[1].path
    path.write_bytes(b"?" + path.read_bytes()[1:])
    reader = reader_of(tmp_path / "d", manifest, CacheConfig(files=str(tmp_path / "c")))
    with pytest.raises(ValueError, match=r"train-00001.parquet: sha256 is"):
        reader.batches(0)
    assert manifest.files[1].sha256 not in entries(tmp_path / "c")
    reader.close()


KILLED = """
    import os, signal, sys
    from sparkring.training.data.cache import DiskCache
    def write(file):
        file.write(b"x" * 500); file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    DiskCache(sys.argv[1], 10_000, ["k"]).fill("k-1", 1000, write)
"""


def test_kill_9_in_the_middle_of_a_write_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(folder)], cwd=ROOT, timeout=600)
    assert died.returncode == -signal.SIGKILL
    (part,) = entries(folder)
    assert part.endswith(".part")
    cache = DiskCache(str(folder), 1100, ["k"])
    assert entries(folder) == [] and cache.lookup("k-1") is None  # its lock died with it, so its space is free again
    assert cache.fill("k-1", 1000, lambda f: f.write(b"y" * 1000) and None)
    assert (folder / "k-1").read_bytes() == b"y" * 1000


def test_the_part_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    cache, inside, go = DiskCache(str(tmp_path), 10_000, ["k"]), threading.Event(), threading.Event()

    def write(file: Any) -> None:
        inside.set()
        assert go.wait(60)
        file.write(b"z" * 100)

    writer = threading.Thread(target=cache.fill, args=("k-1", 100, write))
    writer.start()
    assert inside.wait(60)
    DiskCache(str(tmp_path), 10_000, ["k"])
    assert len(entries(tmp_path)) == 1
    go.set()
    writer.join()
    assert entries(tmp_path) == ["k-1"]


def _job(folder: str, manifest: str, cache: str, out: Any) -> None:
    reader = reader_of(Path(folder), DatasetManifest.from_json(manifest, "m"), CacheConfig(files=cache))
    batches, taken = epoch(reader)
    out.put((sorted(i for b in batches for i in b.columns["id"].tolist())[-1], taken.get("cache_miss", 0)))
    reader.close()


def test_two_jobs_share_one_cache_and_fetch_each_file_once(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path / "d", [[50]] * 6)
    context = mp.get_context("fork")
    out = context.Queue()
    args = (str(tmp_path / "d"), manifest.to_json(), str(tmp_path / "c"), out)
    jobs = [context.Process(target=_job, args=args) for _ in range(2)]
    for job in jobs:
        job.start()
    results = [out.get(timeout=120) for _ in jobs]
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert [last for last, _ in results] == [299, 299]
    assert sum(misses for _, misses in results) == 6
    assert entries(tmp_path / "c") == sorted(f.sha256 for f in manifest.files)


def _pressed_job(folder: str, text: str, config: CacheConfig, out: Any) -> None:
    reader = reader_of(Path(folder), DatasetManifest.from_json(text, folder), config)
    out.put([b.columns["id"].tolist() for number in range(3) for b in epoch(reader, number)[0]])
    reader.close()


def test_two_jobs_at_once_over_caches_too_small_for_the_data(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path / "d", [[50, 50]] * 6)
    limit = 2 * max(f.bytes for f in manifest.files)
    config = CacheConfig(files=str(tmp_path / "files"), files_max_bytes=limit)
    plain = reader_of(tmp_path / "d", manifest, CacheConfig())
    expected = [b.columns["id"].tolist() for number in range(3) for b in epoch(plain, number)[0]]
    plain.close()
    context = mp.get_context("fork")
    out = context.Queue()
    args = (str(tmp_path / "d"), manifest.to_json(), config, out)
    jobs = [context.Process(target=_pressed_job, args=args) for _ in range(2)]
    for job in jobs:
        job.start()
    assert [out.get(timeout=120) for _ in jobs] == [expected, expected]
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    held = [p.stat().st_size for p in (tmp_path / "files").iterdir() if p.is_file()]
    assert 0 < len(held) < len(manifest.files) and sum(held) <= limit


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_folder_is_said_and_reading_goes_on(
    make_dataset: MakeDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    manifest = make_dataset(tmp_path / "d", [[50]] * 3)

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with caplog.at_level(logging.WARNING):
        reader = reader_of(tmp_path / "d", manifest, CacheConfig(files=str(tmp_path / "c")))
        batches, _ = epoch(reader)
    assert sum(b.rows for b in batches) >= 150
    assert caplog.text.count("cannot be written") == 1 and os.strerror(code) in caplog.text
    assert entries(tmp_path / "c") == []
    reader.close()


def test_a_folder_that_cannot_be_made_is_said_and_reading_goes_on(
    make_dataset: MakeDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = make_dataset(tmp_path / "d", [[50]])
    (tmp_path / "file").write_bytes(b"")
    reader = reader_of(tmp_path / "d", manifest, CacheConfig(files=str(tmp_path / "file" / "below")))
    assert sum(b.rows for b in epoch(reader)[0]) == 50
    assert "cannot be written" in caplog.text
    reader.close()


def test_a_read_only_folder_that_another_job_filled_serves(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = make_dataset(tmp_path / "d", [[50]] * 3)
    config = CacheConfig(files=str(tmp_path / "c"))
    first = reader_of(tmp_path / "d", manifest, config)
    expected = [b.columns["id"].tolist() for b in epoch(first)[0]]
    first.close()
    for file in manifest.files:
        (tmp_path / "d" / file.path).write_bytes(b"?" * file.bytes)  # only the copies are good

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for writes in ("os.utime", "os.makedirs", "os.posix_fallocate"):
        monkeypatch.setattr(writes, refuse)
    reader = reader_of(tmp_path / "d", manifest, config)
    batches, taken = epoch(reader)
    assert [b.columns["id"].tolist() for b in batches] == expected
    assert taken["cache_hit"] >= 3 and "cache_miss" not in taken
    reader.close()
    assert caplog.text.count("cannot be written") == 1


def test_a_real_full_disk(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """A tmpfs of 64 KiB in a private mount namespace, where the machine lets us make one."""
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no private mounts here")
    program = f"""
        import subprocess
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "{tmp_path}"], check=True)
        from sparkring.training.data.cache import DiskCache
        cache = DiskCache("{tmp_path}/c", 10**9, ["k"])
        assert cache.fill("k-1", 10_000, lambda f: f.write(b"x" * 10_000) and None)
        assert cache.fill("k-2", 200_000, lambda f: f.write(b"x" * 200_000) and None) is None
        print(cache.enabled, cache.lookup("k-1"))
    """
    command = ["unshare", "-rm", sys.executable, "-c", textwrap.dedent(program)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (told.returncode, told.stdout.strip()) == (0, f"False {tmp_path}/c/k-1"), told.stderr


def test_cached_files_fall_back_to_storage_for_what_does_not_fit(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[20]])
    storage = open_storage(str(tmp_path))
    files = CachedFiles(storage, DiskCache(str(tmp_path / "c"), 10, []))
    files.check(manifest.files[0], content=True)
    with files.open(manifest.files[0]) as handle:
        assert handle.size() == manifest.files[0].bytes
    assert files.take_counts() == {"cache_full": 2}
