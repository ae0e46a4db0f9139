"""From a recipe's token budget and a number of ranks to steps, accumulation and parallel sizes; and what cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagebwd.attention.config import CONTEXT_CHUNK, NOT_WITH_CONTEXT, QuantConfig
from sagebwd.errors import UserError
from sagebwd.training import deepspeed_config
from sagebwd.training.recipe import Recipe
from sagebwd.training.size import padded_vocab_size


@dataclass(frozen=True)
class Plan:
    """What the budget comes to.

    steps: optimizer steps.
    sequences_per_step: the global batch, in sequences of `data.context` tokens.
    accumulation: micro-batches that each data-parallel rank adds up in a step.
    warmup_steps: steps over which the learning rate rises; 0 for none.
    tokens: steps * tokens_per_step, the budget without the part of a step that would be left over.
    """

    steps: int
    sequences_per_step: int
    accumulation: int
    warmup_steps: int
    tokens: int


def data_parallel_size(recipe: Recipe, world_size: int) -> int:
    """Ranks that see different samples, of `world_size`. Raises UserError: a layout that cannot be, with the remedy."""
    sizes = {key: getattr(recipe.parallel, key) for key in ("tensor", "context", "pipeline")}
    used = {f"parallel.{key}": size for key, size in sizes.items() if size > 1}
    together = math.prod(used.values())
    if world_size % together:
        said = " * ".join(used)
        raise UserError(
            f"{said} is {together}, but {world_size} rank(s) are no multiple of it: "
            f"start a multiple of {together} ranks (--nproc), or lower {' or '.join(used)}"
        )
    _check_tensor(recipe)
    _check_context(recipe)
    _check_sequence(recipe)
    _check_pipeline(recipe)
    return world_size // together


def layout(recipe: Recipe, world_size: int) -> str:
    """Of ranks that data_parallel_size accepts, in words: "tensor 2 x data 4", and what is shared besides."""
    parallel, data = recipe.parallel, data_parallel_size(recipe, world_size)
    sizes = [f"tensor {parallel.tensor}{' (and sequence)' if parallel.sequence else ''}"]
    sizes += [f"context {parallel.context}"] if parallel.context > 1 else []
    sizes += [f"pipeline {parallel.pipeline}"] if parallel.pipeline > 1 else []
    shared = " (sharing the optimizer)" if parallel.distributed_optimizer and data * parallel.context > 1 else ""
    if parallel.engine == "deepspeed":
        offloaded = ", optimizer on the CPU" if parallel.offload == "cpu" else ""
        shared = f" (DeepSpeed's ZeRO-{parallel.zero_stage}{offloaded})"
    return " x ".join([*sizes, f"data {data}{shared}"])


def _check_tensor(recipe: Recipe) -> None:
    """Every rank has whole heads, and as many rows of every matrix."""
    tensor, model = recipe.parallel.tensor, recipe.model
    for key, value in (("model.heads", model.heads), ("model.kv_heads", model.num_kv_heads), ("model.ffn", model.ffn)):
        if value % tensor:
            raise UserError(
                f"parallel.tensor is {tensor}, but {key} is {value}, no multiple of it: set parallel.tensor to "
                f"{_divisor_below(value, tensor)}, or {key} to {_nearest(value, tensor)}"
            )
    padded_vocab_size(recipe.data.vocab_size, tensor)


def _check_context(recipe: Recipe) -> None:
    """Context parallelism: every sequence is cut into chunks, two a rank, in which attention's numerics are the same as
    on one rank."""
    size, context, quant = recipe.parallel.context, recipe.data.context, recipe.attention.quant
    if size == 1:
        return
    back = "or parallel.context to 1"
    if recipe.data.pack:
        raise UserError(
            f"parallel.context is {size}, but data.pack is true, and documents cannot be packed in sequences that "
            f"several ranks share: set data.pack to false, {back}"
        )
    sagebwd = recipe.attention.kind == "sagebwd"
    unit = 2 * size * (CONTEXT_CHUNK if sagebwd else 1)
    if context % unit:
        whole = f" of a multiple of {CONTEXT_CHUNK} tokens, so that quantisation blocks stay whole" if sagebwd else ""
        raise UserError(
            f"parallel.context is {size}, but data.context {context} does not make {2 * size} chunks{whole}: set "
            f"data.context to {_nearest(context, unit)}, {back}"
        )
    for name, value in NOT_WITH_CONTEXT.items() if sagebwd else ():
        if getattr(quant, name) == value:
            said, default = (str(x).lower() for x in (value, getattr(QuantConfig, name)))
            raise UserError(
                f"parallel.context is {size}, but attention.quant.{name} is {said}, which does not go with it: set "
                f"attention.quant.{name} to {default}, {back}"
            )


def _check_sequence(recipe: Recipe) -> None:
    """Sequence parallelism: the tensor-parallel ranks have as many tokens each."""
    parallel, context = recipe.parallel, recipe.data.context
    if not parallel.sequence:
        return
    if parallel.tensor == 1:
        raise UserError(
            "parallel.sequence is true, but parallel.tensor is 1, and it is the tensor-parallel ranks that would share "
            "the tokens: raise parallel.tensor, or set parallel.sequence to false"
        )
    unit = parallel.tensor * parallel.context
    if context % unit:
        sizes = "parallel.tensor" + (" * parallel.context" if parallel.context > 1 else "")
        raise UserError(
            f"parallel.sequence is true, but data.context is {context}, no multiple of {sizes} {unit}: set "
            f"data.context to {_nearest(context, unit)}, or parallel.sequence to false"
        )


def _check_pipeline(recipe: Recipe) -> None:
    """Every stage has as many layers."""
    pipeline, layers = recipe.parallel.pipeline, recipe.model.layers
    if layers % pipeline:
        raise UserError(
            f"parallel.pipeline is {pipeline}, but model.layers is {layers}, no multiple of it: set parallel.pipeline "
            f"to {_divisor_below(layers, pipeline)}, or model.layers to {_nearest(layers, pipeline)}"
        )


def plan(recipe: Recipe, dp_size: int) -> Plan:
    """Steps and gradient accumulation on `dp_size` data-parallel ranks.

    Raises UserError: tokens_per_step is no multiple of micro_batch * context * dp_size (the nearest that are, named);
    a budget below one step; a warm-up as long as the run; what the engine cannot do.
    """
    deepspeed_config.check(recipe)
    train, context = recipe.train, recipe.data.context
    unit = train.micro_batch * context * dp_size
    if train.tokens_per_step % unit:
        raise UserError(
            f"train.tokens_per_step is {train.tokens_per_step}, no multiple of train.micro_batch * data.context * "
            f"data-parallel ranks = {train.micro_batch} * {context} * {dp_size} = {unit}: set it to "
            f"{_nearest(train.tokens_per_step, unit)}"
        )
    steps = train.total_tokens // train.tokens_per_step
    if steps == 0:
        raise UserError(
            f"train.total_tokens is {train.total_tokens}, less than one step of {train.tokens_per_step} tokens: "
            "raise it, or lower train.tokens_per_step"
        )
    warmup_steps = -(-recipe.optimizer.warmup_tokens // train.tokens_per_step)
    if warmup_steps >= steps:
        raise UserError(
            f"optimizer.warmup_tokens is {recipe.optimizer.warmup_tokens}, {warmup_steps} of {steps} steps, so the "
            f"learning rate would never fall: set it below {(steps - 1) * train.tokens_per_step + 1}"
        )
    return Plan(
        steps=steps,
        sequences_per_step=train.tokens_per_step // context,
        accumulation=train.tokens_per_step // unit,
        warmup_steps=warmup_steps,
        tokens=steps * train.tokens_per_step,
    )


def _divisor_below(value: int, limit: int) -> int:
    return max(size for size in range(1, limit) if not value % size)


def _nearest(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
