"""Windows of real flights: night by night equals from scratch, and a correction rewrites its part alone."""

from __future__ import annotations

import datetime as dt
import os
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.manifest import MANIFEST_NAME
from sparkring.conf.storage import open_storage
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import ChecksFailed, EtlError
from sparkring.etl.raw import unpack_flights
from sparkring.etl.windows.window import KnownParts, pin_dataset, pin_window
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import ReadRequest
from sparkring.training.models.tabular import Tabular
from tests.spark.sales import recipe as recipe_of_sales
from tests.spark.sales import write_sales

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parents[2]
WINDOWS, DAYS = (int(n) for n in os.environ.get("SPARKRING_WINDOWS", "30x28").split("x"))  # of the slow test
EVERY = 20  # which flights are in the small tables


def write_day(folder: Path, day: str, flights: pd.DataFrame) -> None:
    file = folder / f"flights/date={day}/flights.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pandas(flights, preserve_index=False), file)


def partitioned(folder: Path, every: int, months: slice) -> Path:
    """The recipe's tables, with every n-th flight of each day, in folders by New York's day."""
    unpack_flights(folder)
    files = sorted((folder / "flights").iterdir())
    tables = [pd.read_csv(file, na_values="NA", dtype={"tailnum": "object"}) for file in files[months]]
    for file in files:
        file.unlink()
    flights = pd.concat(tables, ignore_index=True)
    whole = flights.select_dtypes(["int64", "float64"]).columns
    flights[whole] = flights[whole].astype("Int32")
    flights["time_hour"] = pd.to_datetime(flights["time_hour"], utc=True).astype("datetime64[us, UTC]")
    days = pd.to_datetime(flights[["year", "month", "day"]]).dt.strftime("%Y-%m-%d")
    for day, rows in flights.groupby(days):
        write_day(folder, str(day), rows.iloc[::every])
    return folder


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    return partitioned(tmp_path_factory.mktemp("lake") / "flights", EVERY, months=slice(2, 3))


def recipe(lake: Path, last: str, window: int, split=None, **interval) -> EtlConfig:
    block = yaml.safe_load((ROOT / "conf/recipes/flights.yaml").read_text())["etl"]
    for source in block["sources"].values():
        source["path"] = source["path"].replace("data/raw/flights", str(lake))
    flights = block["sources"]["flights"]
    del flights["options"]
    flights |= {"format": "parquet", "partitions": {"date": "date"}}
    for feature in block["features"].values():
        feature.pop("min_count", None)
    for check in block["checks"]:
        if "max_share" in check:
            check["max_share"] = 0.3  # one night may be worse than the year
    block["split"] = split or {"kind": "hash", "shares": {"train": 0.6, "valid": 0.2, "test": 0.2}}
    block["interval"] = {
        "column": "time_hour", "time_zone": "America/New_York", "sources": {"flights": "date"},
        "last": last, "window": window,
    } | interval  # fmt: skip
    return EtlConfig.model_validate(block)


def timetable(lake: Path, last: str, window: int, **interval) -> EtlConfig:
    """What is known of a flight from its own table, without the joins, which are the same for every part."""
    block = recipe(lake, last, window, **interval).model_dump(mode="json")
    block["sources"] = {"flights": block["sources"]["flights"]}
    block["views"] = {
        "known": "SELECT time_hour, carrier, flight, origin, dest, hour, distance, arr_delay, arr_delay > 15 AS late, "
        "air_time / distance AS pace, count(*) OVER (PARTITION BY origin, time_hour) AS departures_in_hour FROM flights"
    }
    block["rows"] = "known"
    wanted = ("never_arrived", "timetable_twice", "distance_of_a_flight")
    block["checks"] = [check for check in block["checks"] if check["name"] in wanted]
    codes = {name: {"kind": "categorical"} for name in ("carrier", "origin", "dest", "hour")}
    numbers = {name: {"kind": "numeric"} for name in ("distance", "departures_in_hour", "pace")}
    block["features"] = codes | numbers | {"far": {"kind": "numeric", "column": "distance", "transform": "log1p"}}
    return EtlConfig.model_validate(block | {"keep": ["flight"]})


def build(spark, config: EtlConfig, root: Path, known: KnownParts | None = None):
    pinned = pin_window(config, {}, known=known or KnownParts())
    return build_dataset(spark, BuildRequest(config, pinned, "flights", str(root)))


def of_part(manifest, label: str) -> dict[str, str]:
    (folder,) = (p.folder for p in manifest.parts if p.interval == label)
    return {f.path.rpartition("/")[2]: f.sha256 for f in manifest.files if f.path.startswith(f"{folder}/")}


