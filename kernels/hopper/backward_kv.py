"""dK and dV on Hopper: a key tile a program; query tiles stream through shared memory. Everything is transposed."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from sagebwd.kernels.hopper.pieces import (
    BLOCK,
    add_part,
    hidden_zero,
    power_of_two,
    quantise_rows,
    release,
    seen,
    start_dp,
    start_part,
    start_s,
    store_half,
)


@gluon.jit
def _producer(
    descs, shared, where, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    DK: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    k_desc, v_desc, q_desc, q_columns_desc, do_desc, do_columns_desc, lse2_desc, delta_desc = descs
    k_tile, v_tile, q_ring, q_columns_ring, do_ring, do_columns_ring, lse2_ring, delta_ring, once, full, empty = shared
    b, kv, kv_head, group, col, n_pad, m_pad, lo, steps, tiles = where
    mbarrier.expect(once, GROUPS * BLOCK * D * (3 if DK else 1))
    for i in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(k_desc, [kv * n_pad + col + i * BLOCK, 0], once, k_tile.index(i))
        if DK:
            tma.async_copy_global_to_shared(v_desc, [b, kv_head, col + i * BLOCK, 0], once, v_tile.index(i))
    head = kv_head * group
    far = kv * group
    row = lo
    stage = 0
    phase = 1
    for _ in range(tiles):
        ready = full.index(stage)
        at = far * m_pad + row
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready, BLOCK * ((4 * D + 4 if DK else D) + (D if DV else 0) + 4))
        tma.async_copy_global_to_shared(q_desc, [at, 0], ready, q_ring.index(stage))
        tma.async_copy_global_to_shared(lse2_desc, [at], ready, lse2_ring.index(stage))
        if DK:
            tma.async_copy_global_to_shared(do_desc, [b, head, row, 0], ready, do_ring.index(stage))
            tma.async_copy_global_to_shared(delta_desc, [at], ready, delta_ring.index(stage))
        if DV:
            tma.async_copy_global_to_shared(do_columns_desc, [far * D, row], ready, do_columns_ring.index(stage))
        if DK:
            tma.async_copy_global_to_shared(q_columns_desc, [far * D, row], ready, q_columns_ring.index(stage))
        row += BLOCK
        if row == lo + steps * BLOCK:
            row = lo
            head += 1
            far += 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _vector(ring, stage, LAYOUT: gl.constexpr):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.index(stage)._reinterpret(gl.float32, [BLOCK], FLAT).load(LAYOUT)


@gluon.jit
def _step(
    state, row, last, next_block, keys, values, rings, tables, factor, cols, m, n,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    DK: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Adds the query tile of a stage, whose S and dP are under way, and starts S and dP of the next one (at the last
    one, of the same once more).

    sum_0 and sum_1: dV and dK of a head of 64; of a wider one, the halves of either.
    """
    s, dp, sum_0, sum_1, scale_of_q, scale_of_do, stage, phase = state
    q_ring, q_columns_ring, do_ring, do_columns_ring, lse2_ring, delta_ring, full, empty = rings
    COLS: gl.constexpr = gl.SliceLayout(0, sum_0.type.layout)
    next_scale_of_q = gl.load(tables[0] + next_block)
    next_scale_of_do = scale_of_do
    if DV:
        next_scale_of_do = gl.load(tables[1] + next_block)
    next_stage = stage + 1
    next_phase = phase
    if next_stage == STAGES:
        next_stage = 0
        next_phase = phase ^ 1
    next_stage = gl.where(last, stage, next_stage)
    next_phase = gl.where(last, phase, next_phase)
    tile_lse2 = _vector(lse2_ring, stage, COLS)
    if DK:
        tile_delta = _vector(delta_ring, stage, COLS)
        s, dp = warpgroup_mma_wait(0, [s, dp])
    else:
        s = warpgroup_mma_wait(0, [s])
    p = power_of_two(s.to(gl.float32) * (factor * scale_of_q) - tile_lse2[None, :])
    if MASKED:
        rows = row + gl.arange(0, BLOCK, COLS)
        p = gl.where(seen(rows[None, :], cols[:, None], m, n, CAUSAL), p, 0.0)
    if DV:
        p_hat, scale_0 = quantise_rows(p, gl.max(p, 1))
        scale_0 *= scale_of_do
        part_0 = start_part(p_hat, do_columns_ring, stage, 0)
        if not DK:
            scale_1 = scale_0
            part_1 = start_part(p_hat, do_columns_ring, stage, 1)
    if DK:
        ds = p * (gl.convert_layout(dp, p.type.layout, assert_trivial=True) - tile_delta[None, :])
        ds_hat, scale_1 = quantise_rows(ds, gl.max(gl.abs(ds), 1))
        scale_1 *= scale_of_q
        if not DV:
            scale_0 = scale_1
            part_0 = start_part(ds_hat, q_columns_ring, stage, 0)
        part_1 = start_part(ds_hat, q_columns_ring, stage, D // BLOCK - 1)
    part_0 = warpgroup_mma_wait(1, [part_0])
    sum_0 = add_part(sum_0, part_0, scale_0)
    mbarrier.wait(full.index(next_stage), next_phase)
    s = start_s(keys, q_ring, next_stage)
    part_1 = warpgroup_mma_wait(1, [part_1])
    release(empty, stage)
    if DK:
        dp = start_dp(values, do_ring, next_stage, D)
    sum_1 = add_part(sum_1, part_1, scale_1)
    return s, dp, sum_0, sum_1, next_scale_of_q, next_scale_of_do, next_stage, next_phase


@gluon.jit
def _consumer(
    shared, numbers, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    DK: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    k_tile, v_tile, q_ring, q_columns_ring, do_ring, do_columns_ring, lse2_ring, delta_ring, once, full, empty = shared
    q_scale, do_scale, k_scale, dk, dk_n, dk_d, dv, dv_n, dv_d = numbers[0]
    col, lo, steps, group, blocks, m, n, softmax_scale, factor = numbers[1]
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    col += GROUP * BLOCK
    cols = col + gl.arange(0, BLOCK, gl.SliceLayout(1, INT))
    factor *= gl.load(k_scale + gl.minimum(col, n - 1) // BLOCK)  # a tile may begin past the last key
    sum_0 = gl.zeros([BLOCK, BLOCK], gl.float32, INT)
    sum_1 = sum_0
    if steps > 0:
        keys = k_tile.index(GROUP)
        values = v_tile.index(GROUP if DK else 0).reshape([BLOCK, D])
        rings = (q_ring, q_columns_ring, do_ring, do_columns_ring, lse2_ring, delta_ring, full, empty)
        zero = hidden_zero(col)
        tables = (q_scale + zero, do_scale + zero)
        scale_of_q = gl.load(tables[0])
        scale_of_do = gl.load(tables[1])
        mbarrier.wait(once, 0)
        mbarrier.wait(full.index(0), 0)
        s = start_s(keys, q_ring, 0)
        dp = start_dp(values, do_ring, 0, D) if DK else 0
        state = (s, dp, sum_0, sum_1, scale_of_q, scale_of_do, 0, 0)
        masked = 0
        if CAUSAL:  # the queries before the first one that sees every key of this group
            masked = gl.cdiv(gl.maximum(0, col + BLOCK - 1 + m - n - lo), BLOCK)
            masked = gl.minimum(steps, masked)
        for head in range(group):
            next_head = gl.minimum(head + 1, group - 1) * blocks
            end = head + 1 == group
            if CAUSAL:
                for u in range(masked):
                    turn = u + 1 == steps
                    state = _step(
                        state, lo + u * BLOCK, turn & end, gl.where(turn, next_head, head * blocks + u + 1),
                        keys, values, rings, tables, factor, cols, m, n, CAUSAL, True, D, STAGES, DK, DV,
                    )  # fmt: skip
            for u in range(masked, steps):
                turn = u + 1 == steps
                state = _step(
                    state, lo + u * BLOCK, turn & end, gl.where(turn, next_head, head * blocks + u + 1),
                    keys, values, rings, tables, factor, cols, m, n, CAUSAL, False, D, STAGES, DK, DV,
                )  # fmt: skip
        if DK:
            warpgroup_mma_wait(0, [state[0], state[1]])
        else:
            warpgroup_mma_wait(0, [state[0]])
        sum_0 = state[2]
        sum_1 = state[3]
    valid = cols < n
    if DK and DV:
        store_half(dv, cols, dv_n, dv_d, sum_0, valid, 0)
        store_half(dk, cols, dk_n, dk_d, sum_1 * softmax_scale, valid, 0)
    elif DV:
        store_half(dv, cols, dv_n, dv_d, sum_0, valid, 0)
        store_half(dv, cols, dv_n, dv_d, sum_1, valid, 1)
    else:
        store_half(dk, cols, dk_n, dk_d, sum_0 * softmax_scale, valid, 0)
        store_half(dk, cols, dk_n, dk_d, sum_1 * softmax_scale, valid, 1)


@gluon.jit(do_not_specialize=["heads", "group", "m", "n", "shift", "key_tiles"])
def hopper_backward_kv(
    k_desc, v_desc, q_desc, q_columns_desc, do_desc, do_columns_desc, lse2_desc, delta_desc,
    q_scale, do_scale, k_scale, dk, dv, dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    heads, group, m, n, shift, m_pad, n_pad, softmax_scale, factor, key_tiles,
    CAUSAL: gl.constexpr, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    DK: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """shift: with a causal mask query i sees the keys up to i + shift; None: the last query sees every key."""
    pid = gl.program_id(0)
    kv = pid // key_tiles
    col = pid % key_tiles * (GROUPS * BLOCK)  # with a causal mask the first keys have the most queries
    kv_heads = heads // group
    b = kv // kv_heads
    kv_head = kv % kv_heads
    aligned = m  # so many queries would have the last one at the last key
    if shift is not None:
        aligned = n - shift
    lo = 0
    if CAUSAL:
        lo = gl.minimum(gl.cdiv(m, BLOCK), gl.maximum(0, col - (n - aligned)) // BLOCK) * BLOCK
    steps = gl.cdiv(m, BLOCK) - lo // BLOCK
    blocks = m_pad // BLOCK
    first = kv.to(gl.int64) * group * blocks + lo // BLOCK
    q_scale += first
    do_scale += first
    k_scale += kv.to(gl.int64) * (n_pad // BLOCK)
    dk += b.to(gl.int64) * dk_b + kv_head.to(gl.int64) * dk_h
    dv += b.to(gl.int64) * dv_b + kv_head.to(gl.int64) * dv_h

    # What a kernel for dV alone does not read gets one stage, unused.
    K_STAGES: gl.constexpr = STAGES if DK else 1
    V_STAGES: gl.constexpr = STAGES if DV else 1
    k_tile = gl.allocate_shared_memory(gl.int8, [GROUPS, BLOCK, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, [GROUPS if DK else 1, 1, 1, BLOCK, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], q_desc.layout)
    q_columns_ring = gl.allocate_shared_memory(gl.int8, [K_STAGES, D, BLOCK], q_columns_desc.layout)
    do_ring = gl.allocate_shared_memory(do_desc.dtype, [K_STAGES, 1, 1, BLOCK, D], do_desc.layout)
    do_columns_ring = gl.allocate_shared_memory(gl.int8, [V_STAGES, D, BLOCK], do_columns_desc.layout)
    lse2_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse2_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [K_STAGES, BLOCK], delta_desc.layout)
    once = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(once, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)

    descs = (k_desc, v_desc, q_desc, q_columns_desc, do_desc, do_columns_desc, lse2_desc, delta_desc)
    shared = (
        k_tile, v_tile, q_ring, q_columns_ring, do_ring, do_columns_ring, lse2_ring, delta_ring, once, full, empty
    )  # fmt: skip
    where = (b, kv, kv_head, group, col, n_pad, m_pad, lo, steps, steps * group)
    numbers = (
        (q_scale, do_scale, k_scale, dk, dk_n, dk_d, dv, dv_n, dv_d),
        (col, lo, steps, group, blocks, aligned, n, softmax_scale, factor),
    )
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (shared, numbers, 0, D, CAUSAL, STAGES, DK, DV)),
                (_consumer, (shared, numbers, 1, D, CAUSAL, STAGES, DK, DV)),
                (_producer, (descs, shared, where, D, GROUPS, STAGES, DK, DV)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, numbers, 0, D, CAUSAL, STAGES, DK, DV)),
                (_consumer, (shared, numbers, 1, D, CAUSAL, STAGES, DK, DV)),
                (_consumer, (shared, numbers, 2, D, CAUSAL, STAGES, DK, DV)),
                (_producer, (descs, shared, where, D, GROUPS, STAGES, DK, DV)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
