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


@pytest.mark.parametrize("dim", [8, 40, 72, 128, 256])
def test_head_dims(dim):
    cases.agrees_with_reference(100, 100, dim, 2, True, cases.CONFIGS["row"], CPU, dtype=torch.float32)


def test_strided_views_are_taken_as_they_are():
    cases.strided_views_are_taken_as_they_are(CPU, torch.float16)


def test_poisoned_buffers_do_not_show(monkeypatch):
    cases.poisoned_buffers_do_not_show(CPU, monkeypatch)


def test_all_zero_tiles_give_zeros():
    cases.all_zero_tiles_give_zeros(CPU)


def test_extreme_values_stay_finite():
    cases.extreme_values_stay_finite(CPU)


def test_a_query_that_sees_no_key_gets_zeros():
    cases.a_query_that_sees_no_key_gets_zeros(CPU)


def test_nan_reaches_the_output():
    cases.nan_reaches_the_output(CPU)


def test_two_runs_are_bitwise_equal():
    cases.two_runs_are_bitwise_equal(CPU)


def test_heads_do_not_meet():
    cases.heads_do_not_meet(CPU, torch.float16)


def test_inputs_are_left_alone():
    cases.inputs_are_left_alone(CPU)
