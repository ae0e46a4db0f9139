"""dQ, dK and dV at once on Hopper: 128 keys a program, 64 a warpgroup; query tiles stream through shared memory.

S^T and dP^T are computed once, with keys as rows. P^T and dS^T, rounded by rows, are the left operands of dV and dK
from registers. dS rounded anew by columns (a scale a query and block of 64 keys, as dQ wants it) goes through shared
memory, and each warpgroup multiplies both blocks of 64 keys by its half of K's columns; their scaled sum is added to
dQ in memory, in FP32. The order of these additions is by chance: two runs differ in the last bits of dQ.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagebwd.kernels.hopper.pieces import (
    BLOCK,
    TINY,
    add_part,
    power_of_two,
    quantise_rows,
    reciprocal,
    release,
    seen,
    start_dp,
    start_part,
    start_s,
)


@gluon.jit
def _turn(u, steps, first, ROTATE: gl.constexpr):
    """The u-th query tile. Programs of a head may begin at different ones, and add to dQ in different places."""
    if ROTATE:
        u += first
        u = gl.where(u >= steps, u - steps, u)
    return u


@gluon.jit
def _producer(descs, shared, where, D: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr):
    k_desc, k_columns_desc, v_desc, q_desc, q_columns_desc, do_desc, do_columns_desc, numbers_desc = descs
    k_tile, k_columns_tile, v_tile, rings, once = shared
    q_ring, q_columns_ring, do_ring, do_columns_ring, numbers_ring, full, empty = rings
    b, kv, kv_head, group, col, n_pad, m_pad, lo, steps, first = where
    mbarrier.expect(once, 2 * BLOCK * D * 4)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(k_desc, [kv * n_pad + col + i * BLOCK, 0], once, k_tile.index(i))
        tma.async_copy_global_to_shared(v_desc, [b, kv_head, col + i * BLOCK, 0], once, v_tile.index(i))
        tma.async_copy_global_to_shared(k_columns_desc, [kv * D, col + i * BLOCK], once, k_columns_tile.index(i))
    stage = 0
    phase = 1
    for g in range(group):
        head = kv_head * group + g
        far = kv * group + g
        for u in range(steps):
            row = lo + _turn(u, steps, first, ROTATE) * BLOCK
            ready = full.index(stage)
            at = far * m_pad + row
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BLOCK * (5 * D + 16))
            tma.async_copy_global_to_shared(q_desc, [at, 0], ready, q_ring.index(stage))
            tma.async_copy_global_to_shared(numbers_desc, [at * 4], ready, numbers_ring.index(stage))
            tma.async_copy_global_to_shared(do_desc, [b, head, row, 0], ready, do_ring.index(stage))
            tma.async_copy_global_to_shared(do_columns_desc, [far * D, row], ready, do_columns_ring.index(stage))
            tma.async_copy_global_to_shared(q_columns_desc, [far * D, row], ready, q_columns_ring.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), 0)  # after the last tile comes another S, of whatever is there: nobody uses it


@gluon.jit
def _numbers(ring, stage, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """[64] of a stage: lse2 (0) and delta (1) of its queries; Q's scale (2) and dO's (3), 64 times."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    part = ring.index(stage)._reinterpret(gl.float32, [4, BLOCK], FLAT).index(WHICH)
    return part.load(LAYOUT)


@gluon.jit
def _store_by_columns(scratch, x):
    """Into scratch [8, 32, 8], at (j, r, c): the larger magnitude of a thread's two values of column 8j + c of x."""
    pairs = gl.max(gl.abs(x).reshape([4, 2, 8, BLOCK]), 1)
    scratch.store(pairs.reshape([BLOCK // 2, 8, 8]).permute((1, 0, 2)))


@gluon.jit
def _largest_by_columns(scratch):
    """Maxima [8, 8] over r of scratch."""
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 4, 0], [0, 8, 0], [0, 16, 0], [1, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0]],
        [[2, 0, 0], [4, 0, 0]], [], [8, 32, 8],
    )  # fmt: skip
    return gl.max(scratch.load(LAYOUT), 1)


