"""What a probe found."""

from __future__ import annotations

from dataclasses import dataclass

from sagebwd.attention.errors import Error
from sagebwd.training.recipe import Recipe


@dataclass(frozen=True)
class Findings:
    """errors: [layer][rule][tensor]. device: what it was worked out on."""

    arm: str
    step: int
    recipe: Recipe
    tokens: int
    documents: int
    device: str
    errors: list[dict[str, dict[str, Error]]]
