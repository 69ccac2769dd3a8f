"""One server process: a shard, one thread per connection, one lock.

A worker's requests on a connection are answered in their order. Some wait: a pull until the bound allows it, a push
with bound 0 until all have come, a round until all have taken part; with backup workers, who has no gradient to give
until it is known which make the step. Where the shard finds its own promise broken the
whole process ends, with the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkring.conf.storage import Storage
from sparkring.training.data.batch import BatchShare
from sparkring.training.launch.channel.connection import listen
from sparkring.training.servers.backup import Backup
from sparkring.training.servers.definition import OptimizerFactory, decoded
from sparkring.training.servers.event_log import LogHeader, encode, file_name
from sparkring.training.servers.protocol import (
    Buffer,
    Frame,
    ServerReply,
    ServerRequest,
    admit,
    bits_float,
    float_bits,
    pack_tensors,
    raw,
    receive,
    send,
    unpack_tensors,
)
from sparkring.training.servers.rounds import RoundKey, Rounds
from sparkring.training.servers.shard import BrokenPromise, Push, ServerShard, ShardStatus
from sparkring.training.tables.files import to_tensors
from sparkring.training.tables.hashing import Ids
from sparkring.training.tables.table import TableDump

log = logging.getLogger(__name__)
ACCEPT_AGAIN_S = 0.2  # after a failure
MAX_PENDING = 64  # connections that have not proven themselves; more are closed at once
Reply = tuple[list[int], list[Buffer]]


class RefusedRequest(ValueError):
    """A request that cannot be done; the worker gets the reason."""


@dataclass(frozen=True)
class ServerPlace:
    """Which server this is. `events`: the run's folder of event logs; None: none are written."""

    server: int
    servers: int
    workers: int
    attempt: int
    secret: bytes
    events: Storage | None = None


