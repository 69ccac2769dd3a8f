"""A small partitioned table, and a recipe that makes parts of its days."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.blocks.etl import EtlConfig


def write_sales(folder: Path) -> Path:
    """Four days of three shops, of which one sells nothing on the third."""
    for day in range(1, 5):
        shops = ["a", "b", "c"] if day != 3 else ["a", "b"]
        target = folder / f"day=2024-03-0{day}"
        target.mkdir(parents=True)
        amounts = pa.array([10 * day + n for n in range(len(shops))], pa.int64())
        pq.write_table(pa.table({"shop": shops, "amount": amounts}), target / "x.parquet")
    return folder


def recipe(sales: Path, view: str, changes: dict[str, Any] | None = None, **interval: Any) -> EtlConfig:
    """`changes`: other keys of the etl block; `interval`: of its interval block."""
    return EtlConfig.model_validate(
        {
            "sources": {
                "sales": {
                    "path": str(sales),
                    "format": "parquet",
                    "columns": {"shop": "string", "amount": "bigint"},
                    "partitions": {"day": "date"},
                }
            },
            "views": {"made": view},
            "rows": "made",
            "one_per": "sales",
            "key": ["day", "shop"],
            "split": {"kind": "hash", "shares": {"train": 1.0}},
            "features": {"shop": {"kind": "categorical"}, "other": {"kind": "numeric"}},
            "keep": ["day", "amount"],
            "interval": {"column": "day", "sources": {"sales": "day"}, "last": "2024-03-04", "window": 4} | interval,
        }
        | (changes or {})
    )
