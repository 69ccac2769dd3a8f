"""The page of metrics: those of tasks from `conf/tasks.py`, and what else a job logs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from generator.source import cell, code, python_files, table
from sparkring.conf.tasks import TASKS

FIRST_WORDS = (
    "train",
    "valid",
    "test",
    "perf",
    "data",
    "launch",
    "time",
    "cost",
    "rows",
    "tables",
    "gpu",
    "drift",
    "plan",
    "system",
)
NAME = re.compile(rf"(?:{'|'.join(FIRST_WORDS)})/[\w.*/]+")
FOLDERS = re.compile(r"data/(?:datasets|mlflow|predictions|raw/\w+|runs)|tables/.*\.safetensors")
TIMING = "WindowTiming"  # the class of a logging window's seconds
METERS = {"measure": "perf/{}_s", "add": "data/{}_s", "count": "data/{}"}  # method -> the metric of its first argument

LOGGED = {  # `*` stands for a name: of a metric, a column, a split, ..
    "train/loss": "loss of the logging window, mean over rows and ranks",
    "train/*": "of the last step of the logging window: `lr`, `grad_norm`, `epoch`, `skipped_steps`",
    "valid/*": "a metric of the validation split, at each evaluation",
    "valid/*/*": "of a job that trains both families: a metric of a family's model over the validation rows",
    "valid/net_minus_trees/*": "of such a job: the network's value less that of trees",
    "valid/net_minus_trees_half_width/*": "half of the 95 % interval of that difference",
    "test/*": "a metric of the test split, of the model; `test/<baseline>/<metric>` of a baseline",
    "test/*/*/*": "the same of a group of rows (`test/by_<column>/<value>/<metric>`) or of one label",
    "test/champion/*": "the same rows scored by the champion, where `promote` judges",
    "test/unseen/*": "test rows with a value of this feature that training has not seen",
    "perf/step_s": "seconds per step of computing and exchanging, mean of the logging window",
    "perf/data_stall_s": "seconds per step that a rank waited for its next batch",
    "perf/wait_s": "seconds per step that a rank waited for other ranks",
    "perf/checkpoint_stall_s": "seconds per step that training stood still for checkpoints",
    "perf/evaluate_s": "seconds per step spent in evaluations",
    "perf/*": "seconds per step of another cause",
    "perf/busy_sd_s": "standard deviation of a rank's own seconds per step: how much it jitters",
    "perf/rows_per_s": "training rows per second, over all ranks; of `predict`, scored rows",
    "data/verify_s": "seconds to check files before the first epoch; once",
    "data/first_batch_s": "seconds until the first batch; once",
    "data/data_stall_s": "as perf/data_stall_s, measured by the reader",
    "data/shuffle_s": "seconds per step of permuting rows",
    "data/collate_s": "seconds per step of cutting batches",
    "data/transfer_s": "seconds per step of copies to the GPU",
    "data/row_groups": "row groups decoded per step",
    "data/rows": "rows read per step",
    "data/*": "another measure of the reader, per step",
    "gpu/peak_allocated_bytes": "largest memory of torch's allocator on a rank's GPU",
    "tables/*/*": "of a sparse table: rows, admitted, evicted, bytes",
    "rows/in": "rows of the sources' view; of `predict`, rows read",
    "rows/out": "rows in the dataset; of `predict`, predictions",
    "rows/quarantined_*": "rows that a check has quarantined",
    "rows/refused_*": "of `predict`: rows with a null in a column that refuses it",
    "rows/contributions_missed": "of `predict`: rows whose contributions do not sum to the raw prediction; if any",
    "rows/*": "rows of a split",
    "drift/*/*": "distance of a column's distribution from the reference, by measure",
    "plan/predicted_step_s": "seconds of a step, as predicted for its layout on `launch.cluster`, else on this machine",
    "plan/measured_step_s": "seconds of a step of rank 0, the median over the logging windows of the last attempt",
    "plan/step_error": "predicted over measured, less 1",
    "plan/predicted_peak_bytes": "the most that a rank holds at a moment of a step, as predicted",
    "plan/measured_peak_bytes": "the same, as ranks measured it",
    "plan/peak_error": "predicted over measured, less 1",
    "launch/start_s": "seconds until all ranks ran",
    "launch/world": "ranks of the attempt",
    "launch/recover_s": "seconds from the last step before a failure to the first new one",
    "launch/steps_lost": "steps that the next attempt repeats",
    "time/*": "seconds of a stage of the job",
    "time/score_s": "of `predict`: seconds of scoring",
    "time/total_s": "seconds of the job",
    "cost/*": "core hours and GPU hours, by part of the job",
    "cost/core_hours_etl": "core hours of the dataset's build",
    "system/cpu_utilization_percentage": "of the driver's machine",
    "system/system_memory_usage_megabytes": "memory in use on the driver's machine",
    "system/system_memory_usage_percentage": "the same, as a share",
    "system/driver_memory_usage_megabytes": "memory of the driver's process",
    "system/*_*_megabytes_per_s": "disk and network traffic of the driver's machine, in and out",
    "system/*": "in MLflow, the names above that begin with perf, data, launch, time or cost have this prefix",
}


def names_in_code() -> Iterator[str]:
    """The names of metrics in the code: texts that begin as one, `*` for what is filled in, and meters of seconds."""
    for path in python_files():
        tree = ast.parse(path.read_text())
        inner = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                text = node.value
            elif isinstance(node, ast.Call) and (name := _metered(node)):
                text = name
            elif isinstance(node, ast.ClassDef) and node.name == TIMING:
                yield from (f"perf/{name}" for name in _seconds(node))
                continue
            else:
                continue
            if NAME.fullmatch(text) and not FOLDERS.fullmatch(text):
                yield text


def _metered(node: ast.Call) -> str:
    """The metric of a call such as `self.meter.add("collate", ..)` or `timing.measure("step")`; "" for other calls."""
    if not isinstance(node.func, ast.Attribute) or not node.args or not isinstance(node.args[0], ast.Constant):
        return ""
    owner, method = ast.unparse(node.func.value), node.func.attr
    is_meter = owner.endswith("meter") or (method == "measure" and owner in ("self", "timing"))
    return METERS[method].format(node.args[0].value) if is_meter and method in METERS else ""


def _seconds(timing: ast.ClassDef) -> list[str]:
    """The fields of a timing that are seconds: each is logged under its name."""
    fields = [each for each in timing.body if isinstance(each, ast.AnnAssign)]
    return [ast.unparse(each.target) for each in fields if ast.unparse(each.annotation) == "float"]


def page() -> str:
    """The whole page."""
    rows: dict[tuple[str, str], list[str]] = {}
    for kind in TASKS.values():
        for metric in kind.metrics:
            rows.setdefault((metric.name, metric.title), []).append(kind.name)
    known = {(m.name, m.title): m for kind in TASKS.values() for m in kind.metrics}
    better = {True: "higher", False: "lower", None: "says nothing of a model"}
    scores = [
        [
            code(name),
            cell(title),
            ", ".join(tasks),
            better[known[name, title].higher_is_better],
            "yes" if known[name, title].on_ranks else "no",
        ]
        for (name, title), tasks in rows.items()
    ]
    return "\n".join(
        [
            "# Metrics\n",
            "## Of tasks\n",
            "`valid/<name>` while training, `test/<name>` at the end; a task of your own has its own. What they mean, "
            "and how they are computed: [scores](../explanation/scores.md).\n",
            table(["name", "what", "tasks", "better is", "at every evaluation"], scores),
            "## Logged by a job\n",
            "Where they are shown: [tracking](../how-to/tracking.md).\n",
            table(["name", "meaning"], [[code(name), cell(meaning)] for name, meaning in LOGGED.items()]),
        ]
    )
