"""Cut documents' tokens into pieces of fixed-length sequences; a token's place in the stream decides where it goes.

The stream of a split is its documents in stored order, one after another, each ended by `end_id`. Token t of the
stream is token t mod L of sequence t div L (L = seq_len). Runs in Spark's Python workers on numpy and pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparkring.etl.columns.ragged import list_lengths, lists_of
from sparkring.etl.shards.write import SHARD
from sparkring.etl.text.tokenizer import Codec

PIECE_SCHEMA = "sequence long, position int, tokens array<int>, document array<long>"


def encode(codec: Codec, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Replace the last column, texts, by `tokens` and their number; the columns before it pass through."""
    for batch in batches:
        tokens = list(codec.encode(batch.column(batch.num_columns - 1).to_pylist()))
        lengths = np.array([len(t) for t in tokens], np.int32)
        lists = lists_of(np.concatenate([*tokens, np.zeros(0, np.int32)]), lengths)
        kept = [batch.column(i) for i in range(batch.num_columns - 1)]
        names = [*batch.schema.names[:-1], "tokens", "length"]
        yield pa.RecordBatch.from_arrays([*kept, lists, pa.array(lengths)], names=names)


def count_ids(vocab_size: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Count how often every id occurs, by split: records (split, id, count)."""
    totals: dict[str, NDArray[np.int64]] = {}
    for batch in batches:
        for split in batch.column(0).unique().to_pylist():
            mine = batch.filter(pa.compute.equal(batch.column(0), split)).column(1).flatten().to_numpy()
            counts = np.bincount(mine, minlength=vocab_size)
            totals[split] = totals.get(split, np.zeros(vocab_size, np.int64)) + counts
    for split, counts in totals.items():
        ids = np.flatnonzero(counts)
        yield pa.RecordBatch.from_arrays(
            [pa.array([split] * len(ids)), pa.array(ids.astype(np.int32)), pa.array(counts[ids])],
            names=["split", "id", "count"],
        )


@dataclass(frozen=True)
class Start:
    """Where a chunk of documents begins: tokens and documents of its split before it."""

    tokens: int
    documents: int


def pack(starts: list[Start], seq_len: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pack one chunk's ordered documents (SHARD, tokens) into SHARD and PIECE_SCHEMA, one record per sequence run."""
    shard, place = -1, Start(0, 0)
    for batch in batches:
        if not batch.num_rows:
            continue
        if shard < 0:
            shard = batch.column(SHARD)[0].as_py()
            place = starts[shard]
        lists = batch.column("tokens")
        lengths = list_lengths(lists)
        numbers = np.repeat(np.arange(place.documents, place.documents + len(lengths)), lengths)
        pieces = cut(lists.flatten().to_numpy(), numbers, place.tokens, seq_len)
        yield pieces.add_column(0, SHARD, pa.array([shard] * pieces.num_rows, pa.int32()))
        place = Start(place.tokens + int(lengths.sum()), place.documents + len(lengths))


def cut(tokens: NDArray[np.int32], documents: NDArray[np.int64], first: int, seq_len: int) -> pa.RecordBatch:
    """Cut tokens first, first + 1, ... of the stream where sequences end."""
    last = first + len(tokens)
    edges = np.unique(np.concatenate([[first, last], np.arange(-(-first // seq_len) * seq_len, last, seq_len)]))
    begins, lengths = edges[:-1], np.diff(edges).astype(np.int32)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(begins // seq_len),
            pa.array((begins % seq_len).astype(np.int32)),
            lists_of(tokens, lengths),
            lists_of(documents, lengths),
        ],
        names=["sequence", "position", "tokens", "document"],
    )
