"""What Spark runs now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkring.etl.spark_platform.capabilities import JOB_PROGRESS, can
from sparkring.etl.spark_platform.jvm import java_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Stage:
    """A stage that Spark runs now. `does`: the job's description; `rows`: read so far, by the tasks that have ended."""

    does: str
    tasks: int
    ended: int
    rows: int


@contextmanager
def stages_seen(spark: SparkSession) -> Iterator[Callable[[], list[Stage]]]:
    """Give a function that lists what Spark runs now, of the whole application or, by Connect, of this session."""
    if can(spark, JOB_PROGRESS):
        yield lambda: running_stages(spark)
        return
    seen: dict[str, list[Stage]] = {}

    def on_progress(*, stages: Any, inflight_tasks: int, operation_id: str, done: bool, **_: Any) -> None:
        running = [each for each in stages or () if not each.done]
        seen[operation_id] = [
            Stage("", each.num_tasks, each.num_completed_tasks, 0) for each in ([] if done else running)
        ]

    session: Any = spark
    has_handlers = hasattr(session, "registerProgressHandler")  # from 4.0 on
    if has_handlers:
        session.registerProgressHandler(on_progress)
    try:
        yield lambda: [stage for stages in [*seen.values()] for stage in stages]
    finally:
        if has_handlers:
            session.removeProgressHandler(on_progress)


def running_stages(spark: SparkSession) -> list[Stage]:
    """Ask Spark what it runs now. Its store of states is there without its UI, and only the JVM gives it."""
    found = java_context(spark).statusStore().activeStages()
    stages = [found.apply(at) for at in range(found.size())]
    return [
        Stage(
            stage.description().get() if stage.description().isDefined() else "",
            stage.numTasks(),
            stage.numCompleteTasks(),
            max(stage.inputRecords(), stage.shuffleReadRecords()),
        )
        for stage in stages
    ]
