"""What `mlflow.pyfunc.load_model` imports in test_tracking: predicts `x * factor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Predictor:
    def __init__(self, factor: float):
        self.factor = factor

    def predict(self, model_input: Any, params: Any = None) -> Any:
        return model_input["x"] * self.factor


def _load_pyfunc(path: str) -> Predictor:
    return Predictor(json.loads((Path(path) / "model.json").read_text())["factor"])
