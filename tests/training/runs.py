"""Runs to test on: tiny recipes, and what a run logged."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sagebwd.training.recipe import Attention, Checkpoint, Data, Evaluation, Model, Optimizer, Parallel, Recipe, Train

ARMS = ("fpa", "sagebwd")
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="exact only on a CPU, in FP32: hide the GPU with CUDA_VISIBLE_DEVICES= to run it"
)


def tiny_recipe(
    data: Data, kind: str, *, steps: int, tokens_per_step: int, micro_batch: int, tensor: int = 1
) -> Recipe:
    """Two layers of 32, four query heads on two key/value heads, QK-norm, tied embeddings."""
    return Recipe(
        name="tiny",
        seed=3,
        model=Model(layers=2, hidden=32, ffn=64, heads=4, kv_heads=2),
        attention=Attention(kind=kind),
        data=data,
        train=Train(
            tokens_per_step=tokens_per_step,
            total_tokens=steps * tokens_per_step,
            micro_batch=micro_batch,
            fusion="off",  # as a CPU resolves it
        ),
        optimizer=Optimizer(lr=1e-3, min_lr=1e-4, warmup_tokens=4 * tokens_per_step),
        evaluation=Evaluation(tokens=512, every_steps=3),
        checkpoint=Checkpoint(every_steps=steps // 2),
        parallel=Parallel(tensor=tensor),
    )


@dataclass(frozen=True)
class Logged:
    """(step, value) of every point of a tag, as a reader of the event files sees them."""

    scalars: dict[str, list[tuple[int, float]]]

    def values(self, tag: str) -> list[float]:
        return [value for _, value in self.scalars[tag]]


def logged(folder: Path) -> Logged:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return Logged({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})


def comparable(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "time" and not key.startswith("perf/")}


def journal(folder: Path) -> list[dict[str, Any]]:
    """What log.jsonl says, without what depends on the machine."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [comparable(line) for line in lines]


def changed(recipe: Recipe, change: dict[str, Any]) -> Recipe:
    """The recipe with other values, nested as they are in it."""

    def merged(tree: dict, change: dict) -> dict:
        return tree | {k: merged(tree[k], v) if isinstance(v, dict) else v for k, v in change.items()}

    return Recipe.model_validate(merged(recipe.model_dump(), change))
