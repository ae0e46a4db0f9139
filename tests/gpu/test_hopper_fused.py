"""The fused backward for Hopper GPUs on one: the same as the separate kernels make of the same operands."""

import pytest
import torch

from sagebwd.attention import QuantConfig, triton_backend
from sagebwd.kernels.hopper import backward as hopper
from sagebwd.kernels.hopper import fused
from sagebwd.kernels.quantise import Quantised, quantise, transpose
from tests.attention.helpers import inputs, rel_l2

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]
SHAPES = [(1, 1), (63, 63), (64, 64), (65, 65), (257, 257), (64, 130), (1, 70), (130, 64), (63, 200), (2000, 2000)]


def gradients(kernels, operands, like, **args):
    out = [torch.full_like(x, torch.nan) for x in like]
    kernels.backward(*operands, *out, **args)
    return out


def prepared(m, n, dim, group, causal, dtype):
    """What both take: operands, the tensors whose gradients are wanted, and the mask and scale."""
    q, k, v, do = inputs(m, n, dim, 2 * group, 2, batch=2, dtype=dtype, device="cuda")
    args = {"causal": causal, "softmax_scale": dim**-0.5}
    _, saved = triton_backend.forward(q, k, v, config=QuantConfig(), **args)
    _, o, lse2, q_rows, q_scale, _, k_rows, k_scale, *_ = saved
    q_hat = Quantised(q_rows, transpose(q_rows), q_scale, None)
    k_hat = Quantised(k_rows, transpose(k_rows), k_scale, None)
    do_hat, statistics = quantise(do, 64, rows=False, columns=True, lse2=lse2, other=o)
    return (q_hat, k_hat, do_hat, statistics, do, v), (q, k, v), args


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_agrees_with_the_separate_kernels(m, n, causal, dim, dtype):
    operands, like, args = prepared(m, n, dim, 1 + (m + n) % 2, causal, dtype)
    expected = gradients(hopper, operands, like, **args)
    for name, a, e in zip(("dq", "dk", "dv"), gradients(fused, operands, like, **args), expected, strict=True):
        assert rel_l2(a, e) < 2e-3, name


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_dk_and_dv_are_bitwise_the_same_again_and_dq_nearly(causal, dim):
    """Many programs at once: a stage that is handed back too early would show now and then."""
    operands, like, args = prepared(2000, 2000, dim, 8, causal, torch.bfloat16)
    dq, *first = gradients(fused, operands, like, **args)
    for _ in range(10):
        dq_again, *again = gradients(fused, operands, like, **args)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert rel_l2(dq_again, dq) < 1e-3
