"""Every way a recipe can be wrong gives one line with key, value and rule; every right one resolves as written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparkring.conf.load import ConfigError, json_schema, load_config, parse_override
from sparkring.conf.recipes import recipe_names

GOLDEN = Path(__file__).parent.parent / "golden"


def recipe(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


SMALL = "name: mine\ndataset: /data/x\n"


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(tmp_path, text), overrides)
    return caught.value.problems


def test_three_layers_and_where_each_value_came_from(tmp_path: Path) -> None:
    resolved = load_config(
        recipe(tmp_path, SMALL + "optim:\n  lr: 0.5\n  eps: 1e-6\n"), ["optim.lr=2e-3", "launch.world=4"]
    )
    assert resolved.config.optim.lr == 2e-3
    assert resolved.config.optim.eps == 1e-6
    assert resolved.config.launch.world == 4
    assert resolved.origins["optim.lr"] == "command line"
    assert resolved.origins["optim.eps"] == "mine.yaml:5"
    assert resolved.origins["optim.weight_decay"] == "default"


def test_the_digest_is_of_values_not_of_how_they_were_written(tmp_path: Path) -> None:
    as_file = load_config(recipe(tmp_path, SMALL + "optim: {lr: 0.5}\n")).digest
    as_override = load_config(recipe(tmp_path, SMALL), ["optim.lr=0.5"]).digest
    other = load_config(recipe(tmp_path, SMALL), ["optim.lr=0.25"]).digest
    assert as_file == as_override != other


def test_every_problem_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path, SMALL + "optim:\n  lr: -0.1\n  warmup_stps: 3\ntrain:\n  global_batch: many\n", "nonsense"
    )
    text = "\n".join(found)
    assert len(found) == 4, text
    assert re.search(r"optim\.lr = -0\.1: .*greater than 0 \(mine\.yaml:4\)", text)
    assert "optim.warmup_stps: unknown key (mine.yaml:5); did you mean 'warmup_steps'?" in text
    assert re.search(r'train\.global_batch = "many": .*integer', text)
    assert "override 'nonsense'" in text


TABLES = """name: mine
schedule: {begin: 2026-01-01, window: 2}
etl:
  sources: {raw: {path: raw, format: parquet, columns: {at: timestamp, x: double, y: double}, partitions: {day: date}}}
  interval: {column: at, sources: {raw: day}}
  rows: raw
  key: [x]
  features: {x: {kind: numeric}}
  label: y
