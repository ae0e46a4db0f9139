"""Files of documents: .txt (one document each), .jsonl (one a line) and .parquet (one a row).

The first two may be compressed with gzip or zstd. Parquet and zstd need the optional packages of sagebwd[data].
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

from sagebwd.errors import UserError

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
ROWS = 1024  # of a parquet file at a time


def documents(paths: list[Path], text_key: str) -> Iterator[str]:
    """The documents of files that `find` found, in order; blank ones are left out.

    text_key: the key of a .jsonl line, or the column of a .parquet file, that holds the document.
    """
    for path in paths:
        yield from (text for text in _READERS[_kind(path)](path, text_key) if text.strip())


def find(patterns: tuple[str, ...]) -> list[Path]:
    """The files that paths, globs and folders (searched through, hidden ones left out) name; each once, in order.

    Raises UserError: a pattern that matches nothing, a file of another kind that is named, a folder that holds none.
    """
    if not patterns:
        raise UserError(
            f"data.files is empty, but data.corpus is files: name your {', '.join(KINDS)} files, or their folder, in "
            "data.files"
        )
    found: set[Path] = set()
    for pattern in patterns:
        literal = Path(pattern).expanduser()
        # A name that exists is taken as it stands: [ and ] in it are not a pattern.
        matches = [literal] if literal.exists() else [Path(name) for name in glob.glob(str(literal), recursive=True)]
        if not matches:
            raise UserError(f"data.files: no file matches '{pattern}' (seen from {Path.cwd()}): check the path")
        for path in matches:
            found.update(_in_folder(path) if path.is_dir() else [_of_a_kind(path)])
    # The order of a folder's entries is the file system's affair; the order of documents must not be.
    return sorted(found, key=str)


def digest(paths: list[Path]) -> str:
    """SHA-256 (hex) over the kinds and bytes of files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as stream:
                inner = hashlib.file_digest(stream, "sha256").digest()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}): check data.files") from error
        # A digest a file keeps the boundary between two files part of the content.
        digest.update("".join(_suffixes(path)).encode() + inner)
    return digest.hexdigest()


def _in_folder(folder: Path) -> list[Path]:
    inside = (path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    found = [path.absolute() for path in inside if path.is_file() and _kind(path) in KINDS]
    if not found:
        raise UserError(f"data.files: the folder '{folder}' holds no {', '.join(KINDS)} file: check the path")
    return found


def _of_a_kind(path: Path) -> Path:
    if _kind(path) not in KINDS:
        raise UserError(
            f"data.files: '{path}' is not a .txt or .jsonl file (or .gz or .zst of one), nor a .parquet: leave it out"
        )
    return path.absolute()


def _suffixes(path: Path) -> list[str]:
    return [suffix.lower() for suffix in path.suffixes[-2 if path.suffix.lower() in COMPRESSIONS else -1 :]]


def _kind(path: Path) -> str | None:
    suffixes = _suffixes(path)
    if not suffixes or (suffixes[0] == ".parquet" and len(suffixes) > 1):  # compresses its own columns
        return None
    return suffixes[0]


def _opened(path: Path) -> tuple[IO[bytes], tuple[type[Exception], ...]]:
    """What a file holds, decompressed, and the exceptions that say while it is read that the file is damaged."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb"), (EOFError, zlib.error, gzip.BadGzipFile)
    if path.suffix.lower() == ".zst":
        zstd = _optional("backports.zstd", path)
        return zstd.open(path, "rb"), (EOFError, zstd.ZstdError)
    return path.open("rb"), ()


def _optional(package: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.replace(".", "-")
        raise UserError(f"{path}: reading it needs the package {name}: `pip install {name}`") from None


def _txt(path: Path, _: str) -> Iterator[str]:
    yield _decode(b"".join(_lines(path)), str(path))


def _lines(path: Path) -> Iterator[bytes]:
    """A .txt or .jsonl file's lines, of a compressed one what it holds."""
    damaged: tuple[type[Exception], ...] = ()
    try:
        stream, damaged = _opened(path)
        with stream:
            yield from stream
    except damaged as error:
        raise UserError(f"{path}: damaged {path.suffix} file ({error}): fetch or compress it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check data.files") from error


def _jsonl(path: Path, text_key: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if line.isspace():
            continue
        place = f"{path}, line {number}"
        decoded = _decode(line, place)
        try:
            record = json.loads(decoded)
        except (ValueError, RecursionError) as error:  # Python reads no number of more than 4,300 digits
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


def _parquet(path: Path, text_key: str) -> Iterator[str]:
    pyarrow = _optional("pyarrow", path)
    parquet = _optional("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                has = ", ".join(map(repr, columns))
                raise UserError(f"{path}: no column '{text_key}' (it has {has}): set data.text_key to the document's")
            kind = file.schema_arrow.field(text_key).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise UserError(f"{path}: column '{text_key}' is {kind}, not string: set data.text_key")
            number = 0
            for batch in file.iter_batches(batch_size=ROWS, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    if text is None:
                        raise UserError(f"{path}, row {number}: '{text_key}' is null: leave such rows out")
                    yield text
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: damaged or no parquet file ({reason}): fetch it again") from error


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text (byte {error.start}): convert it to UTF-8") from error


_READERS = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}
