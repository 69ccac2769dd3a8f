"""The recipe's `storage` block: where files live."""

from sparkring.conf.schema import Strict


class StorageConfig(Strict):
    """Where datasets and run folders live: a local path or any URI pyarrow or fsspec knows."""

    datasets: str = "data/datasets"
    runs: str = "data/runs"
