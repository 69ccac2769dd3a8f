"""Settings that are each legal and together impossible, each limit once; one line per problem, key first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sparkring.conf.blocks.parallel import PLANNED
from sparkring.conf.config import RunConfig
from sparkring.conf.plain_text import count_of
from sparkring.conf.rules.promotion import PROMOTION
from sparkring.conf.rules.rule import Rule, find_problems, nearest, no_effect, refuse
from sparkring.conf.rules.strategies import SPARSE_TABLES, TableLayout
from sparkring.conf.rules.trees import TREES, WITHOUT_TREES
from sparkring.conf.secrets import HIDDEN, redact, redacted
from sparkring.conf.tasks import TABLE_TASKS, TASKS, LabelForm
from sparkring.conf.uris import NO_SECRETS, check_uri

BUILT_IN_TABULAR = "training.models.tabular:Tabular"

NO_EFFECT: tuple[Rule[RunConfig], ...] = (
    no_effect(
        ("launch.ranks_per_host", "launch.port"),
        lambda c: c.launch.on in ("spark", "ray"),
        "with launch.on = spark or ray, whose slots or bundles decide",
        "remove it, or set launch.on to auto or hosts",
    ),
    no_effect(
        ("launch.cpus_per_rank", "launch.gpus_per_rank"),
        lambda c: c.launch.on == "hosts",
        "with launch.on = hosts, whose ranks share the host's cores and GPUs",
        "remove it; launch.ranks_per_host decides",
    ),
    no_effect(
        ("data.tail", "data.window_row_groups", "data.block_rows", "data.on_corrupt", "data.cache.files"),
        lambda c: c.data.reader == "petastorm",
        "for training with data.reader = petastorm, which opens and orders the files itself",
        "remove it, or use data.reader = native",
    ),
    no_effect(
        ("data.petastorm.pool", "data.petastorm.workers", "data.petastorm.shuffle_rows"),
        lambda c: c.data.reader == "native",
        "with data.reader = native",
        "remove it (data.threads and data.window_row_groups are the native reader's), or set data.reader to petastorm",
    ),
    no_effect(
        ("data.petastorm.shuffle_rows",),
        lambda c: c.data.reader == "petastorm" and not c.data.shuffle,
        "with data.shuffle = false",
        "remove it, or set data.shuffle to true",
    ),
    no_effect(
        ("data.tail",),
        lambda c: c.data.mix is not None,
        "with a mix, which cuts whole batches out of all its parts",
        "remove it; data.mix.stop says when an epoch ends",
    ),
    no_effect(
        ("data.mix.epoch_samples",),
        lambda c: c.data.mix is not None and c.data.mix.stop != "forever",
        "where data.mix.stop says when an epoch ends",
        "remove it, or set data.mix.stop to forever",
    ),
    no_effect(
        ("etl.split.shares", "etl.split.key", "etl.split.seed"),
        lambda c: c.etl is not None and c.etl.split.kind != "hash",
        "but on a split by hash; boundaries, or the column, decide",
        "remove it, or set etl.split.kind to hash",
    ),
    no_effect(
        ("model.inputs", "model.label"),
        lambda c: c.model.kind.is_text,
        "with model.task = 'language_model', which reads the column `tokens` and predicts it",
        "remove it, or set model.task to your own (module:Class)",
    ),
    no_effect(
        ("model.calibrate",),
        lambda c: c.model.kind.form not in (LabelForm.FLAG, LabelForm.CLASS),
        "where model.task is neither binary nor multiclass: there are no probabilities to calibrate",
        "remove it",
    ),
    no_effect(
        ("report.share_by",),
        lambda c: c.model.kind.form is not LabelForm.FLAG,
        "where model.task is not binary: there is no positive share to show",
        "remove it",
    ),
    no_effect(
        ("report.groups",),
        lambda c: not c.model.kind.is_table or c.train.test_split is None,
        f"but on the test rows of a task of {', '.join(TABLE_TASKS)}",
        "remove it, or name a train.test_split",
    ),
    no_effect(
        ("report.importance",),
        lambda c: not c.model.kind.is_table or c.train.test_split is None,
        f"but on the test rows of a task of {', '.join(TABLE_TASKS)}",
        "remove it, or name a train.test_split",
    ),
    no_effect(
        ("report.ranking",),
        lambda c: c.model.kind.form is not LabelForm.FLAG or c.train.test_split is None,
        "but on the test rows of a binary task",
        "remove it, or name a train.test_split",
    ),
    no_effect(
        ("report.ranking.als",),
        lambda c: not c.report.baselines,
        "with report.baselines = false",
        "remove it, or set report.baselines to true",
    ),
    no_effect(
        ("report.min_group_rows",),
        lambda c: not c.report.groups,
        "without report.groups",
        "remove it, or name columns in report.groups",
    ),
    no_effect(
        ("report.sample_prompt", "report.sample_tokens"),
        lambda c: not c.model.kind.is_text,
        "where model.task is not language_model: no text is written",
        "remove it",
    ),
    no_effect(
        ("model.task_args",),
        lambda c: ":" not in c.model.task,
        "on a task of ours",
        "remove it, or set model.task to your own (module:Class)",
    ),
    no_effect(
        ("optim.args",),
        lambda c: not c.optim.has_own_optimizer,
        "on an optimizer of ours, whose settings are keys of optim",
        "remove it, or set optim.name to your own (module:Class)",
    ),
    no_effect(
        ("optim.betas", "optim.eps", "optim.momentum"),
        lambda c: c.optim.has_own_optimizer,
        "on an optimizer by module:Class, which takes optim.args",
        "put it into optim.args under the name that the class gives it",
    ),
    no_effect(
        ("tables.betas",),
        lambda c: c.tables.optimizer != "adam",
        "where tables.optimizer is not adam",
        "remove it",
    ),
    no_effect(
        ("tables.eps",),
        lambda c: c.tables.optimizer == "sgd",
        "where tables.optimizer is sgd",
        "remove it",
    ),
    no_effect(
        ("optim.schedule_args",),
        lambda c: not c.optim.has_own_schedule,
        "on a schedule of ours",
        "remove it, or set optim.schedule to your own (module:function)",
    ),
    no_effect(
        ("optim.warmup_steps", "optim.final_lr_share"),
        lambda c: c.optim.has_own_schedule,
        "on a schedule by module:function, which decides on every step",
        "remove it, or give it to the function by optim.schedule_args",
    ),
    no_effect(
        ("parallel.compress.share",),
        lambda c: c.parallel.compress.codec != "topk",
        "where parallel.compress.codec is not topk",
        "remove it, or set parallel.compress.codec to topk",
    ),
    no_effect(
        ("parallel.compress.rank",),
        lambda c: c.parallel.compress.codec != "powersgd",
        "where parallel.compress.codec is not powersgd",
        "remove it, or set parallel.compress.codec to powersgd",
    ),
    no_effect(
        ("parallel.averaging.every", "parallel.averaging.inner_state", "parallel.averaging.groups"),
        lambda c: c.parallel.averaging.kind == "none",
        "where parallel.averaging.kind is none",
        "remove it, or set parallel.averaging.kind",
    ),
    no_effect(
        ("parallel.averaging.elasticity",),
        lambda c: c.parallel.averaging.kind != "easgd",
        "where parallel.averaging.kind is not easgd",
        "remove it, or set parallel.averaging.kind to easgd",
    ),
    no_effect(
        ("parallel.averaging.peers",),
        lambda c: c.parallel.averaging.kind != "gossip",
        "where parallel.averaging.kind is not gossip",
        "remove it, or set parallel.averaging.kind to gossip",
    ),
    no_effect(
        ("parallel.averaging.seed",),
        lambda c: c.parallel.averaging.kind != "gossip" or c.parallel.averaging.peers != "random",
        "but on the random peers of gossip",
        "remove it, or set parallel.averaging.kind to gossip and its peers to random",
    ),
    no_effect(
        ("parallel.averaging.outer_lr", "parallel.averaging.outer_momentum"),
        lambda c: c.parallel.averaging.kind != "diloco",
        "where parallel.averaging.kind is not diloco",
        "remove it, or set parallel.averaging.kind to diloco",
    ),
    no_effect(
        ("parallel.servers.bound", "parallel.servers.max_lag", "parallel.servers.damp", "parallel.servers.backup"),
        lambda c: c.parallel.servers.per_host == 0,
        "where parallel.servers.per_host is 0",
        "remove it, or set parallel.servers.per_host",
    ),
    no_effect(
        ("parallel.servers.max_lag", "parallel.servers.damp"),
        lambda c: c.parallel.servers.bound == 0,
        "where parallel.servers.bound is 0, and no gradient is stale",
        "remove it, or set parallel.servers.bound",
    ),
    no_effect(
        ("optim.plateau.factor", "optim.plateau.patience"),
        lambda c: c.optim.schedule != "plateau",
        "where optim.schedule is not plateau",
        "remove it, or set optim.schedule to plateau",
    ),
    no_effect(
        tuple(f"parallel.{key}" for key in PLANNED),
        lambda c: c.parallel.layout == "auto",
        "with parallel.layout = auto, where a plan chooses it",
        "remove it, or set parallel.layout to given",
    ),
    no_effect(
        WITHOUT_TREES,
        lambda c: c.model.is_trees,
        "with model.family = trees",
        "remove it, or set model.family to net",
    ),
    no_effect(
        ("warm_start.retrain_every", "warm_start.after_correction"),
        lambda c: c.warm_start is not None and c.warm_start.model is not None,
        "with warm_start.model, which is always started from",
        "remove it, or set warm_start.from to champion instead of model",
    ),
)


def _odd_images(config: RunConfig) -> list[str]:
    """List image features that neither Pillow nor a decoder of the recipe can decode."""
    features = config.etl.features if config.etl is not None else {}
    odd = [name for name, f in features.items() if f.kind == "image" and f.shape[2] not in (1, 3, 4)]
    return [name for name in odd if config.data.decoders.get(name, "image") == "image"]


def _is_hashed(config: RunConfig) -> bool:
    """Return whether the recipe makes 64-bit ids, for sparse tables."""
    return config.etl is not None and any(f.kind == "hashed" for f in config.etl.features.values())


def _sparse_table_problems(config: RunConfig) -> list[str]:
    """Check that this layout can train sparse tables; -1 stands for any number of ranks."""
    if not _is_hashed(config):
        return []
    tp, pp, cp = (max(1, ranks) for ranks in (config.parallel.tp, config.parallel.pp, config.parallel.cp))
    return find_problems(SPARSE_TABLES, TableLayout(tp, pp, cp, config.optim.ema, config.parallel.averaging.kind))


def _pipeline_input_problems(config: RunConfig) -> Iterator[str]:
    """Check that a pipeline's first stage gets exactly one tensor."""
    columns, pp = config.model.inputs or [], config.parallel.pp
    if pp != 1 and len(columns) > 1 and config.model.kind.is_table:
        yield (
            f"parallel.pp = {pp}: a pipeline's first stage takes one tensor, and model.inputs names "
            f"{count_of(len(columns), 'column')}; give one vector column, or a model.task of your own whose inputs "
            "make one of them"
        )


