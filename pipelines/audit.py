"""`sparkring audit`: what a run's ranks recorded, against what its checkpoint and dataset say it had to consume."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from conf.manifest import read_manifest
from conf.schema_data import DataConfig
from conf.storage import Storage, open_storage
from conf.stored import read
from pipelines.chosen import chosen_rows
from pipelines.etl_job import Dataset
from training.checkpoint import TrainerFile
from training.checkpoint_catalog import committed
from training.data.audit import AuditReport, Expected, OrderState, check_run, expected_rows, read_run
from training.loop import LoopRecord


def audit_run(run_uri: str) -> AuditReport:
    """Check the audit of a run folder. ValueError names the file that is missing, damaged, or of another dataset."""
    run = open_storage(run_uri)
    files = read_run(run.at("audit"))
    return check_run(files, expected_of(run, files[-1][0].dataset))


def expected_of(run: Storage, dataset_uri: str) -> Expected:
    """What the run's newest checkpoint vouches for, of the dataset there, which must be the checkpoint's."""
    good, bad = committed(run.at("checkpoints"))
    if not good:
        raise ValueError(f"{run.uri}: no committed checkpoint, so nothing says how far the run came; {'; '.join(bad)}")
    newest = good[-1]
    trainer = read(TrainerFile, open_storage(newest.uri), f"{newest.generation}/trainer.json").trainer
    try:
        record = TypeAdapter(LoopRecord).validate_python(trainer)
        order = OrderState.model_validate(record["order"])
    except ValidationError as error:
        raise ValueError(f"{newest.uri}: not a checkpoint of a run that can be audited: {error}") from error
    folder = open_storage(dataset_uri)
    manifest = read_manifest(folder)
    if manifest.fingerprint != record["dataset"]:
        raise ValueError(f"{folder.uri}: not the dataset of {newest.uri}: its fingerprint is another; restore that one")
    data = DataConfig.model_validate({"filters": order.filters})
    kept = chosen_rows(Dataset(manifest, folder), order.split, data, order.quarantined).row_numbers()
    return expected_rows(record["order"], record["state"].step, manifest, kept)
