"""What may differ between a run and the recipe that goes on with it: freely, with a word, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sagebwd.training import recipe_file
from sagebwd.training.recipe import Recipe

# Cannot change what the run computes, or only decides what happens from now on.
FREE = ("description", "checkpoint", "health", "evaluation.every_steps")
# Change a result by no more than rounding.
LAYOUT = ("parallel", "train.micro_batch", "train.deterministic")
# Another model: its checkpoint does not fit.
SHAPE = (
    *(f"model.{key}" for key in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "qk_norm")),
    "model.tied_embeddings",
    "data.vocab_size",
)


@dataclass(frozen=True)
class Change:
    """A key of the recipe (or of the data), its value there, in the run so far, and here, in what goes on with it."""

    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.there!r}, but this run has {self.here!r}"

    @property
    def acceptable(self) -> bool:
        """Whether checkpoint.accept_changed may let it pass."""
        return not _among(self.key, SHAPE)

    @property
    def remedy(self) -> str:
        """How to let it pass, the beginning of a list of remedies; "" if nothing does."""
        return f"accept it with checkpoint.accept_changed=[{self.key}], " if self.acceptable else ""


def between(there: Recipe, here: Recipe) -> list[Change]:
    """What differs and can change a result."""
    found = recipe_file.differences(there, here).items()
    return [Change(key, left, right) for key, (left, right) in found if not _among(key, FREE)]


def split(found: list[Change], here: Recipe) -> tuple[list[Change], list[Change]]:
    """The changes that `here` lets pass, as a layout of its own or by checkpoint.accept_changed; and those refused."""
    passing = (*LAYOUT, *here.checkpoint.accept_changed)
    accepted = [change for change in found if change.acceptable and _among(change.key, passing)]
    return accepted, [change for change in found if change not in accepted]


def _among(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
