"""SageBwd in plain PyTorch: the one specification of the numerics. CPU backend, test oracle and documentation.

Six of attention's seven matrix products run on INT8 operands, dP = dO V^T on the inputs' own dtype; every product
accumulates in FP32. An INT8 product is computed here as an FP32 product of integers: exact, since |sum| < 2^24 for
every block that QuantConfig admits. With products="scores" only S = Q K^T does: `_attend_scores`, `_scores_backward`.

Shapes: B batch, K key/value heads, G query heads a key/value head (GQA), M queries, N keys, D head dim. A query tile
has `block_q` rows, a key tile `block_k`; T and U count them. Lengths are padded with zeros to whole tiles: a padded key
is masked, a padded query has dO = 0. Source: arXiv 2603.02170, and arXiv 2609.37852 for the matched delta.

The base-2 logits are S = (Q^ K^T) (s_Q c s_K), c = softmax_scale log2(e), so that exp2 serves; lse is kept in base 2,
as +inf where a query sees no key or is padding: exp2(S - lse2) is then 0 for each of its scores.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels.packing import ROW_PADDING, Packed

LOG2E = math.log2(math.e)
LOG2_127 = math.log2(127)
TINY = 1e-30  # a tile whose largest magnitude is below this is taken as all zero, so that 127 / max stays finite


class Saved(NamedTuple):
    """What the forward keeps for the backward, in the reference's own layout."""

    q_hat: Tensor  # [B, K, G, M', D] integers, M' = T block_q
    q_scale: Tensor  # [B, K, G, T]
    q_mean: Tensor | None  # [B, K, G, T, D] with smooth_q
    k_hat: Tensor  # [B, K, N', D] integers, N' = U block_k
    k_scale: Tensor  # [B, K, U]
    k_smooth: Tensor | None  # [B, K, N', D] with smooth_q; with products="scores" rounded to k's dtype
    lse2: Tensor  # [B, K, G, M'] base-2 log-sum-exp of a row of S; +inf where a query sees no key or is padding
    q: Tensor | None = None  # [B, K, G, M', D] as it came, with products="scores"


class Observer(Protocol):
    """Told what `backward` works with, so that its errors can be measured on the tensors themselves."""

    def delta(self, delta: Tensor) -> None:
        """[B, K, G, M']."""

    def tile(
        self, rows: slice, cols: slice, *, p: Tensor, dp: Tensor, ds: Tensor, p_rounded: Tensor, ds_rounded: Tensor
    ) -> None:
        """One key tile, [B, K, G, rows, cols]; queries outside of rows see none of it. The rounded ones are dV's and
        dQ's left operands, times their scales."""


