"""What makes a dataset another dataset, and what is deleted of builds that died. No Spark."""

import os
import sys
import time

import pytest

from conf.manifest import Accounting, DataFile, DatasetManifest, Lineage, SplitInfo
from conf.schema_etl import EtlConfig
from conf.storage import open_storage
from etl.build import _check_unchanged, _sweep, code_digest, dataset_fingerprint
from etl.errors import EtlError
from etl.source import find_source
from etl.views import own_modules

FEATURES = {"a": {"kind": "numeric"}, "b": {"kind": "numeric"}}


def config(path="t.csv", features=FEATURES, **changes) -> EtlConfig:
    source = {"path": path, "columns": {"a": "int", "b": "int"}}
    return EtlConfig.model_validate({"sources": {"t": source}, "rows": "t", "features": features} | changes)


def test_the_fingerprint_is_of_content_not_of_place():
    first = dataset_fingerprint(config(), {"t": "x"}, "4.3.0", {})
    assert dataset_fingerprint(config("elsewhere/t.csv"), {"t": "x"}, "4.3.0", {}) == first
    others = [
        dataset_fingerprint(config(), {"t": "y"}, "4.3.0", {}),
        dataset_fingerprint(config(), {"t": "x"}, "4.4.0", {}),
        dataset_fingerprint(config(features=dict(reversed(FEATURES.items()))), {"t": "x"}, "4.3.0", {}),
        dataset_fingerprint(config(split={"seed": 1}), {"t": "x"}, "4.3.0", {}),
        dataset_fingerprint(config(shard={"row_group": 7}), {"t": "x"}, "4.3.0", {}),
        dataset_fingerprint(config(rows="json:loads"), {"t": "x"}, "4.3.0", {}),
    ]
    assert len({first, *others}) == 7


def test_settings_that_decide_rows_are_in_the_fingerprint_and_others_are_not():
    def print_of(**settings):
        conf = {f"spark.{key.replace('__', '.')}": value for key, value in settings.items()}
        return dataset_fingerprint(config(), {"t": "x"}, "4.3.0", conf)

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


def test_every_module_of_ones_own_that_the_rows_function_imports_is_in_the_fingerprint(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    used = {"mine", "mine.rows", "mine.helper", "mine.deep.er", "mine.steps", "mine_too", "mine_late"}
    assert own_modules("mine.rows:make").keys() == used

    def print_():
        return dataset_fingerprint(config(rows="mine.rows:make"), {"t": "x"}, "4.3.0", {})

    prints = [print_()]
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text + "\n# changed\n")
        prints.append(print_())
    assert len(set(prints)) == len(MODULES) and prints[-1] == prints[-2]  # mine_other is not imported
    for name in [m for m in sys.modules if m.partition(".")[0].startswith("mine")]:
        del sys.modules[name]


def test_a_rows_function_of_no_module_or_broken_code_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine_broken.py").write_text("x = 1\ndef make(tables:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EtlError, match=r"etl\.rows = 'nowhere:f': cannot be imported"):
        own_modules("nowhere:f")
    with pytest.raises(EtlError, match=r"mine_broken\.py, line 2"):
        own_modules("mine_broken:make")
    assert own_modules("a_view") == {} and own_modules("json:loads").keys() == {"json"}


def test_the_code_digest_covers_the_packages_subfolders(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("a.py", "sub/b.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    before = code_digest()
    (tmp_path / "sub/b.py").write_text("x = 1\n")
    changed = code_digest()
    (tmp_path / "sub/b.py").rename(tmp_path / "sub/c.py")
    assert len({before, changed, code_digest()}) == 3


def test_only_old_folders_no_manifest_lists_are_deleted(tmp_path):
    for name in ("data-used", "data-dead", "data-young", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000.parquet").write_bytes(b"x")
        if name != "data-young":
            for path in (tmp_path / name / "train-00000.parquet", tmp_path / name):
                os.utime(path, (time.time() - 90_000,) * 2)
    path, sha = "data-used/train-00000.parquet", "0" * 64
    file = DataFile(path=path, split="train", rows=1, bytes=1, sha256=sha, row_groups=(1,))
    manifest = DatasetManifest(
        name="t",
        fingerprint="0" * 64,
        created_at="",
        columns=(),
        files=(file,),
        splits={"train": SplitInfo(rows=1, files=1)},
        accounting=Accounting(rows_in=1, rows_out=1),
        lineage=Lineage(sources={}),
    )
    _sweep(open_storage(str(tmp_path)), manifest)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data-used", "data-young", "notes"]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    found = {"t": find_source("t", config(str(tmp_path / "t.csv")).sources["t"])}
    _check_unchanged(found)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(EtlError, match=r"etl\.sources\.t: its files changed"):
        _check_unchanged(found)
