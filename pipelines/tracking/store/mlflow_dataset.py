"""Our datasets as MLflow shows them: a source named by its fingerprint, rows and files as the profile, the columns."""

from __future__ import annotations

import json
from typing import Any

from mlflow.data.dataset import Dataset
from mlflow.data.dataset_source import DatasetSource

from sparkring.conf.manifest import MANIFEST_NAME
from sparkring.conf.storage import open_storage
from sparkring.pipelines.tracking import ops

DIGEST_CHARACTERS = 36  # of a fingerprint; MLflow keeps no more


class SparkringSource(DatasetSource):
    """A dataset folder with a manifest. `load` gives the manifest's text."""

    def __init__(self, uri: str, fingerprint: str):
        self.uri, self.fingerprint = uri, fingerprint

    @staticmethod
    def _get_source_type() -> str:
        return "sparkring"

    def load(self) -> str:

        return open_storage(self.uri).read_bytes(MANIFEST_NAME).decode()

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:
        return False

    @classmethod
    def _resolve(cls, raw_source: Any) -> SparkringSource:
        raise NotImplementedError("a sparkring dataset is named by its manifest's fingerprint, not guessed from a URI")

    def to_dict(self) -> dict[str, str]:
        return {"uri": self.uri, "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, source_dict: dict[Any, Any]) -> SparkringSource:
        return cls(source_dict["uri"], source_dict["fingerprint"])


class SparkringDataset(Dataset):
    """Digest = the first 36 characters of our fingerprint, all that MLflow stores; the whole is in the source."""

    def __init__(self, info: ops.DatasetInfo):
        self._profile, self._schema = info.profile, info.schema
        super().__init__(SparkringSource(info.uri, info.fingerprint), name=info.name)

    def _compute_digest(self) -> str:
        return str(self._source.to_dict()["fingerprint"])[:DIGEST_CHARACTERS]

    @property
    def profile(self) -> dict[str, Any]:
        return self._profile

    @property
    def schema(self) -> list[ops.NamedType]:
        return self._schema

    def to_dict(self) -> dict[str, str]:
        columns = {"mlflow_colspec": self._schema} if self._schema else {}
        return super().to_dict() | {"profile": json.dumps(self._profile), "schema": json.dumps(columns)}
