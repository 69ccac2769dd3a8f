"""`sparkring replay-log`: train a run on parameter servers again from its event logs, and compare the bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage, open_stored
from sparkring.training.servers.event_log import EVENTS
from sparkring.training.worker.replay import ReplayReport, replay_run
from sparkring.training.worker.result import read_result


def replay_log(run_uri: str, dataset_uri: str = "", show: Callable[[str], None] = lambda line: None) -> ReplayReport:
    """Replay a finished run. ValueError says what is missing, damaged, or of another dataset.

    Args:
        run_uri: folder of the run.
        dataset_uri: folder of its dataset; "" for the recorded one.
        show: called with a line per replayed segment.
    """
    run = open_storage(run_uri)
    result = read_result(run)
    config = RunConfig.model_validate(result.config)
    dataset = open_storage(dataset_uri) if dataset_uri else open_stored(result.dataset, run)
    manifest = read_manifest(dataset)
    if manifest.fingerprint != result.fingerprint:
        raise ValueError(f"{dataset.uri}: not the dataset of {run.uri}: its fingerprint is another; restore that one")
    # sums over threads have other last bits for another number of them
    torch.set_num_threads(result.train.threads_per_rank)
    return replay_run(
        config,
        dataset,
        manifest,
        run.at(EVENTS),
        result.train.steps,
        lambda segment: show(f"attempt {segment.attempt}: steps {segment.begin} to {segment.end}"),
    )
