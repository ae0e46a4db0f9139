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

from sagebwd.attention.zigzag import Zigzag
from sagebwd.megatron.model import build_model
from sagebwd.megatron.stages import whole_name
from sagebwd.training import gradients
from sagebwd.training.budget import Plan
from sagebwd.training.engine import Batch, Engine, losses
from sagebwd.training.optimizer import build_optimizer, build_schedule, main_parameter, parts, update
from sagebwd.training.recipe import Recipe
from sagebwd.training.stored import MOMENTS, Stored, file_name, part_name
from sagebwd.training.world import World


class MegatronEngine(Engine):
    def __init__(self, recipe: Recipe, vocab_size: int, dtype: torch.dtype, here: World, plan: Plan) -> None:
        self.recipe, self.dtype, self.here, self.accumulation = recipe, dtype, here, plan.accumulation
        replicas = here.data_size * here.context_size
        self.sharded = recipe.parallel.distributed_optimizer and replicas > 1
        self.zigzag = Zigzag(here.context_rank, here.context_size) if here.context_size > 1 else None
        model = build_model(recipe, vocab_size, dtype)
        config = model.config
        self.megatron = model
        if dtype is torch.bfloat16:
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,  # FP32 sums, whatever the weights' dtype
            overlap_grad_reduce=recipe.parallel.overlap_grad_reduce and replicas > 1,
            use_distributed_optimizer=self.sharded,
        )
        self.model = DistributedDataParallel(config, ddp, model.to(here.device))
        self.model.broadcast_params()
        if ddp.overlap_grad_reduce:
            config.no_sync_func = self.model.no_sync  # but for a step's last micro-batch
        config.finalize_model_grads_func = gradients.finalize
        self.forward_backward = get_forward_backward_func()

    def begin(self, plan: Plan) -> None:
        self.optimizer = build_optimizer(self.recipe.optimizer, self.model, self.dtype)
        self.schedule = build_schedule(self.recipe.optimizer, self.optimizer, plan)

    def gradients(self, batches: Iterator[Batch]) -> Tensor:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._run(batches, self.accumulation, self.recipe.train.micro_batch)

    def update(self, wanted: Callable[[float], bool]) -> float:
        self.schedule.step(1)
        return update(self.optimizer, wanted)

    def loss(self, batch: Batch) -> Tensor:
        return self._run(iter([batch]), 1, len(batch["tokens"]), forward_only=True)

    def evaluating(self, on: bool) -> None:
        self.model.train(not on)

    def rehearse(self, batch: Batch) -> None:
        self._run(iter([batch]), 1, len(batch["tokens"]))
        self.model.zero_grad_buffer()

    @property
    def facts(self) -> dict[str, Any]:
        return {"engine": "megatron"}

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
        if self.here.replica and not self.sharded:
            return None
        stage = self.here.stage if self.here.stages > 1 else None
        return file_name(self.here.tensor_rank, self.here.replica if self.sharded else None, stage)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        moments = {parameter: found for optimizer in self._inner() for parameter, found in optimizer.state.items()}
        for name, parameter in self._parameters():
            part = main_parameter(self.optimizer, parameter)
            if part is None or getattr(parameter, "shared", False):  # the last stage's copy of a tied embedding
                continue
            main, mine = part
            if self.sharded:
                name = part_name(name, mine.start)
            yield f"weight/{name}", main.detach()
            if main in moments:
                for kind in MOMENTS:
                    yield f"{kind}/{name}", moments[main][kind]

    @torch.no_grad()
    def load(self, stored: Stored, updates: int) -> None:
        moments: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in self._parameters():
            part = main_parameter(self.optimizer, parameter)
            if part is None:
                continue
            main, mine = part

            def read(kind: str, name: str = name, of: Parameter = parameter, mine: slice = mine) -> Tensor:
                shard = stored.mine(kind, name, of)
                return shard.flatten()[mine] if self.sharded else shard

            main.copy_(read("weight"))
            if main is not parameter:
                (parameter.view(-1)[mine] if self.sharded else parameter).copy_(main)
            if updates:
                moments[main] = {kind: read(kind) for kind in MOMENTS}
        for optimizer in self._inner():
            _load_moments(optimizer, moments, updates)
        if self.sharded:  # every rank has put in its part of the weights
            self.model.start_param_sync(force_sync=True)

    def _parameters(self) -> Iterator[tuple[str, Parameter]]:
        """This rank's, by their names in a model that no pipeline cuts."""
        for name, parameter in self.megatron.named_parameters():
            yield whole_name(self.megatron, name), parameter

    def _run(self, batches: Iterator[Batch], number: int, sequences: int, *, forward_only: bool = False) -> Tensor:
        """Megatron's schedule over `number` micro-batches of `sequences`: their losses' sum and tokens, 0 on a rank
        that computes no losses."""
        context = self.recipe.data.context
        # Between stages hidden states are [tokens, sequences, hidden]; packed documents lie in one row
        shape = (context * sequences, 1) if self.recipe.data.pack else (context, sequences)
        of_each = self.forward_backward(
            forward_step_func=self._forward,
            data_iterator=batches,
            model=[self.model],
            num_microbatches=number,
            seq_length=shape[0],
            micro_batch_size=shape[1],
            forward_only=forward_only,
        )
        if not self.here.last_stage:
            return torch.zeros(2, dtype=torch.float64, device=self.here.device)
        return torch.stack(of_each).sum(0)

    def _forward(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        of_each, mask = self._losses(model, next(batches))
        return of_each, partial(losses.sums, mask)

    def _losses(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return losses.token_losses(model, batch, self.here.device, pack=self.recipe.data.pack, zigzag=self.zigzag)

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        """The torch optimizers inside Megatron's."""
        for part in parts(self.optimizer):
            yield part.optimizer


def _load_moments(optimizer: torch.optim.Optimizer, moments: dict[Tensor, dict[str, Tensor]], step: int) -> None:
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
