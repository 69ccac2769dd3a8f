"""The page of exit codes, from the enumeration and the comments behind its members."""

from __future__ import annotations

from generator.source import Definition, Member, cell, class_named, code, table


def codes(known: list[Definition]) -> list[Member]:
    """The members of `Exit`, in order."""
    return class_named(known, "Exit").members()


def page(known: list[Definition]) -> str:
    """The whole page."""
    rows = [[str(each.default), code(each.name), cell(each.comment)] for each in codes(known)]
    return "# Exit codes\n\nOf every command.\n\n" + table(["code", "name", "meaning"], rows)
