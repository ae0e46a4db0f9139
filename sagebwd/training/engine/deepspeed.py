"""DeepSpeed's engine: ZeRO 0 to 3 around Megatron's model, with Megatron's tensor parallelism and schedule."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from torch import Tensor, distributed
from torch.nn import Parameter

from sagebwd.megatron.model import build_model
from sagebwd.training import deepspeed_config
from sagebwd.training.budget import Plan
from sagebwd.training.engine import Batch, Engine, losses
from sagebwd.training.engine.mpu import ModelParallelUnit
from sagebwd.training.engine.parts import Part, part
from sagebwd.training.optimizer import build_schedule
from sagebwd.training.recipe import Recipe
from sagebwd.training.stored import MOMENTS, Stored, file_name, part_name
from sagebwd.training.world import World


class DeepSpeedEngine(Engine):
    def __init__(self, recipe: Recipe, vocab_size: int, dtype: torch.dtype, here: World, plan: Plan) -> None:
        self.recipe, self.here, self.accumulation = recipe, here, plan.accumulation
        self.stage = recipe.parallel.zero_stage
        self.config = deepspeed_config.load(
            recipe, plan.accumulation, here.data_size, pin_memory=here.device.type == "cuda"
        )
        library = _library(here.device)
        self.megatron = build_model(recipe, vocab_size, dtype)
        self.inner = _adamw(recipe, self.megatron)
        self.update_wanted = _Veto(self.inner)
        for parameter in _partly_known(self.megatron):
            parameter.register_hook(_sum_over_tensor_parallel)
        model = self.megatron
        if dtype is torch.bfloat16:
            model = Float16Module(model.config, model)
        self.deepspeed, self.optimizer, *_ = library.initialize(
            model=model.to(here.device), optimizer=self.inner, config=self.config, mpu=ModelParallelUnit()
        )
        # DeepSpeed averages over the ranks; the mean is over the tokens of the global batch, of which each counts
        self.scale = here.data_size / recipe.train.tokens_per_step

    def begin(self, plan: Plan) -> None:
        self.schedule = build_schedule(self.recipe.optimizer, self.inner, plan)

    def gradients(self, batches: Iterator[Batch]) -> Tensor:
        return self._accumulate(batches, self.accumulation)

    def update(self, wanted: Callable[[float], bool]) -> float:
        self.schedule.step(1)
        return self._update(wanted)

    def loss(self, batch: Batch) -> Tensor:
        of_each, mask = self._losses(batch)
        return losses.sums(mask, of_each)[2]

    def evaluating(self, on: bool) -> None:
        self.deepspeed.train(not on)

    def rehearse(self, batch: Batch) -> None:
        self._accumulate(iter([batch]), 1)
        self._update(lambda norm: False)

    @property
    def facts(self) -> dict[str, Any]:
        return {"engine": "deepspeed", "deepspeed": self.config}

    @property
    def learning_rate(self) -> float:
        return self.inner.param_groups[0]["lr"]

    @property
    def updates(self) -> int:
        return max((int(state["step"]) for state in self.inner.state.values() if "step" in state), default=0)

    @property
    def shard(self) -> str | None:
        if self.stage:
            return file_name(self.here.tensor_rank, self.here.data_rank)
        return None if self.here.data_rank else file_name(self.here.tensor_rank)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, mine in self._parts():
            found = {"weight": mine.buffer.detach()} | {
                kind: value for kind, value in self.inner.state.get(mine.buffer, {}).items() if kind in MOMENTS
            }
            for kind, value in found.items():
                key = f"{kind}/{name}"
                yield (part_name(key, mine.start), mine.of(value)) if self.stage else (key, value)

    @torch.no_grad()
    def load(self, stored: Stored, updates: int) -> None:
        parameters = dict(self.megatron.named_parameters())
        self.inner.state.clear()
        for name, mine in self._parts():
            parameter = parameters[name]
            mine.of(mine.buffer).copy_(mine.cut(stored.mine("weight", name, parameter)))
            if updates:
                state = self.inner.state[mine.buffer]
                if not state:
                    state["step"] = torch.tensor(float(updates), dtype=torch.float32)
                    state |= {kind: torch.zeros_like(mine.buffer) for kind in MOMENTS}
                for kind in MOMENTS:
                    mine.of(state[kind]).copy_(mine.cut(stored.mine(kind, name, parameter)))
        self._masters_to_model()

    def _accumulate(self, batches: Iterator[Batch], number: int) -> Tensor:
        of_each = []
        for index, batch in enumerate(islice(batches, number)):
            self.deepspeed.set_gradient_accumulation_boundary(index == number - 1)
            losses_of_batch, mask = self._losses(batch)
            total, _, logged = losses.sums(mask, losses_of_batch)
            self.deepspeed.backward(total * self.scale, scale_wrt_gas=False)
            of_each.append(logged)
        return torch.stack(of_each).sum(0)

    def _update(self, wanted: Callable[[float], bool]) -> float:
        """DeepSpeed computes the norm and clips within its step, so the veto is in the optimizer inside."""
        norm = self._clip() if self.stage == 0 else None
        with self.update_wanted.decided(wanted, lambda: self._norm() if norm is None else norm) as veto:
            self.deepspeed.step()
        return veto.norm

    def _norm(self) -> float:
        """Of the step under way. DeepSpeed says inf, or a negative number, for any norm that is not finite."""
        norm = float(self.optimizer._global_grad_norm)
        return norm if norm >= 0 and not self.optimizer.overflow else math.inf

    def _clip(self) -> float:
        from deepspeed.runtime.utils import clip_grad_norm_

        limit = self.recipe.optimizer.clip or math.inf
        return float(clip_grad_norm_(self.megatron.parameters(), limit, mpu=self.deepspeed.mpu))

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return losses.token_losses(self.deepspeed, batch, self.here.device, pack=self.recipe.data.pack)

    def _parts(self) -> Iterator[tuple[str, Part]]:
        """What this rank holds, by Megatron's name of the parameter."""
        for name, parameter in self.megatron.named_parameters():
            mine = part(parameter, self.optimizer)
            if mine is not None:
                yield name, mine

    def _masters_to_model(self) -> None:
        if self.stage == 3:
            for group in range(len(self.optimizer.fp16_groups)):
                self.optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if self.optimizer.persistent_parameters:
                self.optimizer.persistent_parameters[0].all_gather(self.optimizer.persistent_parameters)
        elif self.stage:
            self.optimizer.update_lp_params()


