"""What `backward_scores` needs of each query row beforehand, and dQ out of the sums that it leaves: one pass each.

Sums are FP16, each row's times a power of two by which they cannot overflow: |sum of any of a row's dS_ij K_j| <=
sum_j P_ij |dP_ij - delta_i| max|K| <= 2 max_j |dP_ij| max|K| <= 2 sum_d |dO_id| max|V| max|K|, maxima of a head's
finite values: a row that sees another one is not finite, whatever its power, and others shall not lose bits to it. That
is scaled to 2^15 at most, and rounding 256 additions of 128 keys adds 2^12 at most: FP16 ends at 2^16. Below, sums keep
all their bits down to 2^-29 of the bound; ordinary ones are 2^-8 to 2^-17 of it. More keys take FP32 sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.common import TINY
from sagebwd.kernels.launch import launch

BLOCK = 64
MOST_KEYS = 32768  # whose sums are FP16: rounding these errs as the square root of the number of additions, 256 then


@triton.jit
def _exponent(x):
    """An e with x < 2^e, of x >= 0: the least one from 2^-126 on, and 129 of infinity and NaN."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 126


@triton.jit
def _finite(x):
    """x >= 0, and 0 in the place of infinity and NaN."""
    return tl.where(x < float("inf"), x, 0.0)


@triton.jit(do_not_specialize=["heads", "n", "tiles"])
def _largest_values(v, largest, v_b, v_h, v_n, v_d, heads, n, tiles, D: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // tiles
    rows = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    v += (bh // heads) * v_b + (bh % heads) * v_h
    values = tl.load(v + rows[:, None] * v_n + d[None, :] * v_d, mask=(rows < n)[:, None], other=0.0).to(tl.float32)
    tl.store(largest + pid, tl.max(tl.max(_finite(tl.abs(values)), 1), 0))


@triton.jit
def _at_powers(numbers, row, BLOCK: tl.constexpr):
    """Where a tile's numbers have a row's power of two, in BF16: those of rows g and g + 8 of each 16 are one word."""
    return (numbers + 2 * BLOCK).to(tl.pointer_type(tl.int16)) + (row // 16 * 16 + row % 8 * 2 + row // 8 % 2)


@triton.jit
def _largest(x, length, WIDTH: tl.constexpr):
    largest = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, length, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        largest = tl.maximum(largest, _finite(tl.load(x + at, mask=at < length, other=0.0)))
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["heads", "m", "tiles", "group", "key_tiles", "k_stride"])
def _prepare_rows(
    q_scale, k_scale, do, o, lse2, of_values, numbers, sums, do_b, do_h, do_m, do_d, o_b, o_h, o_m, o_d,
    heads, m, tiles, group, key_tiles, k_stride, D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
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
    power = tl.zeros((BLOCK,), tl.int32)
    if HALVES:
        kv = bh // group
        of_heads = _exponent(_largest(of_values + kv * key_tiles, key_tiles, 128))
        of_keys = tl.maximum(127.0 * _largest(k_scale + kv * k_stride, key_tiles, 128), TINY)  # below it the scale is 0
        of_heads += _exponent(of_keys)
        power = 14 - _exponent(tl.sum(tl.abs(grads), 1)) - of_heads
        power = tl.minimum(tl.maximum(power, -113), 126)  # so that FP32 has it and its inverse
    tl.store(_at_powers(numbers, inside, BLOCK), ((127 + power) << 7).to(tl.int16))
    half = tl.arange(0, BLOCK // 2)
    tl.store(numbers + 5 * (BLOCK // 2) + half, tl.load(q_scale + pid) + tl.zeros((BLOCK // 2,), tl.float32))
    zeros = tl.zeros((BLOCK * D,), sums.dtype.element_ty)
    tl.store(sums + pid * (BLOCK * D) + tl.arange(0, BLOCK * D), zeros)


@triton.jit(do_not_specialize=["heads", "m", "tiles"])
def _round_dq(
    numbers, sums, dq, dq_b, dq_h, dq_m, dq_d, heads, m, tiles, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """A tile's sums are read as they lie, and put in order as they are: read in the order of dQ, a warp's 32 pieces of
    8 bytes would lie in 16 lines of memory."""
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the last sums were added to last: L2 has them
    bh = pid // tiles
    values = tl.load(sums + pid * (BLOCK * D) + tl.arange(0, BLOCK * D))
    values = tl.reshape(values, (D // (8 * J), BLOCK // 16, 8, 4, J, 2, 2))  # h, w, g, t, j, i, e
    values = tl.reshape(tl.permute(values, (1, 5, 2, 0, 4, 3, 6)), (BLOCK, D))
    inside = tl.arange(0, BLOCK)
    power = tl.load(_at_powers(numbers + pid * (4 * BLOCK), inside, BLOCK)).to(tl.int32)
    factor = (((254 << 7) - power) << 16).to(tl.float32, bitcast=True)  # its inverse
    values = (values.to(tl.float32) * scale * factor[:, None]).to(dq.dtype.element_ty)
    rows = pid % tiles * BLOCK + inside[:, None]
    d = tl.arange(0, D)[None, :]
    dq += (bh // heads) * dq_b + (bh % heads) * dq_h
    tl.store(dq + rows * dq_m + d * dq_d, values, mask=rows < m)


def prepare_rows(
    q_scale: Tensor, k_scale: Tensor, do: Tensor, o: Tensor, lse2: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """numbers [B H M' / 64 * 256] fp32: of each 64 queries lse2 and delta = rowsum(do * o), both in the order in which
    a product's threads take them; the power of two of each row's sums, in BF16, two rows a word; their scale 32 times.
    The last 64 are not used: TMA brings powers of 2. sums [B H, M' / 64, 64 D]: zeros, FP16 or FP32.

    q_scale [B H, M' / 64], k_scale [B K, N' / 64] of the smoothed K, do and o [B, H, M, D], v [B, K, N, D] (any
    strides), lse2 [B H, M'] fp32.
    """
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    tiles, key_tiles, halves = q_scale.shape[1], triton.cdiv(n, BLOCK), n <= MOST_KEYS
    numbers = q_scale.new_empty(b * h * tiles * 4 * BLOCK)
    sums = q_scale.new_empty((b * h, tiles, BLOCK * dim), dtype=torch.float16 if halves else torch.float32)
    of_values = q_scale.new_empty((b * kv_heads, key_tiles))
    if halves:
        launch(
            _largest_values, b * kv_heads * key_tiles, (v, of_values), (*v.stride(), kv_heads, n, key_tiles),
            D=dim, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    launch(
        _prepare_rows, b * h * tiles, (q_scale, k_scale, do, o, lse2, of_values, numbers, sums),
        (*do.stride(), *o.stride(), h, m, tiles, h // kv_heads, key_tiles, k_scale.shape[1]),
        D=dim, BLOCK=BLOCK, HALVES=halves, num_warps=4,
    )  # fmt: skip
    return numbers, sums


def round_dq(numbers: Tensor, sums: Tensor, dq: Tensor, scale: float) -> None:
    """Writes dq [B, H, M, D] (any strides) = scale times its sums. They lie as `backward_scores` adds to them: a tile's
    parts one after the other, each in the order of `_add_to_memory`, which so is the order of the whole tile."""
    b, h, m, dim = dq.shape
    tiles = sums.shape[1]
    launch(
        _round_dq, b * h * tiles, (numbers, sums, dq), (*dq.stride(), h, m, tiles, scale),
        D=dim, BLOCK=BLOCK, J=2 if sums.dtype == torch.float16 else 1, num_warps=4,
    )  # fmt: skip
