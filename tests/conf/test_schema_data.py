"""The data block refuses combinations that cannot be, by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from conf.schema_data import DataConfig


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reader": "petastorm", "filters": [["a", ">", 1]]}, "filters: only reader native has this"),
        ({"reader": "petastorm", "audit": True, "decoders": {"i": "image"}}, "audit, decoders: only reader native"),
        ({"petastorm": {"url": "file:///x"}}, "petastorm.url is given but reader is native"),
        ({"verify": "off", "on_corrupt": "quarantine"}, "verify may not be off"),
        ({"filters": [["a", "~", 1]]}, "filters.0.1"),
        ({"filters": [["a", "in", 5]]}, "'in' wants a list of values"),
        ({"filters": [["a", "not in", []]]}, "'not in' wants a list of values"),
        ({"filters": [["a", "==", [1]]]}, "'==' wants one value"),
        ({"filters": [["a", "==", None]]}, "a null row is never kept"),
        ({"seed": -1}, "seed"),
        ({"lanes": 0}, "lanes"),
        ({"decoders": {"i": "video"}}, "decoders.i"),
        ({"mix": {"parts": [{"dataset": "a"}]}}, "mix.parts"),
        ({"mix": {"parts": [{"dataset": "a"}, {"dataset": "b", "weight": 0}]}}, "mix.parts.1.weight"),
        ({"windows": 3}, "windows"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(given)
    lines = [".".join(str(p) for p in e["loc"]) + ": " + e["msg"] for e in caught.value.errors()]
    assert message in " ".join(lines)


def test_defaults_are_possible_and_frozen() -> None:
    config = DataConfig()
    assert DataConfig.model_validate(config.model_dump()) == config
    with pytest.raises(ValidationError):
        config.lanes = 3  # type: ignore[misc]
