"""Real sockets: who gets in, what waits for what, and what a refused request says."""

from __future__ import annotations

import resource
import select
import socket
import struct
import threading
import time
import tracemalloc  # noqa: F401  # pytest needs it to tell of a thread that fails while no file can be opened
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.training.servers import protocol
from sparkring.training.servers.client import ALL_BYTES, Client, RequestFailed, cut_gradient, whole_states
from sparkring.training.servers.messages import (
    CountsRequest,
    Done,
    LookUpRequest,
    PullReply,
    PushReply,
    PushRequest,
    Refused,
)
from sparkring.training.servers.protocol import (
    NONCE,
    ServerProtocolError,
    admit,
    pack_tensors,
    receive,
    unpack_tensors,
)
from sparkring.training.servers.rounds import START
from sparkring.training.servers.server import MAX_PENDING
from sparkring.training.tables.files import newest, stored_dumps, to_tensors
from sparkring.training.tables.hashing import BUCKETS, bucket_of, bucket_owners
from tests.training.servers.toy import (
    SECRET,
    connect,
    definition,
    fresh_shards,
    gradient_of,
    ids_of,
    run_all,
    run_clock,
    servers,
)
from tests.training.tables.test_increments import as_file
from tests.waits import wait_for


def test_a_connection_without_the_secret_can_neither_read_nor_write_nor_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkring.training.servers.protocol.PROOF_S", 600.0)
    given = definition(1)
    with servers(1, 1) as made:
        port = made[0].port
        with pytest.raises((ServerProtocolError, RequestFailed)):
            Client([("127.0.0.1", port)], b"x" * 32, 0, 1, 1.0)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_PENDING // 2)]
        liar = socket.create_connection(("127.0.0.1", port))
        assert len(liar.recv(NONCE)) == NONCE
        liar.sendall(b"p" * 2 * NONCE + b"\x04" * 1000)
        liar.settimeout(5)
        assert liar.recv(100) == b"", "it was answered"
        client = connect(made, 0, given)
        client.begin(0)
        run_clock(client, 0)
        assert all(len(sock.recv(NONCE)) == NONCE for sock in silent)
        assert not select.select(silent, [], [], 1.0)[0], "one was answered, or closed to make room"
        client.close()
        for sock in (*silent, liar):
            sock.close()


