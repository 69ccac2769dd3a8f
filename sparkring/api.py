"""The Python interface: a recipe of a table, a run with its scores and report, and functions on all ranks.

It calls what the command line calls. A recipe is a file, so `sparkring run` trains what a notebook has trained.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkring.conf.errors import ConfigError
from sparkring.conf.load import Resolved, load_config
from sparkring.conf.recipe_file import read_recipe
from sparkring.conf.schema import check_case
from sparkring.conf.storage import open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkring.training.launch.job import JobResult
    from sparkring.training.worker.result import TrainResult

NAME = r"(`[^`]+`|\w+)(\.(`[^`]+`|\w+))*"  # of a table, in SQL
TABLE = "table"  # folder of a recipe's project that holds the rows of a DataFrame
NEW_TABLE = "_table"  # the same while they are looked at
REPORT, REPORT_HEIGHT = "report.html", 900  # pixels below a cell


@dataclass(frozen=True)
class Recipe:
    """A recipe, by name or path. `decided` and `look_at`: what `from_table` says of it, a sentence each.

    Raises ConfigError for a missing recipe, or a file that is not one.
    """

    path: str
    decided: tuple[str, ...] = ()
    look_at: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))  # a Path too
        _ = self.values  # read now, not when a run needs it

    @classmethod
    def from_table(
        cls,
        table: str | Path | DataFrame,
        label: str,
        folder: str | Path | None = None,
        *,
        task: str | None = None,
        family: str | None = None,
        overwrite: bool = False,
    ) -> Recipe:
        """Inspect a table and write a recipe for it into a folder, as `sparkring init table` does.

        The same table and arguments give the recipe that is there, so that a cell of a notebook can run again. Raises
        ConfigError where the table, the label or the task will not do, or the folder has another recipe or other files.

        Args:
            table: CSV or Parquet file, a folder of them, a DataFrame, or the name of a table that the open session
                knows. The rows of the last two are written to `folder`/table.
            label: the column to predict, or several with commas between.
            folder: folder of the recipe; None for one in the working directory, named after the data. A DataFrame, or
                the name of a table, needs one, which all executors see.
            task: None: by the label's type and values.
            family: net, trees or both; None: both where XGBoost is installed.
            overwrite: replace another recipe, and the rows, in the folder.
        """
        from sparkring.pipelines.init.folder import RECIPE, folder_of, project_files
        from sparkring.pipelines.init.table import SOURCE, table_project

        if not isinstance(label, str):
            raise TypeError(f"label = {label!r}: must be the name of a column, or several names with commas between")
        table = _of_catalog(table)
        source: AbstractContextManager[str]
        if isinstance(table, str | Path):
            data = str(Path(table).resolve())
            target = folder_of(None if folder is None else str(folder), str(table))
            source = nullcontext(str(table))
        elif folder is None:
            raise ConfigError("Recipe.from_table", ["folder: a DataFrame needs one, where its rows are written"])
        else:
            target = Path(folder)
            data = str(target / TABLE)
            source = _written(table, target / NEW_TABLE)
        with source as rows:
            project = table_project(rows, label, task, target, family)
            project.recipe["etl"]["sources"][SOURCE]["path"] = str(Path(data).resolve())
            words = str(table) if isinstance(table, str | Path) else "DataFrame"
            files = project_files(target, project, ["Recipe.from_table", words, label])
            if not overwrite and _is_same(target, files[RECIPE], Path(rows)):
                if rows == str(target / NEW_TABLE):
                    shutil.rmtree(rows)
                return cls(str(target / RECIPE), tuple(project.decided), tuple(project.look_at))
            for name, text in files.items():
                target.mkdir(parents=True, exist_ok=True)
                (target / name).write_text(text, encoding="utf-8")
            if rows == str(target / NEW_TABLE):
                shutil.rmtree(data, ignore_errors=True)
                Path(rows).rename(data)
        return cls(str(target / RECIPE), tuple(project.decided), tuple(project.look_at))

    @property
    def values(self) -> dict[str, Any]:
        """What the file says, as a dict; `sparkring config show` has every default too."""
        from sparkring.conf.load import of_other_kinds, takes_null

        return read_recipe(self.path, takes_null, of_other_kinds).values

    def __repr__(self) -> str:
        lines = [f"Recipe({self.path!r})", *self.decided, *(["look at:", *self.look_at] if self.look_at else [])]
        return "\n  ".join(lines)


@dataclass(frozen=True)
class Run:
    """What one run gave. In a notebook it shows its report."""

    result: TrainResult  # everything in summary.json
    code: int  # the exit code of `sparkring run`: 0, or that of a gate which the model has not passed
    model: str | None  # models:/name/version; None: not registered, or the store has not answered

    @property
    def scores(self) -> dict[str, float]:
        """`test/auc` of the model, `test/<baseline>/auc` next to it, by the names in MLflow."""
        return dict(self.result.test_metrics())

    @property
    def folder(self) -> str:
        """URI of the run folder."""
        return self.result.run

    @property
    def dataset(self) -> str:
        """URI of the dataset."""
        return self.result.dataset

    def report(self) -> str:
        """Return the report, one self-contained HTML page."""
        return open_storage(self.folder).read_bytes(REPORT).decode()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value:.4g}" for name, value in self.scores.items() if name.count("/") == 1)
        return f"Run({self.result.name}, model={self.model}, {shown}, folder={self.folder})"

    def _repr_html_(self) -> str:
        page = html.escape(self.report(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {REPORT_HEIGHT}px; border: 0"></iframe>'


def run(
    recipe: Recipe | str | Path,
    spark: SparkSession | None = None,
    *,
    limit_rows: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    **blocks: Any,
) -> Run:
    """Build the dataset unless it is there, train, evaluate and register, as `sparkring run` does.

    Raises what is wrong (ConfigError and others with a line each). The same call continues with a run that was stopped.

    Args:
        recipe: name or path of a recipe, or a Recipe.
        spark: session to use, left open; None takes the open session, or opens one for this run.
        limit_rows: a trial of every part on about so many rows, as `--limit-rows`.
        overrides: settings by key, such as `{"train.steps": 500}`.
        **blocks: settings by block: `train={"steps": 500}`.
    """
    from sparkring.pipelines.context.context import Publication, TrialPublication
    from sparkring.pipelines.job.job import run_job
    from sparkring.pipelines.run.runs import RunRecord

    _check_spark("sparkring.run", spark)
    from sparkring.etl.spark_platform.application import callers_session

    path = recipe.path if isinstance(recipe, Recipe) else str(recipe)
    if not isinstance(overrides, Mapping | None):
        raise TypeError(f"overrides = {overrides!r}: must be a dict, such as {{'train.steps': 500}}")
    if limit_rows is not None and (not isinstance(limit_rows, int) or limit_rows < 1):
        raise TypeError(f"limit_rows = {limit_rows!r}: must be a whole number of rows, at least 1")
    resolved = _resolved(path, [*_overrides(blocks), *_overrides(overrides or {})], limit_rows)
    records: list[RunRecord] = []

    class Noted(TrialPublication if limit_rows is not None else Publication):  # type: ignore[misc]
        def on_run(self, record: RunRecord) -> None:
            records.append(record)

    with nullcontext() if spark is None else callers_session(spark):
        code = run_job(resolved, etl=True, publication=Noted(), session=None if spark is None else lambda: spark)
    return _read_run(resolved, records[-1].folder, code)


def launch(
    function: Callable[..., Any],
    world: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    spark: SparkSession | None = None,
    preload: Sequence[str] = ("torch",),
) -> JobResult:
    """Run `function(ctx, *args, **kwargs)` in `world` simultaneous processes on Spark's slots.

    Raises WorkerFailed with the rank and traceback of the first that fails; no process is left by then. TypeError for
    a `function`, `world` or `args` of another kind.

    Args:
        function: a function, also one of a notebook's cell. It gets a WorkerContext, which has `rank` and `world_size`.
        world: number of processes.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        spark: session whose executors run them; None: the one that is open, or one for this call.
        preload: modules to import before the processes are forked; those that are missing are skipped.
    """
    _check_spark("sparkring.launch", spark)
    from pyspark.sql import SparkSession

    from sparkring.conf.blocks.launch import LaunchConfig
    from sparkring.conf.blocks.spark import SparkConfig
    from sparkring.pipelines.launch.barrier import run_barrier
    from sparkring.pipelines.run.spark import spark_session
    from sparkring.training.launch.job import JobSpec

    if not callable(function):
        raise TypeError(f"function = {function!r}: must be a function, which is called with a WorkerContext")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise TypeError(f"args = {args!r}: must be a list or tuple of arguments, such as ({args!r},)")
    if not isinstance(world, int) or world < 1:
        raise TypeError(f"world = {world!r}: must be a whole number of processes, at least 1")
    job = JobSpec(function, args=tuple(args), kwargs=dict(kwargs or {}), preload=tuple(preload))
    job.check()
    if (there := spark or SparkSession.getActiveSession()) is not None:
        return run_barrier(there, job, world)
    with spark_session("launch", SparkConfig(), LaunchConfig(world=world)) as opened:
        return run_barrier(opened, job, world)


def _check_spark(name: str, spark: SparkSession | None) -> None:
    """Check Spark and a session of the caller's before anything else. `name`: of what needs it.

    Raises ModuleNotFoundError with the extra where Spark is not installed, ConfigError for a version that is not
    supported, TypeError and ValueError for what is no open session.
    """
    from sparkring.pipelines.run.installed import has_spark

    if not has_spark():
        raise ModuleNotFoundError(f"{name} needs Spark: pip install 'sparkring[spark]'", name="pyspark")
    import pyspark

    from sparkring.etl.spark_platform.application import check_session
    from sparkring.pipelines.run.spark_remote import check_versions

    if spark is not None:
        check_session(spark)
    check_versions(name, pyspark.__version__, pyspark.__version__ if spark is None else spark.version)


def _of_catalog(table: str | Path | DataFrame) -> str | Path | DataFrame:
    """Return the DataFrame of a table that the open session knows; anything else unchanged.

    ConfigError for what may be a name, and is neither a path nor a table.
    """
    from sparkring.pipelines.run.installed import has_spark

    is_name = isinstance(table, str) and re.fullmatch(NAME, table) and not Path(table).exists()
    if not is_name or not has_spark():
        return table
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    name = str(table)
    if spark is not None and spark.catalog.tableExists(name):
        return spark.table(name)
    knows = "no Spark session is open that knows tables" if spark is None else "the open session knows no such table"
    raise ConfigError("Recipe.from_table", [f"table = {name!r}: no such file or folder, and {knows}"])


@contextmanager
def _written(frame: DataFrame, folder: Path) -> Iterator[str]:
    """Write the rows of a DataFrame; delete them where the block fails, so that a corrected call finds none."""
    if not hasattr(frame, "sparkSession"):
        raise TypeError(
            f"table: is a {type(frame).__module__}.{type(frame).__qualname__}; give the path of a CSV or Parquet "
            "file, or a Spark DataFrame, such as spark.table(name) or spark.createDataFrame(pandas_frame)"
        )
    _check_spark("Recipe.from_table", frame.sparkSession)
    try:
        check_case("columns of the table", frame.columns)
    except ValueError as error:
        raise ConfigError("Recipe.from_table", [str(error)]) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        frame.write.mode("overwrite").parquet(folder.resolve().as_uri())
        yield str(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _is_same(folder: Path, recipe: str, rows: Path) -> bool:
    """Return whether a folder has this recipe and rows. ConfigError for others, or files without a recipe."""
    from sparkring.pipelines.init.folder import RECIPE

    others = [path for path in folder.iterdir() if path.name != NEW_TABLE] if folder.is_dir() else []
    if folder.exists() and not folder.is_dir():
        raise ConfigError(str(folder), ["is a file; name a folder for the recipe"])
    if not others:
        return False
    path = folder / RECIPE
    if not path.exists():
        raise ConfigError(str(folder), [f"is not empty, and has no {RECIPE}; name a new folder, or overwrite=True"])
    if path.read_text(encoding="utf-8") != recipe:
        why = "is of another table or other arguments, or was changed by hand"
        raise ConfigError(str(path), [f"{why}; overwrite=True replaces it, sparkring.Recipe({str(path)!r}) takes it"])
    if rows.name == NEW_TABLE and _rows_digest(rows) != _rows_digest(folder / TABLE):
        raise ConfigError(str(folder / TABLE), ["has other rows than this DataFrame; overwrite=True replaces them"])
    return True


def _rows_digest(folder: Path) -> tuple[int, int]:
    """Count the rows of a Parquet folder and sum their hashes, independent of order and files."""
    import pandas
    import pyarrow.parquet as pq

    rows = total = 0
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches():
            texts = pandas.DataFrame({name: values.map(str) for name, values in batch.to_pandas().items()})
            rows += len(texts)
            total += int(pandas.util.hash_pandas_object(texts, index=False).sum())
    return rows, total % 2**64


def _resolved(path: str, overrides: list[str], limit_rows: int | None) -> Resolved:
    resolved = load_config(path, overrides)
    if limit_rows is not None:
        from sparkring.pipelines.run.trial import trial_overrides

        resolved = load_config(path, [*overrides, *trial_overrides(resolved, limit_rows)])
    if resolved.config.schedule is not None and resolved.interval is None:
        raise ConfigError(path, ["schedule: this recipe has dates: use `sparkring run RECIPE --date D` or backfill"])
    return resolved


def _overrides(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield `key.path=value` for each value, recursively for blocks."""
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _overrides(value, f"{key}.")
        else:
            yield f"{key}={json.dumps(value, default=str)}"


def _read_run(resolved: Resolved, folder: str, code: int) -> Run:
    from sparkring.training.worker.result import read_result

    config = resolved.config
    result = read_result(open_storage(config.storage.runs).at(f"{config.name}/{folder}"))
    name = config.tracking.named(config.name).registered_model
    return Run(result, code, None if result.version is None else f"models:/{name}/{result.version}")
