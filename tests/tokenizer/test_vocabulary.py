"""The tokenizer loses nothing, injects nothing, and is the same bytes each time."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

from sagebwd.errors import UserError
from sagebwd.tokenizer import vocabulary

pytest_plugins = ("tests.small_corpus",)
TEXTS = [
    "plain words, and more of them",
    " leading and trailing ",
    "two  spaces   three\tand\ttabs",
    "lines\nand\n\nparagraphs\r\n",
    "caf\u00e9 na\u00efve \u4f60\u597d \U0001f600 e\u0301 \ufb01",  # composed, decomposed and compatibility characters
    "zero\x00byte \u2585 \u2047 \ufeff",
    "</s><s><pad><unk><0x41>",
    "2,024 digits 0123456789",
]


@pytest.fixture(scope="module")
def corpus(small_corpus: Path) -> list[str]:
    return small_corpus.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def processor(corpus: list[str]) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=vocabulary.train(corpus, 1, 512))


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(processor: sentencepiece.SentencePieceProcessor, text: str) -> None:
    assert processor.decode(processor.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_spells_a_control_token(processor: sentencepiece.SentencePieceProcessor, text: str) -> None:
    assert not {vocabulary.UNK_ID, vocabulary.BOS_ID, vocabulary.EOS_ID, vocabulary.PAD_ID} & set(
        processor.encode(text)
    )


def test_the_model_says_what_it_is(processor: sentencepiece.SentencePieceProcessor) -> None:
    ids = (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id())
    assert ids == (0, 1, 2, 3)
    assert [processor.id_to_piece(index) for index in ids] == ["<unk>", "<s>", "</s>", "<pad>"]
    assert processor.vocab_size() == 512
    assert sum(map(processor.is_byte, range(512))) == 256


def test_processes_with_other_hash_seeds_train_the_same_bytes(small_corpus: Path) -> None:
    program = (
        "import sys, hashlib; from sagebwd.tokenizer import vocabulary\n"
        "lines = open(sys.argv[1], encoding='utf-8').read().splitlines()\n"
        "print(hashlib.sha256(vocabulary.train(lines, 1, 512)).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program, str(small_corpus)],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    lines = small_corpus.read_text(encoding="utf-8").splitlines()
    assert digests == {hashlib.sha256(vocabulary.train(lines, 1, 512)).hexdigest()}


def test_of_a_large_corpus_every_nth_segment_is_read(corpus: list[str]) -> None:
    every_third = [segment for text in corpus for segment in vocabulary.segments(text, vocabulary.SEGMENT_CHARACTERS)]
    chosen = vocabulary.train(corpus, 3 * vocabulary.TRAINING_CHARACTERS, 400)
    assert chosen == vocabulary.train(every_third[::3], 1, 400)
    assert chosen != vocabulary.train(corpus, 1, 400)


def test_a_character_that_sentencepiece_reserves_does_not_cost_the_segment(corpus: list[str]) -> None:
    with_reserved = vocabulary.train([f"{text} \u2585" for text in corpus], 1, 400)
    assert with_reserved == vocabulary.train([f"{text}  " for text in corpus], 1, 400)


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_segments_join_to_the_text(size: int) -> None:
    for text in [*TEXTS, "x" * 2500, " " * 60, ""]:
        parts = list(vocabulary.segments(text, size))
        assert "".join(parts) == text
        assert max(map(len, parts)) <= size


@pytest.mark.parametrize("size", [40, 100, 1000])
def test_tokens_of_segments_are_tokens_of_the_whole(
    processor: sentencepiece.SentencePieceProcessor, corpus: list[str], size: int
) -> None:
    text = "  ".join(corpus)  # no 40 characters of it without a space
    parts = list(vocabulary.segments(text, size))
    assert len(parts) > 1
    assert [token for part in parts for token in processor.encode(part)] == processor.encode(text)


def test_a_vocabulary_too_large_for_the_text_names_one_that_is_not(corpus: list[str]) -> None:
    with pytest.raises(UserError, match=r"data.vocab_size 100000 is too large for this text") as caught:
        vocabulary.train(corpus, 1, 100_000)
    most = int(re.search(r"(\d+) or less", str(caught.value))[1])
    assert sentencepiece.SentencePieceProcessor(model_proto=vocabulary.train(corpus, 1, most)).vocab_size() == most


def test_a_vocabulary_too_small_for_the_characters_is_refused(corpus: list[str]) -> None:
    with pytest.raises(UserError, match=r"data.vocab_size 100 is too small for the characters"):
        vocabulary.train(corpus, 1, 100)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"tokenizer\.model is not a readable SentencePiece model"):
        vocabulary.load(tmp_path / "tokenizer.model")
