"""An agent's end of a rank: messages and lines go to the driver before the word of its end."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from sparkring.training.launch.channel.frames import SocketChannel
from sparkring.training.launch.host.child_process import ChildProcess
from sparkring.training.launch.messages import ChildEnded, ChildEvent, LogLines, Message, StopTraining, ToRank
from sparkring.training.launch.topology import Child


class Client:
    """Keeps what is sent to the driver."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.waiting_bytes = 0

    def send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("who", [Child("rank", 1), Child("server", 0)], ids=str)
def test_an_end_is_reported_after_all_that_the_process_has_sent_and_printed(who: Child) -> None:
    client: Any = Client()
    rank = ChildProcess(who, 2, client, None)
    output, theirs, _ = rank.child_fds()
    child = SocketChannel(socket.socket(fileno=os.dup(theirs)), ToRank)
    child_output = os.dup(output)
    rank.close_child_ends()
    rank.request(StopTraining())
    assert child.receive() == StopTraining()
    child.send(ChildEvent(who, 2, "saved", {}))
    os.write(child_output, b"the last line\n")
    os.close(child_output)
    child.sock.close()
    rank.was_killed = True
    rank.report_end(-9)
    assert ChildEvent(who, 2, "saved", {}) in client.sent and LogLines(who, 2, ("the last line",)) in client.sent
    assert client.sent[-1] == ChildEnded(who, 2, -9, "killed by SIGKILL", True, ("the last line",))


def test_a_process_that_is_gone_has_no_stacks() -> None:
    client: Any = Client()
    rank = ChildProcess(Child("rank", 0), 1, client, 10.0)
    rank.pid = 2**22 + 1  # above the largest pid
    assert rank.stacks().startswith(f"process {rank.pid}: ")
    rank.close_child_ends()
    rank.report_end(None)
    assert client.sent[-1].words == "was lost with its fork server"
