"""What a training run gave: one object from the ranks to the driver, summary.json, the report and MLflow.

`sparkring.training.worker.train:train` returns a `WorkerResult` on every rank. The driver makes a `TrainResult` around
rank 0's and what the job's other steps gave, each of which has a class below, and stores it as summary.json of the run
folder, field by field under their names. `sparkring report` reads it back. Seconds end in `_s`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from sparkring.conf.blocks.promote import MODEL
from sparkring.conf.config import RunConfig
from sparkring.conf.digest import digest
from sparkring.conf.manifest import ManifestError
from sparkring.conf.plain_text import count_of
from sparkring.conf.secrets import redacted
from sparkring.conf.storage import Storage
from sparkring.conf.stored import CLOSED, Count, RelativePath, named, read, up_to
from sparkring.conf.tasks import LOWER_IS_BETTER, Families, Family, is_better
from sparkring.training.model.calibration import Calibration
from sparkring.training.model.start_match import StartMatch
from sparkring.training.worker.plan_record import PlanRecord

SUMMARY = "summary.json"
GROUP_METRICS = ("loss", "auc", "macro_f1", "rmse")  # of groups in MLflow, as far as the task has them
_RESOLVED = ("config", "origins", "config_digest", "commit", "tracking_url")  # hold no secrets; see `to_json`
Scores = dict[str, float]
History = dict[str, list[tuple[Count, float]]]


@dataclass(frozen=True, kw_only=True)
class IdUses:
    """How often training batches used the ids of a sparse table, over all ranks and attempts."""

    __pydantic_config__ = CLOSED

    top: list[tuple[int, Count]]  # (id, uses) of the most used; each at most `missed` too low
    total: Count  # uses of all ids
    missed: Count


@dataclass(frozen=True, kw_only=True)
class ServerTotals:
    """What all servers have seen in the last attempt (parallel.servers), added up."""

    __pydantic_config__ = CLOSED

    gaps: dict[int, Count]  # steps that a rank was ahead of the slowest when it began one -> how often
    lags: dict[int, Count]  # updates of a server between a rank's pull and its push -> how often
    applied: Count  # pushes
    repeated: Count  # pushes that came again, and were not applied again
    rejected: Count  # pushes above max_lag, which were computed again
    not_finite: dict[int, Count]  # by rank; they were not applied
    late: dict[int, Count] = field(default_factory=dict)  # by rank; computed again, since their step had enough others

    @classmethod
    def of(cls, servers: Sequence[Mapping[str, Any]]) -> ServerTotals:
        """Add up what each server has counted."""
        histograms: dict[str, dict[int, int]] = {}
        for name in ("gaps", "lags", "not_finite", "late"):
            total = sum((Counter({int(k): n for k, n in each[name].items()}) for each in servers), Counter())
            histograms[name] = dict(sorted(total.items()))
        numbers = {name: sum(each[name] for each in servers) for name in ("applied", "repeated", "rejected")}
        return cls(**histograms, **numbers)  # type: ignore[arg-type]

    def metrics(self) -> Scores:
        """Return the values by MLflow's names: `servers/repeated`, `servers/gap/2`, `servers/lag_mean`."""
        found = {f"servers/{name}": float(getattr(self, name)) for name in ("applied", "repeated", "rejected")}
        found["servers/not_finite"] = float(sum(self.not_finite.values()))
        found |= {f"servers/late/{rank}": float(count) for rank, count in self.late.items()}
        for name, counts in (("gap", self.gaps), ("lag", self.lags)):
            total = sum(counts.values())
            found |= {f"servers/{name}/{value}": count / total for value, count in counts.items()}
            found[f"servers/{name}_mean"] = sum(value * count for value, count in counts.items()) / max(total, 1)
        return found


