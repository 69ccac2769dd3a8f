"""An example of every request to a server, and of every reply."""

from __future__ import annotations

from typing import Any, get_args

from sparkring.training.servers.messages import GradientSum, PushReply, ServerReply, ShardStatus, WorkerRequest
from tests.training.launch.examples import example

SERVER_MESSAGES: tuple[type, ...] = (*get_args(WorkerRequest), *get_args(ServerReply))


def server_message(kind: Any) -> Any:
    return PushReply(ShardStatus.HELD, example(GradientSum)) if kind is PushReply else example(kind)
