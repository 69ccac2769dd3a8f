"""How often `sparkring init` finds planted groups and leaks, and how often it warns of tables that have none.

    python benchmarks/split_warnings.py [--out benchmarks/results/split_warnings_202611.md]

Clean tables are those of scikit-learn, R and the arena (tables_data.py) in which rows are independent as far as anybody
knows, and some that are drawn here. Groups and leaks are planted into tables that are drawn here, and there are real
tables of repeated measures. A warning is another split than a random one by groups, or a remark of a leak.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
from machine import measured_with, publish
from tables_data import of_r

from sparkring.pipelines.init.columns import Columns, decide_columns
from sparkring.pipelines.init.sample import read_sample
from sparkring.pipelines.init.split import with_split

Draw = np.random.Generator
LEAK = "too good to be true"
CLEAN_OF_R = [
    *("modeldata/ames:Sale_Price", "modeldata/attrition:Attrition", "modeldata/credit_data:Status"),
    *("modeldata/Sacramento:price", "modeldata/lending_club:Class", "modeldata/mlc_churn:churn"),
    *("modeldata/cells:class", "modeldata/penguins:species", "modeldata/stackoverflow:Remote"),
    *("MASS/Pima.tr2:type", "MASS/biopsy:class", "MASS/Boston:medv"),
    *("carData/Salaries:salary", "carData/TitanicSurvival:survived", "carData/SLID:wages", "carData/MplsStops:problem"),
    *("AER/CPS1985:wage", "AER/CPS1988:wage", "AER/HMDA:deny", "AER/Affairs:affairs", "AER/DoctorVisits:visits"),
    *("ISLR/Carseats:Sales", "ISLR/College:Grad.Rate", "ISLR/Credit:Balance", "ISLR/Default:default"),
    *("ISLR/OJ:Purchase", "ISLR/Hitters:Salary", "ISLR/Auto:mpg", "ISLR/Caravan:Purchase"),
    *("ggplot2/diamonds:price", "ggplot2/mpg:hwy", "ggplot2/midwest:percollege", "stevedata/gss_wages:realrinc"),
    "DAAG/nassCDS:dead",
]
GROUPS_OF_R = {
    "dplyr/storms:status": {"name"},
    "lme4/sleepstudy:Reaction": {"Subject"},
    "nlme/Orthodont:distance": {"Subject"},
    "nlme/Oxboys:height": {"Subject"},
    "nlme/MathAchieve:MathAch": {"School"},
    "datasets/ChickWeight:weight": {"Chick"},
    "datasets/Loblolly:height": {"Seed"},
    "sampleSelection/RandHIE:mdvis": {"zper"},
    "plm/Grunfeld:inv": {"firm"},
    "plm/Males:wage": {"nr"},
    "Ecdat/Fatality:mrall": {"state"},
}


@dataclass(frozen=True)
class Case:
    """A table, drawn or real, and what is planted in it: columns of which one must be named."""

    name: str
    rows: Callable[[Draw], pd.DataFrame]
    label: str
    planted: frozenset[str] = frozenset()


LEAKS_OF_R = {
    "MASS/birthwt:bwt": {"low"},
    "ISLR/Wage:wage": {"logwage"},
    "openintro/loans_full_schema:interest_rate": {"grade", "sub_grade"},
}


def real(name: str, _: Draw) -> pd.DataFrame:
    return of_r(name)


def of_sklearn(name: str, _: Draw) -> pd.DataFrame:
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")(as_frame=True).frame


CITIES = ("Bonn", "Ulm", "Kiel", "Jena", "Gera", "Hof", "Trier", "Worms")


# --- clean tables that are drawn: categories that are of use, which new rows have too


def plain(is_class: bool, draw: Draw) -> pd.DataFrame:
    rows = 3000
    city, product = draw.integers(0, 40, rows), draw.integers(0, 12, rows)
    of_city, of_product = draw.normal(size=40), draw.normal(size=12)
    size = draw.gamma(2, 40, rows)
    signal = of_city[city] + of_product[product] + size / 60 + draw.normal(size=rows)
    return pd.DataFrame({
        "city": [CITIES[each // 8] + CITIES[each % 8].lower() for each in city],
        "product": [f"{CITIES[each % 4]}{CITIES[each // 4]}" for each in product],
        "size": size.round(1),
        "age": draw.integers(18, 90, rows),
        "y": np.where(signal > np.median(signal), "yes", "no") if is_class else signal.round(3),
    })  # fmt: skip


def with_places(is_class: bool, draw: Draw) -> pd.DataFrame:
    """Cities with facts of their own, in an order that says nothing."""
    rows = plain(is_class, draw)
    facts = pd.DataFrame({"city": sorted(rows.city.unique())})
    facts["people"], facts["height"] = draw.integers(10_000, 900_000, len(facts)), draw.normal(200, 90, len(facts))
    return rows.merge(facts, on="city").sample(frac=1, random_state=1)


def sorted_by(is_class: bool, draw: Draw) -> pd.DataFrame:
    return plain(is_class, draw).sort_values("size")


def dated(is_class: bool, draw: Draw) -> pd.DataFrame:
    rows = plain(is_class, draw)
    return rows.assign(sold=np.datetime64("2021-01-01") + draw.integers(0, 1000, len(rows)))


CLEAN_DRAWN = (plain, with_places, sorted_by, dated)


# --- groups that are planted


def persons(column: str, per: int, is_class: bool, shuffled: bool, is_text: bool, draw: Draw) -> pd.DataFrame:
    """Persons with facts of their own and a hidden quantity, each in several rows.

    Args:
        column: that names a person.
        per: rows of one.
        is_class: whether the label is one.
        shuffled: whether rows are in an order that says nothing.
        is_text: whether names are texts.
        draw: of numbers.
    """
    many = max(2400 // per, 24)
    of = np.repeat(np.arange(many), draw.integers(max(per // 2, 1), per + per // 2 + 1, many))
    hidden, height, weight = draw.normal(size=many), draw.normal(170, 10, many), draw.normal(70, 12, many)
    dose = draw.uniform(0, 5, len(of))
    signal = 2 * hidden[of] + 0.3 * dose + 0.5 * draw.normal(size=len(of))
    codes = draw.permutation(90_000)[:many] + 10_000
    rows = pd.DataFrame({
        column: [f"n{codes[each]}" for each in of] if is_text else codes[of],
        "height": height[of].round(1),
        "weight": weight[of].round(1),
        "dose": dose.round(2),
        "y": np.where(signal > 0, "ill", "well") if is_class else signal.round(3),
    })  # fmt: skip
    return rows.sample(frac=1, random_state=1) if shuffled else rows


def panel(column: str, is_text: bool, shuffled: bool, draw: Draw) -> pd.DataFrame:
    """Units that are measured in each week, without facts of their own."""
    many, weeks = 60, 30
    of, week = np.repeat(np.arange(many), weeks), np.tile(np.arange(weeks), many)
    signal = draw.normal(size=many)[of] * 3 + 0.05 * week + draw.normal(size=len(of))
    rows = pd.DataFrame({column: [f"k{each}" for each in of] if is_text else of + 300, "week": week})
    rows["load"], rows["y"] = draw.normal(size=len(of)).round(2), signal.round(3)
    return rows.sample(frac=1, random_state=1) if shuffled else rows


def tracks(draw: Draw) -> pd.DataFrame:
    """Slow courses of things whose names are given again each year, as of storms."""
    parts = []
    for year in range(1990, 2020):
        for name in draw.permutation(20)[:8]:
            steps = int(draw.integers(10, 40))
            course = draw.normal(size=3)[:, None] * 10 + draw.normal(size=(3, steps)).cumsum(axis=1)
            kind = "strong" if draw.random() < 0.5 else "weak"
            part = pd.DataFrame({"name": f"N{name}", "year": year, "lat": course[0], "long": course[1]})
            parts.append(part.assign(pressure=course[2], y=kind))
    return pd.concat(parts).round(2)


def twins(draw: Draw) -> pd.DataFrame:
    """Two or three rows of each, nearly alike."""
    of = np.repeat(np.arange(900), draw.integers(2, 4, 900))
    facts = draw.normal(size=(900, 4))
    signal = facts[of] @ [0.2, 0.1, 0, 0] + 2 * draw.normal(size=900)[of] + 0.2 * draw.normal(size=len(of))
    rows = pd.DataFrame(facts[of] + 0.01 * draw.normal(size=(len(of), 4)), columns=list("abcd")).round(3)
    return rows.assign(household=of + 5000, y=signal.round(3))


def groups() -> Iterator[Case]:
    for column in ("patient_id", "sensor", "store", "user", "device_no", "Subject"):
        for per in (4, 15, 80):
            for is_class, shuffled in ((False, True), (True, False)):
                made = partial(persons, column, per, is_class, shuffled, per != 15)
                yield Case(f"persons, {column}, {per} rows each", made, "y", frozenset({column}))
    for per, is_class in ((12, True), (40, False)):  # a name that says nothing
        made = partial(persons, "code_k", per, is_class, True, True)
        yield Case(f"persons, a name that says nothing, {per} rows each", made, "y", frozenset({"code_k"}))
        yield Case(f"persons in order, {per} rows each", partial(persons, "k", per, is_class, False, True), "y",
                   frozenset({"k"}))  # fmt: skip
    for column, is_text, shuffled in (("well", True, True), ("q", True, False), ("q", False, True), ("r", True, True)):
        yield Case(f"panel, {column}", partial(panel, column, is_text, shuffled), "y", frozenset({column}))
    yield Case("tracks", tracks, "y", frozenset({"name"}))
    yield Case("twins", twins, "y", frozenset({"household"}))


# --- leaks that are planted


Made = pd.Series | dict[str, pd.Series]


def with_value(make: Callable[[pd.DataFrame, Draw], Made], draw: Draw) -> pd.DataFrame:
    rows = plain(False, draw)
    rows["y"] = (np.exp(rows.y / 3) * 100).round(2)
    made = make(rows, draw)
    return rows.assign(**(made if isinstance(made, dict) else {"leak": made}))


def with_flag(make: Callable[[pd.Series, Draw], object], draw: Draw) -> pd.DataFrame:
    rows = plain(True, draw)
    return rows.assign(leak=make(rows.y == "yes", draw))


def two(kind: str, rows: pd.DataFrame, draw: Draw) -> Made:
    other = pd.Series(draw.uniform(20, 200, len(rows)), rows.index)
    made = {"sum": rows.y - other, "difference": rows.y + other, "ratio": rows.y * other, "product": rows.y / other}
    return {"leak": other, "other": made[kind]}


def leaks() -> Iterator[Case]:
    values: dict[str, Callable[[pd.DataFrame, Draw], Made]] = {
        "logarithm": lambda r, _: np.log(r.y),
        "times 1.1, rounded": lambda r, _: (1.1 * r.y).round(),
        "percentile": lambda r, _: (r.y.rank(pct=True) * 100).round(1),
        "affine, 3 % noise": lambda r, draw: 3 * r.y + 5 + 0.03 * r.y.std() * draw.normal(size=len(r)),
        "rank": lambda r, _: r.y.rank(),
        "square": lambda r, _: r.y**2,
        "reciprocal": lambda r, _: 1 / r.y,
        "ten bins": lambda r, _: pd.qcut(r.y, 10).astype(str),
        "four bins by name": lambda r, _: pd.qcut(r.y, 4, labels=["low", "fair", "good", "top"]).astype(str),
        "two bins": lambda r, _: (r.y > r.y.median()).astype(int),
        "next row": lambda r, _: r.y.shift(-1),
        "row before": lambda r, _: r.y.shift(1),
        **{kind: partial(two, kind) for kind in ("sum", "difference", "ratio", "product")},
    }
    for name, make in values.items():
        yield Case(f"value: {name}", partial(with_value, make), "y", frozenset({"leak"}))
    flags: dict[str, Callable[[pd.Series, Draw], object]] = {
        "agrees in 99.5 %": lambda y, draw: y ^ (draw.random(len(y)) < 0.005),
        "agrees in 99 %": lambda y, draw: np.where(y ^ (draw.random(len(y)) < 0.01), "A", "B"),
        "number apart": lambda y, draw: np.where(y, 5.0, 0.0) + draw.normal(size=len(y)),
        "class in a name": lambda y, _: [f"{'ok' if each else 'no'} {n % 7}" for n, each in enumerate(y)],
        "null": lambda y, draw: np.where(y ^ (draw.random(len(y)) < 0.003), 1.5, np.nan) + draw.normal(size=len(y)),
    }
    for name, make_flag in flags.items():
        yield Case(f"class: {name}", partial(with_flag, make_flag), "y", frozenset({"leak"}))


# --- counted


def decide(case: Case, seed: int) -> Columns:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        rows = case.rows(np.random.default_rng(seed))
        rows.dropna(subset=[case.label]).to_csv(file, index=False)
        sample = read_sample(str(file))
        return with_split(sample, decide_columns(sample, case.label), case.label)


def warned(columns: Columns) -> tuple[set[str], set[str]]:
    """Columns of the groups that rows are split by, and those that are called leaks."""
    leaked = {name for name, remark in columns.remarks.items() if LEAK in remark}
    return {*columns.split.block.get("key", ())}, leaked


def cases() -> Iterator[tuple[str, Case]]:
    for each in CLEAN_OF_R:
        name, label = each.split(":")
        yield "clean", Case(name, partial(real, name), label)
    for name in ("iris", "wine", "breast_cancer", "diabetes"):
        yield "clean", Case(f"scikit-learn's {name}", partial(of_sklearn, name), "target")
    for number, make in enumerate(CLEAN_DRAWN):
        yield "clean", Case(f"drawn: {make.__name__}", partial(make, number % 2 == 1), "y")
    for each, planted in GROUPS_OF_R.items():
        name, label = each.split(":")
        yield "group", Case(name, partial(real, name), label, frozenset(planted))
    yield from (("group", case) for case in groups())
    for each, planted in LEAKS_OF_R.items():
        name, label = each.split(":")
        yield "leak", Case(name, partial(real, name), label, frozenset(planted))
    yield from (("leak", case) for case in leaks())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["clean", "group", "leak"])
    parser.add_argument("--seed", type=int, default=0, help="of tables that are drawn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts, lines = {}, []
    for kind, case in cases():
        if args.only not in (None, kind):
            continue
        by_group, leaked = warned(decide(case, args.seed))
        if kind == "clean":
            is_right = not by_group and not leaked
        else:
            is_right = bool(case.planted & (by_group if kind == "group" else leaked))
        right, all_ = counts.get(kind, (0, 0))
        counts[kind] = right + is_right, all_ + 1
        if not is_right:
            lines.append(f"| {kind} | {case.name} | {', '.join(sorted(by_group | leaked)) or '-'} |")
            print(lines[-1], flush=True)
    said = {"clean": "clean tables without a warning", "group": "planted or real groups named", "leak": "leaks named"}
    totals = [f"- {said[kind]}: {right} of {of}" for kind, (right, of) in counts.items()]
    head = ["| kind | table | columns named |", "|---|---|---|"]
    text = ["# Warnings of groups and leaks by `sparkring init`", "", measured_with("scikit-learn"), "", *totals, ""]
    publish("\n".join([*text, "Where it was wrong:", "", *head, *lines, ""]), args.out)


if __name__ == "__main__":
    main()