@dataclass(frozen=True, kw_only=True)
class SplitScores:
    """What the exported model scores on a split."""

    __pydantic_config__ = CLOSED

    metrics: Scores
    left_out: list[RelativePath] = field(default_factory=list)  # damaged files of the dataset no rank read
    predictions: RelativePath | None = None  # this rank's file, where the task has any


@dataclass(frozen=True, kw_only=True)
class WorkerResult:
    """What one rank returns; all but the files of predictions are the same on every rank."""

    __pydantic_config__ = CLOSED

    engine: str  # what carries gradients: horovod, torch-gloo, torch-nccl, servers, none
    world: Count  # ranks of the attempt that returned
    threads_per_rank: Count  # of torch
    finished: bool  # False: asked to stop; the same command continues from the last checkpoint
    steps: Count  # optimizer steps since the run began, skipped ones included
    consumed_samples: Count  # over all ranks and epochs
    skipped_steps: Count  # their gradients were not finite
    stopped_early: bool  # by train.early_stopping
    best_step: Count | None  # by train.best_metric; None: never evaluated
    best_value: float | None
    train_s: float  # of this attempt, without its start
    rows_per_s: float  # of this attempt, all ranks together
    valid: Scores  # the last validation metrics
    measured: Scores  # what the planner predicts, as it turned out; by the planner's names
    train_left_out: list[RelativePath] = field(default_factory=list)  # damaged files of the dataset no rank read
    test_left_out: list[RelativePath] = field(default_factory=list)
    weights: RelativePath | None = None  # folder of the exported model, below the run's; None until it is finished
    exported_step: Count | None = None  # whose weights these are
    test: Scores = field(default_factory=dict)  # metrics over train.test_split
    tables: dict[str, dict[str, Count]] = field(default_factory=dict)  # sparse table -> rows, admitted, evicted, bytes
    hot_ids: dict[str, IdUses] = field(default_factory=dict)  # by sparse table
    servers: ServerTotals | None = None  # None: ranks hold the weights
    started: StartMatch | None = None  # with which trained tensors (model.start)
    predictions: RelativePath | None = None  # this rank's file of test predictions, where the task has any
    exported_valid: SplitScores | None = None  # on the validation rows, where families are compared or it is calibrated

    def table_metrics(self) -> Scores:
        """Return the contents of sparse tables by MLflow's names: `tables/hashed.user/evicted`."""
        tables = self.tables.items()  # by the module's name, which MLflow takes as it is
        return {f"tables/{name}/{key}": float(count) for name, counts in tables for key, count in counts.items()}


@dataclass(kw_only=True)
class FailedAttempt:
    """One launch that did not reach the end, and what was decided then."""

    __pydantic_config__ = CLOSED

    attempt: Count
    world: Count
    cause: str
    message: str
    step: Count | None  # the last one the failing rank reported
    steps_lost: Count  # since the last checkpoint
    decision: str
    next_world: Count
    recover_s: float | None = None  # from the last step before the failure to the first one after it


@dataclass(frozen=True, kw_only=True)
class LabelBalance:
    """What the label is in the rows of a split."""

    __pydantic_config__ = CLOSED

    rows: Count
    shares: Scores = field(default_factory=dict)  # class -> share of the rows; the most frequent classes
    mean: float | None = None  # of a value; None: of classes
    std: float | None = None
    counts: list[Count] = field(default_factory=list)  # of a value: rows between two `edges`; the outermost have all
    edges: list[float] = field(default_factory=list)  # beyond; the same in every split


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """Scores of the model on the test rows of one value of a column."""

    __pydantic_config__ = CLOSED

    column: str
    value: str  # as text; of several together, what they are called
    rows: Count  # that count for something
    scores: Scores


@dataclass(frozen=True, kw_only=True)
class Importance:
    """By how much the test rows' loss grows where a column's values are those of other rows.

    Made by pipelines/evaluation/importance.py.
    """

    __pydantic_config__ = CLOSED

    feature: str  # raw column
    mean: float
    low: float  # of the 95 % interval of the mean, by the variance over rows
    high: float


