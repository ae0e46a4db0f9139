"""dQ, dK and dV at once on Hopper with products="scores": S in INT8, every other product of 16-bit operands.

A program has 128 keys of a head, 64 a warpgroup; query tiles stream through shared memory, and all is transposed: keys
are rows. dK and dV stay in registers. dS of both warpgroups meets in shared memory; each multiplies all of it by half
of K's columns, and TMA adds that to FP32 sums of dQ in memory (`scores_rows`), in whatever order programs come.
"""

from __future__ import annotations

import triton
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
from sagebwd.kernels.hopper.descriptors import plain_rows, tokens, vector, whole_rows
from sagebwd.kernels.hopper.operands import left_16_bit
from sagebwd.kernels.hopper.pieces import BLOCK, power_of_two, release, seen, start_dp, start_s
from sagebwd.kernels.hopper.scores_rows import prepare_rows
from sagebwd.kernels.hopper.tma_add import async_add_shared_to_global
from sagebwd.kernels.launch import launch
from sagebwd.kernels.quantise import Quantised

SLOTS = gl.constexpr(2)  # of dS
SUMS_ROW = gl.constexpr(256)  # of dQ's sums as TMA sees them: the most that its tile may be wide


@gluon.jit
def _producer(descs, shared, where, D: gl.constexpr, STAGES: gl.constexpr):
    k_desc, dk_desc, v_desc, q_desc, q16_desc, do_desc, numbers_desc = descs
    k_tile, k16_tile, v_tile, rings, once = shared
    q_ring, q16_ring, do_ring, numbers_ring, full, empty = rings
    b, kv, kv_head, group, col, n_pad, m_pad, lo, steps = where
    mbarrier.expect(once, 2 * BLOCK * D * 5)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(k_desc, [kv * n_pad + col + i * BLOCK, 0], once, k_tile.index(i))
        tma.async_copy_global_to_shared(v_desc, [b, kv_head, col + i * BLOCK, 0], once, v_tile.index(i))
        tma.async_copy_global_to_shared(dk_desc, [b, kv_head, col + i * BLOCK, 0], once, k16_tile.index(i))
    stage = 0
    phase = 1
    for g in range(group):
        head = kv_head * group + g
        far = kv * group + g
        for u in range(steps):
            row = lo + u * BLOCK
            ready = full.index(stage)
            at = far * m_pad + row
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BLOCK * (5 * D + 16))
            tma.async_copy_global_to_shared(q_desc, [at, 0], ready, q_ring.index(stage))
            tma.async_copy_global_to_shared(numbers_desc, [at * 4], ready, numbers_ring.index(stage))
            tma.async_copy_global_to_shared(do_desc, [b, head, row, 0], ready, do_ring.index(stage))
            tma.async_copy_global_to_shared(q16_desc, [b, head, row, 0], ready, q16_ring.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), 0)  # after the last tile comes another S, of whatever is there: nobody uses it