def is_built_in_tabular(config: RunConfig) -> bool:
    """Return whether the model is the built-in network for tables."""
    return not config.model.is_trees and config.model.factory.endswith(BUILT_IN_TABULAR)


def _outputs_problems(config: RunConfig) -> Iterator[str]:
    """Check `outputs` of the built-in table model, as far as the task alone decides it."""
    outputs, task = config.model.args.get("outputs"), config.model.task
    if not is_built_in_tabular(config) or not isinstance(outputs, int):
        return
    if config.model.kind.form in (LabelForm.FLAG, LabelForm.NUMBER) and outputs != 1:
        yield f"model.args.outputs = {outputs}: a model of model.task = {task!r} has one output; remove it"
    if config.model.kind.form is LabelForm.CLASS and outputs < 2:
        yield (
            f"model.args.outputs = {outputs}: a model of model.task = {task!r} has an output per class, so 2 or more; "
            "set it to the number of classes"
        )


CONFLICTS: tuple[Rule[RunConfig], ...] = (
    refuse(
        ("etl", "dataset"),
        lambda c: c.etl is None and c.dataset is None,
        "etl, dataset: neither is given",
        "a run has either an etl block or the URI of a finished dataset",
    ),
    refuse(
        ("launch.on", "etl", "dataset"),
        lambda c: c.launch.is_without_spark and c.etl is not None,
        "launch.on = {0.launch.on!r}: there is no Spark to build the dataset of the etl block",
        "build it with `sparkring etl`, and give its URI: dataset=URI",
    ),
    refuse(
        ("etl", "dataset"),
        lambda c: c.etl is not None and c.dataset is not None,
        "etl, dataset: both are given",
        "a run has either an etl block or the URI of a finished dataset",
    ),
    refuse(
        ("train.epochs", "train.steps"),
        lambda c: c.train.epochs is None and c.train.steps is None,
        "train.epochs, train.steps: both are null",
        "training would have no end",
    ),
    refuse(
        ("optim.warmup_steps", "train.steps"),
        lambda c: c.train.steps is not None and c.optim.warmup_steps >= c.train.steps,
        "optim.warmup_steps = {0.optim.warmup_steps}: must be less than train.steps = {0.train.steps}, or the "
        "learning rate never reaches optim.lr",
    ),
    refuse(
        ("tracking.uri",),
        lambda c: c.tracking.unknown_store is not None,
        "tracking.uri: MLflow has no store for {0.tracking.unknown_store!r}",
        "it knows http, https, sqlite, mysql, postgresql, mssql, file and databricks",
    ),
    refuse(
        ("train.test_split", "train.valid_split"),
        lambda c: c.train.valid_split == c.train.test_split,
        "train.test_split = {0.train.test_split!r}: is train.valid_split too",
        "hold out other rows for the test",
    ),
    refuse(
        ("model.start", "warm_start"),
        lambda c: c.model.start is not None and c.warm_start is not None,
        "model.start, warm_start: both are given; warm_start follows this recipe's own model to other features by "
        "value, model.start takes tensors of any file by name and shape",
        "remove one",
    ),
    refuse(
        ("data.reader", "etl"),
        lambda c: (
            c.data.reader == "petastorm"
            and c.etl is not None
            and any(f.kind == "image" for f in c.etl.features.values())
        ),
        "data.reader = 'petastorm': it decodes no features of kind image",
        "set data.reader to native",
    ),
    refuse(
        ("etl.features", "data.decoders"),
        lambda c: bool(_odd_images(c)),
        "etl.features: an image has 1, 3 or 4 channels, the last number of `shape`",
        "of others name a decoder in data.decoders",
    ),
    refuse(
        ("data.reader",),
        lambda c: c.data.reader == "petastorm" and _is_hashed(c),
        "data.reader = 'petastorm': it hands scalars on as they are stored, and makes no ids of kind hashed",
        "set data.reader to native",
    ),
    refuse(
        ("model.start",),
        lambda c: _is_hashed(c) and c.model.start is not None,
        "model.start: features of kind hashed have sparse tables, and a file of tensors has no rows",
        "remove it, or begin with this recipe's own model by warm_start",
    ),
    refuse(
        ("tables.max_rows", "train.global_batch"),
        lambda c: c.tables.max_rows is not None and c.tables.max_rows < 4 * c.train.global_batch,
        "tables.max_rows = {0.tables.max_rows}: less than 4 times train.global_batch = {0.train.global_batch}; every "
        "row of a batch may have an id of its own, and ids fill buckets unevenly",
        "raise it",
    ),
    refuse(
        ("optim.ema", "parallel.averaging.kind"),
        lambda c: c.optim.ema is not None and c.parallel.averaging.kind != "none",
        "optim.ema = {0.optim.ema}: with parallel.averaging.kind = {0.parallel.averaging.kind} every rank would have "
        "a mean of weights of its own, which no rank trains with",
        "remove one of the two",
    ),
    refuse(
        ("parallel.layout", "parallel.servers.per_host"),
        lambda c: c.parallel.servers.per_host > 0 and c.parallel.layout == "auto",
        "parallel.layout = auto: with parallel.servers.per_host = {0.parallel.servers.per_host} servers have the "
        "weights, and all ranks are data ranks: there is no layout to choose",
        "set parallel.layout to given, or per_host to 0",
    ),
    refuse(
        ("optim.ema", "parallel.servers.per_host"),
        lambda c: c.parallel.servers.per_host > 0 and c.optim.ema is not None,
        "optim.ema = {0.optim.ema}: with parallel.servers.per_host = {0.parallel.servers.per_host} the weights are on "
        "servers, which keep no averages",
        "remove one of the two",
    ),
    refuse(
        ("optim.name", "parallel.servers.per_host"),
        lambda c: c.parallel.servers.per_host > 0 and c.optim.name in ("lars", "lamb"),
        "optim.name = {0.optim.name}: takes the norm of a whole parameter, and parallel.servers.per_host = "
        "{0.parallel.servers.per_host} cuts parameters over servers",
        "use adamw or sgd",
    ),
    refuse(
        ("tables.wire", "parallel.servers.per_host"),
        lambda c: c.parallel.servers.per_host > 0 and _is_hashed(c) and c.tables.wire != "fp32",
        "tables.wire = {0.tables.wire}: servers send and get rows as they are",
        "leave it at fp32",
    ),
    refuse(
        ("tables.lag", "parallel.servers.per_host", "parallel.servers.bound"),
        lambda c: c.parallel.servers.per_host > 0 and _is_hashed(c) and c.tables.lag > 0,
        "tables.lag = {0.tables.lag}: is of tables on ranks; with parallel.servers.per_host = "
        "{0.parallel.servers.per_host} parallel.servers.bound says how late gradients may be",
        "leave lag at 0",
    ),
    refuse(
        ("tables.place", "parallel.servers.per_host"),
        lambda c: c.parallel.servers.per_host > 0 and _is_hashed(c) and c.tables.place == "replicate",
        "tables.place = replicate: with parallel.servers.per_host = {0.parallel.servers.per_host} rows are on the "
        "servers, not on ranks",
        "leave it at shard",
    ),
    refuse(
        ("parallel.servers.backup", "launch.world"),
        lambda c: 2 * c.parallel.servers.backup > c.launch.world > 1,
        "parallel.servers.backup = {0.parallel.servers.backup}: of launch.world = {0.launch.world} ranks a step must "
        "wait for half at least",
        "lower it, or raise launch.world",
    ),
    refuse(
        ("parallel.servers.backup", "data.filters", "data.on_corrupt"),
        lambda c: c.parallel.servers.backup > 0 and bool(c.data.filters or c.data.on_corrupt == "quarantine"),
        "parallel.servers.backup = {0.parallel.servers.backup}: ranks read each other's rows when one is late, and "
        "data.filters and data.on_corrupt = 'quarantine' are agreed on by all ranks before the first",
        "filter rows in etl, or set backup to 0",
    ),
    refuse(
        ("parallel.servers.backup", "data.mix", "data.reader"),
        lambda c: c.parallel.servers.backup > 0 and (c.data.mix is not None or c.data.reader == "petastorm"),
        "parallel.servers.backup = {0.parallel.servers.backup}: ranks read each other's rows when one is late, which "
        "data.mix and data.reader = 'petastorm' cannot",
        "use the native reader of one dataset, or set backup to 0",
    ),
    refuse(
        ("data.audit", "data.mix"),
        lambda c: c.data.audit and c.data.mix is not None,
        "data.audit: a mix repeats rows by design, so there is nothing to prove",
        "remove one of the two",
    ),
    Rule(("parallel.pp", "model.inputs"), _pipeline_input_problems),
    Rule(("model.args", "model.task"), _outputs_problems),
)


