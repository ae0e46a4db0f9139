"""Built corpora: a folder with the text, a manifest that vouches for it, and the licences of what it was made from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sagebwd.errors import UserError

FORMAT = 1
TEXT, MANIFEST, LICENCES = "text.jsonl.gz", "manifest.json", "licences"


def folder(home: Path, name: str) -> Path:
    """Where the corpus `name` lies, under the folder of prepared data."""
    return home / "corpora" / name


def text(home: Path, name: str) -> Path:
    """The file of documents of a corpus that has been built. Raises UserError: it has not, or is damaged."""
    place = folder(home, name)
    path = place / MANIFEST
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))["file"]
        if seal(place / TEXT) != facts:
            raise UserError(f"{place / TEXT} is not what was built (size or SHA-256): {_again(place, name)}")
    except FileNotFoundError:
        raise UserError(
            f"the corpus {name} is not in {place}: build it with `sagebwd corpus {name} --data {home}`"
        ) from None
    except UserError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): {_again(place, name)}") from None
    return place / TEXT


def seal(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _again(place: Path, name: str) -> str:
    return f"remove {place} and run `sagebwd corpus {name}` again"
