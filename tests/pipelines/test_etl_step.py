"""The dataset of a job: found, asked for, and described for MLflow."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparkring.conf.config import RunConfig
from sparkring.conf.load import load_config
from sparkring.conf.manifest import (
    MANIFEST_NAME,
    Accounting,
    Column,
    ManifestError,
    WindowPart,
)
from sparkring.conf.sources import FilesSource
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.build import PinnedSources
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.pin import pin as pin_source
from sparkring.pipelines.cli import main
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.etl_step import (
    Dataset,
    data_errors_named,
    dataset_info,
    find,
    record_build,
    require,
    wanted_fingerprint,
)
from sparkring.pipelines.job.etl_job import run_etl
from sparkring.pipelines.run.exit_codes import Exit
from tests.helpers.datasets import manifest_of, unread_file

MANIFEST = manifest_of(
    columns=(
        Column(name="x", dtype="float64"),
        Column(name="n", dtype="int8"),
        Column(name="y", dtype="bool"),
        Column(name="carrier", dtype="string", role="input", nulls="keep"),
        Column(name="day", dtype="int32", role="input", logical="date", nulls="keep"),
    ),
    files=(unread_file("train", 3, "a.parquet"),),
    accounting=Accounting(rows_in=5, rows_out=3, quarantined={"r": 2}),
)


def config(folder: Path) -> RunConfig:
    return RunConfig.model_validate({"name": "d", "dataset": str(folder)})


def test_a_dataset_named_by_its_folder_is_found_there(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=str(tmp_path)):
        wanted_fingerprint(config(tmp_path), PinnedSources({}, ""))
    (tmp_path / MANIFEST_NAME).write_text(MANIFEST.to_json())
    (tmp_path / "a.parquet").write_bytes(bytes(9))
    assert wanted_fingerprint(config(tmp_path), PinnedSources({}, "")) == "a" * 64
    found = require(config(tmp_path), "a" * 64)
    assert found.manifest == MANIFEST and not found.rebuilt and found.seconds == {}


def test_a_dataset_that_is_not_built_yet_is_asked_for_with_the_command_that_builds_it(tmp_path: Path) -> None:
    recipe = config(tmp_path).model_copy(
        update={"dataset": None, "storage": config(tmp_path).storage.model_copy(update={"datasets": str(tmp_path)})}
    )
    assert find(recipe, "b" * 64) is None
    with pytest.raises(ManifestError, match=r"d-bbbbbbbbbbbb: no dataset .* run `sparkring etl` first"):
        require(recipe, "b" * 64)


def test_mlflow_gets_types_and_counts_by_its_own_names(tmp_path: Path) -> None:
    info = dataset_info(Dataset(MANIFEST, open_storage(str(tmp_path))))
    assert info.profile == {"rows_train": 3, "files": 1}
    assert info.schema == [
        {"name": "x", "type": "double"}, {"name": "n", "type": "integer"}, {"name": "y", "type": "boolean"},
        {"name": "carrier", "type": "string"}, {"name": "day", "type": "datetime"},
    ]  # fmt: skip


def test_a_build_is_recorded_with_every_row_accounted_for(tmp_path: Path) -> None:
    class Recorder:
        points: dict[str, float] = {}
        files: list[str] = []

        def metrics(self, key: str, step: int, values: dict[str, float]) -> None:
            self.points |= values

        def dataset(self, *_: object) -> None: ...
        def artifact_json(self, key: str, content: object, name: str, path: str) -> None:
            self.files.append(name)

    recorder = Recorder()
    dataset = Dataset(MANIFEST, open_storage(str(tmp_path)), True, {"join_s": 1.5})
    record_build(recorder, dataset)  # type: ignore[arg-type]
    assert recorder.points == {
        "rows/in": 5.0, "rows/out": 3.0, "rows/quarantined_r": 2.0, "rows/train": 3.0, "time/join_s": 1.5,
    }  # fmt: skip
    assert recorder.files == ["checks.json", "manifest.json"]


RECIPE = """
name: small
etl:
  sources: {t: {path: TABLE, columns: {a: int}}}
  rows: t
  features: {a: {kind: numeric}}
