"""The wheel carries all that the program reads, works away from the checkout, and takes no name of a user's project."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = """
name: mine
etl:
  sources: {t: {path: rows.csv, columns: {id: long, x: double, low: float}}}
  views: {rows: "SELECT id, x, low FROM t"}
  rows: rows
  key: [id]
  features: {x: {kind: numeric}}
  label: low
model: {factory: "training.models.mine:Net", inputs: [x]}
train: {epochs: 1, global_batch: 32}
launch: {world: 2}
parallel: {engine: torch}
report: {baselines: false, must_beat_guess: false}
"""
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.line(x[:, None])[:, 0]
"""
PREDICT = """
import importlib, os, shutil, sys
from pathlib import Path
import mlflow

assert {importlib.import_module(name).OWNER for name in ("conf", "etl", "training")} == {"user"}
os.environ["SPARKRING_MODEL_MODULES"] = "training.models.mine"
mlflow.set_tracking_uri("sqlite:///data/mlflow/mlflow.db")

def show(model):
    print(mlflow.pyfunc.load_model(model).predict({"x": [0.0, 1.0]})["prediction"].tolist())

show(sys.argv[1])
# A model registered when the loader was `pipelines.serving`, where the project has no `pipelines` of its own.
shutil.rmtree("pipelines")
importlib.invalidate_caches()
(model,) = Path("data/mlflow").rglob("MLmodel")
model.write_text(model.read_text().replace("sparkring.pipelines.serving", "pipelines.serving"))
show(str(model.parent))
assert importlib.import_module("pipelines.serving").__file__.startswith(sys.argv[2])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that holds nothing but the installed wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist")]
    subprocess.run([*pip, *build, str(ROOT)], check=True, timeout=600, capture_output=True)
    (wheel,) = (folder / "dist").glob("sparkring-*.whl")
    install = ["install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=600, capture_output=True)
    yield folder / "site"


def run(program: str, *words: str, cwd: Path, path: list[Path]) -> subprocess.CompletedProcess[str]:
    names = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=cwd, env=names, capture_output=True, text=True, timeout=600)


CLI = "import sparkring.pipelines.cli as c, sys; print(c.__file__, flush=True); sys.exit(c.main(sys.argv[1:]))"


def test_the_wheel_runs_on_its_own(site: Path, tmp_path: Path) -> None:
    done = run(CLI, "config", "show", "flights", cwd=tmp_path, path=[site])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site)) and "optim.lr" in done.stdout
    assert (site / "sparkring/pipelines/report/report.html").is_file()


def test_the_wheel_installs_no_module_that_a_project_may_have(site: Path) -> None:
    names = {entry.name for entry in site.iterdir() if not entry.name.endswith(".dist-info")}
    assert names == {"sparkring", "pipelines", "bin"}
    # Without an __init__.py this one gives way to any package of that name.
    assert [entry.name for entry in (site / "pipelines").iterdir() if entry.suffix] == ["serving.py"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project whose folders have the names of ours, with a model in one of them."""
    for name in ("conf", "etl", "pipelines", "training"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('OWNER = "user"\n')
    (tmp_path / "training/models").mkdir()
    (tmp_path / "training/models/mine.py").write_text(NET)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    rows = "\n".join(f"{i},{i % 7 - 3},{int(i % 7 > 3)}" for i in range(800))
    (tmp_path / "rows.csv").write_text(f"id,x,low\n{rows}\n")
    return tmp_path


OWN_MODEL = """
import importlib
from sparkring.conf.load import load_config
from sparkring.conf.references import load_reference

assert {importlib.import_module(name).OWNER for name in ("conf", "etl", "training")} == {"user"}
print(load_reference(load_config("mine.yaml").config.model.factory).__name__)
"""


def test_a_project_with_folders_named_as_ours_keeps_its_names(site: Path, project: Path) -> None:
    done = run(OWN_MODEL, cwd=project, path=[project, site])
    assert (done.returncode, done.stdout) == (0, "Net\n"), done.stderr[-3000:]


@pytest.mark.spark
@pytest.mark.slow
def test_a_project_with_folders_named_as_ours_trains_and_serves_its_own_model(site: Path, project: Path) -> None:
    path = [project, site]
    done = run(CLI, "run", "mine.yaml", cwd=project, path=path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(str(site))

    served = run(PREDICT, "models:/mine/1", str(site), cwd=project, path=path)
    assert served.returncode == 0, served.stderr[-3000:]
    first, second = served.stdout.splitlines()
    assert first.startswith("[0.") and first == second
