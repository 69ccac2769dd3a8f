from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.training.checkpoint.weights import FILE
from sparkring.training.model.folder import describe_model, read_model_folder
from tests.helpers.datasets import manifest_of

MANIFEST = manifest_of(columns=(Column(name="x", dtype="float32"),))


def test_a_model_folder_says_what_its_weights_are(tmp_path: Path) -> None:
    folder, config = open_storage(str(tmp_path)), RunConfig.model_validate({"name": "d", "train": {"seed": 9}})
    describe_model(folder, config, MANIFEST)
    with pytest.raises(StoredError, match=f"{tmp_path}: no model: it has no {FILE}"):
        read_model_folder(folder)
    (tmp_path / FILE).write_bytes(b"")
    found = read_model_folder(folder)
    assert (found.config, found.manifest) == (config, MANIFEST)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoredError, match=r"manifest\.json"):
        read_model_folder(folder)
