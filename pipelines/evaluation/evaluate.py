"""Scores of the trained model on the held-out split, next to the baselines'."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkring.conf.blocks.etl import SplitConfig
from sparkring.conf.blocks.report import AlsConfig, ReportConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.errors import first_line
from sparkring.conf.features import UNSEEN_CODE
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of, score_text
from sparkring.conf.secrets import redact
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.tasks import OF_MANY_CLASSES, LabelForm, TaskKind, is_better
from sparkring.etl.errors import EtlError
from sparkring.pipelines import serving
from sparkring.pipelines.context.context import JobContext
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.balance import constant_guess, is_constant, label_balance
from sparkring.pipelines.evaluation.baselines.baseline import (
    NEEDS_SPARK,
    Baselines,
    Fitted,
    attempted,
    best_baseline,
    fit_baselines,
    left_out,
)
from sparkring.pipelines.evaluation.baselines.trees import TREES
from sparkring.pipelines.evaluation.calibrate import calibrate, with_test_errors
from sparkring.pipelines.evaluation.cautions import ScoredSplits, find_cautions, new_categories
from sparkring.pipelines.evaluation.groups import group_scores
from sparkring.pipelines.evaluation.importance import SampleSize, find_importances, mean_and_half_width, sample_rows
from sparkring.pipelines.evaluation.multilabel import scores_by_label
from sparkring.pipelines.evaluation.prediction_files import read_columns
from sparkring.pipelines.evaluation.ranking import ALS_NAME, POPULARITY, Ranking, make_ranking, popularity
from sparkring.pipelines.evaluation.split_rows import SplitRows, split_rows
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.data.features.transform import Categorical
from sparkring.training.metrics import Rows, perplexity, row_values, task_scores
from sparkring.training.model.folder import TrainedModel, described_model
from sparkring.training.model.recipe_model import pick_columns
from sparkring.training.worker.result import (
    MODEL,
    BaselineGap,
    CalibrationFit,
    Evaluated,
    GroupScores,
    Importance,
    LabelBalance,
    RankedLists,
    Trained,
    TrainResult,
    WorkerResult,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
EVALUATE = "evaluate"  # key of its run in MLflow


@dataclass(frozen=True)
class HeldOut:
    """Predictions of every test row, in the dataset's order."""

    labels: np.ndarray  # (N,) float64; 0 or 1, a class number, or a value; (N, labels) of 0 and 1
    scores: np.ndarray  # (N,), or (N, classes) or (N, labels)
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)  # column of report.share_by -> (N,) values as text
    weights: np.ndarray | None = None  # (N,) float64, how much each row counts; None: all equal

    def calibrated(self, fit: CalibrationFit | None) -> HeldOut:
        """Return the same rows with calibrated scores, if the model has a calibration."""
        return self if fit is None or fit.kept is None else replace(self, scores=fit.kept.of(self.scores))


def evaluate(job: JobContext, trained: Trained) -> tuple[Evaluated, HeldOut | None]:
    """Calibrate the model, and score it and the baselines on all rows of `train.test_split`.

    Returns the predictions too, where the task has any. Without a test split the scores are those of the validation
    split, before any calibration.
    """
    config, dataset = job.config, job.dataset
    balance = measure_labels(config, dataset, trained) if config.model.kind.is_table else {}
    fit = calibrate(config, job.folder, trained, balance)
    if config.train.test_split is None:
        return Evaluated(scores={MODEL: trained.model_valid()}, labels=balance, calibration=fit), None
    if config.model.kind.is_text:
        return evaluate_text(config, dataset.manifest, job.folder, trained.train), None
    if not trained.predictions:
        return Evaluated(scores={MODEL: dict(trained.train.test)}), None
    rows = scored_rows(config, dataset, trained)
    own = read_held_out(config, rows, job.folder, trained)
    unseen = count_unseen(rows)
    if unseen:
        log.info("test rows whose value no training row has, or too few: %s", unseen)
    check_finite(own.scores, rows)
    if not config.model.kind.is_table:
        return Evaluated(scores={MODEL: dict(trained.train.test)}, unseen=unseen), own
    held_out = own.calibrated(fit)
    evaluated = evaluate_table(job, trained, rows, held_out, balance)
    if fit is not None:
        fit = with_test_errors(fit, config.model.kind, own.labels, (own.scores, held_out.scores), own.weights)
    cautions = [*evaluated.cautions, *new_categories(unseen, len(own.labels))]
    return replace(evaluated, cautions=cautions, unseen=unseen, labels=balance, calibration=fit), held_out


