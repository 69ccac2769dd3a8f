"""MLmodel: what MLflow says of a model, of which we read where its files and its code are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NotRequired

import yaml
from typing_extensions import TypedDict

from sparkring.conf.bounded_yaml import parse_yaml
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import OPEN, RelativePath, StoredError, parse

MLMODEL = "MLmodel"
MOST_BYTES = 1 << 24  # its signature names all columns


@OPEN
class PythonFunction(TypedDict):
    """The flavor of models that any Python can load; both folders are below that of MLmodel."""

    data: RelativePath
    code: NotRequired[RelativePath | None]


@OPEN
class _Flavors(TypedDict):
    python_function: PythonFunction


@OPEN
class _Model(TypedDict):
    flavors: _Flavors


def read_mlmodel(folder: Path, target: str) -> PythonFunction:
    """Read where the model's files are. StoredError where MLmodel is damaged, or describes none of our models.

    `target`: the model, for the error.
    """
    where, storage = f"{target}: {MLMODEL}", open_storage(str(folder))
    size = storage.size_bytes(MLMODEL)
    if size is None or size > MOST_BYTES:
        why = "no such file" if size is None else f"{count_of(size, 'byte')}; at most {MOST_BYTES} are read"
        raise StoredError(f"{where}: {why}")
    try:
        values, _ = parse_yaml(storage.read_bytes(MLMODEL).decode())
    except (yaml.YAMLError, ValueError) as error:
        raise StoredError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    model = parse(_Model, json.dumps(values, default=str), f"{where} describes no model that sparkring registered")
    return model["flavors"]["python_function"]
