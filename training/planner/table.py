"""Show a plan as a table: what was predicted, and next to it what training has measured."""

from __future__ import annotations

import re
from typing import Any

from sparkring.conf.plain_text import count_of, size_text
from sparkring.training.parallel.averaging.rules import BETWEEN_HOSTS
from sparkring.training.parallel.mesh import used_axes
from sparkring.training.planner.memory import StageMemory
from sparkring.training.planner.plan import CostPlan

MEASURED_CUT = "; stages by estimated costs, training measures them"
HEADER = ("quantity", "unit", "predicted", "measured")
MEMORY_KINDS = ("start", "weights", "gradients", "optimizer", "gathered", "activations", "residuals")


def table_rows(plan: CostPlan, measured: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """Make rows of quantity, unit, predicted (None: not planned), and measured if in `measured`."""
    stage_unit = f"count, largest{MEASURED_CUT if plan.measured_cut else ''}"
    rows: list[tuple[str, str, Any]] = [
        ("mesh", f"{used_axes(plan.mesh)} = {count_of(plan.mesh.world, 'rank')}", plan.engine),
        ("parameters", "count", plan.parameters),
        ("parameters_per_stage", stage_unit, max(stage.parameters for stage in plan.stages)),
    ]
    for kind in MEMORY_KINDS:
        sizes = [getattr(stage, kind) for stage in plan.stages]
        if kind == "residuals" and not any(sizes):
            continue
        rows.append((f"{kind}_bytes", "per rank, largest", None if None in sizes else max(sizes)))
    rows.append(("peak_bytes", peak_unit(plan), fullest(plan).peak))
    evaluations = [stage.evaluation for stage in plan.stages if stage.evaluation is not None]
    if evaluations:
        rows.append(
            (
                "evaluation_bytes",
                f"per rank, largest: {count_of(plan.evaluated_rows, 'row', ',')} at a time",
                max(evaluations),
            )
        )
    if any(stage.offloaded for stage in plan.stages):
        rows.append(("offloaded_bytes", "host memory per rank, largest", max(s.offloaded for s in plan.stages)))
    if plan.reader is not None:
        rows.append(("reader_bytes", "host memory per rank, at most", plan.reader))
    if plan.tables:
        rows.append(("tables_bytes", "host memory per rank, at most", plan.tables))
    rows += [(f"sent_bytes {axis}", sent_unit(plan, axis), size) for axis, size in plan.sent_bytes.items()]
    rows.append(("export_bytes", "rank 0, beside its part", plan.export))
    rows.append(("bubble_share", "idle over ideal time", round(plan.bubble, 4)))
    known = measured or {}
    return [{"quantity": q, "unit": u, "predicted": v, "measured": known.get(q)} for q, u, v in rows]


def fullest(plan: CostPlan) -> StageMemory:
    """Return the pipeline rank with the highest peak."""
    return max(plan.stages, key=lambda stage: stage.peak or 0)


def peak_unit(plan: CostPlan) -> str:
    """Describe the components of a step's peak, the largest first."""
    parts = sorted(fullest(plan).at_peak.items(), key=lambda part: -part[1])
    total = sum(size for _, size in parts)
    shares = ", ".join(f"{kind} {size / total:.0%}" for kind, size in parts if size >= total / 100)
    return f"per rank, largest{': ' if shares else ''}{shares}"


def sent_unit(plan: CostPlan, axis: str) -> str:
    """Describe a count of bytes; with a codec or averaging, also the bytes without it."""
    if axis == BETWEEN_HOSTS:
        return f"per host and step, at most, {plan.fewer_bytes_by}"
    unit = "per rank and step"
    is_less = plan.fewer_bytes_by and axis == "dp x cp" and BETWEEN_HOSTS not in plan.sent_bytes
    return f"{unit}, {plan.fewer_bytes_by} ({size_text(plan.dense_bytes)} without)" if is_less else unit


def parse_rows(text: str) -> list[tuple[str, str, str, str]]:
    """Parse the cells of a table by `format_rows`, its header first; [] for other text."""
    lines = text.splitlines()
    if not lines or lines[0].split() != [*HEADER]:
        return []
    unit, end = lines[0].index(HEADER[1]), lines[0].index(HEADER[2]) + len(HEADER[2])  # of two columns
    found = []
    for line in lines:
        middle = (
            re.split(r"\s{2,}", line[unit:end].rstrip()) if line[end - 1 : end].strip() else [line[unit:end].strip()]
        )
        found.append((line[:unit].strip(), middle[0], middle[-1] if len(middle) > 1 else "", line[end:].strip()))
    return found


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Format as plain text, one line per quantity."""

    def show(value: Any, quantity: str) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        if "bytes" in quantity:
            return size_text(value)
        return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4f}"

    lines = [HEADER]
    lines += [
        (r["quantity"], r["unit"], show(r["predicted"], r["quantity"]), show(r["measured"], r["quantity"]))
        for r in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in lines
    )