def uri_problems(config: RunConfig) -> list[str]:
    """List storage URIs that cannot be right on any machine."""
    uris = {"storage.datasets": config.storage.datasets, "storage.runs": config.storage.runs, "dataset": config.dataset}
    if config.etl is not None:
        uris |= {f"etl.sources.{name}.path": source.location for name, source in config.etl.sources.items()}
    if config.predict is not None:
        uris["predict.to"] = config.predict.to
        uris["predict.model"] = config.predict.folder
    if config.data.mix is not None:
        uris |= {f"data.mix.parts.{i}.dataset": part.dataset for i, part in enumerate(config.data.mix.parts)}
    if config.model.start is not None and not config.model.start.registered:
        uris["model.start.weights"] = config.model.start.weights
    problems = []
    for key, uri in uris.items():
        try:
            check_uri(uri or "")
        except ValueError as error:
            if redact(uri or "") == uri:  # else `secret_problems` reports it
                problems.append(f"{key}: {error}")
    return problems


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key path, value) of everything that is not itself a non-empty block or list."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and value:
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, item in items:
        yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))


def secret_problems(config: RunConfig) -> list[str]:
    """List values that are or hold a credential. Only `spark.conf` may hold them (see SparkConfig)."""
    return [
        f"{key} {'is' if shown == HIDDEN else f'= {shown!r} holds'} a secret, {NO_SECRETS}"
        for key, value in leaves(config.model_dump(mode="json", exclude={"spark": {"conf"}}))
        if (shown := redacted(value, key)) != value
    ]


