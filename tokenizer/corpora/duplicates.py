"""What has been seen before: paragraphs by their words, documents by the likeness of their word sequences (MinHash)."""

from __future__ import annotations

import hashlib
import re

from rensa import RMinHash, RMinHashLSH

PERMUTATIONS, BANDS = 128, 16  # bands of 8: two documents alike at 0.8 meet in one with a probability of 0.95
ALIKE = 0.8  # Jaccard likeness of the sets of SHINGLE consecutive words
SHINGLE = 5
_WORD = re.compile(r"\w+")


class Paragraphs:
    """Paragraphs that differ in case, punctuation or spacing alone are the same."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, paragraph: str) -> bool:
        """False if it was there already."""
        words = " ".join(_WORD.findall(paragraph.lower()))
        key = hashlib.blake2b(words.encode(), digest_size=8).digest()
        known = len(self._seen)
        self._seen.add(key)
        return len(self._seen) > known


class Documents:
    """Near-duplicates, by estimate: of two that are alike the first stays."""

    def __init__(self) -> None:
        self._index = RMinHashLSH(threshold=ALIKE, num_perm=PERMUTATIONS, num_bands=BANDS)
        self._hashes: list[RMinHash] = []

    def add(self, text: str) -> bool:
        """False if one like it was there already."""
        words = _WORD.findall(text.lower())
        shingles = {" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))}
        found = RMinHash(num_perm=PERMUTATIONS, seed=0)
        found.update(sorted(shingles))
        if any(found.jaccard(self._hashes[other]) >= ALIKE for other in self._index.query(found)):
            return False
        self._index.insert(len(self._hashes), found)
        self._hashes.append(found)
        return True
