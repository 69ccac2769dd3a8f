"""`sparkring gc`: list what a recipe has on disk and in MLflow, delete what `retention` decides.

A reference is deleted first: a dataset's manifest before its day partitions, MLflow's pointer before its checkpoint.
A folder is taken out of use by renaming the file that makes it whole (`run.json.deleted`), which also tells a later gc
what to finish; renaming and deleting need no room on the disk. What cannot be deleted is named, the rest still goes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NotRequired

import pyarrow.fs as pafs
from typing_extensions import TypedDict

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import MANIFEST_NAME, PART_NAME
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import OPEN, Label, RelativePath, StoredError, read
from sparkring.conf.uris import without_options
from sparkring.pipelines.housekeeping.retention import (
    PLACES,
    PREDICTIONS,
    Deletion,
    Inventory,
    Kind,
    Leftover,
    Place,
    Pointer,
    Root,
    StoredDataset,
    StoredPart,
    StoredRun,
    TrackedState,
    can_continue,
    decide,
    expendable_pointers,
    protect,
    run_created,
)
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.process_id import ProcessId, this_process
from sparkring.pipelines.run.process_id import is_running as process_runs
from sparkring.pipelines.run.runs import RUN_FILE, Runs
from sparkring.pipelines.tracking.client import client_limits
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.pointers import CheckpointPointer
from sparkring.training.checkpoint.layout import CHECKPOINTS, MARKER

log = logging.getLogger(__name__)
DELETED = ".deleted"  # after the name of the file that made a folder whole
WHOLE_BY: dict[Kind, str] = {"dataset": MANIFEST_NAME, "part": PART_NAME, "run": RUN_FILE}


@OPEN
class _PartOfDataset(TypedDict):
    folder: RelativePath


@OPEN
class _DatasetHead(TypedDict):
    """Of a manifest or `_part.json`, of any version, what gc needs."""

    fingerprint: Label
    created_at: Label
    name: NotRequired[Label]
    interval: NotRequired[Label]
    parts: NotRequired[list[_PartOfDataset]]


@dataclass(frozen=True)
class Roots:
    """Where the recipe `name` has its folders. `datasets` and `all_runs` hold those of other recipes too."""

    name: str
    datasets: Storage
    all_runs: Storage

    @property
    def runs(self) -> Storage:
        return self.all_runs.at(self.name)

    def at(self, root: Root) -> Storage:
        return self.datasets if root == "datasets" else self.runs


def collect_garbage(config: RunConfig, dry_run: bool, show: Callable[[str], None]) -> Exit:
    """Delete what the recipe's `retention` lets go, or only `show` it; each line has bytes and the reason.

    Returns Exit.RESOURCES where MLflow cannot be asked, or something could not be deleted; all else is done by then.
    """
    roots = Roots(config.name, open_storage(config.storage.datasets), open_storage(config.storage.runs))
    now = datetime.now(UTC)
    tracking = config.tracking.named(config.name)
    with client_limits(tracking):
        try:
            from sparkring.pipelines.tracking.store.cleanup import Cleanup  # mlflow: seconds

            store = Cleanup(tracking, knows_runs=_some_were_tracked(config))
            state = TrackedState(store.aliases(), store.tagged_jobs(), store.live_jobs())
            listed = store.pointers()
        except StoreUnreachable as error:
            show(f"nothing is deleted, all of it may be of a model with an alias: MLflow does not answer: {error}")
            return Exit.RESOURCES
        found = take_inventory(roots, state.live)
        protected = protect(config.name, found, state)
        deletions = decide(found, protected, config.retention, now)
        pointers = list(_pointers_of(roots.runs, listed))
        dead = expendable_pointers(pointers, _marked(roots.runs, pointers), deletions)
        if not config.retention.is_set:
            show("retention is not set, so no dataset, part or run is old; see docs/how-to/housekeeping.md")
        for link in sorted(set(found.links.values())):
            kind = "symbolic link" if os.path.islink(link) else "mount point"
            show(f"passed over: {link} is a {kind}; what it leads to is not deleted")
        if protected.all_parts:
            show(f"no part is deleted: {protected.all_parts}")
        if protected.all_datasets:
            show(f"no dataset is deleted: {protected.all_datasets}")
        deleter = _Deleter(roots, found, store.delete_pointer, dead, dry_run, show)
        for deletion in deletions:
            deleter.delete(deletion)
        deleter.delete_pointers(dead)
    total = sum(deletion.bytes for deletion in deleter.done)
    verb = "would be deleted" if dry_run else "deleted"
    show(
        f"{verb}: {count_of(len(deleter.done), 'folder')}, {count_of(total, 'byte', ',')}; "
        f"{count_of(len(deleter.gone), 'pointer')} to checkpoints"
    )
    return Exit.RESOURCES if deleter.failed else Exit.OK


class _Deleter:
    """Deletes one thing after the other, or says that it would."""

    def __init__(
        self,
        roots: Roots,
        inventory: Inventory,
        delete_pointer: Callable[[str], None],
        dead: list[tuple[Pointer, str]],
        dry_run: bool,
        show: Callable[[str], None],
    ) -> None:
        """Prepare to delete.

        Args:
            roots: storage roots of the recipe.
            inventory: what is stored.
            delete_pointer: deletes a pointer by its id.
            dead: pointers to delete, with reasons; those to a checkpoint go right before it.
            dry_run: only report deletions.
            show: prints a line.
        """
        self._roots, self._delete_pointer, self._dead = roots, delete_pointer, dead
        self._dry_run, self._show = dry_run, show
        self._parts = {dataset.path: dataset.parts for dataset in inventory.datasets}
        self._known_runs = {run.path for run in inventory.runs}
        self._needed = set[str]()  # day partitions of datasets that are there after all
        self.done: list[Deletion] = []
        self.gone: set[str] = set()  # model ids
        self.failed = 0

    def delete(self, deletion: Deletion) -> None:
        """Delete a folder, its pointers first. What cannot be deleted is shown and counted in `failed`."""
        storage = self._roots.at(deletion.root)
        if not self._dry_run and (why := self._taken(deletion)):
            self._needed |= self._parts.get(deletion.path, frozenset())
            self._show(f"kept     {storage.at(deletion.path).uri}: {why}")
            return
        inside = [
            (p, why) for p, why in self._dead if p.path.startswith(f"{deletion.path}/") and deletion.root == "runs"
        ]
        if not self.delete_pointers(inside):
            self.failed += 1
            self._show(f"kept     {storage.at(deletion.path).uri}: MLflow still points at its checkpoints")
            return
        try:
            if not self._dry_run:
                delete_folder(storage, deletion)
        except OSError as error:
            self.failed += 1
            self._needed |= self._parts.get(deletion.path, frozenset())
            self._show(f"failed   {storage.at(deletion.path).uri}: {error}; a later gc goes on with it")
            return
        self.done.append(deletion)
        where = storage.at(deletion.path).uri
        self._show(
            f"{self._verb} {deletion.kind:<11} {where}  {count_of(deletion.bytes, 'byte', ',')}  {deletion.reason}"
        )

    def delete_pointers(self, dead: Iterable[tuple[Pointer, str]]) -> bool:
        """Delete pointers that are not gone yet; False where the store refused one."""
        for pointer, why in dead:
            if pointer.id in self.gone:
                continue
            try:
                if not self._dry_run:
                    self._delete_pointer(pointer.id)
            except StoreUnreachable as error:
                self.failed += 1
                self._show(f"failed   pointer {pointer.name} ({pointer.id}): {error}")
                return False
            self.gone.add(pointer.id)
            self._show(f"{self._verb} {'pointer':<11} {pointer.name} ({pointer.id})  0 bytes  {why}")
        return True

    @property
    def _verb(self) -> str:
        return "would go" if self._dry_run else "deleted "

    def _taken(self, deletion: Deletion) -> str:
        """Explain why a dataset or partition must stay: its dataset remains, or a run started meanwhile."""
        if deletion.path in self._needed:
            return "a dataset that is still there needs it"
        if deletion.kind not in ("dataset", "part"):
            return ""
        here = this_process()
        for record in Runs(self._roots.all_runs.uri, self._roots.name).records():
            gone = process_runs(ProcessId(record.host, record.pid, record.start_ticks), here) is False
            if record.folder in self._known_runs or record.status != "running" or gone:
                continue
            if deletion.kind == "part" or deletion.path.endswith(f"-{record.fingerprint[:12]}"):
                return f"the run {record.folder} has begun meanwhile"
        return ""


def delete_folder(storage: Storage, deletion: Deletion) -> None:
    """Delete a folder so that one that is left half deleted is never read as whole, and is known as deleted."""
    path = deletion.path
    if (whole_by := WHOLE_BY.get(deletion.kind)) and storage.exists(f"{path}/{whole_by}"):
        storage.rename_file(f"{path}/{whole_by}", f"{path}/{whole_by}{DELETED}")
    if deletion.kind == "checkpoints":
        for marker in sorted(file for file in storage.own_files(path) if file.endswith(f"/{MARKER}")):
            storage.delete(marker)
    for name in _entries(storage.at(path)):
        if not name.endswith(DELETED):
            storage.delete(f"{path}/{name}")
    storage.delete(path)
    if deletion.root == "datasets" and path.startswith("parts/") and storage.is_local:
        with contextlib.suppress(OSError):  # the interval has other day partitions
            os.rmdir(storage.path(os.path.dirname(path)))


def _entries(folder: Storage) -> list[str]:
    infos = folder.fs.get_file_info(pafs.FileSelector(folder.root, allow_not_found=True))
    return sorted(info.base_name for info in infos)


# -- what there is


def take_inventory(roots: Roots, live: Mapping[str, str]) -> Inventory:
    """List the recipe's datasets, day partitions and runs, and who else uses its datasets. `live`: see TrackedState."""
    unreadable: dict[Kind, list[str]] = {"dataset": [], "part": [], "run": []}
    runs, half_runs = _runs(roots.all_runs, roots.name, live, unreadable["run"])
    datasets, half_datasets = _datasets(roots, unreadable["dataset"])
    parts, half_parts = _parts(roots, unreadable["part"])
    leftovers = [*half_runs, *half_datasets, *half_parts]
    links = _links(roots, [*datasets, *parts, *runs, *leftovers])
    return Inventory(datasets, parts, runs, leftovers, unreadable, _used_by_other_recipes(roots, live), links)


