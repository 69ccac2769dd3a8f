"""Every command ends with one message and the documented code."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.exits import Exit


@pytest.mark.parametrize("content", [None, b"no audit at all\n"])
def test_auditing_what_has_no_audit_is_one_line_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "run/audit").mkdir(parents=True)
        (tmp_path / "run/audit/0.ids").write_bytes(content)
    assert main(["audit", str(tmp_path / "run")]) == Exit.DATA
    said = capsys.readouterr().err
    assert said.startswith("sparkring: ") and "Traceback" not in said and said.count("\n") == 1


def test_a_recipe_that_cannot_be_read_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"name: caf\xe9\n")
    assert main(["config", "validate", str(tmp_path / "mine.yaml")]) == Exit.USAGE
    assert "is not UTF-8 text" in capsys.readouterr().err
