"""Figures: the numbers they show, and the bytes they give."""

from __future__ import annotations

import re

from sparkring.pipelines.evaluation import binary as metrics
from sparkring.pipelines.report import figures


def test_figures_show_their_numbers() -> None:
    groups = [metrics.Group(str(i), 1000 - i, 0.5, 0.5) for i in range(60)]
    svg = figures.to_svg(figures.shares(groups, "city"))
    assert ">city<" in svg and ">39<" in svg and ">40<" not in svg  # the 40 most frequent
    assert svg.startswith("<svg") and not re.search(r"\d{4}-\d\d-\d\d", svg)
    assert figures.to_png(figures.curves({"a": [(1, 1.0)]}, "loss"))[:4] == b"\x89PNG"
