"""The small convolutional network: shapes, images by themselves, and what it is made of from a dataset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.training.models.cnn import SmallCnn


def manifest(*images: str) -> DatasetManifest:
    columns = {name: Column(name=name, dtype="binary", layout="binary", shape=(8, 8, 3)) for name in images}
    found: Any = SimpleNamespace(images=[*images], classes=["a", "b", "c"], tensor=columns.__getitem__)
    return cast(DatasetManifest, found)


def test_an_image_has_the_same_logits_in_any_batch() -> None:
    torch.manual_seed(0)
    model = SmallCnn.from_manifest(manifest("photo"), width=4, layers=2)
    photos = torch.randint(0, 256, (5, 8, 8, 3), dtype=torch.uint8)
    out = model(photos)
    assert out.shape == (5, 3)
    torch.testing.assert_close(model(photos[3:4]), out[3:4])
    assert not torch.allclose(out[0], out[1])
    model(photos).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_two_classes_have_one_logit() -> None:
    assert SmallCnn(classes=2, channels=1, width=4)(torch.zeros(3, 8, 8, 1, dtype=torch.uint8)).shape == (3,)


def test_batch_normalization_takes_the_place_of_groups() -> None:
    torch.manual_seed(0)
    model = SmallCnn.from_manifest(manifest("photo"), width=4, layers=2, norm="batch")
    kinds = [type(layer) for layer in model.modules()]
    assert kinds.count(torch.nn.BatchNorm2d) == 2 and torch.nn.GroupNorm not in kinds
    photos = torch.randint(0, 256, (5, 8, 8, 3), dtype=torch.uint8)
    assert not torch.allclose(model(photos[3:4]), model(photos)[3:4]), "trained by the batch"
    model.eval()
    torch.testing.assert_close(model(photos[3:4]), model(photos)[3:4])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes one feature of kind image; there are \['a', 'b'\]"):
        SmallCnn.from_manifest(manifest("a", "b"))
    with pytest.raises(ValueError, match=r"layers = 4: .* images of 8 x 8 pixels can be halved 3 times"):
        SmallCnn.from_manifest(manifest("photo"), layers=4)
    with pytest.raises(ValueError, match=r"model.args.classes = 4: the dataset has 3 classes; leave it out"):
        SmallCnn.from_manifest(manifest("photo"), classes=4)
    with pytest.raises(ValueError, match=r"model.args.width = 6: a multiple of 4 is needed"):
        SmallCnn(classes=2, channels=1, width=6)
    with pytest.raises(ValueError, match=r"model.args.norm = 'layer': must be 'group' or 'batch'"):
        SmallCnn(classes=2, channels=1, norm=cast(Any, "layer"))
