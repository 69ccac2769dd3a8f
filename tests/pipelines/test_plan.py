"""`sparkring plan show`, the same table after training, and layouts refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.manifest import Column, DatasetManifest, ManifestError
from sparkring.pipelines.cli import main
from sparkring.pipelines.model.fits import show_plan
from sparkring.pipelines.model.plan import cost_plan, known_manifest, layout_problems_of, meta_model, plan_and_measured
from sparkring.pipelines.model.table_work import planned_tables, table_notes
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner import Workload, format_rows, make_plan, table_rows
from tests.helpers.datasets import manifest_of

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["model.args.layers=2", "model.args.vocab=1024", "etl.text.seq_len=129"]  # traced in a tenth of the time


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the checkout: a dataset that lies there would change what is known."""
    monkeypatch.chdir(tmp_path)


def table(text: str) -> dict[str, list[str]]:
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return {words[0]: words[1:] for words in lines}


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size_of(text: str) -> float:
    """The bytes of `1.50 GiB`."""
    number, unit = text.split()
    return float(number.replace(",", "")) * UNITS[unit]


def test_the_plan_of_a_named_recipe() -> None:
    rows = table(show_plan(load_config("gpt-7b").config))
    assert rows["mesh"] == ["dp(64) = 64 ranks", "torch"]
    parameters = int(rows["parameters"][-1].replace(",", ""))
    assert parameters == pytest.approx(6.74e9, rel=0.01)
    weights = size_of(rows["weights_bytes"][-1])
    assert weights == pytest.approx(4 * parameters / 64, rel=0.02), "ZeRO-3 over 64 ranks"
    assert {"gradients_bytes", "optimizer_bytes", "activations_bytes", "sent_bytes dp x cp", "bubble_share"} <= set(
        rows
    )


@pytest.mark.parametrize(
    ("words", "tensors"),
    [
        ([], 2),
        (["optim.ema=0.9"], 3),
        (["optim.name=torch.optim:Adagrad", "optim.betas=[0.9, 0.999]"], 1),
        (["optim.name=sgd"], 1),
    ],
)
def test_the_optimizers_tensors_and_the_average_are_planned(words: list[str], tensors: int) -> None:
    rows = table(show_plan(load_config("gpt-124m", [*SMALL, *words]).config))
    weights, optimizer = (size_of(rows[name][-1]) for name in ("weights_bytes", "optimizer_bytes"))
    assert optimizer == pytest.approx(tensors * weights, rel=0.05)


def test_after_training_the_table_shows_both() -> None:
    config = load_config("gpt-124m", [*SMALL, "launch.world=4", "train.global_batch=64", "train.device=cpu"]).config
    measured = {"weights_bytes": 5e8, "sent_bytes dp x cp": 123456789.0, "bubble_share": 0.25}
    rows = table(format_rows(table_rows(cost_plan(config, None), measured)))
    assert rows["weights_bytes"][-1] == "0.47 GiB"
    assert rows["sent_bytes dp x cp"][-1] == "0.11 GiB"
    assert rows["bubble_share"][-2:] == ["0", "0.2500"]


def test_stages_that_training_will_measure_are_said_to_be_estimated() -> None:
    words = [*SMALL, "train.device=cpu", "parallel.pp=2", "parallel.micro_batches=2", "parallel.zero=1"]
    unit = table(show_plan(load_config("gpt-124m", words).config))["parameters_per_stage"][0]
    measured = table(show_plan(load_config("gpt-124m", [*words, "parallel.balance=measured"]).config))
    assert unit == "count, largest"
    assert "stages by estimated costs, training measures them" in measured["parameters_per_stage"][0]


def test_settings_without_effect_are_said_below_the_table() -> None:
    words = [*SMALL, "launch.world=4", "train.device=cpu", "parallel.tp=4", "parallel.dp=1", "train.global_batch=64"]
    assert "no effect" not in show_plan(load_config("gpt-124m", [*words, "parallel.zero=0"]).config)
    shown = show_plan(load_config("gpt-124m", [*words, "parallel.zero=2"]).config)
    assert "parallel.zero=2, parallel.offload=False with dp(1) * cp(1): have no effect" in shown


def test_sparse_tables_are_below_the_table_with_what_each_placement_sends() -> None:
    model = nn.ModuleDict({"users": SparseEmbedding(["user", "friend"], 16), "head": nn.Linear(16, 1)})
    words = ["train.global_batch=1000", "tables.wire=bf16", "tables.optimizer=adam"]

    def step(ranks: int, *more: str) -> tuple[RunConfig, Workload]:
        config = load_config("flights", [*words, *more]).config
        tables = planned_tables(config, None, model)
        return config, Workload(model, config.parallel, Mesh(dp=ranks), "torch", (), 1000, tables=tables)

    def notes(ranks: int, *more: str) -> str:
        (line,) = table_notes(*step(ranks, *more))
        return line

    line = notes(4)
    assert "sparse table users: 196 bytes a row" in line  # 16 weights, 32 averages and a count, of 4 bytes
    shard, replicate = 0.75 * 500 * (8 + 2 * 32) + 24, 3 * (500 * (8 + 32) + 8)
    assert f"sends {shard:,.0f} bytes sharded, {replicate:,.0f} replicated" in line
    assert "while ranks compute" not in line
    for clip, what in (("1.0", "rows are sent"), ("null", "rows and gradients are sent")):
        assert f"; {what} while ranks compute (tables.lag = 2)" in notes(4, "tables.lag=2", f"optim.clip_norm={clip}")
    assert "sends 0 bytes sharded, 0 replicated" in notes(1)
    ring = 2 * 0.75 * (17 + 2) * 4  # weights of the head, and flags
    assert make_plan(step(4)[1]).sent_bytes == {"dp x cp": shard + ring}, "it is in the table, too"


