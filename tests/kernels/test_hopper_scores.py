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
from tests.attention.helpers import assert_close, inputs, rel_l2
from tests.kernels import gluon_on_cpu
from tests.kernels.gluon_on_cpu import Value, call, on_cpu

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


def prepared(q, k, v, do, lse2):
    """Q's scale and the rows; O is Q here."""
    q8, _, rows = scores_rows.prepare(q, k, None, v, do, q, lse2, torch.empty_like(k))
    return q8.scale, rows


def parts_of(numbers):
    """[tiles, 64] int32: the rows' parts of their powers in the rows' order, of words of rows g and g + 8."""
    words = numbers.unflatten(0, (-1, 4, 64))[:, 2, :32].contiguous()
    return words.view(torch.int16).unflatten(1, (4, 8, 2)).transpose(2, 3).flatten(1).int()


def powers_of(rows):
    """[tiles, 64]: what `backward_scores` multiplies by; it leaves each head's part for `round_dq`."""
    powers = []
    for exponents, parts in zip(rows.exponents, parts_of(rows.numbers).chunk(len(rows.exponents)), strict=True):
        of_head = call(backward_scores, "_of_head", exponents, len(exponents) // 2)
        assert int(of_head) == exponents[0]
        powers.append(call(backward_scores, "_power", Value(parts), of_head).data)
    return torch.cat(powers)


@pytest.mark.parametrize("dim", scores.DIMS)
@pytest.mark.parametrize("halves", [True, False])
def test_rows_are_prepared_and_dq_is_put_in_order(dim, halves, monkeypatch):
    """The sums of a tile lie in the order in which a warpgroup's threads hold a product, 16 bytes of each together."""
    monkeypatch.setattr(scores_rows, "MOST_KEYS", 70 if halves else 69)
    q, k, v, do = inputs(100, 70, dim, 2, 1, batch=2, dtype=torch.float16)
    q, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, do))
    lse2 = torch.randn(4, 128)
    scale, rows = prepared(q, k, v, do, lse2)
    numbers, sums, _ = rows
    delta = pad((do.float() * q.float()).sum(-1), (0, 28)).reshape(8, 64)
    of_tiles = numbers.unflatten(0, (8, 4, 64))
    of_columns = of_tiles[:, :2].unflatten(2, (4, 4, 2, 2)).transpose(3, 4).flatten(2)  # 16c + 4t + 2b + e
    assert torch.equal(of_columns[:, 0], lse2.reshape(8, 64))
    torch.testing.assert_close(of_columns[:, 1], delta)
    assert torch.equal(of_tiles[:, 2, 32:], scale.reshape(8, 1).expand(8, 32))
    assert sums.dtype == (torch.float16 if halves else torch.float32)
    assert not sums.any()
    power = powers_of(rows).reshape(4, 128, 1) if halves else 1
    wanted = torch.randn(4, 128, dim).half()
    j = 2 if halves else 1
    for_thread = wanted.reshape(4, 2, 4, 2, 8, dim // 8 // j, j, 4, 2)  # head, tile, w, i, g, h, j, t, e
    sums.copy_(for_thread.permute(0, 1, 5, 2, 4, 7, 6, 3, 8).reshape(sums.shape))
    dq = torch.full_like(q, torch.nan)
    scores_rows.round_dq(rows, dq, 0.5)
    assert torch.equal(dq.flatten(0, 1), (wanted.float() / power * 0.5)[:, :100].half())


@pytest.mark.parametrize(
    ("of_do", "of_v", "of_k", "exact"),
    [(0, 0, 0, True), (-20, 5, 3, True), (40, 20, 10, True), (-60, -40, -30, False), (60, 40, 30, False)],
)
def test_the_power_of_two_of_a_row_bounds_its_sums(of_do, of_v, of_k, exact):
    """2^power times 2 sum |dO| max|V| max|K| is 2^12 to 2^15, of each row by itself; else the nearest FP32 has."""
    q, k, v, do = inputs(100, 300, 64, 2, 1, batch=2, dtype=torch.bfloat16)
    do = do * 2.0 ** torch.linspace(-20, 20, 100)[:, None].round()
    do, v, k = ((x * 2.0**power).bfloat16() for x, power in ((do, of_do), (v, of_v), (k, of_k)))
    _, rows = prepared(q, k, v, do, torch.randn(4, 128))
    power = powers_of(rows).reshape(4, 128)[:, :100].double().log2()
    assert torch.equal(power, power.round())
    largest = (x.double().abs().amax((1, 2, 3)).log2().repeat_interleave(2)[:, None] for x in (k, v))
    bound = 1 + do.double().abs().sum(-1).flatten(0, 1).log2() + sum(largest) + power
    assert (bound < 15).all() or of_do + of_v + of_k > 120
    assert (bound > 11.9).all() or not exact


def test_rows_of_zeros_have_a_power_of_two_as_well():
    q, k, v, do = (torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(4))
    _, rows = prepared(q, k, v, do, torch.zeros(1, 128))
    assert (powers_of(rows) == 2.0**126).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of Triton's interpreter
@pytest.mark.parametrize("n", [65, 1000])
def test_the_power_of_two_of_a_row_is_what_the_formula_says(n):
    """14 less the exponents of its own sum |dO|, and of its head's largest finite |V| and |K|, as FP32 has it."""
    q, k, v, do = inputs(100, n, 64, 6, 3, dtype=torch.bfloat16)
    do = torch.randint(-8, 9, do.shape).bfloat16()  # of which any order of addition makes the same sum
    do[:, :, 3] = 0
    do[:, :, 5, 7], do[:, :, 6, 7], do[:, :, 7, 7] = torch.inf, -torch.inf, torch.nan
    for row, power in ((11, 110), (12, 60), (13, -60), (14, -125)):
        do[:, :, row] *= 2.0**power
    v[:, 0] *= torch.linspace(1, 300, n)[:, None].bfloat16()
    v[:, 0, 64, 1], v[:, 0, 64, 2], v[:, 0, 1, 3] = torch.nan, -torch.inf, torch.inf
    v[:, 1] = 0
    v[:, 2], k[:, 2] = v[:, 2] * 2.0**40, k[:, 2] * 1e-35  # K below what has a scale
    k[:, 0, 64, 1] = torch.nan
    _, k8, rows = scores_rows.prepare(q, k, None, v, do, q, torch.zeros(6, 128), torch.empty_like(k))

    def exponent(x):
        found = x.float().frexp().exponent.clamp_min(-126)
        return torch.where(x.isfinite(), torch.where(x == 0, -126, found), 129)

    finite = v.float().abs().nan_to_num(0, 0, 0).amax((2, 3))[0]
    of_k = (127 * k8.scale.nan_to_num(0, 0, 0).amax(1)).clamp_min(1e-30)
    of_head = (exponent(finite) + exponent(of_k)).repeat_interleave(2)
    of_row = pad(exponent(do.float().abs().sum(-1))[0], (0, 28), value=-126)
    power = (14 - of_row - of_head[:, None]).clamp(-113, 126)
    assert {-113, 126} <= set(power.flatten().tolist())
    assert torch.equal(powers_of(rows).reshape(6, 128), 2.0**power)
    rows.sums.fill_(1)  # and dQ by the inverse, to the bit
    dq = torch.empty(1, 6, 100, 64)
    scores_rows.round_dq(rows, dq, 1.0)
    assert torch.equal(dq[0, :, :, 0], 2.0 ** -power[:, :100])


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


def run_here(q, k, v, do, causal, smooth_k=True):
    """O, dQ, dK and dV by both kernels."""
    o, dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, q, k, v))
    options = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5}
    q8, sums = scores_operands.quantise_q(q, k if smooth_k else None)
    k_mean = mean.mean_of(sums, k.shape[2]) if smooth_k else None
    k8 = scores_operands.quantise_k(k, k_mean)
    with on_cpu(forward_scores, forward_scores, operands, pieces, schedule):
        lse2 = forward_scores.forward(q8, k8, v, o, **options)
    with on_cpu(backward_scores, backward_scores, operands, pieces):
        rows = backward_scores.backward(q, k, k_mean, do, o, lse2, v, dk, dv, **options)
    scores_rows.round_dq(rows, dq, options["softmax_scale"])
    return o, dq, dk, dv


