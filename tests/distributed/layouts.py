"""The layouts that must train alike: a line each, on the engine and with the sizes of a recipe's `parallel` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """ranks: processes, one a GPU where there are any. parallel: keys of the recipe. train: keys of it that differ."""

    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


ALONE = "tp1"  # what all others are compared with
LAYOUTS = {
    ALONE: Layout(1),
    "tp2": Layout(2, {"tensor": 2}),
    "tp2-sp": Layout(2, {"tensor": 2, "sequence": True}),
    "dp2": Layout(2),
    "tp2-dp2": Layout(4, {"tensor": 2}),
}
