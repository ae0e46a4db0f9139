"""With products="scores": which calls Hopper's kernels take, that these are then what is launched, and what they
compute, by stand-ins for Gluon."""

import pytest
import torch
from torch.nn.functional import pad

from sagebwd.attention import QuantConfig, triton_backend
from sagebwd.kernels import backward, mean, quantise, tuning
from sagebwd.kernels import scores as portable
from sagebwd.kernels.hopper import (
    SWITCH,
    backward_scores,
    forward_scores,
    operands,
    pieces,
    schedule,
    scores,
    scores_operands,
    scores_rows,
)
from tests.attention import cases
from tests.attention.cases import TIGHT, by_reference
from tests.attention.helpers import assert_close, inputs
from tests.kernels.gluon_on_cpu import on_cpu

SCORES = QuantConfig(products="scores")
PLAIN = {"window": False, "packed": False}
WIDE = torch.empty(1, 1, 8, 65, dtype=torch.bfloat16)


@pytest.mark.parametrize("refusal", [scores.refusal, scores.backward_refusal])
@pytest.mark.parametrize("dim", scores.DIMS)
def test_the_default_is_taken(dim, refusal):
    x = torch.empty(2, 3, 5, dim, dtype=torch.bfloat16)
    tensors = {"V": x, "dO": x.transpose(1, 2), "dK": x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)}
    for config in (SCORES, QuantConfig(products="scores", smooth_k=False)):
        assert refusal(90, dim, config, **PLAIN, tensors=tensors) is None


@pytest.mark.parametrize("refusal", [scores.refusal, scores.backward_refusal])
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"capability": 80}, "they need compute capability 9.0, and the GPU has 8.0"),
        ({"capability": 100}, "they need compute capability 9.0, and the GPU has 10.0"),
        ({"dim": 72}, "they know head dims 64 and 128"),
        ({"window": True}, "they take no window"),
        ({"packed": True}, "they take no packed documents"),
        ({"config": QuantConfig(products="scores", block_q=128)}, "they know block_q=64, not 128"),
        ({"config": QuantConfig(products="scores", block_k=32)}, "they know block_k=64, not 32"),
        ({"tensors": {"V": WIDE[..., :64]}}, "multiples of 16 bytes, and V has strides"),
        ({"tensors": {"dK": WIDE[..., 1:]}}, "multiples of 16 bytes, and dK has strides"),
        ({"tensors": {"Q": torch.empty(1, 1, 64, 8).mT}}, "and Q has strides"),
    ],
)
def test_what_is_left_to_the_portable_kernels_and_why(changed, why, refusal):
    call = {"capability": 90, "dim": 64, "config": SCORES, **PLAIN, **changed}
    assert why in refusal(call.pop("capability"), call.pop("dim"), call.pop("config"), **call)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


HOPPER = ("hopper_forward_scores", "hopper_backward_scores")
PORTABLE = ("_scores_forward", "_scores_backward_kv", "_scores_backward_q")


@pytest.fixture
def launched(monkeypatch):
    """Names of the attention kernels that the backend launches on a Hopper GPU, in their order. Nothing runs."""
    names = []

    def launch(kernel, programs, *arguments, **constants):
        name = getattr(kernel, "fn", kernel).__name__
        if name in (*HOPPER, *PORTABLE):
            names.append(name)

    for module in (quantise, mean, portable, forward_scores, backward_scores, scores_operands, scores_rows):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(triton_backend, "backend_for", lambda x: "triton")
    monkeypatch.setattr(tuning, "capability", lambda device: 90)
    monkeypatch.setattr(backward, "_backward_q", forward_scores.hopper_forward_scores)  # no kernel is interpreted
    return names