def evaluate_table(
    job: JobContext, trained: Trained, rows: SplitRows, held_out: HeldOut, balance: Mapping[str, LabelBalance]
) -> Evaluated:
    """Score a model of a table: all test rows, groups of them, each label, lists of them; and the baselines.

    Args:
        job: job of the model.
        trained: result of the training.
        rows: rows of the test split.
        held_out: predictions of its rows by the model.
        balance: label balance of each split.
    """
    config, dataset, kind = job.config, job.dataset, job.config.model.kind
    columns = pick_columns(dataset.manifest, config.model.model_copy(update={"family": "net"}))  # as baselines see them
    assert columns.label is not None, "build_task has asked for it"
    check_labels(held_out.labels, ", ".join(columns.labels))
    label_names = dataset.manifest.label_names if kind.has_several_labels else []
    train = split_rows(dataset, "train", config.data, trained.train.train_left_out)
    read, labels = ([dataset.manifest.tensor(name) for name in names] for names in (columns.read, columns.labels))
    ranked = ranked_rows(job.spark, config, train, rows, held_out, columns.labels[0])
    baselines = Baselines()
    if config.report.baselines:
        baselines = fit_baselines(kind, train, rows, read, labels)
    ours = task_scores(kind, held_out.labels, held_out.scores, held_out.weights)
    tell_missing(kind, held_out.labels, ours)
    best = best_baseline(baselines.scores)
    gaps = {n: gap_to(kind, held_out, each) for n, each in baselines.fitted.items() if n in (TREES, best)}
    importance, importance_rows = measure_importance(job, trained, rows, held_out)
    return Evaluated(
        cautions=cautions_of(config, dataset, trained, importance) if config.report.baselines else [],
        importance=importance,
        importance_rows=importance_rows,
        scores={MODEL: known_scores(trained.train.test | ours | ranked.scores)}
        | baselines.scores
        | ranked.baselines.scores,
        trees_gap=gaps.get(TREES),
        best_gap=None if best == TREES else gaps.get(best),
        guess_gap=gap_to_guess(kind, held_out, balance.get("train")),
        missing=baselines.missing | ranked.baselines.missing,
        groups=scores_by_group(config, rows, held_out),
        by_label=scores_by_label(label_names, held_out.labels, held_out.scores, held_out.weights)
        if label_names
        else [],
        ranking=ranked.lists,
    )


def known_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """Omit scores that do not exist, such as an AUC of one class; a loss that is no number stays."""
    return {name: value for name, value in scores.items() if name == "loss" or not math.isnan(value)}


def cautions_of(config: RunConfig, dataset: Dataset, trained: Trained, importance: list[Importance]) -> list[str]:
    """List what makes the scores too good; [] if training uses other rows than the split's."""
    splits = compared_splits(config, dataset, trained)
    columns = pick_columns(dataset.manifest, config.model.model_copy(update={"family": "net"}))
    if "train" not in splits or len(splits) < 2:
        return []
    stored = TensorSource(dataset.manifest, columns.read).stored
    inputs = [column.name for column in stored if column.role not in ("label", "weight")]
    split = config.etl.split if config.etl is not None else SplitConfig()
    key = None if split.kind == "time" else split.key or ()
    return find_cautions(ScoredSplits(config.model.kind, splits, inputs, columns.labels[0], key), importance)


def tell_missing(kind: TaskKind, labels: np.ndarray, scores: Mapping[str, float]) -> None:
    """Log which metrics of the task test rows with these labels do not have, as an AUC of one class, and what to do."""
    missing = sorted(kind.directions.keys() - scores.keys() - {each.name for each in OF_MANY_CLASSES})
    if not missing:
        return
    values = np.unique(labels)
    why = f"each label is {values[0]:g}" if len(values) == 1 else "of some labels they have one value only"
    line = "the test rows have no %s: %s; hold out more rows, or others (etl.split), to judge the model by them"
    log.warning(line, ", ".join(missing), why)


