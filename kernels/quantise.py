"""Quantise: one pass over a [tokens, dim] operand that smooths it, scales it, and writes the INT8 layouts needed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.common import SLOT, TINY, document, fragment_order, padded_dim, padded_rows, to_int8
from sagebwd.kernels.launch import launch
from sagebwd.kernels.packing import ROW_PADDING


class Quantised(NamedTuple):
    """INT8 forms of x [B, H, L, D], padded with zeros to L' rows and D' columns. Packed documents have whole slots of
    rows each, and L' is all of them."""

    rows: Tensor | None  # [B H, L', D'] int8
    columns: Tensor | None  # [B H, D', L'] int8, the transpose, tokens in common.fragment_order
    scale: Tensor  # [B H, L' / block] fp32
    tile_mean: Tensor | None  # [B H, L' / block, D'] fp32: what was subtracted from each tile
    smoothed: Tensor | None = None  # [B H, L', D'] in x's dtype: x less the mean, what `rows` is the INT8 form of
    norm: Tensor | None = None  # [B H, L' / block] fp32: of a block's rows, as rounded, the largest Euclidean norm


@triton.jit
def round_tile(values):
    """x^ and its scale, one for all of `values`. Not to be compiled with fusion of a product and a sum.

    A tile that holds NaN gets a NaN scale, so that it reaches the output: without their signs, floats have the order of
    their bits as integers, and NaN is above all. One maximum over integers so does for both.
    """
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    # The correctly rounded quotient: an operand's integers are those of the reference, bit for bit.
    inverse = tl.where(largest < TINY, 0.0, tl.div_rn(127.0, tl.maximum(largest, TINY, tl.PropagateNan.ALL)))
    return to_int8(values * inverse), tl.where(largest < TINY, 0.0, tl.div_rn(largest, 127.0))


