"""`sparkring serve-check`: does a registered model predict the same in an environment made of its folder alone?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from sparkring.conf.blocks.predict import REGISTERED
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.errors import first_line
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.model.sample import PREDICTIONS, ROWS
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.tracking.client import client_limits
from sparkring.pipelines.tracking.mlmodel import MLMODEL, read_mlmodel
from sparkring.training.launch.failure import LaunchError
from sparkring.training.model.folder import changed_files

REQUIREMENTS = "requirements.txt"  # MLflow's
PROGRAM = Path(__file__).with_name("check_program.py")
NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SPARKRING_MODEL_MODULES")
ROUNDING = 1e-6  # relative, at least absolute: other processors round the last bits of float32 differently
Predictions = dict[str, list[Any]]


@dataclass(frozen=True)
class Answer:
    """What check_program.py prints. code: where sparkring was imported from; predictions: by how rows came."""

    code: str
    predictions: dict[str, Predictions]


def serve_check(target: str, tracking: TrackingConfig, say: Callable[[str], None]) -> int:
    """Build the model's environment, predict its sample there, and compare; returns the exit code.

    StoredError for a target that is no registered model, LaunchError where its requirements cannot be installed.
    `target`: models:/<name>@<alias>, models:/<name>/<version>, or the folder of an MLflow model.
    """
    with scratch_folder("check") as scratch:
        folder = find_folder(target, tracking, scratch)
        data = data_folder(folder, target)
        if changed := changed_files(open_storage(str(data)), leave_out=()):
            say(f"{target}: {', '.join(changed)}: not as when the model was registered, by sha256")
            return Exit.QUALITY
        began = time.monotonic()
        python = make_environment(folder / REQUIREMENTS, scratch / "environment", target)
        say(f"{target}: its requirements are installed, in {time.monotonic() - began:.0f} s")
        answer = ask(python, folder, data, target)
        if problem := import_problem(answer, folder):
            say(f"{target}: {problem}")
            return Exit.QUALITY
        if not (data / PREDICTIONS).exists():
            say(f"{target}: loads; it has no sample of predictions to compare with (tracking.sample_rows)")
            return Exit.OK
        try:
            expected = pq.read_table(data / PREDICTIONS)
        except (pa.ArrowException, OSError) as error:
            raise StoredError(f"{target}: {PREDICTIONS} cannot be read: {first_line(error)}") from error
        for way, found in answer.predictions.items():
            if difference := first_difference(expected, found):
                say(f"{target}: rows from {way}: {difference}")
                return Exit.QUALITY
        say(f"{target}: {summary(expected, answer.predictions)}")
    return Exit.OK


def find_folder(target: str, tracking: TrackingConfig, scratch: Path) -> Path:
    """Return the local folder of an MLflow model, copied if it is registered. StoredError if not ours."""
    if REGISTERED.fullmatch(target):
        from sparkring.pipelines.tracking.store.fetch import copy_model, find_model  # MLflow: seconds

        with client_limits(tracking):
            copied = copy_model(tracking, find_model(tracking, target), scratch / "registered")
        folder = next(parent for parent in copied.parents if (parent / MLMODEL).exists())
    else:
        folder = Path(target)
    if not (folder / MLMODEL).exists() or not (folder / REQUIREMENTS).exists():
        raise StoredError(
            f"{target}: no model as MLflow stores it: it has no {MLMODEL} with {REQUIREMENTS}; give "
            "models:/<name>@<alias>, models:/<name>/<version> or such a model's folder"
        )
    return folder


def data_folder(folder: Path, target: str) -> Path:
    """Return the folder of the model's own files, from MLmodel. StoredError if it has no code."""
    flavor = read_mlmodel(folder, target)
    if not flavor.get("code"):
        raise StoredError(f"{target}: was registered by an older sparkring, without its code; train again")
    return folder / flavor["data"]


def make_environment(requirements: Path, folder: Path, target: str) -> Path:
    """Install the requirements, by pip with its user's configuration, into a new environment; its Python."""
    subprocess.run([sys.executable, "-I", "-m", "venv", str(folder)], check=True, env=clean_environment(os.environ))
    python = folder / "bin" / "python"
    quick = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    command = [str(python), "-I", "-m", "pip", "install", *quick, "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(os.environ))
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise LaunchError(f"{target}: pip cannot install its requirements.txt: {' '.join(errors[-3:])}")
    return python


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Remove variables that lead Python to other packages, or a model to trust other code."""
    return {name: value for name, value in variables.items() if name not in NOT_PASSED_ON}


def ask(python: Path, folder: Path, data: Path, target: str) -> Answer:
    """Predict the sample in the environment. StoredError with the last line of what went wrong there."""
    command = [str(python), "-I", str(PROGRAM), str(folder.resolve()), str(data.resolve() / ROWS)]
    variables = clean_environment(os.environ) | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise StoredError(f"{target}: does not predict there: {(done.stderr.splitlines() or ['no output'])[-1]}")
    try:
        return TypeAdapter(Answer).validate_json(lines[-1])
    except ValidationError as error:
        raise StoredError(f"{target}: its environment printed {lines[-1][:200]!r} instead of predictions") from error


def import_problem(answer: Answer, folder: Path) -> str | None:
    """Return what was imported from outside the model's folder; None if nothing was."""
    if not Path(answer.code).is_relative_to(folder.resolve()):
        return f"sparkring was imported from {answer.code}, not from the model's own folder"
    return None


def first_difference(expected: pa.Table, found: Predictions) -> str | None:
    """Describe the first row and column that differ, rows from 0; None if equal."""
    if expected.column_names != list(found):
        return f"the columns are {list(found)}, recorded are {expected.column_names}"
    for name in expected.column_names:
        values = expected[name].to_pylist()
        if len(values) != len(found[name]):
            return f"{count_of(len(found[name]), 'prediction')} for {count_of(len(values), 'row')}"
        for row, (wanted, got) in enumerate(zip(values, found[name], strict=True)):
            if not alike(wanted, got):
                return f"row {row}, column {name!r}: {got!r} is predicted, {wanted!r} is recorded"
    return None


def alike(wanted: Any, got: Any) -> bool:
    if isinstance(wanted, float) and isinstance(got, int | float):
        return abs(wanted - got) <= ROUNDING * max(1.0, abs(wanted))
    return bool(wanted == got)


def summary(expected: pa.Table, found: Mapping[str, Predictions]) -> str:
    """Describe that all predictions are equal, and whether to the last bit."""
    recorded = expected.to_pydict()
    how = "bit by bit" if all(each == recorded for each in found.values()) else "but for the processor's rounding"
    return f"{count_of(len(expected), 'row')}, from {' and from '.join(found)}: predictions are equal {how}"
