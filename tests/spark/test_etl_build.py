"""The whole job on real flights: accounting, no leak, no rebuild, nothing half-written, clear refusals."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.manifest import MANIFEST_NAME, DatasetManifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.build import BuildRequest, build_dataset, find_dataset
from sparkring.etl.errors import ChecksFailed, EtlError
from sparkring.etl.raw import unpack_flights
from sparkring.etl.spark_platform.session import build_session
from sparkring.etl.windows.window import pin_dataset

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parents[2]
AFTER_DEPARTURE = ["dep_time", "dep_delay", "arr_time", "air_time"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """The recipe's tables with every 150th flight of each month."""
    folder = unpack_flights(tmp_path_factory.mktemp("raw") / "flights")
    for file in (folder / "flights").iterdir():
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(lines[0] + "".join(lines[1::150]))
    return folder


def recipe(raw, **changes) -> EtlConfig:
    block = yaml.safe_load((ROOT / "conf/recipes/flights.yaml").read_text())["etl"]
    for source in block["sources"].values():
        source["path"] = source["path"].replace("data/raw/flights", str(raw))
    for feature in block["features"].values():
        feature.pop("min_count", None)
    block["keep"] = ["month", "time_hour"]
    return EtlConfig.model_validate(block | changes)


def plain(raw, **changes) -> EtlConfig:
    """The flights as they are: a build without joins takes a third of the time."""
    sources = yaml.safe_load((ROOT / "conf/recipes/flights.yaml").read_text())["etl"]["sources"]
    sources["flights"]["path"] = f"{raw}/flights"
    return EtlConfig.model_validate(
        {
            "sources": {"flights": sources["flights"]},
            "views": {"known": "SELECT time_hour, carrier, flight, distance, arr_delay > 15 AS late FROM flights"},
            "rows": "known",
            "key": ["time_hour", "carrier", "flight"],
            "checks": [{"name": "never_arrived", "kind": "expression", "sql": "late IS NOT NULL", "level": "row"}],
            "features": {"carrier": {"kind": "categorical"}, "distance": {"kind": "numeric"}},
            "label": "late",
        }
        | changes
    )


def build(spark, config, root, **keys):
    pinned = pin_dataset(config, keys.get("settings", {}))
    return build_dataset(spark, BuildRequest(config, pinned, "flights", str(root), **keys))


def rows_of(built, split):
    files = [f for f in built.manifest.files if f.split == split]
    return pd.concat([pq.read_table(f"{built.uri}/{f.path}").to_pandas() for f in files], ignore_index=True)


@pytest.fixture(scope="module")
def built(spark, raw, tmp_path_factory):
    return build(spark, recipe(raw), tmp_path_factory.mktemp("datasets"), code_commit="abc", config_digest="d" * 64)


@pytest.fixture(scope="module")
def built_plain(spark, raw, tmp_path_factory):
    return build(spark, plain(raw), tmp_path_factory.mktemp("plain"))


def test_rows_in_are_rows_out_and_quarantined(built, raw):
    lines = sum(len(f.read_text().splitlines()) - 1 for f in (raw / "flights").iterdir())
    accounting = built.manifest.accounting
    assert accounting.rows_in == lines and accounting.quarantined.keys() == {"never_arrived"}
    stored = sum(len(rows_of(built, s)) for s in ("train", "valid", "test"))
    assert stored == accounting.rows_out == lines - accounting.quarantined["never_arrived"]
    quarantine = pq.read_table(next(Path(built.uri).glob("data-*/quarantine/never_arrived.parquet"))).to_pandas()
    assert len(quarantine) == accounting.quarantined["never_arrived"] and quarantine["arr_delay"].isna().all()
    assert set(quarantine["rule"]) == {"never_arrived"}