def _links(roots: Roots, found: Iterable[StoredDataset | StoredPart | StoredRun | Leftover]) -> dict[Place, str]:
    """Map (root, path) of everything behind a link or mount point to the link's path."""
    links = dict[Place, str]()
    for one in found:
        root: Root = one.root if isinstance(one, Leftover) else "runs" if isinstance(one, StoredRun) else "datasets"
        below = [f"/{place}{name}" for place in PLACES for name in (CHECKPOINTS, PREDICTIONS)]
        inside = ("", *below) if isinstance(one, StoredRun) else ("",)
        base, above = (roots.all_runs, f"{roots.name}/") if root == "runs" else (roots.datasets, "")
        for path in (one.path + each for each in inside):
            if link := base.way_out_on(above + path):
                links[root, path] = link
    return links


def _datasets(roots: Roots, unreadable: list[str]) -> tuple[list[StoredDataset], list[Leftover]]:
    found, leftovers = list[StoredDataset](), list[Leftover]()
    for folder in roots.datasets.list_folders():
        if not re.fullmatch(rf"{re.escape(roots.name)}-[0-9a-f]{{12}}", folder):
            continue
        head = _head(roots.datasets, f"{folder}/{MANIFEST_NAME}", unreadable)
        if head is not None and head.get("name") == roots.name:
            parts = frozenset(part["folder"] for part in head.get("parts", []))
            created, size = _time(head["created_at"]), tree_bytes(roots.datasets, folder)[""]
            found.append(StoredDataset(folder, head["fingerprint"], created, size, parts))
        leftovers += _leftover(roots.datasets, "datasets", folder, MANIFEST_NAME)
    return found, leftovers


