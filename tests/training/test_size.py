"""Model FLOPs a token, against a count of the products themselves."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sagebwd import gpus
from sagebwd.errors import UserError
from sagebwd.megatron.model import build_model
from sagebwd.training import world
from sagebwd.training.recipe import Recipe
from sagebwd.training.size import flops_per_token, matrix_parameters, parameter_counts
from tests.training.runs import on_cpu


@on_cpu
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flops_are_those_of_the_products(kv_heads: int) -> None:
    """PyTorch counts the matrix products that run; attention on a CPU it does not see."""
    recipe = Recipe(
        name="r",
        model={"layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": kv_heads},
        attention={"kind": "fpa"},
        data={"context": 32, "vocab_size": 256},
    )
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with world.join(tensor=1, seed=0):
        model = build_model(recipe, 256, torch.float32)
        with FlopCounterMode(display=False) as counter:
            model(tokens, torch.arange(32).expand(2, -1), None, labels=tokens).sum().backward()
    by_kind = {str(kind): flops for kind, flops in counter.get_flop_counts()["Global"].items()}
    matrices = by_kind.pop("aten.mm", 0) + by_kind.pop("aten.addmm", 0)
    m = recipe.model
    attention = 6 * m.layers * m.heads * m.dim * recipe.data.context
    assert matrices == 64 * (flops_per_token(recipe, 256) - attention)


def test_parameters_of_the_325m_model() -> None:
    model = {"layers": 20, "hidden": 1024, "heads": 16, "ffn": 3072}
    recipe = Recipe(name="r", model=model, data={"context": 4096})
    counts = parameter_counts(recipe, 50_257)
    assert counts["total"] == pytest.approx(324.1e6, rel=1e-3)
    assert matrix_parameters(recipe) < counts["non_embedding"] < 1.001 * matrix_parameters(recipe)
    assert flops_per_token(recipe, 50_257) == pytest.approx(2.45e9, rel=0.01)


def test_a_gpu_that_is_not_in_the_table_is_named() -> None:
    assert gpus.find("h200") == ("NVIDIA H200", gpus.SPECS["NVIDIA H200"])
    assert gpus.find("NVIDIA H200")[0] == "NVIDIA H200"
    assert gpus.spec("Some GPU") is None
    with pytest.raises(UserError, match="no figures for the GPU 'h300': choose from a100, h100"):
        gpus.find("h300")
