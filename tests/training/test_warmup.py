"""Kernels compiled before the first step: the same run, bitwise."""

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from sagebwd.training import engine, warmup, world
from sagebwd.training.budget import Plan
from sagebwd.training.engine import losses
from sagebwd.training.engine.megatron import MegatronEngine
from sagebwd.training.recipe import Data
from tests.training.runs import on_cpu, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = on_cpu


def test_it_leaves_no_trace(small_data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(small_data, "sagebwd", steps=2, tokens_per_step=128, micro_batch=4)
    plan = Plan(steps=2, sequences_per_step=4, accumulation=1, warmup_steps=0, tokens=256)
    original = losses.sums
    with world.join(tensor=1, seed=0) as here:
        megatron = engine.build(recipe, 512, torch.float32, here, plan)
        assert isinstance(megatron, MegatronEngine)
        megatron.begin(plan)
        tokens = torch.randint(0, 512, (4, 32))
        batch = {"tokens": tokens, "labels": tokens, "position_ids": torch.arange(32).expand(4, -1)}
        batch["loss_mask"] = torch.ones(4, 32)
        seen = []

        def sums(mask: torch.Tensor, of_each: torch.Tensor) -> tuple:
            torch.rand(3)  # what draws a random number there draws it in the first step too
            seen.append(float(of_each.sum()))
            return original(mask, of_each)

        monkeypatch.setattr(losses, "sums", sums)

        def state() -> list[torch.Tensor]:
            return [
                torch.get_rng_state(),
                *(state.clone() for state in get_cuda_rng_tracker().get_states().values()),
                *(parameter.detach().clone() for parameter in megatron.megatron.parameters()),
                *(parameter.main_grad.clone() for parameter in megatron.megatron.parameters()),
            ]

        before = state()
        assert warmup.compile_kernels(megatron, batch) > 0
        assert len(seen) == 1
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(state(), before, strict=True))

        megatron.gradients(iter([batch]))  # the backward that it ran reached every parameter
        assert all(parameter.main_grad.any() for parameter in megatron.megatron.parameters())
