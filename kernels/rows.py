"""V and dO in INT8 with a scale a row: the operands of dP = dO V^T with products="inputs"."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.common import SLOT, document, padded_dim, padded_rows
from sagebwd.kernels.launch import launch
from sagebwd.kernels.packing import ROW_PADDING
from sagebwd.kernels.quantise import check_size, round_rows

BLOCK = 32  # rows of a program


class Rows(NamedTuple):
    """INT8 forms of x [B, H, L, D], padded with zeros to L' rows and D' columns (as `Quantised`)."""

    rows: Tensor  # [B H, L', D'] int8
    scale: Tensor  # [B H, L'] fp32


@triton.jit(do_not_specialize=["heads", "group", "length", "tiles", "mean_slots"])
def _round_rows(
    x, mean, other, other_mean, lse2, rows_out, scale_out, statistics_out, documents,
    x_b, x_h, x_l, x_d, other_b, other_h, other_l, other_d, heads, group, length, tiles, mean_slots,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = (pid // tiles).to(tl.int64)
    tile = pid % tiles
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    of_row = bh * tiles * BLOCK + rows
    l = rows
    d = tl.arange(0, DP)
    x += (bh // heads) * x_b + (bh % heads) * x_h
    slot = 0
    other_slot = 0
    if documents is not None:
        first, length, row, _, _, other_row = document(documents, tile * BLOCK)
        l = rows - row
        x += first * x_l
        slot = row // SLOT
        other_slot = other_row // SLOT
    valid = (l < length)[:, None] & (d < D)[None, :]
    at = l.to(tl.int64)[:, None] * x_l + d.to(tl.int64)[None, :] * x_d
    values = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    if other is not None:
        other += (bh // heads) * other_b + (bh % heads) * other_h
        if documents is not None:
            other += first * other_l
        at = l.to(tl.int64)[:, None] * other_l + d.to(tl.int64)[None, :] * other_d
        less = tl.load(other_mean + (bh // group * mean_slots + other_slot) * DP + d)
        others = tl.load(other + at, mask=valid, other=0.0).to(tl.float32) - less[None, :]
        delta = tl.sum(tl.where(valid, values * others, 0.0), 1)
        tl.store(statistics_out + of_row * 2, tl.load(lse2 + of_row))
        tl.store(statistics_out + of_row * 2 + 1, delta)
    if mean is not None:
        less = tl.load(mean + (bh * mean_slots + slot) * DP + d)
        values = tl.where(valid, values - less[None, :], 0.0)
    rounded, scale = round_rows(values)
    tl.store(rows_out + of_row[:, None] * DP + d[None, :], rounded)
    tl.store(scale_out + of_row, scale)


def round_values(v: Tensor, mean: Tensor, documents: Tensor | None) -> Rows:
    """V [B, K, N, D] (any strides) less its mean, of `mean.key_mean`. documents: the keys' table of packing.Tables."""
    return _round(v, mean=mean, documents=documents)[0]


def round_gradients(
    do: Tensor, o: Tensor, lse2: Tensor, v_mean: Tensor, documents: Tensor | None
) -> tuple[Rows, Tensor]:
    """dO [B, H, M, D] (any strides), and statistics of its rows, [B H, M', 2] fp32: lse2 [B H, M'] as it is and
    delta = rowsum(dO * (O - mean of V)). documents: the queries' table."""
    return _round(do, other=o, other_mean=v_mean, lse2=lse2, documents=documents)


def _round(
    x: Tensor, *, documents: Tensor | None, mean: Tensor | None = None,
    other: Tensor | None = None, other_mean: Tensor | None = None, lse2: Tensor | None = None,
) -> tuple[Rows, Tensor | None]:  # fmt: skip
    b, h, length, dim = x.shape
    lp = padded_rows(length) if documents is None else documents.shape[0] * ROW_PADDING
    dp = padded_dim(dim)
    check_size(length, lp, dim)
    out = Rows(x.new_empty((b * h, lp, dp), dtype=torch.int8), x.new_empty((b * h, lp), dtype=torch.float32))
    statistics = x.new_empty((b * h, lp, 2), dtype=torch.float32) if other is not None else None
    means = mean if other is None else other_mean
    tiles = lp // BLOCK
    launch(
        _round_rows, b * h * tiles,
        (x, mean, other, other_mean, lse2, *out, statistics, documents),
        (
            *x.stride(), *((0, 0, 0, 0) if other is None else other.stride()), h, b * h // means.shape[0], length,
            tiles, means.shape[1],
        ),
        D=dim, DP=dp, BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False,  # as in `quantise`
    )  # fmt: skip
    return out, statistics
