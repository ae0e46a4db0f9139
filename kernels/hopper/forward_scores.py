"""Forward on Hopper with products="scores": S = Q K^T in INT8, P V of 16-bit operands, whose sums tensor cores add up.

A persistent program has three roles: one warp loads tiles through TMA, two warpgroups compute 64 query rows each. An
item (a query tile of a head) takes its key tiles from the last to the first, so that only the first ones it takes are
masked. All items are one stream of tiles: in a warpgroup the softmax of a tile runs while tensor cores multiply P and V
of the tile before, and an item's first S is computed with the last product of the item before.
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

from sagebwd.kernels import tuning
from sagebwd.kernels.hopper.descriptors import tokens, whole_rows
from sagebwd.kernels.hopper.operands import exp2, follow, left_16_bit, rescale, wide_rows, widen
from sagebwd.kernels.hopper.pieces import hidden_zero, release, seen
from sagebwd.kernels.hopper.schedule import item, items, key_tiles
from sagebwd.kernels.launch import launch
from sagebwd.kernels.quantise import Quantised

ROWS = gl.constexpr(64)  # of a warpgroup, and that share a scale of Q
BM = gl.constexpr(128)  # rows of a program's tile
BN = gl.constexpr(128)  # keys of a tile
PART = gl.constexpr(64)  # keys that share a scale
PARTS = gl.constexpr(2)


@gluon.constexpr_function
def _log2(x):
    return x.bit_length() - 1


@gluon.constexpr_function
def _slack(dtype):
    """How far (powers of 2) a row's peak may rise above the anchor before its sums are rescaled: P's type has the
    range."""
    return 32.0 if dtype.is_bf16() else 8.0


@gluon.jit
def _stage(g, STAGES: gl.constexpr):
    """Where the g-th of all tiles lies, of STAGES (a power of 2) places that are used in turn."""
    return g & (STAGES - 1)


@gluon.jit
def _phase(g, STAGES: gl.constexpr):
    """The phase of that place's barrier which ends when the g-th tile is there."""
    return g >> _log2(STAGES) & 1


@gluon.jit
def _load(descs, shared, sizes, CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr):
    """The g-th tile of all items goes to a stage of K and one of V. An item's Q comes with its first tile of K."""
    q_desc, k_desc, v_desc = descs
    q_tiles, k_tiles, v_tiles, q_empty, k_full, k_empty, v_full, v_empty = shared
    heads, group, m, n, m_pad, n_pad, row_tiles, all_heads = sizes
    g = 0
    count = 0
    for i in range(items(row_tiles, all_heads, CAUSAL)):
        tile, head, valid = item(i, row_tiles, CAUSAL)
        if valid:
            kv = head // group
            b = head // heads
            kv_head = kv - b * (heads // group)
            _, tiles = key_tiles(tile, m, n, CAUSAL, BM, BN)
            tiles = gl.maximum(tiles, 1)
            slot = _stage(count, SLOTS)
            stage = _stage(g, STAGES)
            mbarrier.wait(q_empty.index(slot), _phase(count, SLOTS) ^ 1)
            mbarrier.wait(k_empty.index(stage), _phase(g, STAGES) ^ 1)
            mbarrier.expect(k_full.index(stage), (BM + BN) * D)
            row = head * m_pad + tile * BM
            for w in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    q_desc, [row + w * ROWS, 0], k_full.index(stage), q_tiles.index(slot * 2 + w)
                )
            key = (tiles - 1) * BN
            tma.async_copy_global_to_shared(k_desc, [kv * n_pad + key, 0], k_full.index(stage), k_tiles.index(stage))
            for t in range(tiles):
                if t + 1 < tiles:  # a tile's K is wanted one softmax before its V
                    stage = _stage(g + 1, STAGES)
                    mbarrier.wait(k_empty.index(stage), _phase(g + 1, STAGES) ^ 1)
                    mbarrier.expect(k_full.index(stage), BN * D)
                    tma.async_copy_global_to_shared(
                        k_desc, [kv * n_pad + key - BN, 0], k_full.index(stage), k_tiles.index(stage)
                    )
                stage = _stage(g, STAGES)
                mbarrier.wait(v_empty.index(stage), _phase(g, STAGES) ^ 1)
                mbarrier.expect(v_full.index(stage), BN * D * 2)
                tma.async_copy_global_to_shared(v_desc, [b, kv_head, key, 0], v_full.index(stage), v_tiles.index(stage))
                key -= BN
                g += 1
            count += 1
    # With the last P V goes an S of whatever is there, which nobody looks at: its stage is waited for and handed back.
    stage = _stage(g, STAGES)
    mbarrier.wait(k_empty.index(stage), _phase(g, STAGES) ^ 1)
    mbarrier.expect(k_full.index(stage), 0)