storage: {datasets: DATASETS}
"""


def never() -> Any:
    raise AssertionError("files are pinned without Spark")


def test_one_job_hashes_every_source_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "t"
    table.mkdir()
    for name in ("a.csv", "b.csv", "c.csv"):
        (table / name).write_text("a\n1\n")
    (tmp_path / "small.yaml").write_text(
        RECIPE.replace("TABLE", str(table)).replace("DATASETS", str(tmp_path / "datasets"))
    )
    resolved = load_config(str(tmp_path / "small.yaml"))
    hashed: Counter[str] = Counter()
    real = Storage.sha256

    def counted(self: Storage, relative: str, *rest: Any) -> str:
        hashed[self.path(relative)] += 1
        return real(self, relative, *rest)

    monkeypatch.setattr(Storage, "sha256", counted)
    fingerprints = []

    def build(spark: Any, request: Any) -> Any:
        fingerprints.append(request.pinned.fingerprint)
        return SimpleNamespace(
            manifest=MANIFEST, uri=str(tmp_path / "datasets"), rebuilt=True, seconds={}, written_parts=()
        )

    monkeypatch.setattr("sparkring.etl.build.build_dataset", build)
    sources = etl_step.pin(resolved.config, never)
    wanted = etl_step.wanted_fingerprint(resolved.config, sources)
    assert etl_step.find(resolved.config, wanted) is None
    tracker: Any = SimpleNamespace(part=lambda key: nullcontext())
    monkeypatch.setattr(etl_step, "record_build", lambda tracker, dataset: None)
    etl_step.build(None, resolved, sources, "commit", tracker)  # type: ignore[arg-type]
    assert fingerprints == [wanted]
    assert hashed == {str(table / name): 1 for name in ("a.csv", "b.csv", "c.csv")}


def test_a_dry_run_says_why_a_dataset_is_built_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that it would be, and not which of a hundred keys had changed it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(2000)))
    recipe: dict[str, Any] = {
        "name": "small",
        "storage": {"datasets": "datasets", "runs": "runs"},
        "tracking": {"enabled": False},
        "train": {"global_batch": 20},
        "etl": {
            "sources": {"t": {"path": "t.csv", "columns": {"a": "int", "b": "int", "y": "boolean"}}},
            "rows": "t",
            "key": ["a"],
            "features": {"a": {"kind": "numeric"}, "b": {"kind": "numeric"}},
            "label": "y",
        },
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))

    def said(*words: str) -> str:
        assert main(["run", "small.yaml", "--dry-run", *words]) == Exit.OK
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("dataset"))

    assert said().endswith("would be built")
    assert run_etl(load_config("small.yaml"), session=lambda: spark) == Exit.OK
    assert said().endswith("is built already")
    assert said("optim.lr=0.5").endswith("is built already")
    other = said("etl.features.b.transform=log1p")
    assert re.search(r"would be built: against that of 20\S+ differs: etl.features.b$", other)
    assert said("etl.split.seed=5").endswith("differs: etl.split.seed")
    assert said("spark.conf={spark.sql.caseSensitive: true}").endswith("spark.conf.spark.sql.caseSensitive (new)")
    turned = recipe | {"etl": recipe["etl"] | {"features": dict(reversed(recipe["etl"]["features"].items()))}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(turned, sort_keys=False))
    assert said().endswith("differs: the order of etl.features")
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(f"{i},{i % 5},{i % 2}\n" for i in range(2000)))
    assert said().endswith("differs: what etl.sources.t holds")
    (folder,) = (tmp_path / "datasets").glob("small-*")
    manifest = json.loads((folder / "_manifest.json").read_text())
    manifest["lineage"].pop("made_of")
    (folder / "_manifest.json").write_text(json.dumps(manifest))
    assert said().endswith("would be built: what the newest of this name was made of was not recorded")


IN_PARTS = """
name: small
etl:
  sources: {t: {path: TABLE, format: parquet, columns: {a: int}, partitions: {day: date}}}
  rows: t
  features: {a: {kind: numeric}}
  interval: {column: day, sources: {t: day}, last: 2024-03-02, window: 2}
