"""The base of every configuration block."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Base of every block: unknown keys are errors, values never change, defaults are checked like given values.

    An error does not repeat the value, which may be a secret; `conf.load` shows it with secrets hidden.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )
