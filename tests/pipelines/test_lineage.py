"""From a model, a run or a dataset to sources that are there, have changed or are gone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Accounting, Lineage, WindowPart
from sparkring.conf.sources import SourceConfig
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.etl.sources.pin import pin
from sparkring.etl.windows.interval import window_of
from sparkring.etl.windows.parts import PART_NAME, Part
from sparkring.pipelines.cli import main
from sparkring.pipelines.cli.replay_log import replay_log
from sparkring.pipelines.cli.reproduce import find_run
from sparkring.pipelines.lineage import show as lineage
from sparkring.pipelines.run.runs import RunRecord, Runs, training_digest
from sparkring.pipelines.serving import signature_inputs, signature_outputs
from sparkring.pipelines.tracking.ops import ModelInfo
from sparkring.pipelines.tracking.store.fetch import RegisteredBy, RegisteredModel, copy_model
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.worker.result import SUMMARY
from tests.helpers.datasets import manifest_of, unread_file
from tests.pipelines.results import train_result
from tests.pipelines.served import CONFIG, manifest, model_folder
from tests.spark.sales import recipe, write_sales

FILE = unread_file("train", 7, "a")
NOWHERE = TrackingConfig(root="/nowhere")


def read_of(name: str, config: SourceConfig) -> dict[str, Any]:
    return pin(name, config).lineage()


def write_dataset(folder: Path, sources: dict[str, Any], **fields: Any) -> None:
    made = manifest_of(files=(FILE,), name="again", lineage=Lineage(sources=sources), **fields)
    open_storage(str(folder)).put_atomic("_manifest.json", made.to_json().encode())


def write_run(folder: Path, dataset: Path, etl: EtlConfig) -> dict[str, Any]:
    config: dict[str, Any] = {"name": "again", "etl": etl.model_dump(mode="json")}
    found = train_result(run=str(folder), dataset=str(dataset), config=config)
    open_storage(str(folder)).put_atomic(SUMMARY, found.to_json())
    return config


def whole_etl(folder: Path) -> EtlConfig:
    """A recipe of two sources, both there."""
    sources = {}
    for name in ("flights", "planes"):
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table({"x": [1, 2]}), folder / name / "a.parquet")
        sources[name] = {"path": str(folder / name), "format": "parquet", "columns": {"x": "bigint"}}
    features = {"x": {"kind": "numeric"}}
    return EtlConfig.model_validate({"sources": sources, "rows": "flights", "features": features})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    etl = whole_etl(tmp_path / "raw")
    write_dataset(tmp_path / "dataset", {name: read_of(name, source) for name, source in etl.sources.items()})
    write_run(tmp_path / "run", tmp_path / "dataset", etl)
    return tmp_path / "run"


def states(made: lineage.Origin) -> dict[str, str]:
    return {source.name: source.state for source in made.sources}


def test_a_runs_sources_are_the_same_have_changed_or_are_gone(run: Path) -> None:
    raw = run.parent / "raw"
    assert states(lineage.trace(str(run), NOWHERE)) == {"flights": "same", "planes": "same"}
    pq.write_table(pa.table({"x": [1, 3]}), raw / "flights/a.parquet")
    shutil.rmtree(raw / "planes")
    made = lineage.trace(str(run), NOWHERE)
    assert states(made) == {"flights": "changed", "planes": "gone"} and made.missing == []
    shown = lineage.text(made).splitlines()
    assert [line.split()[0] for line in shown] == ["scores", "run", "dataset", "source", "source"]
    assert "commit c0ffee, 3 ranks of torch-gloo" in shown[1] and "rows: train 7" in shown[2]
    assert "changed: what is there now is not what was read" in shown[3] and str(raw / "planes") in shown[4]
    assert json.loads(made.to_json())["sources"][1]["state"] == "gone"
    summary = json.loads((run / SUMMARY).read_text())
    (run / SUMMARY).write_text(json.dumps(summary | {"start": "with the weights of models:/encoder/3"}))
    assert "start    with the weights of models:/encoder/3" in lineage.text(lineage.trace(str(run), NOWHERE))


WITHOUT_PYSPARK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from sparkring.pipelines.cli import main
for command in sys.argv[1:]:
    print("exit", int(main(command.split())))
"""


