"""A corpus small enough for any test. `pytest_plugins = ("tests.small_corpus",)` in a module gives it the fixtures."""

import json
import random
from pathlib import Path

import pytest

from sagebwd.training.recipe import Data

SYLLABLES = [consonant + vowel for consonant in "bdklmn" for vowel in "aeiou"]


def small_documents(number: int = 60) -> list[str]:
    """Documents of made-up prose, the same each time: words of unequal frequency, in paragraphs."""
    generator = random.Random(7)
    words = ["".join(generator.choices(SYLLABLES, k=generator.randint(1, 4))) for _ in range(400)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]

    def paragraph() -> str:
        return " ".join(generator.choices(words, weights, k=generator.randint(20, 80))).capitalize() + "."

    return ["\n\n".join(paragraph() for _ in range(generator.randint(2, 8))) for _ in range(number)]


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of 60 documents, some 15,000 words."""
    path = tmp_path_factory.mktemp("corpus") / "small.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in small_documents()), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_data(small_corpus: Path) -> Data:
    """`small_corpus` as a recipe's data section: a vocabulary of 512, a context of 32, a fifth held out."""
    return Data(corpus="files", files=(str(small_corpus),), vocab_size=512, context=32, validation_fraction=0.2)
