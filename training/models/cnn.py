"""A small convolutional network for small images. Shapes: B images of H x W pixels of C channels.

Groups are normalized (Wu and He 2018, arXiv:1803.08494), or with `norm: batch` the rows of a pass (Ioffe and Szegedy
2015, arXiv:1502.03167), over all ranks (training/parallel/data_parallel/batch_norm.py).
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.training.models.arguments import FromDataset, Size

GROUPS = 4


class SmallCnn(nn.Module):
    """image (B, H, W, C) uint8 -> logits (B, classes), of two classes (B,)."""

    def __init__(
        self,
        classes: Annotated[Size, FromDataset(2, may_be_set=True)],
        channels: Annotated[Size, FromDataset(1)],
        width: Size = 16,
        layers: Annotated[int, Field(ge=0, le=16)] = 3,
        norm: Literal["group", "batch"] = "group",
    ) -> None:
        """Build the network. `model.args` are the last three; the others come from the manifest.

        Args:
            classes: number of classes.
            channels: C, channels of the image.
            width: channels of the first layer, a multiple of 4; each further layer has twice as many.
            layers: number of layers; each halves height and width.
            norm: `group` normalizes groups of a row's channels, `batch` a channel of all rows.
        """
        super().__init__()
        if width % GROUPS:
            raise ValueError(f"model.args.width = {width}: a multiple of {GROUPS} is needed, the groups of a layer")
        if norm not in ("group", "batch"):
            raise ValueError(f"model.args.norm = {norm!r}: must be 'group' or 'batch'")
        sizes = [channels, *(width << layer for layer in range(layers))]
        parts: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            normalize = nn.GroupNorm(GROUPS, after) if norm == "group" else nn.BatchNorm2d(after)
            parts += [nn.Conv2d(before, after, 3, padding=1), normalize, nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(sizes[-1], 1 if classes == 2 else classes)

    @classmethod
    def from_manifest(cls, manifest: DatasetManifest, **args: Any) -> SmallCnn:
        """Take channels from the one image, classes from the label. ValueError without exactly one image."""
        if len(manifest.images) != 1:
            raise ValueError(
                f"sparkring.training.models.cnn takes one feature of kind image; there are {manifest.images}"
            )
        height, width, channels = manifest.tensor(manifest.images[0]).shape
        layers, classes = args.get("layers", 3), len(manifest.classes)
        if min(height, width) >> layers == 0:
            raise ValueError(
                f"model.args.layers = {layers}: each halves height and width, and images of {height} x "
                f"{count_of(width, 'pixel')} can be halved {min(height, width).bit_length() - 1} times"
            )
        if classes and args.get("classes", classes) != classes:
            raise ValueError(
                f"model.args.classes = {args['classes']}: the dataset has {count_of(classes, 'class')}; leave it out"
            )
        return cls(**{"classes": classes, "channels": channels} | args)

    def forward(self, image_BHWC: torch.Tensor) -> torch.Tensor:
        pixels_BCHW = image_BHWC.permute(0, 3, 1, 2).to(self.head.weight.dtype) / 255 - 0.5
        logits: torch.Tensor = self.head(self.layers(pixels_BCHW))
        return logits.squeeze(1) if logits.shape[1] == 1 else logits
