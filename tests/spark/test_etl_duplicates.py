"""Equal rows of a table without a key: each has a place of its own, the same whatever order the rows are read in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.storage import open_storage
from sparkring.etl.analysis import analyze
from sparkring.etl.build import BuildRequest, Built, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.window import pin_dataset

pytestmark = pytest.mark.spark
KINDS, ROWS = 40, 6000
COLUMNS = {"kind": "bigint", "town": "bigint", "label": "bigint"}
SHARES = {"train": 0.6, "valid": 0.2, "test": 0.2}


def survey(rows: int = ROWS) -> pd.DataFrame:
    """Answers of few kinds: `kind` decides how often the label is 1, from 0.1 to 0.9; some have no `town`."""
    draws = np.random.default_rng(3)
    kind = draws.integers(0, KINDS, rows)
    town = pd.array(np.where(kind % 4 == 0, -1, kind % 3), "Int64")
    town[town == -1] = pd.NA
    return pd.DataFrame(
        {"kind": kind, "town": town, "label": (draws.random(rows) < 0.1 + 0.8 * kind / KINDS).astype("int64")}
    )


def write(folder: Path, rows: pd.DataFrame, files: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        part = pa.Table.from_pandas(rows.iloc[number::files], preserve_index=False)
        pq.write_table(part, folder / f"{number}.parquet")
    return folder


def recipe(folder: Path, columns: dict[str, str] | None = None, **changes) -> EtlConfig:
    return EtlConfig.model_validate(
        {
            "sources": {"survey": {"path": str(folder), "format": "parquet", "columns": COLUMNS | (columns or {})}},
            "rows": "survey",
            "features": {"kind": {"kind": "categorical"}, "town": {"kind": "categorical"}},
            "label": "label",
            "split": {"kind": "hash", "shares": SHARES},
        }
        | changes
    )


def build(spark, config: EtlConfig, root: Path) -> Built:
    return build_dataset(spark, BuildRequest(config, pin_dataset(config, {}), "survey", str(root)))


def split_rows(built: Built) -> dict[str, pd.DataFrame]:
    storage = built.manifest.files_folder(open_storage(built.uri))
    return {
        split: pd.concat(
            [pq.read_table(storage.path(f.path)).to_pandas() for f in built.manifest.files if f.split == split],
            ignore_index=True,
        )
        for split in built.manifest.splits
    }


def files_of(built: Built) -> list[tuple[str, str, str]]:
    return [(f.path.rpartition("/")[2], f.split, f.sha256) for f in built.manifest.files]


@pytest.fixture(scope="module")
def built(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("survey")
    return build(spark, recipe(write(folder / "rows", survey())), folder / "datasets")


def test_labels_of_equal_features_are_alike_in_all_splits(built):
    rows = split_rows(built)
    assert sum(map(len, rows.values())) == ROWS
    shares = {split: len(own) / ROWS for split, own in rows.items()}
    assert shares == pytest.approx(SHARES, abs=0.02)
    means = pd.DataFrame({split: own.groupby("kind")["label"].mean() for split, own in rows.items()})
    assert len(means) == KINDS and means.notna().all().all()
    # 30 rows or so of each kind are in `test`: a mean over 40 kinds of what differs by 0.08 each.
    assert (means["train"] - means["test"]).abs().mean() < 0.12
    assert means["train"].corr(means["test"]) > 0.9


def test_equal_rows_do_not_lie_side_by_side(built):
    (train,) = (own for split, own in split_rows(built).items() if split == "train")
    same = (train[["kind", "label"]] == train[["kind", "label"]].shift()).all(axis=1).mean()
    assert same < 3 / KINDS, "of a shuffle, 1 in 25 or so is equal to the row before"


def test_the_order_of_the_source_decides_nothing(built, spark, tmp_path):
    shuffled = survey().sample(frac=1, random_state=5)
    other = build(spark, recipe(write(tmp_path / "rows", shuffled, files=7)), tmp_path / "datasets")
    assert files_of(other) == files_of(built)


def test_nor_do_zeros_of_either_sign(spark, tmp_path):
    draws = np.random.default_rng(4)
    signs = np.where(draws.random(ROWS) < 0.5, -0.0, 0.0)
    rows = survey().assign(change=signs, path=[[sign, 1.0] for sign in draws.permutation(signs)])
    columns, keep = {"change": "double", "path": "array<double>"}, ["change", "path"]
    files = [
        files_of(build(spark, recipe(folder, columns, keep=keep), tmp_path / "datasets"))
        for folder in (write(tmp_path / "a", rows), write(tmp_path / "b", rows.sample(frac=1, random_state=5), files=3))
    ]
    assert files[0] == files[1]


def test_columns_that_cannot_be_compared_are_refused(spark, tmp_path):
    views = {"tagged": "SELECT *, map(kind, 1) AS tags FROM survey"}
    config = recipe(write(tmp_path / "rows", survey()), rows="tagged", views=views)
    with pytest.raises(EtlError, match=r"etl\.key: .*'tags' \(map<bigint,int>\) cannot be"):
        analyze(spark, config, [], {}, open_storage(str(tmp_path)))  # before a row is read
    with pytest.raises(EtlError, match=r"etl\.key: .*'tags' \(map<bigint,int>\) cannot be"):
        build(spark, config, tmp_path / "datasets")


def test_what_a_view_cannot_compute_is_no_matter_of_the_key(spark, tmp_path):
    views = {"divided": "SELECT *, 1 / (kind - 1) AS ratio FROM survey"}
    config = recipe(write(tmp_path / "rows", survey()), rows="divided", views=views)
    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"):
        build(spark, config, tmp_path / "datasets")


def test_the_rows_of_a_view_are_not_made_twice(built, spark, tmp_path, monkeypatch):
    def counted(frames):
        raise AssertionError("these rows cost more to make again than to shuffle")

    monkeypatch.setattr("sparkring.etl.shards.duplicates._has_duplicates", counted)
    # The window keeps every row.
    views = {"ranked": "SELECT kind, town, label FROM (SELECT *, max(kind) OVER () AS most FROM survey) WHERE most > 0"}
    config = recipe(write(tmp_path / "rows", survey()), rows="ranked", views=views)
    assert files_of(build(spark, config, tmp_path / "datasets")) == files_of(built)


def all_different(rows: int = 300) -> pd.DataFrame:
    # xxhash64 passes over nulls: (null, 1) and (1, null) have one hash, and are not equal.
    kind = np.arange(rows)
    town = pd.array(kind % 7, "Int64")
    town[::3] = pd.NA
    return pd.DataFrame({"kind": kind, "town": town, "label": kind % 2})


@pytest.fixture(scope="module")
def different(spark, tmp_path_factory):
    """A dataset of different rows, whole rows being the key."""
    folder = tmp_path_factory.mktemp("different")
    config = recipe(write(folder / "rows", all_different()), key=["kind", "town", "label"])
    return build(spark, config, folder / "datasets")


def test_without_duplicates_a_row_is_where_its_columns_say(different, spark, tmp_path, caplog):
    with caplog.at_level("INFO"):
        alone = build(spark, recipe(write(tmp_path / "rows", all_different())), tmp_path / "datasets")
    assert "duplicate row" not in caplog.text
    assert files_of(alone) == files_of(different)


def test_the_first_of_equal_rows_is_where_it_would_be_alone(different, spark, tmp_path):
    rows = pd.concat([all_different(), all_different(60)], ignore_index=True)
    grown = split_rows(build(spark, recipe(write(tmp_path / "rows", rows)), tmp_path / "datasets"))
    for split, own in split_rows(different).items():
        assert set(own["kind"]) <= set(grown[split]["kind"])
    assert sum(map(len, grown.values())) == len(rows)


def test_named_columns_keep_equal_rows_in_one_split(spark, tmp_path, caplog):
    split = {"kind": "hash", "shares": SHARES, "key": ["kind", "town", "label"]}
    with caplog.at_level("INFO"):
        rows = split_rows(build(spark, recipe(write(tmp_path / "rows", survey()), split=split), tmp_path / "datasets"))
    assert "duplicate row" not in caplog.text
    seen = [set(own.fillna(-1)[["kind", "town", "label"]].itertuples(index=False, name=None)) for own in rows.values()]
    assert sum(map(len, seen)) == len(set().union(*seen))


def test_a_trial_of_few_rows_is_of_all_kinds(spark, tmp_path):
    folder = write(tmp_path / "rows", survey())
    rows = pd.concat(split_rows(build(spark, recipe(folder, limit_rows=600), tmp_path / "datasets")).values())
    assert 500 < len(rows) < 700 and rows["kind"].nunique() == KINDS


def test_quarantined_rows_have_the_columns_of_the_table(spark, tmp_path):
    checks = [{"name": "known", "kind": "expression", "sql": "town IS NOT NULL", "level": "row"}]
    built = build(
        spark, recipe(write(tmp_path / "rows", survey()), checks=checks, features={"kind": {"kind": "categorical"}}),
        tmp_path / "datasets",
    )  # fmt: skip
    (file,) = Path(built.uri).glob("data-*/quarantine/known.parquet")
    assert not {name for name in pq.read_schema(file).names if "duplicate" in name}
    assert (
        pq.read_metadata(file).num_rows == built.manifest.accounting.quarantined["known"] == survey().town.isna().sum()
    )


def test_the_copies_of_a_part_are_apart(spark, tmp_path):
    rows = survey().assign(at=pd.Timestamp("2024-03-01", tz="UTC"))
    rows.loc[rows.index % 2 == 1, "at"] = pd.Timestamp("2024-03-02", tz="UTC")
    rows["at"] = rows["at"].astype("datetime64[us, UTC]")
    interval = {"column": "at", "last": "2024-03-02", "window": 2}
    config = recipe(write(tmp_path / "rows", rows), columns={"at": "timestamp"}, interval=interval)
    built = build(spark, config, tmp_path / "datasets")
    assert len(built.manifest.parts) == 2
    for split, own in split_rows(built).items():
        assert own["kind"].nunique() == KINDS and len(own) / ROWS == pytest.approx(SHARES[split], abs=0.03)


def test_the_log_warns_of_many_duplicates(spark, tmp_path, caplog):
    rows = pd.DataFrame({"kind": [*range(100), 0, 1], "town": 1, "label": [0, 1] * 51})
    with caplog.at_level("INFO"):
        build(spark, recipe(write(tmp_path / "rows", rows)), tmp_path / "datasets")
    (remark,) = (r for r in caplog.records if "duplicate" in r.getMessage())
    assert remark.levelname == "WARNING" and "2 duplicate rows among 102 rows" in remark.getMessage()
