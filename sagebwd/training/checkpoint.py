"""Checkpoints: one file a tensor-parallel rank and a manifest, written beside and renamed; reading them runs no code.

    <arm>/checkpoints/step_00000100/tp_00.pt ...   model, optimizer, schedule and random states of that rank
                                   /manifest.json  resolved recipe, step, data, layout, sizes and checksums of the files
                     /latest                       the name of the newest whole one, written last

The plain optimizer's state is the same on every data-parallel rank, so data-parallel rank 0 writes, and a run may go
on with another number of data-parallel ranks. So are Megatron's random states: they differ by TP rank only. The
position in the data needs no state of its own: the samples of a step follow from the seed and the step. Files hold
tensors and plain values and are read with torch.load(weights_only=True).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import distributed

from sagebwd.errors import UserError
from sagebwd.training import recipe_file
from sagebwd.training.recipe import Recipe
from sagebwd.training.world import World

FORMAT = 1
KEPT = 2  # the newest, and the one before in case it turns out damaged


@dataclass(frozen=True)
class Run:
    """What a checkpoint belongs to. A checkpoint of anything else is refused.

    recipe: with train.precision resolved. data_digest: of the prepared data. vocab_size: the tokenizer's, unpadded.
    """

    recipe: Recipe
    data_digest: str
    vocab_size: int


@dataclass(frozen=True)
class State:
    """What changes from step to step."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint: its folder, the step after which it was taken, and what its manifest.json says of it."""

    folder: Path
    step: int
    wall_seconds: float
    files: dict[str, dict[str, Any]]


def latest(arm_folder: Path, run: Run) -> Manifest | None:
    """The newest checkpoint of an arm; None where there is none.

    Raises UserError: it belongs to another run (the key, both values, the remedy), or is damaged.
    """
    pointer = arm_folder / "checkpoints" / "latest"
    if not pointer.exists():
        return None
    folder = pointer.parent / pointer.read_text(encoding="utf-8").strip()
    path = folder / "manifest.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise UserError(f"{path} has format {found['format']}, this version reads {FORMAT}: {_start_again(folder)}")
        theirs = Run(Recipe.model_validate(found["recipe"]), found["data_digest"], found["vocab_size"])
        manifest = Manifest(folder, int(found["step"]), float(found["wall_seconds"]), dict(found["files"]))
    except UserError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}): {_remedy(folder)}") from None
    _check_same_run(path, theirs, run)
    return manifest


def _check_same_run(path: Path, theirs: Run, ours: Run) -> None:
    differences = recipe_file.differences(theirs.recipe, ours.recipe)
    for key in ("vocab_size", "data_digest"):
        there, here = getattr(theirs, key), getattr(ours, key)
        if there != here:
            differences[{"vocab_size": "the tokenizer's vocabulary", "data_digest": "the prepared data"}[key]] = (
                there,
                here,
            )
    for key, (there, here) in differences.items():
        raise UserError(
            f"the checkpoint {path.parent} was written with {key} = {there!r}, but this run has {here!r}: "
            f"set it back, or {_start_again(path.parent)}"
        )


def _start_again(checkpoint: Path) -> str:
    return f"move {checkpoint.parent.parent} away to start again"


def _remedy(checkpoint: Path) -> str:
    """How to go on without a damaged checkpoint."""
    whole = sorted(path.parent.name for path in checkpoint.parent.glob("step_*/manifest.json"))
    before = [name for name in whole if name < checkpoint.name]
    if not before:
        return _start_again(checkpoint)
    return f"write {before[-1]} into {checkpoint.parent / 'latest'} to go on from there, or {_start_again(checkpoint)}"


def load(manifest: Manifest, state: State, world: World) -> None:
    """Put a checkpoint into a freshly built model, optimizer and schedule, and restore the random states.

    Raises UserError: this rank's file is missing, cut short or changed.
    """
    name = _file_name(world)
    path = manifest.folder / name
    if not path.exists():
        raise UserError(f"{path} is missing: {_remedy(manifest.folder)}")
    if _seal(path) != manifest.files.get(name):
        raise UserError(f"{path} is damaged (size or checksum is not its manifest's): {_remedy(manifest.folder)}")
    found = torch.load(path, map_location="cpu", weights_only=True)
    state.model.module.load_state_dict(found["model"])
    state.optimizer.load_state_dict(found["optimizer"])
    state.schedule.load_state_dict(found["schedule"])
    torch.set_rng_state(found["rng"]["cpu"])
    get_cuda_rng_tracker().set_states(found["rng"]["tracker"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(found["rng"]["cuda"], world.device)


def save(arm_folder: Path, step: int, wall_seconds: float, state: State, run: Run, world: World) -> None:
    """Write a checkpoint on all ranks together; it counts only once it is whole. Keeps the newest two."""
    root = arm_folder / "checkpoints"
    folder = root / f"step_{step:08d}"
    partial = root / f"{folder.name}.partial"
    if world.first:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that died while it wrote
        partial.mkdir(parents=True)
    distributed.barrier()
    mine: dict[str, Any] = {}
    if world.data_rank == 0:
        path = partial / _file_name(world)
        rng = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        if world.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(world.device)
        with path.open("wb") as file:
            torch.save(
                {
                    "model": state.model.module.state_dict(),
                    "optimizer": state.optimizer.state_dict(),
                    "schedule": state.schedule.state_dict(),
                    "rng": rng,
                },
                file,
            )
            _to_disk(file)
        mine = {path.name: _seal(path)}
    written: list[dict[str, Any]] = [{}] * world.size
    distributed.all_gather_object(written, mine)
    if world.first:
        manifest = {
            "format": FORMAT,
            "step": step,
            "consumed_tokens": step * run.recipe.train.tokens_per_step,
            "wall_seconds": wall_seconds,
            "recipe": recipe_file.resolved(run.recipe),
            "data_digest": run.data_digest,
            "vocab_size": run.vocab_size,
            "layout": {"tensor": world.tensor_size, "data": world.data_size},
            "files": {name: seal for files in written for name, seal in files.items()},
        }
        _write(partial / "manifest.json", json.dumps(manifest, indent=2))
        shutil.rmtree(folder, ignore_errors=True)  # the same step of a run that was then set back
        partial.rename(folder)
        _write(root / "latest.partial", folder.name)
        (root / "latest.partial").replace(root / "latest")
        _prune(root, folder)
    distributed.barrier()


def _prune(root: Path, newest: Path) -> None:
    """Remove all but the newest checkpoint and the one before it, and what was left half-written."""
    names = sorted(path.name for path in root.glob("step_*[0-9]"))
    before = [name for name in names if name < newest.name][-(KEPT - 1) :]
    for path in root.glob("step_*"):
        if path.name not in (newest.name, *before):
            shutil.rmtree(path)


def _file_name(world: World) -> str:
    return f"tp_{world.tensor_rank:02d}.pt"


def _seal(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        _to_disk(file)


def _to_disk(file: Any) -> None:
    """Before a rename makes a file count, its bytes are on the disk and not only promised."""
    file.flush()
    os.fsync(file.fileno())