def quantise(x: Tensor, dims: tuple[int, ...] | int, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """x^ = round(x 127 / max|x|) to nearest even and the scale max|x| / 127, the maximum over `dims` (kept as size 1).

    An all-zero block gives zeros and the scale 0. `exact` skips the rounding (x^ = x, scale 1): for tests of the
    formulas alone.
    """
    if exact:
        return x, torch.ones_like(x.amax(dims, keepdim=True))
    largest = x.abs().amax(dims, keepdim=True)
    largest = torch.where(largest < TINY, 0.0, largest)  # NaN compares false and stays
    # torch.div, since `127.0 / x` is x.reciprocal() * 127.0, which rounds twice
    inverse = torch.where(largest == 0, 0.0, torch.div(torch.full_like(largest, 127.0), largest))
    return torch.round(x * inverse), largest / 127.0


def _tiles(x: Tensor, block: int) -> Tensor:
    """[..., L, D] -> [..., L / block, block, D]."""
    return x.unflatten(-2, (-1, block))


def _pad_rows(x: Tensor, block: int) -> Tensor:
    """Zeros after the last row of [..., L, D], up to a whole number of blocks."""
    return pad(x, (0, 0, 0, -x.shape[-2] % block))


class _Mask(NamedTuple):
    """Which of n keys each of m queries sees."""

    causal: bool
    window: int | None
    m: int
    n: int

    def hidden(self, rows: Tensor, cols: Tensor) -> Tensor:
        hidden = cols >= self.n
        if self.causal:  # aligned bottom right: the last query sees every key
            hidden = hidden | (cols > rows + (self.n - self.m))
        if self.window is not None:
            hidden = hidden | (cols < rows + (self.n - self.m) - self.window)
        return hidden

    def rows(self, u: int, c: QuantConfig) -> slice:
        """Whole query tiles: from the first to the last row that sees a key of tile u."""
        first, last = 0, self.m
        if self.causal:
            first = max(0, u * c.block_k - (self.n - self.m))
        if self.window is not None:
            last = min(self.m, max(0, (u + 1) * c.block_k - (self.n - self.m) + self.window))
        first, last = first // c.block_q, -(-last // c.block_q)
        return slice(first * c.block_q, max(first, last) * c.block_q)


def _logits(saved: Saved, u: int, rows: slice, softmax_scale: float, mask: _Mask, c: QuantConfig):
    """Base-2 logits [B, K, G, rows, block_k] of key tile u; -inf where a query does not see a key."""
    cols = slice(u * c.block_k, (u + 1) * c.block_k)
    factor = (saved.q_scale * (softmax_scale * LOG2E)).repeat_interleave(c.block_q, -1)[..., rows, None]
    s = saved.q_hat[..., rows, :] @ saved.k_hat[:, :, None, cols].mT
    s = s * (factor * saved.k_scale[:, :, None, u, None, None])
    if saved.q_mean is not None:  # the mean's product with K, unquantised
        bias = saved.q_mean @ saved.k_smooth[:, :, None, cols].mT  # [B, K, G, T, block_k]
        s = s + bias.repeat_interleave(c.block_q, -2)[..., rows, :] * (softmax_scale * LOG2E)
    row = torch.arange(rows.start, rows.stop, device=s.device)[:, None]
    col = torch.arange(cols.start, cols.stop, device=s.device)
    return s.masked_fill(mask.hidden(row, col), -math.inf)


def key_sums(k: Tensor) -> Tensor:
    """Sums of k [B, K, N, D] over slots of ROW_PADDING tokens: [B, K, slots, D] FP32 (FP64 for FP64).

    Slots first, then the slots: so that who holds some of the slots has the same sums of them as who holds all.
    """
    k = _pad_rows(k.to(torch.float64 if k.dtype == torch.float64 else torch.float32), ROW_PADDING)
    return _pairwise_sum(_tiles(k, ROW_PADDING)).squeeze(-2)


def key_mean(sums: Tensor, n: int) -> Tensor:
    """The mean of n keys [B, K, 1, D] from `key_sums` of them all."""
    return _pairwise_sum(sums) / n


def _pairwise_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension but one, kept as size 1: of neighbours, and of these. No layout of x, nor a
    number of threads, changes its order."""
    while x.shape[-2] > 1:
        x = _pad_rows(x, 2)
        x = x[..., 0::2, :] + x[..., 1::2, :]
    return x


class Operands(NamedTuple):
    """The forward's INT8 operands: what `Saved` has of Q and K (lse2 without elements), and V."""

    saved: Saved
    v_hat: Tensor  # [B, K, N', D] integers
    v_scale: Tensor  # [B, K, U]


def operands(
    q: Tensor, k: Tensor, v: Tensor, *, config: QuantConfig, k_mean: Tensor | None = None, exact: bool = False
) -> Operands:
    """q [B, H, M, D], k and v [B, K, N, D] smoothed and rounded. k_mean: of `key_mean`, with smooth_k."""
    saved = queries_and_keys(q, k, config=config, k_mean=k_mean, exact=exact)
    v_tiles = _tiles(_pad_rows(v.to(saved.q_hat.dtype), config.block_k), config.block_k)
    v_hat, v_scale = quantise(v_tiles, (-2, -1), exact=exact)
    return Operands(saved, v_hat.flatten(-3, -2), v_scale[..., 0, 0])


def queries_and_keys(
    q: Tensor, k: Tensor, *, config: QuantConfig, k_mean: Tensor | None = None, exact: bool = False
) -> Saved:
    """`operands` without V: all of `Saved` but lse2, which has no elements."""
    c, m = config, q.shape[-2]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    k_work = k.to(work)
    if c.smooth_k:
        k_work = k_work - k_mean
    k_work = _pad_rows(k_work, c.block_k)
    q_work = _pad_rows(q.to(work).unflatten(1, (k.shape[1], -1)), c.block_q)
    q_tiles = _tiles(q_work, c.block_q)
    q_mean = None
    if c.smooth_q:
        filled = torch.full((q_tiles.shape[-3], 1, 1), c.block_q, dtype=work, device=q.device)
        filled[-1] = m - (len(filled) - 1) * c.block_q
        q_mean = q_tiles.sum(-2, keepdim=True) / filled
        valid = torch.arange(q_tiles.shape[-3] * c.block_q, device=q.device) < m
        q_tiles = (q_tiles - q_mean) * _tiles(valid[:, None], c.block_q)
        q_mean = q_mean.squeeze(-2)
    q_hat, q_scale = quantise(q_tiles, (-2, -1), exact=exact)
    k_hat, k_scale = quantise(_tiles(k_work, c.block_k), (-2, -1), exact=exact)
    saved = Saved(
        q_hat.flatten(-3, -2), q_scale[..., 0, 0], q_mean, k_hat.flatten(-3, -2), k_scale[..., 0, 0],
        k_work if c.smooth_q else None, q_hat.new_empty(0),
    )  # fmt: skip
    if c.products == "scores":
        saved = saved._replace(q=q_work, k_smooth=_to(k.dtype, k_work))
    return saved


def _to(dtype: torch.dtype, x: Tensor) -> Tensor:
    """x rounded to a dtype, in its own."""
    return x.to(dtype).to(x.dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig, window: int | None = None, exact: bool = False,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """Attention's output, and what the backward needs.

    q [B, H, M, D], k and v [B, K, N, D] with H = K G, any floating dtype; computed in FP32 (FP64 for FP64 inputs).
    window, with causal: how many keys left of its own position a query sees besides that one.
    Returns o [B, H, M, D] in q's dtype; a query that sees no key gets zeros.
    """
    m, n = q.shape[-2], k.shape[-2]
    k_mean = key_mean(key_sums(k), n) if config.smooth_k else None
    given = {"config": config, "k_mean": k_mean, "exact": exact}
    if config.products == "scores":
        mask = _Mask(causal, window, m, n)
        out, saved = _attend_scores(queries_and_keys(q, k, **given), v, softmax_scale, mask, config)
    else:
        mask = {"m": m, "n": n, "causal": causal, "window": window}
        rounded = operands(q, k, v, **given)
        out, saved = attend(rounded, softmax_scale=softmax_scale, config=config, exact=exact, **mask)
    return out.to(q.dtype), saved


def attend(
    rounded: Operands, *, m: int, n: int, causal: bool, softmax_scale: float, config: QuantConfig,
    window: int | None = None, exact: bool = False,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """`forward` of m queries and n keys that are rounded already: o [B, H, M, D] in FP32 (FP64)."""
    c, mask = config, _Mask(causal, window, m, n)
    saved = rounded.saved
    v_hat, v_scale = _tiles(rounded.v_hat, c.block_k), rounded.v_scale[..., None, None]
    out = torch.zeros_like(saved.q_hat)
    total = out.new_zeros(out.shape[:-1])  # l, of the unquantised P~
    peak = torch.full_like(total, -math.inf)  # m
    for u in range(v_hat.shape[-3]):
        rows = mask.rows(u, c)
        s = _logits(saved, u, rows, softmax_scale, mask, c)
        tile_peak = s.amax(-1)
        new_peak = torch.maximum(peak[..., rows], tile_peak)
        seen = tile_peak > -math.inf
        # One scale a row a tile, s_P = exp(rowmax S - m') / 127: P~ / s_P is then 127 exp(S - rowmax S). `out` and
        # `total` are kept 127 times too large until the end.
        p = torch.exp2(s - (torch.where(seen, tile_peak, 0.0) - LOG2_127)[..., None])
        p_hat = p if exact else torch.round(p)
        keep = torch.where(peak[..., rows] > -math.inf, torch.exp2(peak[..., rows] - new_peak), 0.0)
        weight = torch.where(seen, torch.exp2(tile_peak - new_peak), 0.0)
        total[..., rows] = total[..., rows] * keep + p.sum(-1) * weight
        pv = p_hat @ v_hat[:, :, None, u]
        out[..., rows, :] = out[..., rows, :] * keep[..., None] + pv * (weight[..., None] * v_scale[:, :, None, u])
        peak[..., rows] = new_peak
    out, lse2 = _normalised(out, total, peak, m)
    return out, saved._replace(lse2=lse2 - LOG2_127)


def _attend_scores(
    saved: Saved, v: Tensor, softmax_scale: float, mask: _Mask, config: QuantConfig
) -> tuple[Tensor, Saved]:
    """`attend` with products="scores": P~ = exp(S - m) is rounded to v's dtype, and V is as it came."""
    c, dtype, v = config, v.dtype, _tiles(_pad_rows(v.to(saved.q_hat.dtype), config.block_k), config.block_k)
    out = torch.zeros_like(saved.q_hat)
    total = out.new_zeros(out.shape[:-1])  # l, of the unrounded P~
    peak = torch.full_like(total, -math.inf)  # m
    for u in range(v.shape[-3]):
        rows = mask.rows(u, c)
        s = _logits(saved, u, rows, softmax_scale, mask, c)
        new_peak = torch.maximum(peak[..., rows], s.amax(-1))
        base = torch.where(new_peak == -math.inf, 0.0, new_peak)  # a row that sees nothing yet
        p = torch.exp2(s - base[..., None])
        keep = torch.exp2(peak[..., rows] - base)
        total[..., rows] = total[..., rows] * keep + p.sum(-1)
        out[..., rows, :] = out[..., rows, :] * keep[..., None] + _to(dtype, p) @ v[:, :, None, u]
        peak[..., rows] = new_peak
    out, lse2 = _normalised(out, total, peak, mask.m)
    return out, saved._replace(lse2=lse2)


def _normalised(out: Tensor, total: Tensor, peak: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """O [B, H, M, D] and lse2 [B, K, G, M'] of the m queries' sums P~ V, sums P~ and maxima."""
    out = out / torch.where(total > 0, total, 1.0)[..., None]
    out = torch.where(total.isnan()[..., None], torch.nan, out)
    blind = (total == 0) | (torch.arange(out.shape[-2], device=out.device) >= m)
    return out[..., :m, :].flatten(1, 2), torch.where(blind, math.inf, peak + torch.log2(total))


def backward(
    do: Tensor, v: Tensor, o: Tensor | None, saved: Saved,
    *, causal: bool, softmax_scale: float, config: QuantConfig, n: int, window: int | None = None, exact: bool = False,
    delta: Tensor | None = None, observer: Observer | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dq, dk, dv) in FP32 (FP64), [B, H, M, D] and [B, K, N, D], from dO [B, H, M, D], v, o and `saved`.

    dP = dO V^T uses dO and V as they came, not their INT8 forms. delta: of `delta_of`, where it is known already; o is
    then not read.

    config.project (GProj, arXiv 2609.34272, for INT8 operands). Softmax's backward has sum_j dS_ij = 0; the rounded
    dS^ has eps_i = sum_j s dS^_ij instead (s the scale of its row or tile): what all keys share leaks into dQ_i, and
    eps_i Q_i into sum_j dK_j. Both products take dS^ - lambda_i P^ in its place, lambda_i = eps_i / w_i and w_i =
    sum_j s P^_ij: rows that sum to zero, and nothing where P is nothing. dS and P are rounded as left operands of dQ,
    and again, transposed, as those of dV and dK; each rounding has its own eps, w and lambda.
        dQ_i = sum_j s dS^_ij K^_j - lambda_i sum_j s P^_ij K^_j: lambda_i leaves the sum, and is known when it ends.
        dK_j = sum_i s dS^_ij Q^_i - sum_i s P^_ij (lambda_i Q^_i): lambda_i stays inside, and must be known before. P^
            here is dV's left operand as it stands; lambda_i Q^_i is rounded anew, one scale a query tile.
    All products stay INT8, two more of them. A stale delta's error is of the form lambda_i P_ij too, and goes with the
    rest. Q-smoothing's own term of dK takes the unrounded dS: nothing to project out, but a stale delta stays in it.
    """
    c, m, heads = config, do.shape[-2], v.shape[1]
    mask = _Mask(causal, window, m, n)
    work = saved.q_hat.dtype
    if delta is None:
        args = {"causal": causal, "softmax_scale": softmax_scale, "config": config, "window": window}
        delta = delta_of(do, v, o, saved, n=n, **args)
    if c.products == "scores":
        return _scores_backward(do, v, saved, delta, softmax_scale, mask, c, observer)
    do = _pad_rows(do.to(work).unflatten(1, (heads, -1)), c.block_q)
    v = _pad_rows(v.to(work), c.block_k)
    do_hat, do_scale = quantise(_tiles(do, c.block_q), (-2, -1), exact=exact)  # [B, K, G, T, block_q, D], [..., 1, 1]
    q_hat = _tiles(saved.q_hat, c.block_q)
    tiles = v.shape[-2] // c.block_k

    def p_and_dp(u: int) -> tuple[slice, Tensor, Tensor]:
        return _p_and_dp(u, do, v, saved, softmax_scale, mask, c)

    if observer:
        observer.delta(delta)

    # Dimensions of a [block_q, block_k] tile that share one scale, for P and dS transposed (dV, dK) and for dS (dQ).
    transposed, plain = ((-2, -1), (-2, -1)) if c.granularity == "tile" else (-2, -1)
    if c.project:
        eps, weight = torch.zeros_like(saved.lse2), torch.zeros_like(saved.lse2)
        for u in range(tiles):
            rows, p, dp = p_and_dp(u)
            for x, row_sum in ((p * (dp - delta[..., rows, None]), eps), (p, weight)):
                hat, scale = quantise(_tiles(x, c.block_q), transposed, exact=exact)
                row_sum[..., rows] += (hat * scale).sum(-1).flatten(-2)
        shadow = _tiles(saved.q_hat * _multiple(eps, weight), c.block_q)  # lambda Q^
        shadow_hat, shadow_scale = quantise(shadow, (-2, -1), exact=exact)
    dq = torch.zeros_like(saved.q_hat)
    p_k, eps, weight = (torch.zeros_like(x) if c.project else None for x in (dq, saved.lse2, saved.lse2))
    dk = torch.zeros_like(saved.k_hat)
    dv = torch.zeros_like(saved.k_hat)
    for u in range(tiles):
        rows, p, dp = p_and_dp(u)
        ds = p * (dp - delta[..., rows, None])
        t = slice(rows.start // c.block_q, rows.stop // c.block_q)
        cols = slice(u * c.block_k, (u + 1) * c.block_k)
        p_hat, p_scale = quantise(_tiles(p, c.block_q), transposed, exact=exact)  # [B, K, G, t, block_q, block_k]
        dv[..., cols, :] = ((p_hat.mT @ do_hat[..., t, :, :]) * (p_scale.mT * do_scale[..., t, :, :])).sum((2, 3))
        ds_tiles = _tiles(ds, c.block_q)
        ds_hat, ds_scale = quantise(ds_tiles, transposed, exact=exact)
        part = (ds_hat.mT @ q_hat[..., t, :, :]) * (ds_scale.mT * saved.q_scale[..., t, None, None])
        if c.project:
            scale = p_scale.mT * (shadow_scale[..., t, :, :] * saved.q_scale[..., t, None, None])
            part = part - (p_hat.mT @ shadow_hat[..., t, :, :]) * scale
        if saved.q_mean is not None:  # Q = Q_smooth + mean: the mean's share takes the unquantised column sum of dS
            part = part + ds_tiles.sum(-2)[..., None] * saved.q_mean[..., t, None, :]
        dk[..., cols, :] = part.sum((2, 3)) * softmax_scale
        if observer:
            hat, scale = quantise(ds_tiles, plain, exact=exact)
            rounded = {"p_rounded": (p_hat * p_scale).flatten(-3, -2), "ds_rounded": (hat * scale).flatten(-3, -2)}
            observer.tile(rows, cols, p=p, dp=dp, ds=ds, **rounded)
        for x, product, row_sum in ((ds_tiles, dq, eps), (_tiles(p, c.block_q), p_k, weight)):
            if product is None:
                continue
            hat, scale = quantise(x, plain, exact=exact)
            part = (hat @ _tiles(saved.k_hat, c.block_k)[:, :, None, u, None]) * scale
            product[..., rows, :] += part.flatten(-3, -2) * saved.k_scale[:, :, None, u, None, None]
            if row_sum is not None:
                row_sum[..., rows] += (hat * scale).sum(-1).flatten(-2)
    if c.project:
        dq = dq - p_k * _multiple(eps, weight)
    return (dq[..., :m, :] * softmax_scale).flatten(1, 2), dk[..., :n, :], dv[..., :n, :]


def _scores_backward(
    do: Tensor, v: Tensor, saved: Saved, delta: Tensor, softmax_scale: float, mask: _Mask, c: QuantConfig,
    observer: Observer | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`backward` with products="scores": P and dS are rounded to dO's dtype, Q, V and dO are as they came.

    dQ takes the smoothed K: what rounding and a stale delta leave in the rows of dS would be multiplied by K's mean.
    """
    dtype, work = do.dtype, saved.q_hat.dtype
    do = _pad_rows(do.to(work).unflatten(1, (v.shape[1], -1)), c.block_q)
    v = _pad_rows(v.to(work), c.block_k)
    if observer:
        observer.delta(delta)
    dq, dk, dv = torch.zeros_like(saved.q), torch.zeros_like(saved.k_smooth), torch.zeros_like(v)
    for u in range(v.shape[-2] // c.block_k):
        rows, p, dp = _p_and_dp(u, do, v, saved, softmax_scale, mask, c)
        cols = slice(u * c.block_k, (u + 1) * c.block_k)
        ds = p * (dp - delta[..., rows, None])
        p_rounded, ds_rounded = _to(dtype, p), _to(dtype, ds)
        if observer:
            observer.tile(rows, cols, p=p, dp=dp, ds=ds, p_rounded=p_rounded, ds_rounded=ds_rounded)
        dv[..., cols, :] = (p_rounded.mT @ do[..., rows, :]).sum(2)
        dk[..., cols, :] = (ds_rounded.mT @ saved.q[..., rows, :]).sum(2) * softmax_scale
        dq[..., rows, :] += ds_rounded @ saved.k_smooth[:, :, None, cols]
    return (dq[..., : mask.m, :] * softmax_scale).flatten(1, 2), dk[..., : mask.n, :], dv[..., : mask.n, :]


def delta_of(
    do: Tensor, v: Tensor, o: Tensor, saved: Saved,
    *, causal: bool, softmax_scale: float, config: QuantConfig, n: int, window: int | None = None,
) -> Tensor:  # fmt: skip
    """What `backward` subtracts from a query's dP, [B, K, G, M'], by config.delta; arguments as it takes."""
    c, m, heads, work = config, do.shape[-2], v.shape[1], saved.q_hat.dtype
    do = _pad_rows(do.to(work).unflatten(1, (heads, -1)), c.block_q)
    if c.delta == "stale":
        return (do * _pad_rows(o.to(work).unflatten(1, (heads, -1)), c.block_q)).sum(-1)
    v, mask = _pad_rows(v.to(work), c.block_k), _Mask(causal, window, m, n)
    delta = torch.zeros_like(saved.lse2)
    for u in range(v.shape[-2] // c.block_k):
        rows, p, dp = _p_and_dp(u, do, v, saved, softmax_scale, mask, c)
        delta[..., rows] += (p * dp).sum(-1)
    return delta


def _p_and_dp(
    u: int, do: Tensor, v: Tensor, saved: Saved, softmax_scale: float, mask: _Mask, c: QuantConfig
) -> tuple[slice, Tensor, Tensor]:
    """Key tile u: the queries that see some of it, and P and dP [B, K, G, rows, block_k] of these. do and v: padded."""
    rows = mask.rows(u, c)
    s = _logits(saved, u, rows, softmax_scale, mask, c)
    p = torch.exp2(s - saved.lse2[..., rows, None])
    return rows, p, do[..., rows, :] @ v[:, :, None, u * c.block_k : (u + 1) * c.block_k].mT


def _multiple(eps: Tensor, weight: Tensor) -> Tensor:
    """lambda [..., M', 1]; 0 where a query sees no key or is padding."""
    return torch.where(weight == 0, 0.0, eps / weight)[..., None]


def forward_packed(q: Tensor, k: Tensor, v: Tensor, *, packed: Packed, **kwargs) -> tuple[Tensor, list[Saved]]:
    """`forward` of one document after another: o, and `Saved` of each document that has both queries and keys.

    q [1, H, tokens, D], k and v [1, K, tokens, D]; kwargs as `forward` takes. A token in no document gets zeros.
    """
    o, saved = torch.zeros_like(q), []
    for rows, cols in documents(packed):
        o[..., rows, :], kept = forward(q[..., rows, :], k[..., cols, :], v[..., cols, :], **kwargs)
        saved.append(kept)
    return o, saved


def backward_packed(
    do: Tensor, v: Tensor, o: Tensor, saved: list[Saved], *, packed: Packed, **kwargs
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` of one document after another, from what `forward_packed` kept; kwargs as `backward` takes, but n."""
    work = torch.float64 if do.dtype == torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros_like(x, dtype=work) for x in (do, v, v))
    for (rows, cols), kept in zip(documents(packed), saved, strict=True):
        dq[..., rows, :], dk[..., cols, :], dv[..., cols, :] = backward(
            do[..., rows, :], v[..., cols, :], o[..., rows, :], kept, n=cols.stop - cols.start, **kwargs
        )
    return dq, dk, dv


def documents(packed: Packed) -> list[tuple[slice, slice]]:
    """Tokens of q and of k of each document that has both: only these have anything but zeros as their results."""
    rows, cols = ([slice(*ends) for ends in pairwise(x.tolist())] for x in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    return [(r, c) for r, c in zip(rows, cols, strict=True) if r.start < r.stop and c.start < c.stop]