class Server:
    """Answers the workers of one attempt, until it is closed."""

    def __init__(self, place: ServerPlace, make_optimizer: OptimizerFactory, address: str = "127.0.0.1") -> None:
        """Listen on a free port.

        Args:
            place: which server this is.
            make_optimizer: of the dense slices.
            address: to listen on.
        """
        self.place, self._make_optimizer = place, make_optimizer
        self._listener = listen(address, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._pending = threading.Semaphore(MAX_PENDING)
        self._shard: ServerShard | None = None
        self._backup: Backup | None = None  # of the first server
        self._rounds = Rounds(place.workers)
        self._definition = b""
        self._kept: dict[str, bytes] = {}
        self._begun_at: int | None = None  # clocks done at the last cut; None: workers have not begun
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._unaccepted = 0  # connections in a row

    def run(self) -> None:
        """Accept connections until `close`, or until the shard's promise is broken, which is raised."""
        threading.Thread(target=self._accept, name="servers-accept", daemon=True).start()
        self._closed.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        for sock in list(self._connections):
            _shut(sock)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # closed; else such as no file descriptor left: others end and give theirs back
                if not self._closed.wait(ACCEPT_AGAIN_S):
                    self._log_unaccepted(error)
                continue
            if not self._pending.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._connection, args=(sock,), name="servers-worker", daemon=True).start()
                self._unaccepted = 0
            except RuntimeError as error:  # no thread can be started
                self._pending.release()
                sock.close()
                self._log_unaccepted(error)

    def _log_unaccepted(self, error: Exception) -> None:
        """Log the first of a row of connections that could not be accepted."""
        self._unaccepted += 1
        if self._unaccepted == 1:
            place = f"server {self.place.server} of {self.place.servers}"
            log.warning("%s cannot accept connections for now, and tries again: %s", place, error)

    def _connection(self, sock: socket.socket) -> None:
        try:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                admit(sock, self.place.secret)
            finally:
                self._pending.release()
            self._connections.add(sock)
            while True:
                self._serve(sock, receive(sock))
        except (OSError, EOFError):  # unproven, or gone; the agent sees a worker's death
            pass
        except BaseException as error:
            log.error("server %d of %d: %s", self.place.server, self.place.servers, error)
            with self._changed:
                self._failure = self._failure or error
            self._closed.set()
        finally:
            self._connections.discard(sock)
            _shut(sock)

    def _serve(self, sock: socket.socket, frame: Frame) -> None:
        try:
            action = ACTIONS[ServerRequest(frame.kind)]
        except ValueError:
            send(sock, ServerReply.REFUSED, (), [f"request {frame.kind}: unknown".encode()])
            return
        try:
            with self._changed:
                numbers, body = action(self, frame)
                self._changed.notify_all()
        except BrokenPromise:
            raise
        except Exception as error:
            if frame.kind in CHANGING and not isinstance(error, RefusedRequest | ConnectionError):
                raise  # what the shard holds may be half changed
            send(sock, ServerReply.REFUSED, (), [f"{type(error).__name__}: {error}".encode()])
            return
        send(sock, ServerReply.DONE, numbers, body)

    @property
    def shard(self) -> ServerShard:
        if self._shard is None:
            raise RefusedRequest("the servers have no definition yet")
        return self._shard

    @property
    def backup(self) -> Backup:
        if self._backup is None:
            raise RefusedRequest("there are no backup workers, or they have not begun, or this is not the first server")
        return self._backup

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait, without the lock, until other requests have made it so."""
        self._changed.wait_for(lambda: until() or self._closed.is_set())
        if self._closed.is_set():
            raise ConnectionError("the server ends")

    # --- what workers ask ----------------------------------------------------------------------------------------

    def define(self, frame: Frame) -> Reply:
        """Body: the Definition. The first makes the shard, the others must be the same."""
        given = bytes(frame.body)
        if self._shard is None:
            definition = decoded(given)
            if definition.workers != self.place.workers:
                raise RefusedRequest(
                    f"a definition for {definition.workers} ranks, where there are {self.place.workers}"
                )
            self._shard = ServerShard(definition, self.place.server, self.place.servers, self._make_optimizer)
            self._definition = given
        elif given != self._definition:
            raise RefusedRequest("model.factory: made models of other parameters on other ranks")
        return [-1 if self._begun_at is None else self._begun_at], []

    def begin(self, frame: Frame) -> Reply:
        """Numbers: the clock. Sent by rank 0, before any clock."""
        (clock,) = frame.numbers
        self.shard.begin(clock)
        self._begun_at, definition = clock, self.shard.definition
        if definition.backup and self.place.server == 0:
            self._backup = Backup(definition.workers, definition.backup, clock)
        return [], []

    def restart(self, frame: Frame) -> Reply:
        clock, attempt = self.shard.restart(*frame.numbers)
        if self._backup is not None:  # servers may have made a step whose outcome no worker knows
            clock = self._backup.restart(*frame.numbers)
        return [clock, attempt, self.shard.version], []

    def pull(self, frame: Frame) -> Reply:
        """Numbers: worker, clock, try, ids of each table; body: the ids."""
        worker, clock, attempt, *counts = frame.numbers
        self._wait(lambda: self.shard.may_begin(worker, clock, attempt))
        version, weights, rows = self.shard.pull(worker, clock, attempt, _ids(frame.body, counts))
        return [version], [raw(weights), *(raw(torch.from_numpy(each)) for each in rows)]

    def look_up(self, frame: Frame) -> Reply:
        """Numbers: ids of each table; body: the ids. Waits for nothing."""
        rows = self.shard.look_up(_ids(frame.body, frame.numbers))
        return [], [raw(torch.from_numpy(each)) for each in rows]

    def push(self, frame: Frame) -> Reply:
        """Numbers: see `push_numbers`; body: dense gradients, ids, rows. Answers status, and with bound 0 the rest."""
        push = read_push(frame, self.shard)
        status = self.shard.push(push)
        if not self.shard.definition.synchronous or self.shard.definition.backup:
            return [status], []
        self._changed.notify_all()
        self._wait(lambda: self.shard.answer(push.clock) is not None)
        squares, bad = self.shard.answer(push.clock) or (0.0, None)
        return [status, float_bits(squares), -1 if bad is None else bad], []

    def settle(self, frame: Frame) -> Reply:
        clock, factor = frame.numbers
        self.shard.settle(clock, bits_float(factor))
        return [], []

    # --- backup workers ------------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> Reply:
        """Numbers: worker, step, limit. Answers the share's clock and stream, or nothing to compute.

        Waits until it may be taken.
        """
        backup = self.backup
        self._wait(lambda: backup.may_take(*frame.numbers))
        part = backup.take(*frame.numbers)
        return [] if part is None else [part.clock, part.stream], []

    def choose(self, frame: Frame) -> Reply:
        """Numbers: worker, step, whether all servers have its gradient. Waits until it is known which make the step.

        Answers 0 and worker, clock, stream of each; for a step that is made 1, its norm, the worker whose part was not
        finite, or -1, and whether this worker's counted.
        """
        worker, step, has_gradient = frame.numbers
        backup = self.backup
        if has_gradient:
            backup.ready(worker, step)
            self._changed.notify_all()
        self._wait(lambda: backup.chosen(step) is not None or backup.step > step)
        chosen = backup.chosen(step)
        if chosen is not None:
            return [0, *(number for who, part in chosen for number in (who, part.clock, part.stream))], []
        outcome = backup.outcome(worker, step)
        if outcome is None:
            raise RefusedRequest(f"rank {worker} asks for step {step} again, which it has heard of")
        bad = -1 if outcome.bad_worker is None else outcome.bad_worker
        return [1, float_bits(outcome.norm), bad, int(worker in outcome.counted)], []

    def add_up(self, frame: Frame) -> Reply:
        """Numbers: step, and worker, clock, stream of what makes it. Answers as a push with bound 0; nothing where the
        step is long made."""
        step, *numbers = frame.numbers
        answer = self.shard.add_up(step, read_chosen(numbers))
        if answer is None:
            return [], []
        squares, bad = answer
        return [ShardStatus.HELD, float_bits(squares), -1 if bad is None else bad], []

    def made(self, frame: Frame) -> Reply:
        """Numbers: step, its norm, the worker whose part was not finite, or -1. All servers have made it."""
        step, norm, bad = frame.numbers
        self.backup.made(step, bits_float(norm), None if bad < 0 else bad)
        return [], []

    def counted(self, frame: Frame) -> Reply:
        parts = self.backup.counted_parts(*frame.numbers)
        return [number for part in parts for number in (part.clock, part.stream)], []

    # --- content -------------------------------------------------------------------------------------------------

    def dense(self, frame: Frame) -> Reply:
        """Numbers: whether the optimizer's state is wanted beside the weights."""
        (with_state,) = frame.numbers
        return [], pack_tensors(self.shard.dense_state() if with_state else {"weights": self.shard.weights})

    def load_dense(self, frame: Frame) -> Reply:
        self.shard.load_dense(unpack_tensors(frame.body))
        return [], []

    def dump(self, frame: Frame) -> Reply:
        """Numbers: table, most bytes of changes, whether it is for a checkpoint, and the buckets."""
        table, most_bytes, saving, *buckets = frame.numbers
        wanted = np.array(buckets, np.int64)
        dump = self.shard.save(table, wanted, most_bytes) if saving else self.shard.dump(table, wanted)
        return [], pack_tensors(to_tensors(dump))

    def load_table(self, frame: Frame) -> Reply:
        arrays = {name: tensor.numpy() for name, tensor in unpack_tensors(frame.body).items()}
        self.shard.load_table(frame.numbers[0], TableDump(**arrays))
        return [], []

    def clear_tables(self, frame: Frame) -> Reply:
        self.shard.clear_tables()
        return [], []

    def begin_table(self, frame: Frame) -> Reply:
        """Numbers: table; body: `ids` and `rows` of another model."""
        given = unpack_tensors(frame.body)
        self.shard.begin_table(frame.numbers[0], given["ids"].numpy(), given["rows"].numpy())
        return [], []

    def write_log(self, frame: Frame) -> Reply:
        """Numbers: the clock of a cut, where all is drained."""
        (clock,) = frame.numbers
        if not self.shard.is_drained(clock):
            raise BrokenPromise(f"the log is cut at clock {clock}, where {self.shard.applied} are done")
        if self._backup is not None:
            try:
                self._backup.cut(clock)
            except ValueError as error:
                raise BrokenPromise(str(error)) from None
        begin, place = self._begun_at or 0, self.place
        if place.events is not None and (clock > begin or self.shard.events):
            header = LogHeader(
                attempt=place.attempt,
                server=place.server,
                servers=place.servers,
                workers=self.shard.definition.parts,
                begin=begin,
                end=clock,
                bound=self.shard.definition.bound,
                damp=self.shard.definition.damp,
                digest=self.shard.digest(),
            )
            name = file_name(place.attempt, begin, clock, place.server)
            place.events.put_atomic(name, encode(header, self.shard.take_events()))
        self._begun_at = clock
        self.shard.cut()
        return [], []

    def counts(self, frame: Frame) -> Reply:
        tables = {
            table.spec.name: [*table.counts[self.shard.own_buckets].sum(axis=0).tolist(), table.bytes]
            for table in self.shard.tables
        }
        dense = sum(t.numel() * t.element_size() for t in self.shard.dense_state().values())
        late = dict(sorted(self._backup.late.items())) if self._backup is not None else {}
        found = self.shard.counts.to_json() | {"late": late, "tables": tables, "dense_bytes": dense}
        return [], [json.dumps(found).encode()]

    def round(self, frame: Frame) -> Reply:
        """Numbers: worker, scope, number; body: the channel's name, a zero byte, the worker's value."""
        worker, scope, number = frame.numbers
        channel, _, value = bytes(frame.body).partition(b"\0")
        key, rounds = RoundKey(scope, channel.decode(), number), self._rounds
        rounds.give(key, worker, value)
        self._changed.notify_all()
        self._wait(lambda: rounds.answers(key) is not None)
        answers: list[Any] = rounds.answers(key) or []
        return [len(answer) for answer in answers], answers

    def last_scope(self, frame: Frame) -> Reply:
        return [self._rounds.last_scope(bytes(frame.body).decode(), frame.numbers[0])], []

    def keep(self, frame: Frame) -> Reply:
        name, _, value = bytes(frame.body).partition(b"\0")
        self._kept[name.decode()] = value
        return [], []

    def kept(self, frame: Frame) -> Reply:
        return [], [self._kept[bytes(frame.body).decode()]]