@gluon.jit
def _await(full, g, STAGES: gl.constexpr):
    """Until tile g is in its stage. It is a branch, too, beyond which ptxas moves no exponentials: without one it moves
    the waits for products up before them."""
    mbarrier.wait(full.index(_stage(g, STAGES)), _phase(g, STAGES))


@gluon.jit
def _start_s(q, g, k_tiles, STAGES: gl.constexpr):
    """S of tile g; past the last one, of whatever lies in its stage."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    right = k_tiles.index(_stage(g, STAGES)).permute([1, 0])
    return warpgroup_mma(q, right, gl.full([ROWS, BN], 0, gl.int32, acc), use_acc=False, is_async=True)


@gluon.jit
def _start_o(p, out, g, v_tiles, D: gl.constexpr, STAGES: gl.constexpr):
    """out + P V of tile g."""
    return warpgroup_mma(p, v_tiles.index(_stage(g, STAGES)).reshape([BN, D]), out, is_async=True)


@gluon.jit
def _per_thread(x):
    """x [64, PARTS, 64] as [64, 4, PARTS, 16]: what each of the four threads that share a row has, apart."""
    return gl.reshape(gl.permute(gl.reshape(x, [ROWS, PARTS, 8, 4, 2]), [0, 3, 1, 2, 4]), [ROWS, 4, PARTS, 16])


@gluon.jit
def _softmax(
    s, f, rises, anchor, total, rows, start, m, n,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, SLACK: gl.constexpr, cells: gl.constexpr,
):  # fmt: skip
    """P [64, BN] in FP32 of int32 scores s [64, BN].

    f [PARTS]: of the scores. rises: whether one may be more than SLACK above its row's anchor; else nobody looks for
    their maximum. rows: of Q; start: the tile's first key. anchor [64, 4]: the base-2 logit that sums are relative to,
    as each of a row's threads has it; it follows the row's peak once that rises by SLACK. total [64, 4]: each thread's
    part of the sums. Returns P, anchor, total, and what to keep of earlier sums [64, 4].
    """
    s = gl.convert_layout(gl.reshape(s, [ROWS, PARTS, PART]), cells, assert_trivial=True)
    if MASKED:
        s = s.to(gl.float32) * gl.expand_dims(gl.expand_dims(f, 0), 2)
        part = gl.arange(0, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, cells)))
        inside = gl.arange(0, PART, gl.SliceLayout(0, gl.SliceLayout(1, cells)))
        cols = gl.expand_dims(gl.expand_dims(part, 0), 2) * PART + gl.expand_dims(gl.expand_dims(inside, 0), 1) + start
        s = gl.where(seen(gl.expand_dims(gl.expand_dims(rows, 1), 2), cols, m, n, CAUSAL), s, float("-inf"))
        s = _per_thread(s)
        peak = gl.max(gl.max(s, 3), 2)
        new, keep = follow(gl.convert_layout(peak, anchor.type.layout, assert_trivial=True), anchor, SLACK)
    else:
        s = _per_thread(s)
        new = anchor
        keep = gl.full([ROWS, 4], 1.0, gl.float32, anchor.type.layout)
        if rises:  # the maximum of integers: one instruction compares three
            most = gl.max(s, 3).to(gl.float32)
            own = gl.convert_layout(f, gl.SliceLayout(0, gl.SliceLayout(1, most.type.layout)), assert_trivial=True)
            peak = gl.max(most * gl.expand_dims(gl.expand_dims(own, 0), 1), 2)
            new, keep = follow(gl.convert_layout(peak, anchor.type.layout, assert_trivial=True), anchor, SLACK)
    base = new
    if MASKED:  # a row that sees nothing yet: exp2(-inf - 0) is the 0 that is wanted, exp2(-inf + inf) is not
        base = gl.where(new == float("-inf"), 0.0, new)
    of_row = gl.convert_layout(base, gl.SliceLayout(2, gl.SliceLayout(3, s.type.layout)), assert_trivial=True)
    of_row = gl.expand_dims(gl.expand_dims(of_row, 2), 3)
    if MASKED:
        p = exp2(s - of_row)
    else:
        factor = gl.convert_layout(
            f, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, s.type.layout))), assert_trivial=True
        )
        factor = gl.expand_dims(gl.expand_dims(gl.expand_dims(factor, 0), 1), 3)
        p = exp2(s.to(gl.float32) * factor - of_row)
    sums = gl.sum(gl.reshape(p, [ROWS, 4, PARTS * 16]), 2)
    total = total * keep + gl.convert_layout(sums, total.type.layout, assert_trivial=True)
    p = gl.reshape(gl.permute(gl.reshape(p, [ROWS, 4, PARTS, 8, 2]), [0, 2, 3, 1, 4]), [ROWS, BN])
    return p, new, total, keep


@gluon.jit
def _scales(k_scale, own, following, t, tiles, part):
    """K's scales [PARTS] of an item's tile t, counted in the order in which tiles are taken; past its last those of
    the next item's first. own: where the item's begin; following: where those of the next item's first tile are."""
    at = gl.where(t < tiles, own + (tiles - 1 - t) * PARTS, following)
    return gl.load(k_scale + at + part)