@gluon.jit
def _numbers(ring, stage, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """[64] of a stage: lse2 (0) and delta (1) of its queries; Q's scale, 64 times (2)."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.index(stage)._reinterpret(gl.float32, [4, BLOCK], FLAT).index(WHICH).load(LAYOUT)


@gluon.jit
def _settle(x, WHICH: gl.constexpr):
    """A loop that never turns, as x is not WHICH (negative): ptxas moves nothing across it. Left alone it delays a
    product's wait past the beginning of the next products, and spills sums for the registers in between."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; again: setp.ne.s32 p, $1, $2; @p bra end; nanosleep.u32 20; bra again; end: mov.b32 $0, 0; }",
        "=r,r,r", [x, WHICH], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _start_dq(ds_ring, slot, k16_tile, GROUP: gl.constexpr, D: gl.constexpr):
    """dS [64 queries, 128 keys] of a slot by this warpgroup's half of K's columns."""
    HALF: gl.constexpr = D // 2
    FLOAT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dq = gl.zeros([BLOCK, HALF], gl.float32, FLOAT)
    for w in gl.static_range(2):
        left = ds_ring.index(slot * 2 + w).permute((1, 0))
        right = k16_tile.index(w).reshape([BLOCK, D]).slice(GROUP * HALF, HALF, dim=1)
        dq = warpgroup_mma(left, right, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _add_to_memory(sums_desc, at, staging, x):
    """Adds x [64, HALF] to the sums' rows from `at` on, by way of `staging`, which this warpgroup alone uses.

    Registers go there 16 bytes a thread, 512 a warp: element 16h + 8b + 2t + e of row 16w + 8i + g is in place
    ((((2h + i) 4 + w) 8 + g) 4 + t) 4 + 2b + e. Added from registers, it would wait for the load/store units.
    """
    HALF: gl.constexpr = x.shape[1]
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    x = x.reshape([4, 2, 8, HALF // 16, 2, 4, 2]).permute((3, 1, 0, 2, 5, 4, 6)).reshape([BLOCK * HALF])
    x = gl.convert_layout(x, FLAT, assert_trivial=True)
    tma.store_wait(0)
    staging._reinterpret(gl.float32, [BLOCK * HALF], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(x)
    fence_async_shared()
    async_add_shared_to_global(sums_desc, [at, 0], staging)


@gluon.jit
def _write(desc, shared, b, head, col, values, D: gl.constexpr):
    """Rows col .. col + 63 of a head's [N, D]; rows past N are left out."""
    shared.reshape([BLOCK, D]).store(values.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [b, head, col, 0], shared)
    tma.store_wait(0)


@gluon.jit
def _step(
    state, row, at, tiles, rings, exchange, sums_desc, staging, factor, cols, m, n,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Adds the query tile of a stage, whose S is there, and computes S of the next one.

    The products of a warpgroup are dP; dV; dK and dQ; S: each under what the one before it makes possible. at: the row
    of `sums_desc` from which on this warpgroup's part of the tile's dQ is added up.
    """
    s, dv, dk, stage, phase, slot, slot_phase = state
    keys, values, k16_tile = tiles
    q_ring, q16_ring, do_ring, numbers_ring, full, empty = rings
    ds_ring, ds_full = exchange
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    FLOAT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLS: gl.constexpr = gl.SliceLayout(0, INT)
    next_stage = stage + 1
    next_phase = phase
    if next_stage == STAGES:
        next_stage = 0
        next_phase = phase ^ 1
    dp = start_dp(values, do_ring, stage, D)
    _settle(stage, -1)
    lse2 = _numbers(numbers_ring, stage, 0, COLS)
    row_factor = factor * _numbers(numbers_ring, stage, 2, gl.SliceLayout(1, INT))
    p = power_of_two(s.to(gl.float32) * row_factor[:, None] - lse2[None, :])
    if MASKED:
        rows = row + gl.arange(0, BLOCK, COLS)
        p = gl.where(seen(rows[None, :], cols[:, None], m, n, CAUSAL), p, 0.0)
    p16 = left_16_bit(p, WIDE, do_ring.dtype)
    dp = warpgroup_mma_wait(0, [dp])
    dv = warpgroup_mma(p16, do_ring.index(stage).reshape([BLOCK, D]), dv, is_async=True)
    _settle(stage, -2)
    delta = _numbers(numbers_ring, stage, 1, gl.SliceLayout(0, FLOAT))
    ds = gl.convert_layout(p, FLOAT, assert_trivial=True) * (dp - delta[None, :])
    ds16 = left_16_bit(ds, WIDE, do_ring.dtype)
    ds_ring.index(slot * 2 + GROUP).store(gl.convert_layout(ds16, FLOAT, assert_trivial=True))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot))
    dk = warpgroup_mma(ds16, q16_ring.index(stage).reshape([BLOCK, D]), dk, is_async=True)
    dv = warpgroup_mma_wait(1, [dv])
    # A slot is written over two tiles later: by then the other warpgroup has arrived for the tile between, after its
    # product of this one.
    mbarrier.wait(ds_full.index(slot), slot_phase)
    dq = _start_dq(ds_ring, slot, k16_tile, GROUP, D)
    dk = warpgroup_mma_wait(2, [dk])
    release(empty, stage)
    mbarrier.wait(full.index(next_stage), next_phase)
    s = start_s(keys, q_ring, next_stage)
    dq = warpgroup_mma_wait(1, [dq])
    _add_to_memory(sums_desc, at, staging, dq)
    s = warpgroup_mma_wait(0, [s])
    next_slot = slot + 1
    if next_slot == SLOTS:
        next_slot = 0
        slot_phase ^= 1
    return s, dv, dk, next_stage, next_phase, next_slot, slot_phase


@gluon.jit
def _consumer(
    shared, exchange, tensors, numbers, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    k_tile, k16_tile, v_tile, rings, once = shared
    k_scale, sums_desc, stagings, dk_desc, dv_desc = tensors
    b, kv_head, col, tile, lo, steps, group, blocks, m, n, softmax_scale, factor = numbers
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    col += GROUP * BLOCK
    cols = col + gl.arange(0, BLOCK, gl.SliceLayout(1, INT))
    factor *= gl.load(k_scale + gl.minimum(col, n - 1) // BLOCK)  # a tile may begin past the last key
    PARTS: gl.constexpr = BLOCK * D // SUMS_ROW  # rows of sums of a query tile
    part = tile * PARTS + GROUP * (PARTS // 2)
    staging = stagings.index(GROUP)
    dv = gl.zeros([BLOCK, D], gl.float32, WIDE)
    dk = gl.zeros([BLOCK, D], gl.float32, WIDE)
    mbarrier.wait(once, 0)
    if steps > 0:
        q_ring, _, _, _, full, _ = rings
        keys = k_tile.index(GROUP)
        tiles = (keys, v_tile.index(GROUP).reshape([BLOCK, D]), k16_tile)
        mbarrier.wait(full.index(0), 0)
        s = warpgroup_mma_wait(0, [start_s(keys, q_ring, 0)])
        state = (s, dv, dk, 0, 0, 0, 0)
        masked = 0
        if CAUSAL:  # the queries before the first one that sees every key of this group
            masked = gl.minimum(steps, gl.cdiv(gl.maximum(0, col + BLOCK - 1 + m - n - lo), BLOCK))
        masked = gl.where(col + BLOCK > n, steps, masked)
        for head in range(group):
            for u in range(masked):
                state = _step(
                    state, lo + u * BLOCK, part + (head * blocks + u) * PARTS, tiles, rings, exchange, sums_desc,
                    staging, factor, cols, m, n, CAUSAL, True, D, STAGES, GROUP,
                )  # fmt: skip
            for u in range(masked, steps):
                state = _step(
                    state, lo + u * BLOCK, part + (head * blocks + u) * PARTS, tiles, rings, exchange, sums_desc,
                    staging, factor, cols, m, n, CAUSAL, False, D, STAGES, GROUP,
                )  # fmt: skip
        dv = state[1]
        dk = state[2]
    _write(dv_desc, v_tile.index(GROUP), b, kv_head, col, dv, D)
    _write(dk_desc, v_tile.index(GROUP), b, kv_head, col, dk * softmax_scale, D)


@gluon.jit(do_not_specialize=["heads", "group", "m", "n", "key_tiles"])
def hopper_backward_scores(
    k_desc, v_desc, q_desc, q16_desc, do_desc, numbers_desc, dk_desc, dv_desc, sums_desc, k_scale,
    heads, group, m, n, m_pad, n_pad, softmax_scale, factor, key_tiles,
    CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk_desc: on entry it holds the smoothed K, which a program reads where it will write."""
    pid = gl.program_id(0)
    kv = pid // key_tiles
    col = pid % key_tiles * (2 * BLOCK)  # with a causal mask the first keys have the most queries
    kv_heads = heads // group
    b = kv // kv_heads
    kv_head = kv % kv_heads
    lo = 0
    if CAUSAL:
        lo = gl.minimum(gl.cdiv(m, BLOCK), gl.maximum(0, col - (n - m)) // BLOCK) * BLOCK
    steps = gl.cdiv(m, BLOCK) - lo // BLOCK
    blocks = m_pad // BLOCK
    tile = kv * group * blocks + lo // BLOCK
    k_scale += kv.to(gl.int64) * (n_pad // BLOCK)

    k_tile = gl.allocate_shared_memory(gl.int8, [2, BLOCK, D], k_desc.layout)
    k16_tile = gl.allocate_shared_memory(dk_desc.dtype, [2, 1, 1, BLOCK, D], dk_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, BLOCK, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], q_desc.layout)
    q16_ring = gl.allocate_shared_memory(q16_desc.dtype, [STAGES, 1, 1, BLOCK, D], q16_desc.layout)
    do_ring = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, BLOCK, D], do_desc.layout)
    numbers_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BLOCK], numbers_desc.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_ring = gl.allocate_shared_memory(do_desc.dtype, [2 * SLOTS, BLOCK, BLOCK], DS)
    stagings = gl.allocate_shared_memory(gl.float32, [2, BLOCK * D // 2 // SUMS_ROW, SUMS_ROW], sums_desc.layout)
    once = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(once, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ds_full.index(i), count=2)

    descs = (k_desc, dk_desc, v_desc, q_desc, q16_desc, do_desc, numbers_desc)
    rings = (q_ring, q16_ring, do_ring, numbers_ring, full, empty)
    shared = (k_tile, k16_tile, v_tile, rings, once)
    exchange = (ds_ring, ds_full)
    tensors = (k_scale, sums_desc, stagings, dk_desc, dv_desc)
    numbers = (b, kv_head, col, tile, lo, steps, group, blocks, m, n, softmax_scale, factor)
    where = (b, kv, kv_head, group, col, n_pad, m_pad, lo, steps)
    gl.warp_specialize(
        [
            (_consumer, (shared, exchange, tensors, numbers, 0, D, CAUSAL, STAGES)),
            (_consumer, (shared, exchange, tensors, numbers, 1, D, CAUSAL, STAGES)),
            (_producer, (descs, shared, where, D, STAGES)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


def backward(
    q8: Quantised, k8: Quantised, q: Tensor, do: Tensor, o: Tensor, lse2: Tensor, v: Tensor, dk: Tensor, dv: Tensor,
    *, causal: bool, softmax_scale: float,
) -> Tensor:  # fmt: skip
    """Writes dk and dv [B, K, N, D] of a call that `scores.backward_refusal` lets pass; returns the sums of dQ, for
    `scores_rows.round_dq`.

    q8 and k8 hold rows. q, do and o [B, H, M, D] and v as they came; lse2 [B H, M'] fp32 of the forward. dk holds the
    smoothed K, which is overwritten: the sums take as much memory as two tensors, and K none of its own.
    """
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    tune = tuning.hopper_scores_backward(dim)
    numbers, sums = prepare_rows(q8.scale, do, o, lse2)
    block = BLOCK.value
    key_tiles = triton.cdiv(n, 2 * block)
    launch(
        hopper_backward_scores, b * kv_heads * key_tiles,
        (
            whole_rows(k8.rows, block), tokens(v, block), whole_rows(q8.rows, block), tokens(q, block),
            tokens(do, block), vector(numbers, 4 * block), tokens(dk, block), tokens(dv, block),
            plain_rows(sums, SUMS_ROW.value, block * dim // 2 // SUMS_ROW.value), k8.scale,
        ),
        (
            h, h // kv_heads, m, n, q8.rows.shape[1], k8.rows.shape[1], softmax_scale, softmax_scale * tuning.LOG2E,
            key_tiles,
        ),
        CAUSAL=causal, D=dim, STAGES=tune.stages, REGISTERS=tune.registers, num_warps=4,
    )  # fmt: skip
    return sums
