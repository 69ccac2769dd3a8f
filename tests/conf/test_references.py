"""References `module:name`: the object, or an error that says which part is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkring.conf.references import OLD_NAMES, REFERENCE, NoSuchName, load_reference, module_of


def test_a_reference_is_imported() -> None:
    assert load_reference("os.path:join") is __import__("os").path.join
    assert module_of("os.path:join") == "os.path"


def test_a_missing_name_is_told_from_a_missing_module_and_from_the_modules_own_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoSuchName, match="module 'os' has no 'nothing'"):
        load_reference("os:nothing")
    with pytest.raises(ModuleNotFoundError):
        load_reference("no_such_module:main")
    (tmp_path / "with_a_bug.py").write_text("import os\nos.nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AttributeError) as caught:
        load_reference("with_a_bug:main")
    assert not isinstance(caught.value, NoSuchName)
    sys.modules.pop("with_a_bug", None)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_our_models_are_found_by_the_names_they_had_before(name: str) -> None:
    assert module_of(f"{name}:X") == f"sparkring.{name}"
    with pytest.raises(NoSuchName, match=f"module 'sparkring.{name}' has no 'X'"):
        load_reference(f"{name}:X")
    assert module_of("training.models.mine:X") == "training.models.mine"


def test_a_path_is_no_reference() -> None:
    assert REFERENCE.fullmatch("a.b:c") and not REFERENCE.fullmatch("a/b.py")
