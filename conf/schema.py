"""What every block of the recipe is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NAME, REFERENCE = r"^[A-Za-z_]\w*$", r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
RUN_NAME = r"^[a-z0-9][a-z0-9_-]*$"  # of folders and models too
Name = Annotated[str, Field(pattern=NAME)]
Reference = Annotated[str, Field(pattern=REFERENCE)]  # module:name
NonNegativeFloat = Annotated[float, Field(ge=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


def _known_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # a folder of zones is an OSError
        raise ValueError(f"{name!r} is no time zone, such as UTC or America/New_York") from error
    return name


TimeZone = Annotated[str, AfterValidator(_known_zone)]


class Strict(BaseModel):
    """Base of every block: unknown keys are errors, values never change, defaults are checked like given values.

    An error does not repeat the value, which may be a secret; `sparkring.conf.load` shows it with secrets hidden.
    Modules of blocks have no `from __future__ import annotations`: pydantic would compile the text of each annotation,
    a sixth of the time that the blocks take to import.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        serialize_by_alias=True,  # a key such as `snapshot-id` is stored and shown as it is written
    )


def same_but_for_case(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two names that Spark, which does not tell them apart by case, takes for one."""
    seen: dict[str, str] = {}
    for name in names:
        if name.lower() in seen:
            return seen[name.lower()], name
        seen[name.lower()] = name
    return None


def check_case(where: str, names: Iterable[str]) -> None:
    """ValueError where two names differ by case alone, or not at all."""
    if twice := same_but_for_case(names):
        raise ValueError(
            f"{where}: {twice[0]!r} and {twice[1]!r} are one name to Spark, which ignores case; rename one"
        )
