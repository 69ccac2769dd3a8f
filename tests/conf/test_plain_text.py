"""What a terminal or Markdown would obey is shown as it is written."""

from __future__ import annotations

import logging

import pytest

from sparkring.conf.plain_text import code_in_markdown, count_of, for_terminal, in_markdown, score_text
from sparkring.conf.secrets import RedactingFormatter

OBEYED = ["\x1b[2J", "\x1b]0;title\x07", "\x1b[1A", "\r", "\b", "\x9b31m", "\u202e", "\x00", "\x1bc", "\x7f"]


@pytest.mark.parametrize("code", OBEYED)
def test_a_terminal_gets_nothing_that_it_obeys(code: str) -> None:
    shown = for_terminal(f"before{code}after\tx\n")
    assert shown.startswith("before\\") and shown.endswith("after\tx\n")
    assert not [letter for letter in shown if not letter.isprintable() and letter not in "\t\n"]
    record = logging.LogRecord("n", logging.ERROR, "p", 1, "%s", (code,), None)
    assert code not in RedactingFormatter("%(message)s").format(record)


def test_a_number_of_things_has_the_noun_that_it_asks_for() -> None:
    assert [count_of(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert count_of(1234, "row", ",") == "1,234 rows"
    of_several = {"class": "classes", "batch": "batches", "entry": "entries", "key": "keys", "data file": "data files"}
    of_several |= {"epoch": "epochs"}
    assert {noun: count_of(2, noun)[2:] for noun in of_several} == of_several
    assert [count_of(number, "row is") for number in (1, 2)] == ["1 row is", "2 rows are"]
    assert [count_of(number, "host needs") for number in (1, 2)] == ["1 host needs", "2 hosts need"]


def test_colors_are_left_out_and_plain_texts_stay() -> None:
    assert for_terminal("\x1b[1;31mred\x1b[0m") == "red" and for_terminal("größe 3 °C → ☃") == "größe 3 °C → ☃"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[win](https://evil.example)", r"\[win\](https://evil.example)"),
        ("a\n\n# headline", "a # headline"),
        ("# headline", r"\# headline"),
        ("- item", r"\- item"),
        ("1. item", r"1\. item"),
        ("**bold** _x_ `code` ~no~", r"\*\*bold\*\* \_x\_ \`code\` \~no\~"),
        ("a | b", "a &#124; b"),
        ("<img src=x onerror=y>", "&#60;img src=x onerror=y&#62;"),
        ("test/log_loss: 0.5, n_token = -3", "test/log_loss: 0.5, n_token = -3"),
    ],
)
def test_markdown_shows_a_text_as_it_is(text: str, shown: str) -> None:
    assert in_markdown(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"), [("a_b", "`a_b`"), ("a`b", "``a`b``"), ("`a``", "``` `a`` ```"), ("a\nb", "`a b`"), ("", "")]
)
def test_code_ends_where_it_should(text: str, shown: str) -> None:
    assert code_in_markdown(text) == shown


def test_a_score_shows_what_it_is_in_any_unit() -> None:
    shown = {0.0: "0.0000", 0.59912: "0.5991", -0.001: "-0.0010", 99999.5: "99999.5000", 1e5: "100,000"}
    shown |= {-9.87654e-4: "-0.00098765", 3.61e-13: "3.61e-13", 9e11: "900,000,000,000", 2.8586531e17: "2.8587e+17"}
    assert {value: score_text(value) for value in shown} == shown
    assert [score_text(value) for value in (float("nan"), float("-inf"))] == ["nan", "-inf"]