def must_beat_problems(config: RunConfig) -> list[str]:
    """Check `report.must_beat`: there must be baselines, and they must have the metrics; and so of trees."""
    ranking = config.report.ranking
    of_lists = ranking.metrics if ranking is not None and ranking.item is not None else []
    trees = _must_beat_problems(config, "report.must_beat_trees", config.report.must_beat_trees, [])
    return _must_beat_problems(config, "report.must_beat", config.report.must_beat, of_lists) + trees


def _must_beat_problems(config: RunConfig, name: str, wanted: list[str], of_ranking: list[str]) -> list[str]:
    key, kind = f"{name} = {wanted}", config.model.kind
    if not wanted:
        return []
    if kind.is_text and name.endswith("trees"):
        return [f"{key}: there are no trees for model.task = {kind.name!r}, only for {', '.join(TABLE_TASKS)}"]
    if kind.is_own:
        return [f"{key}: there are no baselines for model.task = {kind.name!r}, only for {sorted(TASKS)}"]
    problems = []
    known = [*kind.baseline_metrics, *of_ranking]
    if unknown := [metric for metric in wanted if metric not in known]:
        of_lists = [metric for metric in unknown if metric.startswith(("recall_at_", "ndcg_at_"))]
        remedy = "; name a metric of report.ranking, with its item, for popularity to be beaten" if of_lists else ""
        problems.append(f"{key}: baselines of model.task = {kind.name!r} have {known}, not {unknown}{remedy}")
    if not config.report.baselines:
        problems.append(f"{key}: report.baselines is false, so there is nothing to beat; set it true")
    if config.train.test_split is None:
        problems.append(f"{key}: train.test_split is null, so there are no held-out rows to beat the baselines on")
    return problems


