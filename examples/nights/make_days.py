"""Write made-up days of clicks: python make_days.py FIRST LAST [FOLDER], a Parquet file in a folder per day."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 400


def rows_of(day: date) -> pa.Table:
    """The rows of a day, the same ones each time. Whether a link is clicked depends on both numbers and the page."""
    random = np.random.default_rng(day.toordinal())
    age, depth, page = random.normal(size=ROWS), random.normal(size=ROWS), random.choice(list("abcd"), ROWS)
    clicked = random.random(ROWS) < 1 / (1 + np.exp(1.5 * depth - 2 * age - (page == "a")))
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return pa.table(
        {
            "id": [day.toordinal() * 10_000 + n for n in range(ROWS)],
            "happened": pa.array([midnight + timedelta(minutes=3 * n) for n in range(ROWS)], pa.timestamp("us", "UTC")),
            "age": age,
            "depth": depth,
            "page": page,
            "clicked": pa.array(clicked.astype(np.float32)),
        }
    )


def main(first: str, last: str, folder: str = "data/raw/clicks") -> None:
    day = date.fromisoformat(first)
    while day <= date.fromisoformat(last):
        target = Path(folder) / f"day={day}"
        target.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows_of(day), target / "part-0.parquet")
        day += timedelta(days=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
