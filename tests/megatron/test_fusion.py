"""Fused element-wise operations give what the separate ones give, and keep less for the backward.

The partitioner's backend traces, decomposes and splits the graphs as Inductor does, and runs them without generating
code: quick enough for a CPU. Megatron's own SwiGLU runs eagerly here. The generated kernels are tested on a GPU.
"""

from collections.abc import Iterator

import pytest
import torch

from sagebwd.megatron import fusion
from sagebwd.megatron.documents import packed_documents
from sagebwd.megatron.model import PaddedVocabGPT, build_model
from sagebwd.training.recipe import Attention, Data, Model, Recipe
from sagebwd.training.world import World
from tests.training.runs import on_cpu

pytestmark = on_cpu
VOCAB, CONTEXT = 200, 24


@pytest.fixture(autouse=True)
def _quick_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from megatron.core.fusions import fused_bias_swiglu as swiglu

    monkeypatch.setattr(fusion, "BACKEND", "aot_eager_decomp_partition")
    for name in ("swiglu", "swiglu_back"):
        monkeypatch.setattr(swiglu, name, getattr(swiglu, name)._torchdynamo_orig_callable)
    fusion.compiled.cache_clear()
    yield
    fusion.compiled.cache_clear()
    torch.compiler.reset()


def build(fused: str, dtype: torch.dtype = torch.float32) -> PaddedVocabGPT:
    recipe = Recipe(
        name="test",
        model=Model(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2),
        attention=Attention(kind="fpa"),
        data=Data(context=CONTEXT, vocab_size=VOCAB),
        train={"fusion": fused},
    )
    torch.manual_seed(0)
    return build_model(recipe, VOCAB, dtype)


def losses_and_gradients(
    model: PaddedVocabGPT, *, packed: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, VOCAB, (2, 2, CONTEXT))
    positions, documents = torch.arange(CONTEXT).expand(2, -1), None
    if packed:
        positions = positions % 10
        documents = packed_documents(positions, torch.device("cpu"))
        tokens, labels, positions = (x.reshape(1, -1) for x in (tokens, labels, positions))
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=documents)
    losses.sum().backward()
    return losses.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_computes_the_same(alone: World, packed: bool) -> None:
    plain, fused = (losses_and_gradients(build(fused), packed=packed) for fused in ("off", "on"))
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-5, atol=1e-6)
    assert fused[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        torch.testing.assert_close(fused[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_model_is_the_fused_one(alone: World) -> None:
    norms = [type(m).__name__ for m in build("on").modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms == ["FusedRMSNorm"] * (2 * 4 + 1)
    assert build("on").config.bias_activation_fusion
    assert not build("off").config.bias_activation_fusion
    assert not build("auto").fused


def test_rope_is_megatrons_again_after_the_forward(alone: World) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    before = rope_utils._apply_rotary_pos_emb_bshd
    losses_and_gradients(build("on"))
    assert rope_utils._apply_rotary_pos_emb_bshd is before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_and_its_gradient(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 3, 50, dtype=torch.float64)
    labels = torch.randint(0, 40, (7, 3))
    logits[..., 40:] = -torch.inf  # as the padding of a vocabulary is
    mine = logits.to(dtype).requires_grad_()
    true = mine.detach().double().requires_grad_()
    weights = torch.rand(7, 3)
    found = fusion.fused_cross_entropy(mine, labels)
    exact = torch.nn.functional.cross_entropy(true.flatten(0, 1), labels.flatten(), reduction="none").view(7, 3)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    (found * weights).sum().backward()
    (exact * weights).sum().backward()
    assert mine.grad.dtype is dtype
    assert (mine.grad[..., 40:] == 0).all()
    tolerance = 1e-6 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(mine.grad.double(), true.grad, rtol=tolerance, atol=1e-7)


def test_cross_entropy_keeps_no_second_copy_of_the_logits() -> None:
    logits = torch.randn(64, 2, 512, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fusion.fused_cross_entropy(logits, torch.zeros(64, 2, dtype=torch.long))
    assert logits.untyped_storage().data_ptr() in kept
    assert sum(kept.values()) < 1.1 * logits.untyped_storage().nbytes()