def measure_importance(
    job: JobContext, trained: Trained, rows: SplitRows, held_out: HeldOut
) -> tuple[list[Importance], int]:
    """Measure the columns' importances on some test rows; [] if unwanted, or on failure, with a warning.

    Args:
        job: job of the model.
        trained: training with the place of its weights.
        rows: rows of the test split.
        held_out: labels and weights of the rows.
    """
    config, manifest = job.config, job.dataset.manifest
    assert trained.train.weights is not None, "training is finished"
    if not config.report.importance or not len(held_out.labels):
        return [], 0
    try:
        folder = job.folder.at(trained.train.weights)
        predictor = serving.table_predictor(folder, described_model(folder, config, manifest))
        if any(column.layout not in ("scalar", "vector") for column in predictor.raw.tensors):
            return [], 0  # of an image or a sequence there is nothing to compare with
        columns = predictor.stored_columns
        size = SampleSize.of(len(held_out.labels), len(columns))
        sample = sample_rows(rows, columns, held_out.labels, held_out.weights, size.rows)
        found = find_importances(predictor, config.model.kind, sample, size.repeats)
        if not all(math.isfinite(each.high) for each in found):
            return [], 0  # one row counts: with no other to take a value from
        return found, len(sample.table)
    except Exception as error:  # the model is trained by now
        why = redact(f"{type(error).__name__}: {first_line(error)}")
        log.warning("importance of columns: %s; the report goes without it", why)
        return [], 0


@dataclass(frozen=True)
class Ranked:
    """What `report.ranking` gives. `scores`: of the model."""

    lists: RankedLists | None = None
    scores: dict[str, float] = field(default_factory=dict)
    baselines: Baselines = field(default_factory=Baselines)


def ranked_rows(
    spark: SparkSession | None, config: RunConfig, train: SplitRows, rows: SplitRows, held_out: HeldOut, label: str
) -> Ranked:
    """Judge how the test rows of each list are ordered: by the model, by popularity, and by ALS.

    Args:
        spark: the job's session; None of a job without Spark.
        config: configuration of the run; without `report.ranking` nothing is judged.
        train: rows that popularity is counted in, and ALS fitted on.
        rows: rows of the test split.
        held_out: the model's predictions of them.
        label: name of the label's column.
    """
    wanted = config.report.ranking
    if wanted is None:
        return Ranked()
    values = rows.column(wanted.group, rows.manifest.column(wanted.group).dtype == "string")
    ranking = make_ranking(wanted, values, held_out.labels, held_out.weights)
    item, baselines = wanted.item, Baselines()
    if config.report.baselines and item is not None:
        baselines = attempted({POPULARITY: lambda: Fitted(ranking.scores(popularity(train, rows, item, label)))})
        if wanted.als is not None:
            fitted = fit_als(spark, wanted.als, ranking, (train, rows), (wanted.group, item, label))
            baselines = baselines.beside(fitted)
    ours = attempted({MODEL: lambda: Fitted(ranking.scores(held_out.scores))})
    return Ranked(ranking.counts, ours.scores.get(MODEL, {}), baselines)


def fit_als(
    spark: SparkSession | None,
    als: AlsConfig,
    ranking: Ranking,
    rows: tuple[SplitRows, SplitRows],
    columns: tuple[str, str, str],
) -> Baselines:
    """Fit and score matrix factorization, which Spark alone does here.

    Args:
        spark: the job's session; None of a job without Spark.
        als: settings of the factorization.
        ranking: ranking of the test rows.
        rows: training rows and test rows.
        columns: columns of the lists, their items and the label.
    """
    if spark is None:
        return left_out([ALS_NAME], NEEDS_SPARK)
    from sparkring.pipelines.evaluation.baselines.als import als_predictions

    return attempted({ALS_NAME: lambda: Fitted(ranking.scores(als_predictions(spark, als, *rows, columns)))})


