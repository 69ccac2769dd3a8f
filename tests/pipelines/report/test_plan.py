"""The plan in the report: predicted beside measured, layouts by cause and memory, the search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkring.conf.clusters.cluster import GIB
from sparkring.pipelines.cli import main
from sparkring.pipelines.report.plan import draw_plan, plan_facts
from sparkring.pipelines.report.report import build_report, plan_page
from sparkring.training.worker.plan_record import LayoutCost, PlanRecord, pareto
from tests.pipelines.report.test_report import inputs


def cost(layout: str, compute: float, exchange: float, gib: float) -> LayoutCost:
    return LayoutCost(layout=layout, causes={"compute": compute, "exchange": exchange}, memory=int(gib * GIB))


RECORD = PlanRecord(
    cluster="a100-80gb-efa",
    machines="A100-SXM4-80GB, efa",
    world=8,
    limit=74 * GIB,
    used=cost("dp(8), zero 1", 0.8, 0.2, 40.0),
    others=[cost("dp(4) * tp(2)", 0.9, 0.4, 30.0), cost("dp(2) * pp(4), 1f1b", 1.2, 0.3, 20.0)],
    tried=[(1.0, 40 * GIB), (1.3, 30 * GIB), (1.5, 20 * GIB), (1.6, 35 * GIB), (9.0, 5 * GIB)],
    predicted_peak=39 * GIB,
    measured_peak=40.0 * GIB,
    measured_step_s=1.25,
)


def test_predicted_is_shown_beside_measured() -> None:
    facts = plan_facts(RECORD)
    assert facts["step"] == "1 s predicted, 1.25 s measured (-20.0%)"
    assert facts["peak memory"] == "39.00 GiB predicted, 40.00 GiB measured (-2.5%)"
    assert "seconds" not in facts, "of before it was kept"
    assert plan_facts(replace(RECORD, basis="seconds are estimates"))["seconds"] == "seconds are estimates"
    assert facts["next best"] == "dp(4) * tp(2), +30.0% seconds a step"
    alone = replace(RECORD, others=[], measured_step_s=None, measured_peak=None, predicted_peak=None)
    assert plan_facts(alone)["step"] == "1 s predicted" and "next best" not in plan_facts(alone)


def test_the_front_is_what_no_other_layout_beats_in_both() -> None:
    front = pareto(RECORD.tried)
    assert front == [point for point in RECORD.tried if point != (1.6, 35 * GIB)]
    for point in set(RECORD.tried) - set(front):
        assert any(seconds <= point[0] and size <= point[1] for seconds, size in front)


def test_each_figure_has_its_numbers() -> None:
    times, memory, search = draw_plan(RECORD)
    assert times.numbers.columns == ["layout", "compute", "exchange", "step"]
    assert times.numbers.rows[1] == ("dp(4) * tp(2)", 0.9, 0.4, pytest.approx(1.3))
    assert [row[1] for row in memory.numbers.rows] == [40.0, 30.0, 20.0] and "74 GiB" in memory.caption
    assert len(search.numbers.rows) == 4
    assert draw_plan(None) == [] and len(draw_plan(replace(RECORD, tried=[]))) == 2


def test_a_prediction_alone_has_its_peak_in_the_figure_and_no_choice() -> None:
    times, memory = draw_plan(replace(RECORD, others=[], tried=[]))
    assert "chosen" not in times.caption and [row[1] for row in memory.numbers.rows] == [39.0]
    assert "chosen" in draw_plan(RECORD)[0].caption


def test_the_report_has_the_plan_of_a_job_that_was_predicted() -> None:
    page = build_report(inputs(planned=RECORD))
    assert "<h3>Plan</h3>" in page and "1.25 s measured (-20.0%)" in page and page.count("Pareto front") == 1
    assert "<h3>Plan</h3>" not in build_report(inputs())


def test_a_search_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["gpt-124m", "model.args.layers=2", "model.args.vocab=1024", "etl.text.seq_len=129"]
    page = tmp_path / "plan.html"
    assert main(["plan", "search", *small, "--cluster", "a100-80gb-efa", "--devices", "8", "--html", str(page)]) == 0
    text = capsys.readouterr().out
    shown = page.read_text()
    assert "gpt-124m on 8 devices" in shown and shown.count("<svg") == 3 and "<script" not in shown
    assert text.splitlines()[0] in shown, "the text is in the page too"
    assert "&lt;b&gt;" in plan_page("<b>", RECORD, "")


def test_of_layouts_with_as_much_memory_only_the_fastest_is_on_the_front() -> None:
    assert pareto([(2.0, 8), (1.0, 8), (1.0, 9), (3.0, 4)]) == [(1.0, 8), (3.0, 4)]
