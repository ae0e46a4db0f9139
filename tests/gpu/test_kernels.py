"""The Triton kernels on a GPU: the interpreter's cases, and bf16, long sequences and every head dim."""

import pytest
import torch

from sagebwd.attention import QuantConfig
from tests.attention import cases
from tests.attention.helpers import NAMES, inputs, rel_l2, run, truth

pytestmark = pytest.mark.gpu
GPU = "cuda"
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "group", "causal", "config"), cases.pairs())
def test_agrees_with_reference(m, n, group, causal, config, dtype):
    cases.agrees_with_reference(m, n, 64, group, causal, cases.CONFIGS[config], GPU, dtype)


@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("config", cases.CONFIGS)
def test_head_dims(dim, config):
    cases.agrees_with_reference(200, 200, dim, 2, True, cases.CONFIGS[config], GPU, torch.bfloat16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("length", [1024, 1000, 4096])
@pytest.mark.parametrize("granularity", ["row", "tile"])
def test_long(length, dim, causal, granularity):
    config = QuantConfig(granularity=granularity)
    cases.agrees_with_reference(length, length, dim, 2, causal, config, GPU, torch.bfloat16, batch=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_error_against_float64_is_quantisation_s_alone(dim, dtype):
    """As far from FP64 as the reference in FP32 is, to a tenth."""
    q, k, v, do = inputs(2048, 2048, dim, 2, 2, dtype=dtype, device=GPU)
    expected = truth(q, k, v, do, True)
    kernel = run(q, k, v, do, causal=True, config=QuantConfig())
    reference = cases.by_reference(q, k, v, do, causal=True, config=QuantConfig())
    for name, a, r, t in zip(NAMES, kernel, reference, expected, strict=True):
        assert rel_l2(a, t) < 1.1 * rel_l2(r, t), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_are_taken_as_they_are(dtype):
    cases.strided_views_are_taken_as_they_are(GPU, dtype)


def test_poisoned_buffers_do_not_show(monkeypatch):
    cases.poisoned_buffers_do_not_show(GPU, monkeypatch)


def test_all_zero_tiles_give_zeros():
    cases.all_zero_tiles_give_zeros(GPU)


def test_extreme_values_stay_finite():
    cases.extreme_values_stay_finite(GPU)


def test_a_query_that_sees_no_key_gets_zeros():
    cases.a_query_that_sees_no_key_gets_zeros(GPU)


def test_nan_reaches_the_output():
    cases.nan_reaches_the_output(GPU)


def test_two_runs_are_bitwise_equal():
    cases.two_runs_are_bitwise_equal(GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_do_not_meet(dtype):
    cases.heads_do_not_meet(GPU, dtype)


def test_inputs_are_left_alone():
    cases.inputs_are_left_alone(GPU)


def test_float32_is_refused():
    q = torch.randn(1, 1, 8, 64, device=GPU)
    with pytest.raises(ValueError, match="float32 is not supported on a GPU"):
        run(q, q, q, q, causal=True, config=QuantConfig())
