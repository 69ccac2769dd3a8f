"""Show how far Spark's jobs are: a line that is renewed on a terminal, else a line of the log now and then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import SparkSession
from tqdm import tqdm

from sparkring.conf.plain_text import count_of
from sparkring.etl.spark_platform.executors import lacks_slots
from sparkring.etl.spark_platform.jvm import JvmError
from sparkring.etl.spark_platform.progress import Stage, stages_seen

log = logging.getLogger("spark")
ASK_EVERY_S = 0.5
LINE_EVERY_S = 20.0  # where stderr is no terminal


def progress_line(stages: Sequence[Stage], seconds: float, lacks_slots: bool = False) -> str:
    """Describe what runs: `write shards: 12 of 24 tasks, 160,000 rows, 35 s`; empty where nothing does."""
    if not stages:
        return ""
    does = ", ".join(dict.fromkeys(filter(None, (stage.does for stage in stages)))) or "Spark"
    ended, tasks = sum(stage.ended for stage in stages), sum(stage.tasks for stage in stages)
    rows = max(stage.rows for stage in stages)
    read = f"{count_of(rows, 'row', ',')}, " if rows else ""
    waits = "; Spark has no task slot, and waits: see whether its workers are there and free" if lacks_slots else ""
    return f"{does}: {ended:,} of {count_of(tasks, 'task', ',')}, {read}{seconds:.0f} s{waits}"


@contextmanager
def spark_progress(spark: SparkSession, interactive: bool | None = None) -> Iterator[None]:
    """Show what Spark does inside the block. `interactive`: on one line; None: where stderr is a terminal."""
    interactive = sys.stderr.isatty() if interactive is None else interactive
    ended = threading.Event()
    with stages_seen(spark) as stages:
        thread = threading.Thread(
            target=_show, args=(spark, stages, interactive, ended), name="spark-progress", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(5.0)


def _show(
    spark: SparkSession, stages: Callable[[], Sequence[Stage]], interactive: bool, ended: threading.Event
) -> None:
    began = last = time.monotonic()
    line = tqdm(bar_format="{desc}", leave=False, dynamic_ncols=True, disable=not interactive)
    try:
        while not ended.wait(ASK_EVERY_S):
            now = time.monotonic()
            if not interactive and now - last < LINE_EVERY_S:
                continue
            text = progress_line(running := stages(), now - began, bool(running) and lacks_slots(spark))
            if interactive:
                line.set_description_str(text)
            elif text:
                last = now
                log.info("%s", text)
    except (JvmError, OSError) as error:  # the session has ended; the next call of Spark reports why
        log.debug("no progress is shown any more: %s", error)
    finally:
        line.close()
