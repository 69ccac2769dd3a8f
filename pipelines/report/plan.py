"""What a page shows of a plan: predicted next to measured, layouts by cause and memory, and the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparkring.conf.clusters.cluster import GIB
from sparkring.conf.plain_text import count_of
from sparkring.pipelines.model.sizes import size_text
from sparkring.pipelines.report import figures
from sparkring.pipelines.report.drawing import Cell, Drawn, FigureNumbers
from sparkring.training.worker.plan_record import LayoutCost, PlanRecord, pareto

PLAN = "plan_"  # begins the names of its figures
MOST_ROWS = 25  # of the table under the scatter


def plan_facts(record: PlanRecord) -> dict[str, str]:
    """Return the cluster, the layout, and predictions next to measurements, by label."""
    facts = {
        "cluster": f"{record.cluster} ({record.machines}), {count_of(record.world, 'rank')}",
        "layout": record.used.layout,
        "step": beside("{:.4g} s".format, record.used.step_s, record.measured_step_s),
        "peak memory": beside(size_text, record.peak, record.measured_peak),
    }
    if record.basis:
        facts["seconds"] = record.basis
    if record.others:
        best = min(record.others, key=lambda each: each.step_s)
        facts["next best"] = f"{best.layout}, {best.step_s / record.used.step_s - 1:+.1%} seconds a step"
    return facts


def beside(shown: Callable[[float], str], predicted: float, measured: float | None) -> str:
    """Format a prediction next to its measurement, if any, by `shown`."""
    if measured is None:
        return f"{shown(predicted)} predicted"
    return f"{shown(predicted)} predicted, {shown(measured)} measured ({predicted / measured - 1:+.1%})"


def draw_plan(record: PlanRecord | None) -> list[Drawn]:
    """Draw the figures of a plan; [] without one."""
    return [] if record is None else [_times(record), _memory(record), *_search(record)]


def _times(record: PlanRecord) -> Drawn:
    causes = [cause for cause in record.used.causes if any(each.causes.get(cause) for each in record.layouts)]
    names = [each.layout for each in record.layouts]
    by_cause = {cause: [each.causes.get(cause, 0.0) for each in record.layouts] for cause in causes}
    chosen = "; the first layout is the chosen one" if record.others else ""
    rows: list[tuple[Cell, ...]] = [
        (name, *(by_cause[c][n] for c in causes), record.layouts[n].step_s) for n, name in enumerate(names)
    ]
    return Drawn(
        f"{PLAN}time",
        f"Seconds of a step by cause, predicted for {record.cluster}{chosen}",
        figures.stacked_bars(by_cause, names, record.measured_step_s),
        FigureNumbers(["layout", *causes, "step"], rows),
        wide=True,
    )


def _memory(record: PlanRecord) -> Drawn:
    names, sizes = [each.layout for each in record.layouts], [in_gib(each) for each in record.layouts]
    if not record.others:  # the memory of others is not traced as far
        sizes = [record.peak / GIB]
    return Drawn(
        f"{PLAN}memory",
        f"Memory of the fullest rank, and the {record.limit / GIB:.3g} GiB that it may take",
        figures.limited_bars(sizes, names, record.limit / GIB),
        FigureNumbers(["layout", "GiB"], list(zip(names, sizes, strict=True))),
        wide=True,
    )


def _search(record: PlanRecord) -> Sequence[Drawn]:
    if not record.tried:
        return []
    points = [(seconds, size / GIB) for seconds, size in record.tried]
    front = [(seconds, size / GIB) for seconds, size in pareto(record.tried)]
    used = (record.used.step_s, in_gib(record.used))
    return [
        Drawn(
            f"{PLAN}search",
            "Layouts that can run: seconds of a step against memory; the line joins those that no other beats in both",
            figures.time_and_memory(points, front, used),
            FigureNumbers(["seconds of a step, on the line", "GiB"], front[:MOST_ROWS]),
            wide=True,
        )
    ]


def in_gib(layout: LayoutCost) -> float:
    return layout.memory / GIB
