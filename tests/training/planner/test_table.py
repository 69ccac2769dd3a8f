"""The table of a plan: what is predicted, what is measured, what is left empty."""

from __future__ import annotations

from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.memory import StageMemory
from sparkring.training.planner.plan import CostPlan
from sparkring.training.planner.table import format_rows, parse_rows, table_rows


def plan(activations: int | None) -> CostPlan:
    stages = (StageMemory(10, 40, 40, 80, 44, 0, activations), StageMemory(12, 48, 48, 96, 52, 0, activations))
    return CostPlan(Mesh(pp=2), "torch", 22, 8, stages, {"pp": 3000}, 0.125, 4)


def test_memory_is_the_largest_stages_and_measured_values_are_beside_it() -> None:
    rows = {row["quantity"]: row for row in table_rows(plan(7), {"weights_bytes": 50.0, "unknown": 1.0})}
    assert rows["weights_bytes"]["predicted"] == 48 and rows["weights_bytes"]["measured"] == 50.0
    assert rows["activations_bytes"]["predicted"] == 7 and rows["sent_bytes pp"]["predicted"] == 3000
    assert "unknown" not in rows


def test_what_is_not_planned_is_left_empty() -> None:
    line = next(line for line in format_rows(table_rows(plan(None))).splitlines() if line.startswith("activations"))
    assert line.split() == ["activations_bytes", "per", "rank,", "largest"]


def test_bytes_are_in_units_that_a_person_reads_and_shares_have_four_digits() -> None:
    text = format_rows(table_rows(plan(1)))
    assert "2.9 KiB" in text and "0.1250" in text


def test_gradients_through_a_codec_have_their_bytes_without_it_beside_them() -> None:
    stages = (StageMemory(10, 40, 40, 80, 44, 0, 7, residuals=80),)
    coded = CostPlan(
        Mesh(dp=2), "horovod", 10, 8, stages, {"dp x cp": 10_000}, 0.0, 1, fewer_bytes_by="int8", dense_bytes=40_000
    )
    rows = {row["quantity"]: row for row in table_rows(coded)}
    assert rows["sent_bytes dp x cp"]["unit"] == "per rank and step, int8 (39.1 KiB without)"
    assert rows["residuals_bytes"]["predicted"] == 80
    assert "residuals_bytes" not in {row["quantity"] for row in table_rows(plan(7))}


def test_the_cells_of_a_table_are_found_again_and_another_text_has_none() -> None:
    for activations in (7, None):
        rows = table_rows(plan(activations), {"weights_bytes": 50.0})
        header, *found = parse_rows(format_rows(rows))
        assert header == ("quantity", "unit", "predicted", "measured")
        assert [cells[:2] for cells in found] == [(row["quantity"], row["unit"]) for row in rows]
        by_name = {cells[0]: cells[2:] for cells in found}
        assert by_name["weights_bytes"] == ("48 B", "50 B") and by_name["sent_bytes pp"] == ("2.9 KiB", "")
        assert by_name["activations_bytes"] == ("" if activations is None else "7 B", "")
        assert by_name["mesh"] == ("torch", "")
    assert parse_rows("") == parse_rows("bubble 0.5") == []
