"""What earlier positions learn of later ones under a causal mask, by the key mean and shared scales: rounding alone.

K-smoothing subtracts a mean over all tokens, and a block's scale is the maximum over all its rows, later ones included.
Exact arithmetic would see neither: the mean adds one constant to a query's scores, and a scale cancels. What stays is
that earlier tokens are rounded on another grid. So, when later tokens change,

* an earlier output moves by no more than the rounding errors of both grids, which the scales give (`rounding_error`),
  whatever the later tokens are. For tokens of the same kind that is 2% of the outputs (Rel-L2), and 2.5% of the
  gradients of a loss at earlier positions. A later key 30 times larger makes its block's grid 30 times coarser;
* without K-smoothing, blocks that end before the first change do not move at all, to the bit;
* gradients know the mask exactly: a loss at earlier positions has none, 0.0, with respect to later tokens.
"""

import pytest
import torch

from sagebwd.attention import QuantConfig, reference
from tests.attention.helpers import inputs, rel_l2, truth

N, CUT, DIM = 256, 150, 64  # tokens from CUT on change; CUT lies inside a block
SCALE = DIM**-0.5


def both(config: QuantConfig, size: float):
    """Tensors before and after the change, results of both, saved of both; dO of later positions is zero."""
    q, k, v, do = inputs(N, N, DIM, 2, 1)
    do[..., CUT:, :] = 0
    before, after = (q, k, v), tuple(x.clone() for x in (q, k, v))
    for x in after:
        x[..., CUT:, :] = torch.randn_like(x[..., CUT:, :]) * size
    args = {"causal": True, "softmax_scale": SCALE, "config": config}
    results, kept = [], []
    for q, k, v in (before, after):
        o, saved = reference.forward(q, k, v, **args)
        results.append((o, *reference.backward(do, v, o, saved, n=N, **args)))
        kept.append(saved)
    return before, after, do, results, kept


def rounding_error(tensors, kept, config: QuantConfig):
    """Standard error of the difference of two runs' outputs before CUT [heads, CUT, dim], from their scales.

    Rounding on a grid of step s errs by s / sqrt(12), each time on its own. Squared errors: of a score,
    e_ij^2 = c^2 (|Q_i|^2 s_K^2 + |K_j|^2 s_Q^2) / 12; of O_id = sum_j P_ij V_jd, to first order,
    sum_j P_ij^2 (V_jd - O_id)^2 e_ij^2 + (V_jd^2 s_P^2 + P_ij^2 s_V^2) / 12, s_P a tile row's maximum / 127.
    """
    seen = torch.ones(CUT, CUT, dtype=torch.bool).tril()
    total = 0
    for (q, k, v), saved in zip(tensors, kept, strict=True):
        k = k - k.mean(-2, keepdim=True) if config.smooth_k else k
        s_v = scale_of_rows(v)[:, :CUT, None]
        q, k, v = (x[0, :, :CUT] for x in (q, k, v))
        s_q = saved.q_scale[0, 0].repeat_interleave(64, -1)[:, :CUT, None]
        s_k = saved.k_scale[0].repeat_interleave(64, -1)[:, None, :CUT]
        e2 = (q.square().sum(-1)[..., None] * s_k**2 + k.square().sum(-1)[:, None] * s_q**2) * SCALE**2 / 12
        p = (q @ k.mT * SCALE).masked_fill(~seen, -torch.inf).softmax(-1)
        s_p = torch.cat([t.amax(-1, keepdim=True).expand_as(t) for t in p.split(64, -1)], -1) / 127 * seen
        o, weight = p @ v, p.square() * e2
        total = total + weight @ v.square() - 2 * o * (weight @ v) + o.square() * weight.sum(-1, keepdim=True)
        total = total + (s_p.square() @ v.square() + p.square() @ s_v.square()) / 12
    return total.sqrt()


def scale_of_rows(v):
    """Scale of V [1, heads, N, dim] in each row [heads, N]."""
    return v[0].unflatten(-2, (-1, 64)).abs().amax((-2, -1)).div(127).repeat_interleave(64, -1)


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_later_tokens_move_earlier_outputs_by_rounding_errors_alone(size, smooth_k):
    """Each by five standard errors at most; all together, in the root mean square, by one."""
    config = QuantConfig(smooth_k=smooth_k)
    before, after, _, results, kept = both(config, size)
    moved = (results[0][0] - results[1][0])[0, :, :CUT]
    error = rounding_error((before, after), kept, config)
    assert moved.any()  # or nothing is tested
    assert (moved.abs() <= 5 * error + 1e-6).all()
    assert moved.norm() <= error.norm()


@pytest.mark.parametrize("granularity", ["row", "tile"])
@pytest.mark.parametrize("delta", ["stale", "matched"])
def test_tokens_of_the_same_kind_move_outputs_and_gradients_by_no_more_than_rounding_errs(granularity, delta):
    before, after, do, results, _ = both(QuantConfig(granularity=granularity, delta=delta), 1.0)
    limits = (0.02, *[0.025 if granularity == "row" else 0.04] * 3)
    expected = [truth(*x, do, True) for x in (before, after)]
    for x, y, a, b, limit in zip(*results, *expected, limits, strict=True):
        assert rel_l2(a[..., :CUT, :], b[..., :CUT, :]) < 1e-14
        assert rel_l2(y[..., :CUT, :], x[..., :CUT, :]) < limit


@pytest.mark.parametrize(
    "config", [QuantConfig(), QuantConfig(granularity="tile", delta="matched"), QuantConfig(products="scores")]
)
def test_a_loss_at_earlier_positions_has_no_gradient_at_later_tokens(config):
    _, _, _, results, _ = both(config, 1.0)
    for _, *grads in results:
        assert not any(g[..., CUT:, :].any() for g in grads)


@pytest.mark.parametrize("granularity", ["row", "tile"])
def test_without_smoothing_whole_earlier_blocks_do_not_move(granularity):
    _, _, _, (before, after), _ = both(QuantConfig(smooth_k=False, granularity=granularity), 1.0)
    whole = CUT // 64 * 64
    for x, y in zip(before[:2], after[:2], strict=True):
        assert torch.equal(x[..., :whole, :], y[..., :whole, :])