def scores_by_group(config: RunConfig, rows: SplitRows, held_out: HeldOut) -> list[GroupScores]:
    """Score the test rows by the values of each column of `report.groups`."""
    labels, scores, weights = held_out.labels, held_out.scores, held_out.weights
    counted = np.ones(len(labels), bool) if weights is None else weights > 0

    def score(of: np.ndarray) -> dict[str, float]:
        return task_scores(config.model.kind, labels[of], scores[of], None if weights is None else weights[of])

    columns = text_columns(rows, config.report.groups)
    return [
        group
        for name, values in columns.items()
        for group in group_scores(name, values, counted, config.report.min_group_rows, score)
    ]


def measure_labels(config: RunConfig, dataset: Dataset, trained: Trained) -> dict[str, LabelBalance]:
    """Measure the labels of each split."""
    names = pick_columns(dataset.manifest, config.model.model_copy(update={"family": "net"})).labels
    labels = [dataset.manifest.tensor(name) for name in names]
    return label_balance(config.model.kind.form, compared_splits(config, dataset, trained), labels)


def compared_splits(config: RunConfig, dataset: Dataset, trained: Trained) -> dict[str, SplitRows]:
    """Return the splits' rows by name, train first; no train for a mix or Petastorm, which use other rows."""
    data, valid, test = config.data, config.train.valid_split, config.train.test_split
    splits = {}
    if data.mix is None and data.reader != "petastorm":
        splits["train"] = split_rows(dataset, "train", data, trained.train.train_left_out)
    if valid in dataset.manifest.splits:
        splits[valid] = split_rows(dataset, valid, data, [])
    return splits if test is None else splits | {test: scored_rows(config, dataset, trained)}


def evaluate_text(config: RunConfig, manifest: DatasetManifest, folder: Storage, train: WorkerResult) -> Evaluated:
    """Score a language model by perplexity per token, next to a model of token frequencies; with a sample of text."""
    split, test = config.train.test_split, train.test
    scores = {MODEL: test | {"perplexity": perplexity(test["loss"])}}
    if config.report.baselines:
        entropy = manifest.text["splits"][split]["unigram_entropy_nats"]
        scores["unigram frequencies"] = {"loss": entropy, "perplexity": perplexity(entropy)}
    assert train.weights is not None, "training is finished"
    model = folder.at(train.weights)
    writer = serving.Writer(config, manifest, serving.read_model(model, TrainedModel(config, manifest)))
    row = {"prompt": config.report.sample_prompt, "tokens": config.report.sample_tokens}
    (written,) = writer.predict([row])["text"]
    return Evaluated(scores=scores, sample=config.report.sample_prompt + written)


def lost_to(
    scores: Mapping[str, Mapping[str, float]], report: ReportConfig, missing: Mapping[str, str] | None = None
) -> list[str]:
    """List each baseline that the model does not beat in a metric of `report`: must_beat, or must_beat_trees.

    A baseline without the metric is skipped. A metric the model lacks, or one that is not a number, beats nothing; nor
    does the model beat a baseline that could not be computed. `scores`, `missing`: see Evaluated.
    """

    def wanted(name: str) -> list[str]:
        return report.must_beat_trees if name == TREES else report.must_beat

    def key(name: str) -> str:
        return f"report.must_beat{'_trees' * (name == TREES)}"

    lost = [
        f"{key(name)}: {name} could not be computed ({why})" for name, why in (missing or {}).items() if wanted(name)
    ]
    known = {metric for each in scores.values() for metric in each}
    nowhere = [metric for metric in dict.fromkeys(report.must_beat + report.must_beat_trees) if metric not in known]
    lost += [f"report.must_beat: {metric} has no value on the test rows" for metric in nowhere]
    for name, theirs in scores.items():
        for metric in wanted(name) if name != MODEL else ():
            ours = scores[MODEL].get(metric, math.nan)
            if metric in theirs and not is_better(metric, ours, theirs[metric]):
                numbers = f"{score_text(ours)} does not beat {score_text(theirs[metric])}"
                lost.append(f"{key(name)}: {metric} {numbers} of {name}")
    if report.must_beat_trees and TREES not in {*scores, *(missing or {})}:
        lost.append(f"{key(TREES)}: {TREES} were not fitted: there is no scalar feature to grow them on")
    return lost


def has_alias(config: RunConfig, result: TrainResult) -> bool:
    """Return whether the alias was given to the model."""
    if result.promotion is not None:
        return result.promotion.decision == "promoted"
    return not reasons_against(result, config.report)