ACTIONS: dict[ServerRequest, Callable[[Server, Frame], Reply]] = {
    ServerRequest.DEFINE: Server.define,
    ServerRequest.BEGIN: Server.begin,
    ServerRequest.RESTART: Server.restart,
    ServerRequest.PULL: Server.pull,
    ServerRequest.LOOK_UP: Server.look_up,
    ServerRequest.PUSH: Server.push,
    ServerRequest.SETTLE: Server.settle,
    ServerRequest.DENSE: Server.dense,
    ServerRequest.LOAD_DENSE: Server.load_dense,
    ServerRequest.DUMP: Server.dump,
    ServerRequest.LOAD_TABLE: Server.load_table,
    ServerRequest.CLEAR_TABLES: Server.clear_tables,
    ServerRequest.BEGIN_TABLE: Server.begin_table,
    ServerRequest.WRITE_LOG: Server.write_log,
    ServerRequest.COUNTS: Server.counts,
    ServerRequest.ROUND: Server.round,
    ServerRequest.LAST_SCOPE: Server.last_scope,
    ServerRequest.KEEP: Server.keep,
    ServerRequest.KEPT: Server.kept,
    ServerRequest.TAKE: Server.take,
    ServerRequest.CHOOSE: Server.choose,
    ServerRequest.ADD_UP: Server.add_up,
    ServerRequest.MADE: Server.made,
    ServerRequest.COUNTED: Server.counted,
}


