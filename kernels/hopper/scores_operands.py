"""Q and K in INT8 by one launch: what the forward and the backward with products="scores" on Hopper begin with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.common import padded_rows
from sagebwd.kernels.launch import launch
from sagebwd.kernels.quantise import Quantised, check_size, round_tile

BLOCK = 64


@triton.jit
def _round_rows(
    x, mean, like_x, rows_out, scale_out, norm_out, x_b, x_h, x_l, x_d, like_b, like_h, like_l, like_d,
    pid, heads, length, tiles, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bh = (pid // tiles).to(tl.int64)
    tile = pid % tiles
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    l = rows.to(tl.int64)[:, None]
    d = tl.arange(0, D)
    valid = (rows < length)[:, None]
    x += (bh // heads) * x_b + (bh % heads) * x_h
    values = tl.load(x + l * x_l + d.to(tl.int64)[None, :] * x_d, mask=valid, other=0.0).to(tl.float32)
    if mean is not None:
        values = tl.where(valid, values - tl.load(mean + bh * D + d)[None, :], 0.0)
    if like_x is not None:
        like_x += (bh // heads) * like_b + (bh % heads) * like_h
        at = like_x + l * like_l + d.to(tl.int64)[None, :] * like_d
        tl.store(at, values.to(like_x.dtype.element_ty), mask=valid)
    q, scale = round_tile(values)
    tl.store(scale_out + bh * tiles + tile, scale)
    if norm_out is not None:
        whole = q.to(tl.int32)
        tl.store(norm_out + bh * tiles + tile, tl.sqrt_rn(tl.max(tl.sum(whole * whole, 1), 0).to(tl.float32)) * scale)
    tl.store(rows_out + (bh * tiles * BLOCK + rows)[:, None] * D + d[None, :], q)


@triton.jit(do_not_specialize=["heads", "kv_heads", "m", "n", "q_tiles", "k_tiles", "q_programs"])
def _quantise_both(
    q, k, mean, q_out, q_scale, q_norm, k_out, k_scale, k_norm, like_k,
    q_b, q_h, q_l, q_d, k_b, k_h, k_l, k_d, like_b, like_h, like_l, like_d,
    heads, kv_heads, m, n, q_tiles, k_tiles, q_programs, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if pid >= q_programs:
        _round_rows(
            k, mean, like_k, k_out, k_scale, k_norm, k_b, k_h, k_l, k_d, like_b, like_h, like_l, like_d,
            pid - q_programs, kv_heads, n, k_tiles, D, BLOCK,
        )  # fmt: skip
    else:
        _round_rows(
            q, None, None, q_out, q_scale, q_norm, q_b, q_h, q_l, q_d, 0, 0, 0, 0, pid, heads, m, q_tiles, D, BLOCK
        )  # fmt: skip


def quantise_both(
    q: Tensor, k: Tensor, k_mean: Tensor | None, smoothed_to: Tensor | None = None, *, norms: bool = False
) -> tuple[Quantised, Quantised]:
    """`quantise` of q [B, H, M, D] and of k [B, K, N, D], less k_mean, for D of 64 or 128 and blocks of 64 rows.

    smoothed_to, like k: gets what is left of k. k comes first, and its end before its beginning: what has read it for
    the mean left that in L2. q's first heads come last: who attends begins with those.
    """
    (b, h, m, dim), (_, kv_heads, n, _) = q.shape, k.shape
    m_pad, n_pad = padded_rows(m), padded_rows(n)
    check_size(m, m_pad, dim)
    check_size(n, n_pad, dim)
    q_tiles, k_tiles = m_pad // BLOCK, n_pad // BLOCK
    q8, k8 = (
        Quantised(
            q.new_empty((heads, tiles * BLOCK, dim), dtype=torch.int8), None,
            q.new_empty((heads, tiles), dtype=torch.float32), None,
            norm=q.new_empty((heads, tiles), dtype=torch.float32) if norms else None,
        )
        for heads, tiles in ((b * h, q_tiles), (b * kv_heads, k_tiles))
    )  # fmt: skip
    q_programs = b * h * q_tiles
    launch(
        _quantise_both, q_programs + b * kv_heads * k_tiles,
        (q, k, k_mean, q8.rows, q8.scale, q8.norm, k8.rows, k8.scale, k8.norm, smoothed_to),
        (
            *q.stride(), *k.stride(), *(k if smoothed_to is None else smoothed_to).stride(),
            h, kv_heads, m, n, q_tiles, k_tiles, q_programs,
        ),
        # As in `quantise`. At 138 registers, which it would take otherwise, a multiprocessor holds 3 programs, not 4.
        D=dim, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False, maxnreg=128,
    )  # fmt: skip
    return q8, k8