@dataclass(frozen=True, kw_only=True)
class RankedLists:
    """Of what the ranking scores are means: the test rows of each value of a column are a list."""

    __pydantic_config__ = CLOSED

    column: str
    counted: Count  # lists with a positive row
    without_positive: Count  # the others, which count for nothing
    short: Count  # of the counted, those of no more rows than the smallest k: their recall is 1 in any order
    rows: Count  # of the counted


Decision = Literal["promoted", "rejected", "held", "dry_run", "older_date", "disabled"]


@dataclass(frozen=True, kw_only=True)
class RuleFinding:
    """What one rule of `promote` found, over all test rows or those of a slice."""

    __pydantic_config__ = CLOSED

    rule: str  # in words
    passed: bool
    rows: Count  # that the metric was taken over
    ours: float | None  # None: no number
    champion: float | None  # on the same rows; None: not compared
    slice: str = ""  # `origin = JFK`; empty: all rows
    resamples_met: float | None = None  # share of the resamples in which the rule holds; None: none were drawn


@dataclass(frozen=True, kw_only=True)
class DriftFinding:
    """What one rule of `drift` found for one column."""

    __pydantic_config__ = CLOSED

    column: str
    measure: str
    value: float | None  # None: not compared, see `note`
    max: float
    action: Literal["warn", "hold", "stop"]
    exceeded: bool
    note: str = ""  # why it was not compared


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """What was decided of a model: whether the alias moved to it, and why.

    promoted: it did. rejected: a rule or a baseline was not met. held: it could not be judged, or drift holds it.
    dry_run: judged, and the alias stays by `promote.mode`. older_date: the alias is on the model of a later date.
    disabled: not judged.
    """

    __pydantic_config__ = CLOSED

    decision: Decision
    reasons: list[str]  # one line each
    alias: str
    date: str | None = None  # of the job's data interval
    version: str | None = None  # of this model; None: not registered yet, or not known
    champion: str | None = None  # version that it was judged against, that had the alias; None: none had
    champion_scores: Scores = field(default_factory=dict)  # of it, on this run's test rows
    rules: list[RuleFinding] = field(default_factory=list)
    drift: list[DriftFinding] = field(default_factory=list)


