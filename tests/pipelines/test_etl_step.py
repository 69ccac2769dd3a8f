"""The dataset of a job: found, asked for, and described for MLflow."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from sparkring.conf.config import RunConfig
from sparkring.conf.load import load_config
from sparkring.conf.manifest import (
    MANIFEST_NAME,
    Accounting,
    Column,
    DataFile,
    DatasetManifest,
    Lineage,
    ManifestError,
    SplitInfo,
    WindowPart,
)
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.window import PinnedWindow
from sparkring.pipelines import etl_step
from sparkring.pipelines.etl_step import (
    Dataset,
    data_errors_named,
    dataset_info,
    find,
    record_build,
    require,
    wanted_fingerprint,
)

MANIFEST = DatasetManifest(
    name="d", fingerprint="a" * 64, created_at="",
    columns=(
        Column(name="x", dtype="float64"), Column(name="n", dtype="int8"), Column(name="y", dtype="bool"),
        Column(name="carrier", dtype="string", role="input", nulls="keep"),
        Column(name="day", dtype="int32", role="input", logical="date", nulls="keep"),
    ),
    files=(DataFile(path="a.parquet", split="train", rows=3, bytes=9, sha256="ab" * 32, row_groups=(3,)),),
    splits={"train": SplitInfo(rows=3, files=1)}, accounting=Accounting(rows_in=5, rows_out=3, quarantined={"r": 2}),
    lineage=Lineage(sources={}),
)  # fmt: skip


def config(folder: Path) -> RunConfig:
    return RunConfig.model_validate({"name": "d", "dataset": str(folder)})


def test_a_dataset_named_by_its_folder_is_found_there(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=str(tmp_path)):
        wanted_fingerprint(config(tmp_path), {})
    (tmp_path / MANIFEST_NAME).write_text(MANIFEST.to_json())
    (tmp_path / "a.parquet").write_bytes(bytes(9))
    assert wanted_fingerprint(config(tmp_path), {}) == "a" * 64
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
        fingerprints.append(
            etl_step.dataset_fingerprint(request.config, request.sources, etl_step.pyspark.__version__, {})
        )
        return SimpleNamespace(
            manifest=MANIFEST, uri=str(tmp_path / "datasets"), rebuilt=True, seconds={}, written_parts=()
        )

    monkeypatch.setattr(etl_step, "build_dataset", build)
    sources = etl_step.pin(resolved.config, never)
    wanted = etl_step.wanted_fingerprint(resolved.config, sources)
    assert etl_step.find(resolved.config, wanted) is None
    tracker: Any = SimpleNamespace(part=lambda key: nullcontext())
    monkeypatch.setattr(etl_step, "record_build", lambda tracker, dataset: None)
    etl_step.build(None, resolved, sources, "commit", tracker)  # type: ignore[arg-type]
    assert fingerprints == [wanted]
    assert hashed == {str(table / name): 1 for name in ("a.csv", "b.csv", "c.csv")}


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

    def build_window(spark: Any, request: Any, pinned: Any) -> Any:
        requests.append((request, pinned))
        part = WindowPart(interval="2024-03-02", fingerprint="b" * 64, folder="parts/small/2024-03-02/b", rows=3)
        manifest = MANIFEST.model_copy(update={"parts": (part,)})
        uri = str(tmp_path / "datasets")
        return SimpleNamespace(manifest=manifest, uri=uri, rebuilt=True, seconds={}, written_parts=("2024-03-02",))

    monkeypatch.setattr(etl_step, "build_window", build_window)
    points: dict[str, float] = {}
    tracker: Any = SimpleNamespace(
        part=lambda key: nullcontext(), dataset=lambda *_: None, artifact_json=lambda *_: None,
        metrics=lambda key, step, values: points.update(values),
    )  # fmt: skip
    resolved = load_config(str(tmp_path / "small.yaml"))
    sources = etl_step.pin(resolved.config, never)
    wanted = etl_step.wanted_fingerprint(resolved.config, sources)
    dataset = etl_step.build(None, resolved, sources, "commit", tracker)  # type: ignore[arg-type]
    ((request, pinned),) = requests
    assert pinned is sources and pinned.fingerprint == wanted and request.name == "small"
    assert [part.interval.label for part in pinned.parts] == ["2024-03-01", "2024-03-02"]
    assert dataset.written_parts == ("2024-03-02",) and points["parts/all"] == points["parts/written"] == 1.0
    night = load_config(str(tmp_path / "small.yaml"), ["etl.interval.last=2024-03-03"])
    after = etl_step.pin(night.config, never)
    assert isinstance(after, PinnedWindow) and after.parts[0].fingerprint == pinned.parts[1].fingerprint
    assert etl_step.wanted_fingerprint(night.config, after) != wanted


@pytest.mark.spark
def test_a_value_that_spark_cannot_read_is_an_error_of_the_data(spark: Any) -> None:
    with pytest.raises(EtlError, match=r"'Wien'.* cast it in the recipe's SQL"), data_errors_named():
        spark.sql("SELECT CAST(name AS TIMESTAMP) FROM VALUES ('Wien') AS t(name)").collect()
    with pytest.raises(PySparkException), data_errors_named():
        spark.sql("SELECT nowhere").collect()
