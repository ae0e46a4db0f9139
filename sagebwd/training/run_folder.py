"""The folder of one arm's run: runs/<recipe>/<arm>/ with event files, log.jsonl, config.yaml, meta.json, status.json,
checkpoints/, log.txt."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sagebwd.errors import UserError
from sagebwd.training import changes, recipe_file
from sagebwd.training.recipe import Recipe
from sagebwd.training.recipe_file import Experiment

CONFIG, META, LOG, EVENTS = "config.yaml", "meta.json", "log.txt", "events.out.tfevents.*"
SICK = "sick_step.json"  # of a run that diverged: where it began, and with which samples
EXPERIMENT = "experiment.json"  # beside the arms' folders: how they came to be
FINISHED = ("done", "diverged")


def record(folder: Path, experiment: Experiment, command: str) -> None:
    """Write what the comparison needs to know of the experiment: its command, its arms' order, a sweep's variants."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "command": command,
        "recipe": str(experiment.path),
        "arms": list(experiment.variants or experiment.arms),
        "variants": dict(experiment.variants),
        "margin": experiment.margin,
    }
    beside = folder / f".{EXPERIMENT}.{os.getpid()}"  # replaced whole: a SLURM array's tasks write it side by side
    beside.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    beside.replace(folder / EXPERIMENT)


def check(folder: Path, recipe: Recipe) -> None:
    """Refuse, with a UserError, a folder that holds another recipe's run, or event files of unknown origin.

    What differs and `recipe` accepts (sagebwd.training.changes) is no other run.
    """
    if not (folder / CONFIG).exists():
        if any(folder.glob(EVENTS)):
            raise UserError(f"{folder} holds event files but no {CONFIG}: move it away, or give another --runs folder")
        return
    _, refused = changes.split(changes.between(recipe_file.load_config(folder / CONFIG), recipe), recipe)
    for change in refused:
        raise UserError(
            f"{folder} holds a run with {change.key} = {change.there!r}, and this one has {change.here!r}: "
            f"{change.remedy}give the run another name (name=...), another --runs folder, or remove that one"
        )


def claim(folder: Path, recipe: Recipe) -> None:
    """Make the folder this recipe's: `check` it, and write its config.yaml unless it is there."""
    check(folder, recipe)
    if not (folder / CONFIG).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, recipe)


def update_config(folder: Path, recipe: Recipe) -> None:
    """A run that was claimed goes on with this recipe: its config.yaml says so from here on."""
    if (folder / CONFIG).exists() and recipe_file.load_config(folder / CONFIG) != recipe:
        write_config(folder, recipe)


def write_config(folder: Path, recipe: Recipe) -> None:
    """config.yaml, replaced whole."""
    beside = folder / f".{CONFIG}.{os.getpid()}"
    beside.write_text(recipe_file.dump(recipe), encoding="utf-8")
    beside.replace(folder / CONFIG)


def meta(folder: Path) -> dict[str, Any]:
    """What the run wrote about itself in meta.json; {} before its first checkpoint. UserError: not readable."""
    path = folder / META
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it and run the recipe again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object: remove it and run the recipe again")
    return found


def finished(folder: Path) -> bool:
    """Whether nothing is left to do there: the budget is spent, or the run diverged."""
    return meta(folder).get("status") in FINISHED