def _parts(roots: Roots, unreadable: list[str]) -> tuple[list[StoredPart], list[Leftover]]:
    found, leftovers = list[StoredPart](), list[Leftover]()
    base = f"parts/{roots.name}"
    for interval in roots.datasets.at(base).list_folders():
        for print_ in roots.datasets.at(f"{base}/{interval}").list_folders():
            folder = f"{base}/{interval}/{print_}"
            if (head := _head(roots.datasets, f"{folder}/{PART_NAME}", unreadable)) is not None:
                size = tree_bytes(roots.datasets, folder)[""]
                found.append(StoredPart(folder, interval, _time(head["created_at"]), size))
            leftovers += _leftover(roots.datasets, "datasets", folder, PART_NAME)
    return found, leftovers


def _runs(
    all_runs: Storage, recipe: str, live: Mapping[str, str], unreadable: list[str] | None = None
) -> tuple[list[StoredRun], list[Leftover]]:
    """List the runs of a recipe, and those half deleted.

    Args:
        all_runs: folder of all recipes' runs.
        recipe: name of the recipe.
        live: running jobs, see TrackedState; it knows of processes on other hosts.
        unreadable: list to which URIs of unreadable files are added.
    """
    found, leftovers, here = list[StoredRun](), list[Leftover](), this_process()
    runs = Runs(all_runs.uri, recipe)
    for folder in runs.storage.list_folders():
        leftovers += _leftover(runs.storage, "runs", folder, RUN_FILE)
        created = run_created(folder)
        if created is None or not runs.storage.exists(f"{folder}/{RUN_FILE}"):
            continue
        try:
            record = runs.read(folder)
        except StoredError as error:
            log.warning("%s", error)
            if unreadable is not None:
                unreadable.append(f"{runs.storage.uri}/{folder}/{RUN_FILE}")
            continue
        alive = process_runs(ProcessId(record.host, record.pid, record.start_ticks), here)
        if alive is None and record.mlflow_run_id is not None:
            alive = f"{recipe}/{folder}" in live
        sizes = tree_bytes(runs.storage, folder)
        found.append(
            StoredRun(
                folder,
                record.fingerprint,
                record.training_digest,
                record.status,
                alive,
                created,
                sizes[""],
                {f"{place}{CHECKPOINTS}": sizes.get(f"{place}{CHECKPOINTS}", 0) for place in PLACES},
                {f"{place}{PREDICTIONS}": sizes.get(f"{place}{PREDICTIONS}", 0) for place in PLACES},
            )
        )
    return found, leftovers


