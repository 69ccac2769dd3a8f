"""One parameter server of a training job: what `sparkring run` starts on the hosts of the ranks."""

from __future__ import annotations

import os

import torch

from sparkring.training.launch.host.server import ServerContext
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.servers.event_log import EVENTS
from sparkring.training.servers.server import Server, ServerPlace
from sparkring.training.worker.payload import TrainPayload


def serve(ctx: ServerContext) -> None:
    """Serve the ranks of one attempt until this process is ended. Raises where the server's own promise is broken."""
    payload = TrainPayload.of_json(ctx.payload)
    config = payload.recipe()
    torch.set_num_threads(1)  # one update at a time is applied, under a lock
    place = ServerPlace(
        server=ctx.server,
        servers=ctx.servers,
        workers=ctx.world_size,
        attempt=ctx.attempt,
        secret=ctx.secret,
        events=payload.run_folder.at(EVENTS),
    )
    server = Server(place, lambda named: build_optimizer(named, config.optim), ctx.address)
    ctx.event("server", {"pid": os.getpid(), "port": server.port})
    ctx.ready(server.port)
    server.run()
