"""The dataset of flights by the oldest Spark and by Spark Connect is that of the newest, byte by byte.

Other versions lie in build/matrix where `make matrix` has been run; without it the test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkring.etl.raw import unpack_flights

OVERLAYS = Path(__file__).resolve().parents[2] / "build/matrix"
Built = list[Any]
pytestmark = pytest.mark.spark
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "newest": ([], {}),
    "oldest": (["3.5.9"], {}),
    "connect": (["connect"], {"SPARK_REMOTE": "local[2]"}),
}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    unpack_flights(folder / "data/raw/flights")
    return folder


@pytest.fixture(scope="module")
def newest(raw: Path) -> Built:
    if not OVERLAYS.is_dir():
        pytest.skip("build/matrix is not there (make matrix)")
    return built(raw, "newest")


def built(folder: Path, case: str) -> Built:
    """Build the dataset; returns the version of Spark, the files' hashes and the fitted statistics."""
    overlays, variables = CASES[case]
    places = [f"storage.datasets={folder}/{case}", f"tracking.uri=sqlite:///{folder}/{case}.db"]
    words = ["etl", "flights", "etl.one_per=null", "etl.limit_rows=500", *places]
    path = os.pathsep.join(str(OVERLAYS / name) for name in overlays)
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    command = [sys.executable, "-m", "sparkring.pipelines.cli", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (manifest,) = folder.glob(f"{case}/flights-*/_manifest.json")
    found = json.loads(manifest.read_text())
    files = [(file["sha256"], file["rows"]) for file in found["files"]]
    return [found["lineage"]["spark_version"], files, found["features"], found["checks"], found["accounting"]]


@pytest.mark.parametrize("case", ["oldest", "connect"])
def test_another_spark_makes_the_same_dataset(raw: Path, newest: Built, case: str) -> None:
    (needed,) = CASES[case][0]
    if not (OVERLAYS / needed).is_dir():
        pytest.skip(f"build/matrix/{needed} is not there (make matrix)")
    version, *found = built(raw, case)
    assert version.startswith("3.5.") == (case == "oldest")
    assert found == newest[1:]
