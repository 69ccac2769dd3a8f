"""What every kind of source has. Options have the names of Spark, Delta and Iceberg."""

import datetime as dt
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator

from sparkring.conf.schema import Strict


class SourceConfig(Strict):
    """A kind of source: its keys, and what the rest of the code asks of every kind.

    How a kind is pinned and read is a class too: see `OPENED` in etl/sources/pin.py.
    """

    FORMATS: ClassVar[tuple[str, ...]] = ()  # values of `format` that mean this kind
    POINTERS: ClassVar[frozenset[str]]  # keys that say where the table is and which snapshot: not part of its content
    NEEDS_SPARK: ClassVar[bool] = False  # to pin it
    IS_FILES: ClassVar[bool] = False  # for OpenLineage: the user's own files, not a table of some engine
    VERSION_KEY: ClassVar[str | None] = None  # the key of the table's version in the snapshot's lineage
    columns: dict[str, str]

    @property
    def location(self) -> str | None:
        """Return the path or URI of the source; None if a catalog or database finds the table."""
        return None

    @property
    def place(self) -> str:
        """Name where the source is, for people."""
        return self.location or "a query"

    @property
    def lineage_location(self) -> str | None:
        """Return the path or URI that names the table in OpenLineage; None: see `lineage_name`."""
        return self.location

    def lineage_name(self, name: str, environment: Mapping[str, str]) -> tuple[str, str]:
        """Return OpenLineage's namespace and name of a table without a location.

        `name`: of the source in the recipe; `environment`: variables that a database's URL comes from.
        """
        raise TypeError(f"{name}: a {type(self).__name__} without a location has no name for OpenLineage")

    def known_columns(self) -> list[str] | None:
        """List the columns that the table has by this declaration; None if only the table says."""
        return [*self.columns] or None

    def at_version(self, read: Mapping[str, Any]) -> Self:
        """Return the declaration of the version that was read (`read`: its lineage); itself without versions."""
        return self

    def cut_problem(self, name: str, column: str) -> str | None:
        """Explain why one interval's rows cannot be selected by a column of dates; None if they can be."""
        if "where" in type(self).model_fields:
            return None
        kind = (*self.FORMATS, type(self).__name__)[0]
        return f"interval.sources.{name}: a {kind} source is read whole; leave it out, and it is read for every part"

    def cut(self, condition: str) -> Self:
        """Return the declaration of those rows that meet an SQL condition too. `cut_problem` must be None."""
        given: str | None = getattr(self, "where")  # noqa: B009  # every kind that may be cut has it
        return self.model_copy(update={"where": condition if given is None else f"({given}) AND {condition}"})


def instant(text: str) -> dt.datetime:
    """Parse an ISO 8601 instant; in UTC where it names no offset. Raises ValueError."""
    found = dt.datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)


def as_text(value: Any) -> Any:
    """Convert a date to text, because YAML parses 2026-11-21 as a date."""
    return value.isoformat() if isinstance(value, dt.date) else value


Instant = Annotated[str, BeforeValidator(as_text), AfterValidator(lambda text: text if instant(text) else "")]
