"""A recipe that extends another: what is taken over, what null means, whose line a value and an error have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkring.conf.load import ConfigError, json_schema, load_config, takes_null
from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit

BASE = """name: base
dataset: /data/x
optim:
  lr: 0.5
  betas: [0.8, 0.9]
train:
  global_batch: 64
  eval_every_steps: 10
checkpoint: {every_s: 60}
report: {must_beat: [loss]}
model:
  args: {width: 8, depth: 2}
"""


def write(folder: Path, **texts: str) -> str:
    """Write the recipes; the path of the first."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return str(folder / f"{next(iter(texts))}.yaml")


def problems(recipe: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return caught.value.problems


def test_blocks_are_merged_by_key_and_lists_replaced(tmp_path: Path) -> None:
    text = "extends: base.yaml\nname: mine\noptim: {lr: 0.1, betas: [0.5, 0.6]}\nmodel: {args: {depth: 3}}\n"
    recipe = write(tmp_path, mine=text, base=BASE)
    found = load_config(recipe, ["model.args.depth=4"])
    config = found.config
    assert (config.name, config.dataset) == ("mine", "/data/x")
    assert (config.optim.lr, config.optim.betas, config.train.global_batch) == (0.1, (0.5, 0.6), 64)
    assert config.model.args == {"width": 8, "depth": 4}
    shown = {key: found.origins[key] for key in ("optim.lr", "train.global_batch", "model.args.width", "optim.eps")}
    assert shown == {
        "optim.lr": "mine.yaml:3",
        "train.global_batch": "base.yaml:7",
        "model.args.width": "base.yaml:12",
        "optim.eps": "default",
    }
    whole = write(tmp_path, whole=BASE.replace("name: base", "name: mine").replace("0.5\n", "0.1\n"))
    words = ["optim.betas=[0.5, 0.6]", "model.args.depth=4"]
    assert load_config(whole, words).digest == found.digest, "the digest is of the merged values"


def test_null_is_null_where_the_key_can_be_and_else_its_default(tmp_path: Path) -> None:
    text = """extends: base.yaml
optim: null
train: {global_batch: null, eval_every_steps: null}
checkpoint: {every_s: null}
report: {must_beat: null}
model: {args: {width: null}}
"""
    found = load_config(write(tmp_path, mine=text, base=BASE))
    config = found.config
    assert (config.optim.lr, config.train.global_batch, config.report.must_beat) == (1e-3, 1024, [])
    assert (config.train.eval_every_steps, config.checkpoint.every_s) == (None, None), "every_s: no such checkpoints"
    assert config.model.args == {"width": None, "depth": 2}
    assert found.origins["train.global_batch"] == found.origins["optim.lr"] == "default"
    assert found.origins["checkpoint.every_s"] == "mine.yaml:4"


@pytest.mark.parametrize(
    ("path", "can"),
    [("optim", False), ("promote", True), ("etl.sources.flights", False), ("etl.sources.flights.where", True),
     ("model.args.width", True), ("train.global_batch", False), ("optim.nonsense", True)],
)  # fmt: skip
def test_which_keys_can_be_null(path: str, can: bool) -> None:
    assert takes_null(tuple(path.split("."))) is can


def test_an_entry_of_the_other_recipe_can_be_taken_out(tmp_path: Path) -> None:
    text = "extends: flights\nname: fewer\netl: {features: {wind_gust: null, temp: {indicator: never}}}\n"
    etl, whole = load_config(write(tmp_path, mine=text)).config.etl, load_config("flights").config.etl
    assert etl is not None and whole is not None
    assert set(whole.features) - set(etl.features) == {"wind_gust"}
    assert etl.features["temp"].model_dump()["indicator"] == "never"


def test_recipes_may_be_chained_over_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "team").mkdir()
    write(tmp_path, mine="extends: team/mine.yaml\ntrain: {epochs: 3}\n")
    (tmp_path / "team/mine.yaml").write_text("extends: ../base.yaml\nname: team\ntrain: {seed: 7, epochs: 9}\n")
    write(tmp_path, base=BASE)
    monkeypatch.chdir(tmp_path)
    found = load_config("mine.yaml")
    assert (found.config.name, found.config.train.seed, found.config.train.epochs) == ("team", 7, 3)
    origins = [found.origins[key] for key in ("train.epochs", "train.seed", "train.global_batch")]
    assert origins == ["mine.yaml:2", "team/mine.yaml:3", "base.yaml:7"]


