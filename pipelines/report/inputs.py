"""What the report shows of a result: its labels, texts and numbers, in the page's order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from sparkring.conf.config import RunConfig
from sparkring.conf.load import leaves
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import PERPLEXITY, POSITIVE_SHARE
from sparkring.pipelines.evaluation.balance import differences, split_losses
from sparkring.pipelines.evaluation.baselines.baseline import beside_baselines
from sparkring.pipelines.evaluation.evaluate import HeldOut, has_alias, reasons_against
from sparkring.training.metrics import perplexity
from sparkring.training.planner.table import parse_rows
from sparkring.training.worker.result import MODEL, GroupScores, Scores, TrainResult

MOST_WORST = 5  # groups on the first screen
TOTAL = "total_s"  # among the timings: of all stages together


@dataclass(frozen=True)
class ReportInputs:
    """A view of a result for the page. What is empty is left out of the page."""

    result: TrainResult
    manifest: DatasetManifest
    predictions: HeldOut | None = None

    @cached_property
    def config(self) -> RunConfig:
        return self.result.run_config()

    @property
    def held_out(self) -> HeldOut | None:
        """The predictions of a task whose figures are known."""
        return self.predictions if self.config.model.kind.is_table else None

    @property
    def label(self) -> str:
        """The label's column."""
        labels = (column.name for column in self.manifest.columns if column.role == "label")
        return "label" if self.several else self.config.model.label or next(labels, "label")

    @property
    def several(self) -> list[str]:
        """The labels, where the model predicts several; else []."""
        return self.manifest.label_names if self.config.model.kind.has_several_labels else []

    @property
    def positive(self) -> str:
        """What a label of 1 means, for the captions."""
        labels = (column.name for column in self.manifest.columns if column.role == "label")
        label = self.config.model.label or next(labels, "positive")
        return f"{label} = {self.manifest.classes[-1]}" if self.manifest.classes else label

    @property
    def weight(self) -> str:
        """The column of the rows' weights; empty where all rows count equally."""
        return self.manifest.weight["column"] if self.manifest.weight is not None else ""

    def class_names(self, classes: int) -> list[str]:
        """List the label's classes in output order; numbers for classes without names."""
        return self.manifest.classes or self.several or [str(number) for number in range(classes)]

    @property
    def choice(self) -> str:
        """Which of two families of models this is, and by how much; empty where one was trained."""
        return "" if self.result.choice is None else self.result.choice.describe()

    @property
    def differences(self) -> str:
        """One sentence where train, valid and test differ much; empty elsewhere."""
        result = self.result
        losses = split_losses(result, result.scores.get(MODEL, {}), result.calibration)
        numbers = {int(name) for each in result.labels.values() for name in each.shares if name.isdecimal()}
        names = self.class_names(max(numbers, default=-1) + 1)
        return differences(result.labels, losses, self.label, {str(n): name for n, name in enumerate(names)})

    @property
    def stages(self) -> dict[str, float]:
        """Stage of the job -> seconds, and what is left of its whole time."""
        stages = {_cause(name): seconds for name, seconds in self.result.timings.items() if name != TOTAL}
        rest = self.result.timings.get(TOTAL, 0.0) - sum(stages.values())
        return stages | ({"other": rest} if rest > 0 else {})

    @property
    def scores(self) -> dict[str, Scores]:
        """Name -> metric -> value, the model first."""
        scores = {name: dict(values) for name, values in self.result.scores.items()}
        ours = scores[MODEL]
        ours.pop(POSITIVE_SHARE.name, None)
        if self.config.model.kind.is_text and "loss" in ours:
            ours.setdefault(PERPLEXITY.name, perplexity(ours["loss"]))
        return scores if ours else {name: values for name, values in scores.items() if name != MODEL}

    @property
    def groups(self) -> dict[str, list[GroupScores]]:
        """Column of `report.groups` -> its groups."""
        found: dict[str, list[GroupScores]] = {}
        for group in self.result.groups:
            found.setdefault(group.column, []).append(group)
        return found

    @property
    def ranking(self) -> str:
        """Of what the ranking scores are means; empty where there are none."""
        lists, wanted = self.result.ranking, self.config.report.ranking
        if lists is None or wanted is None:
            return ""
        rest = f"; the {lists.without_positive:,} without one do not count" if lists.without_positive else ""
        k = min(wanted.k)
        short = f" {lists.short:,} of them have no more than {k} rows, so a recall of 1 in any order." * (
            lists.short > 0
        )
        return (
            f"Recall and NDCG are means over the {count_of(lists.counted, 'value', ',')} of {lists.column} with a "
            f"positive test row, which have {count_of(lists.rows, 'row', ',')}{rest}. Rows of equal prediction count "
            f"the mean over their orders.{short}"
        )

    @property
    def beside_baselines(self) -> str:
        """A sentence on the model next to trees and the best other baseline; empty where there are none."""
        found = beside_baselines(self.result, self.config.model)
        return f"This model is {'; '.join(found)}." if found else ""

    @property
    def facts(self) -> dict[str, str]:
        """Label -> text or http(s) link."""
        config, result, train = self.config, self.result, self.result.train
        unit, ema = ("round", None) if config.model.is_trees else ("step", config.optim.ema)
        averaged = f", its weights averaged over steps (optim.ema = {ema})" if ema is not None else ""
        lost, alias = reasons_against(result, config.report), config.tracking.alias
        facts = {
            "model": self.model,
            f"{'the network, ' * result.is_blend}{unit}s": f"{train.steps:,} "
            f"({count_of(train.consumed_samples, 'sample', ',')}), best at {unit} {train.best_step}; the model is "
            f"{unit} {train.exported_step}'s{averaged}",
        }
        if result.calibration is not None:
            facts["probabilities"] = result.calibration.describe()
        if lost:
            facts["not good enough"] = f"{'; '.join(lost)}: the alias {alias!r} was not given to it"
        if result.start:
            facts["training started"] = result.start
        if len(result.scores) > 1 and "train" in result.labels:
            rows, trees = result.labels["train"].rows, result.trees_gap
            some = f", trees on {trees.rows:,} of them" if trees is not None and trees.rows < rows else ""
            facts["baselines"] = f"fitted on {count_of(rows, 'training row', ',')}{some}"
        if result.missing:
            facts["baselines without scores"] = "; ".join(f"{name} ({why})" for name, why in result.missing.items())
        if result.tracking_url:
            facts["MLflow"] = result.tracking_url
        return facts

    @property
    def places(self) -> dict[str, str]:
        """Label -> path, hash or engine: where everything is, for who looks for it."""
        result, train = self.result, self.result.train
        return {
            "run": result.run,
            "dataset": result.dataset,
            "fingerprint": self.manifest.fingerprint,
            "code": result.commit or "not a git checkout",
            "configuration": result.config_digest,
            "engine": f"{train.engine}, {count_of(train.world, 'rank')}",
        }

    @property
    def next(self) -> list[tuple[str, str]]:
        """(what for, command) of what may be run next."""
        purposes = {"longer": "Train longer", "trees": "Trees are better", "next": "Use the model"}
        parts = {name: text.partition("   (") for name, text in self.result.suggested.items()}
        return [
            (": ".join(filter(None, [purposes.get(name, name), why.removesuffix(")")])), command)
            for name, (command, _, why) in parts.items()
        ]

    @property
    def worst(self) -> list[tuple[GroupScores, float]]:
        """The groups with the highest losses, the worst first, each with its loss next to that of all rows."""
        ours = self.result.scores.get(MODEL, {}).get("loss")
        groups = [group for group in [*self.result.groups, *self.result.by_label] if "loss" in group.scores]
        if ours is None:
            return []
        higher = [(group, group.scores["loss"] - ours) for group in groups if group.scores["loss"] > ours]
        return sorted(higher, key=lambda each: -each[1])[:MOST_WORST]

    @property
    def layout(self) -> list[tuple[str, str, str, str]]:
        """The layout's plan as cells, its header first; [] where it is no such table."""
        return parse_rows(self.result.plan)

    @property
    def model(self) -> str:
        """The registered model by its version, which does not move, and whether it got the alias."""
        tracking = self.config.tracking.named(self.config.name)
        version = self.result.version or (self.result.promotion.version if self.result.promotion else None)
        if not tracking.enabled:
            return f"{self.result.run}/{self.result.train.weights}, not registered"
        named = f"models:/{tracking.registered_model}"
        if version is None:
            return f"{named}, whose version the tracking store had not given when this was written"
        return f"{named}/{version}" + (f", given the alias {tracking.alias!r}" if self.has_alias else "")

    @property
    def has_alias(self) -> bool:
        """Whether the alias was given to this model."""
        return has_alias(self.config, self.result)

    @property
    def promotion(self) -> dict[str, str]:
        """Label -> text of what was decided of the model; {} where nothing was to be decided."""
        found = self.result.promotion
        if found is None:
            return {}
        shown = {"decision": found.decision.replace("_", " "), "why": "; ".join(found.reasons)}
        shown |= {"date": found.date or "", "version": found.version or ""}
        shown |= {"judged against version": found.champion or ""}
        return {label: text for label, text in shown.items() if text}

    @property
    def losses(self) -> Mapping[str, list[tuple[int, float]]]:
        """Loss curves: name -> (step, value)."""
        return {name: points for name, points in self.result.history.items() if name.endswith("/loss")}

    @property
    def rates(self) -> dict[str, str]:
        """Label -> text with its unit."""
        result = self.result
        rates = {
            "whole job": f"{result.timings.get(TOTAL, sum(result.timings.values())):.1f} s",
            "training": f"{result.train.rows_per_s:,.0f} rows/s",
            "launch": f"{result.timings['launch_s']:.1f} s",
        }
        rates |= {_cause(name): f"{seconds:.2f} s" for name, seconds in result.once_s.items()}
        return rates | {f"{_cause(name)}, a step": f"{s * 1000:.1f} ms" for name, s in result.per_step_s.items()}

    @property
    def attempts(self) -> list[dict[str, object]]:
        """The failed attempts as rows of a table; what is None is left out."""
        return [{k: v for k, v in vars(attempt).items() if v is not None} for attempt in self.result.failed_attempts]

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """(key, value, where the value came from) of the resolved configuration."""
        origins = self.result.origins
        return [(key, str(value), origins.get(key, "default")) for key, value in leaves(self.result.config)]

    @property
    def window(self) -> dict[str, str]:
        """Label -> text of a dataset that is made of a window's day partitions; {} of another."""
        parts, written = self.result.parts, self.result.written_parts
        if not parts:
            return {}
        shown = {"parts": f"{len(parts)}: {', '.join(parts)}", "written for this run": ", ".join(written) or "none"}
        return shown | ({"missing": ", ".join(self.manifest.missing)} if self.manifest.missing else {})

    @property
    def class_balance(self) -> list[tuple[str, dict[str, tuple[int, float]]]]:
        """(class, split -> (rows, share of the split)) of a label of texts, or of several labels; [] of another."""
        counts = self.manifest.class_counts
        totals = {split: max(self.manifest.splits[split].rows, 1) for split in counts}
        return [
            (name, {split: (rows[i], rows[i] / totals[split]) for split, rows in counts.items()})
            for i, name in enumerate(self.manifest.classes or self.manifest.label_names)
        ]

    @property
    def splits(self) -> list[tuple[str, int, int, int]]:
        """(split, rows, files, bytes)."""
        return [
            (name, split.rows, split.files, sum(file.bytes for file in self.manifest.files_of(name)))
            for name, split in self.manifest.splits.items()
        ]


def _cause(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")
