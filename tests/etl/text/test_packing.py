"""Tokens: lossless to encode, and each in the sequence its place in the stream says, whatever the batches."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.etl.shards.write import SHARD
from sparkring.etl.text.packing import Start, count_ids, encode, pack
from sparkring.etl.text.sequences import entropy_nats
from sparkring.etl.text.tokenizer import byte_codec, train_bpe

TEXTS = ["def f(x):\n    return x\n" * 5, "Ünïcode ☃ 漢字", "", "\x00\t \r\n", "<|end|>"]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(iter(TEXTS * 3), 300)


@settings(max_examples=50)
@given(st.lists(st.text(max_size=40), max_size=5))
def test_any_text_survives(texts):
    for codec in (byte_codec(), train_bpe(iter(TEXTS), 270)):
        for text, ids in zip(texts, codec.encode(texts), strict=True):
            assert ids[-1] == codec.end_id and (ids[:-1] < codec.size).all() and codec.decode(ids) == text


def test_training_is_reproducible_and_ids_above_the_tokenizers_are_ours(bpe):
    assert train_bpe(iter(TEXTS * 3), 300).json == bpe.json and bpe.size <= 298
    assert (bpe.end_id, bpe.pad_id, bpe.vocab_size) == (bpe.size, bpe.size + 1, bpe.size + 2)
    assert (byte_codec().end_id, byte_codec().vocab_size) == (256, 258)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(2, 7), st.integers(0, 30), st.integers(1, 5))
def test_every_token_is_once_in_its_sequence(lengths, seq_len, before, batch_rows):
    """Tokens are numbered by their place in the stream, so a piece can be checked by itself."""
    edges = before + np.concatenate([[0], np.cumsum(lengths)])
    documents = [list(range(a, b)) for a, b in pairwise(edges)]
    batches = [
        pa.RecordBatch.from_pydict(
            {SHARD: pa.array([1] * len(part), pa.int32()), "tokens": pa.array(part, pa.list_(pa.int32()))}
        )
        for part in (documents[i : i + batch_rows] for i in range(0, len(documents), batch_rows))
    ]
    seen = []
    for piece in (p for b in pack([Start(0, 0), Start(before, 40)], seq_len, iter(batches)) for p in b.to_pylist()):
        places = [piece["sequence"] * seq_len + piece["position"] + i for i in range(len(piece["tokens"]))]
        assert piece["tokens"] == places and piece["position"] + len(places) <= seq_len and piece[SHARD] == 1
        assert piece["document"] == [40 + int(np.searchsorted(edges, t, side="right")) - 1 for t in places]
        seen += places
    assert seen == list(range(before, int(edges[-1])))


def test_encode_keeps_the_other_columns_and_counts_add_up(bpe):
    batch = pa.RecordBatch.from_pydict({"split": ["a", "b", "a", "b", "a"], "text": TEXTS})
    (out,) = encode(bpe, iter([batch]))
    assert out.schema.names == ["split", "tokens", "length"] and out["split"].to_pylist() == batch["split"].to_pylist()
    assert [bpe.decode(t) for t in out["tokens"].to_pylist()] == TEXTS
    counts = [r for b in count_ids(bpe.vocab_size, iter([out.select(["split", "tokens"])])) for r in b.to_pylist()]
    assert sum(r["count"] for r in counts) == sum(out["length"].to_pylist())
    assert {r["split"]: r["count"] for r in counts if r["id"] == bpe.end_id} == {"a": 3, "b": 2}


def test_entropy():
    assert entropy_nats([1, 1, 1, 1]) == pytest.approx(np.log(4)) and entropy_nats([5, 0]) == 0