def attend(q, k, v, do, config=SCORES, causal=True, window=None):
    options = {"causal": causal, "softmax_scale": 0.1, "config": config, "window": window}
    _, saved = triton_backend.forward(q, k, v, **options)
    grads = triton_backend.backward(do, saved, **options)
    for x, grad in zip((q, v, v), grads, strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


def tensors(dim=64, length=100):
    return inputs(length, length, dim, 2, 1, dtype=torch.bfloat16)


@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_hopper_s_kernels_are_launched(launched, dim, causal):
    attend(*tensors(dim), causal=causal)
    assert tuple(launched) == HOPPER


def test_other_calls_go_to_the_portable_kernels(launched):
    for config, window in ((SCORES, 20), (QuantConfig(products="scores", block_q=32), None)):
        attend(*tensors(), config, window=window)
        assert tuple(launched) == PORTABLE
        launched.clear()


def test_a_tensor_that_tma_cannot_read_goes_to_the_portable_kernels(launched):
    q, k, v, do = tensors()
    odd = torch.empty(1, 2, 100, 65, dtype=torch.bfloat16)[..., :64]
    attend(q, k, odd[:, :1], do)  # V: its gradients would have rows that TMA can write
    attend(q, k, v, odd)
    attend(odd, k, v, do)
    attend(q, odd[:, :1], v, do)  # K is read by Triton alone
    of_v, of_do, of_q, of_k = PORTABLE, (HOPPER[0], *PORTABLE[1:]), (HOPPER[0], *PORTABLE[1:]), HOPPER
    assert tuple(launched) == (*of_v, *of_do, *of_q, *of_k)


def test_short_sequences_go_to_the_portable_kernels(launched, monkeypatch):
    """Forward and backward each from a length of its own, which is not that of INT8 in every product."""
    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(tuning, "HOPPER_FROM", {"all": (0, 0), "scores": (300, 200)})
    for length, kernels in ((199, PORTABLE), (200, (PORTABLE[0], HOPPER[1])), (300, HOPPER)):
        attend(*tensors(length=length), causal=False)
        assert tuple(launched) == kernels
        launched.clear()


def test_with_deterministic_algorithms_dq_is_added_up_in_one_order(launched, deterministic):
    attend(*tensors())
    assert tuple(launched) == (HOPPER[0], *PORTABLE[1:])
    assert "asks for the same bits" in scores.backward_refusal(90, 64, SCORES, **PLAIN)


def test_the_kernels_are_named(launched, monkeypatch):
    monkeypatch.delenv(SWITCH)
    named = triton_backend.kernels(tensors()[0], SCORES, window=None, packed=None)
    assert [part.split(" (")[0] for part in named.split("; ")] == ["Hopper's forward", "Hopper's backward"]
    named = triton_backend.kernels(tensors(72)[0], SCORES, window=None, packed=None)
    assert named.count("they know head dims 64 and 128") == 2
    assert launched == []


@pytest.mark.parametrize("dim", scores.DIMS)
def test_rows_are_prepared_and_dq_is_put_in_order(dim):
    """The sums of a tile lie in the order in which a warpgroup's threads hold a product, four of each together."""
    q, _, _, do = inputs(100, 1, dim, 2, 1, batch=2, dtype=torch.float16)
    q, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, do))
    lse2, scale = torch.randn(4, 128), torch.rand(4, 2)
    numbers, sums = scores_rows.prepare_rows(scale, do, q, lse2)
    delta = pad((do.float() * q.float()).sum(-1), (0, 28)).reshape(8, 64)
    of_tiles = numbers.unflatten(0, (8, 4, 64))
    of_columns = (
        of_tiles[:, :2].unflatten(2, (4, 4, 2, 2)).transpose(3, 4).flatten(2)
    )  # 16c + 4t + 2b + e: 16c + 8b + 2t + e
    assert torch.equal(of_columns[:, 0], lse2.reshape(8, 64))
    torch.testing.assert_close(of_columns[:, 1], delta)
    assert torch.equal(of_tiles[:, 2], scale.reshape(8, 1).expand(8, 64))
    assert not sums.any()
    wanted = torch.randn(4, 128, dim)
    for_thread = wanted.reshape(4, 2, 4, 2, 8, dim // 8, 4, 2)  # head, tile, w, i, g, h, t, e
    sums.copy_(for_thread.permute(0, 1, 5, 2, 4, 6, 3, 7).reshape(sums.shape))
    dq = torch.full_like(q, torch.nan)
    scores_rows.round_dq(sums, dq, 0.5)
    assert torch.equal(dq.flatten(0, 1), (wanted[:, :100] * 0.5).half())


@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("smooth", [True, False])
def test_q_and_k_are_quantised_as_one_by_one(dim, smooth):
    cases.q_and_k_are_quantised_as_one_by_one("cpu", dim, smooth, torch.float16)


@pytest.mark.parametrize(
    ("m", "n", "dim", "causal", "programs"),
    [
        (65, 64, 64, True, 132),
        (130, 200, 64, False, 1),
        (300, 190, 64, True, 2),
        (200, 461, 128, True, 3),
        (40, 140, 64, True, 1),
        (70, 130, 128, False, 1),
    ],
)
def test_agrees_with_the_reference(m, n, dim, causal, programs, monkeypatch):
    """Forward and backward; few programs have several items each, one after another. Scales differ from block to block,
    and tokens lie as in Megatron. 40 queries: fewer tiles than stages."""
    monkeypatch.setattr(tuning, "processors", lambda device: programs)
    q, k, v, do = inputs(m, n, dim, 4, 2, dtype=torch.float16)
    q, k = (x * torch.linspace(1, 3, x.shape[2])[:, None].half() for x in (q, k))
    q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do))
    assert_close(run_here(q, k, v, do, causal), by_reference(q, k, v, do, causal=causal, config=SCORES), TIGHT)


def run_here(q, k, v, do, causal):
    """O, dQ, dK and dV by both kernels."""
    o, dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, q, k, v))
    options = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5}
    q8, k8 = scores_operands.quantise_both(q, k, mean.key_mean(k, None), smoothed_to=dk)
    with on_cpu(forward_scores, forward_scores, operands, pieces, schedule):
        lse2 = forward_scores.forward(q8, k8, v, o, **options)
    with on_cpu(backward_scores, backward_scores, operands, pieces):
        sums = backward_scores.backward(q8, k8, q, do, o, lse2, v, dk, dv, **options)
    scores_rows.round_dq(sums, dq, options["softmax_scale"])
    return o, dq, dk, dv


@pytest.mark.parametrize("together", [1, 3, 256])
def test_programs_of_any_number_of_heads_go_together(together, monkeypatch):
    """One head at a time, two and then one, all three."""
    tensors = inputs(130, 130, 64, 3, 3, dtype=torch.float16)
    monkeypatch.setattr(backward_scores, "TOGETHER", together)
    assert backward_scores._section(3, 2) == {1: 1, 3: 2, 256: 3}[together]
    assert_close(run_here(*tensors, True), by_reference(*tensors, causal=True, config=SCORES), TIGHT)
