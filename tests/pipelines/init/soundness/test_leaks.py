"""Columns that give the label away are found by how little they leave open of it; features of the world are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sparkring.pipelines.init.soundness.groups import Array, Values, codes_of
from sparkring.pipelines.init.soundness.leaks import find_leaks

ROWS = 2000
DRAW = np.random.default_rng(0)
SIZE, AGE = DRAW.gamma(2, 40, ROWS), DRAW.integers(18, 90, ROWS)
PRICE = np.exp(SIZE / 100 + 0.3 * DRAW.normal(size=ROWS)) * 100
OTHER = DRAW.uniform(10, 100, ROWS)
SOLD = (SIZE / 60 + DRAW.normal(size=ROWS) > 1).astype(float)


def number(made: Array) -> Values:
    return Values(codes_of(np.unique(made, return_inverse=True)[1]), made.astype(float), False, False)


def text(made: Array) -> Values:
    return Values(codes_of(np.unique(made, return_inverse=True)[1]), None, True, False)


def flipped(share: float) -> Array:
    return np.where(np.random.default_rng(1).random(ROWS) < share, 1 - SOLD, SOLD)


def leaks(columns: dict[str, Values], label: Array, is_number: bool = True) -> dict[tuple[str, ...], str]:
    known = {"size": number(SIZE), "age": number(AGE)}
    found = find_leaks(known | columns, label, is_number, in_order=True)
    return {leak.columns: leak.how.format(label="y") for leak in found}


@pytest.mark.parametrize(
    ("made", "how"),
    [
        (3 - 2 * PRICE, "says what y is in all rows"),
        (np.log(PRICE), "says what y is in all rows"),
        ((1.1 * PRICE).round(), "alone tells"),
        ((100 * PRICE.argsort().argsort() / ROWS).round(), "alone tells"),
        (np.where(PRICE % 100 > 50, PRICE, -PRICE), "alone tells"),
        (PRICE + 3 * np.random.default_rng(3).normal(size=ROWS), "alone tells"),
        (np.floor(np.log2(PRICE)), "says in which range y is"),
        ((PRICE > 250).astype(float), "says in which range y is"),
        (np.append(PRICE[1:], 0), "is y of the next row"),
        (np.append(0, PRICE[:-1]), "is y of the row before"),
    ],
)
def test_a_column_that_gives_a_number_is_found_however_it_is_written(made: Array, how: str) -> None:
    found = leaks({"leak": number(made)}, PRICE)
    assert {*found} - {("size",)} == {("leak",)} and found["leak",].startswith(how)


def test_words_for_ranges_of_a_number_are_found() -> None:
    words = np.array(["low", "fair", "good", "top"])[np.searchsorted(np.quantile(PRICE, [0.25, 0.5, 0.75]), PRICE)]
    assert leaks({"band": text(words)}, PRICE) == {("band",): "says in which range y is"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: number(flipped(0.005)),
        lambda: text(np.where(flipped(0.01) > 0, "yes", "no")),
        lambda: number(5 * SOLD + DRAW.normal(size=ROWS)),
        lambda: text(np.char.add(np.where(SOLD > 0, "ok ", "no "), (np.arange(ROWS) % 7).astype(str))),
    ],
)
def test_a_column_that_gives_a_class_in_nearly_all_rows_is_found(make: Callable[[], Values]) -> None:
    found = leaks({"leak": make()}, SOLD, is_number=False)
    assert [*found] == [("leak",)] and ("alone gives y in 9" in found["leak",] or "in all rows" in found["leak",])


def test_a_flag_of_a_rare_class_is_found() -> None:
    rare = (np.random.default_rng(2).random(ROWS) < 0.06).astype(float)
    flag = np.where(np.random.default_rng(3).random(ROWS) < 0.002, 1 - rare, rare)
    assert [*leaks({"leak": number(flag)}, rare, is_number=False)] == [("leak",)]


@pytest.mark.parametrize(
    ("one", "two"), [(OTHER, PRICE - OTHER), (OTHER, PRICE + OTHER), (OTHER, PRICE * OTHER), (OTHER, PRICE / OTHER)]
)
def test_two_columns_that_give_a_number_together_are_found(one: Array, two: Array) -> None:
    found = leaks({"one": number(one), "two": number(two)}, PRICE)
    assert ([*found] == [("one", "two")] and "sum" in found["one", "two"]) or "product" in found["one", "two"]


def test_three_columns_that_add_up_to_the_label_are_found() -> None:
    parts = DRAW.dirichlet([2, 2, 2], ROWS) * PRICE[:, None]
    (found,) = leaks({f"part {n}": number(part) for n, part in enumerate(parts.T)}, PRICE)
    assert {*found} == {"part 0", "part 1", "part 2"}


@pytest.mark.parametrize("way", [np.add, np.multiply])
def test_two_columns_whose_difference_or_ratio_is_a_class_are_found(way: Callable[..., Array]) -> None:
    gap = np.where(SOLD > 0, 1.2, 0.8) + 0.05 * DRAW.normal(size=ROWS)
    found = leaks({"one": number(OTHER), "two": number(way(OTHER, gap))}, SOLD, is_number=False)
    assert [{*names} for names in found] == [{"one", "two"}]


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.5])
def test_a_strong_feature_is_no_leak(noise: float) -> None:
    """Of a diamond its weight tells 93 % of the order of prices."""
    area = PRICE * np.exp(noise * DRAW.normal(size=ROWS))
    assert leaks({"area": number(area), "place": text(AGE // 10)}, PRICE) == {}
    score = 2 * SOLD + (0.5 + noise) * DRAW.normal(size=ROWS)
    assert leaks({"score": number(score)}, SOLD, is_number=False) == {}


def test_an_id_of_few_rows_a_value_is_no_leak() -> None:
    assert leaks({"id": text(np.arange(ROWS) // 2), "code": text(np.arange(ROWS))}, SOLD, is_number=False) == {}
    assert leaks({"id": text(np.arange(ROWS) // 2)}, PRICE) == {}


def test_of_a_class_with_few_rows_nothing_is_told() -> None:
    label = np.zeros(ROWS)
    label[:5] = 1
    assert leaks({"leak": number(label)}, label, is_number=False) == {}
