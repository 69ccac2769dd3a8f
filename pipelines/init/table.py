"""A project for a table: a label and features of its columns, and the built-in model for tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkring.conf.blocks.etl import MANY_DUPLICATES
from sparkring.conf.blocks.predict import OURS
from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import REGRESSION, TASKS, Families, LabelForm
from sparkring.etl.sources.files.read import quoted
from sparkring.pipelines.init.columns import (
    DATES,
    INFINITY,
    TRAIN_SHARE,
    Columns,
    Label,
    counts,
    decide_columns,
    in_sql,
)
from sparkring.pipelines.init.folder import PREDICTIONS, RECIPE, Project, example_rows, python_use, run_name
from sparkring.pipelines.init.remarks import null_lines
from sparkring.pipelines.init.sample import TableSample, read_sample
from sparkring.pipelines.init.split import with_split


@dataclass(frozen=True)
class Budget:
    """How long a recipe trains at most, and by which batch: powers of two of which an epoch has several."""

    steps: int  # about so many in all
    steps_per_epoch: int  # at least, where the batch may still be smaller
    smallest_batch: int
    largest_batch: int
    fewest_epochs: int = 3
    most_epochs: int = 100

    def batch_and_epochs(self, rows: int) -> tuple[int, int]:
        """Choose the global batch, and the number of epochs, for a table of `rows`."""
        trained, batch = rows * TRAIN_SHARE, self.largest_batch
        while batch > self.smallest_batch and batch * self.steps_per_epoch > trained:
            batch //= 2
        return batch, int(min(max(round(self.steps * batch / trained), self.fewest_epochs), self.most_epochs))


# Training ends after PATIENCE epochs without a better loss, or at this limit, which is generous. With
# averages of the weights a constant rate is good at any step, so nothing has to be known of the end.
TABLE = Budget(steps=8000, steps_per_epoch=128, smallest_batch=32, largest_batch=1024)
LR, EMA, PATIENCE = 0.002, 0.998, 8
NETWORK = {"width": 64, "blocks": 1, "dropout": 0.1, "members": 8, "cosine_width": 8}
NET, TREES, BOTH = get_args(Families)
MODELS = {
    NET: "a network",
    TREES: "gradient-boosted trees",
    BOTH: "a network and gradient-boosted trees, of which the better one, or a blend, goes on",
}
# Trees of small tables learn slowly, which is as good as a mean of several models, and, when it is known how long, from
# the validation rows too; in larger tables these teach little, and both take long.
MOST_SLOW = 100_000  # rows
# Labels that can be known exactly are learned ever better by more rounds, which takes long and gains nothing any more.
SLOW_TREES = {"refit": True, "learning_rate": 0.025, "early_stopping_rounds": 100, "rounds": 2500}
MOST_COUNTED = 5  # events in half of the rows
RARE = 0.05  # `init` warns of a label with a smaller share
FEWEST_STEPS = 100  # of 32-bit numbers in a standard deviation of a label; fewer are noise
SOURCE, VIEW = "raw", "prepared"


def table_project(data: str, label: str, task: str | None, folder: Path, family: str | None = None) -> Project:
    """Inspect the table and choose a recipe. ConfigError where the file, the label or the task will not do.

    Args:
        data: path of a file or folder.
        label: name of the column, or several with commas between.
        task: name of the task; None derives it from the label.
        folder: folder of the project.
        family: NET, TREES or BOTH; None: BOTH where trees can be trained here, else NET.
    """
    sample = read_sample(data)
    columns = decide_columns(sample, label, task)
    if columns.features and len(label_columns(sample, columns)) == 1 and not columns.label.is_tags:
        columns = with_split(sample, columns, *label_columns(sample, columns))
    has_trees = find_spec("xgboost") is not None
    family = family or (BOTH if has_trees else NET)
    hint = "" if has_trees or family != NET else f" ({TREES} too where sparkring[trees] is installed)"
    return Project(
        table_recipe(sample, columns, run_name(folder.resolve().name), family),
        [*decided(sample, columns), f"model: {MODELS[family]}{hint}"],
        look_at(sample, columns),
        limit_rows=min(1000, sample.rows.num_rows),
        use=_use(sample, columns, run_name(folder.resolve().name)),
        comments=list(columns.split.others),
    )


def table_recipe(sample: TableSample, columns: Columns, name: str, family: str) -> dict[str, Any]:
    """Make the recipe, as a dict in the order it is written."""
    label = columns.label
    kept = read_columns(sample, columns)
    names = [*label.columns]
    kept_beside = [name for name in (*columns.key, *label.columns) if not OURS.fullmatch(name)]
    described = {"model": {"family": TREES, "task": label.task}}
    if family != TREES:
        described = network(label, sample.rows.num_rows)
    if family == BOTH:
        described["model"] = {"family": BOTH} | described["model"]
    if family != NET and sample.is_whole and sample.rows.num_rows <= MOST_SLOW:
        described["trees"] = SLOW_TREES
    return {
        "name": name,
        "etl": {
            "sources": {SOURCE: sample.source(kept)},
            "views": {VIEW: view_sql(columns.selected | label.columns)},
            "rows": VIEW,
            **({"key": columns.key} if columns.key else {}),
            "checks": [{"name": "label_known", "kind": "expression", "sql": label.known, "level": "row"}],
            "split": dict(columns.split.block),
            "features": columns.features,
            "label": names[0] if len(names) == 1 else names,
            **({"classes": label.classes} if label.classes else {}),
        },
        **described,
        "predict": {"rows": VIEW, "keep": kept_beside, "to": PREDICTIONS},
    }


def network(label: Label, rows: int) -> dict[str, Any]:
    """Make the recipe blocks of a network and its training. `rows`: number of rows in the table."""
    start = TASKS[label.task].initial_outputs(label.mean, label.deviation)
    batch, epochs = TABLE.batch_and_epochs(rows)
    return {
        "model": {"task": label.task, "args": NETWORK | {name: round_to(value) for name, value in start.items()}},
        "optim": {"lr": LR, "weight_decay": 0.01, "schedule": "constant", "ema": EMA},
        "train": {"epochs": epochs, "global_batch": batch, "early_stopping": {"patience": PATIENCE}},
    }


def view_sql(selected: Mapping[str, str]) -> str:
    """Write the SQL of the view, an expression per name."""
    lines = [in_sql(name) if sql == quoted(name) else f"{sql} AS {in_sql(name)}" for name, sql in selected.items()]
    return "SELECT\n  " + ",\n  ".join(lines) + f"\nFROM {SOURCE}\n"


def round_to(value: float, digits: int = 4) -> float:
    """Round to significant digits."""
    return float(f"{value:.{digits}g}")


def decided(sample: TableSample, columns: Columns) -> list[str]:
    """List what was decided, a sentence each."""
    label, seen = columns.label, f"{count_of(sample.rows.num_rows, 'row', ',')}"
    lines = [
        f"{seen} looked at{'' if sample.is_whole else ', the first; there are more'}",
        f"label {', '.join(label.columns)}: {label.task} ({label.why})",
        f"features: {counts(columns.features)}",
    ]
    if codes := [str(f["column"]) for f in columns.features.values() if f.get("column") in columns.features]:
        lines.append(f"amounts whose values are codes too, as they repeat: {', '.join(codes)}")
    if logs := [name for name, f in columns.features.items() if f.get("transform") == "log1p"]:
        lines.append(f"taken by their logarithm, as most are small and few are large: {', '.join(logs)}")
    lines += null_lines(sample, read_columns(sample, columns))
    if columns.key:
        lines.append(f"rows are known by {columns.key[0]}, which is no feature")
    lines.append(columns.split.why)
    return lines + [f"left out: {name} ({why})" for name, why in columns.left_out.items() if name not in columns.key]


def has_null(values: pa.ChunkedArray) -> np.ndarray:
    """Return whether each value is null, infinite, NaN, or an array with a null in it: (rows,) bool."""
    whole = values.combine_chunks()
    found: np.ndarray = np.array(whole.is_null().to_numpy(zero_copy_only=False))
    if pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type):
        found[pc.list_parent_indices(whole).filter(pc.list_flatten(whole).is_null())] = True
    if pa.types.is_floating(whole.type):
        found |= ~np.isfinite(whole.to_numpy(zero_copy_only=False))
    return found


def look_at(sample: TableSample, columns: Columns) -> list[str]:
    """List what only a person can know, a sentence each."""
    unknown = [has_null(sample.rows.column(name)) for name in label_columns(sample, columns)]
    nulls = np.count_nonzero(np.any(unknown, axis=0))
    lines = [
        "is every feature known when a prediction is made? One that is written later makes scores that do not last",
    ]
    if label_share := rare_share(sample, columns):
        lines.append(
            f"only {label_share:.2%} of the rows have the rarer label: accuracy says little, look at average_precision"
        )
    if rounded := rounded_label(columns.label):
        lines.append(rounded)
    if counted := count_column(sample, columns):
        lines.append(
            f"{counted} holds small whole numbers from 0 on: where it counts events, --task poisson predicts their rate"
        )
    if duplicates := duplicate_share(sample, columns):
        lines.append(
            f"{duplicates:.0%} of the rows are duplicates: equal to another row in all columns that are read. Every "
            "row is assigned to a split by itself; if they are copies of one observation, SELECT DISTINCT in the view"
        )
    for other in columns.split.others:
        what, _, block = other.partition(":\n")
        lines.append(f"{what[0].lower()}{what[1:]}, take the split that recipe.yaml has as a comment: {block.strip()}")
    lines += [f"{column}: {remark}" for column, remark in columns.remarks.items()]
    if nulls:
        finite = "finite " * any(INFINITY in sql for sql in columns.label.columns.values())
        lines.append(
            f"{count_of(int(nulls), 'row')} without {finite}{' or '.join(columns.label.columns)}: "
            "the check label_known leaves them out"
        )
    if not sample.is_whole:
        lines.append("rows that were not looked at may hold other types or classes; the run names each such value")
    return lines


def rare_share(sample: TableSample, columns: Columns) -> float:
    """Return the share of a binary label's rarer value if less than RARE; else 0."""
    if TASKS[columns.label.task].form is not LabelForm.FLAG:
        return 0.0
    (column,) = label_columns(sample, columns)
    counted = pc.value_counts(sample.rows.column(column).drop_null()).field("counts").to_numpy()
    share = float(counted.min() / counted.sum())
    return share if share < RARE else 0.0