def test_the_manifest_says_where_the_rows_came_from(built, raw):
    lineage = built.manifest.lineage
    assert lineage.sources.keys() == {"flights", "weather", "planes", "airports", "airlines"}
    assert lineage.sources["flights"]["files"] == 12 and lineage.code_commit == "abc" and "Join" in lineage.logical_plan
    assert len(built.manifest.checks) == 8 and all(c["passed"] for c in built.manifest.checks)
    assert DatasetManifest.from_json(built.manifest.to_json(), "x") == built.manifest
    assert {c.role for c in built.manifest.columns} == {"input", "label", "meta"}
    assert built.manifest.tensor("carrier").cardinality == 2 + len(built.manifest.features["features"][0]["values"])


def test_months_of_the_splits_do_not_overlap(built):
    assert set(rows_of(built, "train")["month"]) == set(range(1, 12))
    assert set(rows_of(built, "valid")["month"]) <= {11, 12} and set(rows_of(built, "test")["month"]) == {12}


def test_weather_is_that_of_the_hour_before_in_utc(spark, built, raw):
    """A row of the weather is the last reading or the maximum of its hour, so that of the same hour is of later."""
    flights = pd.concat([pd.read_csv(f, na_values="NA") for f in (raw / "flights").iterdir()])
    flights = flights[flights["arr_delay"].notna()]
    weather = pd.read_parquet(raw / "weather.parquet")
    flights["time_hour"] = pd.to_datetime(flights["time_hour"], utc=True)
    weather["time_hour"] += pd.Timedelta(hours=1)
    joined = flights.merge(weather, on=["origin", "time_hour"], how="left", suffixes=("", "_w"))
    got = pd.concat([rows_of(built, s) for s in ("train", "valid", "test")])["temp"]
    assert sorted(got.fillna(-999)) == sorted(joined["temp"].fillna(-999)) and got.isna().any()
    assert (joined["hour"] == joined["time_hour"].dt.tz_convert("America/New_York").dt.hour).all()


def test_nothing_that_is_known_later_reaches_the_model(spark, built, raw, tmp_path):
    """By name, and by lineage: with other values of what is known after departure, and of every reading of the weather
    from noon of a test day on, the flights until noon stay as they were."""
    inputs = {f["column"] for f in built.manifest.features["features"]} | {c.name for c in built.manifest.columns}
    assert not inputs & {*AFTER_DEPARTURE, "arr_delay"}
    spoiled = tmp_path / "raw"
    shutil.copytree(raw, spoiled)
    for file in (spoiled / "flights").iterdir():
        table = pd.read_csv(file, dtype=str, keep_default_na=False)
        table[AFTER_DEPARTURE] = table[AFTER_DEPARTURE].map(
            lambda v: str((int(v) * 7 + 13) % 2000) if v != "NA" else "1"
        )
        table.to_csv(file, index=False)
    noon = pd.Timestamp("2013-12-20 17:00", tz="UTC")
    weather = pd.read_parquet(raw / "weather.parquet")
    numbers = ["temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib"]
    weather.loc[weather["time_hour"] >= noon, numbers] = 1.0
    weather["time_hour"] = weather["time_hour"].astype("datetime64[us, UTC]")
    weather.astype({"origin": "object"}).to_parquet(spoiled / "weather.parquet")
    other = build(spark, recipe(spoiled), tmp_path / "datasets")
    assert other.manifest.fingerprint != built.manifest.fingerprint
    assert other.manifest.features == built.manifest.features
    fitted = [[f.sha256 for f in each.manifest.files if f.split != "test"] for each in (built, other)]
    assert fitted[0] == fitted[1] != []
    rows = [rows_of(each, "test") for each in (built, other)]
    before, after = (r[r["time_hour"] <= noon].reset_index(drop=True) for r in rows)
    assert len(before) > 50 and before.equals(after)
    assert not rows[0].equals(rows[1])


def test_settings_of_the_cluster_decide_no_rows_and_those_of_the_recipe_do(spark):
    class Cluster:
        conf = spark.conf

        def newSession(self):
            session = spark.newSession()
            session.conf.set("spark.sql.legacy.timeParserPolicy", "LEGACY")
            session.conf.set("spark.sql.ansi.enabled", "false")
            return session

    session = build_session(Cluster(), {"spark.sql.mapKeyDedupPolicy": "LAST_WIN", "spark.executor.cores": "2"})
    asked = ("legacy.timeParserPolicy", "ansi.enabled", "mapKeyDedupPolicy", "shuffle.partitions")
    found = [session.conf.get(f"spark.sql.{key}") for key in asked]
    assert found == ["CORRECTED", "true", "LAST_WIN", spark.conf.get("spark.sql.shuffle.partitions")]