def test_lineage_package_plan_and_a_recipe_without_its_tables_need_no_pyspark(run: Path) -> None:
    """Its tables need it, as their types are Spark's: one line names the extra."""
    commands = [
        f"lineage {run}", f"package --out {run.parent}/code.zip", "config validate flights --no-tables",
        "plan show gpt-70b", "config validate flights",
    ]  # fmt: skip
    command = [sys.executable, "-c", WITHOUT_PYSPARK, *commands]
    done = subprocess.run(command, cwd=run.parent, capture_output=True, text=True, timeout=600)
    assert re.findall(r"^exit (\d+)$", done.stdout, re.MULTILINE) == ["0", "0", "0", "0", "2"], done.stderr[-2000:]
    assert done.stdout.count("not looked at: pyspark, which knows its types, is not installed") == 3
    assert done.stderr.count("\n") == 1 and "pip install 'sparkring[spark]'" in done.stderr


def test_of_a_dataset_alone_sources_are_named_and_not_looked_at(run: Path) -> None:
    made = lineage.trace(str(run.parent / "dataset"), NOWHERE)
    assert states(made) == {"flights": "not looked at", "planes": "not looked at"} and made.run == {}


def test_what_is_gone_on_the_way_is_said(run: Path) -> None:
    write_dataset(run.parent / "dataset", {})
    stored = run.parent / "dataset/_manifest.json"
    stored.write_text(stored.read_text().replace("a" * 64, "b" * 64))
    assert lineage.trace(str(run), NOWHERE).missing == [
        f"the dataset {run.parent / 'dataset'}: is another one now ({'b' * 12})"
    ]
    stored.unlink()
    made = lineage.trace(str(run), NOWHERE)
    assert made.missing == [f"the dataset {run.parent / 'dataset'}: no _manifest.json there"] and made.run
    with pytest.raises(StoredError, match=r"is no registered model .*, and no folder of a finished run"):
        lineage.trace(str(run.parent / "raw"), NOWHERE)


def test_a_source_read_by_interval_is_as_its_first_interval_that_changed(tmp_path: Path) -> None:
    etl = recipe(write_sales(tmp_path / "sales"), "SELECT * FROM sales", window=2)
    assert etl.interval is not None
    parts = []
    for number, interval in enumerate(window_of(etl.interval)):
        read = read_of("sales", etl.sources["sales"].cut(interval.condition("day")))
        print_of = f"{number:064x}"
        part = Part(
            interval=interval.label, fingerprint=print_of, created_at="", columns=(), inputs={}, files=(), splits={},
            statistics="s", statistics_sha256=print_of, accounting=Accounting(rows_in=0, rows_out=0), failing={},
            lineage=Lineage(sources={"sales": [read]}),
        )  # fmt: skip
        open_storage(str(tmp_path)).put_atomic(f"p{number}/{PART_NAME}", part.model_dump_json().encode())
        parts.append(WindowPart(interval=interval.label, fingerprint=print_of, folder=f"p{number}", rows=0))
    write_dataset(tmp_path / "dataset", {"sales": {"intervals": 2, "files": 2}}, parts=tuple(parts))
    write_run(tmp_path / "run", tmp_path / "dataset", etl)
    made = lineage.trace(str(tmp_path / "run"), NOWHERE)
    assert states(made) == {"sales": "same"}
    assert "parts    2, 2024-03-03 to 2024-03-04" in lineage.text(made).splitlines()
    pq.write_table(pa.table({"shop": ["a"], "amount": [1]}), tmp_path / "sales/day=2024-03-04/x.parquet")
    (source,) = lineage.trace(str(tmp_path / "run"), NOWHERE).sources
    assert (source.state, source.why.split(":")[0]) == ("changed", "interval 2024-03-04")


