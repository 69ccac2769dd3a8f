"""What every block of the recipe is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

NAME, REFERENCE = r"^[A-Za-z_]\w*$", r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
RUN_NAME = r"^[a-z0-9][a-z0-9_-]*$"  # of folders and models too
Name = Annotated[str, Field(pattern=NAME)]
Reference = Annotated[str, Field(pattern=REFERENCE)]  # module:name
NonNegativeFloat = Annotated[float, Field(ge=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


NO_FP8 = "there is no FP8 here: ranks compute in fp32, bf16 or fp16, and no seconds are predicted for another precision"
FP8 = ("fp8", "float8", "e4m3", "e5m2")


def refuse_fp8(value: Any) -> Any:
    """Return the value as it is. ValueError where it, or a key of a mapping, asks for FP8 in any spelling."""
    names = value if isinstance(value, (dict, list, tuple)) else [value]
    if any(isinstance(name, str) and any(word in name.lower() for word in FP8) for name in names):
        raise ValueError(NO_FP8)
    return value


def _known_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # a folder of zones is an OSError
        raise ValueError(f"{name!r} is no time zone, such as UTC or America/New_York") from error
    return name


TimeZone = Annotated[str, AfterValidator(_known_zone)]


NOT_WALKED = ("metadata", "default", "serialization", "expected")  # of a core schema: values, and no schemas


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, and this is a boolean")
    return value


REFUSES = {"type": "no-info", "function": _no_boolean}  # of a schema that has been looked at


def refuse_booleans(schema: Any) -> None:
    """Make every number of a core schema refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(schema, list | tuple):
        for each in schema:
            refuse_booleans(each)
    elif _is_number(schema):
        number = dict(schema)
        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(_no_boolean, number))
    elif isinstance(schema, dict) and schema.get("function") != REFUSES:
        if schema.get("type") == "union":  # the location of an error names a choice: as before
            schema["choices"] = [(each, each["type"]) if _is_number(each) else each for each in schema["choices"]]
        refuse_booleans([value for key, value in schema.items() if key not in NOT_WALKED])


def _is_number(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    if schema.get("type") == "literal":
        return {type(each) for each in schema["expected"]} == {int}
    return schema.get("type") in ("int", "float")


class Strict(BaseModel):
    """Base of every block: unknown keys are errors, values never change, defaults are checked like given values.

    A number that is given as a boolean is an error too.

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

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        refuse_booleans(handler.resolve_ref_schema(schema))
        return schema


def same_but_for_case(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first two names that are one name to Spark, which ignores case."""
    seen: dict[str, str] = {}
    for name in names:
        if name.lower() in seen:
            return seen[name.lower()], name
        seen[name.lower()] = name
    return None


def check_case(where: str, names: Iterable[str]) -> None:
    """Raise ValueError if two names are equal or differ by case alone."""
    if twice := same_but_for_case(names):
        raise ValueError(
            f"{where}: {twice[0]!r} and {twice[1]!r} are one name to Spark, which ignores case; rename one"
        )
