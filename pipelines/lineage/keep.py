"""Keep with a run what it takes to reproduce it: the environment before training, the weights' sha256 after it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.secrets import redact
from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.context.context import JobContext
from sparkring.pipelines.lineage.compare import environment_differences
from sparkring.pipelines.lineage.environment import content_digest, environment
from sparkring.pipelines.lineage.reproduce_record import PATCH, RECORD, Environment, Record, read_record
from sparkring.pipelines.tracking.checkout import GIT
from sparkring.pipelines.tracking.tracker import JOB
from sparkring.training.model.folder import model_files, weights_at

MOST_PATCH_BYTES = 1 << 20
GIT_TIMEOUT_S = 20.0


def keep_environment(job: JobContext) -> None:
    """Write reproduce.json, and diff.patch where the checkout has changes, before the ranks are started."""
    folder, found, java = job.folder, environment(job.config), ""
    if job.spark is not None:
        from sparkring.etl.spark_platform.application import java_version  # a job without Spark need not have it

        java = java_version(job.spark)
    patch = keep_patch(folder) if job.commit.endswith("+changes") else ""
    record = Record(
        environment=found,
        changed=changed_since(read_record(folder), found) if folder.exists(RECORD) else [],
        java=java,
        datasets={
            uri: content_digest(read_manifest(open_storage(uri)))
            for uri in datasets(job.config, job.dataset.folder.uri)
        },
        start=start_files(job.config),
        patch=patch,
    )
    folder.put_atomic(RECORD, record.to_json())


def keep_weights(job: JobContext, sha256: str) -> None:
    """Add the sha256 of the exported weights to reproduce.json, and hand it to the tracking store."""
    record = replace(read_record(job.folder), weights_sha256=sha256)
    if job.config.model.is_trees:  # of both families, it is the network that started from them
        record = replace(record, start={})
    job.folder.put_atomic(RECORD, record.to_json())
    job.tracker.artifact(JOB, record.to_json(), RECORD, "reproduce")
    if record.patch == PATCH:
        job.tracker.artifact(JOB, job.folder.read_bytes(PATCH), PATCH, "reproduce")


def changed_since(before: Record, now: Environment) -> list[str]:
    """List what changed since an earlier command of the run, and influences weights."""
    new = [each.what for each in environment_differences(before.environment, now) if each.effect != "none"]
    return list(dict.fromkeys([*before.changed, *new]))


def datasets(config: RunConfig, dataset: str) -> Iterator[str]:
    """Yield URIs of the datasets that are read: `dataset`, which is the job's, and those of a mix."""
    yield dataset
    if config.data.mix is not None:
        yield from dict.fromkeys(part.dataset for part in config.data.mix.parts if part.dataset != dataset)


def start_files(config: RunConfig) -> dict[str, str]:
    """Return sha256 of the files of the start model; {} when training from scratch."""
    if config.model.start is not None:
        folder, file = weights_at(config.model.start.weights)
        return {f"{folder.uri}/{file}": folder.sha256(file)}
    if config.warm_start is None or config.warm_start.model is None:
        return {}
    folder = open_storage(config.warm_start.model)
    return {f"{folder.uri}/{name}": folder.sha256(name) for name in model_files(folder)}


def keep_patch(folder: Storage) -> str:
    """Write the checkout's changes as diff.patch, redacted; returns its name, or why it was not written."""
    words = [*GIT, str(Path(__file__).parent), "diff", "--no-ext-diff", "--no-textconv", "HEAD"]
    try:
        diff = subprocess.run(words, capture_output=True, timeout=GIT_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"not kept: {redact(str(error))}"
    if len(diff) > MOST_PATCH_BYTES:
        return f"not kept: {count_of(len(diff), 'byte')}, at most {MOST_PATCH_BYTES} are"
    folder.put_atomic(PATCH, redact(diff.decode(errors="replace")).encode())
    return PATCH
