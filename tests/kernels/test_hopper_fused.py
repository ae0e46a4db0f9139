"""The fused Hopper backward on a CPU, by stand-ins for Gluon."""

import pytest
import torch
from torch.nn.functional import pad

from sagebwd.attention import QuantConfig, reference
from sagebwd.kernels.hopper import backward_fused, dq_sums, fused, pieces
from sagebwd.kernels.packing import ROW_PADDING
from tests.attention.cases import TIGHT
from tests.attention.helpers import inputs, rel_l2
from tests.kernels.gluon_on_cpu import on_cpu
from tests.kernels.test_hopper_backward import quantised

SHAPES = [(1, 1), (127, 128), (64, 400), (1, 70), (321, 190)]


def both(q, k, v, do, causal, form):
    """(dq, dk, dv) by the kernel and by the reference."""
    config, m = QuantConfig(), q.shape[-2]
    args = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5}
    o, saved = reference.forward(q, k, v, config=config, **args)
    expected = reference.backward(do, v, o, saved, n=k.shape[-2], config=config, **args)
    do_tiles = pad(do.float(), (0, 0, 0, -m % 64)).unflatten(-2, (-1, 64))
    do_hat, do_scale = reference.quantise(do_tiles, (-2, -1))
    more = -saved.lse2.shape[-1] % ROW_PADDING
    lse2 = pad(saved.lse2.flatten(0, 2), (0, more), value=torch.inf)
    row_delta = (do.float() * o.float()).sum(-1).flatten(0, 1)
    actual = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    with on_cpu(fused, backward_fused, dq_sums, pieces):
        fused.backward(
            quantised(saved.q_hat, saved.q_scale), quantised(saved.k_hat, saved.k_scale),
            quantised(do_hat.flatten(-3, -2), do_scale[..., 0, 0]),
            torch.stack((lse2, pad(row_delta, (0, lse2.shape[1] - m))), -1), do, v, *actual, form=form, **args,
        )  # fmt: skip
    return actual, expected


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_agrees_with_reference(m, n, causal, dim):
    group = 1 + (m + n) % 2
    tensors = inputs(m, n, dim, 2 * group, 2, batch=2 if m < 100 else 1, dtype=torch.float16)
    actual, expected = both(*tensors, causal, fused.FORMS[dim])
    for name, a, e in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert rel_l2(a, e) < TIGHT, name


@pytest.mark.parametrize(
    ("dim", "form"),
    [
        (64, fused.Form(5, "one", early_dv=False)),
        (64, fused.Form(5, "two", rotate=True)),
        (128, fused.Form(2, "dq")),
        (128, fused.Form(3, "two")),
    ],
    ids=str,
)
def test_other_forms_compute_the_same(dim, form):
    tensors = inputs(321, 190, dim, 2, 2, batch=1, dtype=torch.float16)
    actual, expected = both(*tensors, False, form)
    for name, a, e in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert rel_l2(a, e) < TIGHT, name
