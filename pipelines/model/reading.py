"""Predict what a rank's reader will hold on the host."""

from __future__ import annotations

from sparkring.conf.config import RunConfig
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.model.recipe_model import pick_columns


def reader_bytes(config: RunConfig, dataset: Dataset | None, data_ranks: int) -> int | None:
    """Return the most bytes of rank 0's reader of the training split, before any filter.

    None: unknown, without a dataset, for a mix, for petastorm's reader, or settings that it refuses.
    """
    if dataset is None or config.data.mix is not None or config.data.reader != "native":
        return None
    weight = dataset.manifest.weight
    try:
        read = pick_columns(dataset.manifest, config.model, samples=True).read
        columns = [*read, *([weight["column"]] if weight is not None else [])]
        request = ReadRequest(dataset.folder, dataset.manifest, "train", columns, config.train.global_batch)
        reader = ParquetReader(request, DataRank(0, data_ranks), config.data)
    except ValueError:  # training raises it with its reason
        return None
    try:
        return reader.most_held().total
    finally:
        reader.close()