def predict_problems(config: RunConfig) -> list[str]:
    """Check that the rows of `predict` can be made, and their predictions be columns."""
    if config.predict is None:
        return []
    if config.model.kind.is_text:
        return [f"predict: rows of tables are scored, and model.task is {config.model.task!r}; remove the block"]
    rows, key = config.predict.rows, f"predict.rows = {config.predict.rows!r}"
    if config.etl is None:
        return [f"{key}: is a view or source of etl, and there is no etl block"]
    known = [*config.etl.sources, *config.etl.views]
    return [] if ":" in rows or rows in known else [f"{key}: is no view or source of etl; {nearest(rows, known)}"]


def mode_problems(config: RunConfig) -> list[str]:
    """Check that `train` looks for the best value of a metric in the right direction, where it is known."""
    train, known = config.train, config.model.kind.directions
    asked = {"train.best_mode": (train.best_metric, train.best_mode)}
    if train.early_stopping is not None:
        asked["train.early_stopping.mode"] = (train.early_stopping.metric, train.early_stopping.mode)
    return [
        f"{key} = {mode!r}: {'more' if known[metric] else 'less'} of {metric!r} is better; "
        f"set it to {'max' if known[metric] else 'min'}"
        for key, (metric, mode) in asked.items()
        if metric in known and (mode == "max") != known[metric]
    ]


