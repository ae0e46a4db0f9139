"""A prepared corpus: a folder with the tokenizer, both splits' token files and a manifest that vouches for them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from sagebwd.errors import UserError
from sagebwd.tokenizer import vocabulary

FORMAT = 1
"""Version of the preparation. Raise it with any change to what the same corpus and settings are turned into."""

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"
FILES = (TOKENIZER, "train.bin", "train.idx", "validation.bin", "validation.idx")


@dataclass(frozen=True)
class Prepared:
    """What training needs to know of a prepared corpus.

    folder: holds FILES, the manifest, and the indices that training derives.
    vocab_size: pieces of the tokenizer, before any padding. eod_id: the token that ends every document (</s>).
    train_tokens, validation_tokens: ends of documents included.
    unigram_entropy: nats per token of the validation split under the unigram distribution of the training split with
        add-one smoothing (a cross-entropy): what a model reaches that knows how often each token occurs and no context.
    bytes_per_token: UTF-8 bytes of the validation split's text per token, to turn nats per token into bits per byte.
    digest: SHA-256 over the contents of FILES. Runs with the same digest saw the same tokens.
    """

    folder: Path
    vocab_size: int
    eod_id: int
    pad_id: int
    train_tokens: int
    validation_tokens: int
    train_documents: int
    validation_documents: int
    unigram_entropy: float
    bytes_per_token: float
    digest: str

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER

    @property
    def train_prefix(self) -> Path:
        return self.folder / "train"

    @property
    def validation_prefix(self) -> Path:
        return self.folder / "validation"


def file_facts(folder: Path) -> dict[str, dict[str, int | str]]:
    """Bytes and SHA-256 of each of FILES."""
    facts = {}
    for name in FILES:
        with (folder / name).open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        facts[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256}
    return facts


def digest_of(facts: dict[str, dict[str, int | str]]) -> str:
    """One SHA-256 for all of FILES."""
    return hashlib.sha256("\n".join(f"{name} {facts[name]['sha256']}" for name in FILES).encode()).hexdigest()


def write_manifest(prepared: Prepared, facts: dict[str, dict[str, int | str]], made_from: dict) -> None:
    """Writes the manifest, last of all files. made_from: the inputs and versions, for the reader."""
    facts_of_corpus = {key: value for key, value in asdict(prepared).items() if key != "folder"}
    content = {"format": FORMAT, "made_from": made_from, "prepared": facts_of_corpus, "files": facts}
    (prepared.folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_prepared(folder: Path) -> Prepared:
    """Reads a prepared corpus and checks every file of it against the manifest.

    Raises UserError, naming the file and the remedy, for a folder that holds none, a file that is missing, truncated
    or changed, and a tokenizer of another vocabulary than the tokens'.
    """
    again = f"delete {folder} and prepare the data again"
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} holds no prepared corpus ({MANIFEST} is missing): run `sagebwd prepare` first")
    try:
        manifest = json.loads(path.read_bytes())
        made_with, recorded = manifest["format"], manifest["files"]
        expected = {name: (recorded[name]["bytes"], recorded[name]["sha256"]) for name in FILES}
        if made_with != FORMAT:
            raise UserError(f"{path} is of format {made_with}, this program's is {FORMAT}: {again}")
        prepared = TypeAdapter(Prepared).validate_python({**manifest["prepared"], "folder": folder})
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {again}") from error
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: {again}")
    pieces = vocabulary.load(prepared.tokenizer_path).vocab_size()
    if pieces != prepared.vocab_size:
        raise UserError(
            f"{prepared.tokenizer_path} has {pieces} pieces, but the tokens beside it were made with "
            f"{prepared.vocab_size}: put the right tokenizer back, or {again}"
        )
    found = file_facts(folder)
    for name, (size, sha256) in expected.items():
        if found[name]["bytes"] != size:
            raise UserError(f"{folder / name} is {found[name]['bytes']} bytes long instead of {size}: {again}")
        if found[name]["sha256"] != sha256:
            raise UserError(f"{folder / name} is not the file that was prepared (its SHA-256 differs): {again}")
    return prepared