@gluon.jit
def _settle(x, WHICH: gl.constexpr):
    """A loop that never turns, as x is not WHICH (negative, and another one each time, or ptxas sees that it knows):
    ptxas moves no arithmetic across it. Else it adds a product when the next one but one has begun, and spills."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; again: setp.ne.s32 p, $1, $2; @p bra end; nanosleep.u32 20; bra again; end: mov.b32 $0, 0; }",
        "=r,r,r", [x, WHICH], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _flat(x):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return x._reinterpret(gl.float32, [BLOCK], FLAT)


@gluon.jit
def _square(x):
    SQUARE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return x._reinterpret(gl.float32, [8, 8], SQUARE)


@gluon.jit
def _rounded_pairs(x, inverse):
    """x [64 keys, 64 queries] scaled by columns and rounded: [32, 64] int16, in row 8w + g the keys 16w + g (low byte)
    and 16w + 8 + g, both of which a thread holds."""
    y = (x * inverse[None, :] + 12582912.0).to(gl.int32, bitcast=True)
    low, high = gl.split(y.reshape([4, 2, 8, BLOCK]).permute((0, 2, 3, 1)))
    pairs = gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $3, 0x0040; prmt.b32 b, $2, $4, 0x0040; prmt.b32 $0, a, b, 0x5410; }",
        "=r,r,r,r,r", [low, high], dtype=gl.int16, is_pure=True, pack=2,
    )  # fmt: skip
    return pairs.reshape([BLOCK // 2, BLOCK])


@gluon.jit
def _start_dq(ds_ring, slot, k_columns, GROUP: gl.constexpr, HALF: gl.constexpr):
    """dS^ [64 queries, 64 keys] of a slot by this warpgroup's half of the block's K."""
    BYTES: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    left = ds_ring.index(slot)._reinterpret(gl.int8, [BLOCK, BLOCK], BYTES)
    right = k_columns.slice(GROUP * HALF, HALF, dim=0).permute((1, 0))
    return warpgroup_mma(left, right, gl.zeros([BLOCK, HALF], gl.int32, INT), use_acc=False, is_async=True)


@gluon.jit
def _add_to_memory(at, x, HALF: gl.constexpr):
    """Adds x [64, HALF] to memory at `at`, 16 bytes a thread, 512 a warp. Element 16h + 8b + 2t + e of row 16w + 8i + g
    is in place ((((2h + i) 4 + w) 8 + g) 4 + t) 4 + 2b + e."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    x = x.reshape([4, 2, 8, HALF // 16, 2, 4, 2]).permute((3, 1, 0, 2, 5, 4, 6)).reshape([BLOCK * HALF])
    x = gl.convert_layout(x, FLAT, assert_trivial=True)
    gl.atomic_add(at + gl.arange(0, BLOCK * HALF, FLAT), x, sem="relaxed")


@gluon.jit
def _write(desc, shared, b, head, col, half_0, half_1, factor, D: gl.constexpr):
    """Rows col .. col + 63 of a head's [N, D]; rows past N are left out."""
    tile = shared.reshape([BLOCK, D])
    half_0 = (half_0 * factor).to(desc.dtype)
    if D == 128:
        tile.slice(0, BLOCK, dim=1).store(half_0)
        tile.slice(BLOCK, BLOCK, dim=1).store((half_1 * factor).to(desc.dtype))
    else:
        tile.store(half_0)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [b, head, col, 0], shared)
    tma.store_wait(0)