def metric_problems(config: RunConfig, names: Sequence[str]) -> list[str]:
    """Check the metrics the recipe names against `names`, the metrics of its task."""
    early = config.train.early_stopping
    wanted = {"train.best_metric": config.train.best_metric} | (
        {"train.early_stopping.metric": early.metric} if early else {}
    )
    if config.promote is not None and config.model.kind.is_own:  # the others' are known without a task
        wanted |= {f"promote.rules.{i}.metric": rule.metric for i, rule in enumerate(config.promote.rules)}
    return [
        f"{key} = {name!r}: no validation metric of model.task = {config.model.task!r}; {nearest(name, names)}"
        for key, name in wanted.items()
        if name not in names
    ]


RECIPE: tuple[Rule[RunConfig], ...] = (
    *CONFLICTS,
    *TREES,
    Rule(
        ("etl.features", "parallel.tp", "parallel.pp", "parallel.cp", "parallel.averaging.kind", "optim.ema"),
        _sparse_table_problems,
    ),
    Rule((), secret_problems),
    Rule(
        ("report.must_beat", "report.must_beat_trees", "report.baselines", "train.test_split", "model.task"),
        must_beat_problems,
    ),
    Rule(("train.best_mode", "train.best_metric", "train.early_stopping"), mode_problems),
    Rule(("predict.rows", "etl.sources", "etl.views", "model.task"), predict_problems),
    *PROMOTION,
    *NO_EFFECT,
    Rule(
        (
            "storage.datasets",
            "storage.runs",
            "dataset",
            "etl.sources",
            "predict.to",
            "predict.model",
            "data.mix.parts",
            "model.start.weights",
        ),
        uri_problems,
    ),
)
