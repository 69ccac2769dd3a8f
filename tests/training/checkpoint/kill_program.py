"""Fork a child that saves three checkpoints and kills itself at its n-th write call, for every n there is.

usage: checkpoint_kill_program.py local|bucket FOLDER EVERY

`EVERY`: 1 for every n there is, 7 for every seventh.

Prints one JSON line per n: {"n", "call", "killed"}; the folder FOLDER/<n> holds what the child left. `local` is a real
disk (open, write, fsync, rename, delete); `bucket` an object store: a file appears whole when its stream is closed.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import torch
from fsspec.implementations.local import LocalFileSystem

import sparkring.conf.storage
from sparkring.conf.storage import Storage, open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.policy import Retention
from sparkring.training.tables.files import to_tensors
from sparkring.training.tables.hashing import BUCKETS
from sparkring.training.tables.table import Table, TableSpec


class Bomb:
    """Kills this process with SIGKILL at the n-th call; half of what was to be written has been by then."""

    def __init__(self, n: int, report: int):
        self.left, self.report = n, report

    def tick(self, call: str) -> bool:
        self.left -= 1
        return self.left == 0

    def die(self, call: str) -> None:
        os.write(self.report, call.encode())
        os.kill(os.getpid(), signal.SIGKILL)


class File:
    def __init__(self, inner: Any, bomb: Bomb, publish: Any = None):
        self.inner, self.bomb, self.publish, self.closed = inner, bomb, publish, False

    def write(self, data: Any) -> int:
        if self.bomb.tick("write"):
            self.inner.write(bytes(data)[: len(data) // 2])
            self.inner.flush()
            self.bomb.die("write")
        return int(self.inner.write(data))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.publish is not None:
            if self.bomb.tick("put"):
                self.bomb.die("put")
            self.publish(self.inner.getvalue())
        self.inner.close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def wire(module: Any, name: str, bomb: Bomb, label: str) -> None:
    real = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if bomb.tick(label):
            bomb.die(label)
        return real(*args, **kwargs)

    setattr(module, name, counted)


class Bucket(LocalFileSystem):  # type: ignore[misc]
    bomb: Bomb
    cachable = False

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode, **kwargs)

        def publish(data: bytes) -> None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path + "~").write_bytes(data)
            os.rename(path + "~", path)

        return File(io.BytesIO(), self.bomb, publish)


def wire_delete(bomb: Bomb) -> None:
    """Deleting a folder is many calls in truth: killed in it, half of its files are gone."""
    real = Storage.delete

    def counted(self: Storage, relative: str) -> None:
        if bomb.tick("delete"):
            files = self.list_files(relative) if self.size_bytes(relative) is None else []
            for path in files[: (len(files) + 1) // 2]:  # the marker sorts last
                real(self, path)
            bomb.die("delete")
        real(self, relative)

    Storage.delete = counted  # type: ignore[method-assign]


def storage_for(kind: str, folder: str, bomb: Bomb) -> Storage:
    wire_delete(bomb)
    if kind == "bucket":
        bucket = Bucket()
        bucket.bomb = bomb
        return Storage(pafs.PyFileSystem(pafs.FSSpecHandler(bucket)), folder, f"bucket:{folder}")
    counted_open = lambda *a, **k: File(builtins.open(*a, **k), bomb)  # noqa: E731, SIM115
    sparkring.conf.storage.open = counted_open  # type: ignore[attr-defined]
    for name in ("fsync", "replace", "makedirs"):
        wire(os, name, bomb, name)
    return open_storage(folder)


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), float(step)), "b": torch.full((3,), -float(step))}, "lr": 1.0 / step}


def table_of(step: int) -> Table:
    """A table after so many pushes."""
    table = Table(TableSpec("users", 2))
    for number in range(step):
        push(table, number)
    return table


def push(table: Table, number: int) -> None:
    ids = np.arange(3000) if number == 0 else np.arange(number, number + 9)
    table.push(ids, np.full((len(ids), 2), 0.5, np.float32), 0.1)


def child(kind: str, folder: str, n: int, report: int) -> None:
    os.makedirs(folder, exist_ok=True)
    bomb = Bomb(n, report)
    checkpointer = Checkpointer(storage_for(kind, folder, bomb), keep=Retention(last=1, best=0))
    table = table_of(0)
    for step in (1, 2, 3):
        push(table, step - 1)

        def copy(most_bytes: int, whole: bool = step == 3) -> dict[str, torch.Tensor]:
            return to_tensors(table.save(np.arange(BUCKETS), -1 if whole else most_bytes))

        checkpointer.save(step, state_of(step), {"step": step}, tables={"users": copy})
        checkpointer.wait()
        os.write(report, f"[{step}]".encode())


def main() -> None:
    kind, folder, every = sys.argv[1:]
    torch.set_num_threads(1)
    for n in range(1, 1000, int(every)):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                child(kind, f"{folder}/{n}", n, write)
            finally:
                os._exit(0)
        os.close(write)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        killed = os.WIFSIGNALED(status)
        print(json.dumps({"n": n, "said": said, "killed": killed}), flush=True)
        if not killed:
            return


if __name__ == "__main__":
    main()
