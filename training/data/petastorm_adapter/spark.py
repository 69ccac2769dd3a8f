"""petastorm's Spark converter and dataset writer (docs/how-to/petastorm.md).

with make_spark_converter(df, cache="file:///tmp/cache").make_torch_dataloader(batch_size=256) as loader:
    for batch in loader: ...                          # dict of tensors, the same number of steps on every rank

write_petastorm(spark, rows, schema, "file:///data/set")   # rows: an RDD of dicts of numpy values
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.storage import open_storage
from sparkring.training.data.petastorm_adapter import dataset
from sparkring.training.data.petastorm_adapter.reader import PetastormReader
from sparkring.training.data.request import DataRank


class SparkConverter:
    """A DataFrame written once as Parquet, and read until its files are deleted."""

    def __init__(self, url: str, rows: int) -> None:
        self.url, self._rows = url, rows

    def __len__(self) -> int:
        return self._rows

    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int = 1,
        columns: Sequence[str] | None = None,
        rank: DataRank | None = None,
        config: DataConfig | None = None,
    ) -> TorchLoader:
        """Load batches as dicts of tensors, equally many on every rank.

        Args:
            batch_size: rows per rank.
            num_epochs: passes over the data, each in another order.
            columns: names; None: all.
            rank: this rank's share, `DataRank(rank, size)`; None: it is the only one.
            config: seed, shuffle and the petastorm block; None: the defaults.
        """
        rank = rank or DataRank()
        reader = PetastormReader(self.url, columns, batch_size * rank.size, rank, config)
        return TorchLoader(reader, num_epochs)

    def delete(self) -> None:
        """Remove the files; a reader that still runs fails."""
        open_storage(self.url).delete("")


class TorchLoader:
    """Batches of all epochs, as an iterable and a context manager."""

    def __init__(self, reader: PetastormReader, epochs: int) -> None:
        self.reader, self._epochs = reader, epochs

    def __len__(self) -> int:
        return self.reader.steps_per_epoch * self._epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.reader.batches(0, len(self)):
            yield batch.columns

    def __enter__(self) -> TorchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()


def make_spark_converter(df: Any, cache: str, row_group_rows: int = 16_384, files: int | None = None) -> SparkConverter:
    """Write `df` below the URL `cache`, in equal row groups, so that shards are equal."""
    url = f"{cache.rstrip('/')}/{uuid.uuid4().hex}"
    frame = df if files is None else df.repartition(files)
    frame.write.option("parquet.block.row.count.limit", str(row_group_rows)).parquet(url)
    return SparkConverter(url, sum(dataset.row_group_rows(url)))


def write_petastorm(spark: Any, rows: Any, schema: Any, url: str, row_group_mb: int | None = None) -> None:
    """Write a Petastorm dataset: executors encode rows, the metadata comes last.

    Args:
        spark: Spark session of the job.
        rows: RDD of dicts of numpy values.
        schema: Unischema of the dataset.
        url: URL of the folder to write.
        row_group_mb: MB per row group; None for petastorm's default.
    """
    encoded = rows.map(lambda row: dataset.encode_row(schema, row))
    with dataset.materialize(spark, url, schema, row_group_mb):
        spark.createDataFrame(encoded, schema.as_spark_schema()).write.parquet(url)