def _used_by_other_recipes(roots: Roots, live: Mapping[str, str]) -> dict[str, str]:
    """Return fingerprint -> reason of datasets that unfinished runs of other recipes need."""
    used = dict[str, str]()
    for name in roots.all_runs.list_folders():
        if name != roots.name:
            runs, _ = _runs(roots.all_runs, name, live)
            used |= {run.fingerprint: f"of the run {name}/{run.path}" for run in runs if can_continue(run, runs)}
    return used


def _some_were_tracked(config: RunConfig) -> bool:
    return any(record.mlflow_run_id for record in Runs(config.storage.runs, config.name).records())


def _head(storage: Storage, relative: str, unreadable: list[str]) -> _DatasetHead | None:
    """Read the start of a manifest; None if missing, or damaged and added to `unreadable`."""
    if not storage.exists(relative):
        return None
    try:
        return read(_DatasetHead, storage, relative)
    except StoredError as error:
        log.warning("%s", error)
        unreadable.append(f"{storage.uri}/{relative}")
        return None


def _leftover(storage: Storage, root: Root, folder: str, whole_by: str) -> list[Leftover]:
    """Return the folder if an earlier gc started to delete it and nobody rebuilt it."""
    if storage.exists(f"{folder}/{whole_by}") or not storage.exists(f"{folder}/{whole_by}{DELETED}"):
        return []
    return [Leftover(root, folder, tree_bytes(storage, folder)[""])]


def _time(text: str) -> datetime:
    """Parse a stored time; now if unreadable, because an early time would delete too much."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def tree_bytes(storage: Storage, folder: str) -> dict[str, int]:
    """Sum file sizes below a folder: "" for all, and by subfolder down to the second level."""
    sizes = {"": 0}
    for path, size in storage.own_files(folder).items():
        above = path[len(folder) + 1 :].split("/")[:-1]
        for depth in range(min(len(above), 2) + 1):
            place = "/".join(above[:depth])
            sizes[place] = sizes.get(place, 0) + size
    return sizes


def _pointers_of(runs: Storage, listed: Iterable[CheckpointPointer]) -> Iterator[Pointer]:
    """Yield the listed pointers that lead below the recipe's run folders."""
    base = without_options(runs.uri).rstrip("/") + "/"
    for pointer in listed:
        path = without_options(pointer.uri)
        if path.startswith(base):
            yield Pointer(pointer.id, pointer.name, path[len(base) :])


def _marked(runs: Storage, pointers: Iterable[Pointer]) -> set[str]:
    """Return the paths of the pointers' existing checkpoints."""
    paths = sorted({pointer.path for pointer in pointers})
    sizes = runs.sizes_bytes([f"{path}/{MARKER}" for path in paths])
    return {path for path, size in zip(paths, sizes, strict=True) if size is not None}
