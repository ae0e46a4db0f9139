"""Megatron's AdamW and its cosine schedule, from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.nn import Parameter

from sagebwd.training import recipe
from sagebwd.training.budget import Plan


def build_optimizer(
    settings: recipe.Optimizer, model: DistributedDataParallel, dtype: torch.dtype
) -> MegatronOptimizer:
    """AdamW with FP32 master weights. 1-D parameters (the norms' gains) have no weight decay: Megatron's default.

    As `model` was wrapped, every data-parallel rank has all of it, or its part (use_distributed_optimizer).
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip,  # the norm is computed in any case; 0 never scales
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def build_schedule(settings: recipe.Optimizer, optimizer: Any, plan: Plan) -> OptimizerParamScheduler:
    """Of any optimizer with param_groups. It counts steps, and is stepped before the optimizer: the learning rate
    reaches `lr` at the last step of the warm-up and `min_lr` at the last of all, and the first step's is not 0."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=plan.warmup_steps,
        lr_decay_steps=plan.steps,
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=plan.steps,
        wd_incr_style="constant",
    )


def parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers that Megatron chains, each with a torch optimizer of its own in `.optimizer`."""
    yield from getattr(optimizer, "chained_optimizers", [optimizer])


def main_parameter(optimizer: MegatronOptimizer, parameter: Parameter) -> tuple[Tensor, slice] | None:
    """What the optimizer updates in place of a model's parameter: FP32, and which part of it, flat, that is. None: the
    part is empty, which happens where data-parallel ranks share the optimizer.

    A part is of one dimension; all of it, as without sharing, has the parameter's own shape.
    """
    for part in parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            if parameter in part.model_param_group_index_map:
                group, place = part.model_param_group_index_map[parameter]
                mine = part._get_model_param_range_map(parameter)["param"]
                return part.optimizer.param_groups[group]["params"][place], slice(mine.start, mine.end)
        else:
            return getattr(parameter, "main_param", parameter), slice(None)
    return None


def update(optimizer: MegatronOptimizer, wanted: Callable[[float], bool]) -> float:
    """Megatron's optimizer step, with a veto before anything changes: returns the gradient norm before clipping.

    wanted: asked with the norm once it has arrived, the step's only wait for the device; False leaves weights and
    optimizer as they are.
    """
    optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    if wanted(float(norm)):
        for each in parts(optimizer):
            if each.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(each.get_parameters(), each.config.clip_grad, norm)
        optimizer.step_with_ready_grads()
    return float(norm)
