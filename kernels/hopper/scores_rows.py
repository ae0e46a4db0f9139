"""What `backward_scores` needs of each query row beforehand, and dQ out of the sums that it leaves: one pass each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.launch import launch

BLOCK = 64


@triton.jit(do_not_specialize=["heads", "m", "tiles"])
def _prepare_rows(
    q_scale, do, o, lse2, numbers, sums, do_b, do_h, do_m, do_d, o_b, o_h, o_m, o_d, heads, m, tiles,
    D: tl.constexpr, BLOCK: tl.constexpr,
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
    scale = tl.load(q_scale + pid) + tl.zeros((BLOCK,), tl.float32)
    # A thread of a product has columns 8h + 2t + e: of each two h its four together.
    place = inside // 16 * 16 + inside // 2 % 4 * 4 + inside // 8 % 2 * 2 + inside % 2
    tl.store(numbers + place, tl.load(lse2 + pid * BLOCK + inside))
    tl.store(numbers + BLOCK + place, tl.sum(grads * values, 1))
    tl.store(numbers + 2 * BLOCK + inside, scale)
    tl.store(numbers + 3 * BLOCK + inside, scale)
    tl.store(sums + pid * (BLOCK * D) + tl.arange(0, BLOCK * D), tl.zeros((BLOCK * D,), tl.float32))


@triton.jit(do_not_specialize=["heads", "m", "tiles"])
def _round_dq(sums, dq, dq_b, dq_h, dq_m, dq_d, heads, m, tiles, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """A tile's sums are read as they lie, and put in order in 16 bits: read in the order of dQ, a warp's 32 pieces of 8
    bytes would lie in 16 lines of memory."""
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the last sums were added to last: L2 has them
    bh = pid // tiles
    values = tl.load(sums + pid * (BLOCK * D) + tl.arange(0, BLOCK * D)) * scale
    values = tl.reshape(values.to(dq.dtype.element_ty), (D // 8, BLOCK // 16, 8, 4, 2, 2))  # h, w, g, t, i, e
    values = tl.reshape(tl.permute(values, (1, 4, 2, 0, 3, 5)), (BLOCK, D))
    rows = pid % tiles * BLOCK + tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, D)[None, :]
    dq += (bh // heads) * dq_b + (bh % heads) * dq_h
    tl.store(dq + rows * dq_m + d * dq_d, values, mask=rows < m)


def prepare_rows(q_scale: Tensor, do: Tensor, o: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """numbers [B H M' / 64 * 256] fp32: of each 64 queries lse2, delta = rowsum(do * o), both in the order in which a
    product's threads take them, and their scale 64 times, twice (TMA brings powers of 2). sums [B H, M' / 64, 64 D]
    fp32: zeros.

    q_scale [B H, M' / 64], do and o [B, H, M, D] (any strides), lse2 [B H, M'] fp32.
    """
    b, h, m, dim = do.shape
    tiles = q_scale.shape[1]
    numbers = q_scale.new_empty(b * h * tiles * 4 * BLOCK)
    sums = q_scale.new_empty((b * h, tiles, BLOCK * dim))
    launch(
        _prepare_rows, b * h * tiles, (q_scale, do, o, lse2, numbers, sums),
        (*do.stride(), *o.stride(), h, m, tiles), D=dim, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return numbers, sums


def round_dq(sums: Tensor, dq: Tensor, scale: float) -> None:
    """Writes dq [B, H, M, D] (any strides) = scale times its sums. They lie as `backward_scores` adds to them: a tile's
    parts one after the other, each in the order of `_add_to_memory`, which so is the order of the whole tile."""
    b, h, m, dim = dq.shape
    tiles = sums.shape[1]
    launch(
        _round_dq, b * h * tiles, (sums, dq), (*dq.stride(), h, m, tiles, scale), D=dim, BLOCK=BLOCK, num_warps=4
    )  # fmt: skip
