"""The backward for Hopper GPUs on one: as near to the reference as the portable kernels, and it is what ran."""

import pytest
import torch

from sagebwd.attention import QuantConfig
from sagebwd.kernels.hopper import backward as hopper
from tests.attention import cases
from tests.attention.helpers import NAMES, assert_close, inputs, rel_l2, run, truth

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]
GPU = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (63, 63), (64, 64), (65, 65), (127, 127), (257, 257), (64, 130), (1, 70), (130, 64), (63, 200)]


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Calls that these kernels took; every test but those of the fallback must make some."""
    calls, backward = [], hopper.backward
    monkeypatch.setattr(hopper, "backward", lambda *args, **kwargs: (calls.append(1), backward(*args, **kwargs)))
    yield calls
    assert calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", hopper.DIMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("delta", ["stale", "matched"])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_agrees_with_reference(m, n, delta, causal, dim, dtype):
    group = (1, 2, 4)[(m + n) % 3]
    cases.agrees_with_reference(m, n, dim, group, causal, QuantConfig(delta=delta), GPU, dtype, batch=2)


@pytest.mark.parametrize("dim", hopper.DIMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1000, 4096])
def test_long(length, causal, dim):
    cases.agrees_with_reference(length, length, dim, 2, causal, QuantConfig(), GPU, torch.bfloat16, batch=2)


@pytest.mark.parametrize("dim", hopper.DIMS)
def test_error_against_float64_is_quantisation_s_alone(dim):
    q, k, v, do = inputs(2048, 2048, dim, 2, 2, dtype=torch.bfloat16, device=GPU)
    expected = truth(q, k, v, do, True)
    kernel = run(q, k, v, do, causal=True, config=QuantConfig())
    reference = cases.by_reference(q, k, v, do, causal=True, config=QuantConfig())
    for name, a, r, t in zip(NAMES, kernel, reference, expected, strict=True):
        assert rel_l2(a, t) < 1.1 * rel_l2(r, t), name


@pytest.mark.parametrize("dim", hopper.DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_the_portable_kernels(causal, dim):
    tensors = inputs(700, 900, dim, 4, 2, dtype=torch.float16, device=GPU)
    actual = cases.launched(*tensors, causal=causal, config=QuantConfig())
    with cases.portable():
        assert_close(actual, cases.launched(*tensors, causal=causal, config=QuantConfig()), 2e-3)


@pytest.mark.parametrize("dim", hopper.DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_runs_are_bitwise_equal(causal, dim):
    """Many programs at once: a stage that is handed back too early would show now and then."""
    tensors = inputs(2000, 2000, dim, 16, 8, batch=2, dtype=torch.bfloat16, device=GPU)
    first = cases.launched(*tensors, causal=causal, config=QuantConfig())
    for _ in range(10):
        again = cases.launched(*tensors, causal=causal, config=QuantConfig())
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dim", hopper.DIMS)
def test_poisoned_buffers_do_not_show(monkeypatch, dim):
    tensors = inputs(70, 300, dim, 2, 1, dtype=torch.float16, device=GPU)
    clean = cases.launched(*tensors, causal=True, config=QuantConfig())
    cases.poison(monkeypatch)
    poisoned = cases.launched(*tensors, causal=True, config=QuantConfig())
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@pytest.mark.parametrize("dim", hopper.DIMS)
def test_heads_do_not_meet(dim):
    q, k, v, do = inputs(100, 100, dim, 4, 2, batch=2, dtype=torch.bfloat16, device=GPU)
    clean = run(q, k, v, do, causal=False, config=QuantConfig())
    for broken in (q[:, :2], k[:, :1], v[:, :1], do[:, :2]):
        broken.fill_(torch.nan)
    for a, b in zip(run(q, k, v, do, causal=False, config=QuantConfig()), clean, strict=True):
        half = a.shape[1] // 2
        assert torch.equal(a[:, half:], b[:, half:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_are_taken_as_they_are(dtype):
    cases.strided_views_are_taken_as_they_are(GPU, dtype)


def test_all_zero_tiles_give_zeros():
    cases.all_zero_tiles_give_zeros(GPU, "causal")


def test_extreme_values_stay_finite():
    for size in (1e-6, 6e4):
        q, k, v, do = inputs(100, 100, 128, 1, 1, dtype=torch.float32, device=GPU)
        peak = max(x.abs().max() for x in (q, k, v)).item()
        q, k, v = ((x / peak * size).half() for x in (q, k, v))
        actual = cases.launched(q, k, v, do.half() / 100, causal=True, config=QuantConfig(), softmax_scale=1e-9)
        assert all(a.isfinite().all() for a in actual)


def test_a_query_that_sees_no_key_gets_zeros():
    cases.a_query_that_sees_no_key_gets_zeros(GPU)


def test_rows_that_tma_cannot_read_go_to_the_portable_kernels(taken):
    q, k, v, do = inputs(200, 200, 64, 2, 1, dtype=torch.float16, device=GPU)
    odd = torch.empty(1, 2, 200, 65, dtype=torch.float16, device=GPU)[..., :64].copy_(do)
    plain = run(q, k, v, do, causal=True, config=QuantConfig())
    assert len(taken) == 1
    assert_close(run(q, k, v, odd, causal=True, config=QuantConfig()), plain, 2e-3)
    assert len(taken) == 1
