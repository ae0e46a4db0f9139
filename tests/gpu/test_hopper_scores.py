"""With products="scores" on a Hopper GPU: its own kernels against the reference and the portable kernels."""

import itertools

import pytest
import torch

from sagebwd.attention import QuantConfig, triton_backend
from sagebwd.kernels.hopper import backward_scores, forward_scores, scores, scores_rows
from tests.attention import cases
from tests.attention.helpers import NAMES, assert_close, inputs, rel_l2, run, truth

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]
GPU = "cuda"
SCORES = QuantConfig(products="scores")
DTYPES = [torch.bfloat16, torch.float16]
LENGTHS = [
    (1, 1), (1, 70), (63, 63), (64, 64), (65, 65), (127, 127), (128, 128), (129, 129), (200, 200), (64, 130),
    (130, 64), (1, 200), (200, 2), (333, 127), (127, 333), (1000, 128), (128, 1000), (1000, 1000),
]  # fmt: skip
# To the portable kernels, of the same integers: both round P to 16 bit, but relative to other peaks.
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1.5e-3}


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Calls that these kernels took, forward and backward; every test must make some."""
    calls = {}

    def count(module, name):
        run = getattr(module, name)

        def counted(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return run(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(forward_scores, "forward")
    count(backward_scores, "backward")
    yield calls
    assert calls


def forward(q, k, v, causal):
    """O and lse2."""
    o, saved = triton_backend.forward(q, k, v, causal=causal, softmax_scale=q.shape[-1] ** -0.5, config=SCORES)
    return o, saved[2]


def both(*tensors, causal, config=SCORES, **args):
    return cases.launched(*tensors, causal=causal, config=config, **args)


@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("n", [256, 320, 384])
def test_the_rows_of_each_warpgroup_where_one_or_two_key_tiles_are_masked(n, dim, taken):
    """Two query tiles, one program for both. A loop that does not turn must leave nothing undone: ptxas had put what
    the next one needs into it, for the second warpgroup, and rows 192 to 255 alone were wrong."""
    q, k, v, _ = inputs(256, n, dim, 2, 1, dtype=torch.bfloat16, device=GPU)
    o, lse2 = forward(q, k, v, True)
    assert taken == {"forward": 1}
    with cases.portable():
        expected, of_portable = forward(q, k, v, True)
    for rows in range(0, 256, 64):
        here = slice(rows, rows + 64)
        assert rel_l2(o[:, :, here], expected[:, :, here]) < LIMITS[torch.bfloat16], rows
        torch.testing.assert_close(lse2[:, here], of_portable[:, here], rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("m", "n"), LENGTHS)
def test_agrees_with_the_reference(m, n, causal, dim, dtype, taken):
    group = (1, 2, 4)[(m + n) % 3]
    tensors = inputs(m, n, dim, 2 * group, 2, batch=2, dtype=dtype, device=GPU)
    expected = cases.by_reference(*tensors, causal=causal, config=SCORES)
    assert_close(both(*tensors, causal=causal), expected, cases.TIGHT)
    assert taken == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("m", "n"), LENGTHS)
def test_agrees_with_the_portable_kernels(m, n, causal, dim, dtype):
    tensors = inputs(m, n, dim, 4, 2, batch=2, dtype=dtype, device=GPU)
    actual, (_, lse2) = both(*tensors, causal=causal), forward(*tensors[:3], causal)
    with cases.portable():
        assert_close(actual, both(*tensors, causal=causal), LIMITS[dtype])
        _, expected = forward(*tensors[:3], causal)
    assert torch.equal(lse2.isinf(), expected.isinf())  # those of padding too: the backward reads them
    seen = ~lse2.isinf()
    torch.testing.assert_close(lse2[seen], expected[seen], rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_many_tiles_and_items(causal, dim):
    """Each program of the forward has several items, of an odd number of tiles; dQ of a tile has many additions."""
    tensors = inputs(2100, 2100, dim, 24, 8, batch=2, dtype=torch.bfloat16, device=GPU)
    actual = both(*tensors, causal=causal)
    with cases.portable():
        assert_close(actual, both(*tensors, causal=causal), LIMITS[torch.bfloat16])


@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_long(causal, dim):
    tensors = inputs(4096, 4096, dim, 2, 1, batch=2, dtype=torch.bfloat16, device=GPU)
    expected = cases.by_reference(*tensors, causal=causal, config=SCORES)
    assert_close(both(*tensors, causal=causal), expected, cases.TIGHT)


@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("shift", [1.0, 16.0])
def test_error_against_float64_is_the_reference_s(dim, shift):
    """With keys far from zero as well: dQ takes the smoothed ones."""
    q, k, v, do = inputs(2048, 2048, dim, 2, 2, dtype=torch.bfloat16, device=GPU, key_shift=shift)
    expected = truth(q, k, v, do, True)
    kernel = both(q, k, v, do, causal=True)
    of_reference = cases.by_reference(q, k, v, do, causal=True, config=SCORES)
    for name, a, r, t in zip(NAMES, kernel, of_reference, expected, strict=True):
        assert rel_l2(a, t) < 1.1 * rel_l2(r, t), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_rising_peaks_rescale_the_sums(causal, dtype):
    """Towards the first keys, which come last, scores rise by far more than the slack that the sums allow.

    Nearly all of a row's weight is on one key, where dP - delta cancels: dQ and dK differ by twice as much as else.
    """
    q, k, v, do = inputs(300, 1024, 64, 1, 1, dtype=dtype, device=GPU)
    q = q.abs() + 0.5
    k = (k.abs() + 0.1) * torch.arange(1024, 0, -1, device=GPU)[:, None].to(dtype) / 8
    config = QuantConfig(products="scores", smooth_k=False)
    for keys in (k, k.flip(2)):
        actual = both(q, keys, v, do, causal=causal, config=config)
        with cases.portable():
            assert_close(actual, both(q, keys, v, do, causal=causal, config=config), 2 * LIMITS[dtype])


@pytest.mark.parametrize("dim", scores.DIMS)
def test_the_forward_s_runs_are_bitwise_equal_and_the_backward_s_nearly(dim):
    """Many programs at once: a stage or a slot that is handed back too early would show now and then."""
    tensors = inputs(2000, 2000, dim, 16, 8, batch=2, dtype=torch.bfloat16, device=GPU)
    for causal in (True, False):
        first = both(*tensors, causal=causal)
        for _ in range(10):
            o, dq, dk, dv = both(*tensors, causal=causal)
            assert torch.equal(o, first[0])
            # Its FP16 sums are added up in any order; a tile that was added twice or not at all would be a sixteenth
            # of a row's sums.
            apart = (dq.float() - first[1].float()).norm(dim=-1) / first[1].float().norm(dim=-1).clamp_min(1e-20)
            assert apart.max() < 3e-2
            assert rel_l2(dq, first[1]) < 4e-3
            assert torch.equal(dk, first[2])
            assert torch.equal(dv, first[3])


@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_each_row_of_dq_has_its_own_scale(causal, dim):
    """FP16 sums of gradients as small and as large as BF16 has them, and of one row far beyond the others."""
    q, k, v, do = inputs(1000, 1000, dim, 2, 1, dtype=torch.bfloat16, device=GPU)
    _, dq, *_ = both(q, k, v, do, causal=causal)
    for power in (-70, -20, 60):
        _, scaled, *_ = both(q, k, v, do * 2.0**power, causal=causal)
        assert rel_l2(scaled.float() * 2.0**-power, dq) < 4e-3, power
    large = do.clone()
    large[:, :, 700] *= 2.0**24
    _, scaled, *_ = both(q, k, v, large, causal=causal)
    scaled = scaled.float()
    assert rel_l2(scaled[:, :, 700] * 2.0**-24, dq[:, :, 700]) < 1e-2
    scaled[:, :, 700] = dq[:, :, 700]
    assert rel_l2(scaled, dq) < 4e-3


@pytest.mark.parametrize("dim", scores.DIMS)
def test_fp16_sums_against_fp32_sums(dim, monkeypatch):
    tensors = inputs(8192, 8192, dim, 2, 1, dtype=torch.bfloat16, device=GPU)
    for causal in (True, False):
        halves = both(*tensors, causal=causal)
        with monkeypatch.context() as patch:
            patch.setattr(scores_rows, "MOST_KEYS", 0)
            floats = both(*tensors, causal=causal)
        assert all(torch.equal(halves[i], floats[i]) for i in (0, 2, 3))
        assert 0 < rel_l2(halves[1], floats[1]) < 4e-3  # a bit of BF16 more or less here and there


@pytest.mark.parametrize("dim", scores.DIMS)
def test_more_keys_than_fp16_sums_take(dim):
    tensors = inputs(130, scores_rows.MOST_KEYS + 100, dim, 2, 1, dtype=torch.bfloat16, device=GPU)
    actual = both(*tensors, causal=True)
    with cases.portable():
        assert_close(actual, both(*tensors, causal=True), LIMITS[torch.bfloat16])


def test_with_deterministic_algorithms_the_portable_backward_runs(taken):
    tensors = inputs(1000, 1000, 64, 4, 2, dtype=torch.bfloat16, device=GPU)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (both(*tensors, causal=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert taken == {"forward": 2}


@pytest.mark.parametrize("dim", scores.DIMS)
def test_strides_are_taken_as_they_are(dim, taken):
    """Megatron's [tokens, batch, heads, dim], slices of one projection: read as they are, and written in that order."""
    fused = torch.randn(200, 2, 6 * dim, dtype=torch.bfloat16, device=GPU)
    q, k, v = (x.unflatten(2, (-1, dim)) for x in fused.split((4 * dim, dim, dim), 2))
    do = torch.randn(200, 2, 4, dim, dtype=torch.bfloat16, device=GPU)
    strided = run(q, k, v, do, causal=True, config=SCORES, layout="nbhd")
    plain = run(*(x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v, do)), causal=True, config=SCORES)
    assert taken == {"forward": 2, "backward": 2}
    for a, b in zip(strided, plain, strict=True):
        assert torch.equal(a.permute(1, 2, 0, 3), b)  # dQ has two additions to zero: in any order the same


