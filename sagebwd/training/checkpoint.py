"""Checkpoints on disk: written beside and renamed, sealed by checksums, read without running anything from them.

    <arm>/checkpoints/step_00000100/tp_00.safetensors ...  the tensors of a rank (see stored.py)
                                   /manifest.json          position, recipe, data, layout, sizes and SHA-256
                     /latest                               the newest one's name and its manifest's SHA-256, last

Safetensors and JSON hold data alone: there is no pickle. A folder counts if its name does not end in .partial, and is
whole if every byte is as its manifest says; the manifest holds a checksum of its own contents. What is not whole is
said, and passed over for the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sagebwd.errors import UserError
from sagebwd.training import changes, recipe_file
from sagebwd.training.changes import Change
from sagebwd.training.recipe import Recipe

FORMAT = 2
FOLDER, MANIFEST, LATEST, PARTIAL = "checkpoints", "manifest.json", "latest", ".partial"


@dataclass(frozen=True)
class Run:
    """What a checkpoint belongs to.

    recipe: with train.precision resolved. data_digest: of the prepared data. vocab_size: the tokenizer's, unpadded.
    """

    recipe: Recipe
    data_digest: str
    vocab_size: int


@dataclass
class Position:
    """How far a run has come, and what it remembers besides tensors.

    step: optimizer steps, skipped ones too. samples: of the run's one order of samples, those behind it: used or, at
    a rewind, left out. tokens: trained on. adam_step: updates that the optimizer made. validated: whether nothing is
    left to validate at this step. skipped, bad_in_row, spikes, recent: what `health` counts, and its last losses.
    start_loss: validation before the first step. wall_seconds: over all its processes. changes, rewinds: what the
    report must tell.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    adam_step: int = 0
    validated: bool = True
    skipped: int = 0
    bad_in_row: int = 0
    spikes: int = 0
    recent: list[float] = field(default_factory=list)
    start_loss: float | None = None
    wall_seconds: float = 0.0
    changes: list[dict[str, Any]] = field(default_factory=list)
    rewinds: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's folder and what its manifest.json says: whose it is, where the run stood, and each file's seal."""

    folder: Path
    run: Run
    position: Position
    files: dict[str, dict[str, Any]]


class Damaged(Exception):
    """A checkpoint that is not whole; the message says which file and how."""


def name(step: int) -> str:
    return f"step_{step:08d}"


def newest_whole(arm_folder: Path, say: Callable[[str], None], below: int | None = None) -> Manifest | None:
    """The newest checkpoint whose every byte is right (with `below`: of a step lower than that); None if there is none
    at all. `say` hears of each that is damaged.

    Raises UserError: there are checkpoints, and none is whole.
    """
    damaged = 0
    for folder in _candidates(arm_folder / FOLDER, say, below):
        try:
            manifest = read(folder)
            verify(manifest)
        except Damaged as damage:
            say(f"WARNING: the checkpoint {folder} is damaged: {damage}. The one before is used instead")
            damaged += 1
        else:
            return manifest
    if damaged:
        root = arm_folder / FOLDER
        raise UserError(f"no checkpoint in {root} is whole ({damaged} damaged): {_start_again(root)}")
    return None


def read(folder: Path) -> Manifest:
    """Raises Damaged: manifest.json is missing or not what was written; UserError: another format."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sealed = found.pop("checksum", None) == _digest(found)
        if not sealed and found["format"] == FORMAT:
            raise Damaged(f"{MANIFEST} is not what was written: its checksum differs")
        theirs = found["format"]
        if theirs == FORMAT:
            run = Run(Recipe.model_validate(found["recipe"]), found["data_digest"], found["vocab_size"])
            return Manifest(folder, run, Position(**found["position"]), found["files"])
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({_line(error)})") from None
    if not sealed and theirs != 1:  # format 1 had no checksum
        raise Damaged(f"{MANIFEST} is not what was written: its checksum differs")
    raise UserError(f"{path} has format {theirs}, this version reads {FORMAT}: {_start_again(folder.parent)}")


def verify(manifest: Manifest) -> None:
    """Raises Damaged: a file is missing, or its size or checksum is not as the manifest says."""

    def check(entry: tuple[str, dict[str, Any]]) -> str | None:
        file, expected = entry
        path = manifest.folder / file
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{file} has {size:,} bytes, and {expected['bytes']:,} were written"
            return None if seal(path) == expected else f"{file} holds other bytes than were written"
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"

    with ThreadPoolExecutor() as threads:  # hashing lets other threads run
        for damage in threads.map(check, manifest.files.items()):
            if damage:
                raise Damaged(damage)


