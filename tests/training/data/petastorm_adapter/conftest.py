"""One dataset of 130 rows in 6 row groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparkring.conf.manifest import DatasetManifest


@pytest.fixture
def dataset(make_dataset: Callable[..., DatasetManifest], tmp_path: Path) -> DatasetManifest:
    return make_dataset(tmp_path, [[30, 30, 10], [25], [30, 5]])