@pytest.mark.parametrize("which", range(4))
def test_rows_that_tma_cannot_read_go_to_the_portable_kernels(which, taken):
    """K alone is read by Triton."""
    tensors = list(inputs(200, 200, 64, 2, 1, dtype=torch.float16, device=GPU))
    plain = run(*tensors, causal=True, config=SCORES)
    x = tensors[which]
    tensors[which] = torch.empty(*x.shape[:3], 65, dtype=x.dtype, device=GPU)[..., :64].copy_(x)
    assert_close(run(*tensors, causal=True, config=SCORES), plain, 1.5e-3)
    assert taken == {"forward": 1 + (which != 2), "backward": 1 + (which == 1)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(70, 300), (333, 127), (128, 128)])
def test_poisoned_buffers_do_not_show(monkeypatch, m, n, dtype):
    for dim, causal in itertools.product(scores.DIMS, (True, False)):
        tensors = inputs(m, n, dim, 2, 1, dtype=dtype, device=GPU)
        clean = both(*tensors, causal=causal)
        with monkeypatch.context() as patch:
            cases.poison(patch)
            poisoned = both(*tensors, causal=causal)
        assert torch.equal(clean[0], poisoned[0])
        assert_close(poisoned, clean, LIMITS[dtype])


@pytest.mark.parametrize("dim", scores.DIMS)
def test_heads_do_not_meet(dim):
    q, k, v, do = inputs(100, 100, dim, 4, 2, batch=2, dtype=torch.bfloat16, device=GPU)
    clean = both(q, k, v, do, causal=False)
    for broken in (q[:, :2], k[:, :1], v[:, :1], do[:, :2]):
        broken.fill_(torch.nan)
    for a, b in zip(both(q, k, v, do, causal=False), clean, strict=True):
        half = a.shape[1] // 2
        assert torch.equal(a[:, half:], b[:, half:])


