"""What every reader is given: what to read, and which share of it this rank reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage

AllGather = Callable[[Any], list[Any]]
"""Collective: one JSON-able value per rank in, the values of all ranks out, in the order of ranks."""

OnProgress = Callable[[str], None]
"""Called with a new text after every piece of long work, so that a watchdog does not take it for a hang."""


def gather_alone(value: Any) -> list[Any]:
    """Gather from a single rank."""
    return [value]


def no_progress(text: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class ReadRequest:
    """One split of one dataset, in global batches of rows; `columns` None: all."""

    storage: Storage
    manifest: DatasetManifest
    split: str
    columns: Sequence[str] | None
    global_batch: int

    @property
    def files_folder(self) -> Storage:
        """The folder that the files' paths are relative to."""
        return self.manifest.files_folder(self.storage)


@dataclass(frozen=True)
class DataRank:
    """One rank among the `size` that share every global batch.

    device: where its batches go; None leaves them on the host. gather: asks the other data ranks; only quarantine and
    filters do, before the order is planned. on_progress: called while whole files are read before the first batch.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    gather: AllGather = gather_alone
    on_progress: OnProgress = no_progress
