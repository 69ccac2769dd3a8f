"""A worker's side: one connection per server; requests are sent in parallel, replies read in order."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.data.batch import BatchShare
from sparkring.training.servers import messages
from sparkring.training.servers.backup import StepOutcome
from sparkring.training.servers.codec import Buffer
from sparkring.training.servers.definition import Definition
from sparkring.training.servers.partition import Slice, cut_parameters
from sparkring.training.servers.protocol import (
    REPLIES,
    ServerProtocolError,
    enter,
    message_of,
    pack_tensors,
    raw,
    receive,
    send,
    unpack_tensors,
)
from sparkring.training.servers.shard import Push
from sparkring.training.tables.files import joined, to_tensors
from sparkring.training.tables.hashing import Ids, bucket_of, bucket_owners
from sparkring.training.tables.table import TableDump
from sparkring.training.waiting import waits_for_ranks

Array = NDArray[Any]
Gather = Callable[[bytes], list[bytes]]
R = TypeVar("R", bound=messages.ServerReply)
CONNECT_S = 0.2  # between attempts to connect
ALL_BYTES = -1  # of changes of a table: copy everything


class RequestFailed(RuntimeError):
    """A server refused a request, or is gone."""


@dataclass(frozen=True)
class Route:
    """Where the ids of a batch are held: by table, the order that sorts them by server, and how many each has."""

    orders: list[NDArray[np.int64]]
    counts: list[NDArray[np.int64]]  # (servers,)
    ids: list[Ids]  # in those orders

    def of_server(self, server: int, values: Sequence[Array]) -> list[Array]:
        """Return one server's share of the values (n, ...) in route order, by table."""
        edges = [np.cumsum([0, *count]) for count in self.counts]
        return [value[edge[server] : edge[server + 1]] for value, edge in zip(values, edges, strict=True)]

    def sorted(self, values: Sequence[Array]) -> list[Array]:
        return [np.ascontiguousarray(value[order]) for value, order in zip(values, self.orders, strict=True)]

    def restored(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """Return rows in the order of the ids, by table; `parts`: by server, then table."""
        found = []
        for table, order in enumerate(self.orders):
            rows = np.concatenate([part[table] for part in parts])
            out = np.empty_like(rows)
            out[order] = rows
            found.append(out)
        return found


def route_of(ids: Sequence[Ids], servers: int) -> Route:
    """Route distinct ids (n,) of each table to the servers of their buckets."""
    owners = bucket_owners(servers)
    of_ids = [owners[bucket_of(each)] for each in ids]
    orders = [np.argsort(owner, kind="stable") for owner in of_ids]
    counts = [np.bincount(owner, minlength=servers) for owner in of_ids]
    return Route(orders, counts, [each[order] for each, order in zip(ids, orders, strict=True)])


@dataclass(frozen=True)
class Pulled:
    """What a gradient is computed with: versions (servers,), weights (elements,) of all parameters, rows by table."""

    versions: tuple[int, ...]
    weights: torch.Tensor
    rows: list[Array]


@dataclass(frozen=True)
class Gradient:
    """A worker's gradient for one step: dense (elements,) of all parameters, ids (u,) and rows (u, dim) by table.

    absent: names of parameters that no gradient reached. norm: global gradient norm. lr: of the step.
    """

    dense: torch.Tensor
    absent: frozenset[str]
    ids: Sequence[Ids]
    rows: Sequence[Array]
    norm: float
    lr: float


@dataclass(frozen=True)
class StatePart:
    """What an optimizer keeps of a slice under a key: one value per element, shaped as the slice, or one for all."""

    slice: Slice
    key: str
    value: torch.Tensor


def state_parts(slices: Sequence[Slice], state: Mapping[str, torch.Tensor]) -> list[StatePart]:
    """Name a server's optimizer state, from the keys of Shard.dense_state without `weights`."""
    split = [(name.partition("."), value) for name, value in state.items()]
    return [StatePart(slices[int(number)], key, value) for (number, _, key), value in split]


def whole_states(definition: Definition, parts: Sequence[StatePart]) -> dict[str, dict[str, torch.Tensor]]:
    """Join the slices' optimizer states: by parameter and key, shaped as the parameter, or one value."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for part in parts:
        own, shape = found.setdefault(part.slice.name, {}), list(definition.shapes[part.slice.name])
        if tuple(part.value.shape) != part.slice.shape:
            own[part.key] = part.value
            continue
        whole = own.setdefault(part.key, torch.zeros(shape, dtype=part.value.dtype))
        whole.view(-1)[part.slice.start : part.slice.stop] = part.value.reshape(-1)
    return found


def cut_states(
    definition: Definition, servers: int, weights: torch.Tensor, states: Mapping[str, Mapping[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """Cut whole weights and optimizer states into what Shard.load_dense takes, by server.

    Args:
        definition: parameters and tables of all servers.
        servers: number of servers.
        weights: weights (elements,) of all parameters.
        states: optimizer state by parameter and key, of the parameter's shape or one value.
    """
    slices = cut_parameters(definition.shapes, servers)
    pieces = weights.split([sum(each.size for each in own) for own in slices])
    found = []
    for piece, own in zip(pieces, slices, strict=True):
        state = {"weights": piece}
        for number, cut in enumerate(own):
            shape = tuple(definition.shapes[cut.name])
            for key, value in states.get(cut.name, {}).items():
                per_element = tuple(value.shape) == shape
                state[f"{number}.{key}"] = (
                    value.reshape(-1)[cut.start : cut.stop].reshape(cut.shape) if per_element else value
                )
        found.append(state)
    return found


def cut_gradient(
    gradient: Gradient, definition: Definition, worker: int, clock: int, attempt: int, versions: Sequence[int]
) -> list[Push]:
    """Cut a gradient into the pushes to all servers.

    Args:
        gradient: gradient of `worker` for step `clock`.
        definition: parameters and tables of all servers.
        worker: rank that computed the gradient.
        clock: step the gradient belongs to.
        attempt: number of the try for this step.
        versions: version of each server at the pull.
    """
    slices = cut_parameters(definition.shapes, len(versions))
    route = route_of(gradient.ids, len(versions))
    rows = route.sorted(gradient.rows)
    pieces = gradient.dense.split([sum(each.size for each in own) for own in slices])
    return [
        Push(
            worker=worker,
            clock=clock,
            attempt=attempt,
            version=version,
            norm=gradient.norm,
            lr=gradient.lr,
            dense=pieces[server],
            absent=frozenset(n for n, each in enumerate(slices[server]) if each.name in gradient.absent),
            rows=list(zip(route.of_server(server, route.ids), route.of_server(server, rows), strict=True)),
        )
        for server, version in enumerate(versions)
    ]


class ServerConnection:
    """To one server, for one thread."""

    def __init__(self, server: int, address: tuple[str, int], secret: bytes, timeout_s: float) -> None:
        """Connect and prove the secret. RequestFailed if the server does not answer.

        Args:
            server: number of the server.
            address: host and port of the server.
            secret: secret of the attempt.
            timeout_s: seconds to wait for an answer, which may depend on other ranks.
        """
        self.server, self.address, self.timeout_s = server, address, timeout_s
        self.sent_bytes = 0
        deadline = time.monotonic() + min(timeout_s, 30.0)
        while True:
            try:
                self._sock = socket.create_connection(address, timeout=5.0)
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                enter(self._sock, secret)
                break
            except ServerProtocolError:
                raise
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise RequestFailed(
                        f"server {server} at {address[0]}:{address[1]}: no connection: {error}"
                    ) from None
                time.sleep(CONNECT_S)
        self._sock.settimeout(timeout_s)

    def ask(self, request: messages.WorkerRequest, body: Sequence[Buffer] = ()) -> None:
        """Send a request, with the bytes of `body` joined."""
        try:
            self.sent_bytes += send(self._sock, request, body)
        except OSError as error:
            raise RequestFailed(f"server {self.server} is gone: {error}") from None

    def hear(self, kind: type[R]) -> tuple[R, Buffer]:
        """Return the reply to the oldest request, of this class, and the bytes next to it.

        RequestFailed if it was refused, or no request is open.
        """
        try:
            frame = receive(self._sock)
            reply = message_of(frame, REPLIES)
        except TimeoutError:
            raise RequestFailed(f"server {self.server}: no answer in {self.timeout_s:g} s; a rank may hang") from None
        except (OSError, EOFError) as error:
            raise RequestFailed(f"server {self.server} is gone: {error}") from None
        if isinstance(reply, messages.Refused):
            raise RequestFailed(f"server {self.server}: {reply.reason}")
        if not isinstance(reply, kind):
            raise RequestFailed(f"server {self.server}: a {type(reply).__name__}, where a {kind.__name__} was expected")
        return reply, frame.body

    def call(self, request: messages.WorkerRequest, kind: type[R], body: Sequence[Buffer] = ()) -> tuple[R, Buffer]:
        self.ask(request, body)
        return self.hear(kind)

    @waits_for_ranks
    def hear_of_ranks(self, kind: type[R]) -> tuple[R, Buffer]:
        """Receive a reply as by `hear`, for replies that wait for other ranks."""
        return self.hear(kind)

    def close(self) -> None:
        self._sock.close()


class Client:
    """One worker among the servers' workers."""

    def __init__(
        self, addresses: Sequence[tuple[str, int]], secret: bytes, worker: int, workers: int, timeout_s: float
    ) -> None:
        """Connect to every server.

        Args:
            addresses: addresses of the servers, in order.
            secret: secret of the attempt.
            worker: number of this worker.
            workers: number of workers.
            timeout_s: seconds to wait for an answer.
        """
        self.worker, self.workers = worker, workers
        self._open = [(number, address, secret, timeout_s) for number, address in enumerate(addresses)]
        self.connections = [ServerConnection(*each) for each in self._open]
        self._others: list[ServerConnection] = []
        self._definition: Definition | None = None

    @property
    def servers(self) -> int:
        return len(self.connections)

    @property
    def definition(self) -> Definition:
        assert self._definition is not None, "define() comes first"
        return self._definition

    @property
    def sent_bytes(self) -> int:
        return sum(each.sent_bytes for each in self.connections)

    def _all(
        self, request: messages.WorkerRequest, kind: type[R], body: Sequence[Buffer] = ()
    ) -> list[tuple[R, Buffer]]:
        """Ask every server at once; their replies."""
        for connection in self.connections:
            connection.ask(request, body)
        return [connection.hear(kind) for connection in self.connections]

    def _hear_done(self) -> list[Buffer]:
        """Wait until every server has done what it was asked for; the bytes that it gives."""
        return [connection.hear(messages.Done)[1] for connection in self.connections]

    def define(self, definition: Definition) -> bool:
        """Tell all servers what they hold. Returns whether steps have started: this worker was replaced."""
        self._definition = definition
        self._slices = cut_parameters(definition.shapes, self.servers)
        replies = self._all(messages.DefineRequest(), messages.DefineReply, [definition.encoded()])
        return all(reply.begun_at is not None for reply, _ in replies)

    def begin(self, clock: int) -> None:
        self._all(messages.BeginRequest(clock), messages.Done)

    def restart(self) -> tuple[int, int, int]:
        """Return a replaced worker's first step, the number of its try, and the first server's version.

        Some servers may have done that step.
        """
        found = [reply for reply, _ in self._all(messages.RestartRequest(self.worker), messages.RestartReply)]
        return min(reply.clock for reply in found), max(reply.attempt for reply in found), found[0].version

    # --- a step -------------------------------------------------------------------------------------------------

    def pull(self, clock: int, attempt: int, ids: Sequence[Ids]) -> Pulled:
        """Pull weights and rows of distinct ids for the gradient of step `clock`, once the bound allows it."""
        route = route_of(ids, self.servers)
        for server, connection in enumerate(self.connections):
            own = route.of_server(server, route.ids)
            request = messages.PullRequest(self.worker, clock, attempt, tuple(map(len, own)))
            connection.ask(request, [raw(torch.from_numpy(each)) for each in own])
        replies = [connection.hear_of_ranks(messages.PullReply) for connection in self.connections]
        weights, parts = [], []
        for server, (_, body) in enumerate(replies):
            dtype = getattr(torch, self.definition.dtype)
            size = sum(each.size for each in self._slices[server])
            weights.append(torch.frombuffer(body, dtype=dtype, count=size) if size else torch.empty(0).to(dtype))
            parts.append(self._rows(body, size * dtype.itemsize, route, server))
        versions = tuple(reply.version for reply, _ in replies)
        return Pulled(versions, torch.cat(weights), route.restored(parts))

    def look_up(self, ids: Sequence[Ids]) -> list[Array]:
        """Return the current rows of ids, for evaluation."""
        route = route_of(ids, self.servers)
        for server, connection in enumerate(self.connections):
            own = route.of_server(server, route.ids)
            connection.ask(messages.LookUpRequest(tuple(map(len, own))), [raw(torch.from_numpy(each)) for each in own])
        return route.restored([self._rows(body, 0, route, server) for server, body in enumerate(self._hear_done())])

    def _rows(self, body: Buffer, at: int, route: Route, server: int) -> list[Array]:
        found = []
        for spec, counts in zip(self.definition.tables, route.counts, strict=True):
            count = int(counts[server])
            rows = np.frombuffer(body, spec.dtype, count * spec.dim, at).reshape(count, spec.dim)
            at += rows.nbytes
            found.append(rows)
        return found

    def push(self, pushes: Sequence[Push]) -> list[messages.PushReply]:
        """Send one push to each server; returns their answers, with bound 0 when all workers' have come."""
        for connection, push in zip(self.connections, pushes, strict=True):
            request = messages.PushRequest(
                worker=push.worker,
                clock=push.clock,
                attempt=push.attempt,
                version=push.version,
                norm=push.norm,
                lr=push.lr,
                ids=tuple(len(ids) for ids, _ in push.rows),
                absent=tuple(sorted(push.absent)),
            )
            body = [raw(push.dense)]
            for ids, grads in push.rows:
                body += [raw(torch.from_numpy(ids)), raw(torch.from_numpy(grads))]
            connection.ask(request, body)
        return [connection.hear_of_ranks(messages.PushReply)[0] for connection in self.connections]

    def settle(self, clock: int, factor: float) -> None:
        """Commit step `clock` on every server: apply its gradient sum times `factor` (bound 0)."""
        self._all(messages.SettleRequest(clock, factor), messages.Done)

    # --- backup workers (backup.py) ------------------------------------------------------------------------------

    def take(self, step: int, limit: int) -> BatchShare | None:
        """Return the batch share to compute in a step, below the step `limit`, or None."""
        first = self.connections[0]
        first.ask(messages.TakeRequest(self.worker, step, limit))
        return first.hear_of_ranks(messages.TakeReply)[0].share

    def choose(self, step: int, has_gradient: bool) -> StepOutcome | tuple[messages.ChosenShare, ...]:
        """Wait until the step's gradients are chosen.

        Returns these; the outcome where the step is made. `has_gradient`: all servers have this worker's.
        """
        first = self.connections[0]
        first.ask(messages.ChooseRequest(self.worker, step, has_gradient))
        reply, _ = first.hear_of_ranks(messages.ChooseReply)
        if reply.made is None:
            return reply.chosen
        counted = frozenset([self.worker] if reply.made.is_counted else [])
        return StepOutcome(reply.made.norm, reply.made.bad_worker, counted)

    def add_up(self, step: int, chosen: tuple[messages.ChosenShare, ...]) -> tuple[float, int | None] | None:
        """Make all servers sum what `choose` gave: see `global_squares`; None where the step is long made."""
        replies = [reply for reply, _ in self._all(messages.AddUpRequest(step, chosen), messages.AddUpReply)]
        return None if any(reply.sum is None for reply in replies) else global_squares(replies)

    def made(self, step: int, norm: float, bad_worker: int | None) -> None:
        """Report to the first server that all servers have made a step."""
        self.connections[0].call(messages.MadeRequest(step, norm, bad_worker), messages.Done)

    def counted(self) -> list[BatchShare]:
        """List this worker's batch shares in steps since the last coordinated stop."""
        return list(self.connections[0].call(messages.CountedRequest(self.worker), messages.CountedReply)[0].shares)

    # --- between steps ------------------------------------------------------------------------------------------

    def weights(self) -> torch.Tensor:
        """Return the current dense weights (elements,)."""
        replies = self._all(messages.DenseRequest(with_state=False), messages.Done)
        return torch.cat([unpack_tensors(body)["weights"] for _, body in replies])

    def dense_state(self) -> tuple[torch.Tensor, list[StatePart]]:
        """Return the dense weights (elements,), and the optimizer state of each slice."""
        weights, states = [], []
        for server, (_, body) in enumerate(self._all(messages.DenseRequest(with_state=True), messages.Done)):
            found = unpack_tensors(body)
            weights.append(found.pop("weights"))
            states += state_parts(self._slices[server], found)
        return torch.cat(weights), states

    def load_dense(self, weights: torch.Tensor, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace all servers' dense part.

        Args:
            weights: (elements,) of all parameters.
            states: by parameter and key, what the optimizer keeps: whole tensors, or numbers.
        """
        for connection, state in zip(
            self.connections, cut_states(self.definition, self.servers, weights, states), strict=True
        ):
            connection.ask(messages.LoadDenseRequest(), pack_tensors(state))
        self._hear_done()

    def dump(self, table: int, buckets: NDArray[np.int64], most_bytes: int, saving: bool) -> TableDump:
        """Copy some buckets of a table from all servers: what changed since the last checkpoint, or all of them.

        Args:
            table: number of the table.
            buckets: sorted bucket numbers.
            most_bytes: size limit of changes, above which everything is copied.
            saving: whether the copy is for a checkpoint.
        """
        dumps = self._dumps(table, buckets, most_bytes // self.servers if most_bytes > 0 else most_bytes, saving)
        if len({len(dump.since) for dump in dumps}) > 1:  # changes of some servers only
            dumps = self._dumps(table, buckets, ALL_BYTES, saving)
        return joined(dumps)

    def _dumps(self, table: int, buckets: NDArray[np.int64], most_bytes: int, saving: bool) -> list[TableDump]:
        owners = bucket_owners(self.servers)
        for server, connection in enumerate(self.connections):
            own = buckets[owners[buckets] == server]
            connection.ask(messages.DumpRequest(table, most_bytes, saving, tuple(own.tolist())))
        parts = [unpack_tensors(body) for body in self._hear_done()]
        return [TableDump(**{name: part.numpy() for name, part in named.items()}) for named in parts]

    def clear_tables(self) -> None:
        self._all(messages.ClearTablesRequest(), messages.Done)

    def load_table(self, table: int, dump: TableDump) -> None:
        """Give each server its buckets of a dump, none of whose buckets it has."""
        owners = bucket_owners(self.servers)
        for server, connection in enumerate(self.connections):
            own = dump.only(dump.buckets[owners[dump.buckets] == server])
            connection.ask(messages.LoadTableRequest(table), pack_tensors(to_tensors(own)))
        self._hear_done()

    def begin_table(self, table: int, ids: Ids, rows: Array) -> None:
        """Store rows (n, dim) of another model, with optimizer state 0."""
        route = route_of([ids], self.servers)
        (ordered,) = route.sorted([rows])
        for server, connection in enumerate(self.connections):
            own = {"ids": route.of_server(server, route.ids)[0], "rows": route.of_server(server, [ordered])[0]}
            tensors = {name: torch.from_numpy(part) for name, part in own.items()}
            connection.ask(messages.BeginTableRequest(table), pack_tensors(tensors))
        self._hear_done()

    def write_logs(self, clock: int) -> None:
        """Make every server write its events up to a coordinated stop."""
        self._all(messages.WriteLogRequest(clock), messages.Done)

    def counts(self) -> list[dict[str, Any]]:
        """Return the counts of each server."""
        return [json.loads(bytes(body)) for _, body in self._all(messages.CountsRequest(), messages.Done)]

    # --- rounds --------------------------------------------------------------------------------------------------

    def open_channel(self) -> ServerConnection:
        """Open one more connection to the first server, for rounds of another thread."""
        self._others.append(ServerConnection(*self._open[0]))
        return self._others[-1]

    def round(
        self, scope: int, channel: str, number: int, value: bytes, connection: ServerConnection | None = None
    ) -> list[bytes]:
        """Exchange a value with all workers, and return theirs.

        Args:
            scope: scope of the round (rounds.RoundKey).
            channel: channel of the round.
            number: number of the round in its scope.
            value: value of this worker.
            connection: connection of the calling thread; None for the main one.
        """
        first = connection or self.connections[0]
        first.ask(messages.RoundRequest(self.worker, scope, number, channel), [value])
        reply, body = first.hear_of_ranks(messages.RoundReply)
        edges = itertools.accumulate(reply.sizes, initial=0)
        return [bytes(body[start:stop]) for start, stop in itertools.pairwise(edges)]

    def last_scope(self, channel: str, worker: int | None = None, connection: ServerConnection | None = None) -> int:
        """Return the latest scope of a channel in which a worker, or any worker, has given a value.

        Args:
            channel: channel of the rounds.
            worker: number of the worker; None for any.
            connection: connection of the calling thread; None for the main one.
        """
        first = connection or self.connections[0]
        who = range(self.workers) if worker is None else [worker]
        return max(
            first.call(messages.LastScopeRequest(each, channel), messages.LastScopeReply)[0].scope for each in who
        )

    def keep(self, name: str, value: bytes) -> None:
        """Store a value at the first server, for a worker that is replaced."""
        self.connections[0].call(messages.KeepRequest(name), messages.Done, [value])

    def kept(self, name: str) -> bytes:
        return bytes(self.connections[0].call(messages.KeptRequest(name), messages.Done)[1])

    def close(self) -> None:
        for connection in (*self.connections, *self._others):
            connection.close()


def statuses(replies: Sequence[messages.PushReply]) -> list[messages.ShardStatus]:
    """List the status of a push at each server."""
    return [reply.status for reply in replies]


def global_squares(replies: Sequence[messages.PushReply | messages.AddUpReply]) -> tuple[float, int | None]:
    """Return the sum of squares over all servers, and the lowest rank with a non-finite push (bound 0)."""
    sums = [reply.sum for reply in replies if reply.sum is not None]
    bad = [each.bad_worker for each in sums if each.bad_worker is not None]
    return sum(each.squares for each in sums), min(bad, default=None)
