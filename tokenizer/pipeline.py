"""The preparation: corpus -> split by document -> tokenizer -> token files -> manifest, once for each Data."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from sagebwd.errors import UserError
from sagebwd.tokenizer import corpora, vocabulary
from sagebwd.tokenizer.prepared import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    Prepared,
    digest_of,
    file_facts,
    load_prepared,
    write_manifest,
)
from sagebwd.training.recipe import Data
from sagebwd.whole_folder import make_whole

logger = logging.getLogger(__name__)


def prepare(data: Data, cache: Path) -> Prepared:
    """The prepared corpus of `data`, made in a folder of its own under `cache` unless it is there already.

    The folder's name holds a digest of all that matters (the corpus's bytes and the settings), so a change of either
    prepares anew, and a broken-off preparation is never taken for a finished one. Where `cache` is itself a prepared
    corpus, brought from another machine, that is taken, and the corpus need not be there.
    Raises UserError for a corpus that is missing, empty, damaged or too small, and for a damaged earlier preparation or
    one of other settings.
    """
    if (cache / MANIFEST).is_file():
        return _carried(data, cache)
    made_from = _settings(data) | {"corpus_sha256": corpora.content_digest(data, cache)}
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    folder = cache / f"{data.corpus}-v{data.vocab_size}-{key[:16]}"
    make_whole(folder, lambda unfinished: _fill(unfinished, data, cache, made_from))
    return load_prepared(folder)


def validation_positions(documents: int, fraction: float, seed: int) -> frozenset[int]:
    """Which of `documents` documents are held out: about `fraction` of them, at least one, never all."""
    # Of Python's generators, only the stream of random() is promised to stay the same from version to version.
    generator = random.Random(seed)
    keys = [generator.random() for _ in range(documents)]
    shuffled = sorted(range(documents), key=keys.__getitem__)
    return frozenset(shuffled[: min(max(1, round(documents * fraction)), documents - 1)])


def unigram_cross_entropy(tokens_of: np.ndarray, train_tokens_of: np.ndarray) -> float:
    """Nats per token of a text under another's unigram distribution, smoothed by adding one to every count.

    Both [vocab_size], int64: how often each token occurs in the text, and in the text that gives the distribution.
    """
    log_p = np.log(train_tokens_of + 1) - math.log(train_tokens_of.sum() + train_tokens_of.size)
    return float(-(tokens_of * log_p).sum() / tokens_of.sum())


def _carried(data: Data, folder: Path) -> Prepared:
    prepared = load_prepared(folder)
    made_from = json.loads((folder / MANIFEST).read_bytes())["made_from"]
    for key, here in _settings(data).items():
        if made_from.get(key) != here:
            raise UserError(
                f"the data in {folder} were prepared with {key} = {made_from.get(key)!r}, this recipe has {here!r}: "
                "set it back, or give the folder of other data by --data"
            )
    return prepared


def _settings(data: Data) -> dict:
    return {
        "format": FORMAT,
        "corpus": data.corpus,
        "text_key": data.text_key,
        "vocab_size": data.vocab_size,
        "validation_fraction": data.validation_fraction,
        "split_seed": data.split_seed,
        "tokenizer": vocabulary.SPECIFICATION,
        "tokenizer_training_characters": vocabulary.TRAINING_CHARACTERS,
    }


def _fill(folder: Path, data: Data, home: Path, made_from: dict) -> None:
    # Importing Megatron takes seconds, and a corpus that is prepared already does not need it.
    from sagebwd.tokenizer.encode import encode

    start = time.monotonic()
    total, characters = 0, 0
    for text in corpora.documents(data, home):
        total += 1
        characters += len(text)
    if total == 0:
        raise UserError(f"the corpus ({_named(data)}) is empty: no document in it holds any text")
    if total == 1:
        raise UserError(
            f"the corpus ({_named(data)}) is one document, and the validation split needs one of its own: "
            "bring at least two (a .txt file is one document, a .jsonl file one a line)"
        )
    logger.info("corpus %s: %s documents, %.1f million characters", _named(data), f"{total:,}", characters / 1e6)

    validation = validation_positions(total, data.validation_fraction, data.split_seed)
    training = (text for position, text in enumerate(corpora.documents(data, home)) if position not in validation)
    (folder / TOKENIZER).write_bytes(vocabulary.train(training, characters, data.vocab_size))
    logger.info("tokenizer: %s pieces, trained after %.1f s", f"{data.vocab_size:,}", time.monotonic() - start)

    processor = vocabulary.load(folder / TOKENIZER)
    train, held_out = encode(
        corpora.documents(data, home), total, validation, processor, folder / "train", folder / "validation"
    )
    if train.documents + held_out.documents != total:
        raise UserError(f"the corpus ({_named(data)}) changed while it was read: prepare again when it is complete")

    facts = file_facts(folder)
    prepared = Prepared(
        folder=folder,
        vocab_size=processor.vocab_size(),
        eod_id=processor.eos_id(),
        pad_id=processor.pad_id(),
        train_tokens=train.tokens,
        validation_tokens=held_out.tokens,
        train_documents=train.documents,
        validation_documents=held_out.documents,
        unigram_entropy=unigram_cross_entropy(held_out.tokens_of, train.tokens_of),
        bytes_per_token=held_out.text_bytes / held_out.tokens,
        digest=digest_of(facts),
    )
    write_manifest(prepared, facts, {**made_from, "sentencepiece": version("sentencepiece")})
    logger.info(
        "encoded %s training and %s validation tokens, %.2f bytes per token, after %.1f s",
        f"{train.tokens:,}",
        f"{held_out.tokens:,}",
        prepared.bytes_per_token,
        time.monotonic() - start,
    )


def _named(data: Data) -> str:
    return ", ".join(data.files) if data.corpus == "files" else data.corpus
