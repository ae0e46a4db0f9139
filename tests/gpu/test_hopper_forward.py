"""Hopper's forward against the reference, and against the portable kernel, which multiplies the same integers."""

import pytest
import torch

from sagebwd.attention import QuantConfig, reference, triton_backend
from tests.attention import cases
from tests.attention.helpers import inputs, rel_l2

GPU = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
BLOCKS = [64, 128]
LENGTHS = [
    (1, 1), (1, 70), (63, 63), (65, 65), (127, 127), (128, 128), (129, 129), (64, 130), (130, 64), (333, 127),
    (127, 333), (1000, 1000), (2048, 2048), (4096, 4096),
]  # fmt: skip


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _hopper(), reason="needs a Hopper GPU (compute capability 9.0)")]


def by_backend(q, k, v, causal, config):
    o, saved = triton_backend.forward(q, k, v, causal=causal, softmax_scale=q.shape[-1] ** -0.5, config=config)
    return o, saved[2]  # lse2


def forward(q, k, v, causal, config):
    assert triton_backend.refused_by_hopper(q, config, window=None, packed=None) is None
    return by_backend(q, k, v, causal, config)


def portable(*args):
    with cases.portable():
        return by_backend(*args)


def agree(actual, expected, tolerance=1e-3):
    """Both multiply the same integers, but for values of P that exp2's last bits round elsewhere."""
    (o, lse2), (expected_o, expected_lse2) = actual, expected
    assert rel_l2(o, expected_o) < tolerance
    assert torch.equal(lse2.isinf(), expected_lse2.isinf())
    seen = ~lse2.isinf()
    torch.testing.assert_close(lse2[seen], expected_lse2[seen], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_k", BLOCKS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("m", "n"), LENGTHS)
def test_agrees_with_the_portable_kernel(m, n, causal, dim, block_k, dtype):
    q, k, v, _ = inputs(m, n, dim, 4, 2, batch=2, dtype=dtype, device=GPU)
    args = (q, k, v, causal, QuantConfig(block_k=block_k))
    agree(forward(*args), portable(*args))


@pytest.mark.parametrize("block_k", BLOCKS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (63, 65), (333, 127), (127, 333), (1000, 1000)])
def test_agrees_with_the_reference(m, n, causal, dim, block_k):
    q, k, v, _ = inputs(m, n, dim, 4, 2, dtype=torch.bfloat16, device=GPU)
    config = QuantConfig(block_k=block_k)
    o, saved = reference.forward(q, k, v, causal=causal, softmax_scale=dim**-0.5, config=config)
    actual, lse2 = forward(q, k, v, causal, config)
    assert rel_l2(actual, o) < cases.TIGHT
    torch.testing.assert_close(lse2.unflatten(0, (2, 2))[None, ..., :m], saved.lse2[..., :m], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112])
@pytest.mark.parametrize("block_q", [32, 64, 128])
def test_head_dims_and_query_blocks(dim, block_q):
    q, k, v, _ = inputs(300, 300, dim, 2, 1, dtype=torch.bfloat16, device=GPU)
    args = (q, k, v, True, QuantConfig(block_q=block_q))
    agree(forward(*args), portable(*args))


def test_more_items_than_programs_and_an_odd_number_of_tiles():
    """Each program has several items, and the middle tile of a head is a pair by itself."""
    q, k, v, _ = inputs(1100, 1100, 64, 50, 50, batch=2, dtype=torch.bfloat16, device=GPU)
    for causal in (True, False):
        args = (q, k, v, causal, QuantConfig())
        agree(forward(*args), portable(*args))


@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0])
def test_scores_of_any_size(size):
    q, k, v, _ = inputs(500, 500, 128, 2, 2, dtype=torch.bfloat16, device=GPU)
    args = (q * size, k * size, v, False, QuantConfig())
    agree(forward(*args), portable(*args), cases.TIGHT)


def test_rising_peaks_rescale_the_sums():
    """Later keys have ever higher scores, by far more than the slack that the sums allow."""
    q, k, v, _ = inputs(300, 1024, 64, 1, 1, dtype=torch.bfloat16, device=GPU)
    q = q.abs() + 0.5
    k = (k.abs() + 0.1) * torch.arange(1, 1025, device=GPU)[:, None].bfloat16() / 8
    for causal in (True, False):
        args = (q, k, v, causal, QuantConfig(smooth_k=False))
        agree(forward(*args), portable(*args), cases.TIGHT)


def test_strides_are_taken_as_they_are():
    """Megatron's [tokens, batch, heads, dim], as a slice of one projection; o has q's memory order."""
    fused = torch.randn(200, 2, 6, 64, dtype=torch.bfloat16, device=GPU)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (fused[:, :, :4], fused[:, :, 4:5], fused[:, :, 5:6]))
    o, lse2 = forward(q, k, v, True, QuantConfig())
    expected, expected_lse2 = forward(q.contiguous(), k.contiguous(), v.contiguous(), True, QuantConfig())
    assert torch.equal(o, expected)
    assert torch.equal(lse2, expected_lse2)


def test_two_runs_are_bitwise_equal():
    q, k, v, _ = inputs(1000, 1000, 128, 4, 2, dtype=torch.bfloat16, device=GPU)
    for causal in (True, False):
        first, second = (forward(q, k, v, causal, QuantConfig()) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("block_k", BLOCKS)
def test_poisoned_buffers_do_not_show(monkeypatch, block_k):
    q, k, v, _ = inputs(333, 257, 72, 2, 1, dtype=torch.bfloat16, device=GPU)
    args = (q, k, v, True, QuantConfig(block_k=block_k))
    clean = forward(*args)
    cases.poison(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(forward(*args), clean, strict=True))


def test_all_zero_tiles_and_queries_that_see_nothing():
    q, k, v, _ = inputs(300, 100, 64, 2, 1, dtype=torch.bfloat16, device=GPU)
    o, lse2 = forward(q, k, torch.zeros_like(v), True, QuantConfig(smooth_k=False))
    assert not o.any()
    assert lse2[:, :200].isinf().all()
    o, _ = forward(q, torch.zeros_like(k), v, True, QuantConfig(smooth_k=False))
    assert o.isfinite().all()
    assert not o[:, :, :200].any()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("causal", [True, False])
def test_nan_reaches_the_output(which, causal):
    tensors = list(inputs(300, 300, 64, 1, 1, dtype=torch.bfloat16, device=GPU)[:3])
    tensors[which][0, 0, 200, 5] = torch.nan
    o, _ = forward(*tensors, causal, QuantConfig())
    assert o[:, :, 192:].isnan().any()
