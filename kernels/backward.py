"""Backward: dK and dV with a key tile a program, in one kernel or in two; dQ with a query tile a program. No atomics.

dK and dV in one kernel share S, but both sums stay in registers: where these would spill, two kernels are faster.

Each product with P or dS on its left is formed where that operand's rows are at hand: P^T and dS^T in the key kernel,
dS in the query kernel. A scale a row then needs no reduction across warps, and every sum has one order.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels import tuning
from sagebwd.kernels.common import SLOT, document, fragment_order, key_range, quantise_left, query_range, visible
from sagebwd.kernels.forward import mean_logits
from sagebwd.kernels.launch import launch
from sagebwd.kernels.packing import Tables
from sagebwd.kernels.quantise import Quantised

log = logging.getLogger("sagebwd")


@triton.jit
def _query_tiles(
    dk, dv, keys, values, k_factor, lo, hi, kv_cols,
    q_hat, q_columns, q_scale, q_mean, do_columns, do_scale, statistics, multiple, do, do_m, do_d,
    k, k_mean, k_n, k_d, d, m, n, m_pad, window, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PER_ROW: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles of [lo, hi) to dK (without the softmax scale) and dV of one key tile, or one of them."""
    for start in range(lo, hi, BM):
        start = tl.multiple_of(start, BM)
        rows = start + tl.arange(0, BM)
        q_scale_tile = tl.load(q_scale + start // BM)
        queries = tl.load(q_hat + rows[:, None] * DP + d[None, :])
        s = tl.dot(keys, tl.trans(queries), out_dtype=tl.int32).to(tl.float32)  # [BN, BM]: everything is transposed
        s = s * ((q_scale_tile * factor) * k_factor)
        mean = None
        if q_mean is not None:
            mean = tl.load(q_mean + start // BM * DP + d)
            s += mean_logits(mean, k, k_mean, kv_cols, d, n, k_n, k_d, factor, D)[:, None]
        # As many numbers as threads: each is loaded once, and not by every thread that will use it.
        lse2, delta = tl.split(tl.load(statistics + rows[:, None] * 2 + tl.arange(0, 2)[None, :]))
        p = tl.math.exp2(s - lse2[None, :])
        if MASKED:
            p = tl.where(visible(rows[None, :], kv_cols[:, None], m, n, window, CAUSAL), p, 0.0)
        if DV or multiple is not None:
            p_hat, p_scale = quantise_left(p, PER_ROW)
        if DV:
            grads = tl.load(do_columns + d[:, None] * m_pad + rows[None, :])
            part = tl.dot(fragment_order(p_hat), tl.trans(grads), out_dtype=tl.int32).to(tl.float32)
            dv += part * (p_scale * tl.load(do_scale + start // BM))
        if DK:
            at = do + rows.to(tl.int64)[:, None] * do_m + d.to(tl.int64)[None, :] * do_d
            grads16 = tl.load(at, mask=(rows < m)[:, None] & (d < D)[None, :], other=0.0)
            dp = tl.dot(values, tl.trans(grads16), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            ds_hat, ds_scale = quantise_left(ds, PER_ROW)
            queries = tl.load(q_columns + d[:, None] * m_pad + rows[None, :])
            part = tl.dot(fragment_order(ds_hat), tl.trans(queries), out_dtype=tl.int32).to(tl.float32)
            dk += part * (ds_scale * q_scale_tile)
            if multiple is not None:
                shadow = queries.to(tl.float32) * fragment_order(
                    tl.load(multiple + rows)[None, :]
                )  # lambda Q^, transposed
                shadow, shadow_scale = quantise_left(shadow, False)
                part = tl.dot(fragment_order(p_hat), tl.trans(shadow), out_dtype=tl.int32).to(tl.float32)
                dk -= part * (p_scale * (shadow_scale * q_scale_tile))
            if q_mean is not None:
                dk += tl.sum(ds, 1)[:, None] * mean[None, :]
    return dk, dv


@triton.jit(do_not_specialize=["heads", "group", "m", "n", "window", "key_tiles"])
def _backward_kv(
    q_hat, q_columns, q_scale, q_mean, k_hat, k_scale, do_columns, do_scale, statistics, multiple, do, v,
    k, k_mean, dk, dv, documents,
    do_b, do_h, do_m, do_d, v_b, v_h, v_n, v_d, k_b, k_h, k_n, k_d, dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    heads, group, m, n, m_pad, n_pad, window, softmax_scale, factor, key_tiles,
    CAUSAL: tl.constexpr, PER_ROW: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
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
    do += b * do_b
    if q_mean is not None:
        k += b * k_b + head * k_h
    mean_row = kv
    if documents is not None:
        k_first, n, k_row, q_first, m, q_row = document(documents, tile * BN)
        tile -= k_row // BN
        m = tl.where(tile * BN < n, m, 0)  # a tile of padding is seen by none
        k_hat += k_row * DP
        k_scale += k_row // BK
        v += k_first * v_n
        dk += k_first * dk_n
        dv += k_first * dv_n
        do += q_first * do_m
        q_hat += q_row * DP
        q_columns += q_row
        do_columns += q_row
        q_scale += q_row // BM
        do_scale += q_row // BM
        statistics += q_row * 2
        if multiple is not None:
            multiple += q_row
        mean_row = kv * (n_pad // SLOT) + k_row // SLOT
        if q_mean is not None:
            q_mean += q_row // BM * DP
            k += k_first * k_n
    if k_mean is not None:
        k_mean += mean_row * DP
    cols = tile * BN + tl.arange(0, BN)
    d = tl.arange(0, DP)
    keys = tl.load(k_hat + cols[:, None] * DP + d[None, :])
    k_factor = tl.load(k_scale + cols // BK)[:, None]
    valid = (cols < n)[:, None] & (d < D)[None, :]
    at = v + cols.to(tl.int64)[:, None] * v_n + d.to(tl.int64)[None, :] * v_d
    values = tl.load(at, mask=valid, other=0.0)

    dk_sum = tl.zeros((BN, DP), tl.float32)
    dv_sum = tl.zeros((BN, DP), tl.float32)
    lo, inner, full, hi = query_range(tile, m, n, window, CAUSAL, BM, BN)
    for g in range(group):
        bh = kv * group + g
        do_head = do + (head * group + g) * do_h
        mean_head = None
        if q_mean is not None:
            mean_head = q_mean + bh * (m_pad // BM) * DP
        multiple_head = None
        if multiple is not None:
            multiple_head = multiple + bh * m_pad
        dk_sum, dv_sum = _query_tiles(
            dk_sum, dv_sum, keys, values, k_factor, lo, inner, cols,
            q_hat + bh * m_pad * DP, q_columns + bh * m_pad * DP, q_scale + bh * (m_pad // BM), mean_head,
            do_columns + bh * m_pad * DP, do_scale + bh * (m_pad // BM), statistics + bh * m_pad * 2,
            multiple_head, do_head, do_m, do_d, k, k_mean, k_n, k_d, d, m, n, m_pad, window, factor,
            CAUSAL, True, PER_ROW, D, DP, BM, DK, DV,
        )  # fmt: skip
        dk_sum, dv_sum = _query_tiles(
            dk_sum, dv_sum, keys, values, k_factor, inner, full, cols,
            q_hat + bh * m_pad * DP, q_columns + bh * m_pad * DP, q_scale + bh * (m_pad // BM), mean_head,
            do_columns + bh * m_pad * DP, do_scale + bh * (m_pad // BM), statistics + bh * m_pad * 2,
            multiple_head, do_head, do_m, do_d, k, k_mean, k_n, k_d, d, m, n, m_pad, window, factor,
            CAUSAL, False, PER_ROW, D, DP, BM, DK, DV,
        )  # fmt: skip
        if window is not None:
            dk_sum, dv_sum = _query_tiles(
                dk_sum, dv_sum, keys, values, k_factor, full, hi, cols,
                q_hat + bh * m_pad * DP, q_columns + bh * m_pad * DP, q_scale + bh * (m_pad // BM), mean_head,
                do_columns + bh * m_pad * DP, do_scale + bh * (m_pad // BM), statistics + bh * m_pad * 2,
                multiple_head, do_head, do_m, do_d, k, k_mean, k_n, k_d, d, m, n, m_pad, window, factor,
                CAUSAL, True, PER_ROW, D, DP, BM, DK, DV,
            )  # fmt: skip
    if DK:
        at = dk + cols.to(tl.int64)[:, None] * dk_n + d.to(tl.int64)[None, :] * dk_d
        tl.store(at, (dk_sum * softmax_scale).to(dk.dtype.element_ty), mask=valid)
    if DV:
        at = dv + cols.to(tl.int64)[:, None] * dv_n + d.to(tl.int64)[None, :] * dv_d
        tl.store(at, dv_sum.to(dv.dtype.element_ty), mask=valid)


@triton.jit
def _key_tiles(
    dq, row_sum, p_k, weight, queries, grads16, row_factor, row_lse2, row_delta, lo, hi, rows,
    k_hat, k_columns, k_scale, v, v_n, v_d, q_mean, k, k_mean, k_n, k_d, d, m, n, n_pad, window, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PER_ROW: tl.constexpr, DELTA_ONLY: tl.constexpr,
    LEAK_ONLY: tl.constexpr, PROJECT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles of [lo, hi) to dQ (without the softmax scale) or, with DELTA_ONLY, to rowsum(P dP).

    PROJECT: also P^ K^ to p_k and the rows of dS^ and of P^ to row_sum and weight. LEAK_ONLY: these rows alone, of dS^
    and P^ as they are rounded for dV and dK.
    """
    for start in range(lo, hi, BN):
        start = tl.multiple_of(start, BN)
        cols = start + tl.arange(0, BN)
        k_scale_tile = tl.load(k_scale + start // BN)
        keys = tl.load(k_hat + cols[:, None] * DP + d[None, :])
        s = tl.dot(queries, tl.trans(keys), out_dtype=tl.int32).to(tl.float32)
        s = s * (row_factor * k_scale_tile)
        if q_mean is not None:
            s += mean_logits(q_mean, k, k_mean, cols, d, n, k_n, k_d, factor, D)[None, :]
        p = tl.math.exp2(s - row_lse2[:, None])
        if MASKED:
            p = tl.where(visible(rows[:, None], cols[None, :], m, n, window, CAUSAL), p, 0.0)
        at = v + cols.to(tl.int64)[:, None] * v_n + d.to(tl.int64)[None, :] * v_d
        values = tl.load(at, mask=(cols < n)[:, None] & (d < D)[None, :], other=0.0)
        dp = tl.dot(grads16, tl.trans(values), input_precision="ieee")
        if DELTA_ONLY:
            row_sum += tl.sum(p * dp, 1)
        else:
            ds = p * (dp - row_delta[:, None])
            if LEAK_ONLY:
                ds_hat, ds_scale = quantise_left(tl.trans(ds), PER_ROW)
                row_sum += tl.sum(ds_hat.to(tl.float32) * ds_scale, 0)
                p_hat, p_scale = quantise_left(tl.trans(p), PER_ROW)
                weight += tl.sum(p_hat.to(tl.float32) * p_scale, 0)
            else:
                ds_hat, ds_scale = quantise_left(ds, PER_ROW)
                keys = tl.load(k_columns + d[:, None] * n_pad + cols[None, :])
                part = tl.dot(fragment_order(ds_hat), tl.trans(keys), out_dtype=tl.int32).to(tl.float32)
                dq += part * (ds_scale * k_scale_tile)
                if PROJECT:
                    row_sum += tl.sum(ds_hat.to(tl.float32) * ds_scale, 1)
                    p_hat, p_scale = quantise_left(p, PER_ROW)
                    part = tl.dot(fragment_order(p_hat), tl.trans(keys), out_dtype=tl.int32).to(tl.float32)
                    p_k += part * (p_scale * k_scale_tile)
                    weight += tl.sum(p_hat.to(tl.float32) * p_scale, 1)
    return dq, row_sum, p_k, weight


@triton.jit(do_not_specialize=["heads", "group", "m", "n", "window", "row_tiles"])
def _backward_q(
    q_hat, q_scale, q_mean, k_hat, k_columns, k_scale, statistics, multiple, do, v, k, k_mean, dq,
    documents,
    do_b, do_h, do_m, do_d, v_b, v_h, v_n, v_d, k_b, k_h, k_n, k_d, dq_b, dq_h, dq_m, dq_d,
    heads, group, m, n, m_pad, n_pad, window, softmax_scale, factor, row_tiles,
    CAUSAL: tl.constexpr, PER_ROW: tl.constexpr, DELTA_ONLY: tl.constexpr, LEAK_ONLY: tl.constexpr,
    PROJECT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = (pid // row_tiles).to(tl.int64)
    tile = pid % row_tiles
    if CAUSAL:
        tile = row_tiles - 1 - tile
    b = bh // heads
    kv = bh // group
    kv_head = kv % (heads // group)
    q_hat += bh * m_pad * DP
    q_scale += bh * (m_pad // BQ)
    statistics += bh * m_pad * 2
    if LEAK_ONLY:
        multiple += bh * m_pad
    do += b * do_b + (bh % heads) * do_h
    dq += b * dq_b + (bh % heads) * dq_h
    k_hat += kv * n_pad * DP
    k_scale += kv * (n_pad // BN)
    v += b * v_b + kv_head * v_h
    if not DELTA_ONLY:
        k_columns += kv * n_pad * DP
    if q_mean is not None:
        q_mean += bh * (m_pad // BQ) * DP
        k += b * k_b + kv_head * k_h
    mean_row = kv
    if documents is not None:
        q_first, m, q_row, k_first, n, k_row = document(documents, tile * BM)
        tile -= q_row // BM
        n = tl.where(tile * BM < m, n, 0)  # a tile of padding sees nothing
        q_hat += q_row * DP
        q_scale += q_row // BQ
        statistics += q_row * 2
        if LEAK_ONLY:
            multiple += q_row
        do += q_first * do_m
        dq += q_first * dq_m
        k_hat += k_row * DP
        k_scale += k_row // BN
        v += k_first * v_n
        if not DELTA_ONLY:
            k_columns += k_row
        mean_row = kv * (n_pad // SLOT) + k_row // SLOT
        if q_mean is not None:
            q_mean += q_row // BQ * DP
            k += k_first * k_n
    rows = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    queries = tl.load(q_hat + rows[:, None] * DP + d[None, :])
    row_factor = tl.load(q_scale + rows // BQ)[:, None] * factor
    valid = (rows < m)[:, None] & (d < D)[None, :]
    at = do + rows.to(tl.int64)[:, None] * do_m + d.to(tl.int64)[None, :] * do_d
    grads16 = tl.load(at, mask=valid, other=0.0)
    row_lse2 = tl.load(statistics + rows * 2)
    row_delta = row_lse2
    if not DELTA_ONLY:
        row_delta = tl.load(statistics + rows * 2 + 1)
    mean = None
    if q_mean is not None:
        mean = tl.load(q_mean + tile * DP + d)
        if k_mean is not None:
            k_mean += mean_row * DP

    dq_sum = tl.zeros((BM, DP), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    p_k = tl.zeros((BM, DP), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    lo, inner, full, hi = key_range(tile, m, n, window, CAUSAL, BM, BN)
    if window is not None:
        dq_sum, row_sum, p_k, weight = _key_tiles(
            dq_sum, row_sum, p_k, weight, queries, grads16, row_factor, row_lse2, row_delta, lo, inner, rows,
            k_hat, k_columns, k_scale, v, v_n, v_d, mean, k, k_mean, k_n, k_d, d, m, n, n_pad, window, factor,
            CAUSAL, True, PER_ROW, DELTA_ONLY, LEAK_ONLY, PROJECT, D, DP, BN,
        )  # fmt: skip
    dq_sum, row_sum, p_k, weight = _key_tiles(
        dq_sum, row_sum, p_k, weight, queries, grads16, row_factor, row_lse2, row_delta, inner, full, rows,
        k_hat, k_columns, k_scale, v, v_n, v_d, mean, k, k_mean, k_n, k_d, d, m, n, n_pad, window, factor,
        CAUSAL, False, PER_ROW, DELTA_ONLY, LEAK_ONLY, PROJECT, D, DP, BN,
    )  # fmt: skip
    dq_sum, row_sum, p_k, weight = _key_tiles(
        dq_sum, row_sum, p_k, weight, queries, grads16, row_factor, row_lse2, row_delta, full, hi, rows,
        k_hat, k_columns, k_scale, v, v_n, v_d, mean, k, k_mean, k_n, k_d, d, m, n, n_pad, window, factor,
        CAUSAL, True, PER_ROW, DELTA_ONLY, LEAK_ONLY, PROJECT, D, DP, BN,
    )  # fmt: skip
    if LEAK_ONLY or PROJECT:
        row_sum = tl.where(weight == 0.0, 0.0, row_sum / weight)  # lambda
    if DELTA_ONLY:
        tl.store(statistics + rows * 2 + 1, row_sum)
    elif LEAK_ONLY:
        tl.store(multiple + rows, row_sum)
    else:
        if PROJECT:
            dq_sum -= p_k * row_sum[:, None]
        at = dq + rows.to(tl.int64)[:, None] * dq_m + d.to(tl.int64)[None, :] * dq_d
        tl.store(at, (dq_sum * softmax_scale).to(dq.dtype.element_ty), mask=valid)


def backward(
    q: Quantised, k: Quantised, do_quantised: Quantised, statistics: Tensor,
    do: Tensor, v: Tensor, k_source: Tensor, k_mean: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig, window: int | None, documents: Tables | None,
) -> None:  # fmt: skip
    """Writes dq [B, H, M, D], dk and dv [B, K, N, D] (any strides).

    q and k hold rows and columns, do_quantised holds columns. statistics [B H, M', 2] fp32 of rows: lse2 and delta,
    where a matched delta is written first. do [B, H, M, D] and v [B, K, N, D] in 16 bit serve dP. k_source and k_mean:
    as in `forward`.
    """
    query_documents, key_documents = (None, None) if documents is None else documents
    multiple = torch.empty_like(statistics[..., 0]) if config.project else None  # lambda of dK
    options = {"causal": causal, "softmax_scale": softmax_scale, "config": config, "window": window}
    of_queries = (q, k, statistics, do, v, dq)
    query_options = options | {"k_source": k_source, "k_mean": k_mean, "documents": query_documents}
    if config.delta == "matched":
        query_side(*of_queries, only="delta", **query_options)
    mask = {"causal": causal, "window": window, "packed": documents is not None}
    if on_hopper(do, v, config, queries=do.shape[-2], keys=v.shape[-2], **mask):
        from sagebwd.kernels.hopper import backward as hopper

        hopper.backward(q, k, do_quantised, statistics, do, v, dq, dk, dv, causal=causal, softmax_scale=softmax_scale)
        return
    if config.project:
        query_side(*of_queries, only="leak", multiple=multiple, **query_options)
    key_side(
        q, k, do_quantised, statistics, do, v, dk, dv,
        k_source=k_source, k_mean=k_mean, documents=key_documents, multiple=multiple, **options,
    )  # fmt: skip
    query_side(*of_queries, **query_options)


def query_side(
    q: Quantised, k: Quantised, statistics: Tensor, do: Tensor, v: Tensor, dq: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig, documents: Tensor | None, window: int | None = None,
    k_source: Tensor | None = None, k_mean: Tensor | None = None, multiple: Tensor | None = None,
    only: Literal["delta", "leak"] | None = None,
) -> None:  # fmt: skip
    """Writes dq [B, H, M, D]; or `only` the matched delta into `statistics`, or lambda of dK into `multiple`.

    Arguments as `backward` takes; documents: the queries' table. With one, the workspaces and tensors of keys may be
    longer than those of queries (see `packing.Tables`): only the table says which keys a query sees.
    """
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    m_pad, dp = q.rows.shape[1:]
    k_source = v if k_source is None else k_source
    tune = tuning.backward_q(do.device, dp, config)
    rows = config.block_q if only == "leak" else tune.rows  # dK's left operands share scales down a block of queries
    row_tiles = m_pad // rows
    launch(
        _backward_q, b * h * row_tiles,
        (
            q.rows, q.scale, q.tile_mean, k.rows, k.columns, k.scale, statistics, multiple, do, v, k_source, k_mean,
            dq, documents,
        ),
        (
            *do.stride(), *v.stride(), *k_source.stride(), *dq.stride(), h, h // kv_heads, m, n, m_pad, k.rows.shape[1],
            window, softmax_scale, softmax_scale * tuning.LOG2E, row_tiles,
        ),
        CAUSAL=causal, PER_ROW=config.granularity == "row",
        DELTA_ONLY=only == "delta", LEAK_ONLY=only == "leak", PROJECT=config.project and only is None,
        D=dim, DP=dp, BQ=config.block_q, BM=rows, BN=config.block_k, num_warps=tune.warps, num_stages=tune.stages,
    )  # fmt: skip


def key_side(
    q: Quantised, k: Quantised, do_quantised: Quantised, statistics: Tensor, do: Tensor, v: Tensor,
    dk: Tensor, dv: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig, documents: Tensor | None, window: int | None = None,
    k_source: Tensor | None = None, k_mean: Tensor | None = None, multiple: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes dk and dv [B, K, N, D]. Arguments as `backward` takes; documents: the keys' table, see `query_side`."""
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    m_pad, dp = q.rows.shape[1:]
    n_pad = k.rows.shape[1]
    k_source = v if k_source is None else k_source
    for key, for_dk, for_dv in tuning.backward_kv(do.device, dp, config):
        key_tiles = n_pad // key.rows
        launch(
            _backward_kv, b * kv_heads * key_tiles,
            (
                q.rows, q.columns, q.scale, q.tile_mean, k.rows, k.scale, do_quantised.columns, do_quantised.scale,
                statistics, multiple, do, v, k_source, k_mean, dk, dv, documents,
            ),
            (
                *do.stride(), *v.stride(), *k_source.stride(), *dk.stride(), *dv.stride(), h, h // kv_heads, m, n,
                m_pad, n_pad, window, softmax_scale, softmax_scale * tuning.LOG2E, key_tiles,
            ),
            CAUSAL=causal, PER_ROW=config.granularity == "row", D=dim, DP=dp,
            BK=config.block_k, BM=config.block_q, BN=key.rows, DK=for_dk, DV=for_dv,
            num_warps=key.warps, num_stages=key.stages,
        )  # fmt: skip


def on_hopper(
    do: Tensor, v: Tensor, config: QuantConfig, *,
    queries: int, keys: int, causal: bool = True, window: int | None = None, packed: bool = False, **others: Tensor,
) -> bool:  # fmt: skip
    """Whether the kernels for Hopper GPUs take this call; why not is logged once on such a GPU.

    queries, keys: tokens of the sequence, of which do and v may be a part. others: with products="scores" what the
    kernels read or write besides do and v, by name.
    """
    capability = tuning.capability(do.device)
    if capability != 90 or not isinstance(_backward_q, triton.runtime.JITFunction):  # the interpreter knows no Gluon
        return False
    from sagebwd.kernels.hopper import scores, slower
    from sagebwd.kernels.hopper.backward import backward_refusal  # Gluon: nobody else needs it

    dim, mask = do.shape[-1], {"window": window is not None, "packed": packed}
    if config.products == "scores":
        why = scores.backward_refusal(capability, dim, config, **mask, tensors={"dO": do, "V": v, **others})
    else:
        why = backward_refusal(capability, dim, config, **mask, tensors=(do, v))
    why = why or slower(tuning.HOPPER_FROM[config.products][1], queries, keys, causal)
    if why and why not in _said:
        _said.add(why)
        log.info("SageBwd's backward runs on the portable kernels, not on those for Hopper: %s", why)
    return why is None


_said: set[str] = set()