def test_the_same_input_is_not_rebuilt_and_a_changed_byte_is(spark, built_plain, raw, tmp_path):
    built, root = built_plain, Path(built_plain.uri).parent
    before = sorted(str(p) for p in root.rglob("*"))
    again = build(spark, plain(raw), root)
    assert not again.rebuilt and again.manifest == built.manifest and again.uri == built.uri
    assert sorted(str(p) for p in root.rglob("*")) == before
    assert recipe(raw).model_dump() != recipe(raw, shard={"seed": 1}).model_dump()
    changed = tmp_path / "raw"
    shutil.copytree(raw, changed)
    file = changed / "flights/2013-05.csv"
    file.write_bytes(file.read_bytes().replace(b"\n2013,5,1,", b"\n2013,5,2,", 1))
    # A dataset of another fingerprint is another folder; building it all is not needed to know that.
    rule = [{"name": "impossible", "kind": "expression", "sql": "false", "max_share": 0.5}]
    with pytest.raises(ChecksFailed, match="impossible"):
        build(spark, plain(changed, checks=rule), root)
    assert sorted(str(p) for p in root.rglob("*") if p.is_file()) == [p for p in before if Path(p).is_file()]


def test_a_dataset_with_a_missing_file_is_built_again_to_the_same_bytes(spark, built_plain, raw, caplog):
    built = built_plain
    victim = Path(built.uri) / built.manifest.files[0].path
    victim.unlink()
    assert find_dataset(open_storage(built.uri), built.manifest.fingerprint) is None
    again = build(spark, plain(raw), Path(built.uri).parent)
    assert again.rebuilt and again.uri == built.uri
    assert caplog.text.count("rebuilding: ") == 1, "by the job that looked for it, and not again by the build"
    assert [f.sha256 for f in again.manifest.files] == [f.sha256 for f in built.manifest.files]
    assert all((Path(again.uri) / f.path).exists() for f in again.manifest.files)


KILLED = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.storage import Storage
from sparkring.pipelines.run.spark import spark_session
from sparkring.etl.windows.window import pin_dataset
from tests.spark.test_etl_build import build, plain
if {when!r} == "manifest":
    def stop(self, relative, data):
        Path({mark!r}).touch()
        time.sleep(600)
    Storage.put_atomic = stop
shards = dict(shards=dict(train={shards}, test=1), row_group=16)
with spark_session("killed", SparkConfig(), LaunchConfig(world=2), data_bytes=0) as spark:
    build(spark, plain(Path({raw!r}), shard=shards), {datasets!r})