def test_an_error_names_the_file_that_its_key_is_in(tmp_path: Path) -> None:
    recipe = write(tmp_path, mine="extends: base.yaml\noptim: {eps: -1}\n", base=BASE + "tran: {epochs: 2}\n")
    assert problems(recipe) == [
        "optim.eps = -1: input should be greater than 0 (mine.yaml:2)",
        "tran: unknown key (base.yaml:13); did you mean 'train'?",
    ]


def test_a_circle_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path, a="extends: b.yaml\n", b="extends: ./c.yaml\n", c="name: c\nextends: b.yaml\n", d="extends: d.yaml\n"
    )
    monkeypatch.chdir(tmp_path)
    assert problems("a.yaml") == [
        "extends (c.yaml:2): goes in a circle, b.yaml -> c.yaml -> b.yaml; take one of them out"
    ]
    assert "goes in a circle, d.yaml -> d.yaml" in problems("d.yaml")[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends: [a.yaml]\n", "extends = ['a.yaml'] (mine.yaml:1): must be one recipe"),
        ("extends:\n", "extends = None (mine.yaml:1): must be one recipe"),
        ("extends: nowhere.yaml\n", "nowhere.yaml: no such recipe (No such file or directory)"),
        ("extends: flight\n", "flight: no such recipe (No such file or directory); did you mean 'flights'?"),
        ("extends: broken.yaml\n", "broken.yaml: not valid YAML"),
    ],
)
def test_what_cannot_be_extended_is_one_message(tmp_path: Path, text: str, said: str) -> None:
    (found,) = problems(write(tmp_path, mine=text, broken="{"))
    assert said in found and found.startswith("extends") and "(mine.yaml:1)" in found


def test_the_command_line_extends_nothing_and_editors_know_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(tmp_path, base=BASE, mine="extends: base.yaml\nname: mine\n")
    assert "a recipe's file says what it extends" in problems(recipe, "extends=flights")[0]
    assert json_schema()["properties"]["extends"]["type"] == "string"
    assert main(["config", "show", str(tmp_path / "mine.yaml")]) == Exit.OK
    shown = capsys.readouterr().out
    assert any(line.split() == ["optim.lr", "0.5", "base.yaml:4"] for line in shown.splitlines())


KINDS = {
    "categorical": "kind: categorical, column: hour, min_count: 3, max_size: 9",
    "hashed": "kind: hashed, column: hour",
    "numeric": "kind: numeric, column: hour, transform: log1p, indicator: never, scale: false",
    "cyclic": "kind: cyclic, column: hour, period: 24",
    "passthrough": "kind: passthrough, column: hour, dtype: float16",
    "image": "kind: image, column: hour, shape: [8, 8, 1], fit: crop",
}
NEEDED = {"cyclic": ", period: 12", "image": ", shape: [4, 4, 3]"}


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_a_feature_of_another_kind_keeps_only_what_that_kind_has(tmp_path: Path, before: str, after: str) -> None:
    """`period: null` was needed, which no message said."""
    base = (
        "name: base\netl:\n  sources: {t: {path: t.csv, columns: {hour: int}}}\n  rows: t\n"
        "  features:\n    x:\n      FEATURE\n"
    ).replace("FEATURE", KINDS[before].replace(", ", "\n      ").replace("\n      8\n      1]", ", 8, 1]"))
    mine = f"extends: base.yaml\netl: {{features: {{x: {{kind: {after}{NEEDED.get(after, '')}}}}}}}\n"
    found = load_config(write(tmp_path, mine=mine, base=base))
    etl = found.config.etl
    assert etl is not None
    feature = etl.features["x"]
    assert (feature.kind, feature.column) == (after, "hour")
    if before != after:
        plain = type(feature).model_validate({"kind": after, "column": "hour"} | feature.model_dump(exclude_unset=True))
        assert feature == plain
    prefix = "etl.features.x."
    known = {key.removeprefix(prefix).partition(".")[0] for key in found.origins if key.startswith(prefix)}
    assert known == set(type(feature).model_fields), "no line of a key that is gone"
    wrong = write(tmp_path, mine=mine.replace(f"kind: {after}", f"kind: {after}, colum: x"), base=base)
    assert any("etl.features.x.colum" in problem for problem in problems(wrong))


