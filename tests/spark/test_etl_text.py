"""Documents to sequences: every token once, counts that add up, the same bytes whatever the partitions."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.shards.shard import with_order
from sparkring.etl.text import sequences as text
from sparkring.etl.text.tokenizer import Codec
from sparkring.etl.windows.window import pin_dataset

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = 60


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    sources = sorted((ROOT / "etl").glob("*.py")) + sorted((ROOT / "conf").glob("*.py"))
    for number in range(DOCUMENTS):
        lines = sources[number % len(sources)].read_text().splitlines()[: 5 + number]
        (folder / f"{number:03d} ü+.py").write_text("\n".join([f"# {number}", *lines]))
    return folder


def build(spark, documents, root, shard=None, **block):
    base = yaml.safe_load((ROOT / "conf/recipes/text.yaml").read_text())["etl"]
    base["sources"]["python"]["path"] = str(documents)
    base["split"] = {"kind": "hash", "shares": {"train": 0.7, "test": 0.3}}
    config = EtlConfig.model_validate(base | {"shard": shard or {}, "text": block})
    return build_dataset(spark, BuildRequest(config, pin_dataset(config, {}), "t", str(root)))


def codec_of(built):
    return Codec(built.manifest.text["tokenizer_json"], built.manifest.text["size"])


def stored(built, split):
    """Rows of a split: (rows, columns)."""
    files = [f.path for f in built.manifest.files if f.split == split]
    table = pa.concat_tables([pq.read_table(f"{built.uri}/{p}") for p in files])
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_every_token_of_every_document_is_stored_once(spark, documents, tmp_path, tokenizer):
    built = build(spark, documents, tmp_path, tokenizer=tokenizer, vocab_size=400, seq_len=32, document_mask=True)
    info, codec, texts = built.manifest.text, codec_of(built), []
    for split, total in info["splits"].items():
        rows = stored(built, split)
        tokens, numbers = rows["tokens"], rows["document"]
        assert tokens.shape == (built.manifest.splits[split].rows, 32) == (total["sequences"], 32)
        assert (tokens == codec.pad_id).sum() == total["padding"] < 32
        assert total["tokens"] + total["padding"] == tokens.size
        assert (tokens == codec.end_id).sum() == total["documents"]
        assert ((numbers == -1) == (tokens == codec.pad_id)).all() and (numbers[:, 0] == 0).all()
        # The document's number rises by one after each end, and nowhere else.
        real = numbers[:, 1:] >= 0
        assert (np.diff(numbers, axis=1)[real] == (tokens[:, :-1] == codec.end_id)[real]).all()
        assert total["unigram_entropy_nats"] == pytest.approx(
            text.entropy_nats(np.bincount(tokens[tokens != codec.pad_id])), rel=1e-12
        )
        texts += reassemble(tokens, codec)
    assert sorted(texts) == sorted(f.read_text() for f in documents.iterdir())
    total_bytes = sum(f.stat().st_size for f in documents.iterdir())
    assert sum(t["bytes"] for t in info["splits"].values()) == total_bytes
    assert built.manifest.accounting.rows_in == DOCUMENTS == built.manifest.accounting.rows_out


def reassemble(tokens, codec):
    """Documents from sequences in unknown order: follow each sequence by the only one that can come next."""
    # Stored order is hashed; undo it by the same hash of the sequence number.
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    spark = SparkSession.active()
    order = spark.range(len(tokens)).select("id", F.xxhash64(F.lit(0), "id").alias("h")).orderBy("h").toArrow()["id"]
    stream = np.empty_like(tokens)
    stream[order.to_numpy()] = tokens
    flat = stream.ravel()
    ends = np.flatnonzero(flat == codec.end_id)
    return [codec.decode(flat[a:b]) for a, b in zip([0, *(ends[:-1] + 1)], ends, strict=True)]


def test_bytes_do_not_depend_on_chunks_or_partitions(spark, documents, tmp_path, monkeypatch):
    first = build(spark, documents, tmp_path / "a", vocab_size=400, seq_len=64)
    monkeypatch.setattr(text, "CHUNK_TOKENS", 4000)
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "3")
    session.conf.set("spark.sql.adaptive.enabled", "false")
    second = build(session, documents, tmp_path / "b", vocab_size=400, seq_len=64)
    assert [f.sha256 for f in first.manifest.files] == [f.sha256 for f in second.manifest.files]
    assert json.dumps(first.manifest.text) == json.dumps(second.manifest.text)
    assert [c.name for c in first.manifest.columns] == ["tokens"]


def test_the_tokenizer_sees_training_documents_only(spark, documents, tmp_path):
    """A character of held-out documents alone is never merged with another."""
    rows = spark.createDataFrame([(i, "ab" * 50 if i < 90 else "qz" * 500) for i in range(100)], "id int, text string")
    rows = rows.selectExpr("*", "if(id < 90, 'train', 'test') AS __split")
    config = EtlConfig.model_validate(
        {"kind": "text", "sources": {"s": {"path": "x", "format": "text"}}, "rows": "s", "text": {"vocab_size": 300}}
    ).text
    packed = text.pack(with_order(rows, ["id"], 0), config, {"train": 90, "test": 10})
    vocabulary = json.loads(packed.info["tokenizer_json"])["model"]["vocab"]
    packed.held.unpersist()
    assert "ab" in vocabulary and "qz" not in vocabulary and packed.info["splits"]["test"]["tokens"] == 10 * 1001


def test_bad_text_is_refused(spark, documents, tmp_path):
    with pytest.raises(EtlError, match=r"etl\.text\.column = 'body': is missing"):
        build(spark, documents, tmp_path, column="body")
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(EtlError, match=r"latin\.txt: is not UTF-8"):
        build(spark, folder, tmp_path)
