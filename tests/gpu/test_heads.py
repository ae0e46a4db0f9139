"""A head's attention does not depend on how many heads there are: tensor parallelism changes none of its bits."""

import pytest
import torch

from sagebwd.attention import QuantConfig, sage_attention
from tests.attention.helpers import inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (16, 4), (8, 2)])
@pytest.mark.parametrize(("tokens", "dim"), [(1024, 64), (300, 128)])
@pytest.mark.parametrize("hopper", ["0", "1"])
def test_half_of_the_heads_compute_what_they_do_among_all(
    monkeypatch: pytest.MonkeyPatch, hopper: str, tokens: int, dim: int, heads: int, kv_heads: int, smooth_q: bool
) -> None:
    """Of a micro-batch as Megatron lays it out, forward and backward, bitwise."""
    monkeypatch.setenv("SAGEBWD_HOPPER", hopper)
    given = inputs(tokens, tokens, dim, heads, kv_heads, batch=2, dtype=torch.bfloat16, device="cuda")
    given = [x.permute(2, 0, 1, 3).contiguous() for x in given]  # q, k, v and dO: [tokens, batch, heads, dim]

    def attend(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in parts[:3])
        out = sage_attention(q, k, v, causal=True, config=QuantConfig(smooth_q=smooth_q), layout="nbhd")
        out.backward(parts[3])
        return [out.detach(), q.grad, k.grad, v.grad]

    whole = attend(given)
    halves = [attend([x.chunk(2, 2)[rank].contiguous() for x in given]) for rank in (0, 1)]
    for name, of_all, first, second in zip(("output", "dq", "dk", "dv"), whole, *halves, strict=True):
        assert torch.equal(of_all, torch.cat((first, second), 2)), name