def test_a_mistyped_key_of_the_other_recipe_stays_an_error_when_the_kind_changes(tmp_path: Path) -> None:
    base = "etl: {sources: {t: {path: t.csv, columns: {h: int}}}, rows: t, features: {h: {kind: cyclic, perod: 24}}}\n"
    mine = "extends: base.yaml\nname: mine\netl: {features: {h: {kind: numeric}}}\n"
    (said,) = problems(write(tmp_path, mine=mine, base=base))
    assert "etl.features.h.perod" in said and "base.yaml:1" in said
    unknown = write(tmp_path, mine=mine.replace("numeric", "numric"), base=base.replace("perod", "period"))
    assert "did you mean 'numeric'" in problems(unknown)[0]


def test_arguments_of_a_users_own_have_no_kinds(tmp_path: Path) -> None:
    base = "name: base\ndataset: /data/x\nmodel: {args: {width: 8, head: {kind: cyclic, period: 3}}}\n"
    mine = "extends: base.yaml\nmodel: {args: {head: {kind: numeric}}}\n"
    assert load_config(write(tmp_path, mine=mine, base=base)).config.model.args == {
        "width": 8,
        "head": {"kind": "numeric", "period": 3},
    }


@pytest.mark.parametrize(
    ("text", "overrides", "origin"),
    [
        ("extends: base.yaml\nparallel: auto\n", [], "mine.yaml:2"),
        ("extends: base.yaml\nparallel: {layout: auto}\n", [], "mine.yaml:2"),
        ("extends: base.yaml\n", ["parallel=auto"], "command line"),
        ("extends: base.yaml\n", ["parallel.layout=auto"], "command line"),
    ],
)
def test_a_planned_layout_takes_the_place_of_what_it_chooses(
    tmp_path: Path, text: str, overrides: list[str], origin: str
) -> None:
    base = BASE + "parallel: {precision: bf16, zero: 2, tp: 2, accumulate: 4}\n"
    found = load_config(write(tmp_path, mine=text, base=base), overrides)
    parallel = found.config.parallel
    assert (parallel.layout, parallel.precision, parallel.zero, parallel.tp) == ("auto", "bf16", 0, 1)
    assert parallel.accumulate == 4, "kept: it counts for batch normalization"
    assert found.origins["parallel.layout"] == origin and found.origins["parallel.precision"] == "base.yaml:13"
    assert found.origins["parallel.zero"] == "default"


def test_a_recipe_may_ask_for_a_planned_layout_in_one_word(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, mine=BASE + "parallel: auto\n")).config.parallel.layout == "auto"
    (found,) = problems(write(tmp_path, mine=BASE + "parallel: auot\n"))
    assert found.startswith('parallel = "auot": ')


@pytest.mark.parametrize("path", ["./rows.csv", "../lake/rows.csv", "./a/../rows.csv"])
def test_a_source_path_with_a_dot_is_relative_to_its_own_recipe(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = "extends: flights\netl: {sources: {flights: {path: %s}}}\n"
    (tmp_path / "one/two").mkdir(parents=True)
    (tmp_path / "one/base.yaml").write_text(base % path)
    (tmp_path / "one/two/top.yaml").write_text("extends: ../base.yaml\nname: top\n")
    expected = os.path.normpath(tmp_path / "one" / path)
    for below, name in ((".", "./one/two/top.yaml"), ("one", "./base.yaml"), ("one/two", "./top.yaml")):
        monkeypatch.chdir(tmp_path / below)
        found = load_config(name).config.etl
        assert found is not None and found.sources["flights"].path == expected  # type: ignore[union-attr]


def test_other_source_paths_and_those_of_the_command_are_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("extends: flights\netl: {sources: {flights: {path: rows/x.csv}}}\n")
    recipe = str(tmp_path / "r.yaml")
    for overrides, expected in (([], "rows/x.csv"), (["etl.sources.flights.path=../x.csv"], "../x.csv")):
        found = load_config(recipe, overrides).config.etl
        assert found is not None and found.sources["flights"].path == expected  # type: ignore[union-attr]