def test_connections_that_only_wait_make_room_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkring.training.servers.protocol.PROOF_S", 0.3)
    with servers(1, 1) as made:
        silent = [socket.create_connection(("127.0.0.1", made[0].port)) for _ in range(MAX_PENDING + 5)]
        dripping = silent[0]
        for _ in range(6):  # a byte at a time does not gain time
            time.sleep(0.1)
            try:
                dripping.sendall(b"x")
            except OSError:
                break
        else:
            dripping.settimeout(60)
            assert dripping.recv(100)[NONCE:] == b"" and dripping.recv(100) == b""
        connect(made, 0, definition(1)).close()
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("lacking", ["file descriptors", "threads"])
def test_a_server_that_could_not_accept_for_a_while_accepts_again(
    lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    start = threading.Thread.start

    def cannot(thread: threading.Thread) -> None:
        if thread.name == "servers-worker":
            raise RuntimeError("can't start new thread")
        start(thread)

    with servers(1, 1) as made, socket.socket() as first, socket.socket() as waiting:
        connect(made, 0, definition(1)).close()
        try:
            if lacking == "threads":
                monkeypatch.setattr(threading.Thread, "start", cannot)
            else:  # those that are open stay so
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            first.connect(("127.0.0.1", made[0].port))  # an accept that waits already has its descriptor
            waiting.connect(("127.0.0.1", made[0].port))
            wait_for(lambda: "cannot accept connections for now" in caplog.text)
        finally:
            monkeypatch.undo()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        waiting.settimeout(60)
        if lacking == "file descriptors":
            assert len(waiting.recv(NONCE)) == NONCE, "it is accepted when there is room"
        client = connect(made, 0, definition(1))
        client.begin(0)
        run_clock(client, 0)
        client.close()
    assert len([record for record in caplog.records if "cannot accept" in record.message]) == 1


KIND_OF_BEGIN = 2


def head(kind: int, message_bytes: int, body_bytes: int = 0) -> bytes:
    """The head of a frame."""
    return struct.pack("<BIQ", kind, message_bytes, body_bytes)


def test_a_refused_request_says_why_and_the_connection_goes_on() -> None:
    with servers(1, 2) as made:
        client = Client([("127.0.0.1", made[0].port)], SECRET, 0, 2, 5.0)
        with pytest.raises(RequestFailed, match="have no definition yet"):
            client.counts()
        client.define(definition(2))
        other = Client([("127.0.0.1", made[0].port)], SECRET, 1, 2, 5.0)
        with pytest.raises(RequestFailed, match="other parameters on other ranks"):
            other.define(definition(2, bound=1))
        first = client.connections[0]
        with pytest.raises(RequestFailed, match="a message of kind 102 is not accepted here"):
            first.call(Refused("no"), Done)  # type: ignore[arg-type]
        for damaged, words in (
            (head(99, 0), "of kind 99 is not accepted"),
            (head(KIND_OF_BEGIN, 0), "no BeginRequest"),
        ):
            first._sock.sendall(damaged)
            with pytest.raises(RequestFailed, match=words):
                first.hear(Done)
        with pytest.raises(RequestFailed, match="bytes of ids"):
            first.call(LookUpRequest((5, 0)), Done, [b"12345678"])
        with pytest.raises(RequestFailed, match="a push of 8 bytes"):
            first.call(PushRequest(0, 0, 0, 0, 0.0, 0.0, (0, 0), ()), PushReply, [b"12345678"])
        with pytest.raises(RequestFailed, match="ids of 3 tables, where there are 2"):
            first.call(PushRequest(0, 0, 0, 0, 0.0, 0.0, (0, 0, 0), ()), PushReply)
        with pytest.raises(RequestFailed, match="a Done, where a PullReply was expected"):
            first.call(CountsRequest(), PullReply)
        assert client.counts()[0]["applied"] == 0
        client.close(), other.close()


def test_a_pull_waits_for_the_slowest_and_for_no_longer() -> None:
    given = definition(2, bound=1)
    with servers(2, 2) as made:
        fast, slow = connect(made, 0, given), connect(made, 1, given)
        fast.begin(0)
        run_clock(fast, 0)
        run_clock(fast, 1)
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(len(run_clock(fast, 2))))
        thread.start()
        time.sleep(0.3)
        assert not done
        run_clock(slow, 0)
        thread.join(60)
        assert done == [2]
        fast.close(), slow.close()


def test_a_server_whose_promise_is_broken_ends_and_says_which() -> None:
    given = definition(2, bound=None)
    with servers(1, 2) as made:
        client = connect(made, 0, given)
        client.begin(0)
        with pytest.raises(RequestFailed, match="gone"):
            run_clock(client, 1) if False else client.write_logs(3)
        wait_for(lambda: hasattr(made[0], "ended_with"))
        assert "coordinated stop at step 3" in str(made[0].ended_with)  # type: ignore[attr-defined]
        client.close()


def test_a_server_whose_content_may_be_half_changed_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(1, 1) as made:
        client = connect(made, 0, definition(1))
        client.begin(0)

        def fail(*_: object) -> None:
            raise RuntimeError("out of room between two rows")

        monkeypatch.setattr(made[0].shard, "push", fail)
        with pytest.raises(RequestFailed, match="gone"):
            run_clock(client, 0)
        wait_for(lambda: hasattr(made[0], "ended_with"))
        assert "between two rows" in str(made[0].ended_with)  # type: ignore[attr-defined]
        client.close()


def test_a_backup_worker_that_takes_anothers_place_begins_after_the_steps_that_one_had_heard_of() -> None:
    given = definition(3, backup=1)
    with servers(1, 3) as made:
        clients = [connect(made, worker, given) for worker in range(3)]
        clients[0].begin(0)
        backup = made[0].backup
        for worker in (0, 1):
            backup.take(worker, 0, 9)
            backup.ready(worker, 0)
        backup.made(0, 0.0, None)
        backup.outcome(2, 0)
        assert [client.restart()[0] for client in clients] == [0, 0, 1]
        for client in clients:
            client.close()