@gluon.jit
def _norm(k_norm, own, t, tiles):
    """The largest norm of K's rows in an item's tile t, or in its last one."""
    at = k_norm + own + gl.maximum(tiles - 1 - t, 0) * PARTS
    return gl.maximum(gl.load(at), gl.load(at + 1))


@gluon.jit
def _first_tile(
    s, f, g, start, rows, m, n, v_full,
    CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, SLACK: gl.constexpr,
    cells: gl.constexpr, parts: gl.constexpr,
):  # fmt: skip
    """P of an item's first tile, which is tile g, as a left operand, from its scores; anchor and total."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    anchor = gl.full([ROWS, 4], float("-inf"), gl.float32, parts)
    total = gl.zeros([ROWS, 4], gl.float32, parts)
    p, anchor, total, _ = _softmax(s, f, True, anchor, total, rows, start, m, n, CAUSAL, True, SLACK, cells)
    _await(v_full, g, STAGES)
    return left_16_bit(p, acc, DTYPE), anchor, total


@gluon.jit
def _tile(
    state, q, f, rises, g, start, rows, m, n, rings,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
    SLACK: gl.constexpr, cells: gl.constexpr,
):  # fmt: skip
    """S and softmax of tile g, and P V of the tile before. Nothing is in flight on entry and on return: ptxas makes
    products wait for each other if one spans the loop's end.

    state: P of the tile before; O, anchor and total. f [PARTS], rises: of tile g's scores.
    """
    p, out, anchor, total = state
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = rings
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    _await(k_full, g, STAGES)
    s = _start_s(q, g, k_tiles, STAGES)
    out = _start_o(p, out, g - 1, v_tiles, D, STAGES)
    s = warpgroup_mma_wait(1, [s])
    release(k_empty, _stage(g, STAGES))
    p, anchor, total, keep = _softmax(s, f, rises, anchor, total, rows, start, m, n, CAUSAL, MASKED, SLACK, cells)
    p = left_16_bit(p, acc, DTYPE)
    _await(v_full, g, STAGES)
    out = warpgroup_mma_wait(0, [out])
    release(v_empty, _stage(g - 1, STAGES))
    return p, rescale(out, keep, acc, D), anchor, total


@gluon.jit
def _place(i, sizes, CAUSAL: gl.constexpr):
    """Item i: query tile, head, tiles of keys that it sees whole, tiles that it takes, where K's scales begin."""
    _, group, m, n, _, n_pad, row_tiles, _ = sizes
    tile, head, _ = item(i, row_tiles, CAUSAL)
    whole, tiles = key_tiles(tile, m, n, CAUSAL, BM, BN)
    return tile, head, whole, gl.maximum(tiles, 1), head // group * (n_pad // PART)


@gluon.jit
def _rows(tile, W: gl.constexpr, layout: gl.constexpr):
    return tile * BM + W * ROWS + gl.arange(0, ROWS, layout)


