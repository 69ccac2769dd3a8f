"""Strangers at every port of a running job: what they do must not change what it computes."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest

from training.job import JobSpec
from training.launch import local_crew

pytestmark = pytest.mark.ranks


def summing(ctx: Any) -> float:
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist

    ctx.event("ports", {k: os.environ[k] for k in ("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT")})
    hvd.init()
    dist.init_process_group("gloo")
    total = 0.0
    for step in range(60):
        ctx.heartbeat(step, "step")
        x = torch.ones(1, dtype=torch.float64)
        dist.all_reduce(x)
        total += float(hvd.allreduce(x, op=hvd.Sum))
        time.sleep(0.02)
    dist.destroy_process_group()
    return total


def bother(port: int, over: threading.Event) -> int:
    """Connect, flood, send garbage and half a greeting until told to stop; how many connections were made."""
    payloads = [b"", os.urandom(300), b"GET /global/0 HTTP/1.0\r\n\r\n", b"\x00\x00\x00\x20" + b"{" * 32, b"\xff" * 8]
    made, idle = 0, []
    while not over.is_set():
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=1)
            sock.sendall(payloads[made % len(payloads)])
        except OSError:
            continue
        made += 1
        if made % 3:
            sock.close()
        else:
            idle.append(sock)
        time.sleep(0.005)
    for sock in idle:
        sock.close()
    return made


@pytest.mark.horovod
def test_a_running_job_does_not_notice_strangers_on_its_ports() -> None:
    over, threads, made = threading.Event(), [], []

    def attack(port: int) -> None:
        thread = threading.Thread(target=lambda: made.append(bother(port, over)))
        thread.start()
        threads.append(thread)

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "heartbeat" and event["step"] == 5 and event["rank"] == 0:
            for port in ports:
                attack(port)
        if event["kind"] == "event":
            ports.add(int(event["data"]["HOROVOD_GLOO_RENDEZVOUS_PORT"]))

    with local_crew(2, ("torch", "horovod.torch")) as crew:
        ports = {crew.endpoint.port}
        try:
            result = crew.run(JobSpec(summing), 2, on_event)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        refused = crew.refused
    assert result.results == [240.0, 240.0]
    assert len(made) == 3 and all(count > 20 for count in made), made
    assert refused > 20


def test_the_secret_is_in_no_command_line_and_no_environment() -> None:
    def entry(ctx: Any) -> list[str]:
        import psutil

        family = [psutil.Process(), *psutil.Process().parents()[:2]]
        return [" ".join(p.cmdline()) + str(p.environ()) for p in family] + [str(ctx.payload)]

    with local_crew(1, ()) as crew:
        texts = crew.run(JobSpec(entry, preload=()), 1, lambda event: None).result
        secret = crew.endpoint.secret
    assert len(texts) == 4
    assert not [text for text in texts if secret in text]


def test_what_a_ring_opens_is_on_the_chosen_interface_alone() -> None:
    """torch's store and Gloo would listen on all of them if they were not told."""

    def entry(ctx: Any) -> list[str]:
        import psutil
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        family = [psutil.Process(), *psutil.Process().parents()[:1]]  # the helper holds the store's port too
        listening = {c.laddr.ip for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        dist.destroy_process_group()
        return sorted(listening)

    with local_crew(2, ("torch",)) as crew:
        found = crew.run(JobSpec(entry, preload=("torch",)), 2, lambda event: None).results
    assert found[0] == ["127.0.0.1"], "rank 0 serves the store"
    assert set(found[1]) <= {"127.0.0.1"}


def test_the_shim_answers_its_own_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.error
    import urllib.request

    from training.rendezvous import Shim, Store

    store = Store()
    shim = Shim(store.handle)
    url = f"http://127.0.0.1:{shim.port}"
    try:
        urllib.request.urlopen(urllib.request.Request(f"{url}/s/k", data=b"v", method="PUT"))
        assert urllib.request.urlopen(f"{url}/s/k").read() == b"v"
        for path, status in (("/s/absent", 404), ("/too/many/parts", 400), ("/few", 400)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(url + path)
            assert caught.value.code == status
        monkeypatch.setattr("training.rendezvous.os.getuid", lambda: 54321)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/s/k")
        assert caught.value.code == 403
    finally:
        shim.close()
