"""A grid of experiments: every arm of a recipe at every tokens per step, with and without QK-norm, for every seed.

A *cell* is one combination of the grid's values. In a cell the arms see the same samples in the same order from the
same initial weights, so that each is paired with full precision; across cells only means are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator

from sagebwd.errors import UserError
from sagebwd.training.recipe import Positive, Recipe, Section

Seed = Annotated[int, Field(ge=0)]
AXES = {"tokens_per_step": "train.tokens_per_step", "qk_norm": "model.qk_norm", "seed": "seed"}
"""The sweep's lists and the recipe's keys that they set."""


class LearningRate(Section):
    """lr * (tokens_per_step / at) ** power, but at most `most`; min_lr follows in the same proportion."""

    at: Positive | None = Field(None, description="tokens per step for which optimizer.lr is meant; null: no rule")
    power: float = Field(0.5, ge=0, description="0.5: with the square root of the batch, as for Adam; 1: linearly")
    most: float | None = Field(None, gt=0, description="no learning rate above this; null: no bound")

    @model_validator(mode="after")
    def _read(self) -> LearningRate:
        if self.at is None and self.model_fields_set & {"power", "most"}:
            raise ValueError("without `at`, the tokens per step for which optimizer.lr is meant, there is no rule")
        return self


class Sweep(Section):
    """The grid. An empty list leaves the recipe's own value."""

    tokens_per_step: tuple[Positive, ...] = ()
    qk_norm: tuple[bool, ...] = ()
    seed: tuple[Seed, ...] = ()
    learning_rate: LearningRate = LearningRate()
    evaluations: Positive | None = Field(
        None, description="validations of a run, evenly spaced; null: evaluation.every_steps"
    )
    checkpoints: Positive | None = Field(
        None, description="checkpoints of a run, evenly spaced; null: checkpoint.every_steps"
    )

    margin: float = Field(
        0.01, gt=0, description="nats per token within which the comparison says that an arm matches full precision"
    )

    @model_validator(mode="after")
    def _distinct(self) -> Sweep:
        for axis in AXES:
            values = getattr(self, axis)
            if len(set(values)) < len(values):
                raise ValueError(f"{axis} holds a value twice: remove one")
        return self


@dataclass(frozen=True)
class Cell:
    """One combination. name: "128k-noqk-s2". keys: dotted keys of the recipe and their values there."""

    name: str
    keys: dict[str, Any]

    def arm(self, variant: str) -> str:
        """The name of an arm of the recipe in this cell."""
        return f"{self.name}-{variant}"


def cells(sweep: Sweep) -> list[Cell]:
    """The grid, the seeds outermost: what is compared first has one seed of everything. [] for an empty sweep."""
    axes = [axis for axis in ("seed", "tokens_per_step", "qk_norm") if getattr(sweep, axis)]
    if not axes:
        return []
    return [
        Cell("-".join(_labels(dict(zip(axes, values, strict=True)))), _keys(axes, values))
        for values in itertools.product(*(getattr(sweep, axis) for axis in axes))
    ]


def complete(sweep: Sweep, recipe: Recipe) -> Recipe:
    """The recipe of an arm in a cell, with the learning rate and the intervals that follow from its tokens per step."""
    train, optimizer, rule = recipe.train, recipe.optimizer, sweep.learning_rate
    if rule.at is not None:
        lr = optimizer.lr * (train.tokens_per_step / rule.at) ** rule.power
        lr = _round(min(lr, rule.most or lr))
        rates = {"lr": lr, "min_lr": _round(optimizer.min_lr * lr / optimizer.lr)}
        recipe = recipe.model_copy(update={"optimizer": optimizer.model_copy(update=rates)})
    steps = train.total_tokens // train.tokens_per_step
    for section, times in (("evaluation", sweep.evaluations), ("checkpoint", sweep.checkpoints)):
        if times is not None:
            every = {"every_steps": max(1, math.ceil(steps / times))}
            recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=every)})
    return recipe


def refuse_override(sweep: Sweep, key: str, where: str) -> None:
    """UserError: `key`, set by `where`, is one that the sweep varies."""
    for axis, swept in AXES.items():
        if key == swept and getattr(sweep, axis):
            raise UserError(f"{key} is set by {where}, but the recipe sweeps it: set sweep.{axis} instead")


def short(tokens: int) -> str:
    """131072 -> "128k": tokens per step in a name, exact."""
    for unit, suffix in ((1 << 20, "m"), (1 << 10, "k")):
        if tokens % unit == 0:
            return f"{tokens // unit}{suffix}"
    return str(tokens)


def _labels(values: dict[str, Any]) -> Iterator[str]:
    if "tokens_per_step" in values:
        yield short(values["tokens_per_step"])
    if "qk_norm" in values:
        yield "qk" if values["qk_norm"] else "noqk"
    if "seed" in values:
        yield f"s{values['seed']}"


def _keys(axes: list[str], values: tuple[Any, ...]) -> dict[str, Any]:
    return {AXES[axis]: value for axis, value in zip(axes, values, strict=True)}


def _round(rate: float) -> float:
    """Six digits: a learning rate that a person can read and write again."""
    return float(f"{rate:.6g}")