def _has(name: str) -> AfterValidator:
    def check(values: dict[str, Any]) -> dict[str, Any]:
        if name not in values:
            raise ValueError(f"{name!r} is missing")
        return values

    return AfterValidator(check)


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What is run: of which recipe, on which dataset, by which code."""

    __pydantic_config__ = CLOSED

    name: str  # of the recipe
    run: str  # URI of the run folder
    dataset: str  # URI of its folder
    fingerprint: str  # of the dataset
    parts: list[str] = field(default_factory=list)  # first days of the intervals of a window; [] without intervals
    written_parts: list[str] = field(default_factory=list)  # those of them that this command wrote
    config: dict[str, Any]  # resolved
    origins: dict[str, str]  # key of `config` -> where its value came from
    config_digest: str
    commit: str  # of the code that trained; the dataset's own is in its manifest

    def run_config(self) -> RunConfig:
        """Return the configuration. ManifestError if this version of sparkring cannot read it."""
        with named(f"{self.run}/{SUMMARY}: the run's configuration", ManifestError):
            return RunConfig.model_validate(self.config)


FAMILY_TITLES: dict[Families, str] = {"net": "the network", "trees": "trees"}


@dataclass(frozen=True, kw_only=True)
class FamilyChoice:
    """What the model is, of a job that trains both families (model.family), by scores on the validation rows.

    Without a value of a blend (both) none was tried. Where it is the winner, the interval is that of its difference
    from the better family, and it may be behind that by less than a standard error. Made by `choose` in
    pipelines/job/families.py.
    """

    __pydantic_config__ = CLOSED

    metric: str  # train.best_metric
    winner: Families
    values: dict[Families, float]
    half_width: float | None  # of the 95 % interval of the difference, by paired resamples of the rows; None: no number
    train_s: dict[Family, float]
    share: float | None = None  # of the network in a blend; None: the model is one family's
    exported: dict[Family, int] = field(default_factory=dict)  # the step or round whose weights each family's model has

    def describe(self) -> str:
        """Describe in a line which family won, by what values, and whether that is certain."""
        best = self.values[self.winner]
        families = {name: value for name, value in self.values.items() if name not in (self.winner, "both")}
        others = sorted(families, key=lambda name: families[name], reverse=self.metric not in LOWER_IS_BETTER)
        gap, width = best - families[others[0]], self.half_width
        interval = "" if width is None else f" ± {width:.2g}"
        behind = self.winner == "both" and not is_better(self.metric, best, self.values[others[0]])
        is_unsure = width is not None and abs(gap) <= width
        unsure = f", not certainly {'worse' if behind else 'better'}" if is_unsure else ""
        of_others = " and ".join(f"{families[name]:.5g} of {FAMILY_TITLES[name]}" for name in others)
        tried = "" if self.winner == "both" or "both" not in self.values else f"; a blend: {self.values['both']:.5g}"
        certainty = f"({gap:+.2g}{interval}{unsure})"
        return f"{self.title()} by valid {self.metric} {best:.5g} against {of_others} {certainty}{tried}"

    def title(self) -> str:
        """Describe the model in words."""
        if self.share is None:
            return FAMILY_TITLES[self.winner]
        step = f" of step {self.exported['net']}" if "net" in self.exported else ""
        trees_round = f" of round {self.exported['trees']}" if "trees" in self.exported else ""
        return f"a blend ({self.share:.0%} the network{step}, {1 - self.share:.0%} trees{trees_round})"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training gave."""

    __pydantic_config__ = CLOSED

    train: WorkerResult  # rank 0's
    attempts: Count  # launches, over all commands
    failed_attempts: list[FailedAttempt]  # of this command
    history: History  # losses and validation metrics: name -> (step, value), over all attempts and commands
    resumed_from: Count | None = None  # step from which this command went on; None: from the first
    per_step_s: dict[str, float]  # cause -> rank 0's mean seconds per step, in the last attempt
    once_s: dict[str, float]  # cause -> seconds rank 0's reader needed once, to begin the last attempt
    predictions: list[RelativePath]  # files of all ranks, below the run folder
    plan: str = ""  # table of predicted and measured memory and bytes
    start: str = ""  # where training began and why, where the recipe says `warm_start.from` or `model.start`
    valid_predictions: list[RelativePath] = field(default_factory=list)  # the same of WorkerResult.exported_valid
    choice: FamilyChoice | None = None  # None: one family was trained
    planned: PlanRecord | None = None  # None: no cluster is named, or nothing could be planned for it

    @property
    def is_blend(self) -> bool:
        """Whether the model mixes two families' models; the steps, rounds and curves are the network's then."""
        return self.choice is not None and self.choice.winner == "both"

    def model_valid(self) -> Scores:
        """Return the validation metrics of the exported model, which may not be the last one measured."""
        if self.train.exported_valid is not None:
            return dict(self.train.exported_valid.metrics)
        of_valid = {name[6:]: dict(points) for name, points in self.history.items() if name.startswith("valid/")}
        step = self.train.exported_step
        at_step = {name: points[step] for name, points in of_valid.items() if step in points}
        return at_step or dict(self.train.valid)