@gluon.jit
def _step(
    state, row, dq_at, tiles, rings, exchange, factor, k_scale, cols, m, n,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    CHAIN: gl.constexpr, EARLY_DV: gl.constexpr, ADD_DQ: gl.constexpr,
):  # fmt: skip
    """Adds the query tile of a stage, whose S is there, and computes S of the next one."""
    s, dp, dv_0, dv_1, dk_0, dk_1, stage, phase, count = state
    keys, values, k_columns = tiles
    q_ring, q_columns_ring, do_ring, do_columns_ring, numbers_ring, full, empty = rings
    scratch, inverses, ds_ring, ds_scales, ds_full = exchange
    HALF: gl.constexpr = D // 2
    COLS: gl.constexpr = gl.SliceLayout(0, dv_0.type.layout)
    ROWS: gl.constexpr = gl.SliceLayout(1, dv_0.type.layout)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32]))
    slot = count & 1  # of the exchange between the warpgroups
    slot_phase = count // 2 & 1
    next_stage = stage + 1
    next_phase = phase
    if next_stage == STAGES:
        next_stage = 0
        next_phase = phase ^ 1

    if CHAIN != "ahead":
        dp = start_dp(values, do_ring, stage, D)
    row_factor = factor * _numbers(numbers_ring, stage, 2, ROWS)
    p = power_of_two(s.to(gl.float32) * row_factor[:, None] - _numbers(numbers_ring, stage, 0, COLS)[None, :])
    if MASKED:
        rows = row + gl.arange(0, BLOCK, COLS)
        p = gl.where(seen(rows[None, :], cols[:, None], m, n, CAUSAL), p, 0.0)
    # Of P >= 0 the bits have the order of the numbers, and the maximum of three integers is one instruction.
    largest = gl.max(p.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
    p_hat, p_scale = quantise_rows(p, largest)
    p_scale *= _numbers(numbers_ring, stage, 3, ROWS)
    dp = warpgroup_mma_wait(0, [dp])
    delta = _numbers(numbers_ring, stage, 1, COLS)
    ds = p * (gl.convert_layout(dp, p.type.layout, assert_trivial=True) - delta[None, :])
    if EARLY_DV:
        part = start_part(p_hat, do_columns_ring, stage, 0)

    # Between the steps by columns, which wait for each other's warps, the one by rows.
    _store_by_columns(scratch, ds)
    ds_hat, ds_scale = quantise_rows(ds, gl.max(gl.abs(ds), 1))
    ds_scale *= _numbers(numbers_ring, stage, 2, ROWS)
    largest = _largest_by_columns(scratch)
    inverses.store(127.0 * reciprocal(gl.maximum(largest, TINY)))
    _square(ds_scales.index(slot * 2 + GROUP)).store(gl.where(largest < TINY, 0.0, largest * k_scale))
    pairs = _rounded_pairs(ds, _flat(inverses).load(COLS))
    ds_ring.index(slot * 2 + GROUP).permute((1, 0)).store(pairs)
    if not EARLY_DV:
        part = start_part(p_hat, do_columns_ring, stage, 0)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot))

    if CHAIN == "one" or CHAIN == "dq":
        part = warpgroup_mma_wait(0, [part])
        dv_0 = add_part(dv_0, part, p_scale)
        _settle(stage, -1)
        if D == 128:
            part = start_part(p_hat, do_columns_ring, stage, 1)
            part = warpgroup_mma_wait(0, [part])
            dv_1 = add_part(dv_1, part, p_scale)
            _settle(stage, -2)
        part = start_part(ds_hat, q_columns_ring, stage, 0)
        part = warpgroup_mma_wait(0, [part])
        dk_0 = add_part(dk_0, part, ds_scale)
        _settle(stage, -3)
        if CHAIN == "dq":
            part = start_part(ds_hat, q_columns_ring, stage, 1)
            mbarrier.wait(ds_full.index(slot), slot_phase)
            early = _start_dq(ds_ring, slot * 2, k_columns.index(0), GROUP, HALF)
            part = warpgroup_mma_wait(1, [part])
            dk_1 = add_part(dk_1, part, ds_scale)
            _settle(stage, -4)
            release(empty, stage)
            late = _start_dq(ds_ring, slot * 2 + 1, k_columns.index(1), GROUP, HALF)
            early = warpgroup_mma_wait(1, [early])
        else:
            if D == 128:
                part = start_part(ds_hat, q_columns_ring, stage, 1)
                part = warpgroup_mma_wait(0, [part])
                dk_1 = add_part(dk_1, part, ds_scale)
                _settle(stage, -4)
            release(empty, stage)
            mbarrier.wait(ds_full.index(slot), slot_phase)
            early = _start_dq(ds_ring, slot * 2, k_columns.index(0), GROUP, HALF)
            early = warpgroup_mma_wait(0, [early])
            late = _start_dq(ds_ring, slot * 2 + 1, k_columns.index(1), GROUP, HALF)
        dq = early.to(gl.float32) * ds_scales.index(slot * 2).load(OUT_ROWS)[:, None]
        late = warpgroup_mma_wait(0, [late])
        mbarrier.wait(full.index(next_stage), next_phase)
        s = start_s(keys, q_ring, next_stage)
    elif CHAIN == "two":
        if D == 128:
            other = start_part(p_hat, do_columns_ring, stage, 1)
            part = warpgroup_mma_wait(1, [part])
            dv_0 = add_part(dv_0, part, p_scale)
            part = start_part(ds_hat, q_columns_ring, stage, 0)
            other = warpgroup_mma_wait(1, [other])
            dv_1 = add_part(dv_1, other, p_scale)
            other = start_part(ds_hat, q_columns_ring, stage, 1)
            part = warpgroup_mma_wait(1, [part])
            dk_0 = add_part(dk_0, part, ds_scale)
        else:
            other = start_part(ds_hat, q_columns_ring, stage, 0)
            part = warpgroup_mma_wait(1, [part])
            dv_0 = add_part(dv_0, part, p_scale)
        mbarrier.wait(ds_full.index(slot), slot_phase)
        early = _start_dq(ds_ring, slot * 2, k_columns.index(0), GROUP, HALF)
        other = warpgroup_mma_wait(1, [other])
        if D == 128:
            dk_1 = add_part(dk_1, other, ds_scale)
        else:
            dk_0 = add_part(dk_0, other, ds_scale)
        release(empty, stage)
        late = _start_dq(ds_ring, slot * 2 + 1, k_columns.index(1), GROUP, HALF)
        early = warpgroup_mma_wait(1, [early])
        dq = early.to(gl.float32) * ds_scales.index(slot * 2).load(OUT_ROWS)[:, None]
        mbarrier.wait(full.index(next_stage), next_phase)
        if D == 128:
            late = warpgroup_mma_wait(0, [late])
            s = start_s(keys, q_ring, next_stage)
        else:
            s = start_s(keys, q_ring, next_stage)
            late = warpgroup_mma_wait(1, [late])
    else:
        other = start_part(ds_hat, q_columns_ring, stage, 0)
        part = warpgroup_mma_wait(1, [part])
        dv_0 = add_part(dv_0, part, p_scale)
        mbarrier.wait(full.index(next_stage), next_phase)
        s = start_s(keys, q_ring, next_stage)
        other = warpgroup_mma_wait(1, [other])
        release(empty, stage)
        dk_0 = add_part(dk_0, other, ds_scale)
        mbarrier.wait(ds_full.index(slot), slot_phase)
        early = _start_dq(ds_ring, slot * 2, k_columns.index(0), GROUP, HALF)
        late = _start_dq(ds_ring, slot * 2 + 1, k_columns.index(1), GROUP, HALF)
        dp = start_dp(values, do_ring, next_stage, D)
        early = warpgroup_mma_wait(2, [early])
        dq = early.to(gl.float32) * ds_scales.index(slot * 2).load(OUT_ROWS)[:, None]
        late, s = warpgroup_mma_wait(1, [late, s])
    dq = add_part(dq, late, ds_scales.index(slot * 2 + 1).load(OUT_ROWS))
    if ADD_DQ:
        _add_to_memory(dq_at, dq, HALF)
    else:
        gl.store(dq_at + gl.arange(0, BLOCK, OUT_ROWS), gl.max(dq, 1))
    if CHAIN != "ahead":
        s = warpgroup_mma_wait(0, [s])
        dp = 0
    return s, dp, dv_0, dv_1, dk_0, dk_1, next_stage, next_phase, count + 1


