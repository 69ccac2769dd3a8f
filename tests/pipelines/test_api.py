"""The names of `import sparkring`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pyspark
import pytest

import sparkring
from sparkring.api import Run, _overrides, _resolved
from sparkring.conf.errors import ConfigError
from sparkring.etl.spark_platform import application
from sparkring.etl.spark_platform.application import callers_session
from sparkring.etl.spark_platform.jvm import activate


def write_table(folder: Path) -> Path:
    rows = "".join(f"{n % 7},{'rain' if n % 3 else 'sun'},{'late' if n % 3 else 'on time'}\n" for n in range(400))
    (folder / "trips.csv").write_text(f"day,weather,arrival\n{rows}")
    return folder / "trips.csv"


def test_public_names_are_there_and_another_is_refused_with_them() -> None:
    shown = {name: getattr(sparkring, name).__name__ for name in sparkring.PUBLIC}
    assert shown.pop("data") == "sparkring.data" and all(name == own for name, own in shown.items())
    assert callable(sparkring.data.open)
    assert set(sparkring.PUBLIC) <= set(dir(sparkring))
    with pytest.raises(AttributeError, match=r"no attribute 'train'; public are .*Recipe.*launch.*run"):
        _ = sparkring.train


def test_a_recipe_of_a_file_is_the_one_that_init_writes(tmp_path: Path) -> None:
    recipe = sparkring.Recipe.from_table(write_table(tmp_path), "arrival", tmp_path / "trips", family="net")
    assert recipe.values["etl"]["label"] == "arrival" and recipe.values["model"]["task"] == "binary"
    assert any(line.startswith("label arrival: binary") for line in recipe.decided)
    assert "look at:" in repr(recipe) and (tmp_path / "trips/README.md").exists()


def test_a_cell_that_runs_again_gets_its_recipe_back_and_another_one_must_say_overwrite(tmp_path: Path) -> None:
    """The second run of a notebook's cell was refused: `is there and not empty`."""
    data, folder = write_table(tmp_path), tmp_path / "trips"
    first = sparkring.Recipe.from_table(data, "arrival", folder, family="net")
    assert sparkring.Recipe.from_table(data, "arrival", folder, family="net") == first
    with pytest.raises(ConfigError, match="is of another table or other arguments, or was changed by hand; overwrite"):
        sparkring.Recipe.from_table(data, "arrival", folder, family="trees")
    assert "family" not in first.values["model"], "the refused call has written nothing"
    changed = sparkring.Recipe.from_table(data, "arrival", folder, family="trees", overwrite=True)
    assert changed.values["model"]["family"] == "trees"
    (folder / "recipe.yaml").unlink()
    with pytest.raises(
        ConfigError, match=r"is not empty, and has no recipe\.yaml; name a new folder, or overwrite=True"
    ):
        sparkring.Recipe.from_table(data, "arrival", folder)


@pytest.mark.spark
def test_a_frame_that_is_given_again_keeps_its_rows_and_another_replaces_them(spark: Any, tmp_path: Path) -> None:
    def recipe(
        rows: int, negated: bool = False, order: int = 0, **more: bool
    ) -> tuple[sparkring.Recipe, dict[str, int]]:
        x = "(6 - id % 7) / 2" if negated else "id % 7 / 2"
        frame = spark.range(rows, numPartitions=2).selectExpr(f"{x} AS x", "id % 3 = 0 AS y")
        frame = frame.orderBy("x") if order else frame
        found = sparkring.Recipe.from_table(frame, "y", tmp_path / "mine", family="net", **more)
        files = {path.name: path.stat().st_ino for path in (tmp_path / "mine/table").glob("*.parquet")}
        return found, files

    first, files = recipe(300)
    assert recipe(300) == (first, files), "the same files, so the same dataset"
    with pytest.raises(ConfigError, match="is of another table"):
        recipe(400)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["README.md", "recipe.yaml", "table"]
    assert recipe(400, overwrite=True)[1] != files
    with pytest.raises(ConfigError, match="has other rows than this DataFrame; overwrite=True replaces them"):
        recipe(400, negated=True)
    assert recipe(400, order=1)[0].path == first.path, "the same rows in another order"