@gluon.jit
def _block(tile, head, m_pad, W: gl.constexpr):
    """Which of Q's scales warpgroup W needs."""
    return head * (m_pad // ROWS) + tile * (BM // ROWS) + W


@gluon.jit
def _compute(
    W: gl.constexpr, shared, tensors, o_b, o_h, o_m, o_d, factor, sizes,  # in a tuple o_d = 1 would be no constant
    CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Warpgroup W's 64 rows of each item."""
    q_tiles, k_tiles, v_tiles, q_empty, k_full, k_empty, v_full, v_empty = shared
    rings = (k_tiles, v_tiles, k_full, k_empty, v_full, v_empty)
    q_scale, k_scale, q_norm, k_norm, o, lse2 = tensors
    heads, _, m, n, m_pad, _, row_tiles, all_heads = sizes
    SLACK: gl.constexpr = _slack(DTYPE)
    acc_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_part = gl.reshape(gl.full([ROWS, BN], 0, gl.int32, acc_s), [ROWS, PARTS, PART])
    cells: gl.constexpr = by_part.type.layout
    parts: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, _per_thread(by_part).type.layout))
    s_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, cells))
    out_rows: gl.constexpr = gl.SliceLayout(1, acc)
    stored: gl.constexpr = wide_rows(D)
    zero = hidden_zero(m)
    part = gl.arange(0, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, cells))) + zero
    alike = part * 0 + zero

    total_items = items(row_tiles, all_heads, CAUSAL)
    tile, head, _, tiles, own = _place(0, sizes, CAUSAL)
    qf = gl.load(q_scale + _block(tile, head, m_pad, W) + alike) * factor
    scales = _scales(k_scale, own, own, 0, tiles, part)
    g = 0  # tiles of all items so far
    count = 0  # items so far
    _await(k_full, 0, STAGES)
    s = warpgroup_mma_wait(0, [_start_s(q_tiles.index(W), 0, k_tiles, STAGES)])
    release(k_empty, 0)
    for i in range(total_items):
        valid = i >= 0
        if CAUSAL:
            _, _, valid = item(i, row_tiles, CAUSAL)
        if valid:
            tile, head, whole, tiles, own = _place(i, sizes, CAUSAL)
            following = i + 1
            if CAUSAL:
                _, _, next_valid = item(following, row_tiles, CAUSAL)
                following = gl.where(next_valid, following, following + 1)
            more = following < total_items
            next_tile, next_head, _, next_tiles, next_own = _place(gl.where(more, following, i), sizes, CAUSAL)
            next_first = next_own + (next_tiles - 1) * PARTS
            q = q_tiles.index(_stage(count, SLOTS) * 2 + W)
            next_q = q_tiles.index(_stage(count + 1, SLOTS) * 2 + W)
            s_row = _rows(tile, W, s_rows)
            f = qf * scales
            scales = _scales(k_scale, own, next_first, 1, tiles, part)
            p, anchor, total = _first_tile(
                s, f, g, (tiles - 1) * BN, s_row, m, n, v_full, CAUSAL, D, STAGES, DTYPE, SLACK, cells, parts
            )
            state = (p, gl.zeros([ROWS, D], gl.float32, acc), anchor, total)
            g += 1
            masked = gl.maximum(tiles - whole, 1)
            if CAUSAL:
                # q, so that ptxas cannot tell. Of descriptors known to be equal it computes those of the loop after
                # this one here alone, where they are missing if this loop does not turn (`kernels.uniform`).
                again = q_tiles.index(_stage(count, SLOTS) * 2 + W + zero)
                for t in range(1, masked):
                    f = qf * scales
                    scales = _scales(k_scale, own, next_first, t + 1, tiles, part)
                    state = _tile(
                        state, again, f, True, g, (tiles - 1 - t) * BN, s_row, m, n, rings,
                        CAUSAL, True, D, STAGES, DTYPE, SLACK, cells,
                    )  # fmt: skip
                    g += 1
            # By Cauchy and Schwarz no score of a tile is more than SLACK above its row's anchor unless the product of
            # the largest norms is. Ordinary logits stay below that, and then a tile's maximum need not be known.
            lowest = gl.min(gl.min(state[2], 1), 0) + SLACK
            highest_norm = lowest / (gl.load(q_norm + _block(tile, head, m_pad, W) + zero) * factor)
            norm = _norm(k_norm, own + zero, masked, tiles)
            for t in range(masked, tiles):
                f = qf * scales
                rises = (norm <= highest_norm) == 0  # also where one is NaN
                norm = _norm(k_norm, own + zero, t + 1, tiles)
                scales = _scales(k_scale, own, next_first, t + 1, tiles, part)
                state = _tile(
                    state, q, f, rises, g, (tiles - 1 - t) * BN, s_row, m, n, rings,
                    CAUSAL, False, D, STAGES, DTYPE, SLACK, cells,
                )  # fmt: skip
                g += 1
            p, out, anchor, total = state
            qf = gl.load(q_scale + _block(next_tile, next_head, m_pad, W) + alike) * factor
            _await(k_full, g, STAGES)
            s = _start_s(next_q, g, k_tiles, STAGES)  # the next item's first; after the last item nobody looks at it
            out = _start_o(p, out, g - 1, v_tiles, D, STAGES)
            row_total = gl.convert_layout(gl.sum(total, 1), out_rows, assert_trivial=True)
            rows = _rows(tile, W, out_rows)
            blind = row_total == 0.0
            peak = gl.convert_layout(gl.max(anchor, 1), out_rows, assert_trivial=True)
            logsum = gl.where(blind | (rows >= m), float("inf"), peak + gl.log2(row_total))
            gl.store(lse2 + head.to(gl.int64) * m_pad + rows, logsum)
            inverse = 1.0 / gl.where(blind, 1.0, row_total)
            s, out = warpgroup_mma_wait(0, [s, out])
            release(k_empty, _stage(g, STAGES))
            release(v_empty, _stage(g - 1, STAGES))
            release(q_empty, _stage(count, SLOTS))
            count += 1
            out = widen((out * gl.expand_dims(inverse, 1)).to(o.dtype.element_ty), D)
            rows = _rows(tile, W, gl.SliceLayout(1, stored))
            d = gl.arange(0, D, gl.SliceLayout(0, stored))
            place = o + (head // heads).to(gl.int64) * o_b + (head % heads).to(gl.int64) * o_h
            place = place + gl.expand_dims(rows.to(gl.int64) * o_m, 1) + gl.expand_dims(d.to(gl.int64) * o_d, 0)
            gl.store(place, out, mask=gl.expand_dims(rows < m, 1))


@gluon.jit(do_not_specialize=["heads", "group", "m", "n", "row_tiles", "all_heads"])
def hopper_forward_scores(
    q_desc, k_desc, v_desc, q_scale, k_scale, q_norm, k_norm, o, lse2, o_b, o_h, o_m, o_d,
    heads, group, m, n, m_pad, n_pad, factor, row_tiles, all_heads,
    CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = v_desc.dtype
    q_tiles = gl.allocate_shared_memory(gl.int8, [SLOTS * 2, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BN, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], v_desc.layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(q_empty.index(slot), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc)
    shared = (q_tiles, k_tiles, v_tiles, q_empty, k_full, k_empty, v_full, v_empty)
    tensors = (q_scale, k_scale, q_norm, k_norm, o, lse2)
    sizes = (heads, group, m, n, m_pad, n_pad, row_tiles, all_heads)
    gl.warp_specialize(
        [
            (_compute, (
                gl.constexpr(0), shared, tensors, o_b, o_h, o_m, o_d, factor, sizes, CAUSAL, D, STAGES, SLOTS, DTYPE,
            )),
            (_compute, (
                gl.constexpr(1), shared, tensors, o_b, o_h, o_m, o_d, factor, sizes, CAUSAL, D, STAGES, SLOTS, DTYPE,
            )),
            (_load, (descs, shared, sizes, CAUSAL, D, STAGES, SLOTS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def forward(q: Quantised, k: Quantised, v: Tensor, o: Tensor, *, causal: bool, softmax_scale: float) -> Tensor:
    """Writes o [B, H, M, D] (any strides) and returns lse2 [B H, M'] fp32: `kernels.scores.forward`, for what
    `scores_refusal` lets pass.

    q and k hold rows. v [B, K, N, D] in 16 bit as it came, with rows that TMA can read.
    """
    b, h, m, dim = o.shape
    kv_heads, n = v.shape[1:3]
    m_pad, n_pad = q.rows.shape[1], k.rows.shape[1]
    tune = tuning.hopper_scores_forward()
    lse2 = torch.empty((b * h, m_pad), dtype=torch.float32, device=o.device)
    row_tiles = m_pad // BM.value
    units = (-(-row_tiles // 2) if causal else row_tiles) * b * h
    launch(
        hopper_forward_scores, min(tuning.processors(o.device), units),
        (
            whole_rows(q.rows, ROWS.value), whole_rows(k.rows, BN.value), tokens(v, BN.value),
            q.scale, k.scale, q.norm, k.norm, o, lse2,
        ),
        (*o.stride(), h, h // kv_heads, m, n, m_pad, n_pad, softmax_scale * tuning.LOG2E, row_tiles, b * h),
        CAUSAL=causal, D=dim, STAGES=tune.stages, SLOTS=tune.slots, REGISTERS=tune.registers, num_warps=4,
    )  # fmt: skip
    return lse2
