"""The Hopper backward's kernels on a CPU, by stand-ins for Gluon; and which calls they take."""

import pytest
import torch
from torch.nn.functional import pad

from sagebwd.attention import QuantConfig, context_hopper, reference
from sagebwd.attention.zigzag import Zigzag
from sagebwd.kernels.hopper import backward as hopper
from sagebwd.kernels.hopper import backward_kv, backward_q, pieces
from sagebwd.kernels.packing import ROW_PADDING
from sagebwd.kernels.quantise import Quantised
from tests.attention.cases import TIGHT
from tests.attention.helpers import inputs, rel_l2
from tests.kernels.gluon_on_cpu import on_cpu

SHAPES = [(1, 1), (63, 63), (64, 65), (127, 128), (200, 200), (64, 400), (1, 70), (130, 64), (321, 190)]


def quantised(hat: torch.Tensor, scale: torch.Tensor) -> Quantised:
    """The kernels' workspaces of the reference's integers [..., L', D] and scales [..., tiles]."""
    rows = pad(hat.flatten(0, -3), (0, 0, 0, -hat.shape[-2] % ROW_PADDING)).to(torch.int8)
    scale = pad(scale.flatten(0, -2), (0, rows.shape[1] // 64 - scale.shape[-1]))
    columns = rows.mT.unflatten(-1, (-1, 2, 4, 2)).transpose(-2, -3).flatten(-4)  # common.fragment_order
    return Quantised(rows, columns.contiguous(), scale, None)


def workspaces(o, saved, do):
    """Q, K, dO and the statistics as `hopper.backward` takes them."""
    m = do.shape[-2]
    do_tiles = pad(do.float(), (0, 0, 0, -m % 64)).unflatten(-2, (-1, 64))
    do_hat, do_scale = reference.quantise(do_tiles, (-2, -1))
    more = -saved.lse2.shape[-1] % ROW_PADDING
    lse2 = pad(saved.lse2.flatten(0, 2), (0, more), value=torch.inf)
    row_delta = (do.float() * o.float()).sum(-1).flatten(0, 1)
    q8, k8 = quantised(saved.q_hat, saved.q_scale), quantised(saved.k_hat, saved.k_scale)
    statistics = torch.stack((lse2, pad(row_delta, (0, lse2.shape[1] - m))), -1)
    return q8, k8, quantised(do_hat.flatten(-3, -2), do_scale[..., 0, 0]), statistics


def both(q, k, v, do, causal, delta="stale"):
    """(dq, dk, dv) by the kernels and by the reference."""
    config = QuantConfig(delta=delta)
    args = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5}
    o, saved = reference.forward(q, k, v, config=config, **args)
    expected = reference.backward(do, v, o, saved, n=k.shape[-2], config=config, **args)
    actual = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    with on_cpu(hopper, backward_q, backward_kv, pieces):
        hopper.backward(*workspaces(o, saved, do), do, v, *actual, **args)
    return actual, expected


@pytest.mark.parametrize("dim", hopper.DIMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_agrees_with_reference(m, n, causal, dim):
    group = 1 + (m + n) % 2
    tensors = inputs(m, n, dim, 2 * group, 2, batch=2 if m < 100 else 1, dtype=torch.float16)
    actual, expected = both(*tensors, causal)
    for name, a, e in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert rel_l2(a, e) < TIGHT, name


@pytest.mark.parametrize("dim", hopper.DIMS)
def test_strides_are_taken_as_they_are(dim):
    q, k, v, do = (torch.randn(150, 2, 2, 2 * dim).to(torch.bfloat16)[..., :dim].permute(1, 2, 0, 3) for _ in range(4))
    strided, _ = both(q, k, v, do, True)
    plain, _ = both(*(x.contiguous() for x in (q, k, v, do)), True)
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


@pytest.mark.parametrize("dim", hopper.DIMS)
def test_the_chunks_of_context_parallel_ranks_are_bitwise_those_of_the_whole(dim):
    """Chunks of 128 keys, where some kernels take 192 at a time: nothing is written past a chunk's end."""
    q, k, v, do = inputs(512, 512, dim, 2, 1, dtype=torch.float16)
    args = {"causal": True, "softmax_scale": dim**-0.5}
    o, saved = reference.forward(q, k, v, config=QuantConfig(), **args)
    q8, k8, do8, statistics = workspaces(o, saved, do)
    whole = tuple(torch.empty_like(x) for x in (q, k, v))
    with on_cpu(hopper, backward_q, backward_kv, pieces):
        hopper.backward(q8, k8, do8, statistics, do, v, *whole, **args)
        for rank in range(2):
            zigzag = Zigzag(rank, 2)
            mine, queries, keys = (
                (zigzag.cut(x, 2) for x in (do, o, v)),
                *(tuple(zigzag.cut(x, 1) for x in (operand.rows, operand.scale)) for operand in (q8, k8)),
            )
            do_mine, o_mine, v_mine = mine
            found, scale = zigzag.cut(statistics, 1), args["softmax_scale"]
            dq = context_hopper.query_gradient(do_mine, o_mine, queries, k8, v, found, zigzag, scale)
            dk, dv = context_hopper.key_gradients(do, v_mine, q8, keys, do8, statistics, zigzag, scale)
            for actual, expected in zip((dq, dk, dv), whole, strict=True):
                assert torch.equal(actual, zigzag.cut(expected, 2))


def test_zeros_give_zeros():
    q, k, v, do = inputs(130, 130, 64, 1, 1, dtype=torch.float16)
    (dq, dk, dv), _ = both(q, k, v, torch.zeros_like(do), True)
    assert not any(x.any() for x in (dq, dk, dv))


TAKEN = {"window": False, "packed": False}


def test_the_default_is_taken():
    x = torch.empty(2, 3, 5, 64, dtype=torch.bfloat16)
    for tensor in (x, x.transpose(1, 2), x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), x[:1, :1]):
        for delta in ("stale", "matched"):
            config = QuantConfig(delta=delta, smooth_k=False)
            assert hopper.backward_refusal(90, 64, config, **TAKEN, tensors=(tensor, tensor)) is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"capability": 100}, "compute capability 9.0, and this is 10.0"),
        ({"dim": 72}, "head dims 64 and 128"),
        ({"window": True}, "no window"),
        ({"packed": True}, "no packed documents"),
        ({"config": QuantConfig(block_q=128)}, "block_q=64, not 128"),
        ({"config": QuantConfig(block_k=32)}, "block_k=64, not 32"),
        ({"config": QuantConfig(granularity="tile")}, "granularity='row', not 'tile'"),
        ({"config": QuantConfig(products="scores")}, "compute dV, dK and dQ in INT8"),
        ({"config": QuantConfig(smooth_q=True)}, "smooth_q=False, not True"),
        ({"config": QuantConfig(project=True)}, "no projection"),
        ({"tensors": (torch.empty(1, 1, 2, 64).expand(1, 1, 2, 64).mT.contiguous().mT,)}, "dO has strides"),
        ({"tensors": (torch.empty(1, 1, 2, 64), torch.empty(1, 1, 2, 65)[..., :64])}, "V has strides"),
        ({"tensors": (torch.empty(1, 1, 2, 65)[..., 1:],)}, "multiples of 16 bytes"),
        ({"tensors": (torch.empty(1, 1, 1, 64).expand(1, 1, 2, 64),)}, "multiples of 16 bytes"),
    ],
)
def test_what_is_left_to_the_portable_kernels_and_why(changed, why):
    call = {"capability": 90, "dim": 64, "config": QuantConfig(), **TAKEN, **changed}
    assert why in hopper.backward_refusal(call.pop("capability"), call.pop("dim"), call.pop("config"), **call)
