"""What makes a dataset another dataset: content, recipe, code and settings. No Spark."""

import sys
from types import SimpleNamespace

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.etl.fingerprint import dataset_fingerprint, made_of, what_differs
from sparkring.etl.sources.own_code import own_modules

FEATURES = {"a": {"kind": "numeric"}, "b": {"kind": "numeric"}}


def config(path="t.csv", features=FEATURES, **changes) -> EtlConfig:
    source = {"path": path, "columns": {"a": "int", "b": "int"}}
    return EtlConfig.model_validate({"sources": {"t": source}, "rows": "t", "features": features} | changes)


def fingerprint(config, content="x", settings=None):
    """Of a dataset whose only source has the fingerprint `content`."""
    return dataset_fingerprint(config, {"t": SimpleNamespace(fingerprint=content)}, settings or {})


def test_the_fingerprint_is_of_content_not_of_place():
    first = fingerprint(config())
    assert fingerprint(config("elsewhere/t.csv")) == first
    others = [
        fingerprint(config(), content="y"),
        fingerprint(config(features=dict(reversed(FEATURES.items())))),
        fingerprint(config(split={"seed": 1})),
        fingerprint(config(shard={"row_group": 7})),
        fingerprint(config(rows="json:loads")),
    ]
    assert len({first, *others}) == 6


def test_each_piece_of_a_fingerprint_has_a_name():
    def pieces(config, content="x", settings=None):
        return made_of(config, {"etl.sources.t": content}, settings or {})

    first = pieces(config())
    assert what_differs(first, pieces(config("elsewhere/t.csv"))) == []
    other = {**FEATURES, "b": {"kind": "numeric", "transform": "log1p"}}
    more = {**FEATURES, "c": {"kind": "numeric", "column": "a"}}
    for after, said in (
        (pieces(config(), content="y"), ["what etl.sources.t holds"]),
        (pieces(config(features=dict(reversed(FEATURES.items())))), ["the order of etl.features"]),
        (pieces(config(features=other)), ["etl.features.b"]),
        (pieces(config(features=more)), ["etl.features.c (new)"]),
        (pieces(config(split={"seed": 1})), ["etl.split.seed"]),
        (pieces(config(), settings={"spark.sql.caseSensitive": "true"}), ["spark.conf.spark.sql.caseSensitive (new)"]),
    ):
        assert what_differs(first, after) == said
    assert what_differs(pieces(config(features=more)), first) == ["etl.features.c (gone)"]


def test_settings_that_decide_rows_are_in_the_fingerprint_and_others_are_not():
    def print_of(**settings):
        conf = {f"spark.{key.replace('__', '.')}": value for key, value in settings.items()}
        return fingerprint(config(), settings=conf)

    free = {"executor__memory": "2g", "sql__shuffle__partitions": "7", "sql__adaptive__enabled": "false"}
    free |= {"sql__session__timeZone": "Asia/Tokyo", "sql__ansi__enabled": "false"}  # fixed by the build
    assert {print_of(**{key: value}) for key, value in free.items()} == {print_of()}
    deciding = {
        "sql__caseSensitive": "true",
        "sql__legacy__timeParserPolicy": "LEGACY",
        "sql__mapKeyDedupPolicy": "LAST_WIN",
    }
    deciding |= {"sql__files__ignoreCorruptFiles": "true"}
    assert (
        len({print_of(), print_of(sql__caseSensitive="false"), *(print_of(**{k: v}) for k, v in deciding.items())}) == 6
    )


MODULES = {
    "mine/__init__.py": "from .steps import one\n",
    "mine/rows.py": "import json, numpy\nfrom . import helper\nimport mine_too\ndef make(t):\n  import mine_late",
    "mine/helper.py": "from .deep.er import f\n",
    "mine/deep/er.py": "import mine.rows\n",  # a namespace package, and a circle
    "mine/steps.py": "one = 1\n",
    "mine_too.py": "try:\n    import no_such_module\nexcept ImportError:\n    x = 1\n",
    "mine_late.py": "",
    "mine_other.py": "",
}


def test_every_module_of_the_user_that_the_rows_function_imports_is_in_the_fingerprint(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    used = {"mine", "mine.rows", "mine.helper", "mine.deep.er", "mine.steps", "mine_too", "mine_late"}
    assert own_modules("mine.rows:make").keys() == used

    def print_():
        return fingerprint(config(rows="mine.rows:make"))

    prints = [print_()]
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text + "\n# changed\n")
        prints.append(print_())
    assert len(set(prints)) == len(MODULES) and prints[-1] == prints[-2]  # mine_other is not imported
    for name in [m for m in sys.modules if m.partition(".")[0].startswith("mine")]:
        del sys.modules[name]