def test_rounds_give_everyone_everyones_answer() -> None:
    with servers(1, 3) as made:
        clients = [Client([("127.0.0.1", made[0].port)], SECRET, worker, 3, 10.0) for worker in range(3)]
        found: list[list[bytes]] = []
        threads = [
            threading.Thread(target=lambda c=c: found.append(c.round(START, "main", 0, bytes([c.worker]) * c.worker)))
            for c in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [[b"", b"\x01", b"\x02\x02"]] * 3
        again = Client([("127.0.0.1", made[0].port)], SECRET, 1, 3, 10.0)  # in place of one that died
        assert again.round(START, "main", 0, b"other") == found[0]
        assert again.last_scope("main") == START
        again.keep("loop", b"state")
        assert clients[0].kept("loop") == b"state"
        for client in (*clients, again):
            client.close()


@pytest.mark.parametrize("count", [1, 3])
def test_what_servers_hold_is_copied_to_others_whole(count: int, tmp_path: Path) -> None:
    """To another number of servers: weights, optimizer state and every bucket; and changes since a checkpoint."""
    given, every = definition(2, "adam", bound=1), np.arange(BUCKETS)
    with servers(2, 2) as made, servers(count, 2) as others:
        client = run_all(made, given, 8)[0]
        weights, states = client.dense_state()
        whole = whole_states(given, states)
        target_client = connect(others, 0, given)
        target_client.load_dense(weights, whole)
        first = [client.dump(table, every, ALL_BYTES, saving=True) for table in range(2)]
        for table, dump in enumerate(first):
            target_client.load_table(table, dump)
            copied = target_client.dump(table, every, ALL_BYTES, saving=False)
            for name, array in vars(dump).items():
                assert np.array_equal(array, getattr(copied, name)), name
        again, states_again = target_client.dense_state()
        assert torch.equal(again, weights) and torch.equal(target_client.weights(), weights)
        for part in states_again:
            cut, value = part.slice, whole[part.slice.name][part.key]
            expected = value if part.key == "step" else value.reshape(-1)[cut.start : cut.stop]
            assert torch.equal(part.value.reshape(-1), expected.reshape(-1)), (cut, part.key)
        other = connect(made, 1, given)
        thread = threading.Thread(target=run_clock, args=(other, 8))
        thread.start()
        run_clock(client, 8)
        thread.join()
        changes = client.dump(0, every, 1 << 30, saving=True)
        pushed = set(ids_of(0, 8)[0]) | set(ids_of(1, 8)[0])
        assert len(changes.since) == 1 and set(changes.ids) == pushed
        assert not len(client.dump(0, every, 10, saving=True).since), "more than 10 bytes changed"
        for each in (client, other, target_client):
            each.close()


def test_where_some_servers_give_changes_and_some_all_the_whole_table_is_copied() -> None:
    """Changes are limited in bytes on each server: here one has many and the other none."""
    given, every, owners = definition(1, bound=None), np.arange(BUCKETS), bucket_owners(2)
    with servers(2, 1) as made:
        client = connect(made, 0, given)
        client.begin(0)
        run_clock(client, 0)
        client.dump(0, every, ALL_BYTES, saving=True)
        ids = np.arange(4000)
        ids = ids[owners[bucket_of(ids)] == 0]
        gradient = replace(
            gradient_of(0, 1, client.pull(1, 0, ids_of(0, 1))),
            ids=[ids, np.zeros(0, np.int64)],
            rows=[np.ones((len(ids), 4)), np.zeros((0, 2))],
        )
        client.push(cut_gradient(gradient, given, 0, 1, 0, client.pull(1, 0, ids_of(0, 1)).versions))
        most_bytes = 10_000
        own = [server.shard.tables[0].copy_changes(server.shard.own_buckets, most_bytes // 2) for server in made]
        assert [len(dump.since) for dump in own] == [0, 1], "one server gives all, the other changes"
        found = client.dump(0, every, most_bytes, saving=True)
        whole = client.dump(0, every, ALL_BYTES, saving=False)
        assert not len(found.since) and np.array_equal(found.ids, whole.ids) and np.array_equal(found.rows, whole.rows)
        client.close()


@pytest.mark.parametrize("bound", [0, 2, None])
@pytest.mark.parametrize("history", ["p.s", "p.ss", "p.s.p.", "..", "s.s.p.", "p.ss.s.pp.", "pp.p.s.s.sp."])
def test_checkpoints_of_servers_between_which_steps_were_skipped_or_none_was_made_can_be_loaded(
    bound: int | None, history: str
) -> None:
    """p: a step, s: one that is skipped, `.`: a checkpoint, of two workers with their halves of the buckets."""
    given, chain, clock = definition(2, bound=bound), [list[Any](), list[Any]()], 0
    halves = [np.flatnonzero(bucket_owners(2) == rank) for rank in range(2)]

    def skipped(client: Client, clock: int) -> None:
        ids = ids_of(client.worker, clock)
        pulled = client.pull(clock, 0, ids)
        gradient = replace(gradient_of(client.worker, clock, pulled), norm=np.nan)
        client.push(cut_gradient(gradient, given, client.worker, clock, 0, pulled.versions))
        if given.synchronous:
            client.settle(clock, np.nan)

    with servers(2, 2) as made, ThreadPoolExecutor(2) as threads:
        clients = [connect(made, worker, given) for worker in range(2)]
        clients[0].begin(0)
        for event in history:
            if event != ".":
                list(threads.map(skipped if event == "s" else run_clock, clients, [clock] * 2))
                clock += 1
                continue
            clients[0].write_logs(clock)
            for table in range(2):
                for client, half in zip(clients, halves, strict=True):
                    dump = client.dump(table, half, 1 << 30, saving=True)
                    chain[table] = [*chain[table], as_file(dump)]
            for table in range(2):
                found = newest(np.arange(BUCKETS), [*stored_dumps("t", chain[table], np.arange(BUCKETS))])
                now = clients[0].dump(table, np.arange(BUCKETS), ALL_BYTES, saving=False)
                assert np.array_equal(found.ids, now.ids) and np.array_equal(found.rows, now.rows)
        for client in clients:
            client.close()


def test_named_tensors_travel_and_a_cut_body_is_refused() -> None:
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.zeros(0, 4).bfloat16(), "c": torch.tensor(2.5)}
    body = b"".join(bytes(part) for part in pack_tensors(tensors))
    for name, tensor in unpack_tensors(body).items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    for length in (4, 20, len(body) - 1):
        with pytest.raises(ServerProtocolError):
            unpack_tensors(body[:length])


def test_a_shard_dump_is_named_by_the_fields_of_a_dump() -> None:
    (shard,) = fresh_shards(definition(1), 1)
    assert set(to_tensors(shard.dump(0, np.arange(BUCKETS)))) >= {"ids", "rows", "clock", "since"}


@pytest.mark.parametrize(("message_bytes", "body_bytes"), [(0, 1 << 50), (1 << 31, 0)])
def test_a_frame_that_is_too_large_is_refused_before_memory_is_taken(message_bytes: int, body_bytes: int) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(head(KIND_OF_BEGIN, message_bytes, body_bytes))
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(ServerProtocolError, match="are accepted at most"):
            receive(right)


def test_a_stranger_that_sends_its_proof_byte_by_byte_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes within the limit, all of them do not: one such peer would hold a thread for minutes."""
    monkeypatch.setattr(protocol, "PROOF_S", 0.3)
    left, right = socket.socketpair()
    gone = threading.Event()

    def trickle() -> None:
        for _ in range(2 * NONCE):
            right.sendall(b"x")
            if gone.wait(0.1):
                return

    with left, right, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(trickle)
        with pytest.raises(TimeoutError):
            admit(left, b"secret")
        gone.set()
        sending.result()
