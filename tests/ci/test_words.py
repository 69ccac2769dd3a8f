"""The code is written in plain words: phrases for arguments, a verb first, no sentence that has to be decoded."""

from __future__ import annotations

import pytest

from tests.ci.words import GONE, ROOT, docstrings, files, fragments, is_property, lacks_verb, main, standing


def test_no_sentence_has_to_be_decoded() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {path.relative_to(ROOT): standing(path.read_text()) for path in files()}
    found |= {path.relative_to(ROOT): [each for each in GONE if each in path.read_text()] for path in pages}
    assert len(found) > 500
    assert {str(path): lines for path, lines in found.items() if lines} == {}


def test_arguments_are_described_by_phrases() -> None:
    assert [f"{place}: {each}" for place, _, text in docstrings() for each in fragments(text)] == []


def test_a_docstring_of_a_function_begins_with_a_verb() -> None:
    every = docstrings()
    assert len(every) > 3500
    lacking = [(place, text) for place, node, text in every if not is_property(node) and lacks_verb(text)]
    assert [f"{place}: {text.splitlines()[0]}" for place, text in lacking] == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("# to the consumer, which is\n    # done with all but the last", True),
        ('raise ValueError("whoever asks")', True),
        ("# a rank without a gradient waits; the manifesto is unsaidly", False),
    ],
)
def test_the_check_of_sentences_finds_what_it_is_for(line: str, is_found: bool) -> None:
    assert bool(standing(f"x = 1\n{line}\n")) == is_found


@pytest.mark.parametrize(
    ("entry", "is_fragment"),
    [
        ("rows: of the test split.", True),
        ("queue: in which messages wait for the sender.", True),
        ("lease: whose file is read.", True),
        ("height: M.", True),
        ("*names: the columns.", True),
        ("first, last: as in `search`.", True),
        ("size (int): in bytes.", True),
        ("rows: rows of the\n        test split.", False),
        ("inside: number of ranks on one host.", False),
    ],
)
def test_the_check_of_arguments_finds_what_it_is_for(entry: str, is_fragment: bool) -> None:
    docstring = f"Do.\n\nArgs:\n    count: number of rows.\n    {entry}\n\nReturns:\n    of: what."
    assert bool(fragments(docstring)) == is_fragment


@pytest.mark.parametrize(
    ("docstring", "lacks"),
    [
        ("Whether a queue is empty.", True),
        ("Names of the queues.", True),
        ("Name of the queue.", True),
        ("(rows, columns) of a matrix.", True),
        ("`queue`: to send to.", True),
        ("ValueError for a full queue.", True),
        ("Closed by its owner.", True),
        ("Args:\n    queue: queue to send to.", True),
        ("Return whether a queue is empty.", False),
        ("Name the queue, for people.", False),
        ("Warn of a full queue.", False),
        ("Cross-validate.", False),
    ],
)
def test_the_check_of_verbs_finds_what_it_is_for(docstring: str, lacks: bool) -> None:
    assert lacks_verb(docstring) == lacks


def test_docstrings_are_drawn_by_a_seed_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    main("a day")
    first = capsys.readouterr().out
    main("a day")
    assert first == capsys.readouterr().out and len(first.splitlines()) == 30
