"""Q and K in INT8, and K's sums: what the forward with products="scores" on Hopper begins with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.common import padded_rows
from sagebwd.kernels.launch import launch
from sagebwd.kernels.mean import SUMMED, new_sums, sum_slot
from sagebwd.kernels.quantise import Quantised, check_size, round_tile

BLOCK = 64
# As in `quantise`. At 138 registers, which rounding would take otherwise, a multiprocessor holds 3 programs, not 4.
OPTIONS = {"BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False, "maxnreg": 128}


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


@triton.jit(do_not_specialize=["heads", "kv_heads", "m", "n", "q_tiles", "slots", "q_programs"])
def _round_q_and_sum_k(
    q, k, q_out, q_scale, q_norm, sums, q_b, q_h, q_l, q_d, k_b, k_h, k_l, k_d,
    heads, kv_heads, m, n, q_tiles, slots, q_programs, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < q_programs:
        pid = q_programs - 1 - pid
        round_rows(
            q, None, None, q_out, q_scale, q_norm, q_b, q_h, q_l, q_d, 0, 0, 0, 0, pid, heads, m, q_tiles, D, BLOCK
        )  # fmt: skip
    elif k is not None:
        sum_slot(k, sums, None, k_b, k_h, k_l, k_d, pid - q_programs, kv_heads, n, slots, D, D, ROWS)


@triton.jit(do_not_specialize=["heads", "n", "tiles"])
def _round_k(
    k, mean, k_out, k_scale, k_norm, k_b, k_h, k_l, k_d, heads, n, tiles, D: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    round_rows(k, mean, None, k_out, k_scale, k_norm, k_b, k_h, k_l, k_d, 0, 0, 0, 0, pid, heads, n, tiles, D, BLOCK)


def new_operand(x: Tensor, *, norm: bool = False) -> Quantised:
    """For the rows and scales of x [B, H, L, D], D of 64 or 128, in blocks of 64 rows, and the norms of these."""
    b, h, length, dim = x.shape
    padded = padded_rows(length)
    check_size(length, padded, dim)
    rows = x.new_empty((b * h, padded, dim), dtype=torch.int8)
    scale = x.new_empty((b * h, padded // BLOCK), dtype=torch.float32)
    return Quantised(rows, None, scale, None, norm=torch.empty_like(scale) if norm else None)


def quantise_q(q: Tensor, k: Tensor | None) -> tuple[Quantised, Tensor | None]:
    """`quantise` of q [B, H, M, D], for D of 64 or 128 and blocks of 64 rows, and `mean.key_sums` of k [B, K, N, D], if
    there is one: memory is as busy with both as with one of them.

    q's first heads come last but for k: who attends begins with those.
    """
    q8, sums = new_operand(q, norm=True), None if k is None else new_sums(k)
    slots, q_programs = 0 if sums is None else sums.shape[1], q8.scale.numel()
    like_k = q if k is None else k
    launch(
        _round_q_and_sum_k, q_programs + (0 if sums is None else len(sums) * slots),
        (q, k, q8.rows, q8.scale, q8.norm, sums),
        (
            *q.stride(), *like_k.stride(), q.shape[1], like_k.shape[1], q.shape[2], like_k.shape[2],
            q8.scale.shape[1], slots, q_programs,
        ),
        ROWS=SUMMED, **OPTIONS, D=q.shape[3],
    )  # fmt: skip
    return q8, sums


def quantise_k(k: Tensor, k_mean: Tensor | None) -> Quantised:
    """`quantise` of k [B, K, N, D] less k_mean, its end before its beginning: what has read it for the mean left that
    in L2."""
    k8 = new_operand(k, norm=True)
    launch(
        _round_k, k8.scale.numel(), (k, k_mean, k8.rows, k8.scale, k8.norm),
        (*k.stride(), *k.shape[1:3], k8.scale.shape[1]), **OPTIONS, D=k.shape[3],
    )  # fmt: skip
    return k8
