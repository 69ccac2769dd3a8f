"""Find out whether the order of time matters: whether trees of earlier rows do worse on later ones than other trees."""

from __future__ import annotations

import numpy as np

from sparkring.pipelines.init.soundness.groups import (
    MOST_CELLS,
    MOST_ROWS,
    SEED,
    Array,
    CellRows,
    Gap,
    losses_of,
    predict,
)

LATER = 0.2  # of the rows
BLOCKS = 20  # of time, whose losses are independent of each other, or nearly


def time_gap(rows: CellRows, timeless: CellRows, times: Array) -> Gap:
    """Compare losses of the latest rows by trees of rows of any time (random) and earlier ones (grouped).

    Args:
        rows: with all features, by which trees may know rows of about the same time.
        timeless: the same rows without the features that say when a row is, of no use to trees of earlier ones.
        times: (N,), which sort the rows.
    """
    draw = np.random.default_rng(SEED)
    most = min(MOST_ROWS, MOST_CELLS // max(len(rows.owners), 1))
    kept = np.sort(draw.permutation(len(times))[:most])
    kept = kept[np.argsort(times[kept], kind="stable")]
    first = int(len(kept) * (1 - LATER))
    earlier, later = np.arange(first), np.arange(first, len(kept))
    block = (later - first) * BLOCKS // len(later)
    found = np.zeros((2, len(later)))
    for half in (0, 1):  # the rows of other blocks of time may be known to the trees of any time
        test = later[block % 2 == half]
        known = np.concatenate([earlier, later[block % 2 != half]])
        for number, (of, train) in enumerate(((rows, draw.permutation(known)[:first]), (timeless, earlier))):
            some = of.take(kept)
            shape = len(test) if rows.is_number else (len(test), int(some.labels.max()) + 1)
            predictions = predict(some.take(train), some.cells[test], np.zeros(shape))
            found[number, block % 2 == half] = losses_of(some.take(test), predictions)
    apart = found[1] - found[0]
    sums = np.bincount(block, apart - apart.mean())
    error = float(np.sqrt(np.square(sums).sum() * BLOCKS / (BLOCKS - 1)) / len(later))
    return Gap(float(found[0].mean()), float(found[1].mean()), error)
