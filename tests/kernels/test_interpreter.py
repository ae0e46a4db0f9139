"""The Triton kernels in the interpreter, against the reference. fp16 and fp32: bf16 products are wrong there."""

import pytest
import torch

from tests.attention import cases
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU is here: tests/gpu runs the same cases on it, and more")
CPU = "cpu"


@pytest.mark.parametrize(("m", "n", "group", "causal", "config"), cases.pairs())
def test_agrees_with_reference(m, n, group, causal, config):
    cases.agrees_with_reference(m, n, 64, group, causal, cases.CONFIGS[config], CPU)


@pytest.mark.parametrize(("m", "n", "window", "group", "config"), cases.windows()[::7])
def test_agrees_with_reference_in_a_window(m, n, window, group, config):
    cases.agrees_with_reference_in_a_window(m, n, window, group, cases.CONFIGS[config], CPU)


def test_a_window_as_wide_as_the_keys_is_the_causal_mask():
    cases.a_window_as_wide_as_the_keys_is_the_causal_mask(CPU)


def test_keys_left_of_the_window_are_not_read():
    cases.keys_left_of_the_window_are_not_read(CPU)


@pytest.mark.parametrize(
    ("config", "causal", "window"),
    [
        ("row", False, None),
        ("matched", True, None),
        ("smooth-q", True, cases.WINDOW),
        ("scores", True, cases.WINDOW),
    ],
)
def test_packed_equals_the_documents_one_by_one(config, causal, window):
    cases.packed_equals_the_documents_one_by_one(
        cases.DOCUMENTS, cases.CONFIGS[config], causal, window, CPU, torch.float16
    )


def test_documents_do_not_meet():
    cases.documents_do_not_meet(CPU)


def test_cu_seqlens_that_lie_touch_no_other_memory():
    cases.cu_seqlens_that_lie_touch_no_other_memory(CPU)


def test_integers_are_the_reference_s():
    cases.integers_are_the_reference_s(CPU, torch.float16)


def test_key_mean_is_the_mean():
    cases.key_mean_is_the_mean(CPU, torch.float16)


@pytest.mark.parametrize(("m", "n", "group", "causal"), [(100, 100, 2, True), (64, 130, 1, False)])
@pytest.mark.parametrize("config", cases.PROJECTED)
def test_projection_agrees_with_reference(m, n, group, causal, config):
    cases.agrees_with_reference(m, n, 64, group, causal, cases.PROJECTED[config], CPU)


@pytest.mark.parametrize("dim", [8, 40, 72, 128, 256])
def test_head_dims(dim):
    for config in ("row", "scores"):
        cases.agrees_with_reference(100, 100, dim, 2, True, cases.CONFIGS[config], CPU, dtype=torch.float32)


def test_strided_views_are_taken_as_they_are():
    cases.strided_views_are_taken_as_they_are(CPU, torch.float16)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_poisoned_buffers_do_not_show(monkeypatch, mask):
    cases.poisoned_buffers_do_not_show(CPU, monkeypatch, mask)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_all_zero_tiles_give_zeros(mask):
    cases.all_zero_tiles_give_zeros(CPU, mask)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_extreme_values_stay_finite(mask):
    cases.extreme_values_stay_finite(CPU, mask)


def test_a_query_that_sees_no_key_gets_zeros():
    cases.a_query_that_sees_no_key_gets_zeros(CPU)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_nan_reaches_the_output(mask):
    cases.nan_reaches_the_output(CPU, mask)


def test_two_runs_are_bitwise_equal():
    cases.two_runs_are_bitwise_equal(CPU, "causal")


def test_heads_do_not_meet():
    cases.heads_do_not_meet(CPU, torch.float16)


def test_inputs_are_left_alone():
    cases.inputs_are_left_alone(CPU)