def test_a_model_of_unknown_size_has_no_plan() -> None:
    with pytest.raises(ManifestError, match="run `sparkring etl` first"):
        show_plan(load_config("text").config)


def test_a_dataset_that_only_spark_finds_is_asked_for_by_its_folder() -> None:
    """`plan` starts nothing, and a database's rows are known only once they are landed."""
    users = {"format": "jdbc", "url_env": "U", "dbtable": "users"}
    small = {"sources": {"users": users}, "rows": "users", "features": {"x": {"kind": "numeric"}}}
    config = RunConfig.model_validate({"name": "b", "etl": small})
    with pytest.raises(ManifestError, match=r"name the folder .* dataset=FOLDER"):
        known_manifest(config)
    sized = config.model_copy(update={"model": config.model.model_copy(update={"args": {"vocab": 9}})})
    assert known_manifest(sized) is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.pp=3", "dp(-1) * pp(3) * tp(1): the fixed axes multiply to 3, which does not divide world(8)"),
        ("parallel.tp=8", "12 heads and 12 key/value heads, not divisible by tp(8)"),
        ("parallel.schedule=1f1bb parallel.pp=2", "nearest is '1f1b'"),
    ],
)
def test_a_layout_that_cannot_be_ends_the_command_before_spark(
    override: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("sparkring.pipelines.run.spark.session_ahead", started)
    words = ["gpt-124m", *SMALL, "train.device=cpu", *override.split()]
    assert said in "\n".join(layout_problems_of(load_config(words[0], words[1:]).config))
    assert main(["run", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_pipeline_over_several_columns_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.inputs names 6 columns; give one vector column"):
        load_config(str(ROOT / "examples/own_table/weather.yaml"), ["parallel.pp=2"])


class Asks(nn.Module):
    """Its forward wants values, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and (x > 0).any():
            x = -x
        out: torch.Tensor = self.layer(x)
        return out


class Reads(Asks):
    """Reads values of a tensor as it is made, as models with one rate per layer do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]


def test_a_model_that_cannot_be_made_without_memory_is_made_with_it() -> None:
    config = RunConfig.model_validate({"name": "odd", "dataset": "nowhere", "model": {"factory": f"{__name__}:Reads"}})
    assert layout_problems_of(config, dataset_of(ODD[0][0])) == []
    assert meta_model(config, dataset_of(ODD[0][0])).get_parameter("layer.weight").shape == (1, 3)


def dataset_of(column: Column) -> DatasetManifest:
    return manifest_of(columns=(column, Column(name="y", dtype="bool", role="label")), name="odd")


ODD = [
    (Column(name="x", dtype="float32", layout="vector", shape=(3,)), "Asks's forward cannot be run on the meta device"),
    (Column(name="x", dtype="float32", layout="ragged"), "column 'x' is ragged"),
    (Column(name="x", dtype="binary", layout="binary"), "column 'x' is binary"),
]


@pytest.mark.parametrize(("column", "why"), ODD)
def test_a_plan_that_cannot_be_traced_says_so_and_keeps_the_rest(
    column: Column, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"factory": f"{__name__}:Asks", "inputs": ["x"]}
    config = RunConfig.model_validate({"name": "odd", "dataset": "nowhere", "model": model})
    manifest = dataset_of(column)
    assert layout_problems_of(config, manifest) == []
    monkeypatch.setattr("sparkring.pipelines.model.fits.known_manifest", lambda _: manifest)
    shown = show_plan(config)
    rows = table(shown)
    assert rows["parameters"][-1] == "4" and rows["activations_bytes"] == ["per rank, largest"]
    assert f"are not planned: {why}" in shown
    measured = plan_and_measured(config, manifest, {"activations_bytes": 24.0, "weights_bytes": 16.0})
    assert table(format_rows(measured))["activations_bytes"][-1] == "24 B"
    assert len(caplog.records) == 1 and why in caplog.text


def test_after_training_no_failure_of_the_plan_is_the_jobs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such thing\n  in many lines")

    monkeypatch.setattr("sparkring.pipelines.model.plan.cost_plan", fail)
    rows = plan_and_measured(load_config("gpt-124m", SMALL).config, dataset_of(ODD[0][0]), {"weights_bytes": 16.0})
    assert table(format_rows(rows))["weights_bytes"] == ["16 B"]
    assert caplog.records[0].message.endswith("measured: RuntimeError: no such thing")
