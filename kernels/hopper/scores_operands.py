"""Q and K in INT8 by one launch: what the forward with products="scores" on Hopper begins with."""

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
def round_rows(
    x, mean, like_x, rows_out, scale_out, norm_out, x_b, x_h, x_l, x_d, like_b, like_h, like_l, like_d,
    pid, heads, length, tiles, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tile `pid` of all heads' x, less `mean`, to INT8 and, as it is then, to like_x; its scale, and the largest norm
    of its rows in INT8."""
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
    return scale


@triton.jit(do_not_specialize=["heads", "kv_heads", "m", "n", "q_tiles", "k_tiles", "q_programs"])
def _quantise_both(
    q, k, mean, q_out, q_scale, q_norm, k_out, k_scale, k_norm, q_b, q_h, q_l, q_d, k_b, k_h, k_l, k_d,
    heads, kv_heads, m, n, q_tiles, k_tiles, q_programs, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if pid >= q_programs:
        round_rows(
            k, mean, None, k_out, k_scale, k_norm, k_b, k_h, k_l, k_d, 0, 0, 0, 0, pid - q_programs, kv_heads, n,
            k_tiles, D, BLOCK,
        )  # fmt: skip
    else:
        round_rows(
            q, None, None, q_out, q_scale, q_norm, q_b, q_h, q_l, q_d, 0, 0, 0, 0, pid, heads, m, q_tiles, D, BLOCK
        )  # fmt: skip


def new_operand(x: Tensor, *, norm: bool = False) -> Quantised:
    """For the rows and scales of x [B, H, L, D], D of 64 or 128, in blocks of 64 rows, and the norms of these."""
    b, h, length, dim = x.shape
    padded = padded_rows(length)
    check_size(length, padded, dim)
    rows = x.new_empty((b * h, padded, dim), dtype=torch.int8)
    scale = x.new_empty((b * h, padded // BLOCK), dtype=torch.float32)
    return Quantised(rows, None, scale, None, norm=torch.empty_like(scale) if norm else None)


def quantise_both(q: Tensor, k: Tensor, k_mean: Tensor | None) -> tuple[Quantised, Quantised]:
    """`quantise` of q [B, H, M, D] and of k [B, K, N, D], less k_mean, for D of 64 or 128 and blocks of 64 rows.

    k comes first, and its end before its beginning: what has read it for the mean left that in L2. q's first heads come
    last: who attends begins with those.
    """
    (_, h, m, dim), (_, kv_heads, n, _) = q.shape, k.shape
    q8, k8 = new_operand(q, norm=True), new_operand(k, norm=True)
    q_programs = q8.scale.numel()
    launch(
        _quantise_both, q_programs + k8.scale.numel(),
        (q, k, k_mean, q8.rows, q8.scale, q8.norm, k8.rows, k8.scale, k8.norm),
        (*q.stride(), *k.stride(), h, kv_heads, m, n, q8.scale.shape[1], k8.scale.shape[1], q_programs),
        # As in `quantise`. At 138 registers, which it would take otherwise, a multiprocessor holds 3 programs, not 4.
        D=dim, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False, maxnreg=128,
    )  # fmt: skip
    return q8, k8
