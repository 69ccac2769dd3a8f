"""Convert text to token ids and back, without loss: byte-level BPE (the `tokenizers` library) or plain bytes.

The end-of-document and padding ids are above the tokenizer's own, so no text can spell them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from sparkring.conf.plain_text import count_of
from sparkring.conf.stored import OPEN, Count, StoredError, parse

BYTES = 256
SPECIALS = 2


@OPEN
class BpeModel(TypedDict):
    type: Literal["BPE"]
    vocab: dict[str, Count]
    merges: list[tuple[str, str]]


@OPEN
class BpeFile(TypedDict):
    """What we read of the library's serialised form: it panics on some files, and runs any regex that stands in one."""

    model: BpeModel


@dataclass(frozen=True)
class Codec:
    """`json` is the tokenizer's own serialised form; empty for bytes. `size` counts its ids without end and padding.

    Raises StoredError where they are not those of a byte-level BPE.
    """

    json: str
    size: int

    def __post_init__(self) -> None:
        if self.json:
            _ = self._bpe
        elif self.size != BYTES:
            raise StoredError(f"tokenizer: {count_of(self.size, 'id')}; bytes have {BYTES}")

    @cached_property
    def _bpe(self) -> Tokenizer:
        model = parse(BpeFile, self.json, "tokenizer")["model"]
        vocab, merges = model["vocab"], model["merges"]
        if sorted(vocab.values()) != list(range(self.size)):
            raise StoredError(f"tokenizer: its {count_of(len(vocab), 'id is')} not each of 0..{self.size - 1} once")
        if unknown := [pair for pair in merges if not {*pair, "".join(pair)} <= vocab.keys()]:
            raise StoredError(f"tokenizer: the merge {unknown[0]!r:.200} is not of its tokens")
        return _byte_level(models.BPE(vocab=vocab, merges=merges))

    @property
    def end_id(self) -> int:
        return self.size

    @property
    def pad_id(self) -> int:
        return self.size + 1

    @property
    def vocab_size(self) -> int:
        return self.size + SPECIALS

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[np.int32]]:
        """Yield the token ids of every text, with end_id after each."""
        end = np.array([self.end_id], np.int32)
        if not self.json:
            for text in texts:
                yield np.concatenate([np.frombuffer(text.encode(), np.uint8).astype(np.int32), end])
            return
        for found in self._bpe.encode_batch(list(texts), add_special_tokens=False):
            yield np.concatenate([np.array(found.ids, np.int32), end])

    def decode(self, ids: Iterable[int]) -> str:
        """Convert ids to text; end and padding are left out, bytes that are not UTF-8 become U+FFFD."""
        own = [int(i) for i in ids if i < self.size]
        if not self.json:
            return bytes(own).decode(errors="replace")
        return str(self._bpe.decode(own, skip_special_tokens=False))


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_codec() -> Codec:
    return Codec("", BYTES)


def train_bpe(texts: Iterator[str], vocab_size: int) -> Codec:
    """Train byte-level BPE (https://arxiv.org/abs/1508.07909 over bytes); few texts give fewer ids."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Codec(tokenizer.to_str(), tokenizer.get_vocab_size())