@pytest.mark.parametrize(("size", "rises"), [(0.3, 0), (8.0, 3)])
def test_a_tile_looks_for_its_maximum_where_its_norms_allow_a_higher_one(size, rises, monkeypatch):
    """Four tiles of keys, the first one with a mask; both warpgroups."""
    looked = []
    follow = gluon_on_cpu._REPLACED["follow"]
    monkeypatch.setitem(gluon_on_cpu._REPLACED, "follow", lambda *args: looked.append(1) or follow(*args))
    q, k, v, do = inputs(128, 512, 64, 1, 1, dtype=torch.float16)
    tensors = (q, k * size, v, do)
    actual = run_here(*tensors, False)
    assert len(looked) == 2 * (1 + rises)
    assert_close(actual, by_reference(*tensors, causal=False, config=SCORES), TIGHT)


@pytest.mark.parametrize("causal", [False, True])
def test_sums_follow_logits_that_rise_and_fall(causal):
    """From tile to tile by more and by less than the slack, up to hundreds."""
    q, k, v, do = inputs(256, 640, 64, 1, 1, dtype=torch.float16)
    k *= 2.0 ** torch.tensor([3, 0, 2, 4, -2, 5, 1, -4, 3, 2]).repeat_interleave(64)[:, None]
    assert_close(run_here(q, k, v, do, causal), by_reference(q, k, v, do, causal=causal, config=SCORES), TIGHT)


