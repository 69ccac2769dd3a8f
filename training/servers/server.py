"""One server process: a shard, one thread per connection, one lock.

A worker's requests on a connection are answered in their order. Some wait: a pull until the bound allows it, a push
with bound 0 until all have come, a round until all have taken part; with backup workers, a rank without a gradient
waits until the step's gradients are chosen. If the shard finds its own bound broken, the process ends with the reason.
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

from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage
from sparkring.training.launch.channel.connection import listen
from sparkring.training.servers import messages
from sparkring.training.servers.backup import Backup
from sparkring.training.servers.codec import Buffer
from sparkring.training.servers.definition import OptimizerFactory, decoded
from sparkring.training.servers.event_log import LogHeader, encode, file_name
from sparkring.training.servers.protocol import (
    REQUESTS,
    Frame,
    ServerProtocolError,
    admit,
    message_of,
    pack_tensors,
    raw,
    receive,
    send,
    unpack_tensors,
)
from sparkring.training.servers.rounds import RoundKey, Rounds
from sparkring.training.servers.shard import BrokenPromise, Push, ServerShard
from sparkring.training.tables.files import to_tensors
from sparkring.training.tables.hashing import Ids
from sparkring.training.tables.table import TableDump

log = logging.getLogger(__name__)
ACCEPT_AGAIN_S = 0.2  # after a failure
MAX_PENDING = 64  # connections that have not proven themselves; more are closed at once
Answer = tuple[messages.ServerReply, Sequence[Buffer]]
DONE: Answer = (messages.Done(), ())


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
            place: number of this server, and of workers.
            make_optimizer: makes the optimizer of the dense slices.
            address: address to listen on.
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
        self._begun_at: int | None = None  # steps done at the last coordinated stop; None: workers have not started
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
            request = message_of(frame, REQUESTS)
        except ServerProtocolError as error:
            send(sock, messages.Refused(str(error)))
            return
        try:
            with self._changed:
                reply, body = ACTIONS[type(request)](self, request, frame.body)
                self._changed.notify_all()
        except BrokenPromise:
            raise
        except Exception as error:
            if isinstance(request, CHANGING) and not isinstance(error, RefusedRequest | ConnectionError):
                raise  # what the shard holds may be half changed
            send(sock, messages.Refused(f"{type(error).__name__}: {error}"))
            return
        send(sock, reply, body)

    @property
    def shard(self) -> ServerShard:
        if self._shard is None:
            raise RefusedRequest("the servers have no definition yet")
        return self._shard

    @property
    def backup(self) -> Backup:
        if self._backup is None:
            raise RefusedRequest("there are no backup workers, they have not started, or this is not the first server")
        return self._backup

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait, without the lock, until other requests have made it so."""
        self._changed.wait_for(lambda: until() or self._closed.is_set())
        if self._closed.is_set():
            raise ConnectionError("the server ends")

    # --- what workers ask ----------------------------------------------------------------------------------------

    def define(self, request: messages.DefineRequest, body: Buffer) -> Answer:
        given = bytes(body)
        if self._shard is None:
            definition = decoded(given)
            if definition.workers != self.place.workers:
                raise RefusedRequest(
                    f"a definition for {count_of(definition.workers, 'rank')}, where there are {self.place.workers}"
                )
            self._shard = ServerShard(definition, self.place.server, self.place.servers, self._make_optimizer)
            self._definition = given
        elif given != self._definition:
            raise RefusedRequest("model.factory: made models of other parameters on other ranks")
        return messages.DefineReply(self._begun_at), ()

    def begin(self, request: messages.BeginRequest, body: Buffer) -> Answer:
        self.shard.begin(request.clock)
        self._begun_at, definition = request.clock, self.shard.definition
        if definition.backup and self.place.server == 0:
            self._backup = Backup(definition.workers, definition.backup, request.clock)
        return DONE

    def restart(self, request: messages.RestartRequest, body: Buffer) -> Answer:
        clock, attempt = self.shard.restart(request.worker)
        if self._backup is not None:  # servers may have made a step whose outcome no worker knows
            clock = self._backup.restart(request.worker)
        return messages.RestartReply(clock, attempt, self.shard.version), ()

    def pull(self, request: messages.PullRequest, body: Buffer) -> Answer:
        which = request.worker, request.clock, request.attempt
        self._wait(lambda: self.shard.may_begin(*which))
        version, weights, rows = self.shard.pull(*which, _ids(body, request.ids))
        return messages.PullReply(version), [raw(weights), *(raw(torch.from_numpy(each)) for each in rows)]

    def look_up(self, request: messages.LookUpRequest, body: Buffer) -> Answer:
        rows = self.shard.look_up(_ids(body, request.ids))
        return messages.Done(), [raw(torch.from_numpy(each)) for each in rows]

    def push(self, request: messages.PushRequest, body: Buffer) -> Answer:
        push = read_push(request, body, self.shard)
        status = self.shard.push(push)
        if not self.shard.definition.synchronous or self.shard.definition.backup:
            return messages.PushReply(status, None), ()
        self._changed.notify_all()
        self._wait(lambda: self.shard.answer(push.clock) is not None)
        return messages.PushReply(status, messages.GradientSum(*(self.shard.answer(push.clock) or (0.0, None)))), ()

    def settle(self, request: messages.SettleRequest, body: Buffer) -> Answer:
        self.shard.settle(request.clock, request.factor)
        return DONE

    # --- backup workers ------------------------------------------------------------------------------------------

    def take(self, request: messages.TakeRequest, body: Buffer) -> Answer:
        backup, which = self.backup, (request.worker, request.step, request.limit)
        self._wait(lambda: backup.may_take(*which))
        return messages.TakeReply(backup.take(*which)), ()

    def choose(self, request: messages.ChooseRequest, body: Buffer) -> Answer:
        worker, step, backup = request.worker, request.step, self.backup
        if request.has_gradient:
            backup.ready(worker, step)
            self._changed.notify_all()
        self._wait(lambda: backup.chosen(step) is not None or backup.step > step)
        chosen = backup.chosen(step)
        if chosen is not None:
            return messages.ChooseReply(tuple(messages.ChosenShare(who, share) for who, share in chosen), None), ()
        outcome = backup.outcome(worker, step)
        if outcome is None:
            raise RefusedRequest(f"rank {worker} asks for step {step} again, which it has heard of")
        return messages.ChooseReply(
            (), messages.MadeStep(outcome.norm, worker in outcome.counted, outcome.bad_worker)
        ), ()

    def add_up(self, request: messages.AddUpRequest, body: Buffer) -> Answer:
        answer = self.shard.add_up(request.step, [(each.worker, each.share) for each in request.chosen])
        return messages.AddUpReply(None if answer is None else messages.GradientSum(*answer)), ()

    def made(self, request: messages.MadeRequest, body: Buffer) -> Answer:
        self.backup.made(request.step, request.norm, request.bad_worker)
        return DONE

    def counted(self, request: messages.CountedRequest, body: Buffer) -> Answer:
        return messages.CountedReply(tuple(self.backup.counted_parts(request.worker))), ()

    # --- content -------------------------------------------------------------------------------------------------

    def dense(self, request: messages.DenseRequest, body: Buffer) -> Answer:
        state = self.shard.dense_state() if request.with_state else {"weights": self.shard.weights}
        return messages.Done(), pack_tensors(state)

    def load_dense(self, request: messages.LoadDenseRequest, body: Buffer) -> Answer:
        self.shard.load_dense(unpack_tensors(body))
        return DONE

    def dump(self, request: messages.DumpRequest, body: Buffer) -> Answer:
        table, wanted = request.table, np.array(request.buckets, np.int64)
        saved = self.shard.save(table, wanted, request.most_bytes) if request.saving else self.shard.dump(table, wanted)
        return messages.Done(), pack_tensors(to_tensors(saved))

    def load_table(self, request: messages.LoadTableRequest, body: Buffer) -> Answer:
        arrays = {name: tensor.numpy() for name, tensor in unpack_tensors(body).items()}
        self.shard.load_table(request.table, TableDump(**arrays))
        return DONE

    def clear_tables(self, request: messages.ClearTablesRequest, body: Buffer) -> Answer:
        self.shard.clear_tables()
        return DONE

    def begin_table(self, request: messages.BeginTableRequest, body: Buffer) -> Answer:
        given = unpack_tensors(body)
        self.shard.begin_table(request.table, given["ids"].numpy(), given["rows"].numpy())
        return DONE

    def write_log(self, request: messages.WriteLogRequest, body: Buffer) -> Answer:
        clock = request.clock
        if not self.shard.is_drained(clock):
            raise BrokenPromise(f"coordinated stop at step {clock}, where {self.shard.applied} are done")
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
        return DONE

    def counts(self, request: messages.CountsRequest, body: Buffer) -> Answer:
        tables = {
            table.spec.name: [*table.counts[self.shard.own_buckets].sum(axis=0).tolist(), table.bytes]
            for table in self.shard.tables
        }
        dense = sum(t.numel() * t.element_size() for t in self.shard.dense_state().values())
        late = dict(sorted(self._backup.late.items())) if self._backup is not None else {}
        found = self.shard.counts.to_json() | {"late": late, "tables": tables, "dense_bytes": dense}
        return messages.Done(), [json.dumps(found).encode()]

    def round(self, request: messages.RoundRequest, body: Buffer) -> Answer:
        key, rounds = RoundKey(request.scope, request.channel, request.number), self._rounds
        rounds.give(key, request.worker, bytes(body))
        self._changed.notify_all()
        self._wait(lambda: rounds.answers(key) is not None)
        answers = rounds.answers(key) or []
        return messages.RoundReply(tuple(map(len, answers))), answers

    def last_scope(self, request: messages.LastScopeRequest, body: Buffer) -> Answer:
        return messages.LastScopeReply(self._rounds.last_scope(request.channel, request.worker)), ()

    def keep(self, request: messages.KeepRequest, body: Buffer) -> Answer:
        self._kept[request.name] = bytes(body)
        return DONE

    def kept(self, request: messages.KeptRequest, body: Buffer) -> Answer:
        return messages.Done(), [self._kept[request.name]]