def test_zeros_give_zeros_and_queries_that_see_nothing_too():
    q, k, v, do = inputs(300, 100, 64, 2, 1, dtype=torch.bfloat16, device=GPU)
    o, dq, *_ = both(q, k, v, do, causal=True)
    assert not o[:, :, :200].any()
    assert not dq[:, :, :200].any()
    o, dq, dk, dv = both(q, torch.zeros_like(k), torch.zeros_like(v), do, causal=True)
    assert not any(x.any() for x in (o, dq, dk))
    assert dv.isfinite().all()
    assert not any(x.any() for x in both(q, k, v, torch.zeros_like(do), causal=True)[1:])


@pytest.mark.parametrize("dim", scores.DIMS)
def test_extreme_values_stay_finite(dim):
    for size in (1e-6, 6e4):
        q, k, v, do = inputs(100, 200, dim, 1, 1, dtype=torch.float32, device=GPU)
        peak = max(x.abs().max() for x in (q, k, v)).item()
        q, k, v = ((x / peak * size).half() for x in (q, k, v))
        actual = both(q, k, v, do.half() / 1000, causal=True, softmax_scale=1e-9)
        assert all(a.isfinite().all() for a in actual)


@pytest.mark.parametrize("which", range(4))
def test_nan_reaches_the_output(which):
    tensors = list(inputs(300, 300, 64, 1, 1, dtype=torch.bfloat16, device=GPU))
    tensors[which][0, 0, 200, 5] = torch.nan
    o, *grads = both(*tensors, causal=False)
    assert any(grad.isnan().any() for grad in grads)
    assert o[:, :, 192:].isnan().any() == (which < 3)


def test_each_block_of_keys_has_its_own_scale():
    """Values in one block of keys at a time, whose keys are larger than the others'."""
    for block in range(5):
        q, k, v, do = inputs(320, 320, 128, 1, 1, dtype=torch.float16, device=GPU)
        here = slice(64 * block, 64 * block + 64)
        values = torch.zeros_like(v)
        values[:, :, here] = v[:, :, here]
        k[:, :, here] *= 4
        actual = both(q, k, values, do, causal=False, softmax_scale=0.05)
        with cases.portable():
            expected = both(q, k, values, do, causal=False, softmax_scale=0.05)
        assert_close(actual, expected, LIMITS[torch.float16])
