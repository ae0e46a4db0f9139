"""What the fuzz tests share: the command line called in this process, what it may leave behind, and damaged bytes.

FUZZ=20 in the environment multiplies the number of examples and draws new ones each time; without it the same ones are
drawn.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sagebwd.cli import main

TIMES = int(os.environ.get("FUZZ", "1"))


def examples(number: int) -> Callable:
    """A test's number of examples, the same ones each time unless FUZZ asks for more."""
    return settings(
        max_examples=number * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),  # slow examples are what is tested, and fixtures are put back by hand
    )


# Nothing that is read may execute


_watching: list[str] | None = None


def _audit(event: str, arguments: tuple) -> None:
    # What an unpickler calls before it gets at any function, and what a function would do first.
    if _watching is not None and event in ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn"):
        _watching.append(f"{event} {arguments}")


sys.addaudithook(_audit)  # for good: there is no way to remove one


@contextlib.contextmanager
def nothing_executes() -> Iterator[None]:
    global _watching
    _watching = seen = []
    try:
        yield
    finally:
        _watching = None
    assert seen == []


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    errors: str


def sagebwd(*arguments: object) -> Answer:
    """The command line, in this process. Any exception but SystemExit comes through, and so fails the test."""
    out, errors = io.StringIO(), io.StringIO()
    with nothing_executes(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as exit_:
            code = exit_.code
    return Answer(code, out.getvalue(), errors.getvalue())


def check_refused(answer: Answer) -> None:
    """One line that says it is an error, and the exit code of a user's mistake."""
    assert answer.code == 2, answer
    # No character that would break the line or the terminal, whatever the input held.
    assert re.fullmatch(r"error: [^\n\r]+\n", answer.errors), answer.errors
    assert answer.errors.rstrip("\n").isprintable(), answer.errors
    assert len(answer.errors) < 800, answer.errors  # it quotes no more than shows what is meant


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder, with its bytes; None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# Bytes and values


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """`content` with one thing wrong with it, never itself."""
    places = st.integers(0, max(len(content) - 1, 0))

    def flipped(at: int, bit: int) -> bytes:
        return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]

    def overwritten(at: int, piece: bytes) -> bytes:
        return content[:at] + piece + content[at + len(piece) :]

    ways = [
        st.builds(flipped, places, st.integers(0, 7)),
        st.builds(lambda at: content[:at], places),
        st.builds(lambda at, piece: content[:at] + piece + content[at:], places, st.binary(min_size=1, max_size=16)),
        st.builds(overwritten, places, st.binary(min_size=1, max_size=32)),
        st.builds(lambda at, size: overwritten(at, bytes(size)), places, st.integers(1, 64)),
        st.builds(lambda at, size: content[:at] + content[at + size :], places, st.integers(1, 64)),
        st.builds(lambda at: content[at:] + content[:at], places),
        st.binary(max_size=64),
        st.sampled_from([PICKLE, b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5_000]),
    ]
    return st.one_of(ways).filter(lambda changed: changed != content)


# `os.system("false")` as a pickle: refused by whatever reads no pickles, seen by the audit hook otherwise.
PICKLE = b"cos\nsystem\n(S'false'\ntR."

# Values of every kind that a YAML or JSON file can hold, and a few that programs trip over.
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 300),
        st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**400]),
        st.floats(),
        st.text(max_size=12),
        st.sampled_from(["../..", "/etc/passwd", "a\nb", "\x1b[31m", "\u2028", "NaN", "1e400", "null", "~", "${HOME}"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def as_json(value: object) -> str:
    return json.dumps(value)
