"""Corpora: where the documents come from. Read in one order, on every machine, and never executed.

`sotu` is embedded, `files` are the user's own, `debian-prose` is built by `sagebwd corpus debian-prose`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sagebwd.errors import UserError
from sagebwd.tokenizer.corpora import built, files, sotu
from sagebwd.training.recipe import Data


def documents(data: Data, home: Path) -> Iterator[str]:
    """The corpus's documents, always in the same order; blank ones are left out.

    home: where prepared data lies, and built corpora with it. Raises UserError where a file is missing, is not UTF-8,
    is damaged, or holds a line that is not a document.
    """
    return files.documents(_source_files(data, home), data.text_key if data.corpus == "files" else "text")


def content_digest(data: Data, home: Path) -> str:
    """SHA-256 (hex) over the kinds and bytes of the corpus's files in order: not their names, so they may be moved."""
    return files.digest(_source_files(data, home))


def _source_files(data: Data, home: Path) -> list[Path]:
    if data.corpus == "files":
        return files.find(data.files)
    if data.files:
        raise UserError(
            f"data.files is set, but data.corpus is {data.corpus}, which ignores it: set data.corpus to files"
        )
    return sotu.speeches() if data.corpus == "sotu" else [built.text(home, data.corpus)]
