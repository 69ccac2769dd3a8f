"""The user's function that makes the rows: which modules are behind it, and what is refused. SQL: tests/spark."""

import pytest

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.own_code import own_modules


def test_a_rows_function_of_no_module_or_broken_code_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine_broken.py").write_text("x = 1\ndef make(tables:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EtlError, match=r"etl\.rows = 'nowhere:f': cannot be imported"):
        own_modules("nowhere:f")
    with pytest.raises(EtlError, match=r"mine_broken\.py, line 2"):
        own_modules("mine_broken:make")
    assert own_modules("a_view") == {} and own_modules("json:loads").keys() == {"json"}
