"""A small recipe with a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def write_recipe(folder: Path, schedule: dict[str, Any] | None = None) -> str:
    """Write it into a folder, where its runs are kept too; returns its path. `schedule`: keys beside `begin`."""
    recipe = {
        "name": "sales",
        "storage": {"runs": str(folder / "runs"), "datasets": str(folder / "datasets")},
        "schedule": {"begin": "2024-03-01", "window": 3} | (schedule or {}),
        "etl": {
            "sources": {
                "sales": {
                    "path": str(folder / "sales"),
                    "format": "parquet",
                    "columns": {"amount": "int"},
                    "partitions": {"day": "date"},
                }
            },
            "rows": "sales",
            "features": {"amount": {"kind": "numeric"}},
            "label": "day",  # nothing is trained on it
            "interval": {"column": "day", "sources": {"sales": "day"}},
        },
    }
    (path := folder / "sales.yaml").write_text(yaml.safe_dump(recipe))
    return str(path)
