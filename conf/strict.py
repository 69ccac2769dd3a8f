"""The base of every configuration block."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown keys are errors, values never change after loading, defaults are checked like given values. An error does
    not repeat the value: it may be a secret, and `conf.load` shows it with secrets hidden."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )
