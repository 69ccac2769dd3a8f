"""The layouts of a job on the cluster that it runs on: chosen at launch (parallel.layout: auto), or only predicted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from sparkring.conf.blocks.parallel import PLANNED, ParallelConfig
from sparkring.conf.clusters.cluster import Cluster
from sparkring.conf.config import RunConfig
from sparkring.conf.errors import first_line
from sparkring.conf.load import Resolved
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.pipelines.model.layouts import (
    apart_advice,
    layout_text,
    plan_record,
    seconds_text,
    total_steps,
    traced_recipe,
    why_behind,
)
from sparkring.pipelines.model.machine import RankCluster, cluster_of_recipe
from sparkring.pipelines.model.plan import device_of, on_world
from sparkring.pipelines.model.sizes import size_text
from sparkring.training.parallel.data_parallel.batch_norm import batch_norms
from sparkring.training.parallel.mesh import resolve_mesh
from sparkring.training.planner.search import (
    LayoutCosts,
    PlannedLayout,
    TracedModel,
    distinct,
    order,
    possible_layouts,
)
from sparkring.training.worker.plan_record import PlanRecord

log = logging.getLogger(__name__)
MOST_AHEAD = 16  # worlds whose layouts are found before they are needed
Refuses = Callable[[RunConfig], list[str]]


@dataclass(frozen=True)
class WorldPlan:
    """What is predicted of a job on so many ranks.

    cluster: that they run on. used: the layout that they train in. best: every layout that fits, the fastest first; ()
    where neither a layout nor a cluster was asked for. alone: the fastest of one rank; None: that was not asked for, or
    the step does not fit there.
    """

    cluster: Cluster
    used: PlannedLayout
    best: tuple[PlannedLayout, ...] = ()
    alone: PlannedLayout | None = None


class LaunchPlan:
    """Predicts a job's layouts, for each number of ranks that it may run on. For use by several threads.

    A plan that fails stops no training: then ranks have the layout of the recipe's `parallel` block, which is a ring
    where `layout` is auto.
    """

    def __init__(
        self, config: RunConfig, manifest: DatasetManifest | None, refuses: Refuses, cluster: RankCluster | None = None
    ) -> None:
        """Start without plans.

        Args:
            config: resolved configuration of the run.
            manifest: manifest of its dataset.
            refuses: returns why the `parallel` block makes a recipe impossible.
            cluster: cluster of its ranks; None for the recipe's, or this machine, inspected when planning.
        """
        self.config, self.manifest, self.refuses = config, manifest, refuses
        self._cluster = cluster
        self.is_auto = config.parallel.layout == "auto"
        self.is_asked_for = self.is_auto or config.launch.cluster is not None
        self.base = as_given(config.parallel)
        self._lock = threading.Lock()
        self._traced: TracedModel | None = None
        self._found: dict[int, WorldPlan | None] = {}
        self._failures: set[str] = set()

    @cached_property
    def cluster(self) -> RankCluster:
        """That the job's ranks run on."""
        return self._cluster or cluster_of_recipe(self.config)

    def at(self, world: int) -> WorldPlan | None:
        """Return the plan for this number of ranks; None if impossible, which is logged once."""
        with self._lock:
            if world not in self._found:
                self._found[world] = self._try_plan(world)
            return self._found[world]

    def resolved_at(self, resolved: Resolved, world: int) -> Resolved:
        """Return the configuration for this number of ranks, changed only if its layout is automatic."""
        if not self.is_auto:
            return resolved
        found = self.at(world)
        block = self.base if found is None else found.used.config.model_copy(update={"dp": -1})  # the rest: shrinks too
        config = resolved.config.model_copy(update={"parallel": as_given(block)})
        chosen = dict.fromkeys((f"parallel.{key}" for key in ("layout", "accumulate", *PLANNED)), self.origin)
        return replace(resolved, config=config, origins=resolved.origins | chosen)

    @property
    def origin(self) -> str:
        """Where a chosen value came from."""
        return f"planned for {self.cluster.name}"

    def plan_ahead(self, stopping: threading.Event) -> None:
        """Plan for the job's ranks, and for those that it may shrink to, before they are needed."""
        if not self.is_asked_for and device_of(self.config) == "cuda":
            return  # to look at a GPU takes some of its memory: once ranks have ended
        most, least = self.config.launch.world, self.config.launch.min_world
        worlds = range(most, (least or most) - 1, -1) if self.is_auto else [most]
        for world in worlds[:MOST_AHEAD]:
            if stopping.is_set():
                return
            self.at(world)

    def lines_at(self, world: int) -> list[str]:
        """Describe what was chosen for so many ranks, and why; [] where nothing was."""
        found = self.at(world) if self.is_auto else None
        if found is None:
            return []
        used, behind = found.used, distinct((found.used, *found.best), 2)[1:]
        line = f"layout on {count_of(world, 'rank')}: {layout_text(used)}: {seconds_text(used.time.total)} a step"
        line += f", planned for {self.cluster.name}"
        line += "".join(f"; next {layout_text(each)}: {why_behind(each, used)}" for each in behind)
        advice = apart_advice(found.alone, used, total_steps(self.config, self.manifest))
        return [line, found.cluster.basis, *([advice] if advice is not None else [])]

    def record_at(self, world: int) -> PlanRecord | None:
        """Return the prediction for this number of ranks, for summary.json; None if impossible."""
        found = self.at(world)
        if found is None:
            return None
        return plan_record(self.cluster.name, found.cluster, found.used, found.best)

    def _try_plan(self, world: int) -> WorldPlan | None:
        try:
            return self._plan(world)
        except Exception as error:  # a user's model may fail in any way
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        if why not in self._failures:
            self._failures.add(why)
            taken = "ranks train in a ring (parallel.layout = auto)" if self.is_auto else "steps are not predicted"
            log.log(logging.WARNING if self.is_asked_for else logging.DEBUG, "%s: %s", taken, why)
        return None

    def _plan(self, world: int) -> WorldPlan:
        if self._traced is None:
            self._traced = traced_recipe(self.config, self.manifest)
        if not self.is_asked_for:
            costs = self._costs(world)
            return WorldPlan(costs.cluster, costs.layout(self.base, resolve_mesh(self.base, world)))
        costs, ranked = self._ranked(world)
        best = tuple(layout for layout in ranked if costs.fits(layout))
        costs_alone, of_one = self._ranked(1)
        alone = next(filter(costs_alone.fits, of_one), None)
        if not self.is_auto:
            used = costs.layout(self.base, resolve_mesh(self.base, world))
        elif best:
            used = best[0]
        elif ranked:
            used = min(ranked, key=order("memory"))
            needed = f"{size_text(used.memory)} of {size_text(costs.limit)}"
            log.warning(
                "no layout fits on %s: %s needs %s, the least", count_of(world, "rank"), layout_text(used), needed
            )
        else:
            raise ValueError(f"no layout can run on {count_of(world, 'rank')}")
        return WorldPlan(costs.cluster, used, best, alone)

    def _ranked(self, world: int) -> tuple[LayoutCosts, list[PlannedLayout]]:
        """Return (costs on the devices of this number of ranks, layouts by time)."""
        costs = self._costs(world)
        ranked = sorted(possible_layouts(costs, self.base, world), key=order("time"))
        return costs, [*self._going_on(ranked)]

    def _costs(self, world: int) -> LayoutCosts:
        """Return costs on the devices of this number of ranks."""
        assert self._traced is not None
        return LayoutCosts(self._traced, self.cluster.of_ranks(world))

    def _going_on(self, layouts: Iterable[PlannedLayout]) -> Iterator[PlannedLayout]:
        """Yield layouts the recipe's rules allow and in which any checkpoint of this training can continue.

        Batch normalization averages over the rows of a pass, so its passes stay as they are.
        """
        assert self._traced is not None
        normalizes, verdicts = bool(batch_norms(self._traced.workload.model)), dict[str, bool]()
        for layout in layouts:
            block = layout.config
            if normalizes and (block.pp > 1 or block.accumulate != self.base.accumulate):
                continue
            cut = block.model_dump_json(exclude={"accumulate", "micro_batches"})
            if cut not in verdicts:
                verdicts[cut] = not self.refuses(on_world(self.config, layout.mesh.world, as_given(block)))
            if verdicts[cut]:
                yield layout


@contextmanager
def planning(config: RunConfig, manifest: DatasetManifest, refuses: Refuses) -> Iterator[LaunchPlan | None]:
    """Plan a job in a thread while the block runs; None for trees, and for servers unless their cluster is named.

    Args:
        config: resolved configuration of the run.
        manifest: manifest of its dataset.
        refuses: returns why a recipe cannot run, see LaunchPlan.
    """
    plan, stopping = LaunchPlan(config, manifest, refuses), threading.Event()
    if config.model.is_trees or (config.parallel.servers.per_host and not plan.is_asked_for):
        yield None
        return
    thread = threading.Thread(target=plan.plan_ahead, args=(stopping,), name="plan")
    thread.start()
    try:
        yield plan
    finally:
        stopping.set()
        thread.join()


def as_given(block: ParallelConfig) -> ParallelConfig:
    """Return the block as a person would have written it."""
    return block.model_copy(update={"layout": "given"})
