"""One-line changes that break a promise, as data. Each must make a test fail; `make mutants` tries them.

A mutant is found by its text, so a file that moves changes a path only. `tests` are the files that must notice, named
so that a mutant costs seconds; `equivalent` says why a change cannot be noticed, where that is so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` stands exactly once in `file` and becomes `new`; pytest's arguments are `tests`."""

    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""


PARALLEL = "training/parallel"
BATCHING, STEP, GRADIENTS = (f"{PARALLEL}/{name}.py" for name in ("batching", "step", "gradients"))
REDUCE, ZERO, HVD_ZERO = (f"{PARALLEL}/data_parallel/{name}.py" for name in ("reduce", "zero", "horovod_zero"))
MODEL_PARALLEL = f"{PARALLEL}/model_parallel"
CONTEXT, PLACEMENT, SCHEDULES = (f"{MODEL_PARALLEL}/{name}.py" for name in ("context", "placement", "schedules"))
OPTIM, LOSS = "training/optim/build.py", "training/models/loss.py"
ORDER, AUDIT, POOL = "training/data/order.py", "training/data/audit/check.py", "training/data/decoding/pool.py"
AUDIT_LOG = "training/data/audit/log.py"
ELASTIC, POLICY, LOOP = "training/launch/restart.py", "training/checkpoint/policy.py", "training/loop/fit.py"
CATALOG, PLAN, READER = "training/checkpoint/catalog.py", "training/checkpoint/dcp.py", "training/data/reader.py"
FEATURES, CHECKS, SPLIT = "training/data/features/transform.py", "etl/checks.py", "etl/split.py"
SERVING, T_SERVING = "pipelines/serving.py", "tests/pipelines/test_serving.py"
MODEL, TABULAR = "pipelines/model", "training/models/tabular.py"
T_PORTABLE_CHECK, T_PORTABLE_SAMPLE, T_PORTABLE_SOURCES = (
    f"tests/pipelines/portable/test_{name}.py" for name in ("check", "sample", "sources")
)
RAW_FEATURES, PREDICT = "training/data/features/raw.py", "pipelines/predict"
PUBLISH, T_PUBLISH = f"{PREDICT}/publish.py", "tests/pipelines/predict/test_publish.py"
LINEAGE, T_LINEAGE = "pipelines/lineage/show.py", "tests/pipelines/test_lineage.py"
T_PREDICT = "tests/pipelines/predict/test_job.py"
REPRODUCING, REPRODUCE, T_REPRODUCE = (
    "pipelines/lineage",
    "pipelines/cli/reproduce.py",
    "tests/pipelines/reproduce/test_job.py",
)
VALIDATE, T_MISTAKES = "pipelines/validate", "tests/pipelines/validate/test_mistakes.py"
T_EXPORT = "tests/pipelines/portable/test_export.py"
T_VALIDATE_TABLES = "tests/pipelines/validate/test_tables.py"
T_PROFILE = "tests/etl/test_profile.py"
T_CLASSES, T_TRACEBACK = "tests/spark/test_etl_classes.py", "tests/training/launch/test_traceback.py"
T_TABLES = "tests/pipelines/validate/test_tables.py"
T_COMPARE, T_SOURCES = (f"tests/pipelines/reproduce/test_{name}.py" for name in ("compare", "sources"))
T_ENVIRONMENT = "tests/pipelines/reproduce/test_environment.py"
STATISTICS, ROWS, T_ROWS = "etl/columns/statistics.py", "etl/rows.py", "tests/spark/test_etl_rows.py"
WEIGHTS, T_WEIGHTS, T_ETL_WEIGHTS = "etl/weights.py", "tests/etl/test_weights.py", "tests/spark/test_etl_weights.py"
FLAGS, T_FLAGS, T_LABELS = "etl/flags.py", "tests/etl/test_flags.py", "tests/spark/test_etl_labels.py"
KINDS, T_KINDS = "conf/tasks.py", "tests/conf/test_tasks.py"
TASKS, T_TASKS = "training/tasks.py", "tests/training/test_tasks.py"
RECIPE_MODEL, T_RECIPE_MODEL = "training/model/recipe_model.py", "tests/training/test_recipe_model.py"
T_LABEL_RULES, MULTILABEL = "tests/conf/rules/test_labels.py", "pipelines/evaluation/multilabel.py"
T_MULTILABEL = "tests/pipelines/evaluation/test_multilabel.py"
T_WEIGHTED_RUN = "tests/training/test_worker.py -k weights_count"
JVM, T_JVM = "pipelines/run/jvm_options.py", "tests/pipelines/test_jvm_options.py"
MLLIB, T_BASELINE = "pipelines/evaluation/mllib.py", "tests/pipelines/evaluation/test_baseline.py"
GUESSES, LINEAR = "pipelines/evaluation/guesses.py", "pipelines/evaluation/linear.py"
GROUPS, T_GROUPS = "pipelines/evaluation/groups.py", "tests/pipelines/evaluation/test_groups.py"
CUTS, T_CUTS = "training/launch/cuts.py", "tests/training/launch/test_cuts.py"
HOST_CUTS, T_HOST_CUTS = "training/launch/host/cuts.py", "tests/training/launch/host/test_cuts.py"
LOOP_TIMING = "training/loop/timing.py"
SERVERS, T_SERVERS = "training/launch/servers.py", "tests/training/launch/test_servers.py"
ATTEMPT, FORK_SERVER = "training/launch/attempt.py", "training/launch/host/fork_server.py"
T_ATTEMPT = "tests/training/launch/test_attempt.py"
MEANS, T_MEANS = "training/launch/means.py", "tests/training/launch/test_means.py"
T_RECOMMENDER, T_DRAWN = "tests/pipelines/init/test_recommender.py", "tests/spark/test_recommender_views.py"
RANKING, T_RANKING = "pipelines/evaluation/ranking.py", "tests/pipelines/evaluation/test_ranking.py"
ALS, T_ALS = "pipelines/evaluation/als.py", "tests/pipelines/evaluation/test_als.py"
FACTORS, T_FACTORS = "training/models/factors.py", "tests/training/models/test_factors.py"
DECODE, T_DECODE = "training/data/decoding/cells.py", "tests/training/data/test_decode.py"
T_PROMOTION_SCORES = "tests/pipelines/promotion/test_scores.py"
T_AT_ONCE = "tests/spark/test_etl_at_once.py"
TABLES, T_TABLE = "training/tables", "tests/training/tables/test_table.py"
T_INCREMENTS, WRITER = "tests/training/tables/test_increments.py", "training/checkpoint/writer.py"
T_HOT_IDS = "tests/training/tables/test_hot_ids.py"
STRAGGLERS, T_STRAGGLERS = "training/planner/stragglers.py", "tests/training/planner/test_stragglers.py"
T_ADVICE = "tests/pipelines/test_stragglers.py"
T_AHEAD, T_ORDERED = "tests/training/tables/test_ahead.py", "tests/training/tables/test_ordered_calls.py"
T_TABLE_FILES, T_SPARSE = "tests/training/tables/test_files.py", "tests/training/parallel/test_sparse.py"
T_SPARSE_RANKS, T_SPARSE_EMBEDDING = "tests/ranks/test_tables.py", "tests/training/models/test_sparse_embedding.py"
T_LAG = f"{T_SPARSE_RANKS} -k lag"
XXHASH = "training/data/features/xxhash64"
AVERAGE, T_AVERAGE = "training/parallel/average.py", "tests/training/parallel/test_average.py"
COMPRESS, T_COMPRESS = f"{PARALLEL}/data_parallel/compress.py", "tests/training/parallel/test_compress.py"
CODECS, T_CODECS = f"{PARALLEL}/data_parallel/codecs.py", "tests/training/parallel/test_codecs.py"
T_AVERAGING = "tests/training/parallel/averaging/test_rules.py"
AVERAGING, T_REPLICAS = f"{PARALLEL}/averaging", "tests/ranks/test_replicas.py"
BACKUP, T_BACKUP = "training/servers/backup.py", "tests/training/servers/test_backup.py"
T_READ_PARTS, T_PARTS_AUDIT = "tests/training/data/test_parts.py", "tests/training/data/test_audit_parts.py"
T_BACKED, T_FEWER, T_MEETS, T_CHANGED_BOUND = (
    f"tests/training/test_worker_servers.py -k {name}"
    for name in (
        "makes_one_step",
        "go_on_with_fewer",
        "one_meeting_follows_another",
        "bound_was_changed",
    )
)
SERVERS_FOLDER = "training/servers"
SERVER = f"{SERVERS_FOLDER}/server.py"
SERVER_CODEC, T_SERVER_CODEC = f"{SERVERS_FOLDER}/codec.py", "tests/training/servers/test_codec.py"
SHARD, T_SHARD, T_SERVER, T_SERVERS_REPLAY = (
    f"{SERVERS_FOLDER}/shard.py",
    *(f"tests/{SERVERS_FOLDER}/test_{name}.py" for name in ("shard", "server", "replay")),
)
T_LATE = f"tests/{PARALLEL}/servers/test_late_residuals.py"
T_DRAWS = f"tests/{PARALLEL}/servers/test_strategy.py"
BATCH_NORM = f"{PARALLEL}/data_parallel/batch_norm.py"
T_BATCH_NORM = "tests/ranks/test_batch_norm.py"
RATES, T_RATES = "training/optim/schedules.py", "tests/training/test_schedules.py"
OWN_OPTIMIZER, T_OWN_OPTIMIZER = "training/optim/own.py", "tests/training/test_own_optimizer.py"
TRAIN_HOOKS, T_TRAIN_HOOKS = "training/hooks.py", "tests/training/test_hooks.py"
BEGIN, T_BEGIN = "training/model/start.py", "tests/training/models/test_start.py"
MODEL_START, T_MODEL_START = "pipelines/model/model_start.py", "tests/pipelines/test_model_start.py"
WARM, T_WARM = "training/models/warm_start.py", "tests/training/models/test_warm_start.py"
COMPLETION, T_COMPLETION = "pipelines/cli/completion.py", "tests/pipelines/test_completion.py"
T_HISTORY_RUN = "tests/pipelines/tracking/test_history_run.py"
T_TRAIN_STEP = "tests/pipelines/test_train_step.py"
RECIPE_FILE, T_RECIPE_FILE = "conf/recipe_file.py", "tests/conf/test_recipe_file.py"
INIT, T_INIT = "pipelines/init", "tests/pipelines/init/test_init.py"
CLI, T_CLI = "pipelines/cli/entry.py", "tests/pipelines/test_cli.py"
INTERVAL, PARTS, WINDOW = (f"etl/windows/{name}.py" for name in ("interval", "parts", "window"))
CONVERT, FOOTERS = "training/data/petastorm_adapter/convert.py", "etl/sources/files/footers.py"
T_CONVERT = (
    "tests/training/data/petastorm_adapter/test_petastorm_reader.py"
    "::test_dates_and_timestamps_are_what_the_native_reader_makes_of_them"
)
STATE, MANIFEST, EVALUATE = "etl/columns/features.py", "conf/manifest.py", "pipelines/evaluation/evaluate.py"
PREDICATE, T_PREDICATE = "etl/sources/predicate.py", "tests/etl/sources/test_predicate.py"
PARTITIONS, T_PARTITIONS = "etl/sources/files/partitions.py", "tests/etl/sources/files/test_partitions.py"
JSON_FILE, T_JSON_FILE = "etl/sources/files/json_file.py", "tests/etl/sources/files/test_json_file.py"
FILE_TASK, T_FILES = "etl/sources/files/task.py", "tests/spark/test_etl_files.py"
CSV_FILE, T_CSV_FILE = "etl/sources/files/csv_file.py", "tests/etl/sources/files/test_csv_file.py"
DELTA, DELTA_LOG, LAKE_FILES = (f"etl/sources/{name}.py" for name in ("delta/source", "delta/log", "lake_files"))
T_DELTA, T_DELTA_LOG = (f"tests/etl/sources/delta/test_{name}.py" for name in ("source", "log"))
T_LAKE_ROWS = "tests/spark/test_etl_lake_files.py"
ICE_TABLE, ICE_WHERE, ICE_SCHEMA = (f"etl/sources/iceberg/{name}.py" for name in ("table", "where", "schema"))
T_ICE_TABLE, T_ICE_WHERE = (f"tests/etl/sources/iceberg/test_{name}.py" for name in ("table", "where"))
KEEPING, T_KEEPING = "pipelines/housekeeping/retention.py", "tests/pipelines/housekeeping/test_retention.py"
EVENTS, T_EVENTS = "pipelines/housekeeping/events.py", "tests/pipelines/housekeeping/test_events.py"
EVALUATE, T_EVALUATE = "pipelines/evaluation/evaluate.py", "tests/pipelines/evaluation/test_evaluate.py"
NOTIFY, T_NOTIFY = "pipelines/housekeeping/notify.py", "tests/pipelines/housekeeping/test_notify.py"
GC, T_GC = "pipelines/housekeeping/gc.py", "tests/pipelines/housekeeping/test_gc.py"
CLEANUP = "pipelines/tracking/store/cleanup.py"
T_TRACKER = "tests/pipelines/tracking/test_tracker.py"
OL = ("datasets", "events", "send", "driver")
OL_RECORD = "pipelines/lineage/record.py"
OL_DATASETS, OL_EVENTS, OL_SEND, OL_DRIVER = (f"pipelines/tracking/openlineage/{name}.py" for name in OL)
T_OL_DATASETS, T_OL_EVENTS, T_OL_SEND = (f"tests/pipelines/tracking/openlineage/test_{name}.py" for name in OL[:3])
METRICS, T_METRICS = "training/metrics.py", "tests/training/test_metrics.py"
EVALUATION, T_EVALUATION = "training/loop/evaluation.py", "tests/training/test_evaluation.py"
BALANCE, T_BALANCE = "pipelines/evaluation/balance.py", "tests/pipelines/evaluation/test_balance.py"
DRAWING, T_DRAWING = "pipelines/report/drawing.py", "tests/pipelines/report/test_drawing.py"
REPORT_INPUTS, T_REPORT_INPUTS = "pipelines/report/inputs.py", "tests/pipelines/report/test_inputs.py"
PARAMS, T_PARAMS = "pipelines/tracking/params.py", "tests/pipelines/tracking/test_params.py"
SPACE, STUDY, SWEEP_JOB = (f"pipelines/sweep/{name}.py" for name in ("space", "study", "job"))
T_SPACE, T_STUDY = (f"tests/pipelines/sweep/test_{name}.py" for name in ("space", "study"))
T_SWEEP = "tests/e2e/test_sweep.py"
DESCRIBE, T_DESCRIBE = "pipelines/tracking/describe.py", "tests/pipelines/tracking/test_describe.py"
STORE, T_BROWSING = "pipelines/tracking/store/sink.py", "tests/pipelines/tracking/test_browsing.py"
CHECKOUT, SHOWN = "pipelines/tracking/checkout.py", "pipelines/tracking/store/shown.py"
VIEWS, T_VIEWS = "pipelines/tracking/views.py", "tests/pipelines/tracking/test_views.py"
COST, T_COST = "pipelines/housekeeping/cost.py", "tests/pipelines/housekeeping/test_cost.py -k hours"
NOTIFY_BLOCK, T_NOTIFY_BLOCK = "conf/blocks/notify.py", "tests/conf/blocks/test_notify.py"
DATES, DATED = "conf/schedule/dates.py", "conf/schedule/dated.py"
T_DATES, T_DATED = "tests/conf/schedule/test_dates.py", "tests/conf/schedule/test_dated.py"
SCHEDULE = ("lease", "conditional", "run_date", "publication", "backfill")
LEASE, CONDITIONAL, RUN_DATE, PUBLICATION, BACKFILL = (f"pipelines/schedule/{name}.py" for name in SCHEDULE)
T_LEASE, T_CONDITIONAL, T_RUN_DATE, T_PUBLICATION, T_BACKFILL = (
    f"tests/pipelines/schedule/test_{name}.py" for name in SCHEDULE
)

RING = "tests/ranks/test_ring.py"
MESH = "tests/ranks/test_mesh.py -k two"  # two ranks: more layouts than with four or eight, in less time
ROUNDED = "tests/ranks/test_mesh.py::test_rounded_precisions_go_the_way_of_float64"
T_ORDER, T_AUDIT = "tests/training/data/test_order.py", "tests/training/data/test_audit.py"
T_AUDIT_RUN = "tests/training/data/test_audit_run.py"
T_READER, T_ELASTIC = "tests/training/data/test_reader.py", "tests/training/launch/test_restart.py"
T_LOOP, T_POLICY = "tests/training/test_loop.py", "tests/training/checkpoint/test_policy.py"
T_CHECKPOINT, T_DAMAGE = "tests/training/checkpoint/test_checkpointer.py", "tests/training/checkpoint/test_damage.py"
T_OPTIM, T_LOSS = "tests/training/test_optim.py", "tests/training/models/test_loss.py"
T_SCHEDULES, T_GRADIENTS = "tests/training/parallel/test_schedules.py", "tests/training/parallel/test_gradients.py"
T_NUMPY, T_FEATURES = "tests/training/data/features/test_transform.py", "tests/spark/test_etl_features.py"
T_STATISTICS, T_INTERVAL, T_PARTS, T_WINDOW = (
    f"tests/etl/{name}.py"
    for name in ("columns/test_statistics", "windows/test_interval", "windows/test_parts", "windows/test_window")
)
T_CHECKS, T_RULES = "tests/spark/test_etl_checks.py", "tests/etl/test_split.py"
T_JDBC, T_CATALOG = "tests/etl/sources/test_jdbc.py", "tests/etl/sources/catalog/test_source.py"
PROMOTION = "pipelines/promotion"
GATE_RULES, GATE_SCORES, GATE, START, DRIFT, DISTRIBUTIONS, CHAMPION = (
    f"{PROMOTION}/{name}.py" for name in ("rules", "scores", "gate", "start", "drift", "distributions", "champion")
)
T_GATE_RULES, T_GATE_SCORES, T_GATE, T_START, T_DRIFT, T_DISTRIBUTIONS, T_CHAMPION = (
    f"tests/pipelines/promotion/test_{name}.py"
    for name in ("rules", "scores", "gate", "start", "drift", "distributions", "champion")
)
ALIASES, REGISTRY, T_REGISTRY = (
    "pipelines/tracking/alias.py", "pipelines/tracking/store/registry.py", "tests/pipelines/tracking/test_registry.py"
)  # fmt: skip
PREPARE, BY_HAND = f"{PROMOTION}/prepare.py", f"{PROMOTION}/by_hand.py"
JDBC, QUERY_FILES = "etl/sources/jdbc.py", "etl/sources/catalog/query_files.py"