def test_a_recipe_that_is_not_there_is_refused_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"flihgts: .*\n.*no such recipe .*; did you mean 'flights'\?"):
        sparkring.Recipe("flihgts")
    with pytest.raises(ConfigError, match="no such recipe"):
        sparkring.Recipe(f"{tmp_path}/mine.yaml")
    assert sparkring.Recipe(Path("conf/recipes/flights.yaml").absolute()).path.endswith("/flights.yaml")  # type: ignore[arg-type]


def test_a_frame_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="folder: a DataFrame needs one, where its rows are written"):
        sparkring.Recipe.from_table(SimpleNamespace(), "label")  # type: ignore[arg-type]


def test_what_is_no_table_or_label_is_refused_with_what_to_give(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"x": [1]})
    with pytest.raises(TypeError, match=r"table: is a pandas\S*DataFrame; give the path .*createDataFrame"):
        sparkring.Recipe.from_table(frame, "x", tmp_path / "new")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"label = \['x'\]: must be the name of a column"):
        sparkring.Recipe.from_table(write_table(tmp_path), ["x"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"overrides = \['train.steps=5'\]: must be a dict"):
        sparkring.run("flights", overrides=["train.steps=5"])  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", ["many", 0, 1.5])
def test_a_wrong_number_of_rows_is_refused(rows: Any) -> None:
    with pytest.raises(TypeError, match=f"limit_rows = {rows!r}: must be a whole number of rows, at least 1"):
        sparkring.run("flights", limit_rows=rows)


def test_arguments_that_are_no_list_are_refused() -> None:
    with pytest.raises(TypeError, match=r"args = 7: must be a list or tuple of arguments, such as \(7,\)"):
        sparkring.launch(print, world=2, args=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [0, -1, "2", 2.5, None])
def test_a_wrong_number_of_processes_is_refused_before_spark_starts(world: Any) -> None:
    with pytest.raises(TypeError, match=f"world = {world!r}: must be a whole number of processes, at least 1"):
        sparkring.launch(print, world=world)


def test_what_is_no_function_is_refused_before_spark_starts() -> None:
    """A session was started for it, and left open."""
    with pytest.raises(TypeError, match=r"function = 'ok': must be a function, which is called with a WorkerContext"):
        sparkring.launch("ok", world=2)  # type: ignore[arg-type]


def test_arguments_that_a_function_does_not_take_are_refused_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkring.pipelines.run.spark.spark_session", lambda *_: pytest.fail("Spark was started"))
    with pytest.raises(TypeError, match="too many positional arguments"):
        sparkring.launch(lambda ctx: ctx.rank, world=2, args=(1,))


@pytest.mark.spark
def test_a_table_of_the_session_is_named_as_spark_names_it(spark: Any, tmp_path: Path) -> None:
    rows = pandas.DataFrame({"x": [float(n) for n in range(400)], "late": [n % 3 == 0 for n in range(400)]})
    spark.createDataFrame(rows).createOrReplaceTempView("trips_seen")
    found = sparkring.Recipe.from_table("trips_seen", "late", tmp_path / "trips", family="net")
    assert found.values["etl"]["label"] == "late" and (tmp_path / "trips/table/_SUCCESS").exists()
    with pytest.raises(ConfigError, match=r"table = 'db.unseen': no such file or folder, and the open session knows"):
        sparkring.Recipe.from_table("db.unseen", "late", tmp_path / "others")


@pytest.mark.spark
def test_names_that_are_one_to_spark_are_named_before_rows_are_written(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(5).selectExpr("id AS x", "id AS X", "id AS y")
    with pytest.raises(ConfigError, match=r"columns of the table: 'x' and 'X' are one name to Spark.*rename one"):
        sparkring.Recipe.from_table(frame, "y", tmp_path / "trips")
    assert not (tmp_path / "trips/table").exists()


@pytest.mark.spark
def test_the_callers_session_is_the_active_one_after_a_job(spark: Any) -> None:
    """After `sparkring.run` it was that of the build, which knows no view of the caller's."""
    activate(spark)
    spark.range(1).createOrReplaceTempView("of_the_caller")
    with pytest.raises(RuntimeError), callers_session(spark):
        spark.newSession().createDataFrame([(1,)], "x int")  # what the ETL does
        assert not type(spark).getActiveSession().catalog.tableExists("of_the_caller")
        raise RuntimeError
    assert type(spark).getActiveSession().catalog.tableExists("of_the_caller")


@pytest.mark.spark
def test_a_frame_with_a_wrong_label_leaves_the_folder_free_for_the_right_one(spark: Any, tmp_path: Path) -> None:
    frame = spark.read.csv(str(write_table(tmp_path)), header=True)
    with pytest.raises(ConfigError, match="--label arivall: no such column"):
        sparkring.Recipe.from_table(frame, "arivall", tmp_path / "trips")
    recipe = sparkring.Recipe.from_table(frame, "arrival", tmp_path / "trips", family="net")
    assert recipe.values["etl"]["label"] == "arrival"


def test_what_needs_spark_names_the_extra_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkring.pipelines.run.installed.has_spark", lambda: False)
    for name, call in (("run", lambda: sparkring.run("flights")), ("launch", lambda: sparkring.launch(print, 2))):
        with pytest.raises(ModuleNotFoundError, match=rf"sparkring\.{name} needs Spark: pip install .sparkring\[spark"):
            call()


def test_a_spark_of_another_version_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sparkring.launch` of PySpark 3.4 ended in a TypeError of `mapInArrow`."""
    session: Any = SimpleNamespace(createDataFrame=None, version="4.2.1")
    monkeypatch.setattr(application, "has_ended", lambda _: False)
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    for call in (lambda: sparkring.run("flights", session), lambda: sparkring.launch(print, 2, spark=session)):
        with pytest.raises(ConfigError, match=r"the session's Spark is 4\.2\.1, and the PySpark here is 4\.3\.0"):
            call()
    monkeypatch.setattr(pyspark, "__version__", "3.4.4")
    for call in (lambda: sparkring.run("flights"), lambda: sparkring.launch(print, 2)):
        with pytest.raises(ConfigError, match=r"this PySpark is 3\.4\.4: versions from 3\.5 to below 5 are supported"):
            call()


def test_blocks_and_keys_are_overrides_of_the_recipe() -> None:
    given = {"train": {"steps": 5, "early_stopping": None}, "model.args": {"width": 8}, "dataset": "s3://b/d"}
    assert [*_overrides(given)] == [
        "train.steps=5",
        "train.early_stopping=null",
        "model.args.width=8",
        'dataset="s3://b/d"',
    ]
    resolved = _resolved("flights", ["train.steps=60"], limit_rows=500)
    assert resolved.config.name == "flights-trial" and resolved.config.etl.limit_rows == 500  # type: ignore[union-attr]
    assert resolved.config.train.steps == 60


def test_a_misspelt_block_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        sparkring.run("flights", train={"stepz": 5})


def test_a_recipe_with_dates_is_left_to_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"schedule: this recipe has dates: use `sparkring run RECIPE --date D`"):
        sparkring.run(Path(__file__).parents[2] / "examples/nights/clicks.yaml")


def test_a_run_is_shown_by_its_scores_and_its_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text('<p title="x">1 < 2</p>')
    scores = {"test/auc": 0.75, "test/majority_rate/auc": 0.5}
    result = SimpleNamespace(name="n", run=str(tmp_path), dataset="/d", test_metrics=lambda: scores)
    run = Run(result, 0, "models:/n/1")  # type: ignore[arg-type]
    assert run.scores == scores and repr(run) == f"Run(n, model=models:/n/1, test/auc=0.75, folder={tmp_path})"
    assert "&lt;p title=&quot;x&quot;&gt;1 &lt; 2&lt;/p&gt;" in run._repr_html_()
