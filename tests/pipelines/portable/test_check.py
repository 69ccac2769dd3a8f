"""What `serve-check` says of a model's predictions and of a folder that is no such model."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.stored import StoredError
from sparkring.pipelines.model.check import (
    Answer,
    clean_environment,
    data_folder,
    find_folder,
    first_difference,
    import_problem,
    summary,
)
from sparkring.pipelines.model.check_program import as_json

EXPECTED = pa.table({"prediction": [0.25, 0.5]})
MODEL = "flavors:\n  python_function:\n    data: data/data\n"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"prediction": [0.25, 0.5]}, None),
        ({"prediction": [0.25, 0.5 + 1e-7]}, None),
        ({"prediction": [0.25, 0.5001]}, "row 1, column 'prediction': 0.5001 is predicted, 0.5 is recorded"),
        ({"prediction": [None, 0.5]}, "row 0, column 'prediction': None is predicted"),
        ({"prediction": [0.25]}, "1 prediction for 2 rows"),
        ({"class_0": [0.25, 0.5]}, r"the columns are \['class_0'\], recorded are \['prediction'\]"),
    ],
)
def test_the_first_difference_is_named_by_row_and_column(found: dict[str, list[Any]], words: str | None) -> None:
    difference = first_difference(EXPECTED, found)
    assert (difference is None) if words is None else re.search(words, difference or "")


def test_the_summary_tells_equal_bits_from_another_processors_rounding() -> None:
    exact = {"prediction": [0.25, 0.5]}
    assert summary(EXPECTED, {"pandas": exact, "json": exact}).endswith(
        "from pandas and from json: predictions are equal bit by bit"
    )
    rounded = {"prediction": [0.25, 0.5 + 1e-9]}
    assert summary(EXPECTED, {"pandas": exact, "json": rounded}).endswith("equal but for the processor's rounding")


def test_rows_are_sent_as_json_has_them() -> None:
    rows = np.array([[b"\x89PNG", dt.date(2024, 1, 31), np.nan, np.array([1.5, np.nan])]], object)
    assert as_json(rows) == [["iVBORw==", "2024-01-31", None, [1.5, None]]] and json.dumps(as_json(rows))


def test_a_model_that_loads_code_from_elsewhere_does_not_pass(tmp_path: Path) -> None:
    inside, outside = str(tmp_path / "code/sparkring"), "/opt/site/sparkring"
    assert import_problem(Answer(inside, {}), tmp_path) is None
    assert import_problem(Answer(outside, {}), tmp_path) == (
        "sparkring was imported from /opt/site/sparkring, not from the model's own folder"
    )


def test_the_environment_sees_pips_settings_and_no_other_packages() -> None:
    given = {"PIP_INDEX_URL": "x", "PYTHONPATH": "/here", "SPARKRING_MODEL_MODULES": "os", "PATH": "/bin"}
    assert clean_environment(given) == {"PIP_INDEX_URL": "x", "PATH": "/bin"}


def test_a_folder_that_is_no_registered_model_is_refused(tmp_path: Path) -> None:
    tracking = TrackingConfig()
    with pytest.raises(
        StoredError, match=r"no model as MLflow stores it: it has no MLmodel with requirements\.txt; give"
    ):
        find_folder(str(tmp_path), tracking, tmp_path)
    (tmp_path / "requirements.txt").write_text("")
    (tmp_path / "MLmodel").write_text(MODEL)
    assert find_folder(str(tmp_path), tracking, tmp_path) == tmp_path
    with pytest.raises(StoredError, match="by an older sparkring, without its code; train again"):
        data_folder(tmp_path, "m")
    (tmp_path / "MLmodel").write_text(MODEL + "    code: code\n")
    assert data_folder(tmp_path, "m") == tmp_path / "data/data"
    (tmp_path / "MLmodel").write_text("flavors: {sklearn: {}}\n")
    with pytest.raises(StoredError, match="describes no model that sparkring registered"):
        data_folder(tmp_path, "m")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "flavors: 1", "flavors: {python_function: {}}", "flavors: {python_function: {data: 1, code: c}}",
        "flavors: {python_function: {data: ../../x, code: c}}", "flavors: {python_function: {data: /etc, code: c}}",
        "flavors: {python_function: {data: a, code: [c]}}", "a: &a [1, 1]\nb: &b [*a, *a]\nc: *c", "\x00", "a: [" * 99,
        "a: !!python/object/apply:os.system [ls]",
    ],
)  # fmt: skip
def test_a_damaged_mlmodel_is_one_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "MLmodel").write_text(text)
    with pytest.raises(StoredError, match="m: MLmodel") as caught:
        data_folder(tmp_path, "m")
    assert len(str(caught.value).splitlines()) == 1
