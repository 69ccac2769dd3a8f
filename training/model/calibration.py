"""Calibrated probabilities: what a model's probabilities become before anyone sees them.

The file calibration.json of a model folder says so, where rows that the model was not trained on have shown that it
helps (pipelines/evaluation/calibrate.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from sparkring.conf.config import RunConfig
from sparkring.conf.storage import Storage
from sparkring.conf.stored import CLOSED, Finite, read, up_to

if TYPE_CHECKING:  # a driver reads results long before it imports torch, which takes a second
    import torch

FILE = "calibration.json"
LEAST, MOST = 1e-300, 1 - 2.0**-53  # probabilities between which logarithms are finite


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Changes log-odds z of a flag into scale * z + shift + the sum of bend * max(z - knot, 0) over `bends`.

    Logarithms of class probabilities become scale times them: temperature scaling by 1 / scale (Guo 2017,
    https://arxiv.org/abs/1706.04599). A flag has Platt scaling, a shift alone, or the piecewise linear curve of an
    isotonic regression. The order of rows, or of a row's classes, stays as it is.
    """

    __pydantic_config__ = CLOSED

    format: Annotated[int, up_to(2)] = 1  # 2: with bends
    scale: Annotated[Finite, Field(gt=0)] = 1.0
    shift: Finite = 0.0  # of a flag's log-odds
    bends: tuple[tuple[Finite, Finite], ...] = ()  # (knot, by how much the slope changes there), of a flag's log-odds

    @classmethod
    def through(cls, points: np.ndarray) -> Calibration:
        """Make the piecewise linear curve through points (K, 2) of log-odds before and after, both increasing.

        Before the first and after the last point its slope is 1.
        """
        slopes = np.diff(points[:, 1]) / np.diff(points[:, 0])
        bends = np.diff(np.concatenate([[1.0], slopes, [1.0]]))
        knots = zip(points[:, 0].tolist(), bends.tolist(), strict=True)
        return cls(format=2, shift=float(points[0, 1] - points[0, 0]), bends=tuple(knots))

    def __call__(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Calibrate probabilities of 1 (N,), or of each class (N, C), float64."""
        import torch

        if probabilities.dim() == 1:
            return torch.sigmoid(self.of_log_odds(log_odds(probabilities)))
        return torch.softmax(self.scale * torch.log(probabilities.clamp(min=LEAST)), dim=1)

    def of_log_odds(self, odds: torch.Tensor) -> torch.Tensor:
        """Calibrate a flag's log-odds, of any shape."""
        found = self.scale * odds + self.shift
        for knot, bend in self.bends:  # hinges, which every format of an exported model can compute
            found = found + bend * (odds - knot).clamp(min=0)
        return found

    def of(self, scores: np.ndarray) -> np.ndarray:
        """Calibrate an array of probabilities."""
        import torch

        found: np.ndarray = self(torch.tensor(scores)).numpy()  # a copy: those of a file cannot be written to
        return found

    def write(self, folder: Storage) -> None:
        """Write the file to a model folder."""
        folder.put_atomic(FILE, json.dumps(asdict(self)).encode())


def log_odds(probabilities: torch.Tensor) -> torch.Tensor:
    """Compute log(p / (1 - p)), finite for 0 and 1 too."""
    import torch

    p = probabilities.clamp(LEAST, MOST)
    return torch.log(p) - torch.log(1 - p)


def is_calibrated(config: RunConfig) -> bool:
    """Return whether a calibration is fitted: only on validation rows that do not train the model."""
    return config.model.may_calibrate and config.train.valid_split != "train"


def read_calibration(folder: Storage) -> Calibration | None:
    """Read a model folder's calibration; None where it has none. StoredError for a damaged file."""
    return read(Calibration, folder, FILE) if folder.exists(FILE) else None