@dataclass(frozen=True, kw_only=True)
class BaselineGap:
    """The loss of the model next to that of a baseline, on the same test rows.

    Made by `gap_to` in pipelines/evaluation/evaluate.py.
    """

    __pydantic_config__ = CLOSED

    rows: Count  # training rows that the baseline was fitted on
    ours: float
    theirs: float
    half_width: float | None  # of the 95 % interval of ours - theirs, by the variance over rows; None: not known
    test_rows: Count = 0  # that count for something; 0 in older files

    @property
    def is_better(self) -> bool:
        """Whether the model is certainly better than the baseline."""
        return self.half_width is not None and self.theirs - self.ours > self.half_width

    @property
    def is_worse(self) -> bool:
        """Whether the model is certainly worse than the baseline."""
        return self.half_width is not None and self.ours - self.theirs > self.half_width

    def describe(self, loss: str, baseline: str) -> str:
        """Compare the model with the baseline, in words that follow "it is".

        `loss`: its title; `baseline`: its name.
        """
        gap = self.ours - self.theirs
        numbers = f"{loss} {self.ours:.5g} against {self.theirs:.5g}, {gap:+.2g}"
        if self.half_width is None:
            return f"{'ahead of' if gap < 0 else 'behind'} {baseline} ({numbers} without an interval)"
        numbers += f" ± {self.half_width:.2g}"
        if abs(gap) <= self.half_width:
            return f"not certainly better or worse than {baseline} ({numbers})"
        return f"{'better' if gap < 0 else 'worse'} than {baseline} ({numbers})"


@dataclass(frozen=True, kw_only=True)
class CalibrationFit:
    """A calibration fitted on validation rows, and whether the model has it.

    Made by `fit_calibration` in pipelines/evaluation/calibrate.py. error_before, error_after: of the test rows; None:
    there are none, or the calibration is not kept.
    """

    __pydantic_config__ = CLOSED

    method: str
    rows: Count  # of the validation split that count for something
    loss_before: float  # log loss of the validation rows in nats
    loss_after: float  # the same, each row by a calibration that it was not fitted on
    gain_error: float = 0.0  # standard error of loss_before - loss_after; 0 in older files
    kept: Calibration | None  # None: the model's own probabilities stay
    shift: str = ""  # how labels of validation rows differ from those of training rows; then none is kept
    error_before: float | None = None
    error_after: float | None = None

    def describe(self) -> str:
        """Describe what was done, in a sentence without a full stop."""
        losses = f"log loss {self.loss_before:.5f} before, {self.loss_after:.5f} ± {self.gain_error:.5f} after"
        on = f"{count_of(self.rows, 'validation row', ',')} ({losses}, on rows it was not fitted on)"
        if self.shift:
            return (
                f"not calibrated: {self.shift}, and {self.method} of rows that differ like this would be wrong for "
                "others"
            )
        if self.kept is None:
            return f"not calibrated: {self.method}, the best of those tried, gains less than its error on {on}"
        test = ""
        if self.error_before is not None and self.error_after is not None:
            test = f"; calibration error of the test rows {self.error_before:.4f} before, {self.error_after:.4f} after"
        return f"calibrated by {self.method} on {on}{test}"


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What the test rows say of the model."""

    __pydantic_config__ = CLOSED

    scores: Annotated[dict[str, Scores], _has(MODEL)] = field(default_factory=dict)  # MODEL first, then baselines
    trees_gap: BaselineGap | None = None  # None: no trees were fitted
    best_gap: BaselineGap | None = None  # next to the baseline of the least loss, unless that is trees
    guess_gap: BaselineGap | None = None  # next to a constant guess by the training rows' labels; None: of no table
    missing: dict[str, str] = field(default_factory=dict)  # baseline that could not be computed -> why
    calibration: CalibrationFit | None = None  # None: none was fitted
    labels: dict[str, LabelBalance] = field(default_factory=dict)  # by split, train first; empty: not measured
    groups: list[GroupScores] = field(default_factory=list)  # by report.groups, column by column
    by_label: list[GroupScores] = field(default_factory=list)  # each of several labels; `rows` are those that have it
    ranking: RankedLists | None = None  # by report.ranking
    unseen: dict[str, Count] = field(default_factory=dict)  # categorical feature -> test rows of a value not trained on
    importance: list[Importance] = field(default_factory=list)  # the largest first; empty: not measured
    importance_rows: Count = 0  # test rows that it was measured on
    cautions: list[str] = field(default_factory=list)  # what speaks against the scores, a sentence each
    sample: str = ""  # language model: text it wrote

    def test_metrics(self) -> Scores:
        """Return test metrics by MLflow's names: `test/auc` for the model, `test/<baseline>/auc` next to it."""
        flat: Scores = {}
        for name, scores in self.scores.items():
            prefix = "test" if name == MODEL else f"test/{name.split(' (')[0].replace(' ', '_')}"
            flat |= {f"{prefix}/{metric}": value for metric, value in scores.items()}
        return flat

    def importance_table(self) -> dict[str, list[Any]]:
        """Return the importances in the form of MLflow's tables."""
        rows = [[each.feature, each.mean, each.low, each.high] for each in self.importance]
        return {"columns": ["feature", "mean", "low", "high"], "data": rows}

    def group_metrics(self) -> Scores:
        """Return GROUP_METRICS by MLflow's names: `test/by_carrier/UA/auc`; for a label `test/label/red/auc`."""
        named = [(f"by_{plain_name(group.column)}", group) for group in self.groups]
        named += [("label", label) for label in self.by_label]
        return {
            f"test/{of}/{plain_name(group.value)}/{metric}": group.scores[metric]
            for of, group in named
            for metric in GROUP_METRICS
            if metric in group.scores
        }


