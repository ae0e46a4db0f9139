"""Forward and backward with products="scores": S = Q K^T in INT8, every other product of 16-bit operands.

The loops are those of `forward` and `backward`, and so is who computes what: dK and dV with a key tile a program, dQ
with a query tile a program, no atomics. The sums of both dK and dV fit in registers here: a 16-bit product adds to its
sum by itself; and matrix units contract over either axis of a 16-bit operand, so that none is transposed beforehand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels import tuning
from sagebwd.kernels.common import document, key_range, query_range, visible
from sagebwd.kernels.launch import launch
from sagebwd.kernels.packing import Tables
from sagebwd.kernels.quantise import Quantised


@triton.jit
def _load_rows(x, start, d, length, x_l, x_d, D: tl.constexpr, ROWS: tl.constexpr):
    """Tokens [start, start + ROWS) of x [length, D] in 16 bit, zeros outside of it."""
    rows = tl.arange(0, ROWS)
    at = rows.to(tl.int64)[:, None] * x_l + d.to(tl.int64)[None, :] * x_d
    x += start.to(tl.int64) * x_l
    return tl.load(x + at, mask=(start + rows < length)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _forward_tiles(
    out, peak, total, queries, row_factor, lo, hi, k_hat, k_scale, v, v_n, v_d, rows, d, m, n, window,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles of [lo, hi)."""
    for start in range(lo, hi, BN):
        start = tl.multiple_of(start, BN)
        cols = start + tl.arange(0, BN)
        keys = tl.load(k_hat + cols[:, None] * DP + d[None, :])
        s = tl.dot(queries, tl.trans(keys), out_dtype=tl.int32).to(tl.float32)
        factor = row_factor * tl.load(k_scale + start // BN)
        # Scaling keeps the order of scores: without a mask the maximum comes first, and the multiplication goes into
        # the exponent's fused one.
        if MASKED:
            s = tl.where(visible(rows[:, None], cols[None, :], m, n, window, CAUSAL), s * factor, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(s, 1))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that sees nothing yet
        else:
            new_peak = tl.maximum(peak, tl.max(s, 1) * tl.reshape(factor, peak.shape))
            base = new_peak
            s = s * factor
        p = tl.math.exp2(s - base[:, None])
        keep = tl.math.exp2(peak - base)
        total = total * keep + tl.sum(p, 1)
        values = _load_rows(v, start, d, n, v_n, v_d, D, BN)
        out = tl.dot(p.to(values.dtype), values, out * keep[:, None], input_precision="ieee")
        peak = new_peak
    return out, peak, total


@triton.jit(do_not_specialize=["heads", "group", "m", "n", "window", "row_tiles"])
def _scores_forward(
    q_hat, q_scale, k_hat, k_scale, v, o, lse2, documents,
    v_b, v_h, v_n, v_d, o_b, o_h, o_m, o_d, heads, group, m, n, m_pad, n_pad, window, factor, row_tiles,
    CAUSAL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = (pid // row_tiles).to(tl.int64)
    tile = pid % row_tiles
    if CAUSAL:  # the longest rows first, so that the short ones fill the tail
        tile = row_tiles - 1 - tile
    kv = bh // group
    q_hat += bh * m_pad * DP
    q_scale += bh * (m_pad // BQ)
    lse2 += bh * m_pad
    o += (bh // heads) * o_b + (bh % heads) * o_h
    k_hat += kv * n_pad * DP
    k_scale += kv * (n_pad // BN)
    v += (bh // heads) * v_b + (kv % (heads // group)) * v_h
    if documents is not None:
        q_first, m, q_row, k_first, n, k_row = document(documents, tile * BM)
        tile -= q_row // BM
        n = tl.where(tile * BM < m, n, 0)  # a tile of padding sees nothing
        q_hat += q_row * DP
        q_scale += q_row // BQ
        lse2 += q_row
        o += q_first * o_m
        k_hat += k_row * DP
        k_scale += k_row // BN
        v += k_first * v_n
    rows = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    queries = tl.load(q_hat + rows[:, None] * DP + d[None, :])
    row_factor = tl.load(q_scale + rows // BQ)[:, None] * factor

    out = tl.zeros((BM, DP), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    lo, inner, full, hi = key_range(tile, m, n, window, CAUSAL, BM, BN)
    if window is not None:
        out, peak, total = _forward_tiles(
            out, peak, total, queries, row_factor, lo, inner, k_hat, k_scale, v, v_n, v_d, rows, d, m, n, window,
            CAUSAL, True, D, DP, BN,
        )  # fmt: skip
    out, peak, total = _forward_tiles(
        out, peak, total, queries, row_factor, inner, full, k_hat, k_scale, v, v_n, v_d, rows, d, m, n, window,
        CAUSAL, False, D, DP, BN,
    )  # fmt: skip
    out, peak, total = _forward_tiles(
        out, peak, total, queries, row_factor, full, hi, k_hat, k_scale, v, v_n, v_d, rows, d, m, n, window,
        CAUSAL, True, D, DP, BN,
    )  # fmt: skip
    blind = total == 0.0
    out = out / tl.where(blind, 1.0, total)[:, None]
    tl.store(lse2 + rows, tl.where(blind | (rows >= m), float("inf"), peak + tl.log2(total)))
    at = o + rows.to(tl.int64)[:, None] * o_m + d.to(tl.int64)[None, :] * o_d
    tl.store(at, out.to(o.dtype.element_ty), mask=(rows < m)[:, None] & (d < D)[None, :])


def forward(
    q: Quantised, k: Quantised, v: Tensor, o: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig, window: int | None, documents: Tensor | None,
) -> Tensor:  # fmt: skip
    """Writes o [B, H, M, D] and returns lse2 [B H, M'] fp32, as the reference's `Saved.lse2`.

    q and k hold rows. v [B, K, N, D] as it came, any strides. documents: the queries' table of packing.Tables.
    """
    b, h, m, dim = o.shape
    kv_heads, n = v.shape[1:3]
    m_pad, dp = q.rows.shape[1:]
    tune = tuning.scores_forward(o.device, dp, config)
    lse2 = torch.empty((b * h, m_pad), dtype=torch.float32, device=o.device)
    row_tiles = m_pad // tune.rows
    launch(
        _scores_forward, b * h * row_tiles,
        (q.rows, q.scale, k.rows, k.scale, v, o, lse2, documents),
        (
            *v.stride(), *o.stride(), h, h // kv_heads, m, n, m_pad, k.rows.shape[1], window,
            softmax_scale * tuning.LOG2E, row_tiles,
        ),
        CAUSAL=causal, D=dim, DP=dp, BQ=config.block_q, BM=tune.rows, BN=config.block_k,
        num_warps=tune.warps, num_stages=tune.stages,
    )  # fmt: skip
    return lse2


@triton.jit
def _query_tiles(
    dk, dv, keys, values, k_factor, lo, hi, cols, q_hat, q_scale, q, q_m, q_d, do, do_m, do_d, statistics,
    d, m, n, window, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles of [lo, hi) to dK (without the softmax scale) and dV of one key tile."""
    for start in range(lo, hi, BM):
        start = tl.multiple_of(start, BM)
        rows = start + tl.arange(0, BM)
        rounded = tl.load(q_hat + rows[:, None] * DP + d[None, :])
        s = tl.dot(keys, tl.trans(rounded), out_dtype=tl.int32).to(tl.float32)  # [BN, BM]: everything is transposed
        s = s * ((tl.load(q_scale + start // BQ) * factor) * k_factor)
        # As many numbers as threads: each is loaded once, and not by every thread that will use it.
        lse2, delta = tl.split(tl.load(statistics + rows[:, None] * 2 + tl.arange(0, 2)[None, :]))
        p = tl.math.exp2(s - lse2[None, :])
        if MASKED:
            p = tl.where(visible(rows[None, :], cols[:, None], m, n, window, CAUSAL), p, 0.0)
        grads = _load_rows(do, start, d, m, do_m, do_d, D, BM)
        dv = tl.dot(p.to(grads.dtype), grads, dv, input_precision="ieee")
        dp = tl.dot(values, tl.trans(grads), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        queries = _load_rows(q, start, d, m, q_m, q_d, D, BM)
        dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["heads", "group", "m", "n", "window", "key_tiles"])
def _scores_backward_kv(
    q_hat, q_scale, k_hat, k_scale, q, do, v, statistics, dk, dv, documents,
    q_b, q_h, q_m, q_d, do_b, do_h, do_m, do_d, v_b, v_h, v_n, v_d, dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    heads, group, m, n, m_pad, n_pad, window, softmax_scale, factor, key_tiles,
    CAUSAL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    kv = (pid // key_tiles).to(tl.int64)
    tile = pid % key_tiles  # with a causal mask the first keys have the most queries: they start first
    kv_heads = heads // group
    b = kv // kv_heads
    head = kv % kv_heads
    k_hat += kv * n_pad * DP
    k_scale += kv * (n_pad // BK)
    v += b * v_b + head * v_h
    dk += b * dk_b + head * dk_h
    dv += b * dv_b + head * dv_h
    q += b * q_b
    do += b * do_b
    if documents is not None:
        k_first, n, k_row, q_first, m, q_row = document(documents, tile * BN)
        tile -= k_row // BN
        m = tl.where(tile * BN < n, m, 0)  # a tile of padding is seen by none
        k_hat += k_row * DP
        k_scale += k_row // BK
        v += k_first * v_n
        dk += k_first * dk_n
        dv += k_first * dv_n
        q += q_first * q_m
        do += q_first * do_m
        q_hat += q_row * DP
        q_scale += q_row // BQ
        statistics += q_row * 2
    cols = tile * BN + tl.arange(0, BN)
    d = tl.arange(0, DP)
    keys = tl.load(k_hat + cols[:, None] * DP + d[None, :])
    k_factor = tl.load(k_scale + cols // BK)[:, None]
    values = _load_rows(v, tile * BN, d, n, v_n, v_d, D, BN)

    dk_sum = tl.zeros((BN, DP), tl.float32)
    dv_sum = tl.zeros((BN, DP), tl.float32)
    lo, inner, full, hi = query_range(tile, m, n, window, CAUSAL, BM, BN)
    for g in range(group):
        bh = kv * group + g
        q_head = q + (head * group + g) * q_h
        do_head = do + (head * group + g) * do_h
        dk_sum, dv_sum = _query_tiles(
            dk_sum, dv_sum, keys, values, k_factor, lo, inner, cols, q_hat + bh * m_pad * DP,
            q_scale + bh * (m_pad // BQ), q_head, q_m, q_d, do_head, do_m, do_d, statistics + bh * m_pad * 2,
            d, m, n, window, factor, CAUSAL, True, D, DP, BQ, BM,
        )  # fmt: skip
        dk_sum, dv_sum = _query_tiles(
            dk_sum, dv_sum, keys, values, k_factor, inner, full, cols, q_hat + bh * m_pad * DP,
            q_scale + bh * (m_pad // BQ), q_head, q_m, q_d, do_head, do_m, do_d, statistics + bh * m_pad * 2,
            d, m, n, window, factor, CAUSAL, False, D, DP, BQ, BM,
        )  # fmt: skip
        if window is not None:
            dk_sum, dv_sum = _query_tiles(
                dk_sum, dv_sum, keys, values, k_factor, full, hi, cols, q_hat + bh * m_pad * DP,
                q_scale + bh * (m_pad // BQ), q_head, q_m, q_d, do_head, do_m, do_d, statistics + bh * m_pad * 2,
                d, m, n, window, factor, CAUSAL, True, D, DP, BQ, BM,
            )  # fmt: skip
    valid = (cols < n)[:, None] & (d < D)[None, :]
    at = dk + cols.to(tl.int64)[:, None] * dk_n + d.to(tl.int64)[None, :] * dk_d
    tl.store(at, (dk_sum * softmax_scale).to(dk.dtype.element_ty), mask=valid)
    at = dv + cols.to(tl.int64)[:, None] * dv_n + d.to(tl.int64)[None, :] * dv_d
    tl.store(at, dv_sum.to(dv.dtype.element_ty), mask=valid)


@triton.jit
def _key_tiles(
    dq, queries, grads, row_factor, row_lse2, row_delta, lo, hi, rows, k_hat, k_scale, k_smooth, v, v_n, v_d,
    d, m, n, window,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles of [lo, hi) to dQ (without the softmax scale)."""
    for start in range(lo, hi, BN):
        start = tl.multiple_of(start, BN)
        cols = start + tl.arange(0, BN)
        rounded = tl.load(k_hat + cols[:, None] * DP + d[None, :])
        s = tl.dot(queries, tl.trans(rounded), out_dtype=tl.int32).to(tl.float32)
        p = tl.math.exp2(s * (row_factor * tl.load(k_scale + start // BN)) - row_lse2[:, None])
        if MASKED:
            p = tl.where(visible(rows[:, None], cols[None, :], m, n, window, CAUSAL), p, 0.0)
        dp = tl.dot(grads, tl.trans(_load_rows(v, start, d, n, v_n, v_d, D, BN)), input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        keys = tl.load(k_smooth + cols[:, None] * DP + d[None, :])
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["heads", "group", "m", "n", "window", "row_tiles"])
def _scores_backward_q(
    q_hat, q_scale, k_hat, k_scale, k_smooth, do, v, statistics, dq, documents,
    do_b, do_h, do_m, do_d, v_b, v_h, v_n, v_d, dq_b, dq_h, dq_m, dq_d,
    heads, group, m, n, m_pad, n_pad, window, softmax_scale, factor, row_tiles,
    CAUSAL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = (pid // row_tiles).to(tl.int64)
    tile = pid % row_tiles
    if CAUSAL:
        tile = row_tiles - 1 - tile
    b = bh // heads
    kv = bh // group
    q_hat += bh * m_pad * DP
    q_scale += bh * (m_pad // BQ)
    statistics += bh * m_pad * 2
    do += b * do_b + (bh % heads) * do_h
    dq += b * dq_b + (bh % heads) * dq_h
    k_hat += kv * n_pad * DP
    k_smooth += kv * n_pad * DP
    k_scale += kv * (n_pad // BN)
    v += b * v_b + (kv % (heads // group)) * v_h
    if documents is not None:
        q_first, m, q_row, k_first, n, k_row = document(documents, tile * BM)
        tile -= q_row // BM
        n = tl.where(tile * BM < m, n, 0)  # a tile of padding sees nothing
        q_hat += q_row * DP
        q_scale += q_row // BQ
        statistics += q_row * 2
        do += q_first * do_m
        dq += q_first * dq_m
        k_hat += k_row * DP
        k_smooth += k_row * DP
        k_scale += k_row // BN
        v += k_first * v_n
    rows = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    queries = tl.load(q_hat + rows[:, None] * DP + d[None, :])
    row_factor = tl.load(q_scale + rows // BQ)[:, None] * factor
    grads = _load_rows(do, tile * BM, d, m, do_m, do_d, D, BM)
    row_lse2 = tl.load(statistics + rows * 2)
    row_delta = tl.load(statistics + rows * 2 + 1)

    dq_sum = tl.zeros((BM, DP), tl.float32)
    lo, inner, full, hi = key_range(tile, m, n, window, CAUSAL, BM, BN)
    if window is not None:
        dq_sum = _key_tiles(
            dq_sum, queries, grads, row_factor, row_lse2, row_delta, lo, inner, rows,
            k_hat, k_scale, k_smooth, v, v_n, v_d, d, m, n, window, CAUSAL, True, D, DP, BN,
        )  # fmt: skip
    dq_sum = _key_tiles(
        dq_sum, queries, grads, row_factor, row_lse2, row_delta, inner, full, rows,
        k_hat, k_scale, k_smooth, v, v_n, v_d, d, m, n, window, CAUSAL, False, D, DP, BN,
    )  # fmt: skip
    dq_sum = _key_tiles(
        dq_sum, queries, grads, row_factor, row_lse2, row_delta, full, hi, rows,
        k_hat, k_scale, k_smooth, v, v_n, v_d, d, m, n, window, CAUSAL, True, D, DP, BN,
    )  # fmt: skip
    at = dq + rows.to(tl.int64)[:, None] * dq_m + d.to(tl.int64)[None, :] * dq_d
    tl.store(at, (dq_sum * softmax_scale).to(dq.dtype.element_ty), mask=(rows < m)[:, None] & (d < D)[None, :])


def backward(
    q8: Quantised, k8: Quantised, statistics: Tensor, q: Tensor, do: Tensor, v: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig, window: int | None, documents: Tables | None,
) -> None:  # fmt: skip
    """Writes dq [B, H, M, D], dk and dv [B, K, N, D] (any strides).

    q8 holds rows, k8 rows and the smoothed K. statistics [B H, M', 2] fp32 of rows: lse2 and delta. q and do
    [B, H, M, D] and v [B, K, N, D] as they came.
    """
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    m_pad, dp = q8.rows.shape[1:]
    n_pad = k8.rows.shape[1]
    query_documents, key_documents = (None, None) if documents is None else documents
    sizes = (h, h // kv_heads, m, n, m_pad, n_pad, window, softmax_scale, softmax_scale * tuning.LOG2E)
    tune = tuning.scores_backward_kv(do.device, dp, config)
    key_tiles = n_pad // tune.rows
    launch(
        _scores_backward_kv, b * kv_heads * key_tiles,
        (q8.rows, q8.scale, k8.rows, k8.scale, q, do, v, statistics, dk, dv, key_documents),
        (*q.stride(), *do.stride(), *v.stride(), *dk.stride(), *dv.stride(), *sizes, key_tiles),
        CAUSAL=causal, D=dim, DP=dp, BQ=config.block_q, BK=config.block_k, BM=tuning.scores_step(config),
        BN=tune.rows, num_warps=tune.warps, num_stages=tune.stages,
    )  # fmt: skip
    tune = tuning.scores_backward_q(do.device, dp, config)
    row_tiles = m_pad // tune.rows
    launch(
        _scores_backward_q, b * h * row_tiles,
        (q8.rows, q8.scale, k8.rows, k8.scale, k8.smoothed, do, v, statistics, dq, query_documents),
        (*do.stride(), *v.stride(), *dq.stride(), *sizes, row_tiles),
        CAUSAL=causal, D=dim, DP=dp, BQ=config.block_q, BM=tune.rows, BN=config.block_k,
        num_warps=tune.warps, num_stages=tune.stages,
    )  # fmt: skip