def reasons_against(evaluated: Evaluated, report: ReportConfig) -> list[str]:
    """Explain why a model is not promoted, a line for each reason: a better baseline, or an uncertain gain."""
    return lost_to(evaluated.scores, report, evaluated.missing) + unproven(evaluated, report)


def unproven(evaluated: Evaluated, report: ReportConfig) -> list[str]:
    """Explain why a table's model is not known to beat a constant guess: [] where it is, or where this is not asked."""
    gap, train = evaluated.guess_gap, evaluated.labels.get("train")
    if not report.must_beat_guess or gap is None:
        return []
    remedy = "report.must_beat_guess=false promotes it all the same"
    if train is not None and is_constant(train):
        return [f"each training row has the same label, so nothing was learned; {remedy}"]
    if gap.is_better:
        return []
    width = "with one row there is no interval" if gap.half_width is None else f"± {gap.half_width:.2g}"
    numbers = f"loss {gap.ours:.5g} against {gap.theirs:.5g}, {gap.ours - gap.theirs:+.2g} ({width})"
    rows = count_of(gap.test_rows, "test row", ",")
    return [
        f"not certainly better than a constant guess on {rows}: {numbers}; hold out more rows (etl.split), or {remedy}"
    ]


def gap_to(kind: TaskKind, held_out: HeldOut, baseline: Fitted) -> BaselineGap:
    """Compare the losses of the model and of a baseline, row by row.

    The interval is that of a mean of paired differences (`mean_and_half_width`).

    Args:
        kind: kind of the task.
        held_out: predictions of the model.
        baseline: baseline fitted and scored on the same rows.
    """
    assert baseline.predictions is not None, "only rankings have none"
    weights = np.ones(len(held_out.labels)) if held_out.weights is None else held_out.weights
    counts, loss = weights > 0, kind.metric("loss")
    labels, weights = held_out.labels[counts], weights[counts] / weights[counts].sum()
    of_rows = [Rows(kind.form, labels, scores) for scores in (held_out.scores[counts], baseline.predictions)]
    of_model, of_baseline = (row_values(loss, rows) for rows in of_rows)
    _, found = mean_and_half_width(of_model - of_baseline, weights)
    half_width = found if math.isfinite(found) else None
    means = [float(weights @ values) for values in (of_model, of_baseline)]
    return BaselineGap(
        rows=baseline.rows, ours=means[0], theirs=means[1], half_width=half_width, test_rows=len(weights)
    )


def gap_to_guess(kind: TaskKind, held_out: HeldOut, train: LabelBalance | None) -> BaselineGap | None:
    """Compare the model with a constant guess by the labels of the training rows; None where these are not known.

    Of classes the guess is equal chances, where these have less loss: shares say little of rows of another time, and
    nothing of a class that no training row has.

    Args:
        kind: kind of the task.
        held_out: predictions of the model.
        train: label balance of the training rows.
    """
    if train is None:
        return None
    counts = slice(None) if held_out.weights is None else held_out.weights > 0
    shape = held_out.scores[counts].shape
    guesses = [constant_guess(kind, train, held_out.scores[0])]
    if kind.form is not LabelForm.NUMBER:
        guesses.append(np.array(1 / shape[1] if kind.form is LabelForm.CLASS else 0.5))
    fitted = [Fitted({}, np.broadcast_to(guess, shape), train.rows) for guess in guesses]
    return min((gap_to(kind, held_out, each) for each in fitted), key=lambda gap: gap.theirs)


def scored_rows(config: RunConfig, dataset: Dataset, trained: Trained) -> SplitRows:
    """Return the rows of the test split that the ranks have scored."""
    assert config.train.test_split is not None
    return split_rows(dataset, config.train.test_split, config.data, trained.train.test_left_out)


def check_finite(scores: np.ndarray, rows: SplitRows) -> None:
    """Raise EtlError that names the columns with infinite or NaN values where a prediction is not finite."""
    bad = int(np.count_nonzero(~np.isfinite(scores).reshape(len(scores), -1).all(axis=1)))
    if bad:
        numbers = [c.name for c in rows.manifest.columns if c.layout == "scalar" and c.dtype.startswith("float")]
        odd = [name for name in numbers if pc.all(pc.is_finite(rows.column(name))).as_py() is False]
        why = f"{odd} hold infinite or NaN values; null or clip them in SQL, or add a check" if odd else "it diverged"
        raise EtlError(f"{bad} of {count_of(len(scores), 'prediction')} of the test rows are not finite: {why}")


