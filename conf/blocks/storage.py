"""The recipe's `storage` block: where files live."""

from pydantic import Field

from sparkring.conf.schema import Strict


class StorageConfig(Strict):
    """Where datasets and run folders live: a local path or any URI pyarrow or fsspec knows."""

    datasets: str = Field("data/datasets", description="folder of datasets, one subfolder per fingerprint")
    runs: str = Field("data/runs", description="folder of run folders")
