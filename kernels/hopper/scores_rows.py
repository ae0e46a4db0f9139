"""What `backward_scores` needs beforehand by one launch, and by another dQ out of the sums that it leaves.

Sums are FP16, each row's times a power of two by which they cannot overflow: |sum of any of a row's dS_ij K_j| <=
sum_j P_ij |dP_ij - delta_i| max|K| <= 2 max_j |dP_ij| max|K| <= 2 sum_d |dO_id| max|V| max|K|, maxima of a head's
finite values: a row that sees another one is not finite, whatever its power, and others shall not lose bits to it. That
is scaled to 2^15 at most, and rounding 256 additions of 128 keys adds 2^12 at most: FP16 ends at 2^16. Below, sums keep
all their bits down to 2^-29 of the bound; ordinary ones are 2^-8 to 2^-17 of it. More keys take FP32 sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.common import TINY
from sagebwd.kernels.hopper.scores_operands import BLOCK, OPTIONS, new_operand, round_rows
from sagebwd.kernels.launch import launch
from sagebwd.kernels.quantise import Quantised

MOST_KEYS = 32768  # whose sums are FP16: rounding these errs as the square root of the number of additions, 256 then
LEAST, MOST = tl.constexpr(127 - 113), tl.constexpr(127 + 126)  # biased exponents of powers: FP32 has their inverses


class Rows(NamedTuple):
    """numbers [B H M' / 64 * 256] fp32: of each 64 queries lse2 and delta = rowsum(do * o), both in the order in which
    a product's threads take them; 127 + 14 less the exponent of each row's sum |dO|, two rows a word; Q's scale 32
    times. The last 64 are not used: TMA brings powers of 2.

    sums [B H, M' / 64, 64 D]: of dQ, at first zeros, FP16 or FP32.

    exponents [B K, 1 + N' / 64 * 2] int32, for FP16 sums alone: of each 64 keys that of the largest V and that of the
    largest smoothed K; before them the head's, the sum of its largest of V and its largest of K. That is known when all
    of `prepare` has ended, and `backward_scores` writes it. A row's number less its head's, kept within LEAST and MOST,
    is what FP32 has as the exponent of the row's power.
    """

    numbers: Tensor
    sums: Tensor
    exponents: Tensor


@triton.jit
def _exponent(x):
    """An e with x < 2^e, of x >= 0: the least one from 2^-126 on, and 129 of infinity and NaN."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 126


@triton.jit
def _finite(x):
    """x >= 0, and 0 in the place of infinity and NaN."""
    return tl.where(x < float("inf"), x, 0.0)


@triton.jit
def _key_exponents(
    v, exponents, k_scale, v_b, v_h, v_n, v_d, pid, heads, n, tiles, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes those of 64 keys, by their V and K's scale."""
    bh = (pid // tiles).to(tl.int64)
    rows = (pid % tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    d = tl.arange(0, D).to(tl.int64)
    v += (bh // heads) * v_b + (bh % heads) * v_h
    values = tl.load(v + rows[:, None] * v_n + d[None, :] * v_d, mask=(rows < n)[:, None], other=0.0).to(tl.float32)
    exponents += bh * (1 + tiles * 2) + pid % tiles * 2
    tl.store(exponents + 1, _exponent(tl.max(_finite(tl.abs(values)))))
    of_k = tl.maximum(127.0 * _finite(k_scale), TINY)  # below it the scale is 0
    tl.store(exponents + 2, _exponent(of_k))


@triton.jit
def _at_powers(numbers, row, BLOCK: tl.constexpr):
    """Where a tile's numbers have the number of a row's power: those of rows g and g + 8 of each 16 are one word."""
    return (numbers + 2 * BLOCK).to(tl.pointer_type(tl.int16)) + (row // 16 * 16 + row % 8 * 2 + row // 8 % 2)


@triton.jit
def _rows(
    do, o, lse2, numbers, sums, q_scale, do_b, do_h, do_m, do_d, o_b, o_h, o_m, o_d, pid, heads, m, tiles,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The numbers of 64 queries, and zeros for their sums."""
    pid = pid.to(tl.int64)
    bh = pid // tiles
    inside = tl.arange(0, BLOCK)
    rows = pid % tiles * BLOCK + inside
    d = tl.arange(0, D)
    valid = (rows < m)[:, None]
    do += (bh // heads) * do_b + (bh % heads) * do_h
    o += (bh // heads) * o_b + (bh % heads) * o_h
    grads = tl.load(do + rows[:, None] * do_m + d[None, :] * do_d, mask=valid, other=0.0).to(tl.float32)
    values = tl.load(o + rows[:, None] * o_m + d[None, :] * o_d, mask=valid, other=0.0).to(tl.float32)
    numbers += pid * (4 * BLOCK)
    # A thread of a product has columns 8h + 2t + e: of each two h its four together.
    place = inside // 16 * 16 + inside // 2 % 4 * 4 + inside // 8 % 2 * 2 + inside % 2
    tl.store(numbers + place, tl.load(lse2 + pid * BLOCK + inside))
    tl.store(numbers + BLOCK + place, tl.sum(grads * values, 1))
    of_row = 127 + 14 - _exponent(tl.sum(tl.abs(grads), 1))
    tl.store(_at_powers(numbers, inside, BLOCK), of_row.to(tl.int16))
    half = tl.arange(0, BLOCK // 2)
    tl.store(numbers + 5 * (BLOCK // 2) + half, q_scale + tl.zeros((BLOCK // 2,), tl.float32))
    zeros = tl.zeros((BLOCK * D,), sums.dtype.element_ty)
    tl.store(sums + pid * (BLOCK * D) + tl.arange(0, BLOCK * D), zeros)


@triton.jit(do_not_specialize=["heads", "kv_heads", "m", "n", "q_tiles", "k_tiles", "q_programs"])
def _prepare(
    q, k, v, do, o, mean, lse2, q_out, q_scale, k_out, k_scale, like_k, exponents, numbers, sums,
    q_b, q_h, q_l, q_d, k_b, k_h, k_l, k_d, v_b, v_h, v_n, v_d, do_b, do_h, do_m, do_d, o_b, o_h, o_m, o_d,
    like_b, like_h, like_l, like_d, heads, kv_heads, m, n, q_tiles, k_tiles, q_programs,
    D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """K comes first, and its end before its beginning; q's first heads come last, as the rows that are wanted first."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if pid >= q_programs:
        pid -= q_programs
        scale = round_rows(
            k, mean, like_k, k_out, k_scale, None, k_b, k_h, k_l, k_d, like_b, like_h, like_l, like_d,
            pid, kv_heads, n, k_tiles, D, BLOCK,
        )  # fmt: skip
        if HALVES:
            _key_exponents(v, exponents, scale, v_b, v_h, v_n, v_d, pid, kv_heads, n, k_tiles, D, BLOCK)
    else:
        scale = round_rows(
            q, None, None, q_out, q_scale, None, q_b, q_h, q_l, q_d, 0, 0, 0, 0, pid, heads, m, q_tiles, D, BLOCK
        )  # fmt: skip
        _rows(
            do, o, lse2, numbers, sums, scale, do_b, do_h, do_m, do_d, o_b, o_h, o_m, o_d, pid, heads, m, q_tiles,
            D, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "m", "tiles", "group", "of_head"])
def _round_dq(
    numbers, sums, exponents, dq, dq_b, dq_h, dq_m, dq_d, heads, m, tiles, group, of_head, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """A tile's sums are read as they lie, and put in order as they are: read in the order of dQ, a warp's 32 pieces of
    8 bytes would lie in 16 lines of memory."""
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the last sums were added to last: L2 has them
    bh = pid // tiles
    J: tl.constexpr = 2 if HALVES else 1
    values = tl.load(sums + pid * (BLOCK * D) + tl.arange(0, BLOCK * D))
    values = tl.reshape(values, (D // (8 * J), BLOCK // 16, 8, 4, J, 2, 2))  # h, w, g, t, j, i, e
    values = tl.reshape(tl.permute(values, (1, 5, 2, 0, 4, 3, 6)), (BLOCK, D))
    inside = tl.arange(0, BLOCK)
    values = values.to(tl.float32) * scale
    if HALVES:
        biased = tl.load(_at_powers(numbers + pid * (4 * BLOCK), inside, BLOCK)).to(tl.int32)
        biased = tl.minimum(tl.maximum(biased - tl.load(exponents + bh // group * of_head), LEAST), MOST)
        values *= ((254 - biased) << 23).to(tl.float32, bitcast=True)[:, None]  # the power's inverse
    rows = pid % tiles * BLOCK + inside[:, None]
    d = tl.arange(0, D)[None, :]
    dq += (bh // heads) * dq_b + (bh % heads) * dq_h
    tl.store(dq + rows * dq_m + d * dq_d, values.to(dq.dtype.element_ty), mask=rows < m)


def prepare(
    q: Tensor, k: Tensor, k_mean: Tensor | None, v: Tensor, do: Tensor, o: Tensor, lse2: Tensor, smoothed_to: Tensor
) -> tuple[Quantised, Quantised, Rows]:
    """`quantise` of q and of k less k_mean, of which what is left goes to `smoothed_to` as well, and the rows', by one
    launch.

    q, do and o [B, H, M, D], k, v and smoothed_to [B, K, N, D] (any strides), lse2 [B H, M'] fp32.
    """
    (b, h, m, dim), (_, kv_heads, n, _) = q.shape, k.shape
    q8, k8 = new_operand(q), new_operand(k)
    (q_tiles, k_tiles), halves = (x.scale.shape[1] for x in (q8, k8)), n <= MOST_KEYS
    rows = Rows(
        lse2.new_empty(b * h * q_tiles * 4 * BLOCK),
        lse2.new_empty((b * h, q_tiles, BLOCK * dim), dtype=torch.float16 if halves else torch.float32),
        lse2.new_empty((b * kv_heads, 1 + k_tiles * 2), dtype=torch.int32),
    )
    q_programs = b * h * q_tiles
    launch(
        _prepare, q_programs + b * kv_heads * k_tiles,
        (
            q, k, v, do, o, k_mean, lse2, q8.rows, q8.scale, k8.rows, k8.scale, smoothed_to,
            rows.exponents, rows.numbers, rows.sums,
        ),
        (
            *q.stride(), *k.stride(), *v.stride(), *do.stride(), *o.stride(), *smoothed_to.stride(),
            h, kv_heads, m, n, q_tiles, k_tiles, q_programs,
        ),
        D=dim, HALVES=halves, **OPTIONS,
    )  # fmt: skip
    return q8, k8, rows


def round_dq(rows: Rows, dq: Tensor, scale: float) -> None:
    """Writes dq [B, H, M, D] (any strides) = scale times its sums. They lie as `backward_scores` adds to them: a tile's
    parts one after the other, each in the order of `_add_to_memory`, which so is the order of the whole tile."""
    b, h, m, dim = dq.shape
    tiles = rows.sums.shape[1]
    launch(
        _round_dq, b * h * tiles, (rows.numbers, rows.sums, rows.exponents, dq),
        (*dq.stride(), h, m, tiles, b * h // len(rows.exponents), rows.exponents.shape[1], scale),
        D=dim, BLOCK=BLOCK, HALVES=rows.sums.dtype == torch.float16, num_warps=4,
    )  # fmt: skip