def same_dataset(a, b) -> None:
    """Equal in all but the folders of the builds."""
    assert a.fingerprint == b.fingerprint and a.features == b.features and a.splits == b.splits
    shape = [
        [(f.split, f.rows, f.bytes, f.sha256, f.row_groups, f.row_offset, f.path.split("/")[-1]) for f in m.files]
        for m in (a, b)
    ]
    assert shape[0] == shape[1]
    assert (a.columns, a.checks, a.accounting, a.missing) == (b.columns, b.checks, b.accounting, b.missing)
    assert [(p.interval, p.fingerprint) for p in a.parts] == [(p.interval, p.fingerprint) for p in b.parts]


def weights(built, steps: int = 50) -> bytes:
    """A model's parameters after so many steps on the window's training rows."""
    storage, manifest = open_storage(built.uri), built.manifest
    torch.manual_seed(0)
    model = Tabular.from_manifest(manifest, width=16, blocks=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with closing(make_reader(DataConfig(seed=3), ReadRequest(storage, manifest, "train", None, 32))) as reader:
        for batch in reader.batches(0, steps):
            output = model({name: v for name, v in batch.columns.items() if name != "late"})
            loss = torch.nn.functional.binary_cross_entropy_with_logits(output, batch.columns["late"].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss.isfinite()
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def part_times(root: Path) -> dict[str, int]:
    return {str(f.relative_to(root)): f.stat().st_mtime_ns for f in root.glob("parts/*/*/*/_part.json")}


@pytest.fixture(scope="module", params=[timetable, pytest.param(recipe, marks=pytest.mark.slow)])
def rows_of(request):
    """The recipe of the nights; with all its joins each build takes three times as long."""
    return request.param


@pytest.fixture(scope="module")
def nights(spark, lake, rows_of, tmp_path_factory):
    """Two nights, one after the other, of windows of two days around the night that clocks were changed."""
    root = tmp_path_factory.mktemp("datasets")
    made = []
    for last in ("2013-03-09", "2013-03-10"):
        made.append((build(spark, rows_of(lake, last, 2), root), part_times(root)))
    return root, made


def test_a_night_writes_its_own_part_and_the_window_is_that_built_from_scratch(spark, lake, rows_of, nights, tmp_path):
    root, ((first, then), (second, now)) = nights
    assert [p.interval for p in second.manifest.parts] == ["2013-03-09", "2013-03-10"]
    assert len(now) == len(then) + 1 and then.items() <= now.items()
    assert of_part(first.manifest, "2013-03-09") == of_part(second.manifest, "2013-03-09") != {}
    assert first.manifest.features != second.manifest.features
    scratch = build(spark, rows_of(lake, "2013-03-10", 2), tmp_path)
    same_dataset(second.manifest, scratch.manifest)
    assert weights(second, 10) == weights(scratch, 10) != weights(first, 10)
    assert scratch.rebuilt and not build(spark, rows_of(lake, "2013-03-10", 2), tmp_path).rebuilt
    rows = duckdb.sql(f"SELECT count(*), min(sparkring_row) FROM '{root}/parts/flights/2013-03-10/*/data-*/*.parquet'")
    assert rows.fetchall()[0] == (second.manifest.parts[1].rows, 0)


def test_the_rows_are_those_of_one_build_over_the_same_days(spark, lake, rows_of, nights, tmp_path):
    """Against the dataset without parts: the same rows, each in the same split, and the same fitted state."""
    window = nights[1][1][0]
    config = rows_of(lake, "2013-03-10", 2)
    source = config.sources["flights"].model_copy(update={"where": "date BETWEEN '2013-03-09' AND '2013-03-10'"})
    whole = config.model_copy(update={"interval": None, "sources": {**config.sources, "flights": source}})
    built = build_dataset(spark, BuildRequest(whole, pin_dataset(whole, {}), "flights", str(tmp_path)))
    assert built.manifest.features == window.manifest.features
    assert built.manifest.accounting == window.manifest.accounting
    assert built.manifest.checks == window.manifest.checks
    for split in ("train", "valid", "test"):
        frames = []
        for each in (built, window):
            folder = each.manifest.files_folder(open_storage(each.uri))
            tables = [pq.read_table(folder.path(f.path)) for f in each.manifest.files_of(split)]
            frame = pa.concat_tables(tables).drop_columns(["sparkring_row"]).to_pandas()
            frames.append(frame.sort_values(list(frame.columns)).reset_index(drop=True))
        pd.testing.assert_frame_equal(*frames)


def test_readers_number_rows_through_all_parts(nights):
    """Every row of an epoch once, by its number; the driver's view of a split numbers them alike."""
    built = nights[1][1][0]
    storage, manifest = open_storage(built.uri), built.manifest
    rows = manifest.splits["train"].rows
    assert len({f.row_offset for f in manifest.files_of("train")}) == 2
    config = DataConfig(audit=True, tail="pad", lanes=4)
    with closing(make_reader(config, ReadRequest(storage, manifest, "train", ["distance"], 16))) as reader:
        assert reader.steps_per_epoch == -(-rows // 16)
        read = [(b.ids[: b.rows], b.columns["distance"], b.weight) for b in reader.batches(0, reader.steps_per_epoch)]
    ids = np.concatenate([i.numpy() if w is None else i.numpy()[w.numpy() > 0] for i, _, w in read])
    assert sorted(ids.tolist()) == list(range(rows))
    kept = split_rows(Dataset(manifest, storage), "train", DataConfig(filters=[("distance", ">", 1000)]), [])
    numbers, distances = kept.row_numbers(), kept.column("distance").to_numpy()
    everything = split_rows(Dataset(manifest, storage), "train", DataConfig(), [])
    assert everything.row_numbers().tolist() == list(range(rows))
    assert (everything.column("distance").to_numpy()[numbers] == distances).all() and (distances > 1000).all()
    assert 0 < len(numbers) < rows and numbers.max() > manifest.files_of("train")[-1].row_offset


def test_rows_of_another_day_than_their_file_are_refused(spark, lake, tmp_path):
    """In UTC the last hours of New York's day are of the next one."""
    with pytest.raises(
        EtlError,
        match=r"of the sources' interval 2013-03-09 .* rows are in no interval .*to 2013-03-10 0.*"
        r"correct the files \(flights: date=2013-03-09/flights.parquet\)",
    ):
        build(spark, timetable(lake, "2013-03-09", 1, time_zone="UTC"), tmp_path)
    assert not list(tmp_path.rglob("*.parquet")) and not list(tmp_path.rglob(MANIFEST_NAME))


WITHIN = "SELECT *, amount % 10 AS other FROM sales"


def split(valid: str) -> dict:
    boundaries = {"valid": f"2024-03-0{valid}"}
    return {"split": {"kind": "time", "column": "day", "boundaries": boundaries}}


def window(sales: Path, last: int, valid: str, **changes) -> EtlConfig:
    return recipe_of_sales(sales, WITHIN, split(valid) | changes, last=f"2024-03-0{last}", window=3)


@pytest.fixture(scope="module")
def weeks(spark, tmp_path_factory):
    """Windows of three days of sales, whose last day is `valid`, on two nights."""
    sales, root = write_sales(tmp_path_factory.mktemp("sales")), tmp_path_factory.mktemp("datasets")
    return sales, root, [build(spark, window(sales, last, str(last)), root) for last in (3, 4)]


def test_a_split_by_time_moves_with_the_window_and_no_part_is_written_for_it(spark, weeks):
    sales, root, (first, second) = weeks
    assert first.written_parts == ("2024-03-01", "2024-03-02", "2024-03-03") and second.written_parts == ("2024-03-04",)
    assert {s: i.rows for s, i in first.manifest.splits.items()} == {"train": 6, "valid": 2}
    assert {s: i.rows for s, i in second.manifest.splits.items()} == {"train": 5, "valid": 3}
    third = of_part(second.manifest, "2024-03-03")
    assert third == of_part(first.manifest, "2024-03-03") and len(third) == 1
    # Shop c sold in training on the second day alone; of a day that is not yet in training nothing is known.
    later = build(spark, window(sales, 4, "3"), root)
    assert later.written_parts == () and later.rebuilt
    shops = [m.features["features"][0]["values"] for m in (second.manifest, later.manifest)]
    assert shops == [["a", "b", "c"], ["a", "b", "c"]]
    assert [m.features["features"][1]["mean"] for m in (second.manifest, later.manifest)] == [0.8, 1.0]


def test_a_category_of_a_later_day_only_is_unseen(spark, weeks):
    """In a window of the third and fourth day, c is sold on the fourth, which is not trained on."""
    sales, root, _ = weeks
    config = recipe_of_sales(sales, WITHIN, split("4"), window=2)
    built = build(spark, config, root)
    assert built.written_parts == () and built.manifest.features["features"][0]["values"] == ["a", "b"]
    request = ReadRequest(open_storage(built.uri), built.manifest, "valid", ["shop"], 3)
    with closing(make_reader(DataConfig(), request, evaluation=True)) as reader:
        (batch,) = reader.batches(0, 1)
    assert sorted(batch.columns["shop"].tolist()) == [1, 2, 3]  # unseen, a, b


def test_a_corrected_file_rewrites_exactly_its_part(spark, weeks, tmp_path):
    sales, root, (_, old) = weeks
    before, file = part_times(root), sales / "day=2024-03-03/x.parquet"
    content = file.read_bytes()
    try:
        table = pq.read_table(file)
        pq.write_table(table.slice(0, 1), file)
        built = build(spark, window(sales, 4, "4"), root)
        new = part_times(root).keys() - before.keys()
        assert [path.split("/")[2] for path in new] == ["2024-03-03"] and before.items() <= part_times(root).items()
        assert built.written_parts == ("2024-03-03",) and built.manifest.splits["train"].rows == 4
        assert of_part(built.manifest, "2024-03-04") == of_part(old.manifest, "2024-03-04")
        # Known parts are believed: what a night does not look at again, it does not see.
        known = KnownParts(str(root), "flights", {p.interval: p.fingerprint for p in old.manifest.parts})
        again = build(spark, window(sales, 4, "4"), root, known)
        assert again.manifest == old.manifest and not again.rebuilt
    finally:
        file.write_bytes(content)


def test_a_day_without_rows_is_a_part_that_adds_nothing(spark, weeks):
    sales, root, (first, _) = weeks
    file = sales / "day=2024-03-02/x.parquet"
    content = file.read_bytes()
    try:
        pq.write_table(pq.read_table(file).slice(0, 0), file)
        built = build(spark, window(sales, 3, "3"), root)
        assert [p.rows for p in built.manifest.parts] == [3, 0, 2] and not of_part(built.manifest, "2024-03-02")
        assert built.manifest.splits["train"].rows == 3 == built.manifest.splits["train"].files * 3
        assert built.manifest.features["features"][1]["mean"] == 1.0  # of the first day's 0, 1, 2 alone
        assert built.manifest.fingerprint != first.manifest.fingerprint
    finally:
        file.write_bytes(content)


def test_checks_are_judged_over_the_window(spark, weeks):
    sales, root, _ = weeks
    before = part_times(root)

    def config(max_share: float) -> EtlConfig:
        check = {"name": "early", "kind": "range", "column": "amount", "max": 29, "max_share": max_share}
        return window(sales, 3, "3", checks=[check])

    with pytest.raises(ChecksFailed, match=r"early: amount <= 29: 2 of 8 rows failed"):
        build(spark, config(0.2), root)
    written = part_times(root)
    assert len(written) == len(before) + 3  # with a check of their own, which fails for every row of one of them
    built = build(spark, config(0.3), root)
    assert built.manifest.checks[0]["failing"] == 2 and part_times(root) == written


def test_statistics_that_were_changed_are_refused(spark, weeks):
    sales, root, (first, _) = weeks
    (path,) = root.glob(f"{first.manifest.parts[0].folder}/data-*/statistics.arrow")
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + b"x")
        with pytest.raises(EtlError, match=r"statistics.arrow: is not what was written; delete"):
            build(spark, window(sales, 3, "2"), root)
    finally:
        path.write_bytes(content)


@pytest.mark.slow
def test_thirty_windows_of_28_days_are_the_same_night_by_night_and_from_scratch(spark, tmp_path_factory):
    """All flights. The second folder is filled from the last window backwards, so every part is written twice."""
    lake = partitioned(tmp_path_factory.mktemp("all") / "flights", every=1, months=slice(0, 2))
    lasts = [day.strftime("%Y-%m-%d") for day in pd.date_range("2013-01-28", periods=WINDOWS)]
    forwards, backwards = tmp_path_factory.mktemp("forwards"), tmp_path_factory.mktemp("backwards")
    nights = {last: build(spark, timetable(lake, last, DAYS), forwards) for last in lasts}
    assert [len(night.written_parts) for night in nights.values()] == [DAYS] + [1] * (WINDOWS - 1)
    assert len(part_times(forwards)) == DAYS - 1 + WINDOWS
    for last in reversed(lasts):
        scratch = build(spark, timetable(lake, last, DAYS), backwards)
        same_dataset(nights[last].manifest, scratch.manifest)
        assert weights(nights[last]) == weights(scratch)
    assert len({night.manifest.fingerprint for night in nights.values()}) == WINDOWS
    vocabularies = [night.manifest.features["features"][2]["values"] for night in nights.values()]
    assert sum(a != b for a, b in pairwise(vocabularies)) > WINDOWS // 2  # destinations by falling count
    corrected = lake / f"flights/date={shifted(lasts[-1], -2)}/flights.parquet"
    pq.write_table(pq.read_table(corrected).slice(5), corrected)
    again = [build(spark, timetable(lake, lasts[-1], DAYS), root) for root in (forwards, backwards)]
    assert [night.written_parts for night in again] == [(shifted(lasts[-1], -2),)] * 2
    same_dataset(again[0].manifest, again[1].manifest)


def shifted(day: str, days: int) -> str:
    return (dt.date.fromisoformat(day) + dt.timedelta(days)).isoformat()
