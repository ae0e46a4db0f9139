"""The Triton kernels on a GPU: the interpreter's cases, and bf16, long sequences and every head dim."""

import pytest
import torch

from sagebwd.attention import QuantConfig
from sagebwd.kernels.hopper import scores
from tests.attention import cases
from tests.attention.helpers import NAMES, inputs, rel_l2, run, truth

pytestmark = pytest.mark.gpu
GPU = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
EVERY_CONFIG = {**cases.CONFIGS, **cases.PROJECTED}
PACKED = [(c, *mask, 64) for c in EVERY_CONFIG for mask in ((True, None), (True, cases.WINDOW), (False, None))]
PACKED += [("row", True, cases.WINDOW, dim) for dim in (40, 128, 256)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "group", "causal", "config"), cases.pairs())
def test_agrees_with_reference(m, n, group, causal, config, dtype):
    cases.agrees_with_reference(m, n, 64, group, causal, cases.CONFIGS[config], GPU, dtype)


@pytest.mark.parametrize(("m", "n", "window", "group", "config"), cases.windows())
def test_agrees_with_reference_in_a_window(m, n, window, group, config):
    cases.agrees_with_reference_in_a_window(m, n, window, group, cases.CONFIGS[config], GPU)


def test_a_window_as_wide_as_the_keys_is_the_causal_mask():
    cases.a_window_as_wide_as_the_keys_is_the_causal_mask(GPU)


def test_keys_left_of_the_window_are_not_read():
    cases.keys_left_of_the_window_are_not_read(GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("config", "causal", "window", "dim"), PACKED)
def test_packed_equals_the_documents_one_by_one(config, causal, window, dim, dtype):
    documents = cases.LONG_DOCUMENTS
    cases.packed_equals_the_documents_one_by_one(documents, EVERY_CONFIG[config], causal, window, GPU, dtype, dim)


def test_documents_do_not_meet():
    cases.documents_do_not_meet(GPU)


def test_cu_seqlens_that_lie_touch_no_other_memory():
    cases.cu_seqlens_that_lie_touch_no_other_memory(GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_the_reference_s(dtype):
    cases.integers_are_the_reference_s(GPU, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("smooth", [True, False])
def test_q_and_k_are_quantised_as_one_by_one(dim, smooth, dtype):
    cases.q_and_k_are_quantised_as_one_by_one(GPU, dim, smooth, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_key_mean_is_the_mean(dtype):
    cases.key_mean_is_the_mean(GPU, dtype)


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("config", cases.PROJECTED)
def test_projection_agrees_with_reference(config, causal, dim):
    cases.agrees_with_reference(200, 300, dim, 2, causal, cases.PROJECTED[config], GPU, torch.bfloat16)


@pytest.mark.parametrize(
    "args", [{"window": 300, "config": QuantConfig(smooth_q=True)}, {"config": QuantConfig()}], ids=["window", "whole"]
)
def test_offsets_past_32_bits(args):
    """On a Hopper GPU the second goes to its own kernels."""
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 80:
        pytest.skip(f"needs 80 GiB of GPU memory, and {free} are free")
    cases.offsets_past_32_bits(GPU, heads=130, length=131072, causal=True, **args)


def test_many_heads():
    cases.many_heads(GPU, torch.bfloat16, batch=35000)


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


@pytest.mark.parametrize("mask", cases.MASKS)
def test_poisoned_buffers_do_not_show(monkeypatch, mask):
    cases.poisoned_buffers_do_not_show(GPU, monkeypatch, mask)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_all_zero_tiles_give_zeros(mask):
    cases.all_zero_tiles_give_zeros(GPU, mask)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_extreme_values_stay_finite(mask):
    cases.extreme_values_stay_finite(GPU, mask)


def test_a_query_that_sees_no_key_gets_zeros():
    cases.a_query_that_sees_no_key_gets_zeros(GPU)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_nan_reaches_the_output(mask):
    cases.nan_reaches_the_output(GPU, mask)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_two_runs_are_bitwise_equal(mask):
    cases.two_runs_are_bitwise_equal(GPU, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_do_not_meet(dtype):
    cases.heads_do_not_meet(GPU, dtype)


def test_inputs_are_left_alone():
    cases.inputs_are_left_alone(GPU)


def test_float32_is_refused():
    q = torch.randn(1, 1, 8, 64, device=GPU)
    with pytest.raises(ValueError, match="float32 is not supported on a GPU"):
        run(q, q, q, q, causal=True, config=QuantConfig())
