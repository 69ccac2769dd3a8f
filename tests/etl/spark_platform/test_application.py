"""What is known of a session's application."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkring.etl.spark_platform.application import (
    IMPORTING,
    add_code,
    default_parallelism,
    described,
    shipped_names,
    splits_of,
    tagged,
)


@pytest.mark.spark
def test_a_plan_says_how_many_tasks_run_at_a_time(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    spark.range(1).explain()
    assert splits_of(capsys.readouterr().out) == default_parallelism(spark) == 2


@pytest.mark.spark
def test_what_is_said_of_jobs_ends_with_the_block(spark: Any) -> None:
    context = spark.sparkContext
    with described(spark, "write shards"), tagged(spark, "mine"):
        assert context.getLocalProperty("spark.job.description") == "write shards"
        assert [*context.getJobTags()] == ["mine"]
    assert context.getLocalProperty("spark.job.description") is None and [*context.getJobTags()] == []


def raising_once(message: str) -> Callable[[], None]:
    """A stand-in for importlib's function, which fails by chance: when another thread adds to what it goes over."""
    messages = [message]

    def invalidate_caches() -> None:
        if messages:
            raise RuntimeError(messages.pop())

    return invalidate_caches


@pytest.mark.spark
def test_code_reaches_the_tasks_while_another_thread_imports(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "answers.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("sparkring_answers.py", "ANSWER = 42")
    monkeypatch.setattr(importlib, "invalidate_caches", raising_once(IMPORTING))
    add_code(spark, archive)
    assert shipped_names(spark).count("answers.zip") == 1

    def answer(batches: Any) -> Any:
        import sparkring_answers  # type: ignore[import-not-found]

        yield pa.RecordBatch.from_pydict({"id": [sparkring_answers.ANSWER]})

    assert [row.id for row in spark.range(0, 1, 1, 1).mapInArrow(answer, "id long").collect()] == [42]
    monkeypatch.setattr(importlib, "invalidate_caches", raising_once("another error"))
    with pytest.raises(RuntimeError, match="another error"):
        add_code(spark, archive)


def test_code_is_sent_to_a_connect_server_once_nothing_else_imports() -> None:
    sent = []

    class Session:
        """A stand-in for a client's session, which does the same before it sends anything."""

        __module__ = "pyspark.sql.connect.session"

        def __init__(self, message: str) -> None:
            self.fails = raising_once(message)

        def addArtifacts(self, path: str, pyfile: bool) -> None:
            self.fails()
            sent.append((path, pyfile))

    session: Any = Session(IMPORTING)
    add_code(session, Path("code.zip"))
    assert sent == [("code.zip", True)] and shipped_names(session) == ["code.zip"]
    with pytest.raises(RuntimeError, match="another error"):
        add_code(Session("another error"), Path("code.zip"))  # type: ignore[arg-type]