class _Veto:
    """Lets the torch optimizer inside DeepSpeed's update only what the run wants to be updated."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        self.wanted: Callable[[float], bool] = lambda norm: False
        self.ask: Callable[[], float] = lambda: math.nan
        self.norm: float | None = None
        self.granted = False
        self.withheld: list[tuple[Tensor, Tensor | None]] = []

    def decided(self, wanted: Callable[[float], bool], norm: Callable[[], float]) -> _Veto:
        """For one step: `wanted` is asked once with the `norm`, which is known when the optimizer inside is called, or
        at the end if DeepSpeed has not called it."""
        self.wanted, self.ask, self.norm = wanted, norm, None
        return self

    def __enter__(self) -> _Veto:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._decide()

    def _decide(self) -> None:
        if self.norm is None:
            self.norm = self.ask()
            self.granted = self.wanted(self.norm)

    def _before(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self._decide()
        if not self.granted:  # without a gradient it leaves a parameter and its moments alone
            of_all = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.withheld = [(parameter, parameter.grad) for parameter in of_all]
            for parameter in of_all:
                parameter.grad = None

    def _after(self, *arguments: Any) -> None:
        for parameter, gradient in self.withheld:
            parameter.grad = gradient
        self.withheld = []


def _library(device: torch.device) -> Any:
    """DeepSpeed, imported when it is used: that takes seconds."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # it would look, and warn of a CPU
    os.environ.setdefault("LOCAL_RANK", "0")  # a world of one has no launcher that says it
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # torch 2.13 says at every call that DeepSpeed uses the collectives' older names
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # None of its C++ and CUDA operators is used; on a CPU it would compile one for a minute, only to start.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def _adamw(recipe: Recipe, model: torch.nn.Module) -> torch.optim.AdamW:
    """1-D parameters (the norms' gains) have no weight decay, as with Megatron: the schedule multiplies by wd_mult."""
    settings = recipe.optimizer
    of = {decays: [p for p in model.parameters() if (p.dim() > 1) == decays] for decays in (True, False)}
    groups = [{"params": found, "wd_mult": float(decays)} for decays, found in of.items()]
    options = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    fused = True if recipe.parallel.offload == "cpu" else None  # on the CPU's vector units, in one pass
    return torch.optim.AdamW(groups, weight_decay=settings.weight_decay, fused=fused, **options)


def _partly_known(model: torch.nn.Module) -> Iterator[Parameter]:
    """Parameters that all tensor-parallel ranks hold, each knowing a part of the gradient: see finalize_model_grads."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    for name, parameter in model.named_parameters():
        if getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            yield parameter


def _sum_over_tensor_parallel(gradient: Tensor) -> Tensor:
    total = gradient.float()
    total = total.clone() if total is gradient else total
    distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return total.to(gradient.dtype)
