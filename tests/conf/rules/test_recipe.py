"""Impossible combinations and keys without effect: each row of both tables is tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.rules.recipe import CONFLICTS, NO_EFFECT

SMALL = "name: mine\ndataset: /data/x\n"
TEXT = SMALL + "model: {factory: 'sparkring.training.models.gpt:GPT', task: language_model}\n"
ETL = """
name: mine
etl:
  sources: {rows: {path: x, format: parquet, columns: {id: bigint}}}
  views: {made: SELECT * FROM rows}
  rows: made
  features: {id: {kind: numeric}}
"""


OF_A_PLAN = (
    "parallel.dp=2",
    "parallel.cp=2",
    "parallel.pp=2",
    "parallel.tp=2",
    "parallel.zero=1",
    "parallel.shard=2",
    "parallel.offload=true",
    "parallel.schedule=gpipe",
    "parallel.stages_per_rank=2",
    "parallel.micro_batches=2",
    "parallel.activation_checkpointing=true",
    "parallel.sequence_parallel=true",
)
OF_NETWORKS = (
    "parallel.layout=auto",
    "parallel.pp=2",
    "parallel.tp=2",
    "parallel.cp=2",
    "parallel.zero=1",
    "parallel.shard=2",
    "parallel.engine=torch",
    "parallel.accumulate=2",
    "parallel.micro_batches=2",
    "parallel.offload=true",
    "parallel.activation_checkpointing=true",
    "parallel.precision=bf16",
    "parallel.compress.codec=int8",
    "parallel.averaging.kind=local_sgd",
    "parallel.servers.per_host=1",
    "train.compile=true",
    "model.start=weights.safetensors",
    "warm_start={model: /m}",
    "data.reader=petastorm",
    "data.mix={parts: [{dataset: a}, {dataset: b}]}",
    "data.audit=true",
)


def recipe(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(tmp_path, text), overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: mine\n", "etl, dataset: neither is given"),
        (SMALL + "train: {epochs: null}\n", "training would have no end"),
        (SMALL + "train: {steps: 10}\noptim: {warmup_steps: 10}\n", "optim.warmup_steps = 10"),
        (SMALL + "train: {valid_split: test}\n", "train.test_split = 'test'"),
        (SMALL + "report: {must_beat: [loss], baselines: false}\n", "report.baselines is false"),
        (SMALL + "model: {family: trees, task: my.task:Mine}\n", "model.task = 'my.task:Mine': trees learn binary, "),
        (
            SMALL + "model: {family: both}\ntrain: {valid_split: train}\n",
            "model.family = 'both': with train.valid_split =",
        ),
        (
            SMALL + "model: {family: trees}\ntrain: {valid_split: train}\ntrees: {refit: true}\n",
            "trees.refit: with train.valid_split = 'train' there are no other rows",
        ),
        (SMALL + "model: {family: trees}\nparallel: {dp: 3}\n", "parallel.dp = 3: trees have a data rank for each of"),
        (SMALL + "model: {family: trees}\ntrain: {device: cuda}\n", "train.device = 'cuda': trees are trained on CPUs"),
        (
            ETL.replace("{kind: numeric}", "{kind: hashed}") + "model: {family: trees}\n",
            "etl.features.id: trees split numbers and categories, none of kind hashed; make it categorical",
        ),
        (SMALL + "model: {family: both, task: my.task:Mine}\n", "model.task = 'my.task:Mine': trees learn binary, "),
        (SMALL + "model: {family: both, task: language_model}\n", "model.task = 'language_model': trees learn binary"),
        (
            ETL.replace("{kind: numeric}", "{kind: hashed}") + "model: {family: both}\n",
            "etl.features.id: trees split numbers and categories, none of kind hashed; make it categorical",
        ),
        (
            SMALL + "model: {family: both}\ndata: {mix: {parts: [{dataset: a}, {dataset: b}]}}\n",
            "model.family = 'both': with data.mix or data.petastorm.url the network is trained on rows that trees do",
        ),
        (SMALL + "report: {must_beat: [perplexity]}\n", "baselines of model.task = 'binary' have"),
        (SMALL + "report: {must_beat: [loss]}\ntrain: {test_split: null}\n", "train.test_split is null"),
        (SMALL + "report: {must_beat: [loss]}\nmodel: {task: my.task:Mine}\n", "no baselines for model.task"),
        (SMALL + "report: {must_beat: [auc]}\nmodel: {task: regression}\n", "'regression' have ['loss', 'rmse', "),
        (SMALL + "report: {must_beat: [r2]}\nmodel: {task: multiclass}\n", "'multiclass' have ['loss', 'accuracy', "),
        (
            SMALL + "report: {must_beat: [ndcg_at_5], ranking: {group: u, item: i}}\n",
            "['loss', 'auc', 'accuracy', 'recall_at_10', 'ndcg_at_10'], not ['ndcg_at_5']; name a metric of",
        ),
        (
            SMALL + "report: {must_beat: [ndcg_at_10], ranking: {group: u}}\n",
            "have ['loss', 'auc', 'accuracy'], not ['ndcg_at_10']; name a metric of report.ranking, with its item",
        ),
        (
            SMALL + "report: {ranking: {group: u, als: {}}}\n",
            "als: factorizes who took which item; name the column of what is ranked in `item`",
        ),
        (SMALL + "train: {best_metric: auc}\n", "train.best_mode = 'min': more of 'auc' is better; set it to max"),
        (
            SMALL + "model: {task: regression}\ntrain: {early_stopping: {metric: rmse, mode: max}}\n",
            "train.early_stopping.mode = 'max': less of 'rmse' is better; set it to min",
        ),
        (
            SMALL + "predict: {rows: made, to: out}\n",
            "predict.rows = 'made': is a view or source of etl, and there is no",
        ),
        (
            ETL + "predict: {rows: mode, to: out}\n",
            "predict.rows = 'mode': is no view or source of etl; did you mean 'made'?",
        ),
        (ETL + "predict: {rows: made, to: 'x://y'}\n", "predict.to: x://y: no filesystem for scheme 'x'"),
        (
            ETL + "predict: {rows: made, to: out, model: 'x://y'}\n",
            "predict.model: x://y: no filesystem for scheme 'x'",
        ),
        (
            ETL + "predict: {rows: made, to: out, model: 'models:/a'}\n",
            "must be models:/<name>@<alias> or models:/<name>/",
        ),
        (ETL + "predict: {rows: made, to: out, keep: [id, Model_Name]}\n", "'Model_Name' is the name of a column that"),
        (ETL + "predict: {rows: made, to: out, keep: [class_3]}\n", "'class_3' is the name of a column that every"),
        (ETL + "predict: {rows: made, to: out, keep: [id, ID]}\n", "'id' and 'ID' are one name to Spark"),
        (TEXT + "predict: {rows: made, to: out}\n", "rows of tables are scored, and model.task is 'language_model'"),
    ],
)
def test_impossible_combinations(tmp_path: Path, text: str, expected: str) -> None:
    assert any(expected in p for p in problems(tmp_path, text))


MIX = "data.mix={parts: [{dataset: a}, {dataset: b}]}"
ETL = "{sources: {t: {path: t.csv, columns: {a: int, d: date}}}, rows: t, features: {a: {kind: numeric}}"
IMAGE = f"etl={ETL.removesuffix('}')}, i: {{kind: image, shape: [8, 8, 3]}}}}}}"
HASHED = f"etl={ETL.removesuffix('}')}, user: {{kind: hashed, column: a}}}}}}"
BY_TIME = f"etl={ETL}, split: {{kind: time, column: d, boundaries: {{test: '2024-01-01'}}}}}}"
BY_COLUMN = f"etl={ETL}, split: {{kind: column, column: d}}}}"
LOCAL_SGD = "parallel.averaging.kind=local_sgd"
SERVED = "parallel.servers.per_host=1"
BACKED = (SERVED, "parallel.servers.backup=2")
FILTERED = "parallel.servers.backup = 2: ranks read each other's rows when one is late, and data.filters"
PETASTORM, TEXT = "data.reader=petastorm", "model.task=language_model"
SHARES = "etl.split.shares={train: 0.5, test: 0.5}"


@pytest.mark.parametrize(
    ("run", "idle"),
    [
        ([PETASTORM], "data.tail=pad"),
        ([PETASTORM], "data.window_row_groups=3"),
        ([PETASTORM], "data.block_rows=3"),
        ([PETASTORM], "data.on_corrupt=quarantine"),
        ([PETASTORM], "data.cache.files=/tmp/x"),
        (["launch.on=spark"], "launch.ranks_per_host=2"),
        (["launch.on=spark"], "launch.port=4000"),
        (["launch.on=ray"], "launch.ranks_per_host=2"),
        (["launch.on=hosts"], "launch.cpus_per_rank=2"),
        (["launch.on=hosts"], "launch.gpus_per_rank=2"),
        ([PETASTORM, "data.shuffle=false"], "data.petastorm.shuffle_rows=9"),
        ([], "data.petastorm.pool=process"),
        ([], "data.petastorm.workers=3"),
        ([], "data.petastorm.shuffle_rows=9"),
        ([MIX], "data.tail=pad"),
        ([MIX], "data.mix.epoch_samples=9"),
        (["dataset=null", BY_TIME], SHARES),
        (["dataset=null", BY_TIME], "etl.split.key=[a]"),
        (["dataset=null", BY_TIME], "etl.split.seed=1"),
        (["dataset=null", BY_COLUMN], SHARES),
        (["dataset=null", BY_COLUMN], "etl.split.key=[a]"),
        (["dataset=null", BY_COLUMN], "etl.split.seed=1"),
        ([TEXT], "model.inputs=[a]"),
        ([TEXT], "model.label=a"),
        ([TEXT], "report.share_by=[a]"),
        (["model.task=regression"], "report.share_by=[a]"),
        (["model.task=poisson"], "model.calibrate=none"),
        ([TEXT], "report.groups=[a]"),
        (["train.test_split=null"], "report.groups=[a]"),
        ([TEXT], "report.importance=false"),
        (["train.test_split=null"], "report.importance=false"),
        (["model.task=regression"], "report.ranking={group: a}"),
        (["train.test_split=null"], "report.ranking={group: a}"),
        (["report.baselines=false", "report.ranking={group: a, item: b}"], "report.ranking.als={}"),
        ([], "report.min_group_rows=9"),
        ([], "report.sample_prompt=So"),
        ([], "report.sample_tokens=9"),
        (["warm_start.model=/m"], "warm_start.retrain_every=7"),
        ([], "model.task_args={a: 1}"),
        ([], "optim.args={a: 1}"),
        ([], "optim.schedule_args={a: 1}"),
        (["optim.name=my:Own"], "optim.betas=[0.5, 0.5]"),
        (["optim.name=my:Own"], "optim.eps=1"),
        (["optim.name=my:Own"], "optim.momentum=0.5"),
        (["optim.schedule=my:own"], "optim.warmup_steps=1"),
        (["optim.schedule=my:own"], "optim.final_lr_share=0.5"),
        ([], "parallel.compress.share=0.5"),
        ([], "parallel.compress.rank=2"),
        ([], "parallel.averaging.every=5"),
        ([], "parallel.averaging.inner_state=averaged"),
        ([], "parallel.averaging.groups=host"),
        ([LOCAL_SGD], "parallel.averaging.outer_lr=0.5"),
        ([LOCAL_SGD], "parallel.averaging.elasticity=0.5"),
        ([LOCAL_SGD], "parallel.averaging.peers=random"),
        (["parallel.averaging.kind=gossip"], "parallel.averaging.seed=1"),
        ([LOCAL_SGD], "parallel.averaging.outer_momentum=0.5"),
        ([], "parallel.servers.bound=2"),
        ([], "parallel.servers.backup=1"),
        (["parallel.servers.per_host=1"], "parallel.servers.max_lag=9"),
        (["parallel.servers.per_host=1"], "parallel.servers.damp=true"),
        (["optim.schedule=linear"], "optim.plateau.factor=0.5"),
        (["optim.schedule=linear"], "optim.plateau.patience=1"),
        (["warm_start.model=/m"], "warm_start.after_correction=warm"),
        ([], "tables.betas=[0.5, 0.5]"),
        (["tables.optimizer=sgd"], "tables.eps=1"),
        *((["parallel=auto"], key) for key in OF_A_PLAN),
        *((["model.family=trees"], key) for key in OF_NETWORKS),
    ],
)
def test_a_key_without_effect_is_refused_and_its_default_is_not(tmp_path: Path, run: list[str], idle: str) -> None:
    load_config(recipe(tmp_path, SMALL), run)
    (found,) = problems(tmp_path, SMALL, *run, idle)
    assert found.startswith(f"{idle.partition('=')[0]} = ") and "has no effect" in found
    assert "Config(" not in found, "a block is shown as the recipe has it"


def test_every_row_of_the_table_is_tried_above() -> None:
    marks = test_a_key_without_effect_is_refused_and_its_default_is_not.pytestmark  # type: ignore[attr-defined]
    tried = {idle.partition("=")[0] for _, idle in marks[0].args[1]}
    assert tried == {key for rule in NO_EFFECT for key in rule.keys}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("storage.datasets=nosuch://b/x", "storage.datasets: nosuch://b/x: no filesystem for scheme 'nosuch'"),
        ("storage.runs=s3://b/x?nonsense=1", "storage.runs: s3://b/x?nonsense=1: unknown option"),
        ("dataset=s3://key:hunter2@b/x", "dataset = 's3://**********@b/x' holds a secret, which would be logged"),
        (MIX.replace("dataset: b", "dataset: 'no://b'"), "data.mix.parts.1.dataset: no://b: no filesystem"),
    ],
)
def test_storage_that_cannot_be_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    (found,) = problems(tmp_path, SMALL, override)
    assert found.startswith(expected) and "hunter2" not in found


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("name: mine\n", [], "etl, dataset: neither is given"),
        (SMALL, [f"etl={ETL}}}"], "etl, dataset: both are given"),
        (SMALL, ["dataset=null", f"etl={ETL}}}", "launch.on=hosts"], "launch.on = 'hosts': there is no Spark to build"),
        (SMALL, ["train.epochs=null"], "train.epochs, train.steps: both are null"),
        (SMALL, ["train.steps=5", "optim.warmup_steps=5"], "optim.warmup_steps = 5: must be less than train.steps = 5"),
        (
            SMALL,
            ["tracking.uri=htp://server:5000"],
            "tracking.uri: MLflow has no store for 'htp'; it knows",
        ),
        (SMALL, ["train.test_split=valid"], "train.test_split = 'valid': is train.valid_split too"),
        (
            "name: mine\ndataset: /data/x\n",
            ["model.args.outputs=7"],
            "model.args.outputs = 7: a model of model.task = 'binary' has one output; remove it",
        ),
        (
            SMALL,
            ["model.start=e.safetensors", "warm_start.model=before"],
            "model.start, warm_start: both are given",
        ),
        (SMALL, [MIX, "data.audit=true"], "data.audit: a mix repeats rows by design"),
        (SMALL, ["dataset=null", IMAGE, PETASTORM], "data.reader = 'petastorm': it decodes no features of kind image"),
        (SMALL, ["dataset=null", IMAGE.replace("3]", "5]")], "etl.features: an image has 1, 3 or 4 channels"),
        (SMALL, ["dataset=null", HASHED, PETASTORM], "data.reader = 'petastorm': it hands scalars on as they are"),
        (SMALL, ["dataset=null", HASHED, "model.start=e.safetensors"], "model.start: features of kind hashed have"),
        (
            SMALL,
            ["tables.max_rows=1024", "train.global_batch=257"],
            "tables.max_rows = 1024: less than 4 times train.global_batch = 257",
        ),
        (SMALL, ["optim.ema=0.9", LOCAL_SGD], "optim.ema = 0.9: with parallel.averaging.kind = local_sgd every rank"),
        (SMALL, ["optim.ema=0.9", SERVED], "optim.ema = 0.9: with parallel.servers.per_host = 1 the weights are on"),
        (
            SMALL,
            [SERVED, "parallel=auto"],
            "parallel.layout = auto: with parallel.servers.per_host = 1 servers have the",
        ),
        (SMALL, [*BACKED, "launch.world=3"], "parallel.servers.backup = 2: of launch.world = 3 ranks a step must wait"),
        (SMALL, [*BACKED, "launch.world=4", "data.on_corrupt=quarantine"], FILTERED),
        (SMALL, [*BACKED, "launch.world=4", "data.reader=petastorm"], "parallel.servers.backup = 2: ranks read each"),
        (SMALL, ["optim.name=lamb", SERVED], "optim.name = lamb: takes the norm of a whole parameter"),
        (SMALL, ["dataset=null", HASHED, SERVED, "tables.wire=bf16"], "tables.wire = bf16: servers send and get rows"),
        (SMALL, ["dataset=null", HASHED, SERVED, "tables.lag=1"], "tables.lag = 1: is of tables on ranks; with paral"),
        (SMALL, ["dataset=null", HASHED, SERVED, "tables.place=replicate"], "tables.place = replicate: with parallel."),
        (SMALL, ["parallel.pp=2", "model.inputs=[a, b]"], "parallel.pp = 2: a pipeline's first stage takes one tensor"),
    ],
)
def test_each_conflict_is_refused_with_its_keys(tmp_path: Path, text: str, overrides: list[str], words: str) -> None:
    (found,) = problems(tmp_path, text, *overrides)
    assert found.startswith(words) and "{" not in found


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel.tp=2", "sparse tables with tp(2), pp(1), cp(1): rows are pulled for a data rank's batch"),
        ("parallel.pp=2", "sparse tables with tp(1), pp(2), cp(1)"),
        ("optim.ema=0.9", "sparse tables with optim.ema = 0.9: rows are not averaged"),
        (LOCAL_SGD, "sparse tables with parallel.averaging.kind=local_sgd: a row has one owner"),
    ],
)
def test_sparse_tables_are_trained_by_data_ranks_without_averages(tmp_path: Path, override: str, words: str) -> None:
    problem = problems(tmp_path, SMALL, "dataset=null", HASHED, override)[0]
    assert problem.startswith(words)
    load_config(recipe(tmp_path, SMALL), ["dataset=null", HASHED, "parallel.zero=1"])


def test_a_negative_bound_is_refused(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, SMALL, SERVED, "parallel.servers.bound=-1")
    assert found.startswith("parallel.servers.bound = -1: no rank can be ahead by fewer than 0 steps")


def test_a_tables_weight_decay_is_refused_with_its_reason(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, SMALL, "tables.weight_decay=0.1")
    assert found.startswith("tables.weight_decay = 0.1: rows that no batch touches would not decay")


def test_every_conflict_is_tried_above() -> None:
    marks = test_each_conflict_is_refused_with_its_keys.pytestmark  # type: ignore[attr-defined]
    assert len(marks[0].args[1]) == len(CONFLICTS)
