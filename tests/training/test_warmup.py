"""Kernels compiled before the first step: the same run, bitwise."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from sagebwd.megatron.model import build_model
from sagebwd.training import warmup, world
from sagebwd.training.recipe import Data
from tests.training.runs import on_cpu, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = on_cpu


def test_it_leaves_no_trace(small_data: Data) -> None:
    recipe = tiny_recipe(small_data, "sagebwd", steps=2, tokens_per_step=128, micro_batch=4)
    with world.join(tensor=1, seed=0) as here:
        model = build_model(recipe, 512, torch.float32).to(here.device)
        model = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        tokens = torch.randint(0, 512, (4, 32))
        seen = []

        def loss() -> torch.Tensor:
            torch.rand(3)  # what draws a random number there draws it in the first step too
            total = model(tokens, torch.arange(32).expand(4, -1), None, labels=tokens).sum()
            seen.append(float(total))
            return total

        def state() -> list[torch.Tensor]:
            return [
                torch.get_rng_state(),
                *(state.clone() for state in get_cuda_rng_tracker().get_states().values()),
                *(parameter.detach().clone() for parameter in model.parameters()),
                *(parameter.main_grad.clone() for parameter in model.parameters()),
            ]

        before = state()
        assert warmup.compile_kernels(model, loss) > 0
        assert len(seen) == 1
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(state(), before, strict=True))

        loss().backward()  # the backward that it ran reached every parameter
        assert all(parameter.main_grad.any() for parameter in model.parameters())
