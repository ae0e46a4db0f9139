"""The kernels that Inductor makes of the fused operations, in bf16, against the separate ones."""

import pytest
import torch

from sagebwd.megatron.model import build_model
from sagebwd.training import world
from sagebwd.training.recipe import Attention, Data, Model, Recipe

pytestmark = pytest.mark.gpu
VOCAB, CONTEXT = 1000, 256


def losses_and_gradients(fusion: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    recipe = Recipe(
        name="test",
        model=Model(layers=2, hidden=256, ffn=512, heads=4),
        attention=Attention(kind="fpa"),
        data=Data(context=CONTEXT, vocab_size=VOCAB),
        train={"fusion": fusion},
    )
    torch.manual_seed(0)
    model = build_model(recipe, VOCAB, torch.bfloat16).cuda()
    tokens, labels = torch.randint(0, VOCAB, (2, 4, CONTEXT), device="cuda")
    positions = torch.arange(CONTEXT, device="cuda").expand(4, -1)
    losses = model(tokens, positions, None, labels=labels)
    losses.sum().backward()
    return losses.detach(), {name: weight.grad.double() for name, weight in model.named_parameters()}


def test_fused_is_as_good_as_separate() -> None:
    with world.join(tensor=1, seed=0):
        (plain, of_plain), (fused, of_fused) = losses_and_gradients("off"), losses_and_gradients("on")
    torch.testing.assert_close(fused, plain, rtol=0, atol=0.02)
    for name, gradient in of_plain.items():
        assert (of_fused[name] - gradient).norm() < 0.03 * gradient.norm(), name
