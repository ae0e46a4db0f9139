"""Writes an arm's run folder as training does: real event files, config.yaml, meta.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from sagebwd.training import run_folder
from sagebwd.training.recipe import Recipe

SAGE, FPA = {"kind": "sagebwd"}, {"kind": "fpa"}
META = {
    "status": "done",
    "unigram_entropy": 6.0,
    "data_digest": "d" * 64,
    "device": "CPU",
    "steps": 8,
    "bytes_per_token": 2.0,
}


def recipe(attention: Mapping[str, str], tokens_per_step: int = 2048, **sections: object) -> Recipe:
    return Recipe(name="r", attention=attention, train={"tokens_per_step": tokens_per_step}, **sections)


def write_run(
    folder: Path,
    recipe: Recipe,
    scalars: Mapping[str, Mapping[int, float]],
    meta: Mapping[str, object] = META,
    purge_step: int | None = None,
) -> None:
    """scalars: tag -> step -> value. purge_step: as a resumed run gives it, to void what came from there on."""
    run_folder.claim(folder, recipe)
    with SummaryWriter(str(folder), purge_step=purge_step) as writer:
        for tag, points in scalars.items():
            for step, value in points.items():
                writer.add_scalar(tag, value, step)
    (folder / run_folder.META).write_text(json.dumps(meta))


def losses(shift: float, steps: int = 8) -> dict[str, dict[int, float]]:
    """Losses that fall from 8, by one a step of training and two steps of validation, `shift` higher from step 1 on."""
    return {
        "train/loss": {step: 8 - 0.5 * step + shift for step in range(1, steps + 1)},
        "validation/loss": {step: 8 - 0.5 * step + (shift if step else 0) for step in range(0, steps + 1, 2)},
        "perf/tokens_per_second": {step: 10.0 if step <= 3 else 1000.0 for step in range(1, steps + 1)},
        "perf/memory_gib": {step: 2.0 if step <= 3 else 2.5 for step in range(1, steps + 1)},
        "perf/mfu": {step: 0.25 for step in range(1, steps + 1)},
    }