@gluon.jit
def _consumer(
    shared, scratch, exchange, numbers, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, ROTATE: gl.constexpr,
    CHAIN: gl.constexpr, EARLY_DV: gl.constexpr, ADD_DQ: gl.constexpr,
):  # fmt: skip
    k_tile, k_columns_tile, v_tile, rings, once = shared
    k_scale, dq, dk_desc, dv_desc = numbers[0]
    b, kv_head, col, lo, steps, first, group, blocks, m, n, softmax_scale, factor = numbers[1]
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    HALF: gl.constexpr = D // 2
    col += GROUP * BLOCK
    cols = col + gl.arange(0, BLOCK, gl.SliceLayout(1, INT))
    scale_of_k = gl.load(k_scale + gl.minimum(col, n - 1) // BLOCK)  # a tile may begin past the last key
    dv_0 = gl.zeros([BLOCK, BLOCK], gl.float32, INT)
    dv_1 = dv_0
    dk_0 = dv_0
    dk_1 = dv_0
    mbarrier.wait(once, 0)
    if steps > 0:
        q_ring, _, do_ring, _, _, full, _ = rings
        keys = k_tile.index(GROUP)
        tiles = (keys, v_tile.index(GROUP).reshape([BLOCK, D]), k_columns_tile)
        mine = (scratch.index(GROUP), exchange[0].index(GROUP), exchange[1], exchange[2], exchange[3])
        mbarrier.wait(full.index(0), 0)
        s = warpgroup_mma_wait(0, [start_s(keys, q_ring, 0)])
        dp = start_dp(tiles[1], do_ring, 0, D) if CHAIN == "ahead" else 0
        state = (s, dp, dv_0, dv_1, dk_0, dk_1, 0, 0, 0)
        masked = 0
        if CAUSAL:  # the queries before the first one that sees every key of this group
            masked = gl.minimum(steps, gl.cdiv(gl.maximum(0, col + BLOCK - 1 + m - n - lo), BLOCK))
        masked = gl.where(col + BLOCK > n, steps, masked)  # keys past the last one would count in dQ's scales
        for head in range(group):
            for u in range(masked):
                at = _turn(u, steps, first, ROTATE)
                state = _step(
                    state, lo + at * BLOCK,
                    dq + (head * blocks + at).to(gl.int64) * (BLOCK * D) + GROUP * BLOCK * HALF,
                    tiles, rings, mine, factor * scale_of_k, scale_of_k * (1.0 / 127.0), cols, m, n,
                    CAUSAL, True, D, STAGES, GROUP, CHAIN, EARLY_DV, ADD_DQ,
                )  # fmt: skip
            for u in range(masked, steps):
                at = _turn(u, steps, first, ROTATE)
                state = _step(
                    state, lo + at * BLOCK,
                    dq + (head * blocks + at).to(gl.int64) * (BLOCK * D) + GROUP * BLOCK * HALF,
                    tiles, rings, mine, factor * scale_of_k, scale_of_k * (1.0 / 127.0), cols, m, n,
                    CAUSAL, False, D, STAGES, GROUP, CHAIN, EARLY_DV, ADD_DQ,
                )  # fmt: skip
        if CHAIN == "ahead":
            warpgroup_mma_wait(0, [state[1]])
        dv_0 = state[2]
        dv_1 = state[3]
        dk_0 = state[4]
        dk_1 = state[5]
    _write(dv_desc, v_tile.index(GROUP), b, kv_head, col, dv_0, dv_1, 1.0, D)
    _write(dk_desc, v_tile.index(GROUP), b, kv_head, col, dk_0, dk_1, softmax_scale, D)


@gluon.jit(do_not_specialize=["heads", "group", "m", "n", "key_tiles"])
def hopper_backward_fused(
    k_desc, k_columns_desc, v_desc, q_desc, q_columns_desc, do_desc, do_columns_desc, numbers_desc,
    dk_desc, dv_desc, k_scale, dq,
    heads, group, m, n, m_pad, n_pad, softmax_scale, factor, key_tiles,
    CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr,
    CHAIN: gl.constexpr, EARLY_DV: gl.constexpr, ADD_DQ: gl.constexpr,
):  # fmt: skip
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
    at = kv.to(gl.int64) * group * blocks + lo // BLOCK
    dq += at * (BLOCK * D)
    k_scale += kv.to(gl.int64) * (n_pad // BLOCK)
    first = 0
    if ROTATE:
        first = pid % key_tiles * steps // key_tiles

    DS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    SQUARES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    SQUARE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_tile = gl.allocate_shared_memory(gl.int8, [2, BLOCK, D], k_desc.layout)
    k_columns_tile = gl.allocate_shared_memory(gl.int8, [2, D, BLOCK], k_columns_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, BLOCK, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], q_desc.layout)
    q_columns_ring = gl.allocate_shared_memory(gl.int8, [STAGES, D, BLOCK], q_columns_desc.layout)
    do_ring = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, BLOCK, D], do_desc.layout)
    do_columns_ring = gl.allocate_shared_memory(gl.int8, [STAGES, D, BLOCK], do_columns_desc.layout)
    numbers_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BLOCK], numbers_desc.layout)
    scratch = gl.allocate_shared_memory(gl.float32, [2, 8, BLOCK // 2, 8], SQUARES)
    inverses = gl.allocate_shared_memory(gl.float32, [2, 8, 8], SQUARE)
    ds_ring = gl.allocate_shared_memory(gl.int16, [4, BLOCK, BLOCK // 2], DS)
    ds_scales = gl.allocate_shared_memory(gl.float32, [4, BLOCK], FLAT)
    once = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(once, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)

    descs = (
        k_desc, k_columns_desc, v_desc, q_desc, q_columns_desc, do_desc, do_columns_desc, numbers_desc
    )  # fmt: skip
    rings = (q_ring, q_columns_ring, do_ring, do_columns_ring, numbers_ring, full, empty)
    shared = (k_tile, k_columns_tile, v_tile, rings, once)
    exchange = (inverses, ds_ring, ds_scales, ds_full)
    where = (b, kv, kv_head, group, col, n_pad, m_pad, lo, steps, first)
    numbers = (
        (k_scale, dq, dk_desc, dv_desc),
        (b, kv_head, col, lo, steps, first, group, blocks, m, n, softmax_scale, factor),
    )
    gl.warp_specialize(
        [
            (_consumer, (shared, scratch, exchange, numbers, 0, D, CAUSAL, STAGES, ROTATE, CHAIN, EARLY_DV, ADD_DQ)),
            (_consumer, (shared, scratch, exchange, numbers, 1, D, CAUSAL, STAGES, ROTATE, CHAIN, EARLY_DV, ADD_DQ)),
            (_producer, (descs, shared, where, D, STAGES, ROTATE)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
