"""What ranks agree on before they train: threads, the model, and how they ask each other."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage
from sparkring.conf.stored import Stored, read
from sparkring.training.checkpoint.peers import Peers, solo, torch_peers
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.model.recipe_model import build_model
from sparkring.training.models.initial import InitialModel, Unrecordable, eager_model
from sparkring.training.parallel.strategy import Ranks, Strategy

log = logging.getLogger(__name__)
THREADS = "threads.json"


class ThreadsFile(Stored):
    """threads.json of a run folder."""

    threads_per_rank: Annotated[int, Field(ge=1)]


def agree_threads(
    run: Storage, configured: int | None, offer: int, gather: Callable[[bytes], list[bytes]], rank: int
) -> int:
    """Agree on torch's threads per rank, once for the whole run. Collective.

    Sums over threads have other last bits for another number of them, and how ranks are packed on hosts may change from
    attempt to attempt; so the run folder keeps the number.

    Args:
        run: the run folder.
        configured: `train.threads_per_rank`; wins over the kept number.
        offer: this rank's share of its host's cores; the smallest offer is taken where nothing else decides.
        gather: all-gather of bytes between the ranks.
        rank: rank 0 reads and writes the file.
    """
    have = run.exists(THREADS) if rank == 0 else False
    kept = read(ThreadsFile, run, THREADS).threads_per_rank if have else None
    answers = [json.loads(answer) for answer in gather(json.dumps([offer, kept]).encode())]
    kept = answers[0][1]
    threads: int = configured or kept or min(answer[0] for answer in answers)
    if rank == 0 and kept not in (None, threads):
        log.warning("train.threads_per_rank = %d, the run began with %d: its last bits may be others", threads, kept)
    if rank == 0 and kept != threads:
        run.put_atomic(THREADS, ThreadsFile(threads_per_rank=threads).model_dump_json().encode())
    return threads


def seed_everything(seed: int, stream: int = 0) -> None:
    """Seed Python, numpy and torch. Different streams give different numbers for one seed."""
    mixed = (seed * 1_000_003 + stream) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def agreed_model(
    model: InitialModel | Unrecordable,
    config: RunConfig,
    manifest: DatasetManifest,
    ctx: WorkerContext,
    strategy: Strategy,
) -> InitialModel:
    """Agree on the recorded model, or build it whole on every rank. Collective.

    Where some rank could not record it, the ranks of a host build it one after the other, and rank 0 alone keeps its
    values.

    Args:
        model: recorded model, or why it could not be recorded.
        config: resolved configuration of the run.
        manifest: manifest of the dataset.
        ctx: context of this rank.
        strategy: carries messages between ranks.
    """
    everyone = peers(strategy, ctx, config.checkpoint.timeout_s)
    why = str(model) if isinstance(model, Unrecordable) else ""
    answers = [json.loads(answer) for answer in everyone.gather(json.dumps([why, ctx.local_size]).encode())]
    reasons = [why for why, _ in answers if why]
    if isinstance(model, InitialModel) and not reasons:
        return model
    if ctx.rank == 0:
        log.warning(
            "%s cannot be made without memory, so every host holds it whole before it is cut: %s",
            config.model.factory,
            reasons[0],
        )
    for turn in range(max(local_size for _, local_size in answers)):
        ctx.heartbeat(0, f"build the model, turn {turn}")
        if turn == ctx.local_rank:
            seed_everything(config.train.seed)
            model = eager_model(build_model(config, manifest), reasons[0], keep=ctx.rank == 0)
        everyone.gather(b"done")
    assert isinstance(model, InitialModel)
    return model


def peers(ranks: Ranks, ctx: WorkerContext, timeout_s: float, behind: int = 0) -> Peers:
    """Return the ranks' all-gather: the strategy's, or Gloo with a timeout; alone, its own answer. Collective.

    Args:
        ranks: ranks, which may have their own all-gather.
        ctx: context of this rank.
        timeout_s: timeout of Gloo's collectives.
        behind: rounds behind training, see Meeting.open_gather.
    """
    gather = ranks.meeting.open_gather(behind)
    if gather is not None:
        return Peers(ctx.rank, ctx.world_size, gather)
    return torch_peers(timedelta(seconds=timeout_s)) if ctx.world_size > 1 else solo()
