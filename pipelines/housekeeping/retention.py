"""Decide what `sparkring gc` deletes. Pure: what there is and who needs it comes in, what goes comes out.

Three steps: `protect` says what MLflow and the run folders need, `decide` picks folders, `expendable_pointers` picks
MLflow's pointers to checkpoints that are gone or go.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, Protocol, get_args

from sparkring.conf.blocks.retention import KeepRule, RetentionConfig
from sparkring.conf.tasks import Family
from sparkring.pipelines.tracking.pointers import AliasedModel

Kind = Literal["dataset", "part", "run", "predictions", "checkpoints", "leftover"]
Root = Literal["datasets", "runs"]
Place = tuple[Root, str]  # a folder below that root
DAY_S = 86400.0
PREDICTIONS = "predictions"  # folder of a run
PLACES = ("", *(f"{family}/" for family in get_args(Family)))  # below a run: its own, and those of several families


class Dated(Protocol):
    """What a rule can be asked about."""

    @property
    def path(self) -> str: ...
    @property
    def created(self) -> datetime: ...


@dataclass(frozen=True)
class StoredDataset:
    """A finished dataset. `parts`: folders of its day partitions, below the root of datasets like `path`."""

    path: str
    fingerprint: str
    created: datetime
    bytes: int
    parts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StoredPart:
    path: str
    interval: str  # its first day
    created: datetime
    bytes: int


@dataclass(frozen=True)
class StoredRun:
    """A run folder. `alive`: whether its last process runs; None where this host cannot see it."""

    path: str
    fingerprint: str
    training_digest: str
    status: str
    alive: bool | None
    created: datetime
    bytes: int
    checkpoints: Mapping[str, int] = field(default_factory=dict)  # folder below the run's -> bytes
    predictions: Mapping[str, int] = field(default_factory=dict)  # likewise; families of models have their own


@dataclass(frozen=True)
class Leftover:
    """A folder that an earlier gc began to delete."""

    root: Root
    path: str
    bytes: int


@dataclass(frozen=True)
class Inventory:
    """What one recipe has on disk. `unreadable`: URIs of files that say what a dataset or run is, by kind.

    `others`: fingerprint -> why, of datasets that unfinished runs of other recipes use. `links`: what is behind a
    symbolic link, which is read but never deleted -> the link.
    """

    datasets: Sequence[StoredDataset] = ()
    parts: Sequence[StoredPart] = ()
    runs: Sequence[StoredRun] = ()
    leftovers: Sequence[Leftover] = ()
    unreadable: Mapping[Kind, Sequence[str]] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[Place, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Protected:
    """What must stay, and why: runs by folder, datasets by fingerprint. `all_parts`: why all partitions stay, or ""."""

    runs: Mapping[str, str]
    datasets: Mapping[str, str]
    all_datasets: str = ""
    all_parts: str = ""


@dataclass(frozen=True)
class TrackedState:
    """What MLflow knows that the disk does not.

    `live`: running job (`<recipe>/<run folder>`, or another name) -> fingerprint of its dataset; empty: not known yet.
    """

    aliased: Sequence[AliasedModel] = ()
    tagged_jobs: Sequence[str] = ()
    live: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Deletion:
    kind: Kind
    root: Root
    path: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Pointer:
    """What MLflow points at a checkpoint with. `path`: of the step's folder, below the recipe's run folders."""

    id: str
    name: str
    path: str


def protect(recipe: str, inventory: Inventory, tracked: TrackedState) -> Protected:
    """List the runs and datasets of the recipe that are still needed."""
    runs, datasets = dict[str, str](), dict(inventory.others)
    for model in tracked.aliased:
        why = f"{model.model}@{model.alias}"
        of_recipe, _, folder = model.job.rpartition("/")
        if of_recipe == recipe:
            runs[folder] = why
        elif not model.job and model.fingerprint:  # its MLflow run is gone: any run on its dataset may be the one
            runs |= {run.path: why for run in inventory.runs if run.fingerprint == model.fingerprint}
        if model.fingerprint:
            datasets[model.fingerprint] = why
    runs |= {job.rpartition("/")[2]: "tagged sparkring.keep" for job in tracked.tagged_jobs if _is_of(job, recipe)}
    for run in inventory.runs:
        if run.path in runs:
            datasets[run.fingerprint] = f"of the run {run.path}: {runs[run.path]}"
        elif can_continue(run, inventory.runs):
            runs[run.path] = f"{run.status}, can be continued"
            datasets[run.fingerprint] = f"of the run {run.path}, which can be continued"
    datasets |= {fingerprint: "a job is running" for fingerprint in tracked.live.values() if fingerprint}
    return Protected(runs, datasets, _all_datasets(inventory, tracked), _all_parts(inventory, tracked))


def _is_of(job: str, recipe: str) -> bool:
    return job.rpartition("/")[0] == recipe


def is_running(run: StoredRun) -> bool:
    return run.status == "running" and run.alive is not False


def can_continue(run: StoredRun, runs: Iterable[StoredRun]) -> bool:
    """Return whether a command may continue, or is running, the run (chosen as in pipelines/run/runs.py)."""
    if run.status == "finished":
        return False
    if is_running(run):
        return True
    return not any(
        later.path > run.path
        and later.status == "finished"
        and (later.training_digest, later.fingerprint) == (run.training_digest, run.fingerprint)
        for later in runs
    )


def _all_datasets(inventory: Inventory, tracked: TrackedState) -> str:
    if unreadable := inventory.unreadable.get("run"):
        return f"{unreadable[0]} cannot be read, so its dataset is not known"
    return "a job is running whose dataset is not known yet" if "" in tracked.live.values() else ""


def _all_parts(inventory: Inventory, tracked: TrackedState) -> str:
    if unreadable := inventory.unreadable.get("dataset"):
        return f"{unreadable[0]} cannot be read, so its parts are not known"
    if why := _all_datasets(inventory, tracked):
        return why
    there = {dataset.fingerprint for dataset in inventory.datasets}
    running = [run.fingerprint for run in inventory.runs if is_running(run)]
    building = [fingerprint for fingerprint in (*running, *tracked.live.values()) if fingerprint not in there]
    return f"a job is building the dataset {building[0][:12]}" if building else ""


def decide(inventory: Inventory, protected: Protected, rules: RetentionConfig, now: datetime) -> list[Deletion]:
    """List deletions in order: references go before what they refer to.

    Args:
        inventory: what is stored.
        protected: what must stay.
        rules: retention rules of the recipe.
        now: current time, with its zone.
    """

    def is_ours(deletion: Deletion) -> bool:
        return (deletion.root, deletion.path) not in inventory.links

    datasets = list(filter(is_ours, _decide_datasets(inventory, protected, rules.datasets, now)))
    gone = {deletion.path for deletion in datasets}
    return [
        *filter(is_ours, _decide_leftovers(inventory, protected)),
        *datasets,
        *filter(is_ours, _decide_parts(inventory, protected, rules.parts, now, gone)),
        *filter(is_ours, _decide_runs(inventory, protected, rules, now)),
    ]


def _decide_leftovers(inventory: Inventory, protected: Protected) -> list[Deletion]:
    """List leftovers to delete, except datasets and partitions being rebuilt in the same folder."""

    def is_free(leftover: Leftover) -> bool:
        if leftover.root == "runs":
            return True
        if leftover.path.startswith("parts/"):
            return not protected.all_parts
        needed = {fingerprint[:12] for fingerprint in protected.datasets}
        return not protected.all_datasets and leftover.path.rpartition("-")[2] not in needed

    why = "an earlier gc began to delete it"
    return [Deletion("leftover", f.root, f.path, f.bytes, why) for f in inventory.leftovers if is_free(f)]


def _decide_datasets(
    inventory: Inventory, protected: Protected, rule: KeepRule | None, now: datetime
) -> list[Deletion]:
    if protected.all_datasets:
        return []
    newest = sorted(inventory.datasets, key=lambda d: (d.created, d.path), reverse=True)
    old = expendable(newest, rule, now, "retention.datasets")
    return [
        Deletion("dataset", "datasets", d.path, d.bytes, old[d.path])
        for d in newest
        if d.path in old and d.fingerprint not in protected.datasets
    ]


def _decide_parts(
    inventory: Inventory, protected: Protected, rule: KeepRule | None, now: datetime, gone: Container[str]
) -> list[Deletion]:
    """List day partitions to delete: old or replaced ones that no remaining dataset uses.

    Args:
        inventory: what is stored.
        protected: what must stay.
        rule: rule of the recipe.
        now: current time, for ages.
        gone: paths of the datasets that are deleted.
    """
    if protected.all_parts:
        return []
    needed = {part for dataset in inventory.datasets if dataset.path not in gone for part in dataset.parts}
    newest = sorted(inventory.parts, key=lambda p: (p.interval, p.created, p.path), reverse=True)
    replaced = {p.path for i, p in enumerate(newest) if any(q.interval == p.interval for q in newest[:i])}
    old = expendable(newest, rule, now, "retention.parts", unranked=replaced)
    return [
        Deletion("part", "datasets", p.path, p.bytes, old[p.path])
        for p in newest
        if p.path in old and p.path not in needed
    ]


def _decide_runs(inventory: Inventory, protected: Protected, rules: RetentionConfig, now: datetime) -> list[Deletion]:
    newest = sorted(inventory.runs, key=lambda r: (r.created, r.path), reverse=True)
    free = [run for run in newest if run.path not in protected.runs]
    old = expendable(newest, rules.runs, now, "retention.runs")
    folders = [Deletion("run", "runs", r.path, r.bytes, old[r.path]) for r in free if r.path in old]
    left = [run for run in free if run.path not in old]
    predictions = expendable(newest, rules.predictions, now, "retention.predictions")
    checkpoints = expendable(newest, rules.checkpoints, now, "retention.checkpoints")
    return [
        *(
            Deletion("predictions", "runs", f"{r.path}/{folder}", size, predictions[r.path])
            for r in left
            if r.path in predictions
            for folder, size in r.predictions.items()
            if size
        ),
        *(
            Deletion("checkpoints", "runs", f"{r.path}/{folder}", size, checkpoints[r.path])
            for r in left
            if r.path in checkpoints
            for folder, size in r.checkpoints.items()
            if size
        ),
        *folders,
    ]


def expendable(
    newest_first: Sequence[Dated], rule: KeepRule | None, now: datetime, key: str, unranked: Container[str] = ()
) -> dict[str, str]:
    """Return what a rule lets go: path -> reason.

    Args:
        newest_first: all of a kind, newest first, including protected ones.
        rule: retention rule; None keeps everything.
        now: current time, with its zone.
        key: key of the rule in the recipe.
        unranked: paths that `keep` neither counts nor protects.
    """
    if rule is None:
        return {}
    found, number = dict[str, str](), 0
    for item in newest_first:
        days = (now - item.created).total_seconds() / DAY_S
        if days < -1:  # a clock was wrong: it stays, and takes no other's place among the newest
            continue
        counted = item.path not in unranked
        number += counted
        among_newest = counted and rule.keep is not None and number <= rule.keep
        is_young = rule.days is not None and days < rule.days
        if among_newest or is_young:
            continue
        why = [f"{days:.1f} days old ({key}.days = {rule.days:g})"] if rule.days is not None else []
        if rule.keep is not None:
            rank = f"number {number} from the newest" if counted else "replaced by a newer one"
            why.append(f"{rank} ({key}.keep = {rule.keep})")
        found[item.path] = ", ".join(why)
    return found


def expendable_pointers(
    pointers: Iterable[Pointer], there: Container[str], deletions: Sequence[Deletion]
) -> list[tuple[Pointer, str]]:
    """Pick the pointers whose checkpoint is gone or goes, each with the reason.

    Args:
        pointers: pointers in the recipe's experiment, listed before `there`.
        there: paths of those steps' folders that have a marker.
        deletions: the result of `decide`.
    """
    going = [d.path for d in deletions if d.root == "runs" and d.kind in ("run", "checkpoints", "leftover")]
    found = []
    for pointer in pointers:
        owner = next((path for path in going if pointer.path.startswith(f"{path}/")), None)
        if owner is not None:
            found.append((pointer, f"{owner} is deleted"))
        elif pointer.path not in there:
            found.append((pointer, "its checkpoint is gone"))
    return found


def run_created(folder: str) -> datetime | None:
    """Parse the start time of a run from its folder's name; None for a foreign name."""
    found = re.match(r"(\d{8}-\d{6})-", folder)
    try:
        return datetime.strptime(found[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC) if found else None
    except ValueError:
        return None
