"""Encoding: documents to Megatron's indexed token files (.bin and .idx), both splits in one pass."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from sentencepiece import SentencePieceProcessor
from tqdm import tqdm

from sagebwd.tokenizer.vocabulary import segments

logger = logging.getLogger(__name__)

BATCH_CHARACTERS = 4_000_000  # encoded at once, over all cores; bounds the memory
SEGMENT_CHARACTERS = 65_536  # so that one long document is shared among the cores too
SECONDS_BETWEEN_LOGS = 30


@dataclass
class SplitCounts:
    """What one split holds. tokens_of: [vocab_size] int64, how often each token occurs, ends of documents included."""

    tokens_of: np.ndarray
    documents: int = 0
    text_bytes: int = 0

    @property
    def tokens(self) -> int:
        return int(self.tokens_of.sum())


@dataclass
class _Split:
    prefix: Path
    vocab_size: int
    counts: SplitCounts = field(init=False)
    builder: IndexedDatasetBuilder = field(init=False)

    def __post_init__(self) -> None:
        self.counts = SplitCounts(np.zeros(self.vocab_size, dtype=np.int64))
        self.builder = IndexedDatasetBuilder(f"{self.prefix}.bin", dtype=DType.optimal_dtype(self.vocab_size))

    def add(self, text: str, tokens: list[int]) -> None:
        self.builder.add_document(tokens, [len(tokens)])
        self.counts.tokens_of += np.bincount(tokens, minlength=self.vocab_size)
        self.counts.documents += 1
        self.counts.text_bytes += len(text.encode("utf-8"))


def encode(
    documents: Iterable[str],
    total: int,
    validation: Collection[int],
    processor: SentencePieceProcessor,
    train_prefix: Path,
    validation_prefix: Path,
) -> tuple[SplitCounts, SplitCounts]:
    """Writes both prefixes' .bin and .idx: the documents in their order, each ended by eod.

    total: the number of documents, for the progress bar. validation: the positions of the documents held out.
    Tokens are uint16 below 65,500 pieces, int32 above. Returns the counts of the training and the validation split.
    """
    train, held_out = (_Split(prefix, processor.vocab_size()) for prefix in (train_prefix, validation_prefix))
    eod = processor.eos_id()
    position = 0
    for batch in _batches(_shown(documents, total)):
        parts = [list(segments(text, SEGMENT_CHARACTERS)) for text in batch]
        encoded = iter(processor.encode([part for document in parts for part in document]))
        for text, document in zip(batch, parts, strict=True):
            tokens = [token for _ in document for token in next(encoded)]
            (held_out if position in validation else train).add(text, [*tokens, eod])
            position += 1
    for split in (train, held_out):
        split.builder.finalize(f"{split.prefix}.idx")
    return train.counts, held_out.counts


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _shown(documents: Iterable[str], total: int) -> Iterator[str]:
    """Passes documents through and shows how far it is: a bar on a terminal, else a log line now and then."""
    logged = time.monotonic()
    terminal = sys.stderr.isatty()
    for number, text in enumerate(tqdm(documents, "encode", total, unit=" documents", disable=not terminal), start=1):
        yield text
        if not terminal and time.monotonic() - logged > SECONDS_BETWEEN_LOGS:
            logged = time.monotonic()
            logger.info("encoded %s of %s documents", f"{number:,}", f"{total:,}")
