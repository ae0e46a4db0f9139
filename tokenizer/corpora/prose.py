"""What counts as English prose: paragraphs that read like sentences, not code, tables, navigation or other tongues."""

from __future__ import annotations

LEAST_CHARACTERS, LEAST_WORDS = 80, 12
LETTERS = 0.75  # of what is not blank, at least: A to Z
SYMBOLS = 0.02  # of what is not blank, at most: those of program text
STOP_WORDS = 0.15  # of the words, at least
LONGEST_WORD = 100  # characters: longer ones are data
MOST_CHARACTERS = 20_000  # a longer paragraph is a list or data that lost its line breaks

_NO_LETTERS = bytes(byte for byte in range(128) if not chr(byte).isalpha())
_NO_SYMBOLS = bytes(byte for byte in range(128) if chr(byte) not in "{}[]<>=;|\\#$~")
_STOP_WORDS = """
a about after all also an and any are as at be because been before being but by can do does each for from given had has
have he her his how i if in into is it its may more most must new no not of on one only or other our out same set shall
she should so some such than that the their them then there these they this those to two under up use used was we were
what when where which while who will with would you your
"""
_STOPS = frozenset(_STOP_WORDS.split())


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph, its blanks squeezed, is English prose of some length."""
    if not LEAST_CHARACTERS <= len(paragraph) <= MOST_CHARACTERS:
        return False
    words = paragraph.split(" ")
    if len(words) < LEAST_WORDS or max(map(len, words)) > LONGEST_WORD:
        return False
    visible = len(paragraph) - len(words) + 1
    ascii = paragraph.encode("ascii", "ignore")
    if len(ascii.translate(None, _NO_LETTERS)) < LETTERS * visible:
        return False
    if len(ascii.translate(None, _NO_SYMBOLS)) > SYMBOLS * visible:
        return False
    return sum(word in _STOPS for word in paragraph.lower().split(" ")) >= STOP_WORDS * len(words)
