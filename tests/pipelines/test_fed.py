"""Whether the reader feeds the model: before a run by measurements, after it by what ranks have waited."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.clusters.catalog import cluster_text, load_cluster
from sparkring.conf.clusters.cluster import Cluster, Measurement
from sparkring.conf.config import RunConfig
from sparkring.conf.load import load_config
from sparkring.pipelines.model.fed import fed_notes, fed_text, stall_advice
from sparkring.pipelines.model.fits import show_plan
from sparkring.pipelines.model.plan import own_workload


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sparkring.pipelines.run.spark_settings.submitted", lambda: False
    )  # another test's session may be open


def small() -> RunConfig:
    words = ["model.args={vocab: 64, width: 32, layers: 2, heads: 2}", "parallel.precision=fp32"]
    return load_config("gpt-124m", [*words, "train.device=cpu", "spark.master=local[8]"]).config


def measured(host: str, rows_per_s: float) -> Cluster:
    found = Measurement(hosts=[host], ranks=8, spread=0.1, dataset="d", rows_per_s=rows_per_s, reader_threads=2)
    return load_cluster("cpu").model_copy(update={"measured": found})


def test_a_reader_that_gives_more_than_the_model_takes_feeds_it() -> None:
    text = fed_text(Measurement(hosts=["a"], ranks=2, spread=0.1, rows_per_s=41_000, reader_threads=2), 9_000)
    assert text == "the reader gives 41,000 rows/s on 2 ranks with 2 threads each, the model takes 9,000: it is fed"
    slow = fed_text(Measurement(hosts=["a"], ranks=2, spread=0.1, rows_per_s=3_000), 9_000)
    assert "ranks would wait for rows 67% of the time; try data.threads=2, or data.cache" in slow


def test_the_plan_says_so_and_that_another_machine_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert "rows/s on 8 ranks with 2 threads each, the model takes" in show_plan(small(), measured("here", 5.0))
    (tmp_path / "mine.yaml").write_text(cluster_text(measured("there", 0.0)))
    shown = show_plan(small(), load_cluster("mine.yaml"))
    assert "the cluster was measured on there, and this is here" in shown and "the model takes" not in shown


def test_the_reader_of_another_dataset_says_nothing_of_this_one() -> None:
    workload, cluster = own_workload(small(), None), measured("here", 5.0)
    (line,) = fed_notes(workload, cluster, is_here=False, dataset="other")
    assert line.startswith("the reader was measured on d, another dataset than other: `sparkring plan measure`")
    for same in ("d", None):
        (line,) = fed_notes(workload, cluster, is_here=False, dataset=same)
        assert "the model takes" in line


def test_a_measurement_that_differs_by_much_is_called_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    sure = measured("here", 0.0)
    assert "unsure" not in show_plan(small(), sure) and sure.measured is not None
    wide = sure.model_copy(update={"measured": sure.measured.model_copy(update={"spread": 1.77})})
    assert "measurement is unsure: the middle half of its repetitions is 177% wide" in show_plan(small(), wide)


def test_a_run_whose_ranks_waited_for_rows_ends_with_advice() -> None:
    assert stall_advice({"step_s": 0.5, "data_stall_s": 0.04}, 100, 1) == stall_advice({}, 100, 1) == ""
    text = stall_advice({"step_s": 0.5, "data_stall_s": 0.5}, 100, 1)
    assert text.startswith(
        "ranks waited for rows 50% of the time: the reader gave 100 rows/s, the model takes 200; try"
    )
