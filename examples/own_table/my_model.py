"""A user's own torch module: it knows nothing of sparkring, ranks or Spark. `model.inputs` names its arguments."""

import torch
from torch import nn


class LowVisibility(nn.Module):
    def __init__(self, origins: int = 8, width: int = 32) -> None:
        super().__init__()
        self.origin = nn.Embedding(origins, 4)
        self.layers = nn.Sequential(nn.Linear(4 + 5, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, origin, hour_sin, hour_cos, humid, temp, wind_speed):
        numbers = torch.stack([hour_sin, hour_cos, humid, temp, wind_speed], dim=1)
        return self.layers(torch.cat([self.origin(origin.long()), numbers], dim=1)).squeeze(1)