def test_a_registered_model_leads_to_its_run_and_sources(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    etl = EtlConfig.model_validate(json.loads((run / SUMMARY).read_text())["config"]["etl"])
    config = RunConfig.model_validate({"name": "again", "etl": etl, "storage": {"runs": str(tmp_path / "runs")}})
    runs = Runs(config.storage.runs, "again")
    settings = TrackingConfig(
        experiment="again", root=str(tmp_path / "mlflow"), flush_every_s=0.05, system_metrics=False
    )
    model_folder(tmp_path / "model")
    info = ModelInfo(
        name="final", step=1, sha256="0" * 64, loader_module="sparkring.pipelines.serving", alias="champion",
        inputs=signature_inputs(CONFIG, manifest()), outputs=signature_outputs("binary"), registered_model="again",
        tags={"sparkring.weights_sha256": "abcdef" * 10},
    )  # fmt: skip
    with runs.begin(config, "a" * 64) as (record, _), Tracker(settings, job="j", name="again") as tracker:
        tracker.params("job", config.model_dump(mode="json"))
        with tracker.part("evaluate"):
            tracker.model("evaluate", tmp_path / "model", info)
        assert tracker.flush(180)
        runs.update(record.folder, mlflow_run_id=tracker.run_id())
    assert record.training_digest == training_digest(config)
    words = ["lineage", "models:/again@champion", f"tracking.root={tmp_path / 'mlflow'}"]
    assert main(words) == 0
    assert "missing  the run of models:/again/1" in capsys.readouterr().out
    shutil.copy(run / SUMMARY, runs.at(record).root)
    other = runs.write(replace(record, folder="20000101-000000-other", mlflow_run_id="f" * 32))
    runs.at(other).put_atomic(SUMMARY, (run / SUMMARY).read_bytes().replace(b"c0ffee", b"decaf0"))
    assert main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["model", "scores", "run", "dataset", "source", "source"]
    assert "commit c0ffee" in shown[2]
    assert "models:/again/1 (champion)" in shown[0] and "weights abcdefabcdef" in shown[0]
    assert main([*words, "--json"]) == 0
    assert [s["state"] for s in json.loads(capsys.readouterr().out)["sources"]] == ["same", "same"]
    assert main(["lineage", "models:/again/9", words[2]]) == 3
    assert "models:/again/9: no such model" in capsys.readouterr().err


# --- what a stored run may not do


EVIL = "endpoint_override=attacker.invalid:9000&scheme=http"


def test_a_run_names_no_server_that_gets_the_readers_keys(run: Path) -> None:
    """Sources and dataset on a server that only the run's own files name: neither is asked."""
    config = json.loads((run / SUMMARY).read_text())["config"]
    config["etl"]["sources"]["flights"]["path"] = f"s3://bucket/flights?{EVIL}"
    etl = EtlConfig.model_validate(config["etl"])
    write_run(run, run.parent / "dataset", etl)
    found = {source.name: source for source in lineage.trace(str(run), NOWHERE).sources}
    assert found["planes"].state == "same" and found["flights"].state == "not looked at"
    assert "the server http://attacker.invalid:9000 is named in" in found["flights"].why
    stored = train_result(run=str(run), dataset=f"s3://bucket/d?{EVIL}", config=config)
    open_storage(str(run)).put_atomic(SUMMARY, stored.to_json())
    made = lineage.trace(str(run), NOWHERE)
    assert made.sources == [] and "the server http://attacker.invalid:9000" in made.missing[0]
    with pytest.raises(ValueError, match=r"the server http://attacker\.invalid:9000 is named in"):
        find_run(str(run), NOWHERE)
    with pytest.raises(ValueError, match=r"the server http://attacker\.invalid:9000 is named in"):
        replay_log(str(run))


def test_a_registered_model_that_is_copied_runs_no_code_that_it_names(tmp_path: Path) -> None:
    """MLmodel names the module that MLflow would import, and a folder of modules it would put first."""
    folder = tmp_path / "artifacts"
    (folder / "code").mkdir(parents=True)
    (folder / "data").mkdir()
    ran = tmp_path / "ran"
    (folder / "code" / "planted.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    flavor = {"loader_module": "planted", "code": "code", "data": "data", "python_version": "3.11"}
    (folder / "MLmodel").write_text(yaml.safe_dump({"flavors": {"python_function": flavor}}))
    model = RegisteredModel("models:/m/1", "m", "1", "r", str(folder), (), {}, 0)
    assert copy_model(TrackingConfig(root=str(tmp_path / "mlflow")), model, tmp_path / "copy").name == "data"
    assert not ran.exists() and "planted" not in sys.modules


@pytest.mark.parametrize(
    ("known", "job", "found"),
    [
        ("r1", "mine/20261122-000000-abababab", True),
        (None, "mine/20261122-000000-abababab", True),
        (None, "mine/20261122-000000-cdcdcdcd", False),
        (None, "mine/../other", False),
    ],
)
def test_a_run_is_found_by_its_folder_where_its_tracking_was_sent_later(
    known: str | None, job: str, found: bool, tmp_path: Path
) -> None:
    runs = Runs(str(tmp_path), "mine")
    record = RunRecord("20261122-000000-abababab", "finished", "0" * 64, "f", known, "h", 1, 1)
    runs.write(record)
    runs.at(record).put_atomic(SUMMARY, b"{}")
    folder = lineage.run_of(RegisteredBy("r1", job, str(tmp_path), "mine"))
    assert (folder is not None) == found