ACTIONS: dict[type, Callable[[Server, Any, Buffer], Answer]] = {
    messages.DefineRequest: Server.define,
    messages.BeginRequest: Server.begin,
    messages.RestartRequest: Server.restart,
    messages.PullRequest: Server.pull,
    messages.LookUpRequest: Server.look_up,
    messages.PushRequest: Server.push,
    messages.SettleRequest: Server.settle,
    messages.TakeRequest: Server.take,
    messages.ChooseRequest: Server.choose,
    messages.AddUpRequest: Server.add_up,
    messages.MadeRequest: Server.made,
    messages.CountedRequest: Server.counted,
    messages.DenseRequest: Server.dense,
    messages.LoadDenseRequest: Server.load_dense,
    messages.DumpRequest: Server.dump,
    messages.LoadTableRequest: Server.load_table,
    messages.ClearTablesRequest: Server.clear_tables,
    messages.BeginTableRequest: Server.begin_table,
    messages.WriteLogRequest: Server.write_log,
    messages.CountsRequest: Server.counts,
    messages.RoundRequest: Server.round,
    messages.LastScopeRequest: Server.last_scope,
    messages.KeepRequest: Server.keep,
    messages.KeptRequest: Server.kept,
}
# Where one of these fails, what the shard holds may be half changed.
CHANGING = (messages.PushRequest, messages.AddUpRequest, messages.SettleRequest)


