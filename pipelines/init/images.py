"""A project for images: a folder per class, and a small convolutional network of the user's own to change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from sparkring.conf.load import ConfigError
from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import BINARY, MULTICLASS
from sparkring.pipelines.init.folder import PREDICTIONS, Project, python_use, run_name
from sparkring.pipelines.init.table import Budget

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
FEWEST_IMAGES = 50  # below, a split by hash may have none
OPENED = 200  # images whose size is looked at
LARGEST_SIDE, SIDE = 128, 64  # images of one size up to the first stay as they are; all others become squares
IMAGES = Budget(400, steps_per_epoch=8, smallest_batch=4, largest_batch=1024, most_epochs=60)
MODULE = "cnn.py"
CNN = '''"""The model of recipe.yaml: it is yours to change. `model.inputs` names the arguments of forward."""

import torch
from torch import nn


class Cnn(nn.Module):
    """photo: (rows, height, width, channels) uint8 -> logits (rows, classes); of two classes (rows,)."""

    def __init__(self, classes: int, channels: int, width: int = 16) -> None:
        super().__init__()
        sizes = [channels, width, 2 * width, 4 * width]
        layers: list[nn.Module] = []
        for before, after in zip(sizes, sizes[1:]):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(sizes[-1], 1 if classes == 2 else classes)

    def forward(self, photo: torch.Tensor) -> torch.Tensor:
        pixels = photo.permute(0, 3, 1, 2).to(self.head.weight.dtype) / 255 - 0.5
        logits = self.head(self.layers(pixels))
        return logits.squeeze(1) if logits.shape[1] == 1 else logits
'''


def images_project(data: str, folder: Path) -> Project:
    """Inspect a folder of folders of images and choose a recipe. ConfigError where there are too few, or no classes."""
    path = Path(data).resolve()
    if not path.is_dir():
        raise ConfigError(data, ["--data: no such folder; images are a folder of folders, one per class"])
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
    classes = Counter(file.relative_to(path).parts[0] for file in files if file.parent != path)
    if len(classes) < 2:
        has = f"has images in {count_of(len(classes), 'folder')} ({', '.join(classes) or 'none'})"
        raise ConfigError(data, [f"--data: {has}; each class is a folder of its images, and at least 2 are needed"])
    if (images := sum(classes.values())) < FEWEST_IMAGES:
        problem = f"--data: has {count_of(images, 'image')} in its folders; at least {FEWEST_IMAGES} are needed"
        raise ConfigError(data, [problem + " to train, validate and test"])
    shape, fit = decide_shape([file for file in files if file.parent != path])
    name = run_name(folder.resolve().name)
    rare = [f"{label!r} has {count_of(count, 'image')} only" for label, count in classes.items() if count < 10]
    if len(files) > images:
        rare.append(f"{len(files) - images} images are in no class's folder, and left out")
    return Project(
        images_recipe(path, list(classes), images, shape, fit, name),
        [
            f"{count_of(images, 'image', ',')}; {count_of(len(classes), 'class')}, by their folders: "
            f"{', '.join(sorted(classes)[:5])}" + ", ..." * (len(classes) > 5),
            f"images become {shape[0]} x {shape[1]} pixels of {shape[2]} channels, fit {fit}",
            "images are split at random by their paths: 80 % train, 10 % valid, 10 % test",
            f"the model is {MODULE}, a small convolutional network",
        ],
        ["images of one scene or patient in two splits make scores too good; split by what they share", *rare],
        limit_rows=min(200, images),
        use=_use(name, files[0]),
        files={MODULE: CNN},
        has_code=True,
    )


def _use(name: str, file: Path) -> str:
    made = ["from pathlib import Path", f"rows = pd.DataFrame({{'content': [Path({str(file)!r}).read_bytes()]}})"]
    return (
        f"The trained model is `models:/{name}@champion`; its input is `content`, the bytes of an image file:\n\n"
        f"{python_use(name, made)}"
    )


def decide_shape(files: list[Path]) -> tuple[list[int], str]:
    """Decide height, width, channels and resizing. ConfigError for a file that is no image."""
    sizes, modes = set(), set()
    for file in files[:: max(len(files) // OPENED, 1)]:
        try:
            with Image.open(file) as image:
                sizes.add(image.size)
                modes.add(image.mode)
        except (UnidentifiedImageError, OSError) as error:
            raise ConfigError(str(file), [f"is no image that Pillow reads ({error}); take it out"]) from error
    channels = 1 if modes <= {"1", "L"} else 3
    width, height = sizes.pop() if len(sizes) == 1 else (0, 0)
    if min(width, height) >= 8 and max(width, height) <= LARGEST_SIDE:
        return [height, width, channels], "resize"
    return [SIDE, SIDE, channels], "crop"


def images_recipe(path: Path, classes: list[str], images: int, shape: list[int], fit: str, name: str) -> dict[str, Any]:
    """Make the recipe of a folder of images.

    Args:
        path: path of the folder.
        classes: names of its subfolders.
        images: number of images.
        shape: height, width and channels.
        fit: how an image of another size becomes one of `shape`.
        name: name of the run.
    """
    batch, epochs = IMAGES.batch_and_epochs(images)
    pattern = "|".join(ending[1:] for ending in ENDINGS)
    sql = (
        "SELECT\n  path,\n  content,\n  split(path, '/')[0] AS kind\nFROM photos\n"
        f"WHERE path LIKE '%/%' AND lower(path) RLIKE '[.]({pattern})$'\n"
    )
    return {
        "name": name,
        "etl": {
            "sources": {"photos": {"path": str(path), "format": "binaryFile"}},
            "views": {"labeled": sql},
            "rows": "labeled",
            "key": ["path"],
            "split": {"kind": "hash", "shares": {"train": 0.8, "valid": 0.1, "test": 0.1}},
            "features": {"photo": {"kind": "image", "column": "content", "shape": shape, "fit": fit}},
            "label": "kind",
        },
        "model": {
            "factory": "cnn:Cnn",
            "task": (BINARY if len(classes) == 2 else MULTICLASS).name,
            "inputs": ["photo"],
            "args": {"classes": len(classes), "channels": shape[2]},
        },
        "optim": {"lr": 0.002, "weight_decay": 0.01},
        "train": {"epochs": min(epochs, 20), "global_batch": min(batch, 64)},
        "predict": {"rows": "labeled", "keep": ["path", "kind"], "to": PREDICTIONS},
    }