def accept(manifest: Manifest, ours: Run) -> list[Change]:
    """What differs between the checkpoint's run and this one, all of it acceptable.

    Raises UserError: something differs that this run's recipe does not accept (the key, both values, the remedy).
    """
    found = changes.between(manifest.run.recipe, ours.recipe)
    if manifest.run.vocab_size != ours.vocab_size:
        found.append(Change("data.vocab_size of the tokenizer", manifest.run.vocab_size, ours.vocab_size))
    if manifest.run.data_digest != ours.data_digest:
        found.append(Change("data.digest", manifest.run.data_digest, ours.data_digest))
    accepted, refused = changes.split(found, ours.recipe)
    for change in refused:
        raise UserError(
            f"the checkpoint {manifest.folder} was written with {change}: set it back, {change.remedy}"
            f"or {_start_again(manifest.folder.parent)}"
        )
    return accepted


def clean(arm_folder: Path) -> None:
    """Remove what a process that died left half-written."""
    for path in (arm_folder / FOLDER).glob(f"*{PARTIAL}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def seal(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def publish(arm_folder: Path, run: Run, position: Position, files: dict[str, dict[str, Any]]) -> Path:
    """Make the checkpoint whose files lie in <step>.partial count: manifest, rename, latest. Then remove old ones."""
    root = arm_folder / FOLDER
    folder = root / name(position.step)
    partial = root / f"{folder.name}{PARTIAL}"
    manifest = {
        "format": FORMAT,
        "recipe": recipe_file.resolved(run.recipe),
        "data_digest": run.data_digest,
        "vocab_size": run.vocab_size,
        "position": asdict(position),
        "files": files,
    }
    text = json.dumps(manifest | {"checksum": _digest(manifest)}, indent=2)
    _write(partial / MANIFEST, text)
    shutil.rmtree(folder, ignore_errors=True)  # damaged, or of a run that was then set back
    partial.rename(folder)
    to_disk(root)
    _write(root / f"{LATEST}{PARTIAL}", f"{folder.name} {hashlib.sha256(text.encode()).hexdigest()}")
    (root / f"{LATEST}{PARTIAL}").replace(root / LATEST)
    to_disk(root)
    _prune(root, folder.name, run.recipe.checkpoint.keep_last, run.recipe.checkpoint.keep_every)
    return folder


def to_disk(path: Path) -> None:
    """Before a rename makes a file count, its bytes are on the disk and not only promised; so are a folder's names."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _candidates(root: Path, say: Callable[[str], None], below: int | None) -> Iterator[Path]:
    """Newest first: the one that `latest` names, and all before it. Without a good `latest`, all."""
    folders = sorted((path for path in root.glob("step_*") if path.name.removeprefix("step_").isdigit()), reverse=True)
    try:
        named, *checksum = (root / LATEST).read_text(encoding="utf-8").split()
        if (root / named) not in folders:
            raise ValueError(f"it names {named}, which is not there")
        # A person who goes back to an earlier one writes its name alone.
        if checksum and checksum != [seal(root / named / MANIFEST)["sha256"]]:
            raise ValueError(f"its checksum is not that of {named}/{MANIFEST}")
        folders = [folder for folder in folders if folder.name <= named]
    except FileNotFoundError:
        if folders:
            say(f"WARNING: {root / LATEST} is missing: the newest whole checkpoint is used")
    except (OSError, ValueError) as error:
        say(f"WARNING: {root / LATEST} is damaged ({error}): the newest whole checkpoint is used")
    return iter([folder for folder in folders if below is None or folder.name < name(below)])


def _prune(root: Path, newest: str, keep_last: int, keep_every: int | None) -> None:
    """Keep the newest `keep_last`, and the first in every `keep_every` steps; remove the others, and later ones, which
    are of a future that was given up."""
    names = sorted(path.name for path in root.glob("step_*") if path.name.removeprefix("step_").isdigit())
    before = [each for each in names if each <= newest]
    kept = set(before[-keep_last:])
    spans: set[int] = set()
    for each in before:
        span = int(each.removeprefix("step_")) // keep_every if keep_every else 0
        if span and span not in spans:
            spans.add(span)
            kept.add(each)
    for each in names:
        if each not in kept:
            shutil.rmtree(root / each)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _start_again(root: Path) -> str:
    return f"move {root} away to start again"


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    to_disk(path)