"""


@pytest.mark.slow  # what is left without a manifest is seen without a process, too: the builds that fail below
@pytest.mark.parametrize("when", ["write", "manifest"])
def test_kill_9_leaves_no_dataset_where_there_was_none(raw, tmp_path, when):
    mark, datasets = tmp_path / "mark", tmp_path / "datasets"
    shards = 200 if when == "write" else 3
    names = {
        "shards": shards,
        "root": str(ROOT),
        "raw": str(raw),
        "datasets": str(datasets),
    }
    (tmp_path / "job.py").write_text(KILLED.format(when=when, mark=str(mark), **names))
    with open(tmp_path / "log", "wb") as log:
        job = subprocess.Popen([sys.executable, tmp_path / "job.py"], start_new_session=True, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 900

        def reached():
            return mark.exists() or (when == "write" and any(datasets.glob("*/data-*/train-*.parquet")))

        while not reached():
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.01)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    folder = next(datasets.iterdir())
    written = list(folder.glob("data-*/train-*.parquet"))
    assert len(written) == 3 if when == "manifest" else 0 < len(written) < 200
    assert not (folder / "_manifest.json").exists()
    assert find_dataset(open_storage(str(folder)), "0" * 64) is None


def test_a_failed_build_leaves_the_dataset_that_was_there_or_none(spark, built_plain, raw, monkeypatch, tmp_path):
    """The job dies after all files are written and before the manifest is: readers see the old dataset, whole."""
    built = built_plain
    manifest = Path(built.uri) / "_manifest.json"
    before, files = manifest.read_bytes(), {str(p) for p in Path(built.uri).rglob("*.parquet")}
    monkeypatch.setattr("sparkring.etl.build.stored_dataset", lambda storage, fingerprint: (None, ""))
    put = Storage.put_atomic

    def put_or_die(storage, relative, data):
        if relative == MANIFEST_NAME:
            raise KeyboardInterrupt
        put(storage, relative, data)

    monkeypatch.setattr(Storage, "put_atomic", put_or_die)
    with pytest.raises(KeyboardInterrupt):
        build(spark, plain(raw), Path(built.uri).parent)
    assert manifest.read_bytes() == before and {str(p) for p in Path(built.uri).rglob("*.parquet")} == files
    with pytest.raises(KeyboardInterrupt):
        build(spark, plain(raw), tmp_path)
    (folder,) = tmp_path.glob("flights-*")
    assert not (folder / MANIFEST_NAME).exists() and not list(tmp_path.rglob("*.parquet"))
    assert find_dataset(open_storage(str(folder)), "0" * 64) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"one_per": "weather"}, r"one_per = 'weather': the table has 26115 rows.*lost rows"),
        ({"checks": [{"name": "none", "kind": "expression", "sql": "false", "level": "row"}]}, "rows were quarantined"),
        ({"split": {"kind": "time", "column": "time_hour", "boundaries": {"test": "2020-01-01"}}}, "test got no rows"),
        (
            {"views": {"v": "select *, 1 as Carrier from flights"}, "rows": "v"},
            "called 'carrier' and 'Carrier'",
        ),
        (
            {"views": {"v": "select *, 1 as __split from flights"}, "rows": "v"},
            "names with two underscores before them, as '__split', are the job's own",
        ),
        (
            {"views": {"v": "select *, 1 as `a.b` from flights"}, "rows": "v"},
            "etl.rows: the column 'a.b' has a dot or a backquote in its name.*SELECT `a.b` AS a_b",
        ),
        ({"key": ["id"]}, r"etl\.key: rows have no column 'id'"),
        ({"label": "lat"}, "etl.label = 'lat': rows have no such column"),
        ({"keep": ["dest"]}, "one role"),
    ],
)
def test_bad_recipes_are_refused_and_leave_nothing(spark, raw, tmp_path, changes, words):
    if "keep" in changes:
        with pytest.raises(ValueError, match=words):
            recipe(raw, **changes)
        return
    with pytest.raises(EtlError, match=words):
        build(spark, recipe(raw, **changes), tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_one_wrong_value_in_one_file_names_both(spark, raw, tmp_path):
    wrong = tmp_path / "raw"
    subprocess.run(["cp", "-r", str(raw), str(wrong)], check=True)
    file = wrong / "flights/2013-03.csv"
    file.write_text(file.read_text().replace("\n2013,3,", "\n2013,March,", 1))
    with pytest.raises(
        EtlError, match=r"etl\.sources\.flights.*\n.*2013-03\.csv: line 2: column 'month' is int.*'March'"
    ):
        build(spark, recipe(wrong), tmp_path / "d")


def test_the_raw_tables_are_unpacked_once_and_whole(raw, tmp_path, monkeypatch):
    before = {p: p.stat().st_mtime_ns for p in raw.rglob("*")}
    assert unpack_flights(raw) == raw and {p: p.stat().st_mtime_ns for p in raw.rglob("*")} == before
    monkeypatch.setattr("sparkring.etl.raw.pq.write_table", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        unpack_flights(tmp_path / "flights")
    assert not list(tmp_path.iterdir())