predict: {rows: raw, to: out}
"""


def test_a_dataset_of_the_command_line_takes_the_place_of_all_that_the_recipe_says_of_tables(tmp_path: Path) -> None:
    resolved = load_config(recipe(tmp_path, TABLES), ["dataset=/data/x"])
    assert (resolved.config.etl, resolved.config.predict, resolved.config.schedule) == (None, None, None)
    assert resolved.config.dataset == "/data/x" and resolved.overrides == ("dataset=/data/x",)
    assert resolved.origins["etl"] == resolved.origins["predict"] == "command line"


def test_what_the_command_line_says_of_tables_itself_stays(tmp_path: Path) -> None:
    assert load_config(recipe(tmp_path, TABLES), ["dataset=null"]).config.etl is not None
    found = problems(tmp_path, TABLES, "dataset=/data/x", "etl.shard.seed=1")
    assert "etl, dataset: both are given" in found[0]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("launch.world=true", "true"),
        ("parallel.zero=yes", "true"),
        ("optim.betas=[on, 0.9]", "true"),
        ("parallel.servers.bound=false", "false"),
        ("launch.hang_timeout_s=true", "true"),
    ],
)
def test_a_boolean_is_no_number(override: str, value: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key}(\.0)? = {value}: must be a number, and this is a boolean") as caught:
        load_config("flights", [override])
    assert len(caught.value.problems) == 1


def test_a_misspelt_block_names_the_nearest(tmp_path: Path) -> None:
    assert problems(tmp_path, SMALL + "optimm: {lr: 1}\n") == [
        "optimm: unknown key (mine.yaml:3); did you mean 'optim'?"
    ]


def test_a_rule_of_a_long_block_does_not_print_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("flights", ["etl.rows=nowhere"])
    (found,) = caught.value.problems
    assert found.startswith("etl.rows = 'nowhere' is no view or source; there are ['flights', ")


def test_a_misspelt_choice_names_the_nearest(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, SMALL, "optim.name=adam")
    assert found.startswith('optim.name = "adam"') and found.count("or module:name; did you mean 'adamw'?") == 1


def test_null_on_the_command_line_takes_an_entry_of_the_recipe_out() -> None:
    """`etl.features.X=null` could not drop a feature, which a recipe that extends another can."""
    found = load_config("flights", ["etl.features.visib=null", "optim.lr=null", "model.args.dropout=null"]).config
    assert found.etl is not None and "visib" not in found.etl.features and "temp" in found.etl.features
    assert found.optim.lr == type(found.optim)().lr and found.model.args["dropout"] is None
    for word in ("etl.features.visibb=null", "optim.lrr=null"):
        with pytest.raises(ConfigError, match=word.partition("=")[0]):
            load_config("flights", [word])


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("parallel=autoo", "parallel = \"autoo\": must be 'auto', or a block of keys: accumulate, "),
        ("optim=adamw", 'optim = "adamw": must be a block of keys: args, betas, '),
        ("etl.sources=3", "etl.sources = 3: must be a block of keys, whose names are yours"),
    ],
)
def test_a_value_in_place_of_a_block_is_answered_with_the_keys_of_the_block(word: str, rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("flights", [word])
    (problem,) = error.value.problems
    assert problem.startswith(rule)


def test_a_recipe_that_is_not_utf8_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(SMALL.encode() + b"description: caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(str(path))


def test_an_override_of_one_alias_leaves_its_twin(tmp_path: Path) -> None:
    text = SMALL + "model: {args: {a: &one {width: 1, depth: [1]}, b: *one}}\n"
    args = load_config(recipe(tmp_path, text), ["model.args.a.width=2", "model.args.b.depth.0=3"]).config.model.args
    assert args == {"a": {"width": 2, "depth": [1]}, "b": {"width": 1, "depth": [3]}}


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    assert "given twice" in problems(tmp_path, SMALL + "name: again\n")[0]


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'flights'"):
        load_config("flight")


@pytest.mark.parametrize(
    ("text", "value"), [("a.b=1e-3", 1e-3), ("a.b=null", None), ("a.b=[1, 2]", [1, 2]), ("a.b=x", "x")]
)
def test_override_values_are_yaml(text: str, value: object) -> None:
    assert parse_override(text) == ("a.b", value)


def test_json_schema_lists_the_keys() -> None:
    schema = json_schema()
    assert "optim" in schema["properties"] and schema["additionalProperties"] is False


@pytest.mark.parametrize("name", recipe_names())
def test_golden_resolved_recipes(name: str, request: pytest.FixtureRequest) -> None:
    """A changed default shows in review. `pytest tests/conf --rewrite-golden` accepts it."""
    resolved = json.dumps(load_config(name).as_dict(), indent=1, sort_keys=True) + "\n"
    path = GOLDEN / f"{name}.json"
    if request.config.getoption("--rewrite-golden"):
        path.write_text(resolved)
    assert path.read_text() == resolved, f"{name} resolves differently; see CONTRIBUTING.md"


def bomb(levels: int = 9, merge: bool = False) -> str:
    """A few lines that stand for 9 ** levels values."""
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [x]"]
    for level in range(1, levels):
        again = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} {{<<: [{again}]}}" if merge else f"a{level}: &a{level} [{again}]")
    return "\n".join(lines)


BAD_YAML = {
    "aliases of aliases": (bomb(), r"aliases stand for over 10000 values.*line"),
    "merges of merges": (bomb(merge=True), "aliases stand for over 10000 values"),
    "an alias of itself": ("name: &a [*a]", "aliases stand for"),
    "lists in lists": ("name: " + "[" * 5000, "more than 50 levels"),
    "blocks in blocks": ("\n".join(" " * i + "a:" for i in range(500)), "more than 50 levels"),
    "a long number": ("seed: " + "9" * 5000, "line 1"),
    "a number of 65 bits": ("seed: 18446744073709551616", "more than 64 bits"),
    "base 60": ("seed: " + ":".join(["59"] * 20_000), "line 1"),
    "the 13th month": ("name: 2026-13-01", "month must be in 1..12"),
    "a list as key": ("[a]: b", r"key \['a'\] is not text"),
    "half a surrogate pair": ('name: "\\ud800"', "surrogates not allowed"),
    "a type of Python's": ("name: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "a list": ("- a", "a recipe is a mapping"),
    "a text": ("a", "a recipe is a mapping"),
    "a long file": ("# " + "x" * (1 << 18), "more than 262144 characters"),
    "infinity": ("name: x\noptim: {lr: .inf}", r"optim.lr = Infinity: input should be a finite number"),
}


@pytest.mark.parametrize(("text", "words"), BAD_YAML.values(), ids=BAD_YAML.keys())
def test_no_recipe_ends_in_another_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s){words}"):
        load_config(str(tmp_path / "r.yaml"))
    if ":" in text and not text.startswith("#"):
        with pytest.raises((ConfigError, ValueError)):
            load_config("flights", [f"model.args.x={text.partition(':')[2]}", "nosuch=1"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "etl.features.seat.transform=log1p",
            "etl.features.seat: the recipe has none of that name; did you mean",
        ),
        ("etl.features.x.foo=1", "etl.features.x: the recipe has none of that name; there are ['"),
        (
            "etl.sources.flight.format=csv",
            "etl.sources.flight: the recipe has none of that name; did you mean 'flights'?",
        ),
        ("etl.features.x={foo: 1}", "etl.features.x.kind: is required and missing; it is one of categorical, cyclic, "),
        ("etl.features.x=1", "etl.features.x = 1: must be a block of keys: column, "),
    ],
)
def test_an_override_of_what_the_recipe_has_not_is_one_line_in_our_words(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config("flights", [override])
    assert raised.value.problems[0].startswith(line), raised.value.problems
    assert len(raised.value.problems) == 1
