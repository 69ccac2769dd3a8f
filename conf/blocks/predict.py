"""The `predict` block: rows that `sparkring predict` scores, with which model, and where the predictions go."""

import re
from typing import Literal

from pydantic import Field, field_validator

from sparkring.conf.schema import Strict, check_case

REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[A-Za-z_][\w-]*)|/(?P<version>[1-9]\d*))")
"""What MLflow calls a registered model, by alias or by version."""
CONTRIBUTIONS = ("contributions", "contribution_base")  # columns, where they are asked for
ABOUT = ("model_name", "model_version", "scored_at", "interval")  # columns next to each prediction
POSITIVE = "positive_class"  # next to the probability of a class of texts
OURS = re.compile(rf"prediction|class_\d+|{'|'.join([*ABOUT, POSITIVE])}", re.IGNORECASE)


class PredictConfig(Strict):
    """The rows of a view, scored by a registered model or one of a run."""

    rows: str = Field(
        description="name of a view or source of etl, or module:function, as etl.rows; no label is needed"
    )
    to: str = Field(
        description="folder of any storage URI; its day=<date>/ is replaced whole, itself where there is no date"
    )
    model: str | None = Field(
        None,
        description="models:/<name>@<alias>, models:/<name>/<version> or the URI of a run's `model` folder; None: "
        "tracking.registered_model at tracking.alias",
    )
    keep: list[str] = Field([], description="columns of the rows that stand beside each prediction")
    contributions: bool = Field(
        False,
        description="also write what each column adds to the row's raw prediction (log-odds, a class's score, log rate "
        "or value), as the map `contributions`; with `contribution_base` they sum to it",
    )
    on_missing_column: Literal["fail", "null"] = Field(
        "fail", description="where the rows lack a column that the model was trained on; null: it is null in every row"
    )

    @field_validator("model")
    @classmethod
    def _known_form(cls, uri: str | None) -> str | None:
        if uri is not None and uri.startswith("models:") and REGISTERED.fullmatch(uri) is None:
            raise ValueError(f"{uri!r}: must be models:/<name>@<alias> or models:/<name>/<version>")
        return uri

    @field_validator("keep")
    @classmethod
    def _not_ours(cls, names: list[str]) -> list[str]:
        check_case("keep", names)
        if taken := [name for name in names if OURS.fullmatch(name)]:
            raise ValueError(
                f"{taken[0]!r} is the name of a column that every prediction has ({', '.join(['prediction', *ABOUT])}, "
                "class_<i>); give the kept column another name in the view"
            )
        return names

    @property
    def folder(self) -> str | None:
        """The URI of the model's folder; None for a registered model."""
        return None if self.model is None or REGISTERED.fullmatch(self.model) else self.model
