"""What the tests start as processes of their own: every arm of every layout in turn through the training program, then
attention alone.

Arguments: a folder of recipes (LAYOUT/ARM.json), the prepared data, the folder for the runs (LAYOUT/ARM); and a file
for the speed of an all-reduce, if that is wanted.
"""

import itertools
import json
import logging
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from sagebwd.megatron.model import build_model
from sagebwd.tokenizer import Prepared, load_prepared
from sagebwd.training import train, world
from sagebwd.training.engine import megatron
from sagebwd.training.recipe import Parallel, Recipe
from tests.distributed.layouts import ALONE, FPA

TOKENS, BATCH = 100, 2


def main(recipes: Path, prepared: Path, runs: Path, link: Path | None = None) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    data = load_prepared(prepared)
    # once for all: torchrun's store serves no second time
    with world.process_group(world.own_device(), timedelta(minutes=10)):
        for path in sorted(recipes.glob("*/*.json")):
            recipe = Recipe.model_validate_json(path.read_text())
            folder = runs / path.parent.name / path.stem
            train.run(recipe, path.stem, folder, data)
            if path.parent.name in (ALONE, "tp2"):
                attention_alone(recipe, folder / "attention.pt")
            if path.parent.name == "pp2" and path.stem == FPA and not torch.cuda.is_available():
                sick(recipe, runs / "sick", data)
        if link:
            all_reduce_speed(link)


def all_reduce_speed(file: Path, numbers: int = 2**28, rounds: int = 10) -> None:
    """Of FP32 gradients over all ranks: bytes a second by a ring's count, 2 (n - 1) / n bytes a byte."""
    device, ranks = world.own_device(), distributed.get_world_size()
    gradients = torch.ones(numbers, device=device)
    for number in range(rounds + 2):
        if number == 2:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        distributed.all_reduce(gradients)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / rounds
    if distributed.get_rank() == 0:
        bandwidth = 2 * (ranks - 1) / ranks * 4 * numbers / seconds
        file.write_text(json.dumps({"bytes": 4 * numbers, "seconds": seconds, "bandwidth": bandwidth}))


def attention_alone(recipe: Recipe, file: Path) -> None:
    """The first layer's core attention on given q, k and v, each TP rank with its heads; all heads into `file`."""
    with world.join(recipe.parallel.tensor, recipe.seed) as here:
        parallel, model = Parallel(tensor=recipe.parallel.tensor), recipe.model.model_copy(update={"layers": 1})
        alone = recipe.model_copy(update={"parallel": parallel, "model": model})
        dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
        core = build_model(alone, 512, dtype).decoder.layers[0].self_attention.core_attention
        generator = torch.Generator().manual_seed(5)

        def mine(heads: int) -> Tensor:
            full = torch.randn(TOKENS, BATCH, heads, recipe.model.dim, generator=generator) * 3
            part = full.chunk(here.tensor_size, 2)[here.tensor_rank]
            return part.to(here.device, dtype, copy=True).requires_grad_()

        q, k, v, do = (
            mine(heads) for heads in (recipe.model.heads, *[recipe.model.num_kv_heads] * 2, recipe.model.heads)
        )
        out = core(q, k, v, None).view_as(q)
        out.backward(do.detach())
        parts = [tensor.cpu() for tensor in (out.detach(), q.grad, k.grad, v.grad)]
        ranks: list = [None] * here.size
        distributed.all_gather_object(ranks, parts)
        if here.first:
            of_each_tensor_rank = zip(*ranks[: here.tensor_size], strict=True)
            torch.save([torch.cat(pieces, 2) for pieces in of_each_tensor_rank], file)


def sick(recipe: Recipe, folder: Path, data: Prepared) -> None:
    """A run whose second layer gives NaN in the second micro-batch of every training step."""
    build, calls = megatron.build_model, itertools.count()

    def built(*arguments: Any) -> torch.nn.Module:
        model = build(*arguments)
        if model.first_layer:
            model.decoder.layers[0].mlp.linear_fc2.register_forward_hook(sicken)
        return model

    def sicken(module: torch.nn.Module, inputs: tuple, output: tuple) -> tuple | None:
        if torch.is_grad_enabled() and next(calls) % 4 == 1:  # micro-batches of a step
            return output[0] * math.nan, output[1]
        return None

    megatron.build_model = built
    try:
        health = recipe.health.model_copy(update={"bad_steps": 2})
        assert train.run(recipe.model_copy(update={"health": health}), "sick", folder, data) == "diverged"
    finally:
        megatron.build_model = build


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