@pytest.mark.parametrize("together", [1, 3, 256])
def test_programs_of_any_number_of_heads_go_together(together, monkeypatch):
    """One head at a time, two and then one, all three."""
    tensors = inputs(130, 130, 64, 3, 3, dtype=torch.float16)
    monkeypatch.setattr(backward_scores, "TOGETHER", together)
    assert backward_scores._section(3, 2) == {1: 1, 3: 2, 256: 3}[together]
    assert_close(run_here(*tensors, True), by_reference(*tensors, causal=True, config=SCORES), TIGHT)


@pytest.mark.parametrize("dim", scores.DIMS)
def test_more_keys_have_fp32_sums(dim, monkeypatch):
    monkeypatch.setattr(scores_rows, "MOST_KEYS", 299)
    tensors = inputs(70, 300, dim, 2, 1, dtype=torch.float16)
    assert_close(run_here(*tensors, True), by_reference(*tensors, causal=True, config=SCORES), TIGHT)


def test_each_row_of_dq_has_its_own_scale():
    """A power of two in a row of dO is one in that row of dQ, to the bit, however far from the other rows'."""
    q, k, v, do = inputs(130, 300, 64, 1, 1, dtype=torch.bfloat16)
    powers = torch.linspace(-60, 60, 130)[:, None].round()
    dq, scaled = (run_here(q, k, v, x, False)[1] for x in (do, (do * 2.0**powers).bfloat16()))
    assert torch.equal((dq * 2.0**powers).bfloat16(), scaled)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of Triton's interpreter
@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", ["K", "V"])
def test_rows_that_do_not_see_a_key_that_is_not_finite_keep_their_bits(which, poison):
    """As if the tile of that key held zeros."""
    q, k, v, do = inputs(200, 200, 64, 2, 1, dtype=torch.bfloat16)
    x = k if which == "K" else v
    x[:, :, 128:] = 0
    expected = run_here(q, k, v, do, True, smooth_k=False)[1]
    x[:, :, 150, 7] = poison
    actual = run_here(q, k, v, do, True, smooth_k=False)[1]
    assert torch.equal(actual[:, :, :128], expected[:, :, :128])
    assert actual[:, :, 150:].isnan().all()


def test_keys_too_small_for_a_scale_do_not_overflow_the_sums():
    q, k, v, do = inputs(64, 128, 64, 1, 1, dtype=torch.bfloat16)
    dq = run_here(q, k * 1e-32, v, do, False)[1]
    assert dq.any()
    assert dq.abs().max() < 1e-30


def test_sums_next_to_their_bound_do_not_overflow():
    """Half of the keys pull one way and half the other, as strongly as their largest values allow."""
    q, k, v, do = (torch.ones(1, 1, n, 64, dtype=torch.bfloat16) for n in (64, 512, 512, 64))
    signs = torch.ones(512, 1).bfloat16()
    signs[256:] = -1
    q *= 1e-3
    expected = by_reference(q, k * signs, v * signs, do, causal=False, config=SCORES)
    for size in (1.0, 2.0**40):
        actual = run_here(q, k * signs, v * signs * size, do * size, False)
        assert rel_l2(actual[1] / size**2, expected[1]) < TIGHT
