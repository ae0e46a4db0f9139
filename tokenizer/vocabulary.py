"""The tokenizer: a SentencePiece BPE model with byte fallback, trained on the training split.

Text is taken as it is (no Unicode normalisation, no whitespace squeezed, no dummy space in front), so that decoding
gives the text back. The one exception is U+2581, SentencePiece's own sign for a space, which comes back as a space.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from sagebwd.errors import UserError

UNK_ID, BOS_ID, EOS_ID, PAD_ID = 0, 1, 2, 3

SPECIFICATION = {
    "model_type": "bpe",
    "byte_fallback": True,
    "character_coverage": 0.9995,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "split_digits": True,
    "unk_id": UNK_ID,
    "bos_id": BOS_ID,
    "eos_id": EOS_ID,
    "pad_id": PAD_ID,
    # SentencePiece writes the number of threads into the model's bytes: one number, one model.
    "num_threads": 1,
}
"""SentencePiece's training options, except the size of the vocabulary. All that can change the model is here."""

TRAINING_CHARACTERS = 50_000_000
"""About as many characters as SentencePiece sees (some 4 s of training); of a larger corpus, evenly spaced segments."""

SEGMENT_CHARACTERS = 4096
"""Length of a training segment. SentencePiece refuses words of 65,536 characters and more, so this bounds them too."""

_RESERVED = "\u2585"  # SentencePiece's mark between pieces: it drops a training sentence that holds one


def train(training_documents: Iterable[str], total_characters: int, vocab_size: int) -> bytes:
    """A serialised SentencePiece model of exactly `vocab_size` pieces. The same input gives the same bytes.

    training_documents: the training split, in order. total_characters: at least their number of characters; with it,
    every n-th segment is chosen, so that about TRAINING_CHARACTERS are read.
    Raises UserError if the text does not support that vocabulary, or no vocabulary so small can hold its characters.
    """
    every = -(-total_characters // TRAINING_CHARACTERS) or 1
    pieces = (piece for document in training_documents for piece in segments(document, SEGMENT_CHARACTERS))
    # A list, since SentencePiece would swallow an error that the iterator raises.
    sentences = [piece.replace(_RESERVED, " ") for number, piece in enumerate(pieces) if number % every == 0]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            max_sentence_length=4 * SEGMENT_CHARACTERS,  # in bytes; longer ones would be dropped
            minloglevel=2,
            **SPECIFICATION,
        )
    except RuntimeError as error:
        raise _translated(error, vocab_size) from error
    return model.getvalue()


def load(model: Path) -> sentencepiece.SentencePieceProcessor:
    """The tokenizer in a model file. Raises UserError if the file is not one."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{model} is not a readable SentencePiece model: delete {model.parent} and prepare the data again"
        ) from error


def segments(text: str, size: int) -> Iterator[str]:
    """Cuts `text` into parts of at most `size` characters, before a space that follows another character.

    No piece of the vocabulary reaches across such a cut (pieces hold spaces only at their front), so the tokens of the
    parts, joined, are the tokens of the whole. Where `size` characters have no such place, the cut falls anywhere.
    """
    start = 0
    while len(text) - start > size:
        cut = text.rfind(" ", start + 1, start + size + 1)
        while cut > start and text[cut - 1] == " ":
            cut -= 1
        if cut <= start:
            cut = start + size
        yield text[start:cut]
        start = cut
    yield text[start:]


def _translated(error: RuntimeError, vocab_size: int) -> Exception:
    if found := re.search(r"too high .* value <= (\d+)", str(error)):
        return UserError(
            f"data.vocab_size {vocab_size} is too large for this text, which supports {found[1]} pieces: "
            f"set data.vocab_size to {found[1]} or less, or bring more text"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return UserError(
            f"data.vocab_size {vocab_size} is too small for the characters and bytes of this text, which take "
            f"{found[1]} pieces: set data.vocab_size above {found[1]}"
        )
    return error