@dataclass(frozen=True, kw_only=True)
class Published:
    """What MLflow has of the run and its model."""

    __pydantic_config__ = CLOSED

    version: str | None = None  # of the registered model; None: the store had not answered when this was written
    promotion: Promotion | None = None  # None: neither gates nor a date; the alias moves as report.must_beat says
    tracking_url: str | None = None  # of the job's run


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What the run took."""

    __pydantic_config__ = CLOSED

    timings: Annotated[dict[str, float], _has("launch_s")]  # stage of the job -> seconds, in order
    etl: dict[str, float]  # stage of the dataset's build -> seconds; empty where it was found
    cost: dict[str, float] = field(default_factory=dict)  # core_hours_etl ..: see pipelines/housekeeping/cost.py


@dataclass(frozen=True, kw_only=True)
class TrainResult(Spent, Published, Evaluated, Trained, RunIdentity):
    """What one run gave, of all its steps."""

    __pydantic_config__ = CLOSED

    format: Annotated[int, up_to(1)] = 1
    suggested: dict[str, str] = field(default_factory=dict)  # what for -> command that may be run next

    def test_metrics(self) -> Scores:
        """Return the test metrics with the champion's, `test/champion/auc`."""
        champion = self.promotion.champion_scores if self.promotion else {}
        return super().test_metrics() | {f"test/champion/{metric}": value for metric, value in champion.items()}

    @classmethod
    def of(cls, *steps: RunIdentity | Trained | Evaluated | Published | Spent) -> TrainResult:
        """Join the results of a job's steps."""
        return cls(**{name: value for step in steps for name, value in vars(step).items()})

    def to_json(self) -> bytes:
        """Return summary.json, redacted; a resolved configuration holds no secrets any more."""
        values = asdict(self)
        shown = redacted(values) | {name: values[name] for name in _RESOLVED}
        return (json.dumps(shown, indent=1) + "\n").encode()


def plain_name(text: str) -> str:
    """Return a unique name for files and metrics: letters, digits, `_` and `-`."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", text)[:100]
    return plain if plain == text else f"{plain}-{digest(text)[:8]}"


def read_result(folder: Storage) -> TrainResult:
    """Read the result in a run folder. ManifestError if summary.json is missing or damaged."""
    if not folder.exists(SUMMARY):
        raise ManifestError(
            f"{folder.uri}: has no {SUMMARY}: the run has not finished (the same command goes on with it), "
            "or this is no folder of a run"
        )
    return read(TrainResult, folder, SUMMARY, ManifestError)
