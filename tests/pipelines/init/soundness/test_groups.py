"""Columns that name groups are found by what trees say and how they look; those that are merely of use are not."""

from __future__ import annotations

import numpy as np
import pytest

from sparkring.pipelines.init.soundness.groups import (
    CellRows,
    Gap,
    Values,
    codes_of,
    find_grouping,
    gap_of,
    group_folds,
    meets_seldom,
    rises,
    sample_groups,
)

MANY = 1200


def values(codes: np.ndarray, is_text: bool = True, is_code: bool = True) -> Values:
    return Values(codes_of(codes), None if is_text else codes.astype(float), is_text, not is_text, is_code)


def measured(rows_each: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups, the cells of their rows, of which the first are facts of the group, and labels with a hidden part."""
    draw = np.random.default_rng(seed)
    of = np.repeat(np.arange(MANY // rows_each), rows_each)
    fact, other, hidden = draw.normal(size=(3, MANY // rows_each))
    noise = draw.normal(size=MANY)
    return (
        of,
        np.column_stack([fact[of], other[of], noise]),
        2 * hidden[of] + 0.2 * noise + 0.3 * draw.normal(size=MANY),
    )


@pytest.mark.parametrize(("name", "rows_each"), [("patient_id", 4), ("Subject", 60), ("k", 12), ("k", 24)])
@pytest.mark.parametrize("is_number", [True, False])
def test_groups_with_a_hidden_quantity_are_found_by_name_or_order_or_features(
    name: str, rows_each: int, is_number: bool
) -> None:
    of, cells, labels = measured(rows_each)
    labels = labels if is_number else (labels > 0).astype(float)
    order = np.random.default_rng(1).permutation(MANY)
    for places in (np.arange(MANY), order):
        rows = CellRows(cells[places], ["fact", "other", "noise"], labels[places], is_number)
        found = find_grouping(rows, {name: values(of[places])}, in_order=True)
        assert found is not None and found.columns == (name,) and found.groups == MANY // rows_each
        assert found.gap.grouped > found.gap.random


@pytest.mark.parametrize("name", ["town", "product"])
def test_a_category_of_use_names_no_groups(name: str) -> None:
    draw = np.random.default_rng(0)
    of = draw.integers(0, 40, MANY)
    cells = np.column_stack([of, draw.normal(size=MANY)]).astype(float)
    labels = draw.normal(size=40)[of] + cells[:, 1] + 0.3 * draw.normal(size=MANY)
    rows = CellRows(cells, [name, "size"], labels, is_number=True)
    assert gap_of(rows, of).is_clear  # of a new value nothing would be known
    assert find_grouping(rows, {name: values(of, is_code=False)}, in_order=True) is None


def test_an_id_that_says_nothing_of_the_label_names_no_groups() -> None:
    draw = np.random.default_rng(0)
    of = np.repeat(np.arange(100), 12)
    rows = CellRows(draw.normal(size=(MANY, 2)), ["a", "b"], draw.normal(size=MANY), is_number=True)
    assert find_grouping(rows, {"user_id": values(of)}, in_order=True) is None


def test_units_that_are_measured_at_the_same_times_are_groups_whatever_their_name() -> None:
    draw = np.random.default_rng(0)
    of, time = np.repeat(np.arange(40), 30), np.tile(np.arange(30), 40)
    labels = 3 * draw.normal(size=40)[of] + 0.05 * time + draw.normal(size=MANY)
    order = draw.permutation(MANY)
    columns = {"q": values(of[order], is_text=False), "t": values(time[order], is_text=False)}
    rows = CellRows(time[order, None].astype(float), ["t"], labels[order], is_number=True)
    found = find_grouping(rows, columns, in_order=False)
    assert found is not None and found.columns == ("q",) and "the same t" in found.why
    assert not meets_seldom(codes_of(draw.integers(0, 40, MANY)), time)


def test_a_name_that_is_given_again_each_year_makes_groups_with_the_year() -> None:
    draw = np.random.default_rng(0)
    names, years, courses, labels = [], [], [], []
    for year in range(30):
        for name in draw.permutation(20)[:8]:
            steps = int(draw.integers(8, 24))
            names += [name] * steps
            years += [year] * steps
            courses.append(10 * draw.normal(size=3) + draw.normal(size=(steps, 3)).cumsum(axis=0))
            labels += [float(draw.random() < 0.5)] * steps
    columns = {"name": values(np.array(names)), "year": values(np.array(years), is_text=False)}
    rows = CellRows(np.concatenate(courses), ["lat", "long", "pressure"], np.array(labels), is_number=False)
    found = find_grouping(rows, columns, in_order=True)
    assert found is not None and found.columns == ("name", "year") and found.groups == 240


def test_rows_of_a_group_are_in_one_fold_and_folds_are_about_as_large() -> None:
    groups = np.repeat(np.arange(50), np.arange(1, 51))
    folds = group_folds(groups)
    assert all(len(set(folds[groups == group])) == 1 for group in range(50))
    assert np.bincount(folds).min() > 0.9 * len(groups) / 4


def test_a_sample_has_whole_groups_and_at_least_twenty() -> None:
    small = np.repeat(np.arange(500), 4)
    kept = sample_groups(small, 400)
    assert len(kept) == 400 and (np.diff(kept) > 0).all() and set(np.bincount(small[kept])) <= {0, 4}
    assert len(np.unique(np.repeat(np.arange(40), 1000)[sample_groups(np.repeat(np.arange(40), 1000), 400)])) == 20


def test_a_column_rises_within_groups_only_where_it_begins_anew_in_each() -> None:
    groups, week = np.repeat(np.arange(20), 10), np.tile(np.arange(10.0), 20)
    assert rises(groups, week) and rises(groups, -week)
    assert not rises(groups, np.arange(200.0)) and not rises(groups, np.ones(200))


def test_a_gap_is_clear_beyond_noise_and_a_share_of_the_loss() -> None:
    assert Gap(1.0, 1.2, 0.05).is_clear
    assert not Gap(1.0, 1.2, 0.1).is_clear and Gap(1.0, 1.04, 0.001).is_sure and not Gap(1.0, 1.04, 0.001).is_clear


def test_ids_whose_rows_are_pairs_as_of_users_and_films_name_no_groups() -> None:
    draw = np.random.default_rng(0)
    pairs = draw.permutation(60 * 200)[: 2 * MANY]
    users, films = pairs // 200, pairs % 200
    labels = draw.normal(size=60)[users] + draw.normal(size=200)[films] + 0.3 * draw.normal(size=len(pairs))
    columns = {"userId": values(users, is_text=False), "filmId": values(films, is_text=False)}
    rows = CellRows(np.column_stack([users, films]).astype(float), [*columns], labels, is_number=True)
    assert find_grouping(rows, columns, in_order=True) is None


def rooms(sites: int, rooms_each: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Site, room (numbered anew in each site), a number of the pair, and cells: both, and a fact of the room."""
    draw = np.random.default_rng(seed)
    site, room = draw.integers(0, sites, MANY), draw.integers(0, rooms_each, MANY)
    pair = site * rooms_each + room
    return site, room, pair, np.column_stack([site, room, draw.normal(size=sites * rooms_each)[pair]]).astype(float)


@pytest.mark.parametrize(("sites", "rooms_each"), [(5, 6), (4, 12), (12, 5)])
@pytest.mark.parametrize("names", [("site", "room"), ("building_id", "bed_no")])
def test_two_columns_that_only_together_name_groups_are_found(
    sites: int, rooms_each: int, names: tuple[str, str]
) -> None:
    site, room, pair, cells = rooms(sites, rooms_each)
    draw = np.random.default_rng(1)
    labels = 2 * draw.normal(size=sites * rooms_each)[pair] + 0.3 * draw.normal(size=MANY)
    columns = {names[0]: values(site, is_code=False), names[1]: values(room, is_text=False)}
    found = find_grouping(CellRows(cells, [*names, "fact"], labels, True), columns, in_order=False)
    assert found is not None and found.columns == names and found.groups == len(np.unique(pair))


def test_two_columns_of_which_each_has_its_own_effect_name_no_groups_together() -> None:
    """As stores and the days or kinds of what they sell: what is known of each tells the pair."""
    site, room, _, cells = rooms(5, 6)
    draw = np.random.default_rng(1)
    labels = 2 * draw.normal(size=5)[site] + draw.normal(size=6)[room] + 0.3 * draw.normal(size=MANY)
    columns = {"site": values(site, is_code=False), "room": values(room, is_text=False)}
    assert find_grouping(CellRows(cells[:, :2], ["site", "room"], labels, True), columns, in_order=False) is None
    noise = draw.normal(size=MANY)
    assert find_grouping(CellRows(cells, ["site", "room", "fact"], noise, True), columns, in_order=False) is None