def _ids(body: Buffer, counts: Sequence[int]) -> list[Ids]:
    """Split the body into the ids of each table, (n,)."""
    edges = np.cumsum([0, *counts])
    if len(body) != 8 * edges[-1]:
        raise RefusedRequest(f"{count_of(len(body), 'byte')} of ids, for {edges[-1]} of them")
    every = np.frombuffer(body, np.int64)
    return [every[start:stop] for start, stop in itertools.pairwise(edges)]


def read_push(request: messages.PushRequest, body: Buffer, shard: ServerShard) -> Push:
    """Read a push. RefusedRequest where its bytes are not what the request says."""
    specs = [table.spec for table in shard.tables]
    if len(request.ids) != len(specs):
        raise RefusedRequest(f"a push with ids of {count_of(len(request.ids), 'table')}, where there are {len(specs)}")
    size, rows = len(shard.weights), []
    at = size * shard.weights.element_size()
    if len(body) < at:
        raise RefusedRequest(f"a push of {count_of(len(body), 'byte')}, whose dense part alone has {at}")
    dense = torch.frombuffer(body, dtype=shard.weights.dtype, count=size) if size else shard.weights.clone()
    for spec, count in zip(specs, request.ids, strict=True):
        ids = np.frombuffer(body, np.int64, count, at)
        at += 8 * count
        grads = np.frombuffer(body, spec.dtype, count * spec.dim, at).reshape(count, spec.dim)
        at += grads.nbytes
        rows.append((ids, grads))
    if at != len(body):
        raise RefusedRequest(f"a push of {count_of(len(body), 'byte')}, which should have {at}")
    return Push(
        worker=request.worker,
        clock=request.clock,
        attempt=request.attempt,
        version=request.version,
        norm=request.norm,
        lr=request.lr,
        dense=dense,
        absent=frozenset(request.absent),
        rows=rows,
    )


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
