"""What the driver gives every process of a training job: a recipe, a dataset and a run folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sparkring.conf.config import RunConfig
from sparkring.conf.storage import Storage, open_storage


@dataclass(frozen=True, kw_only=True)
class TrainPayload:
    """The same for all ranks and servers. `JobSpec.payload` carries it as JSON."""

    config: dict[str, Any]  # the recipe, resolved
    dataset: str  # URI of its folder
    run: str  # URI of the run folder
    config_digest: str = ""  # of the recipe; each checkpoint notes it
    is_compared: bool = False  # with another family's model, so ranks score the validation rows by the exported one too

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> TrainPayload:
        """Parse the payload of this process. TypeError if the driver has another version."""
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def recipe(self) -> RunConfig:
        return RunConfig.model_validate(self.config)

    @property
    def run_folder(self) -> Storage:
        return open_storage(self.run)