@triton.jit(do_not_specialize=["heads", "length", "tiles"])
def _quantise(
    x, mean, other, lse2, rows_out, columns_out, scale_out, tile_mean_out, smoothed_out, statistics_out, documents,
    x_b, x_h, x_l, x_d, other_b, other_h, other_l, other_d, heads, length, tiles,
    TILE_MEAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = (pid // tiles).to(tl.int64)
    tile = pid % tiles
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    l = rows
    d = tl.arange(0, DP)
    x += (bh // heads) * x_b + (bh % heads) * x_h
    if other is not None:
        other += (bh // heads) * other_b + (bh % heads) * other_h
    mean_row = bh
    if documents is not None:
        first, length, row, _, _, _ = document(documents, tile * BLOCK)
        l = rows - row
        x += first * x_l
        if other is not None:
            other += first * other_l
        mean_row = bh * (tiles * BLOCK // SLOT) + row // SLOT
    valid = (l < length)[:, None] & (d < D)[None, :]
    at = x + l.to(tl.int64)[:, None] * x_l + d.to(tl.int64)[None, :] * x_d
    values = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    if other is not None:
        at = other + l.to(tl.int64)[:, None] * other_l + d.to(tl.int64)[None, :] * other_d
        delta = tl.sum(values * tl.load(at, mask=valid, other=0.0).to(tl.float32), 1)
        tl.store(statistics_out + (bh * tiles * BLOCK + rows) * 2 + 1, delta)
    if lse2 is not None:
        of_row = bh * tiles * BLOCK + rows
        tl.store(statistics_out + of_row * 2, tl.load(lse2 + of_row))
    if mean is not None:
        values = tl.where(valid, values - tl.load(mean + mean_row * DP + d)[None, :], 0.0)
    if smoothed_out is not None:
        at = smoothed_out + (bh * tiles * BLOCK + rows)[:, None] * DP + d[None, :]
        tl.store(at, values.to(smoothed_out.dtype.element_ty))
    if TILE_MEAN:
        filled = tl.sum((l < length).to(tl.int32), 0)
        tile_mean = tl.sum(values, 0) / tl.maximum(filled, 1).to(tl.float32)
        tl.store(tile_mean_out + (bh * tiles + tile) * DP + d, tile_mean)
        values = tl.where(valid, values - tile_mean[None, :], 0.0)
    q, scale = round_tile(values)
    tl.store(scale_out + bh * tiles + tile, scale)
    if ROWS:
        tl.store(rows_out + (bh * tiles * BLOCK + rows)[:, None] * DP + d[None, :], q)
    if COLUMNS:
        tl.store(columns_out + (bh * DP + d)[:, None] * (tiles * BLOCK) + rows[None, :], fragment_order(tl.trans(q)))


@triton.jit(do_not_specialize=["tiles"])
def _transpose(x, out, tiles, length, DP: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    bh = (pid // tiles).to(tl.int64)
    l = (pid % tiles) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    values = tl.load(x + (bh * length + l)[:, None] * DP + d[None, :])
    tl.store(out + (bh * DP + d)[:, None] * length + l[None, :], fragment_order(tl.trans(values)))


def quantise(
    x: Tensor, block: int, *, rows: bool, columns: bool,
    mean: Tensor | None = None, tile_mean: bool = False, smoothed: bool = False,
    lse2: Tensor | None = None, other: Tensor | None = None, documents: Tensor | None = None,
) -> tuple[Quantised, Tensor | None]:  # fmt: skip
    """INT8 forms of x [B, H, L, D] (any strides), one scale for each `block` rows of a head.

    rows, columns: which layouts to write. mean, of `mean.key_mean`, is subtracted first (K-smoothing); smoothed: what
    is left is written as well. tile_mean: each tile's own mean is subtracted (Q-smoothing). lse2 [B H, L'] fp32: also
    returns statistics of rows, [B H, L', 2] fp32: lse2, and with other [B, H, L, D] rowsum(x * other) before any
    smoothing (delta, with x = dO and other = O). documents: a table of packing.Tables.
    Raises ValueError where a head's workspace passes 2^31 elements: kernels address within a head in 32 bits.
    """
    b, h, length, dim = x.shape
    lp = padded_rows(length) if documents is None else documents.shape[0] * ROW_PADDING
    dp = padded_dim(dim)
    tiles = lp // block
    check_size(length, lp, dim)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((b * h, *shape), dtype=dtype, device=x.device)

    out = Quantised(
        rows=new(lp, dp, dtype=torch.int8) if rows else None,
        columns=new(dp, lp, dtype=torch.int8) if columns else None,
        scale=new(tiles, dtype=torch.float32),
        tile_mean=new(tiles, dp, dtype=torch.float32) if tile_mean else None,
        smoothed=new(lp, dp, dtype=x.dtype) if smoothed else None,
    )
    statistics = new(lp, 2, dtype=torch.float32) if lse2 is not None else None
    launch(
        _quantise, b * h * tiles,
        (
            x, mean, other, lse2, out.rows, out.columns, out.scale, out.tile_mean, out.smoothed, statistics, documents,
        ),
        (*x.stride(), *_strides(other), h, length, tiles),
        TILE_MEAN=tile_mean, ROWS=rows, COLUMNS=columns, D=dim, DP=dp, BLOCK=block, num_warps=4,
        enable_fp_fusion=False,  # a product fused with the addition that rounds it would break ties otherwise
    )  # fmt: skip
    return out, statistics


def check_size(length: int, rows: int, dim: int) -> None:
    """Raises ValueError where a workspace of `rows` rows for `length` tokens of a head passes 2^31 elements."""
    dp = padded_dim(dim)
    if rows * dp >= 2**31:
        raise ValueError(
            f"{length} tokens of head dim {dim} are too many for one call: use at most {2**31 // dp} (padded)"
        )


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else x.stride()


def transpose(x: Tensor) -> Tensor:
    """[B H, L', D'] int8 to [B H, D', L'], tokens in `common.fragment_order`: INT8 matrix units take an operand
    contracted over tokens this way only."""
    bh, length, dp = x.shape
    out = torch.empty((bh, dp, length), dtype=x.dtype, device=x.device)
    tiles = length // 64
    launch(_transpose, bh * tiles, (x, out), (tiles, length), DP=dp, BLOCK=64, num_warps=4)
    return out
