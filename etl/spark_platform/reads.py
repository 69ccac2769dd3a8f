"""What decides the rows of a query: its views, its tables, and their files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

NO_FILES = ("LocalRelation", "OneRowRelation", "Range")  # leaves of a plan that hold their rows
HIDDEN = ("_", ".")


@dataclass(frozen=True)
class ReadFile:
    """`path` is relative to the table's folder where it is below it; `partition` has the text of each value."""

    path: str
    bytes: int
    mtime_ms: int
    partition: tuple[str | None, ...]


@dataclass(frozen=True)
class ReadTable:
    """A table of files: `parsing` is all that decides how they become rows."""

    name: str
    location: str
    partition_columns: tuple[str, ...]
    parsing: tuple[str, ...]
    files: tuple[ReadFile, ...]


@dataclass(frozen=True)
class OtherTable:
    """What a plan reads that is no table of files: its Java class, and what the catalog says of it, if anything."""

    kind: str
    provider: str = ""
    name: str = ""
    location: str = ""


@dataclass(frozen=True)
class ViewText:
    """A view of the plan; `text` is "" where only the session that made it knows what it is."""

    name: str
    text: str
    settings: str


@dataclass(frozen=True)
class QueryReads:
    """All that decides the rows of a query: its views from the top down, and its tables by name."""

    views: tuple[ViewText, ...]
    tables: tuple[ReadTable | OtherTable, ...]


def view_text(name: str, text: str, namespace: str, columns: list[str], settings: dict[str, str]) -> ViewText:
    """Describe a view by all that decides its rows.

    Args:
        name: full name of the view.
        text: SQL query of the view.
        namespace: namespace in which names in the query are looked up.
        columns: columns of the query when the view was made.
        settings: Spark SQL settings when the view was made.
    """
    return ViewText(name, text, json.dumps([namespace, columns, settings], sort_keys=True))


def parsing_of(format_name: str, options: dict[str, str], schema: str) -> tuple[str, ...]:
    """Describe how files become rows, from the catalog's entry of their table.

    `format_name` is as Spark's plans print it; `schema`: StructType in JSON.
    """
    return (format_name, *sorted(f"({key},{value})" for key, value in options.items() if key != "path"), schema)


def below(location: str, path: str) -> str:
    """Make a path relative to the location, if it is below it."""
    return path.removeprefix(location.rstrip("/") + "/")


def sorted_files(files: Iterable[ReadFile]) -> tuple[ReadFile, ...]:
    """Sort files by path; a folder may be that of two partitions."""
    return tuple(sorted(files, key=lambda file: (file.path, str(file.partition))))


def by_name(tables: Iterable[ReadTable | OtherTable]) -> tuple[ReadTable | OtherTable, ...]:
    """Sort tables by name, those of one name as they come in the plan."""
    return tuple(sorted(tables, key=lambda table: table.name))
