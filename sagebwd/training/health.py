"""Sick runs: steps that must not count, losses that jump, and where in the model a NaN came from."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from sagebwd.megatron.stages import whole_name
from sagebwd.training import recipe
from sagebwd.training.checkpoint import Position
from sagebwd.training.world import World

WINDOW, AT_LEAST = 32, 8  # losses that a spike is measured against
Verdict = Literal["well", "skipped", "spike", "stop"]


def sound(loss: float, grad_norm: float) -> bool:
    """Whether a step may change the weights."""
    return math.isfinite(loss) and math.isfinite(grad_norm)


def judge(settings: recipe.Health, position: Position, loss: float, grad_norm: float) -> Verdict:
    """Of the step that was just made, or skipped; counts it in `position`. Equal on all ranks, as their losses are.

    A spike counts once, when it begins: a loss that stays up becomes what the next ones are measured against.
    """
    if not sound(loss, grad_norm):
        position.skipped += 1
        position.bad_in_row += 1
        return "stop" if position.bad_in_row >= settings.bad_steps else "skipped"
    position.bad_in_row = 0
    before = position.recent
    limit = statistics.median(before) + settings.spike_nats if len(before) >= AT_LEAST else math.inf
    spike = loss > limit and before[-1] <= limit
    position.recent = [*before, loss][-WINDOW:]
    position.spikes += spike
    return "spike" if spike else "well"


class Probe:
    """Finds the first module whose output, or in the backward pass the gradient of whose output, is not finite.

    For a step that is done again after it has failed: it waits for the device at every module.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self.backward = False  # whether the first was found there
        self.micro_batch = -1
        self.sick_micro_batch: int | None = None

    @contextlib.contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[Probe]:
        """`model`: Megatron's, without its wrappers. A weight that is not finite already is the first finding."""
        for name, parameter in model.named_parameters():
            if not _finite(parameter):
                self._note(whole_name(model, name), "the weight", 0)
                break
        named = [
            (f"{whole_name(model, name) or 'the model'} ({type(module).__name__})", module)
            for name, module in model.named_modules()
        ]
        handles = [module.register_forward_hook(self._after(label)) for label, module in named]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def gradients(self, model: torch.nn.Module) -> None:
        """After the backward pass: the first parameter whose gradient is not finite, unless something was before."""
        for name, parameter in model.named_parameters():
            if not _finite(getattr(parameter, "main_grad", parameter.grad)):
                self._note(whole_name(model, name), "the gradient", self.micro_batch, backward=True)
                return

    def finding(self, here: World, begin: int, micro_batch: int) -> dict[str, Any]:
        """This rank's: what was first (None: nothing), how early, and the samples of the micro-batch it came with.

        begin: the number of the step's first sample; micro_batch: samples of one on a rank.
        """
        number = self.sick_micro_batch or 0
        mine = begin + (number * here.data_size + here.data_rank) * micro_batch
        samples = list(range(mine, mine + micro_batch))
        # A micro-batch goes through the stages of a pipeline and back
        order = [number, self.backward, -here.stage if self.backward else here.stage]
        return {"first": self.first, "rank": here.rank, "micro_batch": number, "samples": samples, "order": order}

    def _after(self, label: str) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not _finite(tensor):
                    self._note(label, "the output", self.micro_batch)
                elif tensor.requires_grad:
                    tensor.register_hook(self._backward(label, self.micro_batch))

        return hook

    def _backward(self, label: str, micro_batch: int) -> Any:
        """micro_batch: whose backward pass it is; in a pipeline the next ones have gone forward meanwhile."""

        def hook(gradient: Tensor) -> None:
            if not _finite(gradient):
                self._note(label, "the gradient of the output", micro_batch, backward=True)

        return hook

    def _note(self, where: str, what: str, micro_batch: int, *, backward: bool = False) -> None:
        if self.first is None:
            self.first, self.backward = f"{what} of {where}", backward
            self.sick_micro_batch = max(micro_batch, 0)


def first_of(findings: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks' findings the earliest."""
    sick = [each for each in findings if each["first"]]
    found = min(sick, key=lambda each: each["order"]) if sick else findings[0] | {"first": "none, done again"}
    return {key: value for key, value in found.items() if key != "order"}


def _finite(tensor: Tensor | None) -> bool:
    return tensor is None or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
