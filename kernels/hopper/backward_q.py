"""dQ on Hopper: a query tile a program; key tiles stream through shared memory."""

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
def _producer(descs, shared, where, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    q_desc, do_desc, k_desc, k_columns_desc, v_desc = descs
    q_tile, do_tile, k_ring, k_columns_ring, v_ring, once, full, empty = shared
    q_row, k_row, k_column_row, b, head, kv_head, row, tiles = where
    mbarrier.expect(once, GROUPS * BLOCK * D * 3)
    for i in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(q_desc, [q_row + i * BLOCK, 0], once, q_tile.index(i))
        tma.async_copy_global_to_shared(do_desc, [b, head, row + i * BLOCK, 0], once, do_tile.index(i))
    stage = 0
    phase = 1
    for t in range(tiles):
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready, BLOCK * D * 4)
        tma.async_copy_global_to_shared(k_desc, [k_row + t * BLOCK, 0], ready, k_ring.index(stage))
        tma.async_copy_global_to_shared(v_desc, [b, kv_head, t * BLOCK, 0], ready, v_ring.index(stage))
        tma.async_copy_global_to_shared(k_columns_desc, [k_column_row, t * BLOCK], ready, k_columns_ring.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _step(
    state, t, tiles, queries, grads, rings, k_scale, row_numbers, rows, m, n,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds key tile t, whose S and dP are under way, to dQ, and starts S and dP of the next one (at the last one, of
    the same once more)."""
    s, dp, dq_0, dq_1, scale, stage, phase = state
    k_ring, k_columns_ring, v_ring, full, empty = rings
    factor, row_lse2, row_delta = row_numbers
    last = t + 1 >= tiles
    next_scale = gl.load(k_scale + gl.minimum(t + 1, tiles - 1))
    next_stage = stage + 1
    next_phase = phase
    if next_stage == STAGES:
        next_stage = 0
        next_phase = phase ^ 1
    next_stage = gl.where(last, stage, next_stage)
    next_phase = gl.where(last, phase, next_phase)
    s, dp = warpgroup_mma_wait(0, [s, dp])
    p = power_of_two(s.to(gl.float32) * (factor * scale) - row_lse2[:, None])
    if MASKED:
        cols = t * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, p.type.layout))
        p = gl.where(seen(rows[:, None], cols[None, :], m, n, CAUSAL), p, 0.0)
    ds = p * (gl.convert_layout(dp, p.type.layout, assert_trivial=True) - row_delta[:, None])
    ds_hat, ds_scale = quantise_rows(ds, gl.max(gl.abs(ds), 1))
    ds_scale *= scale
    part_0 = start_part(ds_hat, k_columns_ring, stage, 0)
    if D == 128:
        part_1 = start_part(ds_hat, k_columns_ring, stage, 1)
    mbarrier.wait(full.index(next_stage), next_phase)
    s = start_s(queries, k_ring, next_stage)
    dp = start_dp(grads, v_ring, next_stage, D)
    if D == 128:
        part_0 = warpgroup_mma_wait(3, [part_0])
        dq_0 = add_part(dq_0, part_0, ds_scale)
        part_1 = warpgroup_mma_wait(2, [part_1])
        release(empty, stage)
        dq_1 = add_part(dq_1, part_1, ds_scale)
    else:
        part_0 = warpgroup_mma_wait(2, [part_0])
        release(empty, stage)
        dq_0 = add_part(dq_0, part_0, ds_scale)
    return s, dp, dq_0, dq_1, next_scale, next_stage, next_phase


@gluon.jit
def _consumer(shared, numbers, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr):
    q_tile, do_tile, k_ring, k_columns_ring, v_ring, once, full, empty = shared
    q_scale, k_scale, lse2, delta, dq, dq_m, dq_d, row, tiles, m, n, softmax_scale, factor = numbers
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    row += GROUP * BLOCK
    rows = row + gl.arange(0, BLOCK, gl.SliceLayout(1, INT))
    row_lse2 = gl.load(lse2 + rows, mask=rows < m, other=float("inf"))
    row_delta = gl.load(delta + rows, mask=rows < m, other=0.0)
    factor *= gl.load(q_scale + gl.minimum(row, m - 1) // BLOCK)  # a tile may begin past the last query
    whole = n // BLOCK
    if CAUSAL:
        whole = gl.minimum(whole, gl.maximum(0, row + 1 + n - m) // BLOCK)
    dq_0 = gl.zeros([BLOCK, BLOCK], gl.float32, INT)
    dq_1 = dq_0
    if tiles > 0:
        queries = q_tile.index(GROUP)
        grads = do_tile.index(GROUP).reshape([BLOCK, D])
        rings = (k_ring, k_columns_ring, v_ring, full, empty)
        row_numbers = (factor, row_lse2, row_delta)
        k_scale += hidden_zero(row)
        scale = gl.load(k_scale)
        mbarrier.wait(once, 0)
        mbarrier.wait(full.index(0), 0)
        s = start_s(queries, k_ring, 0)
        dp = start_dp(grads, v_ring, 0, D)
        state = (s, dp, dq_0, dq_1, scale, 0, 0)
        for t in range(whole):
            state = _step(
                state, t, tiles, queries, grads, rings, k_scale, row_numbers, rows, m, n, CAUSAL, False, D, STAGES
            )
        for t in range(whole, tiles):
            state = _step(
                state, t, tiles, queries, grads, rings, k_scale, row_numbers, rows, m, n, CAUSAL, True, D, STAGES
            )
        warpgroup_mma_wait(0, [state[0], state[1]])
        dq_0 = state[2]
        dq_1 = state[3]
    store_half(dq, rows, dq_m, dq_d, dq_0 * softmax_scale, rows < m, 0)
    if D == 128:
        store_half(dq, rows, dq_m, dq_d, dq_1 * softmax_scale, rows < m, 1)


@gluon.jit(do_not_specialize=["heads", "group", "m", "n", "row_tiles"])
def hopper_backward_q(
    q_desc, do_desc, k_desc, k_columns_desc, v_desc, q_scale, k_scale, lse2, delta, dq,
    dq_b, dq_h, dq_m, dq_d, heads, group, m, n, m_pad, n_pad, softmax_scale, factor, row_tiles,
    CAUSAL: gl.constexpr, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    pid = gl.program_id(0)
    bh = pid // row_tiles
    tile = pid % row_tiles
    if CAUSAL:  # the longest rows first
        tile = row_tiles - 1 - tile
    b = bh // heads
    head = bh % heads
    kv = bh // group
    kv_head = kv % (heads // group)
    far = bh.to(gl.int64)
    q_scale += far * (m_pad // BLOCK)
    lse2 += far * m_pad
    delta += far * m_pad
    k_scale += kv.to(gl.int64) * (n_pad // BLOCK)
    dq += b.to(gl.int64) * dq_b + head.to(gl.int64) * dq_h
    row = tile * (GROUPS * BLOCK)
    last = n
    if CAUSAL:
        last = gl.minimum(n, gl.maximum(0, row + GROUPS * BLOCK + n - m))
    tiles = gl.cdiv(last, BLOCK)

    q_tile = gl.allocate_shared_memory(gl.int8, [GROUPS, BLOCK, D], q_desc.layout)
    do_tile = gl.allocate_shared_memory(do_desc.dtype, [GROUPS, 1, 1, BLOCK, D], do_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], k_desc.layout)
    k_columns_ring = gl.allocate_shared_memory(gl.int8, [STAGES, D, BLOCK], k_columns_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK, D], v_desc.layout)
    once = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(once, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)

    numbers = (q_scale, k_scale, lse2, delta, dq, dq_m, dq_d, row, tiles, m, n, softmax_scale, factor)
    shared = (q_tile, do_tile, k_ring, k_columns_ring, v_ring, once, full, empty)
    descs = (q_desc, do_desc, k_desc, k_columns_desc, v_desc)
    where = (bh * m_pad + row, kv * n_pad, kv * D, b, head, kv_head, row, tiles)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (shared, numbers, 0, D, CAUSAL, STAGES)),
                (_consumer, (shared, numbers, 1, D, CAUSAL, STAGES)),
                (_producer, (descs, shared, where, D, GROUPS, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, numbers, 0, D, CAUSAL, STAGES)),
                (_consumer, (shared, numbers, 1, D, CAUSAL, STAGES)),
                (_consumer, (shared, numbers, 2, D, CAUSAL, STAGES)),
                (_producer, (descs, shared, where, D, GROUPS, STAGES)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
