"""Train the families of models that a recipe names, and go on with the better one (model.family: both).

    <run>/trees/   checkpoints/ predictions/ model/ history.json of one family, as a run folder of that family alone
    <run>/net/     has them; trained.json: what its training gave, once it has ended
    <run>/         summary.json, report.html ..: of the better one

Each training is that of a recipe of its family (conf/rules/families.py); what follows knows the better one's recipe
alone. A command that continues the job trains what has no trained.json.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import numpy as np

from sparkring.conf.blocks.train import TrainConfig
from sparkring.conf.secrets import redacted
from sparkring.conf.storage import Storage
from sparkring.conf.stored import CLOSED, Label, Sha256, read, up_to
from sparkring.conf.tasks import Family
from sparkring.pipelines.context.context import JobContext, StartPoint
from sparkring.pipelines.evaluation.evaluate import read_predictions, row_weights
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.pipelines.job.train_step import train
from sparkring.pipelines.promotion.scores import resampled
from sparkring.pipelines.run.runs import training_digest
from sparkring.pipelines.tracking.tags import FAMILY, JOB
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.worker.result import FamilyChoice, Trained

log = logging.getLogger(__name__)
TRAINED = "trained.json"
RESAMPLES = 200  # of the validation rows


@dataclass(frozen=True, kw_only=True)
class TrainedFile:
    """The fields of trained.json."""

    __pydantic_config__ = CLOSED

    trained: Trained  # its paths are below the job's run folder
    training_digest: Sha256
    fingerprint: Label  # of the dataset
    format: Annotated[int, up_to(1)] = 1

    def to_json(self) -> bytes:
        return (json.dumps(redacted(asdict(self)), indent=1) + "\n").encode()


def train_best(job: JobContext, start: StartPoint | None) -> tuple[JobContext, Trained, dict[str, float]]:
    """Train each family of the recipe, and return the better one's job and training, and the seconds of all.

    `start`: the weights that the network starts from, if any.
    """
    families = job.config.model.families
    if len(families) == 1:
        return job, *train(job, start)
    log.info("training %s, one after the other; the better one goes on", " and ".join(families))
    jobs, trained, seconds = dict[Family, JobContext](), dict[Family, Trained](), Counter[str]()
    for family in families:
        jobs[family] = job.of_family(family)
        trained[family], spent = train_once(jobs[family], start if family == "net" else None)
        seconds.update(spent)
    choice = choose(job, trained)
    log.info("the model is that of %s", choice.describe())
    record_choice(job.tracker, choice)
    best = replace(trained[choice.winner], choice=choice)
    return jobs[choice.winner], best, {"launch_s": seconds["launch_s"], "train_s": seconds["train_s"]}


def train_once(job: JobContext, start: StartPoint | None) -> tuple[Trained, dict[str, float]]:
    """Train one family, unless an earlier command of this run has; paths are below the job's run folder."""
    folder, digest, fingerprint = job.training_folder, training_digest(job.config), job.dataset.manifest.fingerprint
    if (kept := kept_training(folder, digest, fingerprint)) is not None:
        log.info("%s: trained by an earlier command", job.family)
        return kept, {}
    trained, seconds = train(job, start)
    trained = placed(trained, str(job.family))
    file = TrainedFile(trained=trained, training_digest=digest, fingerprint=fingerprint)
    folder.put_atomic(TRAINED, file.to_json())
    return trained, seconds


def kept_training(folder: Storage, digest: str, fingerprint: str) -> Trained | None:
    """What a family's training gave, where it has ended.

    None too where checkpoint.allow_other_order continues the run as another training, or on another dataset.
    """
    if not folder.exists(TRAINED):
        return None
    file = read(TrainedFile, folder, TRAINED)
    return file.trained if (file.training_digest, file.fingerprint) == (digest, fingerprint) else None


def placed(trained: Trained, folder: str) -> Trained:
    """A training whose paths are below the folder that holds `folder`, which they are below now."""
    train, valid = trained.train, trained.train.exported_valid
    assert valid is not None, "ranks were asked for it"

    def below(path: str | None) -> str | None:
        return None if path is None else f"{folder}/{path}"

    return replace(
        trained,
        train=replace(
            train,
            weights=below(train.weights),
            predictions=below(train.predictions),
            exported_valid=replace(valid, predictions=below(valid.predictions)),
        ),
        predictions=[f"{folder}/{file}" for file in trained.predictions],
        valid_predictions=[f"{folder}/{file}" for file in trained.valid_predictions],
    )


def choose(job: JobContext, trained: Mapping[Family, Trained]) -> FamilyChoice:
    """Compare the models of both families on the validation rows, by train.best_metric."""
    config, metric = job.config.train, job.config.train.best_metric
    values = {family: valid_scores(each)[metric] for family, each in trained.items()}
    return FamilyChoice(
        metric=metric,
        winner=better_family(values, config),
        values=values,
        half_width=half_width(job, trained),
        train_s={family: each.train.train_s for family, each in trained.items()},
    )


def valid_scores(trained: Trained) -> dict[str, float]:
    """Metrics of a family's exported model over the validation rows."""
    assert trained.train.exported_valid is not None, "ranks were asked for it"
    return trained.train.exported_valid.metrics


def better_family(values: Mapping[Family, float], train: TrainConfig) -> Family:
    """The family with the better value; the first of equal ones, and never one whose value is no number."""
    sign = 1 if train.best_mode == "min" else -1
    return min(values, key=lambda family: sign * values[family] if math.isfinite(values[family]) else math.inf)


def half_width(job: JobContext, trained: Mapping[Family, Trained]) -> float | None:
    """Half of the 95 % interval of the difference of the metric, by paired resamples; None where it is no number."""
    config, kind, metric = job.config, job.config.model.kind, job.config.train.best_metric
    left_out = {file for each in trained.values() for file in _left_out(each)}
    if metric not in kind.resampled or left_out:  # of a damaged split the families may have read other rows
        return None
    rows = split_rows(job.dataset, config.train.valid_split, config.data, [])
    read_of = [read_predictions(job.folder, each.valid_predictions, rows) for each in trained.values()]
    labels, models = read_of[0][0], tuple(scores for _, scores in read_of)
    found = resampled(kind, metric, labels, models, RESAMPLES, row_weights(rows))
    width = 1.96 * float(np.std(found[:, 0] - found[:, 1]))
    return width if math.isfinite(width) else None


def _left_out(trained: Trained) -> list[str]:
    return trained.train.exported_valid.left_out if trained.train.exported_valid is not None else []


def record_choice(tracker: Tracker, choice: FamilyChoice) -> None:
    """Record the comparison in the job's run: values, their difference with its interval, and which family it is."""
    net, trees = choice.values["net"], choice.values["trees"]
    values = {f"valid/{family}/{choice.metric}": value for family, value in choice.values.items()}
    values |= {f"valid/net_minus_trees/{choice.metric}": net - trees}
    if choice.half_width is not None:
        values |= {f"valid/net_minus_trees_half_width/{choice.metric}": choice.half_width}
    tracker.metrics(JOB, 0, values)
    tracker.tags(JOB, {FAMILY: choice.winner, "sparkring.family_choice": choice.describe()})
