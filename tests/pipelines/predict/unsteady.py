"""A network whose output is another one each time."""

from __future__ import annotations

import torch

from sparkring.training.models.tabular import Tabular


class Unsteady(Tabular):
    """Adds noise, as a dropout that was not switched off."""

    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = super().forward(columns)
        return outputs + torch.randn_like(outputs)
