"""The channel inside TLS: the same job, nothing to read on the network, and no driver believed but the key's."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from training.crew import Crew
from training.job import JobSpec
from training.launch import local_crew
from training.link import Unreachable, connect
from training.tls import Certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command for certificates")
NEEDLE = "a line nobody else should read"


def make_certificate(folder: Path, name: str) -> Certificate:
    made = Certificate(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=sparkring", "-out", made.certificate, "-keyout", made.key]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[Certificate]:
    folder = tmp_path_factory.mktemp("tls")
    return [make_certificate(folder, name) for name in ("driver", "other")]


def talkative(ctx: Any) -> list[int]:
    for number in range(200):
        print(NEEDLE, number)
        ctx.metrics(number, {"x": 1.0})
    return list(range(50_000))  # larger than a TLS record, and than what the kernel buffers


def eavesdrop(between: socket.socket, driver: int, heard: bytearray) -> None:
    """Pass on what agents and the driver say to each other, and write it down."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                heard.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    while True:
        try:
            agent, _ = between.accept()
        except OSError:
            return
        other = socket.create_connection(("127.0.0.1", driver))
        for pair in ((agent, other), (other, agent)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


@pytest.mark.ranks
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_lines_can_be_read_on_the_network_only_without_it(
    certificates: list[Certificate], monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    heard, lines = bytearray(), []
    with socket.create_server(("127.0.0.1", 0)) as between:

        class Overheard(Crew):
            def __init__(self, *args: Any, **options: Any):
                super().__init__(*args, **options)
                there = (between, self.endpoint.port, heard)
                threading.Thread(target=eavesdrop, args=there, daemon=True).start()
                self.endpoint = replace(self.endpoint, port=between.getsockname()[1])

        def on_event(event: dict[str, Any]) -> None:
            lines.extend(event["lines"] if event["kind"] == "log" else [])

        monkeypatch.setattr("training.launch.Crew", Overheard)
        with local_crew(2, (), tls=certificates[0] if is_encrypted else None) as crew:
            result = crew.run(JobSpec(talkative, preload=()), 2, on_event)
        between.shutdown(socket.SHUT_RDWR)
    assert result.results == [list(range(50_000))] * 2
    assert sum(NEEDLE in line for line in lines) == 400
    assert len(heard) > 100_000 and (NEEDLE.encode() in heard) == (not is_encrypted)


def test_an_agent_believes_only_the_driver_that_has_the_key(certificates: list[Certificate]) -> None:
    with Crew("127.0.0.1", tls=certificates[0]) as crew:
        wire, seen = connect(crew.endpoint, "a", patience_s=5)
        assert seen == 0
        wire.close()
        with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
            connect(replace(crew.endpoint, certificate=certificates[1].pem()), "a", patience_s=0)
        with pytest.raises(Unreachable):
            connect(replace(crew.endpoint, certificate=""), "a", patience_s=0, timeout_s=1)
        with pytest.raises(Unreachable):
            connect(replace(crew.endpoint, secret="0" * 64), "a", patience_s=0)


def test_files_that_are_no_certificate_are_named_with_their_keys(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("hello")
    with pytest.raises(ValueError, match=r"launch\.tls_certificate = .*a\.pem', launch\.tls_key = .*missing"):
        Crew("127.0.0.1", tls=Certificate(str(tmp_path / "a.pem"), str(tmp_path / "missing.key")))