storage: {datasets: DATASETS}
"""


def test_a_recipe_with_intervals_is_pinned_and_built_as_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in (1, 2, 3):
        (folder := tmp_path / f"t/day=2024-03-0{day}").mkdir(parents=True)
        pq.write_table(pa.table({"a": pa.array([day], pa.int32())}), folder / "x.parquet")
    text = IN_PARTS.replace("TABLE", str(tmp_path / "t")).replace("DATASETS", str(tmp_path / "datasets"))
    (tmp_path / "small.yaml").write_text(text)
    requests = []

    def build_dataset(spark: Any, request: Any) -> Any:
        requests.append(request)
        part = WindowPart(interval="2024-03-02", fingerprint="b" * 64, folder="parts/small/2024-03-02/b", rows=3)
        manifest = MANIFEST.model_copy(update={"parts": (part,)})
        uri = str(tmp_path / "datasets")
        return SimpleNamespace(manifest=manifest, uri=uri, rebuilt=True, seconds={}, written_parts=("2024-03-02",))

    monkeypatch.setattr("sparkring.etl.build.build_dataset", build_dataset)
    points: dict[str, float] = {}
    tracker: Any = SimpleNamespace(
        part=lambda key: nullcontext(), dataset=lambda *_: None, artifact_json=lambda *_: None,
        metrics=lambda key, step, values: points.update(values),
    )  # fmt: skip
    resolved = load_config(str(tmp_path / "small.yaml"))
    sources = etl_step.pin(resolved.config, never)
    wanted = etl_step.wanted_fingerprint(resolved.config, sources)
    dataset = etl_step.build(None, resolved, sources, "commit", tracker)  # type: ignore[arg-type]
    (request,) = requests
    pinned = request.pinned
    assert pinned is sources and pinned.fingerprint == wanted and request.name == "small"
    assert [part.interval.label for part in pinned.parts] == ["2024-03-01", "2024-03-02"]
    assert dataset.written_parts == ("2024-03-02",) and points["parts/all"] == points["parts/written"] == 1.0
    night = load_config(str(tmp_path / "small.yaml"), ["etl.interval.last=2024-03-03"])
    after = etl_step.pin(night.config, never)
    assert after.part_fingerprints["2024-03-02"] == pinned.part_fingerprints["2024-03-02"]
    assert etl_step.wanted_fingerprint(night.config, after) != wanted


@pytest.mark.spark
def test_a_value_that_spark_cannot_read_is_an_error_of_the_data(spark: Any) -> None:
    with pytest.raises(EtlError, match=r"'Wien'.* cast it in the recipe's SQL"), data_errors_named():
        spark.sql("SELECT CAST(name AS TIMESTAMP) FROM VALUES ('Wien') AS t(name)").collect()
    with pytest.raises(PySparkException), data_errors_named():
        spark.sql("SELECT nowhere").collect()


@pytest.mark.spark
@pytest.mark.parametrize("codec", ["snappy", "zstd", "gzip"])
def test_a_damaged_page_of_a_file_among_others_is_an_error_of_the_data_that_names_it(
    spark: Any, tmp_path: Path, codec: str
) -> None:
    for name in "abc":
        values = np.random.default_rng(3).integers(0, 50, 20_000)
        pq.write_table(pa.table({"v": values}), tmp_path / f"{name}.parquet", compression=codec, use_dictionary=False)
    data = bytearray((tmp_path / "b.parquet").read_bytes())
    third = data.index(b"\x28\xb5\x2f\xfd") if codec == "zstd" else len(data) // 3  # its frames need no checksum
    data[third : third + 200] = bytes(0xA5 ^ byte for byte in data[third : third + 200])
    (tmp_path / "b.parquet").write_bytes(bytes(data))
    with pytest.raises(EtlError, match=r"/b\.parquet: it is damaged or cut \("), data_errors_named():
        spark.read.parquet(str(tmp_path)).selectExpr("sum(v)").collect()


@pytest.mark.spark
@pytest.mark.parametrize(
    ("suffix", "codec", "damage"),
    [
        ("gz", "gzip", "cut"),
        ("gz", "gzip", "flipped"),
        ("bz2", "bz2", "cut"),
        ("bz2", "bz2", "flipped"),
        ("zst", "zstd", "cut"),  # its frames need no checksum
    ],
)
def test_a_compressed_text_among_others_that_breaks_in_the_middle_is_named(
    spark: Any, tmp_path: Path, suffix: str, codec: str, damage: str
) -> None:
    for name in "abc":
        with pa.output_stream(str(tmp_path / f"{name}.txt.{suffix}"), compression=codec) as sink:
            sink.write(b"".join(b"%d\n" % (n * 7919 % 10007) for n in range(20_000)))
    broken = tmp_path / f"b.txt.{suffix}"
    data, half = bytearray(broken.read_bytes()), len(broken.read_bytes()) // 2
    data[half : half + 40] = bytes(0xA5 ^ byte for byte in data[half : half + 40])
    broken.write_bytes(bytes(data[:half] if damage == "cut" else data))
    texts = FilesSource.model_validate({"path": str(tmp_path), "format": "text"})
    with pytest.raises(EtlError, match=rf"/b\.txt\.{suffix}: it is damaged or cut \("), data_errors_named():
        pin_source("t", texts).read(spark).collect()
