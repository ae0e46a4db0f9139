"""What trains: a model with its optimizer and schedule on one rank, behind one interface for every library that can.

`sagebwd.training.train` is the loop around it, and knows nothing of how a gradient is reduced or a state is sharded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sagebwd.training.budget import Plan
from sagebwd.training.recipe import Recipe
from sagebwd.training.world import World

if TYPE_CHECKING:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from sagebwd.training.stored import Stored

Batch = dict[str, Tensor]


class Engine(ABC):
    """One rank's part. Every rank calls every method, in the same order: most hold collectives.

    megatron: Megatron's model without any wrapper. schedule: there from `begin` on.
    """

    megatron: torch.nn.Module
    schedule: OptimizerParamScheduler

    @abstractmethod
    def begin(self, plan: Plan) -> None:
        """Optimizer and schedule, fresh, once it is known how many steps there will be; before anything below."""

    @abstractmethod
    def gradients(self, batches: Iterator[Batch]) -> Tensor:
        """Forward and backward over a step's micro-batches, taken from `batches`: afterwards the gradients are those of
        the mean loss over the tokens of the global batch, whatever the layout. What gradients there were is gone.

        Returns float64 [2]: the sum of this rank's losses in nats, and its tokens. The host does not wait for it.
        """

    @abstractmethod
    def update(self, wanted: Callable[[float], bool]) -> float:
        """The schedule's and the optimizer's step with what `gradients` left. Returns the norm before clipping.

        wanted: asked once with the gradient's norm over all ranks, the step's only wait for the device; False leaves
        weights and optimizer as they are, the schedule apart.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Float64 [2]: the sum of the losses of one micro-batch, of any length, and its tokens. Within `evaluating`."""

    @abstractmethod
    def evaluating(self, on: bool) -> None:
        """Between training and evaluation mode."""

    @abstractmethod
    def rehearse(self, batch: Batch) -> None:
        """A training step's forward and backward, the gradients thrown away: compiles what a step launches.

        batch: of a training micro-batch's shape. Leaves no trace but in random states.
        """

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What meta.json says of it."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """The last step's."""

    # What goes in and out of a checkpoint

    @property
    @abstractmethod
    def updates(self) -> int:
        """How many steps the optimizer has made; a skipped one is none."""

    @property
    @abstractmethod
    def shard(self) -> str | None:
        """The checkpoint's file that this rank writes; None: another rank holds the same."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank's file holds, as `stored` names it: FP32 weights and AdamW's moments. Not copies."""

    @abstractmethod
    def load(self, stored: Stored, updates: int) -> None:
        """Take weights and, if the optimizer had made any `updates`, its moments from a checkpoint of any layout."""


def build(recipe: Recipe, vocab_size: int, dtype: torch.dtype, here: World, plan: Plan) -> Engine:
    """The engine of a recipe with "auto" resolved, freshly initialised weights in `dtype` on this rank's device.

    vocab_size: the tokenizer's, unpadded. Seed first: see `build_model`.
    """
    if recipe.parallel.engine == "deepspeed":
        from sagebwd.training.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(recipe, vocab_size, dtype, here, plan)
    from sagebwd.training.engine.megatron import MegatronEngine

    return MegatronEngine(recipe, vocab_size, dtype, here, plan)