def duplicate_share(sample: TableSample, columns: Columns) -> float:
    """Return the share of rows equal to an earlier row, if above MANY_DUPLICATES; else 0, as with a key.

    0 too if a label is an array: Arrow groups no rows by those.
    """
    read = sample.rows.select(read_columns(sample, columns))
    if any(map(pa.types.is_nested, read.schema.types)):
        return 0.0
    share = 1 - read.group_by(read.column_names).aggregate([]).num_rows / read.num_rows
    return share if share > MANY_DUPLICATES else 0.0


def rounded_label(label: Label) -> str:
    """Describe what 32-bit rounding loses of a large label with little variation; "" for others."""
    step = float(np.spacing(np.float32(abs(label.mean))))
    if not label.deviation < FEWEST_STEPS * step:
        return ""
    (name,) = label.columns
    return (
        f"{name} varies by {label.deviation:.3g} around {label.mean:.10g}, where models are trained by 32-bit numbers, "
        f"in steps of {step:.3g}: subtract {label.mean:.10g} in the view, and add it to predictions"
    )


def count_column(sample: TableSample, columns: Columns) -> str:
    """Return a regression label that looks like counts: none below 0, half at most MOST_COUNTED; or ""."""
    if columns.label.task != REGRESSION.name:
        return ""
    (column,) = label_columns(sample, columns)
    values = sample.rows.column(column).drop_null()
    if not pa.types.is_integer(values.type) or pc.min(values).as_py() != 0:
        return ""
    return column if pc.quantile(values, 0.5)[0].as_py() <= MOST_COUNTED else ""


