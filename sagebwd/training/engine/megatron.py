"""Megatron-core's own engine: its data parallelism, its schedules and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import Parameter

from sagebwd.megatron.model import build_model
from sagebwd.training import gradients
from sagebwd.training.budget import Plan
from sagebwd.training.engine import Batch, Engine, losses
from sagebwd.training.optimizer import build_optimizer, build_schedule, update
from sagebwd.training.recipe import Recipe
from sagebwd.training.stored import MOMENTS, Stored, file_name
from sagebwd.training.world import World


class MegatronEngine(Engine):
    def __init__(self, recipe: Recipe, vocab_size: int, dtype: torch.dtype, here: World, plan: Plan) -> None:
        self.recipe, self.dtype, self.here, self.accumulation = recipe, dtype, here, plan.accumulation
        model = build_model(recipe, vocab_size, dtype)
        config = model.config
        self.megatron = model
        if dtype is torch.bfloat16:
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)  # FP32 sums, whatever the weights' dtype
        self.model = DistributedDataParallel(config, ddp, model.to(here.device))
        self.model.broadcast_params()
        config.finalize_model_grads_func = gradients.finalize
        self.forward_backward = get_forward_backward_func()

    def begin(self, plan: Plan) -> None:
        self.optimizer = build_optimizer(self.recipe.optimizer, self.model, self.dtype)
        self.schedule = build_schedule(self.recipe.optimizer, self.optimizer, plan)

    def gradients(self, batches: Iterator[Batch]) -> Tensor:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        of_each = self.forward_backward(
            forward_step_func=self._forward,
            data_iterator=batches,
            model=[self.model],
            num_microbatches=self.accumulation,
            seq_length=self.recipe.data.context,
            micro_batch_size=self.recipe.train.micro_batch,
        )
        return torch.stack(of_each).sum(0)

    def update(self, wanted: Callable[[float], bool]) -> float:
        self.schedule.step(1)
        return update(self.optimizer, wanted)

    def loss(self, batch: Batch) -> Tensor:
        of_each, mask = self._losses(self.model, batch)
        return losses.sums(mask, of_each)[2]

    def evaluating(self, on: bool) -> None:
        self.model.train(not on)

    def rehearse(self, batch: Batch) -> None:
        of_each, mask = self._losses(self.model, batch)
        with self.model.no_sync():  # gradients are not summed over the ranks
            losses.sums(mask, of_each)[0].backward()
        self.model.zero_grad_buffer()

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @property
    def updates(self) -> int:
        for optimizer in self._inner():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # torch counts in the parameter's state, Apex and Transformer Engine in the group
                    step = optimizer.state.get(parameter, {}).get("step", group.get("step"))
                    if step is not None:
                        return int(step)
        return 0

    @property
    def shard(self) -> str | None:
        return None if self.here.data_rank else file_name(self.here.tensor_rank)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        moments = {parameter: found for optimizer in self._inner() for parameter, found in optimizer.state.items()}
        for name, parameter in self.megatron.named_parameters():
            main = getattr(parameter, "main_param", parameter)
            yield f"weight/{name}", main.detach()
            if main in moments:
                for kind in MOMENTS:
                    yield f"{kind}/{name}", moments[main][kind]

    @torch.no_grad()
    def load(self, stored: Stored, updates: int) -> None:
        moments: dict[Parameter, dict[str, Tensor]] = {}
        for name, parameter in self.megatron.named_parameters():
            main = getattr(parameter, "main_param", parameter)
            main.copy_(stored.mine("weight", name, parameter))
            if main is not parameter:
                parameter.copy_(main)
            if updates:
                moments[main] = {kind: stored.mine(kind, name, parameter) for kind in MOMENTS}
        for optimizer in self._inner():
            _load_moments(optimizer, moments, updates)

    def _forward(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        of_each, mask = self._losses(model, next(batches))
        return of_each, partial(losses.sums, mask)

    def _losses(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return losses.token_losses(model, batch, self.here.device, pack=self.recipe.data.pack)

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        """The torch optimizers inside Megatron's."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            yield optimizer.optimizer


def _load_moments(optimizer: torch.optim.Optimizer, moments: dict[Parameter, dict[str, Tensor]], step: int) -> None:
    content = optimizer.state_dict()
    content["state"] = {}
    if step:
        in_state = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            # A step tensor of its own for each: AdamW counts it up in place.
            own = {"step": torch.tensor(float(step), dtype=torch.float32)} if in_state else {}
            content["state"][index] = own | moments[parameter]
        if not in_state:
            for group in content["param_groups"]:
                group["step"] = step
    optimizer.load_state_dict(content)
