"""Parse stored JSON files: each has one strict model; here are the field types and the way from bytes to a model.

What is read may be cut, damaged, of a newer version or forged. pydantic parses and checks it in one
pass: nesting, encoding and numbers are bounded by the parser, types and ranges by the model.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import CoreSchema, core_schema

from sparkring.conf.plain_text import count_of
from sparkring.conf.uris import check_below

if TYPE_CHECKING:
    from sparkring.conf.storage import Storage

MOST_BYTES = 1 << 30  # the index of a checkpoint of thousands of ranks is the largest file of this kind
SHOWN = 3
T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Lengths stand next to the patterns: a pattern that counts takes four times longer, and manifests have 100,000 files.
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]+$", min_length=64, max_length=64)]
Label = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", min_length=1, max_length=1000, description="one line of text")
]
FolderName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255, description="one part of a path")
]
RelativePath = Annotated[Label, AfterValidator(check_below)]


class StoredError(ValueError):
    """A stored file is damaged, of a newer version or not one of ours; the message names it and what is wrong."""


def up_to(newest: int) -> AfterValidator:
    """Make the rule of a format version field, as in `format: Annotated[int, rule]`."""

    def known(found: int) -> int:
        if not 1 <= found <= newest:
            raise ValueError(f"this sparkring reads 1 to {newest}; upgrade sparkring")
        return found

    return AfterValidator(known)


class CheckedAs:
    """Rule of a field that stays a plain dict or list, but has the form of `kind` where it is not empty."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        checked = handler.generate_schema(self.kind)
        filled = core_schema.no_info_wrap_validator_function(lambda value, go: go(value) if value else value, checked)
        return core_schema.chain_schema([filled, handler(source)])


OPEN = with_config(ConfigDict(extra="allow"))  # for a TypedDict of which we read a part
CLOSED = ConfigDict(extra="forbid", frozen=True)


class Stored(BaseModel):
    """The base of what a stored file holds: unknown keys are errors, and in `parse` values of another type too."""

    model_config = CLOSED


@contextmanager
def named(where: str, error: type[StoredError] = StoredError) -> Iterator[None]:
    """Turn pydantic's error inside the block into `error`, of one line: `where`, the keys, the values and the rules."""
    try:
        yield
    except ValidationError as found:
        raise error(f"{where}: {_words(found)}") from None


def parse(kind: type[T], data: bytes | str, where: str, error: type[StoredError] = StoredError) -> T:
    """Parse the content of a stored JSON file. Raises `error`, as `named` does."""
    with named(where, error):
        content: T = _adapter(kind).validate_json(data, strict=True)
    return content


def read(kind: type[T], storage: Storage, relative: str, error: type[StoredError] = StoredError) -> T:
    """Parse a JSON file below `storage`; a missing file raises `error` too."""
    where = f"{storage.uri}/{relative}"
    size = storage.size_bytes(relative)
    if size is None or size > MOST_BYTES:
        found = "no such file" if size is None else f"{count_of(size, 'byte')}; at most {MOST_BYTES} are read"
        raise error(f"{where}: {found}")
    return parse(kind, storage.read_bytes(relative), where, error)


def _words(found: ValidationError) -> str:
    problems = found.errors(include_url=False, include_context=False)
    lines = []
    for problem in problems[:SHOWN]:
        rule = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "json_invalid":
            lines.append(rule)
            continue
        key = ".".join(reprlib.repr(part).strip("'") for part in problem["loc"])
        value = "" if problem["type"] == "missing" else f" = {reprlib.repr(problem['input'])}"
        lines.append(f"{key}{value}: {rule[:1].lower()}{rule[1:]}".removeprefix(" "))
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(lines) + more
