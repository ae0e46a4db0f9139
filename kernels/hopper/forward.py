"""Forward on Hopper: INT8 S = Q K^T and O = P V, an online softmax between them, P never leaving its registers.

A persistent program has three roles: one warp loads tiles through TMA, two warpgroups compute 64 query rows each. P has
a scale a row and block of keys, as in the portable kernel; a tile of 128 keys is one block, or two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels import tuning
from sagebwd.kernels.hopper.descriptors import whole_rows
from sagebwd.kernels.hopper.operands import exp2, left_operand, rescale_rows
from sagebwd.kernels.hopper.schedule import item, items, key_tiles
from sagebwd.kernels.launch import launch
from sagebwd.kernels.quantise import Quantised

ROWS = gl.constexpr(64)  # of a warpgroup
BM = gl.constexpr(128)  # rows of a program's tile
BN = gl.constexpr(128)  # keys of a tile
# How far (in powers of 2) a tile's row peak may rise above the anchor before the sums are rescaled: FP32 has the range.
SLACK = gl.constexpr(32.0)


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, q_tiles, first_k, k_tiles, v_tiles, q_full, q_empty, full, empty,
    group, m, n, m_pad, n_pad, row_tiles, all_heads,
    CAUSAL: gl.constexpr, DP: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """For each item, into a slot: Q and the first tile of K; then, into a stage, each tile of V with the next of K."""
    at = 0
    count = 0
    for i in range(items(row_tiles, all_heads, CAUSAL)):
        tile, head, valid = item(i, row_tiles, CAUSAL)
        if valid:
            kv = head // group
            _, tiles = key_tiles(tile, m, n, CAUSAL, BM, BN)
            slot = count % SLOTS
            mbarrier.wait(q_empty.index(slot), (count // SLOTS & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), (BM + BN) * DP)
            row = head * m_pad + tile * BM
            for w in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    q_desc, [row + w * ROWS, 0], q_full.index(slot), q_tiles.index(slot * 2 + w)
                )
            tma.async_copy_global_to_shared(k_desc, [kv * n_pad, 0], q_full.index(slot), first_k.index(slot))
            count += 1
            for j in range(tiles):
                stage = at % STAGES
                mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), 2 * BN * DP)
                tma.async_copy_global_to_shared(v_desc, [kv * DP, j * BN], full.index(stage), v_tiles.index(stage))
                following = gl.minimum(j + 1, tiles - 1)  # after the last tile any: its product is not used
                tma.async_copy_global_to_shared(
                    k_desc, [kv * n_pad + following * BN, 0], full.index(stage), k_tiles.index(stage)
                )
                at += 1


@gluon.jit
def _softmax(
    s, factor, anchor, total, rows, start, m, n,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, BLOCKS: gl.constexpr, cells: gl.constexpr,
):  # fmt: skip
    """P [64, BLOCKS, keys] in [0, 1], each block of keys by its own row peak, from int32 scores s [64, BN].

    factor [64, BLOCKS]: of the scores. anchor [64]: the base-2 logit that sums are relative to; it follows the rows'
    peaks once they rise by SLACK. total [64, 4]: each thread's part of the rows' sums.
    Returns P, anchor, total, what to keep of earlier sums [64], and the blocks' weights [64, BLOCKS].
    """
    K: gl.constexpr = BN // BLOCKS
    s = gl.convert_layout(gl.reshape(s, [ROWS, BLOCKS, K]), cells, assert_trivial=True)
    if MASKED:
        x = s.to(gl.float32) * gl.expand_dims(factor, 2)
        block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, cells)))
        inside = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, cells)))
        cols = gl.expand_dims(gl.expand_dims(block, 0), 2) * K + gl.expand_dims(gl.expand_dims(inside, 0), 1) + start
        seen = cols < n
        if CAUSAL:  # aligned bottom right: the last query sees every key
            seen = seen & (cols <= gl.expand_dims(gl.expand_dims(rows, 1), 2) + (n - m))
        x = gl.where(seen, x, float("-inf"))
        peak = gl.max(x, 2)
        base = gl.where(peak == float("-inf"), 0.0, peak)
        p = exp2(x - gl.expand_dims(base, 2))
    else:
        peak = gl.max(s, 2).to(gl.float32) * factor  # the maximum of integers: one instruction compares three
        p = exp2(s.to(gl.float32) * gl.expand_dims(factor, 2) - gl.expand_dims(peak, 2))
    highest = gl.max(peak, 1)
    new_anchor = gl.where(highest > anchor + SLACK, highest, anchor)
    base = new_anchor
    if MASKED:  # a row that sees nothing yet: exp2(-inf - 0) is the 0 that is wanted, exp2(-inf + inf) is not
        base = gl.where(new_anchor == float("-inf"), 0.0, new_anchor)
    weight = exp2(peak - gl.expand_dims(base, 1))
    keep = exp2(anchor - base)
    sums = gl.permute(gl.reshape(p, [ROWS, BLOCKS, K // 8, 4, 2]), [0, 3, 1, 2, 4])
    sums = gl.sum(gl.reshape(sums, [ROWS, 4, BLOCKS, K // 4]), 3)
    weights = gl.convert_layout(weight, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    sums = gl.sum(sums * gl.expand_dims(weights, 1), 2)
    sums = gl.convert_layout(sums, total.type.layout, assert_trivial=True)
    keeps = gl.convert_layout(keep, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return p, new_anchor, total * gl.expand_dims(keeps, 1) + sums, keep, weight


@gluon.jit
def _add(out, product, scale, acc: gl.constexpr):
    """out + product * scale: int32 sums [64, D] and a scale a row."""
    scale = gl.convert_layout(scale, gl.SliceLayout(1, acc), assert_trivial=True)
    return out + product.to(gl.float32) * gl.expand_dims(scale, 1)


@gluon.jit
def _attend(
    first, end, last, at, s, out, anchor, total, k_scales, v_scales,
    q, k_tiles, v_tiles, full, empty, k_scale, v_scale, q_factor, rows, m, n,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, DP: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    cells: gl.constexpr, acc_s: gl.constexpr, acc: gl.constexpr,
):  # fmt: skip
    """Key tiles [first, end) of an item whose last one is `last`. On entry and on return the next tile's scores `s` are
    there, and no product is in flight: ptxas makes products wait for each other if one spans the loop's end."""
    BLOCKS: gl.constexpr = BN // BK
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, cells)))
    for j in range(first, end):
        stage = at % STAGES
        following = gl.minimum(j + 1, last)  # its scales, in time
        next_k_scales = gl.load(k_scale + following * BLOCKS + block)
        next_v_scales = gl.load(v_scale + following * BLOCKS + block)
        p, anchor, total, keep, weight = _softmax(
            s, gl.expand_dims(q_factor, 1) * gl.expand_dims(k_scales, 0), anchor, total, rows, j * BN, m, n,
            CAUSAL, MASKED, BLOCKS, cells,
        )  # fmt: skip
        scale = weight * gl.expand_dims(v_scales, 0)
        keep = gl.convert_layout(keep, gl.SliceLayout(1, acc), assert_trivial=True)
        nothing = gl.full([ROWS, DP], 0, gl.int32, acc)
        if BLOCKS == 2:
            early, late = gl.split(gl.permute(p, [0, 2, 1]))
            early_scale, late_scale = gl.split(scale)
            early_left = left_operand(early, acc, BK)
            late_left = left_operand(late, acc, BK)
        else:
            early_left = left_operand(gl.reshape(p, [ROWS, BN]), acc, BK)
            early_scale = gl.sum(scale, 1)
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=at > 0)
        mbarrier.wait(full.index(stage), at // STAGES & 1)
        values = v_tiles.index(stage)
        right = values.slice(0, BK, 1).permute([1, 0]) if BLOCKS == 2 else values.permute([1, 0])
        product = warpgroup_mma(early_left, right, nothing, use_acc=False, is_async=True)
        s_next = warpgroup_mma(
            q,
            k_tiles.index(stage).permute([1, 0]),
            gl.full([ROWS, BN], 0, gl.int32, acc_s),
            use_acc=False,
            is_async=True,
        )
        out = rescale_rows(out, gl.expand_dims(keep, 1) + gl.zeros([64, DP], gl.float32, acc), DP)
        product = warpgroup_mma_wait(1, [product])
        out = _add(out, product, early_scale, acc)
        if BLOCKS == 2:
            right = values.slice(BK, BK, 1).permute([1, 0])
            product = warpgroup_mma(late_left, right, nothing, use_acc=False, is_async=True)
            s, product = warpgroup_mma_wait(0, [s_next, product])
            out = _add(out, product, late_scale, acc)
        else:
            s = warpgroup_mma_wait(0, [s_next])
        k_scales = next_k_scales
        v_scales = next_v_scales
        at += 1
    return at, s, out, anchor, total, k_scales, v_scales


@gluon.jit
def _compute(
    W: gl.constexpr, q_tiles, first_k, k_tiles, v_tiles, q_full, q_empty, full, empty,
    q_scale, k_scale, v_scale, o, lse2, o_b, o_h, o_m, o_d,
    heads, group, m, n, m_pad, n_pad, factor, row_tiles, all_heads,
    CAUSAL: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Warpgroup W's 64 rows of each item."""
    BLOCKS: gl.constexpr = BN // BK
    acc_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 32])
    no_scores = gl.full([ROWS, BN], 0, gl.int32, acc_s)
    cells: gl.constexpr = gl.reshape(no_scores, [ROWS, BLOCKS, BK]).type.layout
    by_thread = gl.permute(gl.reshape(no_scores, [ROWS, BN // 8, 4, 2]), [0, 2, 1, 3])
    parts: gl.constexpr = gl.SliceLayout(2, gl.reshape(by_thread, [ROWS, 4, BN // 4]).type.layout)
    s_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, cells))
    out_rows: gl.constexpr = gl.SliceLayout(1, acc)
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, cells)))
    at = 0
    count = 0
    for i in range(items(row_tiles, all_heads, CAUSAL)):
        tile, head, valid = item(i, row_tiles, CAUSAL)
        if valid:
            kv = head // group
            whole, tiles = key_tiles(tile, m, n, CAUSAL, BM, BN)
            rows = tile * BM + W * ROWS + gl.arange(0, ROWS, s_rows)
            q_factor = gl.load(q_scale + head * (m_pad // BQ) + rows // BQ) * factor
            k_scale_at = k_scale + kv * (n_pad // BK)
            v_scale_at = v_scale + kv * (n_pad // BK)
            k_scales = gl.load(k_scale_at + block)
            v_scales = gl.load(v_scale_at + block)
            slot = count % SLOTS
            mbarrier.wait(q_full.index(slot), count // SLOTS & 1)
            q = q_tiles.index(slot * 2 + W)
            s = warpgroup_mma(q, first_k.index(slot).permute([1, 0]), no_scores, use_acc=False, is_async=True)
            out = gl.zeros([ROWS, DP], gl.float32, acc)
            anchor = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
            total = gl.zeros([ROWS, 4], gl.float32, parts)
            s = warpgroup_mma_wait(0, [s])
            at, s, out, anchor, total, k_scales, v_scales = _attend(
                0, whole, tiles - 1, at, s, out, anchor, total, k_scales, v_scales,
                q, k_tiles, v_tiles, full, empty, k_scale_at, v_scale_at, q_factor, rows, m, n,
                CAUSAL, False, DP, BK, STAGES, cells, acc_s, acc,
            )  # fmt: skip
            at, s, out, anchor, total, k_scales, v_scales = _attend(
                whole, tiles, tiles - 1, at, s, out, anchor, total, k_scales, v_scales,
                q, k_tiles, v_tiles, full, empty, k_scale_at, v_scale_at, q_factor, rows, m, n,
                CAUSAL, True, DP, BK, STAGES, cells, acc_s, acc,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(slot))
            count += 1
            total = gl.convert_layout(gl.sum(total, 1), s_rows, assert_trivial=True)
            blind = total == 0.0
            logsum = gl.where(blind | (rows >= m), float("inf"), anchor + gl.log2(total))
            gl.store(lse2 + head.to(gl.int64) * m_pad + rows, logsum)
            inverse = 1.0 / gl.where(blind, 1.0, total * 127.0)
            out = out * gl.expand_dims(gl.convert_layout(inverse, out_rows, assert_trivial=True), 1)
            rows = tile * BM + W * ROWS + gl.arange(0, ROWS, out_rows)
            d = gl.arange(0, DP, gl.SliceLayout(0, acc))
            place = o + (head // heads).to(gl.int64) * o_b + (head % heads).to(gl.int64) * o_h
            place = place + gl.expand_dims(rows.to(gl.int64) * o_m, 1) + gl.expand_dims(d.to(gl.int64) * o_d, 0)
            inside = gl.expand_dims(rows < m, 1) & gl.expand_dims(d < D, 0)
            gl.store(place, out.to(o.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["heads", "group", "m", "n", "row_tiles", "all_heads"])
def _hopper_forward(
    q_desc, k_desc, v_desc, q_scale, k_scale, v_scale, o, lse2, o_b, o_h, o_m, o_d,
    heads, group, m, n, m_pad, n_pad, factor, row_tiles, all_heads,
    CAUSAL: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    q_tiles = gl.allocate_shared_memory(gl.int8, [SLOTS * 2, ROWS, DP], q_desc.layout)
    first_k = gl.allocate_shared_memory(gl.int8, [SLOTS, BN, DP], k_desc.layout)
    k_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BN, DP], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, DP, BN], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                gl.constexpr(0), q_tiles, first_k, k_tiles, v_tiles, q_full, q_empty, full, empty,
                q_scale, k_scale, v_scale, o, lse2, o_b, o_h, o_m, o_d,
                heads, group, m, n, m_pad, n_pad, factor, row_tiles, all_heads,
                CAUSAL, D, DP, BQ, BK, STAGES, SLOTS,
            )),
            (_compute, (
                gl.constexpr(1), q_tiles, first_k, k_tiles, v_tiles, q_full, q_empty, full, empty,
                q_scale, k_scale, v_scale, o, lse2, o_b, o_h, o_m, o_d,
                heads, group, m, n, m_pad, n_pad, factor, row_tiles, all_heads,
                CAUSAL, D, DP, BQ, BK, STAGES, SLOTS,
            )),
            (_load, (
                q_desc, k_desc, v_desc, q_tiles, first_k, k_tiles, v_tiles, q_full, q_empty, full, empty,
                group, m, n, m_pad, n_pad, row_tiles, all_heads, CAUSAL, DP, STAGES, SLOTS,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def forward(
    q: Quantised, k: Quantised, v: Quantised, k_source: Tensor, o: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig,
) -> Tensor:  # fmt: skip
    """Writes o [B, H, M, D] (any strides) and returns lse2 [B H, M'] fp32: `kernels.forward.forward`, for what
    `hopper.refusal` lets pass.

    q and k hold rows, v holds columns. k_source [B, K, N, D] is not read.
    """
    b, h, m, dim = o.shape
    kv_heads, n = k_source.shape[1:3]
    m_pad, dp = q.rows.shape[1:]
    n_pad = k.rows.shape[1]
    tune = tuning.hopper_forward()
    lse2 = torch.empty((b * h, m_pad), dtype=torch.float32, device=o.device)
    row_tiles = m_pad // BM.value
    units = (-(-row_tiles // 2) if causal else row_tiles) * b * h
    launch(
        _hopper_forward, min(tuning.processors(o.device), units),
        (
            whole_rows(q.rows, ROWS.value), whole_rows(k.rows, BN.value), whole_rows(v.columns, dp),
            q.scale, k.scale, v.scale, o, lse2,
        ),
        (*o.stride(), h, h // kv_heads, m, n, m_pad, n_pad, softmax_scale * tuning.LOG2E, row_tiles, b * h),
        CAUSAL=causal, D=dim, DP=dp, BQ=config.block_q, BK=config.block_k,
        STAGES=tune.stages, SLOTS=tune.slots, REGISTERS=tune.registers, num_warps=4,
    )  # fmt: skip
    return lse2
