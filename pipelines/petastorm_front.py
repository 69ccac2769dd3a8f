"""For those who come from petastorm: its converter and its writer, in one line each, on this project's Spark and torch.

converter = make_spark_converter(df, cache="file:///tmp/cache")
with converter.make_torch_dataloader(batch_size=256, data_rank=rank, data_size=size) as loader:
    for batch in loader: ...                          # dict of tensors, the same number of steps on every rank

write_petastorm(spark, rows, schema, "file:///data/set")   # rows: an RDD of dicts of numpy values
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from conf.storage import open_storage
from training.data import petastorm as adapter


class SparkConverter:
    """A DataFrame written once as Parquet, to be read again and again; the files stay until `delete`."""

    def __init__(self, url: str, rows: int) -> None:
        self.url, self._rows = url, rows

    def __len__(self) -> int:
        return self._rows

    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        columns: Sequence[str] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 2,
    ) -> TorchLoader:
        """Batches of `batch_size` rows per rank, as dicts of tensors, equally many on every rank."""
        settings = adapter.PetastormSettings(workers=workers, seed=seed, shuffle=shuffle)
        reader = adapter.PetastormReader(self.url, columns, batch_size * data_size, data_rank, data_size, settings)
        return TorchLoader(reader, num_epochs)

    def delete(self) -> None:
        """Remove the files; a reader that still runs fails."""
        open_storage(self.url).delete("")


class TorchLoader:
    """Iterable and context manager, as petastorm's; `len` is the number of batches of all epochs."""

    def __init__(self, reader: adapter.PetastormReader, epochs: int) -> None:
        self.reader, self._epochs = reader, epochs

    def __len__(self) -> int:
        return self.reader.steps_per_epoch * self._epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for epoch in range(self._epochs):
            for batch in self.reader.batches(epoch):
                yield batch.columns

    def __enter__(self) -> TorchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()


def make_spark_converter(df: Any, cache: str, row_group_rows: int = 16_384, files: int | None = None) -> SparkConverter:
    """Write `df` below the folder URL `cache` with exact row groups, so that petastorm's shards can be about equal."""
    url = f"{cache.rstrip('/')}/{uuid.uuid4().hex}"
    frame = df if files is None else df.repartition(files)
    frame.write.option("parquet.block.row.count.limit", str(row_group_rows)).parquet(url)
    rows = sum(adapter.row_group_rows(url))
    return SparkConverter(url, rows)


def write_petastorm(spark: Any, rows: Any, schema: Any, url: str, row_group_mb: int | None = None) -> None:
    """A Petastorm dataset of an RDD of dicts by a Unischema: codecs applied on the executors, metadata written last."""
    encoded = rows.map(lambda row: adapter.encode_row(schema, row))
    with adapter.materialize(spark, url, schema, row_group_mb):
        spark.createDataFrame(encoded, schema.as_spark_schema()).write.parquet(url)
