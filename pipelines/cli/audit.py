"""`sparkring audit`: compare the rows that ranks recorded with those that checkpoint and dataset prescribe."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.secrets import redact
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError, named, parse
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.training.checkpoint.catalog import committed, damage
from sparkring.training.checkpoint.layout import CHECKPOINTS, TrainerFile, trainer_file
from sparkring.training.data.audit.check import (
    SHOWN,
    AuditReport,
    Expected,
    check_run,
    expected_rows,
    steps_on_servers,
)
from sparkring.training.data.audit.log import read_run
from sparkring.training.data.resume import OrderState
from sparkring.training.loop.fit import LoopRecord
from sparkring.training.servers.event_log import EVENTS
from sparkring.training.servers.replay import check_whole
from sparkring.training.servers.segments import read_segments


def audit_run(run_uri: str, dataset_uri: str = "") -> AuditReport:
    """Check the audit of a run folder against a dataset (default: the one the records name).

    ValueError names the file that is missing, damaged, or of another dataset.
    """
    run = open_storage(run_uri)
    files = read_run(run.at("audit"))
    expected, problems = expected_of(run, dataset_uri or _named_dataset(files[-1][0].dataset, run))
    return check_run(files, expected, [*problems, *server_problems(run, steps_on_servers(files, expected))])


def server_problems(run: Storage, steps: Sequence[int]) -> list[str]:
    """Check event logs of parameter servers: each (step, rank) must be on every server once.

    `steps`: steps made on servers; others have no logs.
    """
    events = run.at(EVENTS)
    has_logs = any(path.endswith(".events") for path in events.list_files())
    try:
        segments = read_segments(events) if has_logs else []
    except ValueError as error:
        return [str(error)]
    logged = {step for segment in segments for step in range(segment.begin, segment.end)}
    found = []
    if missing := [step for step in steps if step not in logged]:
        found.append(
            f"{events.uri}: servers logged nothing of {count_of(len(missing), 'step')}, such as {missing[:SHOWN]}"
        )
    for segment in segments:
        try:
            check_whole(segment.logs)
        except ValueError as error:
            found.append(f"{events.uri}, attempt {segment.attempt}: {error}")
    return found


def expected_of(run: Storage, dataset_uri: str) -> tuple[Expected, list[str]]:
    """Return the rows that the newest readable checkpoint guarantees, and why newer ones are unreadable.

    ValueError if the dataset at `dataset_uri` is not the checkpoint's.
    """
    good, bad = committed(run.at(CHECKPOINTS))
    if not good:
        why = "; ".join(bad.values())
        raise ValueError(f"{run.uri}: no committed checkpoint, so nothing says how far the run came; {why}")
    newest = good[-1]
    step, path = open_storage(newest.uri), trainer_file(newest.generation)
    if problem := damage(step, path, newest.files[path]):
        raise StoredError(f"{newest.uri}: {problem}")
    where = f"{newest.uri}/{path}"
    trainer = parse(TrainerFile, step.read_bytes(path), where).trainer
    with named(where):
        record = TypeAdapter(LoopRecord).validate_python(trainer)
        order = OrderState.model_validate(record["order"])
        data = DataConfig.model_validate({"filters": order.filters})
    folder = open_storage(dataset_uri)
    manifest = read_manifest(folder)
    if manifest.fingerprint != record["dataset"]:
        raise ValueError(f"{folder.uri}: not the dataset of {newest.uri}: its fingerprint is another; restore that one")
    try:
        kept = split_rows(Dataset(manifest, folder), order.split, data, order.quarantined).row_numbers()
        expected = expected_rows(record["order"], record["state"].step, manifest, kept)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return expected, [why for number, why in bad.items() if number > newest.step]


def _named_dataset(uri: str, run: Storage) -> str:
    """Check the URI from an audit's records: a local folder, or on the run's host. A stored file chooses no host."""
    if not uri.startswith("/") and _address(uri) != _address(run.uri):
        raise ValueError(
            f"{run.uri}/audit: its records name the dataset {redact(uri)!r}, which is not where the run is; "
            "if that is right, give it as --dataset"
        )
    return uri


def _address(uri: str) -> tuple[str, str, str]:
    parts = urlsplit(uri)
    return parts.scheme, parts.netloc, parts.query
