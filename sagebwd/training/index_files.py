"""Megatron's files, checked before Megatron reads them: token files against what was prepared, indices by checksums.

Megatron trusts both. It would read beyond a token file whose index is wrong, take an index's changed numbers for the
order of samples, and unpickle what lies in an index's place.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from sagebwd.errors import UserError

SEAL = "sha256.json"


def open_tokens(prefix: Path, tokens: int, vocab_size: int) -> IndexedDataset:
    """The token files of one split: documents one after another, one sequence each, `tokens` tokens below vocab_size.

    Raises UserError where the files are anything else.
    """
    again = f"delete {prefix.parent} and prepare the data again"
    dtype = DType.optimal_dtype(vocab_size)
    try:
        described = _lengths(Path(f"{prefix}.idx").read_bytes(), np.dtype(dtype))
        stream = np.memmap(f"{prefix}.bin", dtype=dtype, mode="r") if tokens else np.empty(0, dtype)
    except (OSError, ValueError):
        described, stream = None, None
    if described is None or not described.sum() == len(stream) == tokens:
        raise UserError(f"{prefix}.idx does not describe the {tokens} tokens of {prefix}.bin: {again}")
    if tokens and not 0 <= stream.min() <= stream.max() < vocab_size:
        raise UserError(f"{prefix}.bin holds a token outside the vocabulary of {vocab_size}: {again}")
    return IndexedDataset(str(prefix))


def _lengths(index: bytes, dtype: np.dtype) -> np.ndarray | None:
    """Tokens of each document, int64, from an .idx file's bytes; None if it is not one as `tokenizer.encode` writes.

    The format is Megatron's: 9 bytes of magic, version, code of the tokens' dtype, numbers of sequences and of document
    boundaries; the sequences' lengths (int32) and byte offsets (int64); the boundaries (int64).
    """
    header = struct.Struct("<9sQBQQ")
    if len(index) < header.size:
        return None
    magic, version, code, sequences, boundaries = header.unpack_from(index)
    if (magic, version, boundaries) != (b"MMIDIDX\0\0", 1, sequences + 1) or code != DType.code_from_dtype(dtype.type):
        return None
    if len(index) != header.size + 12 * sequences + 8 * boundaries:
        return None
    lengths = np.frombuffer(index, np.int32, sequences, header.size).astype(np.int64)
    starts = np.frombuffer(index, np.int64, sequences, header.size + 4 * sequences)
    documents = np.frombuffer(index, np.int64, boundaries, header.size + 12 * sequences)
    ends = np.cumsum(lengths)
    one_after_another = np.array_equal(starts, (ends - lengths) * dtype.itemsize)
    one_sequence_each = np.array_equal(documents, np.arange(boundaries))
    return lengths if (lengths > 0).all() and one_after_another and one_sequence_each else None


def seal(folder: Path) -> None:
    """Write down the checksums of the index files in `folder`."""
    (folder / SEAL).write_text(json.dumps(_checksums(folder), indent=2) + "\n", encoding="utf-8")


def check_seal(folder: Path) -> None:
    """Raises UserError: the index files in `folder` are not those that were sealed."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not on this machine: put the data on a disk that the machines of all ranks share")
    try:
        recorded = json.loads((folder / SEAL).read_bytes())
        found = _checksums(folder)
        damaged = [] if recorded == found else [name for name in found if recorded.get(name) != found[name]] or [SEAL]
    except (AttributeError, OSError, ValueError, RecursionError):
        damaged = [SEAL]
    for name in damaged:
        raise UserError(f"{folder / name} is damaged: delete the folder {folder}, and it is built again")


def _checksums(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != SEAL:
            with path.open("rb") as stream:
                found[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found
