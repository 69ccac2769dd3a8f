"""What is shown of an exception: one line, never none."""

from __future__ import annotations

import pytest

from sparkring.conf.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("a\nb"), "a"), (KeyError(), "KeyError"), (OSError("\n  x\ny"), "x"), ("text\nmore", "text")],
)
def test_the_first_line_of_an_error(error: object, line: str) -> None:
    assert first_line(error) == line
