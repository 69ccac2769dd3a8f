"""Train the families of models that a recipe names, and continue with the better one, or a blend (model.family: both).

    <run>/trees/   checkpoints/ predictions/ model/ history.json of one family, as a run folder of that family alone
    <run>/net/     has them; trained.json: what its training gave, once it has ended
    <run>/         summary.json, report.html ..: of the better one, or of the blend (pipelines/job/blend.py)

Each training is that of a recipe of its family (conf/rules/families.py); what follows knows the better one's recipe
alone, or that of both where the model is a blend. A command that continues the job trains what has no trained.json.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from sparkring.conf.blocks.train import TrainConfig
from sparkring.conf.secrets import redacted
from sparkring.conf.storage import Storage
from sparkring.conf.stored import CLOSED, Label, Sha256, StoredError, read, up_to
from sparkring.conf.tasks import Families, Family
from sparkring.pipelines.context.context import JobContext, StartPoint
from sparkring.pipelines.job.blend import better_blend, read_pairs
from sparkring.pipelines.job.train_step import train
from sparkring.pipelines.run.runs import training_digest
from sparkring.pipelines.tracking.tags import FAMILY, JOB
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.model.folder import describe_model, model_files, write_digests
from sparkring.training.worker.result import FamilyChoice, Trained

log = logging.getLogger(__name__)
TRAINED = "trained.json"


@dataclass(frozen=True, kw_only=True)
class TrainedFile:
    """The fields of trained.json."""

    __pydantic_config__ = CLOSED

    trained: Trained  # its paths are below the job's run folder
    training_digest: Sha256
    fingerprint: Label  # of the dataset
    files: dict[
        Label, Sha256
    ]  # what the job reads of it: the model, and predictions; paths are below the job's run folder
    format: Annotated[int, up_to(1)] = 1

    def to_json(self) -> bytes:
        return (json.dumps(redacted(asdict(self)), indent=1) + "\n").encode()


def train_best(job: JobContext, start: StartPoint | None) -> tuple[JobContext, Trained, dict[str, float]]:
    """Train each family of the recipe, and return the better one's job and training, and the seconds of all.

    Of a blend the job is that of both, and the training the network's with the blend for its model.

    `start`: the weights that the network starts from, if any.
    """
    families = job.config.model.families
    if len(families) == 1:
        return job, *train(job, start)
    log.info("training %s, one after the other; the better one is kept", " and ".join(families))
    jobs, trained, seconds = dict[Family, JobContext](), dict[Family, Trained](), Counter[str]()
    for family in families:
        jobs[family] = job.of_family(family)
        trained[family], spent = train_once(jobs[family], start if family == "net" else None)
        seconds.update(spent)
    best, choice = choose(job, trained)
    log.info("chosen: %s", choice.describe())
    record_choice(job.tracker, choice)
    of_winner = job if choice.winner == "both" else jobs[choice.winner]
    return of_winner, replace(best, choice=choice), {"launch_s": seconds["launch_s"], "train_s": seconds["train_s"]}


def train_once(job: JobContext, start: StartPoint | None) -> tuple[Trained, dict[str, float]]:
    """Train one family, unless an earlier command of this run has; paths are below the job's run folder."""
    folder, digest, fingerprint = job.training_folder, training_digest(job.config), job.dataset.manifest.fingerprint
    if (kept := kept_training(job.folder, str(job.family), digest, fingerprint)) is not None:
        log.info("%s: trained by an earlier command", job.family)
        return kept, {}
    trained, seconds = train(job, start)
    assert trained.train.weights is not None, "training is finished"
    describe_model(model := folder.at(trained.train.weights), job.config, job.dataset.manifest)
    write_digests(model)
    trained = placed(trained, str(job.family))
    files = {name: job.folder.sha256(name) for name in files_of(job.folder, trained)}
    file = TrainedFile(trained=trained, training_digest=digest, fingerprint=fingerprint, files=files)
    folder.put_atomic(TRAINED, file.to_json())
    return trained, seconds


def kept_training(run: Storage, family: str, digest: str, fingerprint: str) -> Trained | None:
    """Read a family's finished training, if its files are unchanged; else None.

    Also None if checkpoint.allow_other_order continues the run as another training, or on another dataset.

    Args:
        run: folder of the job's run.
        family: family of the training, which names its folder.
        digest: digest of the wanted training.
        fingerprint: fingerprint of its dataset.
    """
    if not run.exists(f"{family}/{TRAINED}"):
        return None
    try:
        file = read(TrainedFile, run, f"{family}/{TRAINED}")
    except StoredError as error:
        log.warning("%s: %s; it is trained again", family, error)
        return None
    if (file.training_digest, file.fingerprint) != (digest, fingerprint):
        return None
    if changed := [name for name, sha256 in file.files.items() if not run.exists(name) or run.sha256(name) != sha256]:
        log.warning("%s: %s is not as its training left it; it is trained again", family, f"{run.uri}/{changed[0]}")
        return None
    return file.trained


def files_of(run: Storage, trained: Trained) -> list[str]:
    """List a finished training's files that the job reads later, relative to the run folder `run`."""
    model = str(trained.train.weights)
    return [f"{model}/{n}" for n in model_files(run.at(model))] + [*trained.predictions, *trained.valid_predictions]


def placed(trained: Trained, folder: str) -> Trained:
    """Move a training's paths from `folder` to the folder above it."""
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


def choose(job: JobContext, trained: Mapping[Family, Trained]) -> tuple[Trained, FamilyChoice]:
    """Compare the models of both families, and a blend, on the validation rows by train.best_metric."""
    config, metric = job.config.train, job.config.train.best_metric
    values = {family: valid_scores(each)[metric] for family, each in trained.items()}
    winner = better_family(values, config)
    net, trees = trained["net"], trained["trees"]
    valid = read_pairs(job.folder, job.config.model.kind, net.valid_predictions, trees.valid_predictions)
    choice = FamilyChoice(
        metric=metric,
        winner=winner,
        values=dict[Families, float](values.items()),
        half_width=None if valid is None else valid.half_width(metric, valid.net, valid.trees),
        train_s={family: each.train.train_s for family, each in trained.items()},
        exported={family: step for family, each in trained.items() if (step := each.train.exported_step) is not None},
    )
    if job.config.model.blend == "none" or valid is None:
        return trained[winner], choice
    blend, choice = better_blend(job, trained, choice, valid)
    return blend or trained[winner], choice


def valid_scores(trained: Trained) -> dict[str, float]:
    """Return the exported model's metrics on the validation rows."""
    assert trained.train.exported_valid is not None, "ranks were asked for it"
    return trained.train.exported_valid.metrics


def better_family(values: Mapping[Family, float], train: TrainConfig) -> Family:
    """Return the family with the better value, first among equals; a value that is no number loses."""
    sign = 1 if train.best_mode == "min" else -1
    return min(values, key=lambda family: sign * values[family] if math.isfinite(values[family]) else math.inf)


def record_choice(tracker: Tracker, choice: FamilyChoice) -> None:
    """Record the comparison in the job's run: values, their difference with its interval, and what the model is."""
    net, trees = choice.values["net"], choice.values["trees"]
    values = {f"valid/{family}/{choice.metric}": value for family, value in choice.values.items()}
    values |= {f"valid/net_minus_trees/{choice.metric}": net - trees}
    if choice.half_width is not None and choice.share is None:
        values |= {f"valid/net_minus_trees_half_width/{choice.metric}": choice.half_width}
    tracker.metrics(JOB, 0, values)
    tracker.tags(JOB, {FAMILY: choice.winner, "sparkring.family_choice": choice.describe()})
