from types import SimpleNamespace

import pytest
import torch

from sagebwd.megatron.norm import RMSNorm


def config(**change: object) -> SimpleNamespace:
    settings = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    return SimpleNamespace(**settings | {"params_dtype": torch.float32} | change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_fp32(dtype: torch.dtype) -> None:
    norm = RMSNorm(config=config(params_dtype=dtype), hidden_size=4096, eps=1e-6)
    x = (torch.randn(3, 4096) * 30 + 100).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    tolerance = torch.finfo(dtype).eps  # one rounding of the result, and none of the mean square
    torch.testing.assert_close(norm(x).double(), exact, rtol=tolerance, atol=0)


def test_the_weight_is_marked_for_sequence_parallelism() -> None:
    assert RMSNorm(config=config(sequence_parallel=True), hidden_size=8, eps=1e-6).weight.sequence_parallel
    assert not RMSNorm(config=config(), hidden_size=8, eps=1e-6).weight.sequence_parallel


def test_it_stands_for_no_other_norm() -> None:
    with pytest.raises(ValueError, match="LayerNorm"):
        RMSNorm(config=config(normalization="LayerNorm"), hidden_size=8, eps=1e-6)
