"""Pack documents into token sequences, each row `seq_len` tokens; the model predicts within the row.

Documents are ordered by the hash of their key, joined into one stream per split, and cut every `seq_len` tokens, so
no token is lost or repeated; only a split's last sequence is padded. The sequences are then stored in hashed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from sparkring.conf.blocks.etl import TextConfig
from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of
from sparkring.etl.errors import EtlError
from sparkring.etl.shards.layout import Shard, plan_shards
from sparkring.etl.shards.shard import ORDER, number_rows
from sparkring.etl.shards.write import SHARD
from sparkring.etl.spark_platform.versions import repartition_by_number
from sparkring.etl.split import SPLIT
from sparkring.etl.text import packing
from sparkring.etl.text.packing import Start
from sparkring.etl.text.tokenizer import Codec, byte_codec, train_bpe

CHUNK_TOKENS = 4 << 20  # tokens one task packs; decides how the work is dealt out, never the result


@dataclass(frozen=True)
class Packed:
    """`rows` have the stored `columns`, SPLIT and `sequence`, their key; `held` is cached until they are written."""

    rows: DataFrame
    columns: list[Column]
    rows_by_split: dict[str, int]
    info: dict[str, Any]
    held: DataFrame


def pack(rows: DataFrame, config: TextConfig, splits: dict[str, int]) -> Packed:
    """Pack the documents of every split.

    `rows` have SPLIT and ORDER, one document each; `splits` counts them. Raises EtlError for a text column that is
    missing, not a string, or null.
    """
    check_column(rows, config.column)
    ordered = rows.select(SPLIT, ORDER, F.col(config.column).alias("text"))
    codec = _codec(ordered, config)
    schema = f"{SPLIT} string, {ORDER} long, bytes long, tokens array<int>, length int"
    documents = ordered.select(SPLIT, ORDER, F.octet_length("text").cast("long").alias("bytes"), "text")
    tokens = documents.mapInArrow(lambda batches: packing.encode(codec, batches), schema)
    tokens = tokens.persist(StorageLevel.DISK_ONLY)
    totals = _totals(tokens, splits)
    counts = _id_counts(tokens, codec)
    sequences = {split: -(-totals[split]["tokens"] // config.seq_len) for split in splits}
    for split, total in totals.items():
        total["sequences"] = sequences[split]
        total["padding"] = sequences[split] * config.seq_len - total["tokens"]
        total["unigram_entropy_nats"] = entropy_nats(counts[split])
    packed = _sequences(_pieces(tokens, totals, config.seq_len), config, codec)
    return Packed(packed, _columns(config, codec), sequences, _info(config, codec, totals), tokens)


def entropy_nats(counts: Sequence[int]) -> float:
    """Compute the entropy of the empirical distribution, the best loss without any context."""
    share = np.asarray(counts, np.float64) / max(sum(counts), 1)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def check_column(good: DataFrame, name: str) -> None:
    types = {f.name: f.dataType for f in good.schema.fields}
    if not isinstance(types.get(name), StringType):
        found = types[name].simpleString() if name in types else "missing"
        names = [n for n in types if not n.startswith("__")]
        raise EtlError(f"etl.text.column = {name!r}: is {found}, not a string; rows have {names}")
    if nulls := good.where(F.col(name).isNull()).count():
        raise EtlError(
            f"etl.text.column = {name!r}: {count_of(nulls, 'row is')} null; quarantine them with a row-level check"
        )


def _codec(ordered: DataFrame, config: TextConfig) -> Codec:
    """Return the tokenizer, trained on the first documents in stored order, one by one."""
    if config.tokenizer == "bytes":
        return byte_codec()
    chosen = ordered.where(F.col(SPLIT) == "train").orderBy(ORDER, "text").limit(config.train_documents)
    return train_bpe((row["text"] for row in chosen.select("text").toLocalIterator()), config.vocab_size)


def _totals(tokens: DataFrame, splits: dict[str, int]) -> dict[str, dict[str, Any]]:
    sums = [F.count(F.lit(1)).alias("documents"), F.sum("bytes").alias("bytes"), F.sum("length").alias("tokens")]
    found = {row[SPLIT]: row.asDict() for row in tokens.groupBy(SPLIT).agg(*sums).collect()}
    return {split: {k: found[split][k] for k in ("documents", "bytes", "tokens")} for split in splits}


def _id_counts(tokens: DataFrame, codec: Codec) -> dict[str, list[int]]:
    size = codec.vocab_size
    pairs = tokens.select(SPLIT, "tokens")
    partial = pairs.mapInArrow(lambda b: packing.count_ids(size, b), "split string, id int, count long")
    found: dict[str, list[int]] = {}
    for row in partial.groupBy("split", "id").agg(F.sum("count").alias("count")).orderBy("split", "id").collect():
        found.setdefault(row["split"], []).append(row["count"])
    return found


def _pieces(tokens: DataFrame, totals: dict[str, dict[str, Any]], seq_len: int) -> DataFrame:
    """Pack chunks of documents in stored order, each in one task that knows what precedes it."""
    documents = {split: total["documents"] for split, total in totals.items()}
    counts = {s: min(n, -(-totals[s]["tokens"] // CHUNK_TOKENS)) for s, n in documents.items()}
    chunks = plan_shards(documents, counts)
    numbered = number_rows(tokens, chunks)
    sums = numbered.groupBy(SHARD).agg(F.sum("length").alias("tokens")).collect()
    starts = _starts(chunks, {row[SHARD]: row["tokens"] for row in sums})
    arranged = repartition_by_number(numbered.select(SPLIT, SHARD, ORDER, "tokens"), len(chunks), SHARD)
    arranged = arranged.sortWithinPartitions(ORDER, "tokens").select(SHARD, "tokens")
    pieces = arranged.mapInArrow(lambda b: packing.pack(starts, seq_len, b), f"{SHARD} int, {packing.PIECE_SCHEMA}")
    split_of = F.array(*[F.lit(chunk.split) for chunk in chunks])
    return pieces.withColumn(SPLIT, split_of[F.col(SHARD)]).drop(SHARD)


def _starts(chunks: list[Shard], tokens: dict[int, int]) -> list[Start]:
    """Return the number of tokens and documents before each chunk, within its split."""
    starts: list[Start] = []
    for number, chunk in enumerate(chunks):
        before = starts[-1].tokens + tokens[number - 1] if chunk.index else 0
        starts.append(Start(before, chunk.first))
    return starts


def _sequences(pieces: DataFrame, config: TextConfig, codec: Codec) -> DataFrame:
    """Join the pieces of every sequence; pad the one that ends its split."""
    piece = F.struct("position", "tokens", "document")
    grouped = pieces.groupBy(SPLIT, "sequence").agg(F.array_sort(F.collect_list(piece)).alias("pieces"))
    tokens = F.flatten(F.col("pieces.tokens"))
    padding = F.lit(config.seq_len) - F.size(tokens)
    padded = [F.concat(tokens, F.array_repeat(F.lit(codec.pad_id), padding)).alias("tokens")]
    if config.document_mask:
        first = F.col("pieces.document")[0][0]
        numbers = F.transform(F.flatten(F.col("pieces.document")), lambda d: (d - first).cast("int"))
        padded.append(F.concat(numbers, F.array_repeat(F.lit(-1), padding)).alias("document"))
    return grouped.select(SPLIT, "sequence", *padded)


def _columns(config: TextConfig, codec: Codec) -> list[Column]:
    vector: dict[str, Any] = {"dtype": "int32", "layout": "vector", "shape": (config.seq_len,), "logical": "array<int>"}
    columns = [Column(name="tokens", role="feature", cardinality=codec.vocab_size, **vector)]
    return [*columns, Column(name="document", role="meta", **vector)] if config.document_mask else columns


def _info(config: TextConfig, codec: Codec, totals: dict[str, dict[str, Any]]) -> dict[str, Any]:
    texts, tokens = sum(t["bytes"] for t in totals.values()), sum(t["tokens"] for t in totals.values())
    return {
        "tokenizer": config.tokenizer,
        "tokenizer_json": codec.json,
        "size": codec.size,
        "vocab_size": codec.vocab_size,
        "end_id": codec.end_id,
        "pad_id": codec.pad_id,
        "seq_len": config.seq_len,
        "document_mask": config.document_mask,
        "bytes_per_token": texts / tokens,
        "splits": totals,
        "layout": "rows of seq_len consecutive tokens of the split's stream; predict token i + 1 from tokens 0..i of "
        "the same row; end_id ends every document; pad_id only fills a split's last row and is never a target; "
        "`document` numbers the documents within the row from 0, -1 where padded",
    }