def read_columns(sample: TableSample, columns: Columns) -> list[str]:
    """List the columns that the recipe reads, by their names in the file."""
    read = " ".join([*columns.label.columns.values(), *columns.selected.values()])
    return [name for name in sample.types if quoted(name) in read]


def label_columns(sample: TableSample, columns: Columns) -> list[str]:
    """List the labels' columns, by their names in the file."""
    return [next(name for name in sample.types if quoted(name) in sql) for sql in columns.label.columns.values()]


def example_row(sample: TableSample, columns: Columns) -> dict[str, Any]:
    """Return the features' columns of the first row as Python values, with date parts as in the SQL."""
    first = sample.rows.slice(0, 1).to_pylist()[0]
    values: dict[str, Any] = {}
    for name, sql in columns.selected.items():
        if name not in columns.features:
            continue
        column = next(c for c in sample.types if quoted(c) in sql)
        value = first[column]
        if value is not None and sample.types[column] in DATES:
            parts = {"month": value.month, "dayofweek": value.isoweekday() % 7 + 1, "hour": getattr(value, "hour", 0)}
            value = parts[sql.partition("(")[0]]
        values[name] = float(value) if isinstance(value, Decimal) else value
    return values


def _use(sample: TableSample, columns: Columns, name: str) -> str:
    made = f" `{VIEW}` makes some of them of dates: callers of the model supply them." * bool(columns.dates)
    return (
        f"The trained model is `models:/{name}@champion`. It takes rows with the features' columns of the view\n"
        f"`{VIEW}` and gives {TASKS[columns.label.task].prediction}.{made} Such as the first row of the file:\n\n"
        f"{python_use(name, example_rows(example_row(sample, columns)))}\n\n"
        f"`sparkring serve-check models:/{name}@champion` proves that it can be installed anywhere.\n"
        f"`sparkring predict {RECIPE}` scores the view's rows; to score others, change `predict.rows`."
    )