def check_labels(labels: np.ndarray, name: str) -> None:
    """Raise EtlError that names the label where it is not finite in a test row. labels (N,) or (N, labels)."""
    if bad := int(np.count_nonzero(~np.isfinite(labels).reshape(len(labels), -1).all(axis=1))):
        raise EtlError(
            f"{bad} of {count_of(len(labels), 'test row has')} a label {name!r} that is infinite or NaN, with which "
            "nothing can be compared; leave such rows out in SQL, or add a check of level row"
        )


def count_unseen(rows: SplitRows) -> dict[str, int]:
    """Count, by categorical feature, the rows whose value has no code: no training row has it, or fewer than min_count.

    Features without any are left out.
    """
    counts = {}
    for state in rows.manifest.fitted:
        if state["kind"] == "categorical":
            kind, stored = rows.manifest.features["inputs"][state["column"]], rows.manifest.column(state["column"])
            codes = Categorical(state, kind).of_stored(rows.column(stored.name, stored.dtype == "string"))
            counts[state["name"]] = int(np.count_nonzero(codes[state["name"]] == UNSEEN_CODE))
    return {name: count for name, count in counts.items() if count}


def read_held_out(config: RunConfig, rows: SplitRows, folder: Storage, trained: Trained) -> HeldOut:
    """Read the ranks' predictions of `rows`, and the columns of `report.share_by`, in the dataset's order.

    They are not calibrated, as ranks do not know how.
    """
    labels, scores = read_predictions(folder, trained.predictions, rows)
    return HeldOut(labels, scores, text_columns(rows, config.report.share_by), row_weights(rows))


def text_columns(rows: SplitRows, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the named columns' values as text, (N,) each, in the dataset's order."""
    stored = [rows.manifest.column(name) for name in names]
    return {c.name: group_values(rows.column(c.name, c.dtype == "string")) for c in stored}


def row_weights(rows: SplitRows) -> np.ndarray | None:
    """Return the weight of each row, (N,) float64, in the dataset's order; None for equal weights."""
    weight = rows.manifest.weight
    if weight is None:
        return None
    found = rows.column(weight["column"]).to_numpy().astype(np.float64)
    if not (found > 0).any():
        raise EtlError(f"etl.weight = {weight['column']!r}: every test row that was scored has the weight 0")
    return found


def read_predictions(run: Storage, files: list[str], test: SplitRows) -> tuple[np.ndarray, np.ndarray]:
    """Return (labels, scores) in the dataset's order.

    StoredError for damaged files; RuntimeError unless every test row was scored exactly once.
    """
    found, rows = read_columns(run, files, ["label", "prediction"]), test.row_numbers()
    if not np.array_equal(ids := found["id"], rows):
        raise RuntimeError(
            f"{run.uri}: {count_of(len(ids), 'prediction')} ({count_of(len(np.unique(ids)), 'row')}) for "
            f"{count_of(len(rows), 'test row')}"
        )
    return found["label"].astype(np.float64), found["prediction"]


def prediction_values(result: TrainResult) -> np.ndarray:
    """Return a finished run's predictions for its test rows, (N,) or (N, classes), as its model makes them.

    StoredError for damaged files.
    """
    fit, columns = result.calibration, read_columns(open_storage(result.run), result.predictions, ["prediction"])
    found = columns["prediction"]
    return found if fit is None or fit.kept is None else fit.kept.of(found)


def group_values(stored: pa.ChunkedArray) -> np.ndarray:
    """Convert the column to text, (N,): numbers as in numpy, dates as ISO 8601, nulls as `null`.

    Work is per distinct value: one Python string is made of each.
    """
    parts = [np.zeros(0, object)]
    for chunk in stored.chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        texts = np.array([*map(str, coded.dictionary.to_numpy(zero_copy_only=False)), "null"], object)
        parts.append(texts[coded.indices.fill_null(len(coded.dictionary)).to_numpy()])
    return np.concatenate(parts)