CHANGING = (ServerRequest.PUSH, ServerRequest.ADD_UP, ServerRequest.SETTLE)


def read_chosen(numbers: Sequence[int]) -> list[tuple[int, BatchShare]]:
    """(worker, part) of each three numbers: worker, clock, stream."""
    return [(who, BatchShare(clock, stream)) for who, clock, stream in zip(*[iter(numbers)] * 3, strict=True)]


def _ids(body: Buffer, counts: Any) -> list[Ids]:
    """The ids of each table, (n,)."""
    edges = np.cumsum([0, *counts])
    if len(body) != 8 * edges[-1]:
        raise RefusedRequest(f"{len(body)} bytes of ids, for {edges[-1]} of them")
    every = np.frombuffer(body, np.int64)
    return [every[start:stop] for start, stop in itertools.pairwise(edges)]


def read_push(frame: Frame, shard: ServerShard) -> Push:
    """Read a push: numbers are worker, clock, try, version, norm, lr, ids of each table, numbers of absent slices."""
    worker, clock, attempt, version, norm, lr, *rest = frame.numbers
    specs = [table.spec for table in shard.tables]
    counts, absent = rest[: len(specs)], rest[len(specs) :]
    size, rows = len(shard.weights), []
    at = size * shard.weights.element_size()
    if len(frame.body) < at:
        raise RefusedRequest(f"a push of {len(frame.body)} bytes, whose dense part alone has {at}")
    dense = torch.frombuffer(frame.body, dtype=shard.weights.dtype, count=size) if size else shard.weights.clone()
    for spec, count in zip(specs, counts, strict=True):
        ids = np.frombuffer(frame.body, np.int64, count, at)
        at += 8 * count
        grads = np.frombuffer(frame.body, spec.dtype, count * spec.dim, at).reshape(count, spec.dim)
        at += grads.nbytes
        rows.append((ids, grads))
    if at != len(frame.body):
        raise RefusedRequest(f"a push of {len(frame.body)} bytes, which should have {at}")
    return Push(worker, clock, attempt, version, bits_float(norm), bits_float(lr), dense, frozenset(absent), rows)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
