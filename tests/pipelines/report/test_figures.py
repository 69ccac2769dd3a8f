"""Figures: the numbers they show, and the bytes they give."""

from __future__ import annotations

import re

from sparkring.pipelines.evaluation import binary as metrics
from sparkring.pipelines.report import figures
from sparkring.training.worker.result import Importance


def test_figures_show_their_numbers() -> None:
    groups = [metrics.Group(str(i), 1000 - i, 0.5, 0.5) for i in range(60)]
    svg = figures.to_svg(figures.shares(groups, "city"))
    assert ">city<" in svg and ">39<" in svg and ">40<" not in svg  # the 40 most frequent
    assert svg.startswith("<svg") and not re.search(r"\d{4}-\d\d-\d\d", svg)
    assert figures.to_png(figures.curves({"a": [(1, 1.0)]}, "loss"))[:4] == b"\x89PNG"


def test_long_names_that_begin_alike_stay_apart() -> None:
    """Cut after 14 characters, 60 columns and classes had one name."""
    names = [f"customer_lifetime_value_of_the_whole_household_of_year_{year}" for year in (2019, 2020)]
    made = [Importance(feature=name, mean=0.1, low=0.0, high=0.2) for name in names]
    groups = [metrics.Group(name, 1000, 0.5, 0.5) for name in names]
    for figure in (figures.importance_bars(made, "loss"), figures.shares(groups, "of")):
        texts = re.findall(r">(cust[^<]*)<", figures.to_svg(figure))
        assert len({*texts}) == 2 and all("\N{HORIZONTAL ELLIPSIS}" in text for text in texts)