TREES, T_TREES = "pipelines/evaluation/trees.py", "tests/pipelines/evaluation/test_trees.py"
MUTANTS = (
    # Gradients: what is summed, weighted, clipped and stepped.
    Mutant(REDUCE, "view.copy_(local_tensor(grad))", "view.add_(local_tensor(grad))", RING),
    Mutant(REDUCE, "bucket.missing.add(index)", "pass", RING),
    Mutant(REDUCE, "parameter.grad = None", "pass", RING),
    Mutant(ZERO, "reached[index] = 0", "pass", RING),
    Mutant(REDUCE, "if not count]", "if count < 2]", RING),
    Mutant(REDUCE, "        self.next_start = 0\n\n", "\n", RING),
    Mutant(BATCHING, "return (row_losses * batch.weight.to(row_losses)).sum()", "return row_losses.sum()", MESH),
    Mutant(BATCHING, "global_rows=batch.global_rows,", "global_rows=stop - start,", MESH),
    Mutant(BATCHING, "min(i + 1, longer)", "min(i, longer)", "tests/training/parallel/test_batching.py"),
    Mutant(BATCHING, "weight.new_zeros(missing)]", "weight.new_ones(missing)]", MESH),
    Mutant(STEP, "self.data_parallel.size if self.data_parallel.averages else 1", "1", RING),
    Mutant(STEP, "/ (self.mesh.cp * global_rows)", "/ global_rows", MESH),
    Mutant(STEP, "clip_factor(norm, self.clip_norm) / self.scaler.scale", "clip_factor(norm, self.clip_norm)", ROUNDED),
    Mutant(STEP, "norm = self._norm() / self.scaler.scale", "norm = self._norm()", ROUNDED),
    Mutant(STEP, 'group["lr"] = lr', 'group["lr"] = group["lr"]', RING),
    Mutant(STEP, "        prepared.optimizer.step()\n", "", RING),
    Mutant(STEP, "        self.prepared.optimizer.zero_grad(set_to_none=True)\n", "", MESH),
    Mutant(GRADIENTS, "if self.batches != REACH_STEPS:", "if True:", "tests/ranks/test_state.py"),
    Mutant(GRADIENTS, "* (count / holders)", "/ holders", MESH),
    Mutant(GRADIENTS, "min(1.0, limit / (norm + 1e-6))", "limit / (norm + 1e-6)", T_GRADIENTS),
    Mutant(GRADIENTS, "if factor != 1.0 and gradients:", "if factor > 1.0 and gradients:", T_GRADIENTS),
    Mutant(PLACEMENT, "self.uncounted.update(mine)", "pass", MESH),
    Mutant(PLACEMENT, "dist.all_reduce(mine, group=group)", "pass", MESH),
    Mutant(CONTEXT, "return _all_to_all(grads[0], ctx.group), None", "return grads[0].contiguous(), None", MESH),
    Mutant(HVD_ZERO, "foreach_copy_(self.sent, self.weights)", "pass", RING),
    Mutant(HVD_ZERO, "None if whole in unreached else gradient", "gradient", RING),
    Mutant(OPTIM, "weight_decay if matrix else 0.0", "weight_decay", T_OPTIM),
    Mutant(
        "pipelines/model/sample.py",
        "now.get(name) != sha256",
        "name not in now",
        "tests/pipelines/portable/test_sample.py",
    ),
    Mutant(
        "pipelines/context/etl_step.py",
        'DATA_EXCEPTION = "22"',
        'DATA_EXCEPTION = ""',
        "tests/pipelines/test_etl_step.py",
    ),
    Mutant("training/models/groups.py", "re.fullmatch(group.match, name)", "re.match(group.match, name)", T_OPTIM),
    Mutant("training/models/groups.py", "if not any(of is group for _, of in found):", "if False:", T_OPTIM),
    Mutant("training/parallel/step.py", "lr * group.get(LR_SCALE, 1.0)", "lr", "tests/training/parallel/test_step.py"),
    Mutant(
        "training/launch/health.py", "slow.seconds >= self._lasting_s", "True", "tests/training/launch/test_health.py"
    ),
    Mutant("training/launch/health.py", "rank not in self._named", "True", "tests/training/launch/test_health.py"),
    Mutant(
        "pipelines/tracking/store/registry.py",
        'or last == [now[DECISION], now.get(REASON, "")]',
        "",
        "tests/pipelines/tracking/test_registry.py -k sent_twice",
    ),
    Mutant("pipelines/job/outcome.py", "if n in v else", "if v.get(n) else", "tests/pipelines/display/test_outcome.py"),
    Mutant("pipelines/job/outcome.py", "if TAG in", "if not TAG in", "tests/pipelines/display/test_outcome.py"),
    Mutant("pipelines/job/outcome.py", "model.has_alias or ", "", "tests/pipelines/display/test_outcome.py"),
    Mutant(
        "pipelines/job/progress.py",
        "startswith(BESIDE_STEPS)",
        "isspace()",
        "tests/pipelines/display/test_training.py",
    ),
    Mutant("pipelines/job/progress.py", "-(-step //", "1 + (step //", "tests/pipelines/display/test_training.py"),
    Mutant("pipelines/job/progress.py", ">= EVALUATION_EVERY_S", ">= 0.0", "tests/pipelines/display/test_training.py"),
    Mutant("pipelines/job/progress.py", "step - began[0]", "step", "tests/pipelines/display/test_training.py"),
    Mutant(RATES, "(step + 1) / warmup_steps", "step / warmup_steps", T_RATES),
    Mutant(RATES, "total_steps - 1 - warmup_steps", "total_steps - warmup_steps", T_RATES),
    Mutant(RATES, "total_steps - 1 - top", "total_steps - top", T_RATES),
    Mutant(RATES, "CYCLE_RISE * total_steps) - 1", "CYCLE_RISE * total_steps)", T_RATES),
    Mutant(RATES, "if without < rule.patience:", "if without <= rule.patience:", T_RATES),
    Mutant(RATES, "max(least, state.share * rule.factor)", "state.share * rule.factor", T_RATES),
    Mutant(RATES, "0 <= share < math.inf", "0 <= share", T_RATES),
    Mutant(RATES, "if first != again:", "if False:", T_RATES),
    Mutant(OWN_OPTIMIZER, "if not _close(_resumed(optim), whole):", "if False:", T_OWN_OPTIMIZER),
    Mutant(
        OWN_OPTIMIZER, "zip(*halves, strict=True)], whole)", "zip(*halves, strict=True)], halves[0])", T_OWN_OPTIMIZER
    ),
    Mutant("training/parallel/state.py", "state[key] = saved[", "saved[", T_OWN_OPTIMIZER),
    Mutant("training/parallel/state.py", "parameter.detach().copy_(value)", "pass", T_OWN_OPTIMIZER),
    Mutant(LOSS, "weight_N = grad_N.to(norm_N.dtype) * kept_N", "weight_N = grad_N.to(norm_N.dtype)", T_LOSS),
    Mutant(LOSS, "return loss_N.masked_fill_(~kept_N, 0.0)", "return loss_N", T_LOSS),
    Mutant(LOSS, "new_full((len(chunk_CV), 1), -1.0)", "new_full((len(chunk_CV), 1), 1.0)", T_LOSS),
    Mutant(SCHEDULES, "(2 if per_rank > 1 and not split else 1) * hops", "hops", T_SCHEDULES),
    Mutant(SCHEDULES, "if split and done >= rank:", "if split and done >= rank + 1:", T_SCHEDULES),
    # Order: which row is in which global batch.
    Mutant(
        ORDER,
        "np.clip(rest - turn_of_lane * block, 0, block)",
        "np.clip(rest - turn_of_lane * block, 0, block - 1)",
        T_ORDER,
    ),
    Mutant(ORDER, "left_first = (lane + epoch) % 2 == 1", "left_first = lane % 2 == 1", T_ORDER),
    Mutant(ORDER, "self.epoch, self.lane, group, 0)", "0, self.lane, group, 0)", T_ORDER),
    Mutant(ORDER, "if config.block_rows else _block", "if False else _block", T_ORDER),
    Mutant(ORDER, "(row if own_turn else 0)", "0", T_ORDER),
    Mutant(ORDER, "(global_batch % (lanes * block) or lanes * block > rows)", "lanes * block > rows", T_ORDER),
    Mutant(ORDER, "self.epoch, self.lane, window, 1)", "self.epoch, self.lane, 0, 1)", T_ORDER),
    Mutant(ORDER, "range(plan.lanes * rank // size,", "range(plan.lanes * rank // size + 1,", T_ORDER),
    Mutant(ORDER, 'self.rows if self.config.tail == "pad" else whole', "whole", T_ORDER),
    Mutant(ORDER, "for step in range(1, lanes + 1) if gcd(step, lanes) == 1", "for step in (1,)", T_ORDER),
    Mutant(
        "training/data/epochs.py",
        "end = (epoch + 1) * self.steps if steps is None",
        "end = epoch * self.steps if steps is None",
        "tests/training/data/test_epochs.py",
    ),
    # Reader and audit: that the rows of the order are those decoded.
    Mutant(
        READER,
        "(each.lane.piece_rows(group, each.start, each.stop), each.places)",
        "(np.arange(each.start, each.stop), each.places)",
        f"{T_READER} {T_AUDIT}",
    ),
    Mutant(
        READER,
        "order.samples(begin, end) < plan.rows",
        "order.samples(begin, end) <= plan.rows",
        f"{T_READER} {T_AUDIT}",
    ),
    Mutant(READER, "part[SAMPLE] = own", "part[SAMPLE] = own * 0", "tests/training/models/test_dropout.py"),
    Mutant(AUDIT_LOG, "batch.ids[batch.real_rows()]", "batch.ids", T_AUDIT),
    Mutant(
        AUDIT,
        "ids[1:][ids[1:] == ids[:-1]]",
        "ids[:0]",
        T_AUDIT,
        "a repeated row makes its step another than the order's, which is reported too",
    ),
    Mutant(
        AUDIT,
        '("steps whose rows are not those the order gives them", moved)',
        '("steps whose rows are not those the order gives them", [])',
        T_AUDIT,
    ),
    Mutant(AUDIT, "if len(set(ranks)) < found[0].size:", "if False:", T_AUDIT),
    Mutant(
        AUDIT,
        "if (count := due - sum(number < due for number in found)) > 0:",
        "if (count := due - len(found)) > due:",
        T_AUDIT,
    ),
    Mutant(
        AUDIT, "-(-expected.steps // expected.steps_per_epoch)", "expected.steps // expected.steps_per_epoch", T_AUDIT
    ),
    Mutant(
        AUDIT_LOG,
        "if min(epoch, step, global_rows, count) < 0 or end > len(numbers):",
        "if end > len(numbers):",
        T_AUDIT,
    ),
    Mutant("pipelines/cli/audit.py", "if problem := damage(", "if problem := '' and damage(", T_AUDIT_RUN),
    Mutant("pipelines/cli/audit.py", "if number > newest.step", "if number < newest.step", T_AUDIT_RUN),
    # Checkpoints.
    Mutant(POLICY, "by_step[-max(keep.last, 1) :]", "by_step[-keep.last :]", T_POLICY),
    Mutant(POLICY, 'sign = 1.0 if mode == "min" else -1.0', "sign = 1.0", T_POLICY),
    Mutant(POLICY, "metric is not None and math.isfinite(metric)", "metric is not None", T_POLICY),
    Mutant(CATALOG, "if digest(content) != expected:", "if False:", f"{T_CHECKPOINT} {T_DAMAGE}"),
    Mutant(
        CATALOG, 'if folder.sha256(path, on_progress) != want["sha256"]:', "if False:", f"{T_CHECKPOINT} {T_DAMAGE}"
    ),
    Mutant(
        PLAN,
        "if have != math.prod(shape) or _overlap(chunks, len(shape)):",
        "if have != math.prod(shape):",
        f"{T_CHECKPOINT} {T_DAMAGE}",
    ),
    # The loop.
    Mutant(LOOP, "value < best - min_delta if", "value < best if", T_LOOP),
    Mutant(LOOP, "if not math.isfinite(value):\n        return False", "if False:\n        return False", T_LOOP),
    Mutant(LOOP, "stopped_early=without >= stop.patience", "stopped_early=without > stop.patience", T_LOOP),
    Mutant(
        LOOP,
        "if state.skipped_in_a_row > most:",
        "if state.skipped_steps > most:",
        T_LOOP,
    ),
    # What follows a failure.
    Mutant(
        ELASTIC, "if in_a_row(history) >= policy.max_attempts:", "if len(history) >= policy.max_attempts:", T_ELASTIC
    ),
    Mutant(ELASTIC, "outcome.from_step >= furthest", "outcome.from_step > furthest", T_ELASTIC),
    Mutant(
        ELASTIC,
        "min(slots, policy.world) // policy.multiple_of * policy.multiple_of",
        "min(slots, policy.world)",
        T_ELASTIC,
    ),
    Mutant(ELASTIC, "before = outcome.step is None or outcome.step <= outcome.from_step", "before = True", T_ELASTIC),
    Mutant(ELASTIC, 'second.cause in ("exception", "exit", "gpu memory", "gpu error") and', "", T_ELASTIC),
    Mutant(ELASTIC, "wait_s = 0.0 if last.cause in PLANNED else", "wait_s =", T_ELASTIC),
    Mutant(ELASTIC, "policy.cool_down_s * 2 ** (min(times, MOST_DOUBLINGS) - 1)", "policy.cool_down_s", T_ELASTIC),
    # Text files.
    Mutant(CSV_FILE, "csv.field_size_limit(BLOCK_BYTES)", "csv.field_size_limit()", T_CSV_FILE),
    Mutant(CSV_FILE, 'data + b"\\n" if unended else data', "data", T_CSV_FILE),
    Mutant(JSON_FILE, "self.other_case[prefix + key] =", "alike[0] =", T_JSON_FILE),
    Mutant(JSON_FILE, "if len(found) < len(pairs):", "if not found:", T_JSON_FILE),
    # Partitions.
    Mutant(
        PREDICATE,
        "return self.decides if self.decides in found else None if None in found else not self.decides",
        "return None if None in found else self.decides if self.decides in found else not self.decides",
        T_PREDICATE,
    ),
    Mutant(PREDICATE, "return None if found is None else not found", "return not found", T_PREDICATE),
    Mutant(PARTITIONS, "if self.keep(child.values):", "if self.keep(child.values) or True:", T_PARTITIONS),
    Mutant(PARTITIONS, 'errors="strict"', 'errors="replace"', T_PARTITIONS),
    Mutant(
        FILE_TASK, "pc.not_equal(values, value), True)", "pc.not_equal(values, value), False)", f"{T_FILES} -k same"
    ),
    # Features, checks and splits.
    Mutant(
        FEATURES,
        "_code_of.get(text, UNSEEN_CODE)",
        "_code_of.get(text, NULL_CODE)",
        T_NUMPY,
    ),
    Mutant(FEATURES, "(self._fill - self._mean) / self._std, where=null", "0.0, where=null", T_NUMPY),
    Mutant(FEATURES, "np.log1p(np.where(values < 0.0, 0.0, values))", "np.log1p(values)", T_NUMPY),
    Mutant(FEATURES, "np.copyto(made, self.null, where=null)", "np.copyto(made, UNSEEN_CODE, where=null)", T_NUMPY),
    Mutant(FEATURES, "self._mean, dtype=np.float64)", "self._mean, dtype=np.float32)", T_NUMPY),
    Mutant(FEATURES, 'dtype=np.int64), mode="clip"', 'dtype=np.int64), mode="wrap"', T_NUMPY),
    Mutant(CONVERT, "if np.isnat(moments).any():", "if False:", T_CONVERT),
    Mutant(FOOTERS, 'physical_type == "INT96"', 'physical_type == "INT64"', "tests/etl/sources/files/test_footers.py"),
    Mutant(MANIFEST, 'c.role != "input" and c.dtype', "c.dtype", "tests/etl/columns/test_table.py"),
    Mutant(EVALUATE, "fill_null(len(coded.dictionary))", "fill_null(0)", "tests/pipelines/evaluation/test_evaluate.py"),
    Mutant(MANIFEST, 'is_date == (stored.logical == "date") and ', "", "tests/conf/test_stored.py"),
    Mutant(
        STATE,
        "(spread or 1.0) if feature.scale else 1.0",
        "spread if feature.scale else 1.0",
        f"{T_NUMPY} {T_FEATURES}",
    ),
    # Parts and windows: exact statistics, what decides a part, rows numbered through.
    Mutant(STATISTICS, "- exact**2", "", f"{T_STATISTICS} {T_FEATURES}"),
    Mutant(STATISTICS, "x = x[~np.isnan(x)]", "x = np.nan_to_num(x, nan=0.0)", T_STATISTICS),
    Mutant(STATISTICS, "CLOSE_LIMBS * LIMB_BITS - 53", "CLOSE_LIMBS * LIMB_BITS - 52", T_STATISTICS),
    Mutant(STATISTICS, "int(product) << place + other", "int(product) << 2 * place", T_STATISTICS),
    Mutant(STATISTICS, "2 * a * c + b * b", "2 * a * c", T_STATISTICS),
    Mutant(STATISTICS, "finite = x[np.isfinite(x)] + 0.0", "finite = x[np.isfinite(x)]", T_STATISTICS),
    Mutant(INTERVAL, "dt.time(), ZoneInfo(zone)).astimezone(dt.UTC)", "dt.time(), dt.UTC)", T_INTERVAL),
    Mutant(PARTS, '"numeric": {"fill", "scale"}', '"numeric": {"fill", "scale", "transform"}', T_PARTS),
    Mutant(PARTS, "prints, cut, block", "prints, block", f"{T_PARTS} {T_WINDOW}"),
    Mutant(PARTS, "    storage.delete(folder)\n    return found", "    return found", T_PARTS),
    Mutant("etl/build.py", "offset += sum(file.rows for file in own)", "pass", T_WINDOW),
    Mutant(WINDOW, "if label >= first]", "if label > first]", T_WINDOW),
    Mutant(WINDOW, "if found.measured != wanted:", "if False:", T_WINDOW),
    Mutant(PARTS, "snapshots[-1] for name, snapshots", "snapshots[0] for name, snapshots", T_PARTS),
    Mutant(
        PARTS,
        "new)\n        for snapshot in snapshots:\n            snapshot.check_unchanged()",
        "new)",
        "tests/spark/test_etl_window_inputs.py -k changes",
    ),
    Mutant(EVALUATE, "== UNSEEN_CODE", "== 0", "tests/pipelines/evaluation/test_evaluate.py"),
    Mutant(CLI, "error, BrokenPipeError) and _reader_has_gone()", "error, BrokenPipeError)", f"{T_CLI} -k connection"),
    Mutant(CLI, "        return Exit.PIPE", "        return Exit.OK", f"{T_CLI} -k reader"),
    Mutant(
        "etl/windows/independence.py",
        ", *[column.isNull() for column in columns])",
        ")",
        "tests/spark/test_etl_independence.py",
    ),
    Mutant(
        "training/data/source.py",
        "return with_offset(table, file), ",
        "return table, ",
        "tests/training/data/test_source.py",
    ),
    # Warm start: weights belong to values, not to codes.
    Mutant(WARM, "place.get(value, -1)", "place.get(value, 1)", T_WARM),
    Mutant(WARM, 'new["std"] / old["std"], (new', 'old["std"] / new["std"], (new', T_WARM),
    Mutant(WARM, "known = out[FIRST_CODE:]", "known = out[0:]", T_WARM),
    Mutant(WARM, "root = s[:new].sqrt()", "root = s[:new]", T_WARM),
    Mutant(TABULAR, "order = [place[column]", "order = [self.numeric_names.index(column)", T_WARM),
    Mutant(
        "training/model/prepare.py",
        "config.warm_start is not None and not continued",
        "config.warm_start is not None",
        "tests/training/test_warm_start_run.py",
    ),
    Mutant("conf/storage.py", "os.link(part, target)", "os.replace(part, target)", "tests/conf/test_storage.py"),
    Mutant("conf/storage.py", "start + LOOK_UP_AT_ONCE]", "start + 1]", "tests/conf/test_storage.py"),
    Mutant("conf/stored.py", "min_length=64, max_length=64", "max_length=64", "tests/conf/test_stored.py"),
    Mutant("etl/shards/layout.py", "cut.below or -1 for", "cut.below for", "tests/etl/shards/test_layout.py"),
    Mutant("etl/shards/layout.py", "{value} > {at} OR", "{value} >= {at} OR", "tests/spark/test_etl_shard.py -k cuts"),
    Mutant(ROWS, 'key, levels=["row"])', "key)", f"{T_ROWS} -k later_passes"),
    Mutant(ROWS, "if len(below) == len(sides):", "if not sides:", f"{T_ROWS} -k columns_of_files"),
    Mutant(ROWS, 'F.concat_ws("/", PORTION, SPLIT)', 'F.concat_ws("/", F.lit(0), SPLIT)', T_AT_ONCE),
    Mutant("etl/session.py", "not 0 < rows * row_bytes <= MOST_BATCH_BYTES:", "not rows > 0:", f"{T_ROWS} -k batches"),
    Mutant("etl/sources/files/read.py", "map(quoted, dict.from", "list(dict.from", f"{T_FILES} -k any_name"),
    Mutant(
        "etl/sources/files/read.py",
        "(quoted(name) for name in scan",
        "(name for name in scan",
        f"{T_FILES} -k any_name",
    ),
    Mutant(
        "etl/sources/files/read.py", "if len(folders) > 1 or", "if len(folders) > 9 or", f"{T_ROWS} -k later_passes"
    ),
    Mutant(
        "etl/shards/shard.py",
        "opened = {split: {0: 0} for",
        "opened = {split: {0: 1} for",
        "tests/spark/test_etl_shard.py",
    ),
    Mutant(PARTS, "key=lambda one: [(f.name, f.dataType)", "key=lambda one: [(f.name, 0)", T_AT_ONCE),
    Mutant(WINDOW, "+ size <= BYTES_AT_ONCE:", "<= BYTES_AT_ONCE:", f"{T_WINDOW} -k at_once"),
    Mutant(
        CHECKS, "F.coalesce(F.expr(check.sql), F.lit(False))", "F.coalesce(F.expr(check.sql), F.lit(True))", T_CHECKS
    ),
    Mutant(CHECKS, "F.row_number().over(window) > 1", "F.row_number().over(window) > 2", T_CHECKS),
    Mutant(
        CHECKS,
        'F.col(check.column).isNotNull() & F.col(f"{name}_hit").isNull()',
        'F.col(f"{name}_hit").isNull()',
        T_CHECKS,
    ),
    Mutant(CHECKS, "[column > check.max]", "[column >= check.max]", T_CHECKS),
    Mutant(CHECKS, '"passed": share <= limit,', '"passed": share < limit,', T_CHECKS),
    Mutant(
        SPLIT, "edges.append(round(total * BUCKETS))", "edges.append(round(share * BUCKETS))", T_RULES + " " + T_CHECKS
    ),
    Mutant(
        SPLIT,
        "F.when(column >= F.lit(text)",
        "F.when(column > F.lit(text)",
        T_CHECKS,
    ),
    Mutant(DELTA, "if gone := self.files.gone():", "if gone := self.files.gone()[1:]:", T_DELTA),
    Mutant(DELTA_LOG, "protocol.min_reader_version == 2 or", "True or", T_DELTA_LOG),
    Mutant(DELTA_LOG, "at_ms, key=time_ms)", "at_ms - 1, key=time_ms)", T_DELTA_LOG),
    Mutant(DELTA_LOG, "DeltaFile(unquote(uri), size", "DeltaFile(uri, size", T_DELTA_LOG),
    Mutant(DELTA_LOG, "max(self.commits[version], latest + 1)", "self.commits[version]", T_DELTA_LOG),
    Mutant(DELTA_LOG, "if oldest - 1 <= v <= latest]", "if v <= latest]", T_DELTA_LOG),
    Mutant(LAKE_FILES, "_digest(f.deleted)]", "len(f.deleted)]", "tests/etl/sources/test_lake_files.py"),
    Mutant(LAKE_FILES, '[FILE, ROW], "left_anti"', '[ROW], "left_anti"', T_LAKE_ROWS),
    Mutant(LAKE_FILES, 'F.replace(uri, F.lit("+"), F.lit("%2B"))', "uri", T_LAKE_ROWS),
    Mutant(LAKE_FILES, "if want.dataType != ", "if want.name != want.name and ", T_LAKE_ROWS),
    Mutant(
        ICE_TABLE, "return snapshot, snapshot.schema_id", "return snapshot, metadata.current_schema_id", T_ICE_TABLE
    ),
    Mutant(ICE_TABLE, "entry.timestamp_ms <= (", "entry.timestamp_ms < (", T_ICE_TABLE),
    Mutant(ICE_TABLE, "found[max(found)]", "max(found.values())", T_ICE_TABLE),
    Mutant(ICE_WHERE, "OPPOSITE[compare] if negated else compare", "compare", T_ICE_WHERE),
    Mutant(ICE_WHERE, "test.decides != negated", "test.decides", T_ICE_WHERE),
    Mutant(ICE_WHERE, "Fraction(value) * 10**scale", "Fraction(value.scaleb(scale))", T_ICE_WHERE),
    Mutant(
        ICE_SCHEMA,
        '_field(f"__field_{field_id(f)}", field_id',
        "_field(f.name, field_id",
        "tests/spark/test_etl_iceberg.py",
    ),
    # Sources that only Spark can pin.
    Mutant(JDBC, "; SET TRANSACTION SNAPSHOT '{snapshot}'", "", f"{T_JDBC} -k eight"),
    Mutant(JDBC, 'f"-c lock_timeout={LOCK_LIMIT_S * 1000}"', '""', f"{T_JDBC} -k to_be_truncated"),
    Mutant(JDBC, "SET TIME ZONE 'UTC'", "SELECT 1", f"{T_JDBC} -k zone"),
    Mutant(JDBC, '"preferTimestampNTZ": "true"', '"preferTimestampNTZ": "false"', f"{T_JDBC} -k zone"),
    Mutant("etl/sources/landing.py", "(*rows.columns, *signs)", "(*rows.columns)", "tests/etl/sources/test_landing.py"),
    Mutant(QUERY_FILES, "(plan.children(), plan.subqueries())", "(plan.children(),)", f"{T_CATALOG} -k all_tables"),
    # What gc deletes, and what it must not.
    Mutant(KEEPING, "number <= rule.keep", "number < rule.keep", T_KEEPING),
    Mutant(KEEPING, "days < rule.days", "days <= rule.days", T_KEEPING),
    Mutant(KEEPING, "if among_newest or is_young:", "if among_newest:", T_KEEPING),
    Mutant(KEEPING, "if among_newest or is_young:", "if among_newest and is_young:", T_KEEPING),
    Mutant(KEEPING, "number += counted", "number += 1", T_KEEPING),
    Mutant(KEEPING, "among_newest = counted and ", "among_newest = ", T_KEEPING),
    Mutant(KEEPING, "            runs[folder] = why\n", "            pass\n", T_KEEPING),
    Mutant(KEEPING, "elif not model.job and model.fingerprint:", "elif False:", T_KEEPING),
    Mutant(KEEPING, "            datasets[model.fingerprint] = why\n", "            pass\n", T_KEEPING),
    Mutant(KEEPING, "for job in tracked.tagged_jobs if _is_of(job, recipe)", "for job in ()", T_KEEPING),
    Mutant(KEEPING, "tracked.tagged_jobs if _is_of(job, recipe)", "tracked.tagged_jobs", T_KEEPING),
    Mutant(KEEPING, "elif can_continue(run, inventory.runs):", "elif is_running(run):", T_KEEPING),
    Mutant(KEEPING, "run.alive is not False", "run.alive", T_KEEPING),
    Mutant(KEEPING, "later.path > run.path", "later.path != run.path", T_KEEPING),
    Mutant(KEEPING, 'and later.status == "finished"', 'and later.status != "running"', T_KEEPING),
    Mutant(
        KEEPING, "datasets = dict[str, str](), dict(inventory.others)", "datasets = dict[str, str](), {}", T_KEEPING
    ),
    Mutant(KEEPING, "if d.path in old and d.fingerprint not in protected.datasets", "if d.path in old", T_KEEPING),
    Mutant(KEEPING, "if p.path in old and p.path not in needed", "if p.path in old", T_KEEPING),
    Mutant(KEEPING, "if dataset.path not in gone for", "for", T_KEEPING),
    Mutant(KEEPING, "if protected.all_parts:", "if False:", T_KEEPING),
    Mutant(KEEPING, "if protected.all_datasets:", "if False:", T_KEEPING),
    Mutant(KEEPING, "free = [run for run in newest if run.path not in protected.runs]", "free = newest", T_KEEPING),
    Mutant(KEEPING, "left = [run for run in free if run.path not in old]", "left = free", T_KEEPING),
    Mutant(KEEPING, "return not protected.all_parts", "return True", T_KEEPING),
    Mutant(KEEPING, "[2] not in needed", '[2] != ""', T_KEEPING),
    Mutant(KEEPING, "elif pointer.path not in there:", "elif False:", T_KEEPING),
    Mutant(KEEPING, 'pointer.path.startswith(f"{path}/")', "pointer.path.startswith(path)", T_KEEPING),
    Mutant(GC, "        storage.rename_file(", "        str(", T_GC),
    Mutant(GC, "if not self.delete_pointers(inside):", "if False:", T_GC),
    Mutant(GC, 'if deletion.kind == "part" or deletion.path.endswith', "if deletion.path.endswith", T_GC),
    Mutant(GC, "if deletion.path in self._needed:", "if False:", T_GC),
    Mutant(GC, "if not name.endswith(DELETED):", "if True:", T_GC),
    Mutant(GC, "if not self._dry_run:\n                delete_folder", "if True:\n                delete_folder", T_GC),
    Mutant(CLEANUP, '.lower() != "false"', '.lower() != "no"', T_GC),
    Mutant(CLEANUP, "if self._experiment is None and knows_runs:", "if False:", T_GC),
    Mutant(
        CLEANUP,
        " and source_run_id = '{run}'",
        "",
        "tests/pipelines/tracking/test_mlflow_store.py -k deleted_checkpoints",
    ),
    # A sweep's space and study.
    Mutant(SPACE, "if not self.low < self.high:", "if False:", T_SPACE),
    Mutant(SPACE, "< 2:\n                raise", "< 1:\n                raise", T_SPACE),
    Mutant(SPACE, "self.low <= 0 or self.step is not None", "self.low < 0 or self.step is not None", T_SPACE),
    Mutant(SPACE, "if count <= MOST_CORNERS:", "if True:", T_SPACE),
    Mutant(SPACE, 'known != (spec.mode == "max")', "False", T_SPACE),
    Mutant(SPACE, 'metric, "max" if known else "min"', 'metric, "min" if known else "max"', T_SPACE),
    Mutant(SPACE, "+ 1e-9) * self.step", "+ 1.0) * self.step", T_SPACE),
    Mutant(SWEEP_JOB, "*table_problems(config, examined).recipe]", "]", T_SPACE),
    Mutant(SWEEP_JOB, "if len(places) == count:", "if False:", T_SPACE),
    Mutant(STUDY, "spec.seed + len(self._study.trials)", "spec.seed", T_STUDY),
    Mutant(STUDY, "t.params and t.number not in replaced]", "t.params]", T_STUDY),
    Mutant(STUDY, 'sign = -1 if self.mode == "max" else 1', "sign = 1", T_STUDY),
    Mutant(STUDY, "self._steps.index(step) + 1", "step", T_STUDY),
    Mutant(STUDY, "STEPS: left.user_attrs.get(STEPS, [])}", "STEPS: []}", T_STUDY),
    Mutant(STUDY, "            self._study.enqueue_trial(left.params, attributes)\n", "            pass\n", T_STUDY),
    Mutant(STUDY, '"maximize" if mode == "max" else "minimize"', '"minimize"', T_STUDY),
    Mutant("pipelines/job/train_step.py", "and _falls_behind(watch, event):", "and False:", T_SWEEP),
    Mutant(SWEEP_JOB, '"train.test_split": None,', "", T_SWEEP),
    # What MLflow's lists and pages show of jobs.
    Mutant(DESCRIBE, 'if key.partition(".")[0] not in NOT_COMPARED]', "]", T_DESCRIBE),
    Mutant(DESCRIBE, 'if key != "fingerprint" and not key.startswith("etl.")]', "]", T_DESCRIBE),
    Mutant(DESCRIBE, "if len(keys) > MOST_CHANGES else []", "if True else []", T_DESCRIBE),
    Mutant(DESCRIBE, "{', '.join(shown[:MOST_CHANGES])}", "{', '.join(shown)}x", T_DESCRIBE),
    Mutant(STORE, "if HEARTBEAT in client.get_run(run).data.tags:", "if False:", f"{T_BROWSING} -k scores"),
    Mutant(DESCRIBE, '(" problem", " problems")', '(" problem",)', T_DESCRIBE),
    Mutant(DESCRIBE, "return rest if first.startswith(begins) else note", "return note", T_DESCRIBE),
    Mutant(DESCRIBE, "note.partition(CARD_BEGINS)[0].strip()", "note", T_DESCRIBE),
    Mutant(DESCRIBE, "card if len(card) <= LONGEST_CARD else", "card if True else", T_DESCRIBE),
    Mutant("pipelines/tracking/points.py", 'if metric.partition("/")[0] in PLUMBING', "if False", T_DESCRIBE),
    Mutant(CHECKOUT, 'if "=" not in word)', ")", T_DESCRIBE),
    Mutant(CHECKOUT, "commit.endswith(CHANGED)", "True", T_DESCRIBE),
    Mutant(SHOWN, "if found and found[0].data.params else", "if found else", f"{T_BROWSING} -k names_say"),
    Mutant(SHOWN, " and attributes.start_time < {run.info.start_time}", "", f"{T_BROWSING} -k names_say"),
    Mutant(STORE, "            self._shown.forget_failure(found)\n", "", f"{T_BROWSING} -k continued"),
    Mutant(STORE, "if op.scores and not model.metrics:", "if op.scores:", f"{T_BROWSING} -k scores"),
    Mutant(STORE, "        self._last.pop(self.runs[op.key], None)", "        self._last", f"{T_BROWSING} -k scores"),
    Mutant(SHOWN, "if not has_links(note, recipe):", "if False:", f"{T_BROWSING} -k experiment"),
    # What a browser is shown of a recipe's dates.
    Mutant(VIEWS, '{DATE}`",\n        "orderByAsc": False', '{DATE}`",\n        "orderByAsc": True', T_VIEWS),
    Mutant(VIEWS, "if len(each) == 2)", "if len(each) >= 2)", T_VIEWS),
    Mutant(VIEWS, '(name != first, name != "loss", name)', "(name != first, name)", T_VIEWS),
    Mutant(VIEWS, '{"xAxisKey": "time", "lineSmoothness"', '{"xAxisKey": "step", "lineSmoothness"', T_VIEWS),
    Mutant(VIEWS, "line if each.startswith(start) else each for", "line for", T_VIEWS),
    Mutant(VIEWS, 'return f"{recipe}-nights"', 'return "nights"', T_VIEWS),
    Mutant(
        SHOWN,
        "for name, value in wanted.items() if name not in experiment.tags",
        "for name, value in wanted.items()",
        "tests/pipelines/tracking/test_mlflow_store.py -k views",
    ),
    Mutant(
        "pipelines/tracking/store/registry.py",
        "if card and not card.startswith(CARD_BEGINS):",
        "if False:",
        "tests/pipelines/tracking/test_registry.py -k nights",
    ),
    Mutant(
        "pipelines/job/job.py",
        "drift_metrics(result.promotion.drift if result.promotion else [])",
        "{}",
        "tests/pipelines/test_job.py -k night",
    ),
    # Who is told what.
    Mutant(EVENTS, 'previous == "failed" else None', 'previous != "ok" else None', T_EVENTS),
    Mutant(EVENTS, "if code in QUIET:\n        return None\n    if decision", "if decision", T_EVENTS),
    Mutant(EVENTS, 'if decision == "held" and code in (Exit.OK, Exit.QUALITY):', 'if decision == "held":', T_EVENTS),
    Mutant(EVENTS, 'code in (Exit.OK, Exit.QUALITY) else "/fail"', 'code == Exit.OK else "/fail"', T_EVENTS),
    Mutant(EVENTS, "if equals and value and is_secret_name(key)", "if False", T_EVENTS),
    Mutant(EVENTS, "redacted(asdict(self))", "asdict(self)", T_EVENTS),
    Mutant(NOTIFY, "event.event in config.events", "event.event", T_NOTIFY),
    Mutant(NOTIFY, "build_opener(_NoRedirect)", "build_opener()", T_NOTIFY),
    Mutant(NOTIFY, "max(0.0, deadline + 0.5 - time.monotonic())", "30", T_NOTIFY),
    Mutant(NOTIFY, "if outcome is not None and not (", "if outcome is None and not (", T_NOTIFY),
    Mutant(NOTIFY, "None if last is None or is_before(end, last.ds) else", "None if last is None else", T_NOTIFY),
    Mutant(NOTIFY, 'if command[1:2] == ["predict"] else OUTCOME', "if False else OUTCOME", T_NOTIFY),
    Mutant(EVALUATE, "    if bad:\n", "    if False:\n", T_EVALUATE),
    Mutant(f"{PREDICT}/score.py", "use_dictionary=texts, ", "", "tests/pipelines/predict/test_score.py"),
    Mutant(f"{PREDICT}/score.py", "if not finite.all():", "if False:", f"{T_PREDICT} -k finite"),
    Mutant(NOTIFY, '{at_s:.0f}.".encode() + body', '{at_s:.0f}.".encode()', T_NOTIFY),
    Mutant(NOTIFY, "(here.host, here.pid, here.start_ticks)]", "(r.host, r.pid, r.start_ticks)]", T_NOTIFY),
    Mutant(NOTIFY_BLOCK, 'parts.scheme == "http" and host not in http_hosts', "False", T_NOTIFY_BLOCK),
    Mutant(NOTIFY_BLOCK, "is_secret_url(self.url)", "False", T_NOTIFY_BLOCK),
    Mutant(COST, "rank_0.world * rank_0.threads_per_rank", "rank_0.world", T_COST),
    Mutant(COST, 'timings["launch_s"] + timings["train_s"]', 'timings["train_s"]', T_COST),
    # A model that goes anywhere.
    Mutant(SERVING, "named if codes and", "named if codes or", T_SERVING),
    Mutant(f"{MODEL}/export.py", "if out.exists() else []", "if False else []", T_EXPORT),
    Mutant(f"{MODEL}/export.py", "self._outputs(self.model", "(self.model", T_EXPORT),
    Mutant(f"{MODEL}/export.py", "{1: Dim.DYNAMIC} if source.longest else {}", "{}", T_EXPORT),
    Mutant(f"{MODEL}/export.py", "or not np.allclose(", "or False and not np.allclose(", T_EXPORT),
    Mutant(f"{MODEL}/export.py", "        if problem:", "        if False:", T_EXPORT),
    Mutant(SERVING, "check_finite(scores, rows)", "pass", f"{T_SERVING} -k finite"),
    Mutant("conf/blocks/etl.py", "key=instants.__getitem__", "key=str", "tests/conf/schedule/test_dated.py"),
    Mutant("conf/blocks/etl.py", "< len(instants)", "< 0", "tests/conf/test_config.py"),
    Mutant("pipelines/validate/recipe.py", "or not runs_here(config):", "or False:", f"{T_VALIDATE_TABLES} -k gpu"),
    Mutant(SERVING, "if wanted & {*output_names(state)}]", "]", T_SERVING),
    Mutant(SERVING, "for name in self.raw.optional - {*rows}", "for name in ()", T_SERVING),
    Mutant(SERVING, '"required": name not in raw.optional', '"required": True', T_SERVING),
    Mutant(RAW_FEATURES, 'array.dtype.kind in "OUT"', 'array.dtype.kind in "UT"', T_SERVING),
    Mutant(TABULAR, "self.height.transpose(0, 1)", "self.height", "tests/training/models/test_tabular.py"),
    Mutant(f"{MODEL}/sources.py", "nested=top != OURS", "nested=False", T_PORTABLE_SOURCES),
    Mutant(f"{MODEL}/sources.py", "waiting += parents(name)", "pass", T_PORTABLE_SOURCES),
    Mutant(f"{MODEL}/sources.py", "version(name).partition('+')[0]", "version(name)", T_PORTABLE_SOURCES),
    Mutant(f"{MODEL}/sources.py", "if top == OURS and is_package else", "if False else", T_PORTABLE_SOURCES),
    Mutant(f"{MODEL}/sample.py", "passed[name] for name", "name for name", T_PORTABLE_SAMPLE),
    Mutant(f"{MODEL}/sample.py", "count - sum(map(len, found))", "count", T_PORTABLE_SAMPLE),
    Mutant(f"{MODEL}/check.py", "max(1.0, abs(wanted))", "max(1e6, abs(wanted))", T_PORTABLE_CHECK),
    Mutant(f"{MODEL}/check.py", "if expected.column_names != list(found)", "if False", T_PORTABLE_CHECK),
    Mutant(f"{MODEL}/check.py", "is_relative_to(folder.resolve())", "is_absolute()", T_PORTABLE_CHECK),
    Mutant(f"{MODEL}/check.py", "if name not in NOT_PASSED_ON", "if name", T_PORTABLE_CHECK),
    Mutant("pipelines/run/scratch.py", "not (folder / LOCK).is_file()", "False", "tests/pipelines/test_scratch.py"),
    Mutant("pipelines/run/scratch.py", "sweep(purpose)\n    while", "while", "tests/pipelines/test_scratch.py"),
    Mutant(
        "pipelines/cli/jobs.py", "sparkring predict {arguments.recipe}", "sparkring run {arguments.recipe}", T_RUN_DATE
    ),
    # Raw rows in Arrow, and batch scoring.
    Mutant(FEATURES, 'return self._type == "boolean"', "return True", T_NUMPY),
    Mutant(FEATURES, 'return self._type == "date"', "return True", T_NUMPY),
    Mutant(FEATURES, "kind != pa.uint64() and self._type", "self._type", T_NUMPY),
    Mutant(FEATURES, "array.type in PLAIN and array.type != pa.uint64()", "array.type in PLAIN", T_NUMPY),
    Mutant(RAW_FEATURES, "np.can_cast(values.dtype, dtype)", "True", T_NUMPY),
    Mutant(RAW_FEATURES, 'state["nulls"] == "refuse" and null is not None', "False", T_NUMPY),
    Mutant(SERVING, "from_pandas=nan_is_null or", "from_pandas=False and", T_SERVING),
    Mutant(SERVING, "{name: values[start:end] for", "{name: values for", T_SERVING),
    Mutant(PUBLISH, "elif not _exchange(new, old):", "else:", T_PUBLISH),
    Mutant(PUBLISH, 'found["name"] == root.name', "found", T_PUBLISH),
    Mutant(PUBLISH, "if path != MANIFEST and not PART_FILE", "if False and not PART_FILE", T_PUBLISH),
    Mutant(PUBLISH, "if path not in listed and PART_FILE", "if PART_FILE", T_PUBLISH),
    Mutant(f"{PREDICT}/score.py", "null & ~bad", "null", f"{T_PREDICT} -k without_refused"),
    Mutant(
        f"{PREDICT}/score.py",
        "task.about.columns(kept.num_rows)",
        "task.about.columns(batch.num_rows)",
        f"{T_PREDICT} -k refuses",
    ),
    Mutant(f"{PREDICT}/rows.py", '"window": 1, ', "", f"{T_PREDICT} -k interval"),
    Mutant(f"{PREDICT}/rows.py", "        rows = of_interval(", "        of_interval(", f"{T_PREDICT} -k interval"),
    Mutant(f"{PREDICT}/rows.py", 'block.on_missing_column == "fail"', "False", f"{T_PREDICT} -k wrong"),
    Mutant(f"{PREDICT}/job.py", "    check_own(target)\n", "", f"{T_PREDICT} -k others"),
    Mutant(f"{PREDICT}/job.py", "if not scored.rows_in:", "if False:", f"{T_PREDICT} -k wrong"),
    Mutant("conf/config.py", 'if ":" in reference}', "}", "tests/conf/test_config.py -k code"),
    Mutant("conf/config.py", "min(asked, max(1, split_rows))", "asked", "tests/conf/test_config.py -k rows"),
    Mutant("conf/config.py", " // self.parallel.accumulate", "", "tests/conf/test_config.py -k rows"),
    # Dates: arithmetic, templates, who may publish, what is done again.
    Mutant(DATES, "if given != interval_of(schedule, ds).start:", "if False:", T_DATES),
    Mutant(DATES, "if ds < schedule.begin:", "if ds <= schedule.begin:", T_DATES),
    Mutant(DATES, "if start > now:", "if start >= now:", T_DATES),
    Mutant(
        DATES,
        "return instant_of(schedule, local + count * DAY) if count",
        "return instant + count * DAY if count",
        T_DATES,
    ),
    Mutant(
        DATES, "return wall.replace(tzinfo=ZoneInfo(schedule.timezone))", "return wall.replace(tzinfo=dt.UTC)", T_DATES
    ),
    Mutant(DATED, "if request.end and (end", "if False and (end", T_DATED),
    Mutant(DATED, "if str(own[key]) != str(decided[key]):", "if False:", T_DATED),
    Mutant(DATED, "problems += misplaced(values)", "pass", T_DATED),
    Mutant(LEASE, "if state.released or is_running(state.holder, here) is False:", "if state.released:", T_LEASE),
    Mutant(LEASE, "if age_s < -CLOCK_STEP_S:", "if False:", T_LEASE),
    Mutant(LEASE, "if now is not None and now.version != found.version:", "if False:", f"{T_LEASE} -k watched"),
    Mutant(LEASE, "epoch=state.epoch + 1 if state else 1", "epoch=1", T_LEASE),
    Mutant(LEASE, "_wait_for_end(state, request.clock)", "pass", T_LEASE),
    Mutant(LEASE, "other.nonce == state.nonce", "other.epoch == state.epoch", T_LEASE),
    Mutant(CONDITIONAL, '{"IfNoneMatch": "*"}', "{}", T_CONDITIONAL),
    Mutant(CONDITIONAL, '{"IfMatch": version}', "{}", T_CONDITIONAL),
    Mutant(
        CONDITIONAL, "found is not None and found.data == data else None", "found is not None else None", T_CONDITIONAL
    ),
    Mutant(
        CONDITIONAL,
        "return self._write(data) if found is not None and found.version == version else None",
        "return self._write(data)",
        T_CONDITIONAL,
    ),
    Mutant(
        RUN_DATE,
        "if record is not None and is_done(record, options):\n            return record",
        "if False:\n            return record",
        T_RUN_DATE,
    ),
    Mutant(RUN_DATE, "stop_at_once(str(error), self.record)", "log.error(error)", f"{T_RUN_DATE} -k stopped_past"),
    Mutant(
        RUN_DATE,
        'if before is not None and before.status != "succeeded" else None',
        "if before is not None else None",
        T_RUN_DATE,
    ),
    Mutant(RUN_DATE, "job.options.in_time and is_late", "is_late", T_RUN_DATE),
    Mutant(PUBLICATION, "label < looked_at_from", "label <= looked_at_from", T_PUBLICATION),
    Mutant(PUBLICATION, "and deciding != earlier.parts_digest:", "and False:", T_PUBLICATION),
    Mutant(PUBLICATION, "if record.ds < ds and record.parts", "if record.parts", T_PUBLICATION),
    Mutant(
        BACKFILL,
        'trains = request.train == "each" or (request.train == "last" and is_newest)',
        "trains = True",
        T_BACKFILL,
    ),
    Mutant(BACKFILL, 'redo = request.reprocess != "none" or record.status != "failed"', "redo = True", T_BACKFILL),
    Mutant(BACKFILL, "promote=request.promote,", "promote=True,", T_BACKFILL),
    Mutant(BACKFILL, "if codes[step.ds] not in GOES_ON:", "if False:", T_BACKFILL),
    Mutant(
        "pipelines/schedule/status.py",
        "max(succeeded, key=lambda record: record.ds)",
        "max(succeeded, key=lambda record: record.finished_at)",
        "tests/pipelines/schedule/test_status.py",
    ),
    Mutant(
        "pipelines/schedule/upstream.py",
        "except (OSError, ValueError) as error:",
        "except ZeroDivisionError as error:",
        "tests/pipelines/schedule/test_upstream.py",
    ),
    Mutant(LINEAGE, 'if found.fingerprint != read["fingerprint"]', "if False", T_LINEAGE),
    Mutant(LINEAGE, "result.fingerprint != manifest.fingerprint", "False", T_LINEAGE),
    Mutant(LINEAGE, 'if found.state != "same":', "if False:", T_LINEAGE),
    Mutant(LINEAGE, "record.mlflow_run_id == mlflow_run_id", "record.mlflow_run_id", T_LINEAGE),
    # Gates: which model passes, and where the alias goes.
    Mutant(GATE_RULES, "value >= rule.threshold if better", "value > rule.threshold if better", T_GATE_RULES),
    Mutant(GATE_RULES, "ours >= champion + change if better", "ours > champion + change if better", T_GATE_RULES),
    Mutant(
        GATE_RULES, "rule.min_relative_change * np.abs(champion)", "rule.min_relative_change * champion", T_GATE_RULES
    ),
    Mutant(GATE_RULES, "np.where(champion == 0, LEAST_CHANGE,", "np.where(champion == 0, 0.0,", T_GATE_RULES),
    Mutant(GATE_RULES, "passed = bool(share >= rule.confidence)", "passed = bool(share >= 0.5)", T_GATE_RULES),
    Mutant(GATE_RULES, "return math.isfinite(value)", "return True", T_GATE_RULES),
    Mutant(
        GATE_RULES,
        "(rule.confidence or SLICE_CONFIDENCE)) / looks",
        "(rule.confidence or SLICE_CONFIDENCE))",
        T_GATE_RULES,
    ),
    Mutant(GATE_RULES, "counts >= promote.min_slice_rows", "counts >= 0", T_GATE_RULES),
    Mutant(
        GATE_SCORES,
        "[of(times if weights",
        "[of(random.permutation(times) if weights",
        T_GATE_SCORES,
    ),
    Mutant(
        DISTRIBUTIONS, "np.append(ranges[1], _others(current, now))", "np.append(ranges[1], (0, 0))", T_DISTRIBUTIONS
    ),
    Mutant(DISTRIBUTIONS, "np.log2(p[there] / q[there])", "np.log(p[there] / q[there])", T_DISTRIBUTIONS),
    Mutant(STATISTICS, "np.where(x < 0, -magnitude - 1, magnitude + 1)", "magnitude + 1", T_DISTRIBUTIONS),
    Mutant(DRIFT, "exceeded=value > rule.max", "exceeded=False", T_DRIFT),
    Mutant(DRIFT, 'for part in reference} if which != "all" else set()', "for part in reference}", T_DRIFT),
    Mutant(DRIFT, "exceeded=not why.absent", "exceeded=False", T_DRIFT),
    Mutant(CHAMPION, "with_features(dataset.manifest, features)", "dataset.manifest", T_CHAMPION),
    Mutant(CHAMPION, "return scores[order]", "return scores", T_CHAMPION, "one reader serves rows in their order"),
    Mutant(
        START,
        "number % retrain_every == 0",
        "number % retrain_every == 1",
        T_START,
        "another date of each period: as good, as long as it does not change",
    ),
    Mutant(START, 'block.after_correction == "scratch"', 'block.after_correction == "warm"', T_START),
    Mutant(START, "if run.exists(START):", "if False:", T_START),
    Mutant(
        "pipelines/schedule/backfill.py",
        '    check_folders(config, ["storage.runs"])  #',
        "    #",
        "tests/pipelines/schedule/test_backfill.py -k cannot_be_stored",
    ),
    Mutant(
        "conf/rules/promotion.py",
        "elif config.etl is not None:\n            yield from (f",
        "elif False:\n            yield from (f",
        "tests/conf/rules/test_promotion.py",
    ),
    Mutant(GATE, "if not self.job.publication.may_promote:", "if False:", f"{T_GATE} -k backfill"),
    Mutant(GATE, "Seen([*self.candidate.lost, *reasons_of(rules)]", "Seen(reasons_of(rules)", f"{T_GATE} -k backfill"),
    Mutant(
        GATE,
        'compared, lines_of(drift, "hold"))',
        'compared, lines_of(drift, "stop"))',
        f"{T_GATE} -k predictions_that",
    ),
    Mutant(GATE, "[*self.drift, *self._prediction_drift(compared)]", "self.drift", f"{T_GATE} -k predictions_that"),
    Mutant(
        GATE,
        "NoReference(why, absent=not compared.why_not)",
        "NoReference(why, absent=True)",
        f"{T_GATE} -k predictions_that",
    ),
    Mutant(GATE, "return by_rule or by_drift", "return by_rule", f"{T_GATE} -k predictions_that"),
    Mutant(GATE, 'if drift.against == "previous":', "if False:", f"{T_GATE} -k previous"),
    Mutant(PREPARE, "day < job.ds:", "day <= job.ds:", f"{T_GATE} -k previous"),
    Mutant(PREPARE, 'if record.status != "finished" or record.folder', "if record.folder", f"{T_GATE} -k previous"),
    Mutant(
        CHAMPION,
        'for of in ("classes", "label_names"):',
        'for of in ("label_names",):',
        f"{T_CHAMPION} -k cannot_be_read",
    ),
    Mutant(START, "before.get(p.interval, p.fingerprint) != p", "before.get(p.interval) != p", T_START),
    Mutant(GATE_RULES, "bool(worse.mean() >= confidence)", "bool(worse.mean() > 0.5)", T_GATE_RULES),
    Mutant(GATE_RULES, "else places[rows.weights > 0]", "else places", T_GATE_RULES),
    Mutant(
        DISTRIBUTIONS, "np.searchsorted(below, wanted), 0]) + 1", "np.searchsorted(below, wanted), 0])", T_DISTRIBUTIONS
    ),
    Mutant(DISTRIBUTIONS, "statistics.rows - sum(found.values())}", "0}", T_DISTRIBUTIONS),
    Mutant(BY_HAND, "if current is not None and current.version == target.version:", "if False:", T_REGISTRY),
    Mutant(
        BY_HAND,
        "if target is None or (current is not None and",
        "if target is None or (False and",
        f"{T_REGISTRY} -k by_hand_and_back",
    ),
    Mutant(BY_HAND, "elif tracking.uri is None and not", "elif False and not", T_REGISTRY),
    Mutant(GATE, "elif seen.compared.older:", "elif False:", T_GATE),
    Mutant(GATE, "if self._is_this_model(found):", "if False:", T_GATE),
    Mutant(GATE, "self.judged = self.judge()\n        tracker, scores", "pass\n        tracker, scores", T_GATE),
    Mutant(ALIASES, "if current.date > ours.date:", "if False:", T_REGISTRY),
    Mutant(ALIASES, "has not in (judged_against, ours.version)", "has in ()", T_REGISTRY),
    Mutant(ALIASES, "elif current.at_ms > ours.at_ms:", "elif False:", T_REGISTRY),
    Mutant(REGISTRY, "if now is None or now.version != ours.version:", "if False:", T_REGISTRY),
    Mutant(REGISTRY, "None if current is None or same else current.version", "None", T_REGISTRY),
    Mutant(OL_DATASETS, '"s3a": "s3", ', "", T_OL_DATASETS),
    Mutant(OL_DATASETS, 'path.lstrip("/") if scheme in IN_BUCKETS else path', "path", T_OL_DATASETS),
    Mutant(OL_DATASETS, 'source.VERSION_KEY or ""', '""', T_OL_DATASETS),
    Mutant(OL_DATASETS, "if source.columns:", "if False:", T_OL_DATASETS),
    Mutant("conf/sources/base.py", 'f"({given}) AND {condition}"', "condition", T_WINDOW),
    Mutant("conf/sources/iceberg.py", "(self.SNAPSHOTS) | {", "(()) | {", "tests/conf/test_sources.py"),
    Mutant(OL_DATASETS, '.removesuffix(f"-{manifest.fingerprint[:12]}")', "", T_OL_DATASETS),
    Mutant(OL_DATASETS, "urlsplit(without_password(tracking.uri))", "urlsplit(tracking.uri)", T_OL_DATASETS),
    Mutant(OL_RECORD, "len({p.get(key) for p in pieces}) == 1", "True", T_OL_DATASETS),
    Mutant(OL_EVENTS, "State.START, self.started.at if self.started else op.at", "State.START, op.at", T_OL_EVENTS),
    Mutant(OL_EVENTS, "isinstance(op, ops.End) and op.key == JOB", "isinstance(op, ops.End)", T_OL_EVENTS),
    Mutant(OL_EVENTS, '"KILLED": State.ABORT', '"KILLED": State.FAIL', T_OL_EVENTS),
    Mutant(OL_EVENTS, "**{**known.get(key, {}), **dataset}", "**dataset", T_OL_EVENTS),
    Mutant(OL_EVENTS, "None if self.ended else", "None if False else", T_OL_EVENTS),
    Mutant(OL_EVENTS, "uuid.UUID(mlflow_id)", "uuid.uuid4()", T_OL_EVENTS),
    Mutant(OL_SEND, "if position <= done]", "]", f"{T_OL_SEND} -k not_in_mlflow"),
    Mutant(OL_SEND, "self._made > self._sent", "True", f"{T_OL_SEND} -k goes_on_behind"),
    Mutant(OL_SEND, "self.journal.note_sent(self._sent)", "pass", f"{T_OL_SEND} -k goes_on_behind"),
    Mutant(OL_SEND, "REFUSED = {400, 413, 422}", "REFUSED = {400, 401, 413, 422}", f"{T_OL_SEND} -k refused"),
    Mutant(OL_SEND, "answer.status_code not in REFUSED", "True", f"{T_OL_SEND} -k refused"),
    Mutant(OL_SEND, "sink.drain() + sink.end_left()", "sink.drain()", f"{T_OL_SEND} -k stopped_job"),
    Mutant(OL_SEND, "            del os.environ[name]", "            pass", f"{T_OL_SEND} -k own_settings"),
    Mutant(OL_SEND, "location.disabled or location.repo_url is None", "location.disabled", f"{T_OL_SEND} -k no_remote"),
    Mutant(OL_SEND, "self._thread.join(timeout_s)", "self._thread.join()", f"{T_OL_SEND} -k hangs"),
    Mutant(OL_SEND, "            self._give_up.set()", "            pass", f"{T_OL_SEND} -k hangs"),
    Mutant(
        "conf/blocks/tracking.py",
        "self.openlineage is not None and not self.enabled",
        "False",
        f"{T_OL_SEND} -k without_tracking",
    ),
    Mutant("pipelines/tracking/checkout.py", "redact(without_password(_git(", "((_git(", f"{T_TRACKER} -k remote"),
    Mutant(OL_DRIVER, 'if end_status(error) == "FAILED" else ""', "", f"{T_OL_SEND} -k stopped_job"),
    Mutant(
        OL_DRIVER, "tracking.openlineage is not None and not is_installed()", "False", f"{T_OL_SEND} -k before_any_work"
    ),
    Mutant(
        "pipelines/tracking/store/sink.py",
        'self.journal.state["ended"] = [*self.runs]',
        "pass",
        f"{T_OL_SEND} -k closed_once",
    ),
    Mutant(
        "pipelines/tracking/store/sink.py",
        'delete = "openlineage" not in destination',
        "delete = True",
        f"{T_OL_SEND} -k sends_what_was_left",
    ),
    Mutant("pipelines/tracking/tracker.py", "delete=sent and not left", "delete=not left", f"{T_OL_SEND} -k away_gets"),
    Mutant(
        f"{REPRODUCING}/compare.py",
        'effects = {"training", "bits"} if check',
        'effects = {"training"} if check',
        T_COMPARE,
    ),
    Mutant(f"{REPRODUCING}/compare.py", "weights[0] == weights[1] if check", "True if check", T_COMPARE),
    Mutant(f"{REPRODUCING}/compare.py", "if len(worlds) > 1:", "if False:", T_COMPARE),
    Mutant(f"{REPRODUCING}/compare.py", "name in SUMS", "False", T_COMPARE),
    Mutant(f"{REPRODUCING}/environment.py", "file.row_groups, file.sha256)", "file.row_groups)", T_ENVIRONMENT),
    Mutant(REPRODUCE, "if bool(found) != (file.path in left_out):", "if said:", T_REPRODUCE),
    Mutant(REPRODUCE, "if here.get(name) != sha256:", "if False:", T_REPRODUCE),
    Mutant(REPRODUCE, "if model.tags.get(WEIGHTS, run.weights_sha256) != run", "if False and run", T_REPRODUCE),
    Mutant(REPRODUCE, "if was != now:", "if False:", T_SOURCES),
    Mutant(REPRODUCE, 'if source.state in ("changed", "gone"):', "if False:", T_SOURCES),
    Mutant(
        REPRODUCE,
        "if etl.interval is None and storage.exists",
        "if storage is None and storage.exists",
        T_SOURCES,
    ),
    # --- which parameters MLflow shows of a run
    Mutant(PARAMS, "*kept][:MOST_PARAMS]", "*kept]", T_PARAMS),
    Mutant(PARAMS, "key not in varied, _rank(key)", "_rank(key)", T_PARAMS),
    Mutant(PARAMS, "key in varied or not _within(key, LEFT_OUT)", "key not in LEFT_OUT", T_PARAMS),
    Mutant(PARAMS, 'key == s or s.startswith(f"{key}.")', "key == s", T_PARAMS),
    Mutant(PARAMS, "exclude=set(leave_out), exclude_defaults=True", "exclude=set(leave_out)", T_PARAMS),
    # what is found before anything runs
    Mutant("conf/rules/foreseen.py", "if name not in names.counted:", "if False:", T_MISTAKES),
    Mutant("conf/rules/foreseen.py", "if name not in names.tensors:", "if False:", T_MISTAKES),
    Mutant("etl/foreseen.py", 'query.args.get("laterals") or not plain', "not plain", "tests/etl/test_foreseen.py"),
    Mutant("etl/foreseen.py", "if name not in known and not", "if name is known and not", T_MISTAKES),
    Mutant("etl/sources/types.py", "if rest:", "if False:", "tests/etl/sources/test_types.py"),
    Mutant("etl/examine.py", "window_of(etl.interval)[-1]", "window_of(etl.interval)[0]", T_TABLES),
    Mutant(f"{VALIDATE}/recipe.py", "if problem := _unbound(factory, model.args):", 'if problem := "":', T_MISTAKES),
    Mutant(f"{VALIDATE}/recipe.py", "if ceiling is not None and least > ceiling", "if False", T_MISTAKES),
    Mutant(f"{VALIDATE}/recipe.py", "elif own and config.etl is not None:", "elif False:", T_MISTAKES),
    Mutant(f"{VALIDATE}/tables.py", "if rows is None or batch <= rows:", "if True:", T_MISTAKES),
    Mutant(f"{VALIDATE}/folders.py", "if make and not problem:", "if not problem:", T_TABLES),
    Mutant("pipelines/run/problems.py", "if self.resources:", "if False:", T_MISTAKES),
    Mutant(
        "pipelines/schedule/run_date.py",
        "    check_recipe(resolved.config)",
        "    pass",
        "tests/pipelines/schedule/test_run_date.py -k mistyped",
    ),
    # --- scores of every task
    Mutant(METRICS, "2 * below + negative)", "2 * below)", T_METRICS),
    Mutant(METRICS, "if not found[-1] or seen[-1] == found[-1]:", "if not found[-1]:", T_METRICS),
    Mutant(METRICS, "if not math.isnan(value)]", "]", T_METRICS),
    Mutant(METRICS, "or counted.min() == counted.max()", "", T_METRICS),
    Mutant(METRICS, "counted = labels[weights > 0]", "counted = labels", T_METRICS),
    Mutant(METRICS, "order = order[weights[order] > 0]", "pass", T_METRICS),
    Mutant(EVALUATION, "real = batch.real_rows()", "real = batch.row_weights() >= 0", T_EVALUATION),
    Mutant(EVALUATION, "if not self.reports:", "if False:", T_EVALUATION),
    Mutant(EVALUATION, 'values[np.argsort(ids, kind="stable")]', "values", f"{T_EVALUATION} -k order"),
    Mutant(EVALUATION, "if not np.isfinite(values).all():", "if False:", T_EVALUATION),
    Mutant(EVALUATION, "*([stop.metric] if stop else [])", "", T_EVALUATION),
    Mutant(METRICS, "(self.scores == own).sum(axis=1) - 1) / 2", "(self.scores == own).sum(axis=1) - 1)", T_METRICS),
    Mutant(METRICS, "scores.argmax(axis=1) == labels, scores.max", "labels == 0, scores.max", T_METRICS),
    Mutant(KINDS, "if m.higher_is_better is False", "if m.higher_is_better", T_KINDS),
    Mutant(METRICS, "return 1 - loss / of_constant", "return 1 - loss", T_METRICS),
    Mutant(METRICS, "error(labels, weighted_mean(labels, weights))", "error(labels, labels.mean())", T_METRICS),
    Mutant(
        METRICS,
        "class_counts(labels, predicted, classes, weights)",
        "class_counts(labels, predicted, classes)",
        T_METRICS,
    ),
    Mutant(
        GUESSES,
        "key=lambda label: (-trained[label], label)",
        "key=lambda label: trained[label]",
        f"{T_BASELINE} -k rates_of",
    ),
    Mutant(METRICS, "np.clip(probability, CLIP, 1.0)", "np.clip(probability, 0.1, 1.0)", f"{T_BASELINE} -k rates_of"),
    Mutant(
        "conf/rules/recipe.py",
        '(mode == "max") != known[metric]',
        '(mode == "max") == known[metric]',
        "tests/conf/rules/test_recipe.py",
    ),
    Mutant(BALANCE, "max(MUCH_SHARE, SURE * error)", "MUCH_SHARE", T_BALANCE),
    Mutant(BALANCE, "max(MUCH_MEAN * train.std, SURE * error)", "SURE * error", T_BALANCE),
    Mutant(BALANCE, "b - a > MUCH_LOSS * abs(a)", "abs(b - a) > MUCH_LOSS * abs(a)", T_BALANCE),
    Mutant(DRAWING, "size = len(some) + (len(some) < classes)", "size = len(some) + 1", T_DRAWING),
    Mutant(DRAWING, "np.argsort(-rows, kind", "np.argsort(rows, kind", T_DRAWING),
    Mutant(REPORT_INPUTS, "if name != TOTAL}", "}", T_REPORT_INPUTS),
    Mutant(REPORT_INPUTS, "if self.has_alias else", "if True else", T_REPORT_INPUTS),
    # a label of texts, trials, tracebacks
    Mutant("etl/classes.py", "if None in classes:", "if False:", T_CLASSES),
    Mutant("etl/classes.py", "if declared is not None and (other", "if declared is None and (other", T_CLASSES),
    Mutant("etl/rows.py", "if total <= limit:", "if total >= limit:", T_CLASSES),
    Mutant(
        FEATURES,
        'if (codes < 0).any():\n            raise DataError(f"label {self.name!r}: {int((codes < 0).sum())} rows',
        'if False:\n            raise DataError(f"',
        T_CLASSES,
    ),
    Mutant("pipelines/run/trial.py", '"promote": None,', "", "tests/pipelines/validate/test_trial.py"),
    Mutant("pipelines/run/trial.py", "config.name + SUFFIX", "config.name", "tests/pipelines/validate/test_trial.py"),
    Mutant("training/launch/failure.py", "if is_frame and next_is_frame and", "if is_frame and", T_TRACEBACK),
    # a recipe that extends another
    Mutant(RECIPE_FILE, "if value is None and not takes_null(here):", "if value is None:", T_RECIPE_FILE),
    Mutant(RECIPE_FILE, "if identity in ids:", "if len(ids) > 50:", T_RECIPE_FILE),
    Mutant(RECIPE_FILE, "for over in reversed(chain[:-1]):", "for over in chain[:-1]:", T_RECIPE_FILE),
    Mutant(RECIPE_FILE, 'if not f"{key}.".startswith(gone)', "", T_RECIPE_FILE),
    Mutant(RECIPE_FILE, "items() if key not in dropped}", "items()}", T_RECIPE_FILE),
    Mutant("conf/load.py", "if key == EXTENDS:", "if False:", T_RECIPE_FILE),
    Mutant(COMPLETION, "if len(blocks) == 1:", "if False:", T_COMPLETION),
    Mutant(COMPLETION, 'if metavar.startswith("tracking.")', "if False", T_COMPLETION),
    Mutant(BEGIN, "key=len, default", "key=lambda old: -len(old), default", T_BEGIN),
    Mutant(BEGIN, "if given[name] == wanted[target]:", "if True:", T_BEGIN),
    Mutant(BEGIN, "if not matched:", "if not matched and given:", T_BEGIN),
    Mutant(BEGIN, "self.read().to(self.dtype)", "self.read()", T_BEGIN),
    Mutant(MODEL_START, "if start.sha256 not in (None, sha256):", "if False:", T_MODEL_START),
    Mutant(MODEL_START, "if run.exists(RECORD):", "if False:", T_MODEL_START),
    Mutant(MODEL_START, "if not folder.exists(file):", "if False:", T_MODEL_START),
    Mutant(
        "training/model/starting.py",
        "if resumed:",
        "if False:",
        "tests/training/test_warm_start_run.py",
        equivalent="the checkpoint is loaded over the file's values: only the reading would be lost",
    ),
    Mutant(
        AVERAGE, "share = (1 - self.decay) / (1 - self.decay ** int(self.steps))", "share = 1 - self.decay", T_AVERAGE
    ),
    Mutant(COMPRESS, "return values.add_(feedback.residual)", "return values", T_COMPRESS),
    Mutant(
        STEP, "self.data_parallel.set_loss_scale(self.scaler.scale)", "pass", "tests/ranks/test_compress.py -k lost"
    ),
    Mutant(COMPRESS, "values.div_(self.loss_scale)", "pass", T_COMPRESS),
    Mutant(COMPRESS, "values[self.rank] = own", "pass", T_COMPRESS),
    Mutant(COMPRESS, "after[index].copy_(before[index])", "pass", T_COMPRESS),
    Mutant(
        COMPRESS,
        "feedback.residual, feedback.pending = feedback.pending, feedback.residual",
        "feedback.residual.copy_(feedback.pending) if feedback.numel > 301 else None",
        T_COMPRESS,
    ),
    Mutant(COMPRESS, "feedback.pending[places.long()] = 0", "pass", T_COMPRESS),
    Mutant(COMPRESS, "self.factors |= self.pending_factors", "pass", T_COMPRESS),
    Mutant(COMPRESS, "alpha=-1, out=rest", "alpha=0, out=rest", T_COMPRESS),
    Mutant(
        CODECS,
        "torch.where(values.isinf(), values, values.clamp(-largest, largest))",
        "values.clamp(-largest, largest)",
        T_CODECS,
    ),
    Mutant(CODECS, "values.clamp(-largest, largest)).to(dtype)", "values).to(dtype)", T_CODECS),
    Mutant(CODECS, "others * (2 * row + flag", "others * (row + flag", T_CODECS),
    Mutant(
        "pipelines/launch/netcheck.py",
        "if gbits > 0",
        "if gbits",
        "tests/pipelines/launch/test_netcheck.py -k saves_no",
    ),
    Mutant(
        "training/planner/plan.py",
        "workload.kinds, workload.rows_per_pass)",
        "workload.kinds)",
        "tests/training/planner/test_plan.py -k many_classes",
    ),
    Mutant(COMPRESS, "residual.zero_()\n", "pass\n", f"{T_COMPRESS} -k begins_anew"),
    Mutant(COMPRESS, "not None and given.shape == q.shape:", "not None:", f"{T_COMPRESS} -k begins_anew"),
    Mutant(CODECS, "return max(1, -(-numel", "return max(0, -(-numel", f"{T_COMPRESS} -k without_elements"),
    Mutant(CODECS, "return min(numel, max(1,", "return max(1, min(numel,", f"{T_COMPRESS} -k without_elements"),
    Mutant(CODECS, "rank * (rows + columns) < rows * columns", "rank < min(rows, columns)", T_CODECS),
    Mutant(
        f"{PARALLEL}/residuals.py",
        "rank_of(key) % self.world == self.rank",
        "rank_of(key) == self.rank",
        "tests/training/parallel/test_residuals.py",
    ),
    Mutant(
        f"{PARALLEL}/residuals.py",
        "        self.added = []\n\n\ndef",
        "\n\ndef",
        "tests/training/parallel/test_residuals.py",
    ),
    Mutant(AVERAGE, "mean.copy_(kept)", "pass", T_AVERAGE),
    Mutant(STEP, "prepared.average.update()", "pass", "tests/ranks/test_average.py"),
    Mutant(
        HVD_ZERO,
        "sent = self.collectives.sent_bytes\n        self._send_shards()",
        "sent = self.collectives.sent_bytes",
        "tests/ranks/test_average.py",
    ),
    # --- replicas that train apart
    Mutant(f"{AVERAGING}/links.py", ".div_(self.replicas)", "", f"{T_REPLICAS} -k every_step"),
    Mutant(f"{AVERAGING}/strategy.py", "return self.links.replicas", "return 1", f"{T_REPLICAS} -k every_step"),
    Mutant(
        f"{AVERAGING}/strategy.py",
        "        self.clock += 1",
        "        self.clock += not info.skipped",
        f"{T_REPLICAS} -k skips",
    ),
    Mutant(
        f"{AVERAGING}/strategy.py",
        "self.skipped_in_window, 0\n",
        "self.skipped_in_window, self.skipped_in_window\n",
        f"{T_REPLICAS} -k skips",
    ),
    Mutant(f"{AVERAGING}/strategy.py", "copy_into(changed, kept)", "pass", f"{T_REPLICAS} -k own_training"),
    Mutant(f"{AVERAGING}/strategy.py", "return self._weights_differ() or ", "return ", f"{T_REPLICAS} -k resume"),
    Mutant(
        f"{AVERAGING}/strategy.py",
        'int(own["window"]["skipped"]) if "window" in own else 0',
        "0",
        f"{T_REPLICAS} -k resume",
    ),
    Mutant(
        f"{AVERAGING}/strategy.py",
        'int(given["clock"]["steps"]) if "clock" in given else 0',
        "0",
        f"{T_REPLICAS} -k resume",
    ),
    Mutant(
        f"{AVERAGING}/strategy.py",
        "if len(replicas) == self.links.replicas:",
        "if replicas:",
        f"{T_REPLICAS} -k resume",
    ),
    Mutant(f"{AVERAGING}/strategy.py", "and name.rpartition", "or name.rpartition", f"{T_REPLICAS} -k skips"),
    Mutant(
        f"{AVERAGING}/rules.py",
        "return self.links.mean(weights) if in_window else None",
        "return None",
        f"{T_REPLICAS} -k own_training",
    ),
    Mutant(f"{AVERAGING}/rules.py", "d.add_(m, alpha=share)", "m", f"{T_REPLICAS} -k nesterov"),
    Mutant(
        f"{AVERAGING}/rules.py",
        "self._outer_step(weights)[0] if in_window",
        "None if in_window",
        f"{T_REPLICAS} -k nesterov",
    ),
    Mutant(
        f"{AVERAGING}/rules.py",
        '"momentum": self.momentum}',
        '"momentum": [m * 1 for m in self.momentum]}',
        f"{T_REPLICAS} -k resume",
    ),
    Mutant(
        f"{AVERAGING}/rules.py",
        "weight.lerp_(center, share / self.links.replicas)",
        "weight.lerp_(center, share)",
        T_AVERAGING,
    ),
    Mutant(f"{AVERAGING}/rules.py", "(1 + len(peers))", "3", T_AVERAGING),
    Mutant(
        f"{AVERAGING}/links.py", "number if self.collectives.leads else 0", "number", f"{T_REPLICAS} -k counts_it_once"
    ),
    Mutant(
        f"{AVERAGING}/strategy.py",
        "weights if evaluated is None else evaluated, strict",
        "self.links.mean(weights), strict",
        f"{T_REPLICAS} -k resume",
    ),
    Mutant(f"{AVERAGING}/rules.py", "{config.seed} {window} {r}", "{config.seed} {r}", T_AVERAGING),
    Mutant(
        f"{AVERAGING}/strategy.py", "self.clock // self.settings.every)", "self.clock)", f"{T_REPLICAS} -k formulas"
    ),
    Mutant(
        f"{AVERAGING}/hosts.py",
        "if not hosts or local_rank != len(hosts[-1]):",
        "if not hosts:",
        "tests/training/parallel/averaging/test_hosts.py",
    ),
    Mutant(f"{PARALLEL}/compose.py", "group=between.inside)", "group=None)", f"{T_REPLICAS} -k hosts"),
    Mutant(PLAN, "if not name.startswith(OPTIONAL)", "", f"{T_REPLICAS} -k resume"),
    Mutant(
        LOOP,
        "int(info.skipped) if info.counted_skips is None",
        "int(info.skipped) if True",
        "tests/training/test_loop.py",
    ),
    # --- parameter servers
    Mutant(SHARD, "if push.clock < done or worker in self._held:", "if worker in self._held:", T_SHARD),
    Mutant(
        SHARD,
        "if bound is not None and clock - self.slowest > bound:",
        "if bound is not None and clock - self.slowest > bound + 1:",
        T_SHARD,
    ),
    Mutant(SHARD, "return attempt > 0 or not (self._retrying - {worker})", "return True", T_SHARD),
    Mutant(SHARD, "if lag < 0 or (limit is not None and lag > limit):", "if lag < 0:", T_SHARD),
    Mutant(
        SHARD,
        "is_finite = math.isfinite(push.norm) and _is_finite(push)",
        "is_finite = math.isfinite(push.norm)",
        T_SHARD,
    ),
    Mutant(
        SHARD,
        "            dense += push.dense\n        dense /= len(pushes)",
        "            dense += push.dense",
        T_SHARD,
    ),
    Mutant(
        SHARD,
        "frozenset.intersection(",
        "frozenset.union(",
        "tests/training/servers/test_replay.py tests/training/servers/test_shard.py",
    ),
    Mutant(SHARD, "lag > self.definition.max_lag", "lag >= self.definition.max_lag", T_SHARD),
    Mutant(SERVER, "        self.shard.cut()\n", "", T_SERVER),
    Mutant(
        SERVER,
        "if not self._closed.wait(ACCEPT_AGAIN_S):",
        "if not self._closed.set():",
        f"{T_SERVER} -k accepts_again",
    ),
    Mutant(f"{SERVERS_FOLDER}/client.py", "if len({len(dump.since) for dump in dumps}) > 1:", "if False:", T_SERVER),
    Mutant(f"{PARALLEL}/servers/strategy.py", "        if self.rank:  # rank 0", "        if False:  # rank 0", T_LATE),
    Mutant(f"{PARALLEL}/servers/strategy.py", "version > note.version", "True", T_LATE),
    Mutant(f"{PARALLEL}/servers/strategy.py", "note.clock < self.clock and", "", T_LATE),
    Mutant(f"{PARALLEL}/servers/strategy.py", "return self.rank, self.clock", "return 0, self.clock", T_DRAWS),
    Mutant(f"{PARALLEL}/servers/strategy.py", "return self.rank, self.clock", "return self.rank, 0", T_DRAWS),
    Mutant(
        "training/data/mix.py",
        "return -(-total // self.plan.rows[number])",
        "return total // self.plan.rows[number]",
        "tests/training/data/test_mix.py",
    ),
    Mutant(COMPRESS, "mine[:, end - begin :] = 0", "pass", T_COMPRESS),
    Mutant("training/parallel/data_parallel/codecs.py", "filled.clamp(min=1)", "SIGN_BLOCK", T_COMPRESS),
    Mutant(BATCH_NORM, "each * (len(x) if counted is None else int(counted.sum()))", "each * len(x)", T_BATCH_NORM),
    Mutant(BATCH_NORM, "(shift if counted is None else shift * counted)", "shift", T_BATCH_NORM),
    Mutant(BATCH_NORM, "var * count / (count - 1)", "var", T_BATCH_NORM),
    Mutant(SHARD, "        if self._copied:\n            self._mark_saved()", "", T_SERVER),
    Mutant(
        SHARD,
        "            clock, attempt = self._latest[worker]\n            self._log(Kind.UNUSED",
        "            clock, attempt = self._latest[worker]\n            self._log(Kind.SKIPPED",
        f"{T_SERVERS_REPLAY} -k died",
    ),
    Mutant(f"{SERVERS_FOLDER}/definition.py", "max(1.0, staleness) if self.damp else 1.0", "1.0", T_SHARD),
    Mutant(f"{SERVERS_FOLDER}/definition.py", "(2 * self.bound + 1)", "(2 * self.bound + 2)", T_SHARD),
    Mutant(
        f"{SERVERS_FOLDER}/protocol.py",
        'if not hmac.compare_digest(proof, _proof(secret, b"worker", own, nonce)):',
        "if False:",
        T_SERVER,
    ),
    Mutant(
        f"{SERVERS_FOLDER}/protocol.py",
        "            sock.settimeout(max(deadline - time.monotonic(), 1e-3))",
        "            pass",
        T_SERVER,
    ),
    Mutant(
        f"{SERVERS_FOLDER}/rounds.py",
        "self._given.setdefault(key, {}).setdefault(worker, value)",
        "self._given.setdefault(key, {})[worker] = value",
        "tests/training/servers/test_rounds.py",
    ),
    Mutant(
        f"{SERVERS_FOLDER}/partition.py",
        "dims = (1,) * (len(shape) - 1) + (stop - start,) if shape else ()",
        "dims = (stop - start,)",
        "tests/training/servers/test_partition.py",
    ),
    Mutant(
        f"{SERVERS_FOLDER}/replay.py",
        "self.pulls[server].setdefault(version - event.lag, [])",
        "self.pulls[server].setdefault(version, [])",
        T_SERVERS_REPLAY,
    ),
    Mutant(
        f"{SERVERS_FOLDER}/segments.py",
        "chain[-1].end > begin",
        "chain[-1].end > end",
        "tests/training/servers/test_segments.py",
    ),
    Mutant(
        f"{PARALLEL}/servers/strategy.py",
        "return self.definition.parts",
        "return 1",
        "tests/ranks/test_servers.py -k 2-2",
    ),
    Mutant(
        f"{PARALLEL}/servers/strategy.py",
        "torch.manual_seed(draws_seed(self.table_settings.seed, *self._draws_at()))",
        "pass",
        "tests/training/test_worker_servers.py -k 'null-more1'",
    ),
    # --- backup workers
    Mutant(BACKUP, "min(step + AHEAD, limit)", "step + AHEAD", T_BACKUP),
    Mutant(BACKUP, "part.clock > latest, ", "", T_BACKUP),
    Mutant(BACKUP, "part.stream not in own, ", "", T_BACKUP),
    Mutant(BACKUP, " and part not in self._ready.values():", ":", T_BACKUP),
    Mutant(BACKUP, "worker not in self._ready and ", "", T_BACKUP),
    Mutant(BACKUP, "self.streams - len(self._ready) <= self.backup", "True", T_BACKUP),
    Mutant(BACKUP, " if other != worker}", "}", T_BACKUP),
    Mutant(BACKUP, "key=lambda part: (computed[part], part)", "key=lambda part: part", T_BACKUP),
    Mutant(
        BACKUP,
        "return sorted(self._ready.items(), key=lambda each: each[1])",
        "return [*self._ready.items()]",
        T_BACKUP,
    ),
    Mutant(BACKUP, "self._taken.values() if part not in ready)", "self._taken.values())", T_BACKUP),
    Mutant(BACKUP, "if each < min(self._heard)", "if False", T_BACKUP),
    Mutant(BACKUP, "        self._counted = []\n", "", T_BACKUP),
    Mutant(BACKUP, "self.late.update(worker for worker in self._taken if worker not in self._ready)", "pass", T_BACKUP),
    Mutant(
        SHARD,
        "            return ShardStatus.LATE",
        "            return Status.HELD",
        T_SHARD,
    ),
    Mutant(SHARD, "held.attempt >= push.attempt", "True", T_SHARD),
    Mutant(SHARD, "or push.version != self.version", "", T_SHARD),
    Mutant(SHARD, "0 if self.definition.backup else push.attempt", "push.attempt", T_SHARD),
    Mutant(
        f"{PARALLEL}/servers/backup.py",
        "return self._batch.part.stream, self._batch.part.clock",
        "return 0, 0",
        T_BACKED,
    ),
    Mutant(f"{PARALLEL}/servers/backup.py", "self.tables.hot = dict(self._hot)", "pass", T_BACKED),
    Mutant(
        f"{PARALLEL}/servers/backup.py",
        "counted=counted",
        "counted=has_gradient",
        "tests/ranks/test_servers.py -k backup",
    ),
    Mutant(f"{PARALLEL}/servers/backup.py", "return min(wanted, world // 2)", "return wanted", T_FEWER),
    Mutant(f"{PARALLEL}/servers/backup.py", "lookahead = AHEAD", "lookahead = 1", T_BACKUP),
    Mutant("training/worker/splits.py", "config.checkpoint, cut)", "config.checkpoint)", T_FEWER),
    Mutant("training/data/audit/parts.py", "if (epoch, step) not in recorded:", "if True:", T_PARTS_AUDIT),
    Mutant("training/data/parts.py", "min(self._next + FAR, self._end)", "self._end", T_READ_PARTS),
    Mutant("training/data/parts.py", "others[: len(others) - OPEN + 1]", "[]", T_READ_PARTS),
    Mutant("training/data/parts.py", "if clock not in self._kept:", "if True:", T_READ_PARTS),
    Mutant(LOOP, "loss_of_rows if info.counted else torch.zeros_like(loss_of_rows)", "loss_of_rows", T_LOOP),
    Mutant(LOOP, "if info.counted:  # else", "if True:  # else", T_LOOP),
    Mutant(LOOP, "(step // each + 1) * each", "-(-step // each) * each", T_LOOP),
    Mutant(HOST_CUTS, "for step in [*self._announced, *offered] if", "for step in self._announced if", T_HOST_CUTS),
    Mutant(HOST_CUTS, "if step >= least)", "if True)", T_HOST_CUTS),
    Mutant(CUTS, "if cut.step >= step]", "if cut.step > step]", T_CUTS),
    Mutant(f"{SERVERS_FOLDER}/replay.py", "(clock - clocks.start) * count : ", "clock * count : ", T_FEWER),
    Mutant(BACKUP, "if set(self._done) != {clock} or", "if", T_BACKUP),
    Mutant(
        f"{PARALLEL}/servers/backup.py", "        if self.link.met_at == self.clock:\n", "        if False:\n", T_MEETS
    ),
    Mutant(LOOP, "last if cut is None else cut", "last", T_LOOP),
    Mutant(SERVER, "raise  # what the shard holds may be half changed", "pass", T_SERVER),
    Mutant(SERVER, "clock = self._backup.restart(request.worker)", "pass", T_SERVER),
    Mutant(SERVER_CODEC, "if count * least_bytes > len(data) - at:", "if False:", T_SERVER_CODEC),
    Mutant(SERVER_CODEC, "if end != len(data):", "if False:", T_SERVER_CODEC),
    Mutant(f"{SERVERS_FOLDER}/protocol.py", " or length > MAX_MESSAGE_BYTES", "", f"{T_SERVER} -k too_large"),
    Mutant(f"{SERVERS_FOLDER}/client.py", "if not isinstance(reply, kind):", "if False:", f"{T_SERVER} -k says_why"),
    Mutant(SERVER, "if len(request.ids) != len(specs):", "if False:", f"{T_SERVER} -k says_why"),
    Mutant(AUDIT, "if header.servers and step < expected.steps", "if step < expected.steps", T_AUDIT),
    Mutant(AUDIT, "if header.servers and step < expected.steps", "if header.servers", T_AUDIT),
    Mutant("pipelines/cli/audit.py", "if step not in logged", "if False", f"tests/{SERVERS_FOLDER}/test_segments.py"),
    Mutant("training/worker/replay.py", '"bound": header.bound, ', "", T_CHANGED_BOUND),
    Mutant("training/worker/replay.py", '"damp": header.damp, ', "", T_CHANGED_BOUND),
    Mutant("training/worker/replay.py", ', "max_lag": None}', "}", T_CHANGED_BOUND),
    # --- stops, checkpoints and the logged loss without collectives
    Mutant(CUTS, "max(self._offers.values())", "min(self._offers.values())", T_CUTS),
    Mutant(CUTS, "or not self._ranks <= self._offers.keys()", "", T_CUTS),
    Mutant(CUTS, "self._offers.pop(rank, None)", "pass", T_CUTS),
    Mutant(CUTS, "self._offers, self._wanted = None, (False, False)", "self._offers = None", T_CUTS),
    Mutant(CUTS, "if number <= len(self._announced):", "if False:", T_CUTS),
    Mutant(HOST_CUTS, "self._offer[1] <= step", "self._offer[1] < step", T_HOST_CUTS),
    Mutant(HOST_CUTS, "return ahead if ahead < left else max(1, min(least, left))", "return ahead", T_HOST_CUTS),
    Mutant(HOST_CUTS, "min(self._recent_s, default=None)", "max(self._recent_s, default=None)", T_HOST_CUTS),
    Mutant(HOST_CUTS, "if message.number <= self._last_number:", "if False:", T_HOST_CUTS),
    Mutant(MEANS, "[reports[rank] for rank in range(self._world)]", "[*reports.values()]", T_MEANS),
    Mutant(MEANS, "if metrics.step <= self._merged:", "if False:", T_MEANS),
    Mutant(LOOP, "is_first=reporter.rank == 0", "is_first=True", T_LOOP),
    Mutant(
        "training/loop/timing.py", "False\n        self.asked = True", "False", "tests/training/test_loop_timing.py"
    ),
    Mutant("training/worker/train.py", "if strategy.meets_each_step:", "if True:", T_TRAIN_HOOKS),
    Mutant(f"{AVERAGING}/strategy.py", "meets_each_step = False", "meets_each_step = True", T_TRAIN_HOOKS),
    # --- servers, and ranks that are replaced
    Mutant(SERVERS, "for agent in reversed(agents)}", "for agent in agents}", f"{T_SERVERS} -k numbered"),
    Mutant(SERVERS, "if not (self._killed or message.was_killed):", "if False:", f"{T_SERVERS} -k killed_server"),
    Mutant(SERVERS, "self._group.server.send(agent, Kill", "print(agent, Kill", f"{T_SERVERS} -k find_the_servers"),
    Mutant(
        ATTEMPT, 'failure.cause in ("signal", "memory", "lost")', "failure.cause", f"{T_SERVERS} -k raises_or_exits"
    ),
    Mutant(
        ATTEMPT,
        "self._send_each(self._cuts.replaced(state.rank, state.step or 0))",
        "pass",
        f"{T_SERVERS} -k told_of_it_again",
    ),
    Mutant(ATTEMPT, "self._unstarted | self._dead.keys()", "self._unstarted", f"{T_SERVERS} -k slow_to_come_back"),
    Mutant(ATTEMPT, " and message.child == state.child", "", f"{T_ATTEMPT} -k its_own_process"),
    Mutant(LOOP, "shown, seconds, loss", "shown, None, loss", f"{T_LOOP} -k first_batch"),
    Mutant(ELASTIC, "if reached > before else", "if reached >= before else", f"{T_SERVERS} -k may_die_often"),
    Mutant("training/launch/failure.py", "[*servers, *failures]", "failures", f"{T_SERVERS} -k is_the_cause"),
    Mutant(FORK_SERVER, "end_descendants(keep=self.servers)", "end_descendants()", f"{T_SERVERS} -k first_agents_rank"),
    # --- several labels
    Mutant(FLAGS, "pc.unique(good[SPLIT])", "pc.unique(counted[SPLIT])", T_FLAGS),
    Mutant(FLAGS, "if not odd.get(label) and", "if", T_FLAGS),
    Mutant(FLAGS, 'in (0, rows.get("train", 0))', "== 0", T_FLAGS),
    Mutant("etl/classes.py", 'is_tags(label) and trained.get(name) == rows.get("train")', "False", T_FLAGS),
    Mutant("etl/classes.py", 'if not state["values"]:', "if False:", T_FLAGS),
    Mutant(FLAGS, "(value != 0.0) & (value != 1.0)", "value > 2.0", T_LABELS),
    Mutant("etl/classes.py", "F.array_distinct(value)", "value", T_LABELS),
    Mutant("etl/classes.py", "AND NOT exists(", "AND exists(", T_LABELS),
    Mutant(FEATURES, "self._made(array.flatten())", "self._codes(array.values)", T_RECIPE_MODEL),
    Mutant(TASKS, 'reduction="none").mean(dim=1)', 'reduction="none").sum(dim=1)', T_TASKS),
    Mutant(TASKS, "for name in self.several], dim=1)", "for name in self.several[::-1]], dim=1)", T_TASKS),
    Mutant(FLAGS, 'or c.logical == "date"]', "]", T_FLAGS),
    Mutant(MULTILABEL, "if not label.actual.any() and not", "if not", T_MULTILABEL),
    Mutant(MULTILABEL, "weights, OF_LABEL)", "None, OF_LABEL)", T_MULTILABEL),
    Mutant(TASKS, "is_table and not described.has_several_labels", "is_table and not described", T_TASKS),
    Mutant(METRICS, "every(np.repeat(weights, labels))", "every(np.tile(weights, labels))", T_METRICS),
    Mutant(RECIPE_MODEL, "_of_label(manifest, config.model.label)", "manifest", T_RECIPE_MODEL),
    Mutant(RECIPE_MODEL, "labels if len(labels) > 1", "labels if len(labels) > 9", T_RECIPE_MODEL),
    Mutant(TABULAR, "if labels or classes > 2", "if labels > 2 or classes > 2", T_RECIPE_MODEL),
    Mutant(WARM, '("labels", old.label_names, new.label_names)', '("labels", [], [])', T_RECIPE_MODEL),
    Mutant("conf/manifest.py", 'or any(state.get("odd", {}).values())', "", T_RECIPE_MODEL),
    Mutant("conf/rules/dataset.py", "if len(names) == 1:", "if len(names) == 2:", T_LABEL_RULES),
    Mutant(
        "conf/rules/foreseen.py", "len(labels) > 1 and not kind.has_several_labels", "len(labels) > 1", T_LABEL_RULES
    ),
    Mutant(METRICS, "losses.mean(axis=1)", "losses.sum(axis=1)", T_METRICS),
    Mutant(METRICS, "np.maximum(predictions, CLIP)", "predictions", T_METRICS),
    Mutant(TASKS, "- rate * outputs - rate", "- rate * outputs", T_TASKS),
    Mutant(KINDS, '{"output_center": math.log(mean)} if mean > 0', '{"output_center": mean} if mean > 0', T_KINDS),
    Mutant(KINDS, "if low < 0:", "if low < -9:", T_LABEL_RULES),
    Mutant(LINEAR, "PoissonRegressor(alpha=REGULARIZATION", "PoissonRegressor(alpha=1.0", f"{T_BASELINE} -k rates_are"),
    Mutant(MLLIB, "best = 0.0 if row[1] else", "best = 1.0 or", f"{T_BASELINE} -k equal_labels"),
    Mutant(GUESSES, "if 0 < truth < 1]", "]", f"{T_BASELINE} -k mean_auc"),
    Mutant(MLLIB, "if is_constant else", "if False else", f"{T_BASELINE} -k several"),
    Mutant(DISTRIBUTIONS, "(~chosen.any(axis=1)).sum()", "chosen.any(axis=1).sum()", T_DISTRIBUTIONS),
    Mutant(f"{INIT}/columns.py", '({"0", "1"}, {"0.0", "1.0"}, ', "({*found}, ", T_INIT),
    Mutant(f"{PREDICT}/rows.py", "if name in predicted]", "if name in []]", "tests/pipelines/predict/test_rows.py"),
    # --- weights of rows
    Mutant(WEIGHTS, "(value < 0) & ~odd", "value < -1e9", T_ETL_WEIGHTS),
    Mutant(WEIGHTS, "counted.filter(pc.is_null(counted[RULE]))\n    found", "counted\n    found", T_WEIGHTS),
    Mutant(WEIGHTS, "if not weighted.get(split)", "if split not in weighted", T_WEIGHTS),
    Mutant(PARTS, "is_whole=False", "is_whole=True", T_ETL_WEIGHTS),
    Mutant("etl/build.py", "is_whole=True", "is_whole=False", T_LABELS),
    Mutant("etl/profile.py", "weighted={split: sum(self.weighted.values())}", "weighted={UNDIVIDED: 1}", T_PROFILE),
    Mutant("etl/profile.py", "classes=added({split: counts}", "classes=added({UNDIVIDED: counts}", T_PROFILE),
    Mutant("training/data/weights.py", ".double() / self._mean", ".double()", T_WEIGHTED_RUN),
    Mutant("training/data/weights.py", "weight * batch.weight)", "weight)", T_WEIGHTED_RUN),
    Mutant(
        "training/model/predictions.py", "real = batch.real_rows()", "real = batch.row_weights() > 0", T_WEIGHTED_RUN
    ),
    Mutant(
        EVALUATION,
        "self.task.split_metrics(ordered[:, :-1], ordered[:, -1])",
        "self.task.split_metrics(ordered[:, :-1])",
        T_WEIGHTED_RUN,
    ),
    Mutant(METRICS, "counts = weights > 0", "counts = weights >= 0", T_METRICS),
    Mutant(METRICS, "b.weight * abs", "b.rows * abs", T_METRICS),
    Mutant("pipelines/promotion/scores.py", "else times * weights)", "else weights)", T_PROMOTION_SCORES),
    Mutant(MLLIB, "model = model.setWeightCol(WEIGHT)", "pass", f"{T_BASELINE} -k weight"),
    Mutant(JVM, "data_bytes is not None and data_bytes <= SHORT_BYTES", "True", T_JVM),
    Mutant(JVM, "or any(key in settings for key in USERS_OWN)", "", T_JVM),
    Mutant(JVM, "total > SHORT_BYTES", "False", f"{T_JVM} -k counting"),
    Mutant("pipelines/run/spark.py", "if not is_refused(str(error)):", "if True:", f"{T_JVM} -k java_is"),
    Mutant("etl/analysis.py", '{"limit_rows": None}', "{}", "tests/etl/test_foreseen.py -k trial"),
    Mutant(
        "etl/sources/files/read.py", "if listed.bytes <= CHECKED_HERE_BYTES:", "if False:", f"{T_FILES} -k small_files"
    ),
    Mutant(LINEAR, "rows * max(cells, classes)", "rows * cells", f"{T_BASELINE} -k fit_in_the_driver"),
    Mutant(LINEAR, "sum(1 + (column.mask is not None)", "sum(1", f"{T_BASELINE} -k fit_in_the_driver"),
    Mutant(LINEAR, "if len(classes) == 1:", "if False:", f"{T_BASELINE} -k one_class"),
    Mutant(MLLIB, "F.sum(value * F.col(WEIGHT)) / F.sum(WEIGHT)", "F.avg(value)", f"{T_BASELINE} -k weight"),
    Mutant("training/tasks.py", "bind(None, None)", "bind(None)", "tests/training/test_tasks.py"),
    Mutant("pipelines/job/train_step.py", "if not self.history:  # else an attempt", "if True:  #", T_TRAIN_STEP),
    Mutant("pipelines/run/loss_history.py", "if at <= step}", "if at < step}", T_TRAIN_STEP),
    Mutant("pipelines/tracking/store/history_run.py", "op.step, recorded_ms) in", "op.step, 0) in", T_HISTORY_RUN),
    Mutant(
        "pipelines/report/report.py",
        "each.name in DATED",
        "each.name not in DATED",
        "tests/pipelines/report/test_report.py",
    ),
    Mutant("pipelines/run/loss_history.py", "if not points:", "if False:", T_TRAIN_STEP),
    Mutant(DRAWING, "min(by_step) > resumed_from", "min(by_step) < resumed_from", T_DRAWING),
    # --- code of users
    Mutant(TRAIN_HOOKS, "    restore_rng(state)\n\n\ndef _make", "    pass\n\n\ndef _make", T_TRAIN_HOOKS),
    Mutant(TRAIN_HOOKS, "with torch.no_grad():", "if True:", T_TRAIN_HOOKS),
    Mutant(
        TRAIN_HOOKS,
        "for reference, cls in classes] if is_rank_0 else []",
        "for reference, cls in classes]",
        T_TRAIN_HOOKS,
    ),
    Mutant(TRAIN_HOOKS, "cls.on_step is not Hook.on_step", "False", T_TRAIN_HOOKS),
    Mutant("pipelines/lineage/environment.py", '"optim.name": config.optim.name,', "", T_ENVIRONMENT),
    Mutant(
        "training/worker/train.py",
        'if optim.schedule == "plateau" else lambda state: state',
        "if False else lambda state: state",
        "tests/training/test_worker.py -k plateau",
    ),
    Mutant(
        "training/worker/train.py",
        "dict(state.last_valid), state.best_step",
        "state.last_valid, state.best_step",
        "tests/training/test_worker.py -k hooks_see",
    ),
    Mutant("pipelines/model/plan.py", "own + (optim.ema is not None)", "own", "tests/pipelines/test_plan.py"),
    # what is wrong with a number as a label
    Mutant(KINDS, "low < 0 or high > 1", "low < 0", "tests/conf/rules/test_labels.py"),
    Mutant("conf/rules/dataset.py", "outputs <= high", "outputs < high", "tests/conf/rules/test_labels.py"),
    Mutant(KINDS, "not high.is_integer()", "False", "tests/conf/rules/test_labels.py"),
    Mutant(f"{VALIDATE}/labels.py", ".index(column)", ".index(column) - 1", "tests/pipelines/validate/test_labels.py"),
    Mutant(f"{VALIDATE}/labels.py", "max(high) + 0.0", "high[0] + 0.0", "tests/pipelines/validate/test_labels.py"),
    # `sparkring init`
    Mutant(f"{INIT}/columns.py", 'distinct == present and (kind == "string"', 'False and (kind == "string"', T_INIT),
    Mutant(f"{INIT}/columns.py", "if distinct == 1 and", "if False and", T_INIT),
    Mutant(f"{INIT}/columns.py", "kind in WHOLE and distinct <= CLASS_NUMBERS", "False", T_INIT),
    Mutant(f"{INIT}/columns.py", "while text.lower() in taken", "while text in taken", T_INIT),
    Mutant(f"{INIT}/sample.py", "any(CODE.fullmatch(text) for", "any(False for", T_INIT),
    Mutant(f"{INIT}/sample.py", "return best if gains[best] else None", "return None", T_INIT),
    Mutant("pipelines/model/check_program.py", "if isinstance(value, bytes):", "if False:", T_PORTABLE_CHECK),
    Mutant(f"{INIT}/folder.py", "if Path(name).resolve() == Path(data).resolve() else", "if False else", T_INIT),
    Mutant(f"{INIT}/folder.py", " or any(folder.iterdir())", "", T_INIT),
    Mutant(f"{INIT}/table.py", "batch * self.steps_per_epoch > trained", "batch > trained", T_INIT),
    Mutant(f"{INIT}/table.py", "self.fewest_epochs), self.most", "1), self.most", T_INIT),
    Mutant(f"{INIT}/table.py", "share < RARE", "share <= RARE", T_INIT),
    Mutant(f"{INIT}/columns.py", " and len(values) >= ROWS_PER_CODE * distinct", "", T_INIT),
    Mutant(f"{INIT}/columns.py", "(*found.features, *found.selected, *identifiers", "(*identifiers", T_INIT),
    Mutant(f"{INIT}/columns.py", 'feature["kind"] != "numeric":', 'feature["kind"] == "":', T_INIT),
    Mutant(f"{INIT}/columns.py", "numbers.min() < 0", "numbers.min() < -9", T_INIT),
    Mutant(f"{INIT}/columns.py", "** 3) > SKEWED", "** 3) > 0", T_INIT),
    Mutant("pipelines/job/outcome.py", "evaluations < 2 or", "", "tests/pipelines/display/test_outcome.py"),
    Mutant("pipelines/job/outcome.py", "is_short or", "", "tests/pipelines/display/test_outcome.py"),
    Mutant(f"{INIT}/images.py", "if len(classes) < 2", "if not classes", T_INIT),
    Mutant(f"{INIT}/images.py", 'modes <= {"1", "L"}', "not modes", T_INIT),
    Mutant(f"{INIT}/columns.py", "names if self.is_tags]", "() if self.is_tags]", T_INIT),
    Mutant(f"{INIT}/columns.py", "name.upper() not in KEYWORDS", "True", T_INIT),
    Mutant(f"{INIT}/columns.py", "c.isdecimal()", "c.isalnum()", T_INIT),
    Mutant(f"{INIT}/columns.py", "len(wrong) < len(texts) / 2", "False", T_INIT),
    Mutant(f"{INIT}/table.py", "value.isoweekday() % 7 + 1", "value.isoweekday()", T_INIT),
    Mutant(f"{INIT}/columns.py", '"" in labels or len', "len", T_INIT),
    Mutant(f"{INIT}/table.py", "found[pc.list_parent", "found.copy()[pc.list_parent", T_INIT),
    Mutant(f"{INIT}/text.py", "if len(files) < FEWEST_FILES", "if not files", T_INIT),
    Mutant(f"{INIT}/interactions.py", 'pc.field("id").is_valid()', "pc.scalar(True)", T_RECOMMENDER),
    Mutant(f"{INIT}/interactions.py", "1, len(distinct) - 2)", "0, len(distinct) - 1)", T_RECOMMENDER),
    Mutant(f"{INIT}/interactions.py", "np.abs(shares - 0.5))])\n    share", "shares)])\n    share", T_RECOMMENDER),
    Mutant(f"{INIT}/interactions.py", "owners / 2 > 0", "owners > 0", T_RECOMMENDER),
    Mutant(
        f"{INIT}/interactions.py",
        "known if label.sql is not None else first_interactions(known)",
        "known",
        T_RECOMMENDER,
    ),
    Mutant(f"{INIT}/recommender.py", "IN ('train', d.{PERIOD})", "IN (d.{PERIOD})", T_DRAWN),
    Mutant(f"{INIT}/recommender.py", " OR d.{PERIOD} = 'test')", ")", T_DRAWN),
    Mutant(f"{INIT}/recommender.py", "FROM first_seen WHERE {PERIOD} = 'train')", "FROM first_seen)", T_DRAWN),
    Mutant(
        f"{INIT}/recommender.py", "SELECT DISTINCT {user}, {item}, {PERIOD}", "SELECT {user}, {item}, {PERIOD}", T_DRAWN
    ),
    Mutant(
        TABULAR, "out = self.output_center + self.output_scale * out", "pass", "tests/training/models/test_tabular.py"
    ),
    # --- scores by group
    Mutant(GROUPS, "if rows[each] >= min_rows]", "if rows[each] > min_rows]", T_GROUPS),
    Mutant(GROUPS, "rest = counted & ~np", "rest = ~np", T_GROUPS),
    Mutant(GROUPS, "np.argsort(-rows", "np.argsort(rows", T_GROUPS),
    Mutant(GROUPS, "if rest.sum() >= min_rows:", "if rest.any():", T_GROUPS),
    Mutant("training/worker/result.py", "if plain == text else", "if True else", T_GROUPS),
    # --- lists
    Mutant(RANKING, "(-predictions, lists)", "(predictions, lists)", T_RANKING),
    Mutant(RANKING, "np.minimum(before + size, most)", "np.minimum(before + 1, most)", T_RANKING),
    Mutant(RANKING, "is_first | np.append(True, predictions", "np.append(True, predictions", T_RANKING),
    Mutant(RANKING, "np.minimum(positives[counted], k) - 1", "k - 1", T_RANKING),
    Mutant(RANKING, "found * share)[counted]", "found * share)", T_RANKING),
    Mutant(RANKING, "np.ones(len(labels), bool) if weights is None else weights > 0", "labels > -1", T_RANKING),
    Mutant(
        f"{INIT}/interactions.py",
        "repr(int(least) if least.is_integer() else least)",
        'f"{least:g}"',
        "tests/pipelines/init/test_recommender.py -k nearest_to_halves",
    ),
    Mutant(RANKING, "(numbers >= 0) &", "(numbers > -2) &", T_RANKING),
    Mutant(RANKING, "places[pc.array_sort_indices(whole.dictionary).to_numpy()]", "places[:-1]", T_RANKING),
    Mutant(RANKING, "coded.unify_dictionaries().combine_chunks()", "coded.chunk(0)", T_RANKING),
    Mutant(RANKING, "rows <= min(self.config.k)", "rows < min(self.config.k)", T_RANKING),
    Mutant(RANKING, "if manifest.weight is not None:", "if False:", T_RANKING),
    Mutant(RANKING, "table.filter(is_positive)", "table", T_RANKING),
    Mutant("training/models/cnn.py", "if width % GROUPS:", "if False:", "tests/training/models/test_cnn.py"),
    Mutant("training/models/cnn.py", "logits.squeeze(1) if", "logits if", "tests/training/models/test_cnn.py"),
    Mutant("training/models/cnn.py", "permute(0, 3, 1, 2)", "permute(1, 3, 0, 2)", "tests/training/models/test_cnn.py"),
    Mutant("etl/raw.py", '"--require-hashes", ', "", "tests/etl/test_raw.py"),
    Mutant("etl/raw.py", "    if done.returncode:", "    if False:", "tests/etl/test_raw.py"),
    Mutant("etl/raw.py", "!= FASHION_SHA256[file.name]", "== 0", "tests/etl/test_raw.py"),
    Mutant("etl/raw.py", "if not folder.is_dir():", "if True:", "tests/etl/test_raw.py"),
    Mutant(ALS, "lists[-1] = lists[:-1].mean(axis=0)", "pass", T_ALS),
    Mutant(ALS, ".drop_null()", "", T_ALS),
    Mutant(ALS, "alpha=config.alpha, ", "", T_ALS),
    Mutant(ALS, "ratingCol=ROWS", 'ratingCol=f"{LIST}_{NUMBER}"', T_ALS),
    Mutant(ALS, "rows = positive_rows(pa.Table.from_batches([batch]), manifest, label)", "rows = batch", T_ALS),
    Mutant(ALS, "place = F.row_number().over(Window.orderBy(side)) - 1", "place = F.lit(0)", T_ALS),
    Mutant(ALS, "> MOST_FACTORS", ">= MOST_FACTORS", T_ALS),
    Mutant(ALS, "CHUNK_ROWS)]", "2 * CHUNK_ROWS)]", T_ALS),
    Mutant("pipelines/evaluation/split_rows.py", "if keep is None:", "if True:", T_ALS),
    Mutant(
        "conf/blocks/report.py",
        "self.als is not None and self.item is None",
        "False",
        "tests/conf/rules/test_recipe.py",
    ),
    Mutant(FACTORS, "vectors_BCF.square().sum(dim=1)", "vectors_BCF.sum(dim=1)", T_FACTORS),
    Mutant(FACTORS, "found_BCF[:, :, 0].sum(dim=1)", "0", T_FACTORS),
    Mutant(FACTORS, 'scales, "mean")', 'scales, "sum")', T_FACTORS),
    Mutant(FACTORS, 'and c.dtype.startswith("int")', "", T_FACTORS),
    Mutant(FACTORS, "and c.name not in manifest.hashed]", "]", T_FACTORS),
    Mutant(FACTORS, "nn.init.zeros_(weight[:, 0])", "pass", T_FACTORS),
    Mutant(RANKING, "take(places.combine_chunks()), 0)", "take(places.combine_chunks()), 9)", T_RANKING),
    Mutant(
        "conf/rules/recipe.py",
        "ranking is not None and ranking.item is not None",
        "ranking is not None",
        "tests/conf/rules/test_recipe.py",
    ),
    # --- images
    Mutant(DECODE, "image = ImageOps.exif_transpose(opened)", "image = opened", T_DECODE),
    Mutant(DECODE, "if opened.mode.startswith(DEEP):", "if False:", T_DECODE),
    Mutant(DECODE, "found.setdefault(name, decode_image)", "found[name] = decode_image", T_DECODE),
    Mutant(DECODE, "decoded.dtype != np.uint8", "False", T_DECODE),
    Mutant(DECODE, "fitted((width, height)", "fitted((height, width)", T_DECODE),
    Mutant("conf/config.py", 'named |= {f"data.decoders', '{f"data.decoders', "tests/conf/test_config.py -k code"),
    Mutant("pipelines/promotion/champion.py", 'if key != "weight"}', "}", "tests/pipelines/promotion/test_champion.py"),
    Mutant(WARM, 'if t.role != "weight"', "", T_WARM),
    # --- sparse tables
    Mutant(f"{TABLES}/sharded.py", "summed(asked, arrived)", "asked, arrived", T_SPARSE_RANKS),
    Mutant(f"{TABLES}/sharded.py", "pulled[route.order] = rows", "pulled[:] = rows", T_SPARSE_RANKS),
    Mutant(f"{TABLES}/sharded.py", "sums[self._owners[bucket_of(ids)] == self.exchange.rank]", "sums", T_SPARSE_RANKS),
    Mutant(f"{TABLES}/table.py", "[:, 1] >= self.spec.admit_after", "[:, 1] > self.spec.admit_after", T_TABLE),
    Mutant(f"{TABLES}/held.py", "(use[:, 2], use[:, 1], use[:, 0], bucket)", "(use[:, 2], bucket)", T_TABLE),
    Mutant(f"{TABLES}/held.py", "        self.map.remove(ids)\n", "", T_TABLE),
    Mutant(f"{TABLES}/held.py", " & (use[:, 0] < clock)", "", T_TABLE),
    Mutant(f"{TABLES}/held.py", "fits[order] = places_in_runs(bucket) <", "fits[order] = 0 <", T_TABLE),
    Mutant(f"{TABLES}/held.py", "(-ids, -use[:, 1], -use[:, 0], bucket_of(ids))", "(ids, bucket_of(ids))", T_TABLE),
    Mutant(f"{TABLES}/held.py", "self._slots.taken(full)", "self._slots.taken(np.arange(BUCKETS))", T_TABLE),
    Mutant(f"{TABLES}/slots.py", "again = np.minimum(count, self._free)", "again = 0 * count", T_TABLE),
    Mutant(f"{TABLES}/table.py", "HeldIds(WAITING)", "HeldIds(1 << 20)", T_TABLE),
    Mutant(f"{TABLES}/table.py", "out[~known] = self._initial(ids[~known])", "out[~known] = 0", T_TABLE),
    Mutant(f"{TABLES}/id_map.py", "on = ~hit & (slot != EMPTY)", "on = ~hit & (slot >= 0)", T_TABLE),
    Mutant(f"{TABLES}/update_rules.py", "step.astype(np.float64)", "step", T_TABLE),
    Mutant(f"{TABLES}/sharded.py", "self._wire if training else None", "self._wire", T_SPARSE),
    Mutant(f"{TABLES}/update_rules.py", "step += 1", "pass", T_TABLE),
    Mutant(f"{TABLES}/update_rules.py", 'np.einsum("nd,nd->n", grads, grads) / dim', "1.0", T_TABLE),
    Mutant(f"{TABLES}/files.py", "times != 1", "times < 1", T_TABLE_FILES),
    Mutant(
        f"{TABLES}/lookup.py", "out[own[known]] = part.rows[place[known]]", "out[own] = part.rows[0]", T_TABLE_FILES
    ),
    Mutant(f"{TABLES}/held.py", "self._marks[slots] |= CHANGED", "pass", T_INCREMENTS),
    Mutant(f"{TABLES}/held.py", "self._gone.append(ids[saved])", "pass", T_INCREMENTS),
    Mutant(f"{TABLES}/held.py", "        self._gone = []\n\n    def touch", "\n    def touch", T_INCREMENTS),
    Mutant(f"{TABLES}/held.py", "self._marks[:] = SAVED", "self._marks |= SAVED", T_INCREMENTS),
    Mutant(f"{TABLES}/table.py", "if copied_bytes > most_bytes:", "if False:", T_INCREMENTS),
    Mutant(f"{TABLES}/files.py", "2 * age + 1)", "2 * age)", T_INCREMENTS),
    Mutant(f"{TABLES}/files.py", "follows &= clocks == clocks.max()", "pass", T_INCREMENTS),
    Mutant(f"{TABLES}/files.py", "clocks[part.buckets] == part.since", "True", T_INCREMENTS),
    Mutant(POLICY, "len(written) > MOST_INCREMENTS", "False", T_INCREMENTS),
    Mutant(POLICY, " - sum(written[1:])", "", T_INCREMENTS),
    Mutant(WRITER, "before, self._tables = self._tables, {}", "before = self._tables", T_INCREMENTS),
    Mutant(WRITER, "for path in info.needs}", "for path in ()}", T_INCREMENTS),
    Mutant("training/checkpoint/checkpointer.py", "sorted(info.needs.items())", "()", T_INCREMENTS),
    Mutant(
        CATALOG,
        "gone.add(path if old in folders else old)",
        "gone.add(old)",
        "tests/training/checkpoint/test_catalog.py",
    ),
    Mutant(f"{TABLES}/hot_ids.py", "counts[kept] - cut", "counts[kept]", T_HOT_IDS),
    Mutant(f"{TABLES}/hot_ids.py", "missed + cut", "missed", T_HOT_IDS),
    Mutant(f"{TABLES}/hot_ids.py", "[rank::world]", "", T_HOT_IDS),
    Mutant(f"{TABLES}/hot_ids.py", "newest[writer].total <= total", "False", T_HOT_IDS),
    Mutant(f"{PARALLEL}/sparse.py", "found_rows.uses)", "found_rows.uses // found_rows.uses)", T_SPARSE),
    Mutant(STEP, "self.tables.drop()", "self.tables.apply(lr, 1.0)", T_SPARSE_RANKS),
    Mutant(STEP, "self.tables.pull(batch.on_host, training=False)", "pass", T_SPARSE_RANKS),
    Mutant(STEP, "self.tables.apply(lr, factor)", "self.tables.apply(lr, 1.0)", T_SPARSE),
    Mutant(f"{PARALLEL}/sparse.py", "lr * self._lr_share", "lr", T_SPARSE),
    Mutant("training/models/sparse_embedding.py", "sizes_B.clamp(min=1)", "sizes_B", T_SPARSE_EMBEDDING),
    Mutant("training/models/sparse_embedding.py", ".diff().to(rows_ND.device)", ".diff()", T_SPARSE_EMBEDDING),
    Mutant(
        "training/models/sparse_embedding.py",
        "torch.nonzero(have != wanted)",
        "torch.nonzero(have > 99)",
        T_SPARSE_EMBEDDING,
    ),
    Mutant("pipelines/evaluation/evaluate.py", "attach_tables(writer.model, model)", "pass", T_EVALUATE),
    Mutant(
        "training/model/folder.py",
        'hashlib.sha256("".join(found).encode()).hexdigest()',
        "found[0]",
        T_TABLE_FILES,
    ),
    Mutant(
        "training/worker/train.py",
        "continued = latest is not None",
        'continued = run.exists("checkpoints")',
        "tests/training/test_worker_tables.py -k warm_start",
    ),
    Mutant(f"{TABLES}/sharded.py", "pull.ahead.mark_evicted(evicted)", "pass", T_AHEAD),
    Mutant(f"{TABLES}/sharded.py", "pull.ahead.state != EVICTED", "pull.ahead.state < 9", T_AHEAD),
    Mutant(f"{TABLES}/ahead.py", "self.state[(self.state == STORED) & np", "self.state[np", T_AHEAD),
    Mutant(f"{TABLES}/ahead.py", "rows[known], state[known] =", "_, state[known] =", T_AHEAD),
    Mutant(f"{TABLES}/ahead.py", "if count == batches]", "]", T_AHEAD),
    Mutant(f"{TABLES}/ordered_calls.py", "if self._error is None:", "if True:", T_ORDERED),
    Mutant(
        f"{PARALLEL}/sparse.py",
        "if len(waiting) > self.lag:",
        "if len(waiting) >= self.lag:",
        T_LAG,
    ),
    Mutant(f"{PARALLEL}/sparse.py", "table.skip if unsent else table.drop", "table.drop", T_LAG),
    Mutant(f"{PARALLEL}/sparse.py", "asked is not columns or", "", f"{T_SPARSE} -k lag"),
    Mutant(f"{PARALLEL}/sparse.py", "if not np.isfinite(squares):", "if False:", f"{T_SPARSE} -k finite"),
    Mutant(
        f"{PARALLEL}/sparse.py",
        "return found | table.save_ahead(self._batches) if self.lag else found",
        "return found",
        "tests/training/test_worker_tables.py -k lagged",
    ),
    Mutant(f"{PARALLEL}/sparse.py", "exact or not self.lag", "not self.lag", T_LAG),
    # --- what slow ranks cost
    Mutant(STRAGGLERS, "began = free <= last", "began = free > -1", T_STRAGGLERS),
    Mutant(STRAGGLERS, "ends[step - bound].max()", "ends[step - bound].min()", T_STRAGGLERS),
    Mutant(STRAGGLERS, "float(busy.max(axis=1).mean())", "float(busy.mean())", T_STRAGGLERS),
    Mutant(STRAGGLERS, "(ends <= until).sum()", "ends.size", T_STRAGGLERS),
    Mutant(STRAGGLERS, "mean(axis=0) >= share", "mean(axis=0) > 0", T_STRAGGLERS),
    Mutant("pipelines/run/stragglers.py", "by_window[1:], strict=False", "by_window, strict=False", T_ADVICE),
    Mutant("pipelines/run/stragglers.py", "form.rate >= WORTH and ", "", T_ADVICE),
    Mutant("pipelines/run/stragglers.py", "len(table) != len(steps) * ranks or ", "", T_ADVICE),
    Mutant(
        "training/loop/timing.py",
        'self.last_s["step"] - waited_s',
        'self.last_s["step"]',
        "tests/training/test_loop_timing.py -k window",
    ),
    Mutant(GRADIENTS, "and not sparse_embeddings(model)", "and True", T_SPARSE),
    Mutant(f"{XXHASH}.py", "rest % 8 >= 4", "rest % 8 > 4", "tests/training/data/features/test_xxhash64.py"),
    Mutant("conf/rules/strategies.py", "(tp, pp, cp) != (1, 1, 1)", "False", "tests/conf/rules/test_recipe.py"),
    # The baseline of trees, and the gap to it.
    Mutant(TREES, "np.linspace(0, rows - 1, most).astype(np.int64)", "np.arange(most)", T_TREES),
    Mutant(TREES, "if count <= MOST_CODES]", "if False]", T_TREES),
    Mutant(TREES, "np.where(design.values[:, numbers:] > 0, codes, np.nan)", "codes", T_TREES),
    Mutant(TREES, "sample_weight=train.weights)", "sample_weight=None)", T_TREES),
    Mutant(TREES, '"poisson" if kind.metric("loss") == DEVIANCE else "squared_error"', '"squared_error"', T_TREES),
    Mutant(TREES, "> MOST_OUTPUTS:", "> 9999:", T_TREES),
    Mutant(TREES, "(max(cells, 1) * max(outputs, 1))", "max(cells, 1)", T_TREES),
    Mutant("pipelines/evaluation/baseline.py", "({TREES: why} if scalar else {})", "{}", T_TREES),
    Mutant("pipelines/evaluation/baseline.py", "trees=grown if found.scores else None)", "trees=None)", T_TREES),
    Mutant(EVALUATE, "report.must_beat_trees if name == TREES else report.must_beat", "report.must_beat", T_TREES),
    Mutant(EVALUATE, "half_width=1.96 * error", "half_width=error", T_TREES),
    Mutant(EVALUATE, "weights[counts] / weights[counts].sum()", "np.full(counts.sum(), 1 / counts.sum())", T_TREES),
    Mutant("training/worker/result.py", "if abs(gap) <= self.half_width:", "if False:", T_TREES),
    Mutant("conf/rules/recipe.py", 'if kind.is_text and name.endswith("trees"):', "if False:", T_TREES),
)
