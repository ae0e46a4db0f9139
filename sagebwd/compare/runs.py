"""Reads a recipe's runs: each arm's recipe, what it wrote about itself, and its TensorBoard scalars."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sagebwd.errors import UserError
from sagebwd.training import recipe_file, run_folder
from sagebwd.training.recipe import Recipe

TRAIN, VALIDATION = "train/loss", "validation/loss"
TOKENS_PER_SECOND, MFU, MEMORY = "perf/tokens_per_second", "perf/mfu", "perf/memory_gib"


@dataclass(frozen=True)
class Series:
    """One scalar over ascending optimizer steps. steps: int64 [n]; values: float64 [n], NaN and Inf as logged."""

    steps: np.ndarray
    values: np.ndarray


EMPTY = Series(np.empty(0, np.int64), np.empty(0))


class Cell(NamedTuple):
    """Where a run lies in a sweep: runs of one cell saw the same samples, and began from the same weights."""

    tokens_per_step: int
    qk_norm: bool
    seed: int


@dataclass(frozen=True)
class Run:
    """One arm's run. meta: what its meta.json says, {} before the first checkpoint. series: by TensorBoard tag.

    variant: which of the recipe's arms it is; in a sweep every cell has a run of each.
    """

    name: str
    variant: str
    recipe: Recipe
    meta: dict[str, Any]
    series: dict[str, Series]

    @property
    def cell(self) -> Cell:
        return Cell(self.recipe.train.tokens_per_step, self.recipe.model.qk_norm, self.recipe.seed)

    def get(self, tag: str) -> Series:
        """The series of a tag; an empty one if nothing was logged under it."""
        return self.series.get(tag, EMPTY)


def load(folder: Path) -> list[Run]:
    """Every run in `folder`, in the recipe's order of arms.

    Raises UserError: no folder, no runs in it, an unreadable file, runs that did not see the same samples.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give the folder of a recipe's runs, such as runs/small")
    facts = experiment(folder)
    order, variants = facts.get("arms", []), facts.get("variants", {})
    names = [path.name for path in sorted(folder.iterdir()) if (path / run_folder.CONFIG).is_file()]
    names.sort(key=lambda name: (order.index(name) if name in order else len(order), name))
    runs = [_load(folder / name, variants.get(name, name)) for name in names]
    runs = [run for run in runs if len(run.get(VALIDATION).steps)]
    if not runs:
        raise UserError(f"{folder} holds no run with a validation loss: run `sagebwd recipe` first")
    first: dict[Cell | None, Run] = {}
    for run in runs:
        _refuse_different_samples(folder, runs[0], run, CORPUS)
        _refuse_different_samples(folder, first.setdefault(run.cell if variants else None, run), run, SAMPLES)
    return runs


def experiment(folder: Path) -> dict[str, Any]:
    """What the recipe command recorded: command, recipe, arms. {} for runs that were started one by one."""
    path = folder / run_folder.EXPERIMENT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it") from None
    arms = found.get("arms", []) if isinstance(found, dict) else None
    if not isinstance(arms, list):
        raise UserError(f"{path} is not what `sagebwd recipe` records: remove it")
    return found


def read_events(folder: Path) -> dict[str, Series]:
    """All scalars of a folder's event files, by tag. Of a step logged twice (a resumed run) the later one stands."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each restart that purges points, by design
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0}).Reload()
    series = {}
    for tag in events.Tags()[SCALARS]:
        points = {event.step: event.value for event in events.Scalars(tag)}
        steps = sorted(points)
        series[tag] = Series(np.array(steps, np.int64), np.array([points[step] for step in steps], np.float64))
    return series


def _load(folder: Path, variant: str) -> Run:
    recipe = recipe_file.load_config(folder / run_folder.CONFIG)
    return Run(folder.name, variant, recipe, run_folder.meta(folder), read_events(folder))


CORPUS = {  # what must be the same everywhere for losses to be compared at all
    "data.context": lambda run: run.recipe.data.context,
    "data.pack": lambda run: run.recipe.data.pack,
    "evaluation.tokens": lambda run: run.recipe.evaluation.tokens,
    "the prepared data's digest": lambda run: run.meta.get("data_digest"),
}
SAMPLES = {  # and what must be the same for two runs to be a pair
    "seed": lambda run: run.recipe.seed,
    "train.tokens_per_step": lambda run: run.recipe.train.tokens_per_step,
}


def _refuse_different_samples(folder: Path, one: Run, other: Run, facts: dict[str, Callable[[Run], Any]]) -> None:
    for what, of in facts.items():
        left, right = of(one), of(other)
        if left != right and None not in (left, right):
            raise UserError(
                f"{folder}: {one.name} and {other.name} cannot be compared, since {what} differs ({left} and {right}): "
                "move one of the two away, or run both from one recipe"
            )
