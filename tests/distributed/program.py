"""What the tests start as processes of their own: every arm of every layout in turn through the training program, then
attention alone.

Arguments: a folder of recipes (LAYOUT/ARM.json), the prepared data, the folder for the runs (LAYOUT/ARM).
"""

import logging
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed

from sagebwd.megatron.model import build_model
from sagebwd.tokenizer import load_prepared
from sagebwd.training import train, world
from sagebwd.training.recipe import Parallel, Recipe

TOKENS, BATCH = 100, 2


def main(recipes: Path, prepared: Path, runs: Path) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")  # once for all: torchrun's store serves no second time
    data = load_prepared(prepared)
    for path in sorted(recipes.glob("*/*.json")):
        recipe = Recipe.model_validate_json(path.read_text())
        folder = runs / path.parent.name / path.stem
        train.run(recipe, path.stem, folder, data)
        attention_alone(recipe, folder / "attention.pt")
    if distributed.is_initialized():
        distributed.destroy_process_group()


def attention_alone(recipe: Recipe, file: Path) -> None:
    """The first layer's core attention on given q, k and v, each TP rank with its heads; all heads into `file`."""
    with world.join(recipe.parallel.tensor, recipe.seed) as here:
        alone = recipe.model_copy(update={"parallel": Parallel(tensor=recipe.parallel.tensor)})
        core = build_model(alone, recipe.data.vocab_size, torch.float32).decoder.layers[0].self_attention.core_attention
        generator = torch.Generator().manual_seed(5)

        def mine(heads: int) -> Tensor:
            full = torch.randn(TOKENS, BATCH, heads, recipe.model.dim, generator=generator) * 3
            return full.chunk(here.tensor_size, 2)[here.tensor_rank].clone().requires_grad_()

        q, k, v, do = (
            mine(heads) for heads in (recipe.model.heads, *[recipe.model.num_kv_heads] * 2, recipe.model.heads)
        )
        out = core(q, k, v, None).view_as(q)
        out.backward(do.detach())
        parts = [out.detach(), q.grad, k.grad, v.grad]
        ranks: list = [None] * here.size
        distributed.all_gather_object(ranks, parts)
        if here.first:
            of_each_tensor_rank = zip(*ranks[: here.tensor_size], strict=True)
            torch.save([torch.cat(pieces, 2) for pieces in of_each_tensor_rank], file)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
