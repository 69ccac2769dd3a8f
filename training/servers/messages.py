"""Every request of a worker to a server, and every reply: frozen dataclasses, which protocol.py sends with raw bytes.

A message's docstring says what the bytes next to it are; most have none. Ids are int64, rows and dense parts have the
types of the tables and parameters, and `ids` counts the ids of each table. A worker is named by its rank, a step is a
step of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from sparkring.training.data.batch import BatchShare


class ShardStatus(IntEnum):
    """What became of a push."""

    APPLIED = 0
    HELD = 1  # bound 0: until all have come
    REPEATED = 2  # its step is done: acknowledged, not applied again
    REJECTED = 3  # its lag is above max_lag: to be computed again
    SKIPPED = 4  # it is not finite: the step is done, and nothing changed
    LATE = 5  # backup workers: its step is made without it


@dataclass(frozen=True)
class Done:
    """Reply: it is done. Bytes: what was asked for, if anything."""


@dataclass(frozen=True)
class Refused:
    """Reply: it cannot be done."""

    reason: str


# ---- before steps


@dataclass(frozen=True)
class DefineRequest:
    """Bytes: the Definition. The first worker's makes the shard, the others' must be the same."""


@dataclass(frozen=True)
class DefineReply:
    begun_at: int | None  # step of the last coordinated stop; None: no worker has started


@dataclass(frozen=True)
class BeginRequest:
    """From rank 0, before any step."""

    clock: int


@dataclass(frozen=True)
class RestartRequest:
    """From a rank that was replaced."""

    worker: int


@dataclass(frozen=True)
class RestartReply:
    clock: int  # to begin with
    attempt: int  # number of its try
    version: int


# ---- a step


@dataclass(frozen=True)
class PullRequest:
    """Waits until the bound allows the step. Bytes: ids of each table."""

    worker: int
    clock: int
    attempt: int  # number of the try
    ids: tuple[int, ...]


@dataclass(frozen=True)
class PullReply:
    """Bytes: the dense part, and the rows of each table."""

    version: int


@dataclass(frozen=True)
class LookUpRequest:
    """Waits for nothing. Bytes: ids of each table. Done has their rows."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class PushRequest:
    """Bytes: dense gradients, then ids and gradients of each table."""

    worker: int
    clock: int
    attempt: int
    version: int  # of the pull
    norm: float  # of the worker's whole gradient
    lr: float
    ids: tuple[int, ...]
    absent: tuple[int, ...]  # numbers of slices that no gradient reached


@dataclass(frozen=True)
class GradientSum:
    """A server's slice of a step's gradient, from all workers."""

    squares: float  # sum of its squares
    bad_worker: int | None  # whose batch share was not finite


@dataclass(frozen=True)
class PushReply:
    """With bound 0 and without backup workers: once all pushes of the step have come, with their sum."""

    status: ShardStatus
    sum: GradientSum | None


@dataclass(frozen=True)
class SettleRequest:
    """With bound 0: apply the step's sum times `factor`."""

    clock: int
    factor: float


# ---- backup workers (backup.py)


@dataclass(frozen=True)
class TakeRequest:
    """Waits until the worker's batch share for the step is chosen, before the step `limit`."""

    worker: int
    step: int
    limit: int


@dataclass(frozen=True)
class TakeReply:
    share: BatchShare | None  # None: the step needs no gradient of this worker


@dataclass(frozen=True)
class ChosenShare:
    """A gradient that makes a step."""

    worker: int
    share: BatchShare


@dataclass(frozen=True)
class MadeStep:
    """What became of a step, for one worker."""

    norm: float
    is_counted: bool  # this worker's gradient is in it
    bad_worker: int | None


@dataclass(frozen=True)
class ChooseRequest:
    """Waits until the step's gradients are chosen. `has_gradient`: all servers have this worker's."""

    worker: int
    step: int
    has_gradient: bool


@dataclass(frozen=True)
class ChooseReply:
    chosen: tuple[ChosenShare, ...]
    made: MadeStep | None  # None: the step is to be made of `chosen`


@dataclass(frozen=True)
class AddUpRequest:
    step: int
    chosen: tuple[ChosenShare, ...]


@dataclass(frozen=True)
class AddUpReply:
    sum: GradientSum | None  # None: the step is long made


@dataclass(frozen=True)
class MadeRequest:
    """All servers have made the step."""

    step: int
    norm: float
    bad_worker: int | None


@dataclass(frozen=True)
class CountedRequest:
    worker: int


@dataclass(frozen=True)
class CountedReply:
    shares: tuple[BatchShare, ...]  # of the worker, that made steps since the last coordinated stop


# ---- content


@dataclass(frozen=True)
class DenseRequest:
    """Done has named tensors: `weights`, and with `with_state` what the optimizer keeps."""

    with_state: bool


@dataclass(frozen=True)
class LoadDenseRequest:
    """Bytes: named tensors, as a DenseRequest with state gives them."""


@dataclass(frozen=True)
class DumpRequest:
    """Done has the named tensors of a TableDump."""

    table: int
    most_bytes: int  # of changes
    saving: bool  # for a checkpoint
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class LoadTableRequest:
    """Bytes: the named tensors of a TableDump."""

    table: int


@dataclass(frozen=True)
class ClearTablesRequest:
    """Forget all rows."""


@dataclass(frozen=True)
class BeginTableRequest:
    """Bytes: named tensors `ids` and `rows`, of another model."""

    table: int


@dataclass(frozen=True)
class WriteLogRequest:
    """Write the events up to a coordinated stop, where all pushes below the step are done."""

    clock: int


@dataclass(frozen=True)
class CountsRequest:
    """Done has JSON: what the server has seen."""


# ---- what workers tell each other (rounds.py)


@dataclass(frozen=True)
class RoundRequest:
    """Waits until all workers have given a value. Bytes: this worker's."""

    worker: int
    scope: int
    number: int
    channel: str


@dataclass(frozen=True)
class RoundReply:
    """Bytes: the values of all workers, joined."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class LastScopeRequest:
    worker: int
    channel: str


@dataclass(frozen=True)
class LastScopeReply:
    scope: int


@dataclass(frozen=True)
class KeepRequest:
    """Bytes: a value, for a worker that is replaced."""

    name: str


@dataclass(frozen=True)
class KeptRequest:
    """Done has the value."""

    name: str


WorkerRequest: TypeAlias = (
    DefineRequest
    | BeginRequest
    | RestartRequest
    | PullRequest
    | LookUpRequest
    | PushRequest
    | SettleRequest
    | TakeRequest
    | ChooseRequest
    | AddUpRequest
    | MadeRequest
    | CountedRequest
    | DenseRequest
    | LoadDenseRequest
    | DumpRequest
    | LoadTableRequest
    | ClearTablesRequest
    | BeginTableRequest
    | WriteLogRequest
    | CountsRequest
    | RoundRequest
    | LastScopeRequest
    | KeepRequest
    | KeptRequest
)
ServerReply: TypeAlias = (
    Done
    | Refused
    | DefineReply
    | RestartReply
    | PullReply
    | PushReply
    | TakeReply
    | ChooseReply
    | AddUpReply
    | CountedReply
    | RoundReply
    | LastScopeReply
)
