"""Forward: INT8 S = Q K^T and O = P V with an online softmax, FP32 between and across tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels import tuning
from sagebwd.kernels.common import LOG2_127, SLOT, document, fragment_order, key_range, to_int8, visible
from sagebwd.kernels.launch import launch
from sagebwd.kernels.quantise import Quantised


@triton.jit
def mean_logits(q_mean, k, k_mean, cols, d, n, k_n, k_d, factor, D: tl.constexpr):
    """The query tile mean's product with unquantised smoothed keys, as base-2 logits: one for each of `cols`."""
    valid = (cols < n)[:, None] & (d < D)[None, :]
    at = k + cols.to(tl.int64)[:, None] * k_n + d.to(tl.int64)[None, :] * k_d
    keys = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    if k_mean is not None:
        keys -= tl.load(k_mean + d)[None, :]
    return tl.sum(tl.where(valid, keys, 0.0) * q_mean[None, :], 1) * factor


@triton.jit
def _key_tiles(
    out, peak, total, q, row_factor, lo, hi,
    k_hat, k_scale, v_columns, v_scale, q_mean, k, k_mean, k_n, k_d,
    rows, d, m, n, n_pad, window, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles of [lo, hi). `out` and `total` are kept 127 times too large: P^ = 127 P."""
    for start in range(lo, hi, BN):
        start = tl.multiple_of(start, BN)
        cols = start + tl.arange(0, BN)
        keys = tl.load(k_hat + cols[:, None] * DP + d[None, :])
        s = tl.dot(q, tl.trans(keys), out_dtype=tl.int32).to(tl.float32)
        tile_factor = row_factor * tl.load(k_scale + start // BN)
        # Scaling keeps the order of scores: without a mask or a bias the maximum comes first, and the multiplication
        # goes into the exponent's fused one. (A masked -inf times the scale 0 of an all-zero tile would be NaN.)
        SCALE_LATE: tl.constexpr = q_mean is None and not MASKED
        if not SCALE_LATE:
            s = s * tile_factor
        if q_mean is not None:
            s += mean_logits(q_mean, k, k_mean, cols, d, n, k_n, k_d, factor, D)[None, :]
        if MASKED:
            s = tl.where(visible(rows[:, None], cols[None, :], m, n, window, CAUSAL), s, float("-inf"))
        tile_peak = tl.max(s, 1)
        if SCALE_LATE:
            tile_peak *= tl.reshape(tile_factor, tile_peak.shape)
            s = s * tile_factor
        new_peak = tl.maximum(peak, tile_peak)
        base = tile_peak
        new_base = new_peak
        if MASKED:  # a row that sees nothing yet: exp2(-inf - 0) is the 0 that is wanted, exp2(-inf + inf) is not
            base = tl.where(tile_peak == float("-inf"), 0.0, tile_peak)
            new_base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.math.exp2(s - (base - LOG2_127)[:, None])
        weight = tl.math.exp2(tile_peak - new_base)
        keep = tl.math.exp2(peak - new_base)
        total = total * keep + tl.sum(p, 1) * weight
        values = tl.load(v_columns + d[:, None] * n_pad + cols[None, :])
        pv = tl.dot(fragment_order(to_int8(p)), tl.trans(values), out_dtype=tl.int32).to(tl.float32)
        out = out * keep[:, None] + pv * (weight * tl.load(v_scale + start // BN))[:, None]
        peak = new_peak
    return out, peak, total


@triton.jit
def _key_tile_pairs(
    out, peak, total, q, row_factor, lo, hi, k_hat, k_scale, v_columns, v_scale, d, n_pad,
    DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`_key_tiles` without mask or bias, two tiles a step: the sums are rescaled once for both, and the matrix units
    work at one tile while the other is rounded. [lo, hi) is whole pairs."""
    for start in range(lo, hi, 2 * BN):
        start = tl.multiple_of(start, BN)
        cols = start + tl.arange(0, BN)
        after = cols + BN
        s0 = tl.dot(q, tl.trans(tl.load(k_hat + cols[:, None] * DP + d[None, :])), out_dtype=tl.int32)
        s1 = tl.dot(q, tl.trans(tl.load(k_hat + after[:, None] * DP + d[None, :])), out_dtype=tl.int32)
        p0, peak0 = _weights(s0, row_factor * tl.load(k_scale + start // BN))
        p1, peak1 = _weights(s1, row_factor * tl.load(k_scale + start // BN + 1))
        new_peak = tl.maximum(peak, tl.maximum(peak0, peak1))
        weight0 = tl.math.exp2(peak0 - new_peak)
        weight1 = tl.math.exp2(peak1 - new_peak)
        keep = tl.math.exp2(peak - new_peak)
        total = total * keep + tl.sum(p0, 1) * weight0 + tl.sum(p1, 1) * weight1
        v0 = tl.load(v_columns + d[:, None] * n_pad + cols[None, :])
        v1 = tl.load(v_columns + d[:, None] * n_pad + after[None, :])
        pv0 = tl.dot(fragment_order(to_int8(p0)), tl.trans(v0), out_dtype=tl.int32).to(tl.float32)
        pv1 = tl.dot(fragment_order(to_int8(p1)), tl.trans(v1), out_dtype=tl.int32).to(tl.float32)
        out = out * keep[:, None] + pv0 * (weight0 * tl.load(v_scale + start // BN))[:, None]
        out += pv1 * (weight1 * tl.load(v_scale + start // BN + 1))[:, None]
        peak = new_peak
    return out, peak, total


@triton.jit
def _weights(s, tile_factor):
    """127 times exp2 of the scaled scores less their row's maximum, and that maximum [BM]."""
    s = s.to(tl.float32)
    peak = tl.max(s, 1) * tl.reshape(tile_factor, (s.shape[0],))
    return tl.math.exp2(s * tile_factor - (peak - LOG2_127)[:, None]), peak


@triton.jit(do_not_specialize=["heads", "group", "m", "n", "window", "row_tiles"])
def _forward(
    q_hat, q_scale, q_mean, k_hat, k_scale, v_columns, v_scale, k, k_mean, o, lse2, documents,
    k_b, k_h, k_n, k_d, o_b, o_h, o_m, o_d,
    heads, group, m, n, m_pad, n_pad, window, factor, row_tiles,
    CAUSAL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = (pid // row_tiles).to(tl.int64)
    tile = pid % row_tiles
    if CAUSAL:  # the longest rows first, so that the short ones fill the tail
        tile = row_tiles - 1 - tile
    b = bh // heads
    kv = bh // group  # = b * kv_heads + kv_head: heads of a group lie side by side
    q_hat += bh * m_pad * DP
    q_scale += bh * (m_pad // BQ)
    lse2 += bh * m_pad
    o += b * o_b + (bh % heads) * o_h
    k_hat += kv * n_pad * DP
    v_columns += kv * n_pad * DP
    k_scale += kv * (n_pad // BN)
    v_scale += kv * (n_pad // BN)
    if q_mean is not None:
        q_mean += bh * (m_pad // BQ) * DP
        k += b * k_b + (kv % (heads // group)) * k_h
    mean_row = kv
    if documents is not None:
        q_first, m, q_row, k_first, n, k_row = document(documents, tile * BM)
        tile -= q_row // BM
        n = tl.where(tile * BM < m, n, 0)  # a tile of padding sees nothing
        q_hat += q_row * DP
        q_scale += q_row // BQ
        lse2 += q_row
        o += q_first * o_m
        k_hat += k_row * DP
        v_columns += k_row
        k_scale += k_row // BN
        v_scale += k_row // BN
        mean_row = kv * (n_pad // SLOT) + k_row // SLOT
        if q_mean is not None:
            q_mean += q_row // BQ * DP
            k += k_first * k_n
    rows = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    q = tl.load(q_hat + rows[:, None] * DP + d[None, :])
    row_factor = tl.load(q_scale + rows // BQ)[:, None] * factor
    mean = None
    if q_mean is not None:
        mean = tl.load(q_mean + tile * DP + d)
        if k_mean is not None:
            k_mean += mean_row * DP

    out = tl.zeros((BM, DP), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    lo, inner, full, hi = key_range(tile, m, n, window, CAUSAL, BM, BN)
    if window is not None:
        out, peak, total = _key_tiles(
            out, peak, total, q, row_factor, lo, inner,
            k_hat, k_scale, v_columns, v_scale, mean, k, k_mean, k_n, k_d, rows, d, m, n, n_pad, window, factor,
            CAUSAL, True, D, DP, BN,
        )  # fmt: skip
    if PAIRS:
        pairs = inner + tl.maximum(0, full - inner) // (2 * BN) * (2 * BN)
        out, peak, total = _key_tile_pairs(
            out, peak, total, q, row_factor, inner, pairs, k_hat, k_scale, v_columns, v_scale, d, n_pad, DP, BN
        )  # fmt: skip
        full = pairs  # what is left over goes with the masked tiles
    else:
        out, peak, total = _key_tiles(
            out, peak, total, q, row_factor, inner, full,
            k_hat, k_scale, v_columns, v_scale, mean, k, k_mean, k_n, k_d, rows, d, m, n, n_pad, window, factor,
            CAUSAL, False, D, DP, BN,
        )  # fmt: skip
    out, peak, total = _key_tiles(
        out, peak, total, q, row_factor, full, hi,
        k_hat, k_scale, v_columns, v_scale, mean, k, k_mean, k_n, k_d, rows, d, m, n, n_pad, window, factor,
        CAUSAL, True, D, DP, BN,
    )  # fmt: skip
    blind = total == 0.0
    out = out / tl.where(blind, 1.0, total)[:, None]
    tl.store(lse2 + rows, tl.where(blind | (rows >= m), float("inf"), peak + tl.log2(total) - LOG2_127))
    at = o + rows.to(tl.int64)[:, None] * o_m + d.to(tl.int64)[None, :] * o_d
    tl.store(at, out.to(o.dtype.element_ty), mask=(rows < m)[:, None] & (d < D)[None, :])


def forward(
    q: Quantised, k: Quantised, v: Quantised, k_source: Tensor, k_mean: Tensor | None, o: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig, window: int | None, documents: Tensor | None,
) -> Tensor:  # fmt: skip
    """Writes o [B, H, M, D] (any strides) and returns lse2 [B H, M'] fp32, as the reference's `Saved.lse2`.

    q and k hold rows, v holds columns. k_source [B, K, N, D] and k_mean (of `mean.key_mean`) are read with Q-smoothing
    only. documents: the queries' table of packing.Tables.
    """
    b, h, m, dim = o.shape
    kv_heads, n = k_source.shape[1:3]
    m_pad, dp = q.rows.shape[1:]
    n_pad = k.rows.shape[1]
    tune = tuning.forward(o.device, dp, config)
    lse2 = torch.empty((b * h, m_pad), dtype=torch.float32, device=o.device)
    row_tiles = m_pad // tune.rows
    factor = softmax_scale * tuning.LOG2E
    launch(
        _forward, b * h * row_tiles,
        (q.rows, q.scale, q.tile_mean, k.rows, k.scale, v.columns, v.scale, k_source, k_mean, o, lse2, documents),
        (*k_source.stride(), *o.stride(), h, h // kv_heads, m, n, m_pad, n_pad, window, factor, row_tiles),
        CAUSAL=causal, D=dim, DP=dp, BQ=config.block_q, BM=tune.rows, BN=config.block_k,
        PAIRS=tuning.pairs(dp, config.block_k, config.smooth_q),
        num_warps=tune.warps, num_stages=tune.stages,
    )  # fmt: skip
    return lse2
