"""Tokenizers lose nothing, and a stored one is checked before it is used."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.conf.stored import StoredError
from sparkring.etl.text.tokenizer import BYTES, Codec, byte_codec, train_bpe

TEXTS = ["the cat sat on the mat", "the hat and the cat", "naïve café ☕"] * 5


@given(st.text())
def test_bytes_give_every_text_back(text):
    codec = byte_codec()
    (ids,) = codec.encode([text])
    assert ids[-1] == codec.end_id == BYTES and codec.decode(ids) == text
    assert codec.pad_id == BYTES + 1 and codec.vocab_size == BYTES + 2


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bpe_gives_every_text_back_even_characters_it_was_not_trained_on(text):
    (ids,) = CODEC.encode([text])
    assert ids[-1] == CODEC.end_id and CODEC.decode(ids) == text and CODEC.decode([CODEC.pad_id]) == ""


CODEC = train_bpe(iter(TEXTS), 300)


def test_bpe_is_the_same_for_the_same_texts_and_shorter_than_bytes():
    assert train_bpe(iter(TEXTS), 300) == CODEC and CODEC.vocab_size <= 300
    (ids,) = CODEC.encode(["the cat"])
    assert len(ids) < len("the cat")


def test_bytes_that_are_no_utf8_become_a_replacement_character():
    assert byte_codec().decode([0xFF, ord("a")]) == "\ufffda"


@pytest.mark.parametrize(
    ("json_text", "size", "words"),
    [
        ("", 300, "300 ids; bytes have 256"),
        (CODEC.json, CODEC.size + 1, "are not each of"),
        ("{", CODEC.size, "tokenizer"),
        (json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}), 1, "is not of its tokens"),
    ],
)
def test_a_damaged_tokenizer_is_refused(json_text, size, words):
    with pytest.raises(StoredError, match=words):
        Codec(json_text, size)
