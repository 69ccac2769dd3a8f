"""The recipe's `tracking` block: where runs, metrics and models are recorded."""

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from sparkring.conf.schema import Strict
from sparkring.conf.secrets import redact

MLFLOW_SCHEMES = {  # of its own stores; plug-ins add others
    "http", "https", "file", "sqlite", "mysql", "postgresql", "mssql", "databricks", "databricks-uc", "uc",
}  # fmt: skip


def _free_alias(alias: str) -> str:
    if alias == "latest" or re.fullmatch(r"v\d+", alias):
        raise ValueError("`latest` and `v<number>` are MLflow's own aliases; take another name, such as champion")
    return alias


def experiment_problem(experiment: str, uri: str | None) -> str | None:
    """Return why the name is invalid: the embedded store makes a folder of it; servers allow paths."""
    if uri is not None or re.fullmatch(r"[\w][\w .-]*", experiment):
        return None
    return f"experiment = {experiment!r}: names a folder below root; use letters, digits, ` `, `.`, `-`, `_`"


class TrackingConfig(Strict):
    """Without `uri`, a sqlite store and an artifact folder below `root`; with it, a tracking server."""

    enabled: bool = Field(True, description="false: nothing is recorded in MLflow, and no model is registered")
    uri: str | None = Field(None, description="http://host:port, or any URI MLflow knows; None: embedded sqlite")
    root: str = Field("data/mlflow", description="folder of the embedded store, its artifacts, and the offline buffer")
    experiment: str | None = Field(None, description="None: the name of the recipe")
    registered_model: str | None = Field(None, description="None: the name of the recipe")
    alias: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$"), AfterValidator(_free_alias)] = Field(
        "champion", description="alias the new model version gets in the registry"
    )
    sample_rows: Annotated[int, Field(ge=0, le=1000)] = Field(
        16,
        description="raw rows of the test split that the registered model holds with their predictions, for "
        "`sparkring serve-check`; 0: none, where rows may not leave the dataset",
    )
    tags: dict[str, str] = Field({}, description="added to every run")
    system_metrics: bool = Field(
        True, description="record CPU, memory, disk and network use of the machine of the driver"
    )
    system_metrics_every_s: PositiveFloat = Field(10.0, description="seconds between two samples")
    flush_every_s: PositiveFloat = Field(2.0, description="seconds between two batches of metrics sent to the store")
    request_timeout_s: PositiveInt = Field(10, description="seconds until a request to the server counts as failed")
    request_retries: Annotated[int, Field(ge=0)] = Field(
        1, description="times a failed request is sent again before it waits in the journal"
    )
    openlineage: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")] | None = Field(
        None,
        description="namespace of the job in OpenLineage events, which go where the settings of OpenLineage's own "
        "client say (OPENLINEAGE_URL, openlineage.yml); None: none are sent",
    )

    @property
    def store_uri(self) -> str:
        path = str(Path(self.root).resolve())
        for mark in "%?#":  # of a URI
            path = path.replace(mark, f"%{ord(mark):02X}")
        return self.uri or f"sqlite:///{path}/mlflow.db"

    @property
    def unknown_store(self) -> str | None:
        """The scheme of `uri` where MLflow has no store for it; plug-ins of MLflow's add stores."""
        if self.uri is None or redact(self.uri) != self.uri:  # a secret is refused for that alone
            return None
        scheme, colon, _ = self.uri.partition(":")
        if not colon or scheme.partition("+")[0] in MLFLOW_SCHEMES:
            return None
        return None if entry_points(group="mlflow.tracking_store", name=scheme) else scheme

    def named(self, recipe: str) -> Self:
        """Return a copy whose unset `experiment` and `registered_model` are the recipe's name."""
        names = {"experiment": self.experiment or recipe, "registered_model": self.registered_model or recipe}
        return self.model_copy(update=names)

    @model_validator(mode="after")
    def _experiment_is_a_folder(self) -> Self:
        if self.experiment is not None and (problem := experiment_problem(self.experiment, self.uri)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _events_come_from_the_journal(self) -> Self:
        if self.openlineage is not None and not self.enabled:
            raise ValueError(
                f"openlineage = {self.openlineage!r} and enabled = false: events are made of what is tracked; set "
                "enabled = true, or openlineage = null"
            )
        return self
