"""Where runs, metrics, checkpoints and models are recorded (MLflow)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from conf.strict import Strict


def _free_alias(alias: str) -> str:
    if alias == "latest" or re.fullmatch(r"v\d+", alias):
        raise ValueError("`latest` and `v<number>` are MLflow's own aliases; take another name, such as champion")
    return alias


def experiment_problem(experiment: str, uri: str | None) -> str | None:
    """The embedded store keeps its artifacts in a folder of this name; servers may have paths as names."""
    if uri is not None or re.fullmatch(r"[\w][\w .-]*", experiment):
        return None
    return f"experiment = {experiment!r}: names a folder below root; use letters, digits, ` `, `.`, `-`, `_`"


class TrackingConfig(Strict):
    """Without `uri`, a sqlite store and an artifact folder below `root`; with it, a tracking server."""

    enabled: bool = True
    uri: str | None = Field(None, description="http://host:port, or any URI MLflow knows; None: embedded sqlite")
    root: str = Field("data/mlflow", description="folder of the embedded store, its artifacts, and the offline buffer")
    experiment: str | None = Field(None, description="None: the name of the recipe")
    registered_model: str | None = Field(None, description="None: the name of the recipe")
    alias: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$"), AfterValidator(_free_alias)] = Field(
        "champion", description="alias the new model version gets in the registry"
    )
    tags: dict[str, str] = Field({}, description="added to every run")
    system_metrics: bool = True
    system_metrics_every_s: PositiveFloat = 10.0
    flush_every_s: PositiveFloat = Field(2.0, description="seconds between two batches of metrics sent to the store")
    request_timeout_s: PositiveInt = Field(10, description="seconds until a request to the server counts as failed")
    request_retries: Annotated[int, Field(ge=0)] = 1

    @property
    def store_uri(self) -> str:
        return self.uri or f"sqlite:///{Path(self.root).resolve()}/mlflow.db"

    def named(self, recipe: str) -> Self:
        """With `experiment` and `registered_model` filled in: the name of the recipe where they are not set."""
        names = {"experiment": self.experiment or recipe, "registered_model": self.registered_model or recipe}
        return self.model_copy(update=names)

    @model_validator(mode="after")
    def _experiment_is_a_folder(self) -> Self:
        if self.experiment is not None and (problem := experiment_problem(self.experiment, self.uri)):
            raise ValueError(problem)
        return self
