"""dQ, dK and dV at once on Hopper with products="scores": S in INT8, every other product of 16-bit operands.

A program has 128 keys of a head, and tiles of 64 queries stream through shared memory. Three warpgroups:

- Two run `_main`. Each has 64 of the keys, as rows of all that it computes: S and P, dP and dS, and dK and dV, whose
  sums stay in registers.
- One runs `_third`. It makes a tile's dQ of the dS of both, which they leave in shared memory, and has TMA add it to
  sums in memory, FP16 or FP32 (`scores_rows`), in whatever order programs come. It also starts all loads: a warp for
  that alone would be padded to four, and take registers.

They wait for each other at barriers, "a -> b" means that b waits for a:

- `once`: loads -> `_main`: the program's K8 and V are there. `k16_there`: loads -> all: and its K in 16 bits.
- `full`, a stage: loads -> `_main`: a query tile is there (Q8, Q, dO, numbers).
- `empty`, a stage: both `_main` -> `_third`: they have read that tile, and another may be loaded over it.
- `ds_full`, a slot: both `_main` -> `_third`: dS of a tile is there.
- `ds_empty`, a slot: `_third` -> `_main`: its product has read it, and dS of the tile after next may be stored there.

Tile t of a program has stage t mod stages and slot t mod 2. At its k-th use (from 0) a barrier completes phase k; who
waits names its parity, k mod 2. To wait for the phase before the first one takes no time.
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
from sagebwd.kernels.hopper.operands import in_16_bit, left_16_bit
from sagebwd.kernels.hopper.pieces import BLOCK, hand_on, power_of_two, release, seen, start_dp, start_s
from sagebwd.kernels.hopper.scores_rows import LEAST, MOST, MOST_KEYS, Rows, prepare
from sagebwd.kernels.hopper.tma_add import async_add_shared_to_global
from sagebwd.kernels.launch import launch

SLOTS = gl.constexpr(2)  # of dS
WIDTH = gl.constexpr(64)  # columns of dQ that `_third` makes and adds at a time: all 128 would take twice the registers
TOGETHER = 256  # programs of the heads of which the longest come first: about two for each multiprocessor
MOST_TILES = gl.constexpr(MOST_KEYS // 64)  # of keys, of a head whose sums are FP16
SUMS_ROW = gl.constexpr(256)  # of dQ's sums as TMA sees them: the most that its tile may be wide


@gluon.constexpr_function
def _ahead(dim):
    """Whether S of the next tile is computed under dV and dK of this one, and dP under the exponentials. At D = 128 the
    sums dK and dV take 128 registers of a thread, and these would not fit."""
    return dim == 64


@gluon.jit
def _load_tile(descs, rings, where, head, u, stage, D: gl.constexpr):
    """Starts the loads of query tile `u` of the group's head `head`."""
    _, _, _, q_desc, q16_desc, do_desc, numbers_desc = descs
    q_ring, q16_ring, do_ring, numbers_ring, full, _ = rings
    b, kv, kv_head, group, _, _, m_pad, lo, _ = where
    row = lo + u * BLOCK
    at = (kv * group + head) * m_pad + row
    head += kv_head * group
    ready = full.index(stage)
    mbarrier.expect(ready, BLOCK * (5 * D + 16))
    tma.async_copy_global_to_shared(q_desc, [at, 0], ready, q_ring.index(stage))
    tma.async_copy_global_to_shared(numbers_desc, [at * 4], ready, numbers_ring.index(stage))
    tma.async_copy_global_to_shared(do_desc, [b, head, row, 0], ready, do_ring.index(stage))
    tma.async_copy_global_to_shared(q16_desc, [b, head, row, 0], ready, q16_ring.index(stage))


@gluon.jit
def _load_next(descs, rings, where, loads, stage, D: gl.constexpr):
    """Starts the loads of the next tile to a stage, if there is one. loads: its head and tile, and how many are left.

    Where S is computed ahead, after the last tile comes one more S, of whatever is there: nobody uses it.
    """
    head, u, left = loads
    _, _, _, _, full, _ = rings
    _, _, _, _, _, _, _, _, steps = where
    AHEAD: gl.constexpr = _ahead(D)
    if left > 0:
        _load_tile(descs, rings, where, head, u, stage, D)
    if left == 0 and AHEAD:
        mbarrier.expect(full.index(stage), 0)
    u += 1
    if u == steps:
        u = 0
        head += 1
    return head, u, left - 1


@gluon.jit
def _add_to_memory(sums_desc, at, staging, x, OTHERS: gl.constexpr):
    """Adds x [64, WIDTH] to the sums' rows from `at` on, by way of `staging`, from which up to OTHERS additions ago the
    last part was taken: there are as many other stagings.

    Registers go there 16 bytes a thread, 512 a warp: element 8 (J h + j) + 2t + e of row 16w + 8i + g is in place
    ((((4h + w) 8 + g) 4 + t) J + j) 4 + 2i + e, with J = 2 of FP16 and 1 of FP32. Added from registers, it would clog
    the queue of the load/store units.
    """
    W: gl.constexpr = x.shape[1]
    HALVES: gl.constexpr = sums_desc.dtype == gl.float16
    J: gl.constexpr = 2 if HALVES else 1
    FLAT: gl.constexpr = gl.BlockedLayout([4 * J], [32], [4], [0])
    x = x.reshape([4, 2, 8, W // (8 * J), J, 4, 2]).permute((3, 0, 2, 5, 4, 1, 6)).reshape([BLOCK * W])
    x = gl.convert_layout(x, FLAT, assert_trivial=True)
    if HALVES:
        x = in_16_bit(x, gl.float16)
    tma.store_wait(OTHERS)
    staging._reinterpret(sums_desc.dtype, [BLOCK * W], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(x)
    fence_async_shared()
    async_add_shared_to_global(sums_desc, [at, 0], staging)


@gluon.jit
def _third(
    descs, where, shared, exchange, sums_desc, stagings, exponents, tile, blocks, D: gl.constexpr, STAGES: gl.constexpr
):
    """Loads everything; of every tile, dQ = dS [64 queries, 128 keys] K, added to memory. tile: the first one of the
    first head in the sums; blocks: tiles of a head there."""
    k_desc, dk_desc, v_desc, _, _, _, _ = descs
    k_tile, k16_tile, v_tile, rings, once, k16_there = shared
    _, _, _, numbers_ring, full, empty = rings
    ds_ring, ds_full, ds_empty = exchange
    b, kv, kv_head, group, col, n_pad, _, _, steps = where
    PARTS: gl.constexpr = D // WIDTH
    ROWS: gl.constexpr = BLOCK * WIDTH // SUMS_ROW  # of sums, of a part of a tile
    FLOAT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    HALVES: gl.constexpr = sums_desc.dtype == gl.float16
    mbarrier.expect(once, 2 * BLOCK * D * 3)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(k_desc, [kv * n_pad + col + i * BLOCK, 0], once, k_tile.index(i))
        tma.async_copy_global_to_shared(v_desc, [b, kv_head, col + i * BLOCK, 0], once, v_tile.index(i))
    loads = (0, 0, group * steps)
    for i in gl.static_range(STAGES):
        loads = _load_next(descs, rings, where, loads, i, D)
    mbarrier.expect(k16_there, 2 * BLOCK * D * 2)  # the first dQ wants it, which is long after the first S
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(dk_desc, [b, kv_head, col + i * BLOCK, 0], k16_there, k16_tile.index(i))
    if HALVES:
        of_head = _of_head(exponents, n_pad // BLOCK)
    mbarrier.wait(k16_there, 0)
    slot = 0
    slot_phase = 0
    stage = 0
    phase = 0
    for head in range(group):
        for u in range(steps):
            at = tile + head * blocks + u
            mbarrier.wait(ds_full.index(slot), slot_phase)
            mbarrier.wait(full.index(stage), phase)  # long since
            if HALVES:
                row_scale = _powers(numbers_ring, stage, of_head, gl.SliceLayout(1, FLOAT))
            for part in gl.static_range(PARTS):
                dq = gl.zeros([BLOCK, WIDTH], gl.float32, FLOAT)
                for w in gl.static_range(2):
                    ds = ds_ring.index(slot * 2 + w).permute((1, 0))
                    k16 = k16_tile.index(w).reshape([BLOCK, D]).slice(part * WIDTH, WIDTH, dim=1)
                    dq = warpgroup_mma(ds, k16, dq, use_acc=w > 0, is_async=True)
                dq = warpgroup_mma_wait(0, [dq])
                if HALVES:
                    dq *= row_scale[:, None]
                if part == PARTS - 1:
                    release(ds_empty, slot)
                    # Loads before the adding: a stage is free soon after its dS has come, the adding can wait.
                    if loads[2] >= 0:
                        mbarrier.wait(empty.index(stage), phase)
                    loads = _load_next(descs, rings, where, loads, stage, D)
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        phase ^= 1
                _add_to_memory(sums_desc, (at * PARTS + part) * ROWS, stagings.index(part), dq, PARTS - 1)
            slot += 1
            if slot == SLOTS:
                slot = 0
                slot_phase ^= 1
    tma.store_wait(0)


@gluon.constexpr_function
def _by_pairs():
    """Of 32 numbers the one that a thread needs for both rows that it has of a product."""
    return gl.DistributedLinearLayout([], [[0], [0], [1], [2], [4]], [[8], [16]], [], [32])


@gluon.jit
def _half(ring, stage, WHICH: gl.constexpr, DTYPE: gl.constexpr):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.index(stage)._reinterpret(DTYPE, [8, BLOCK // 2], FLAT).index(WHICH).load(_by_pairs())


@gluon.jit
def _of_rows(first, second, LAYOUT: gl.constexpr):
    """[64] for a product's rows, of what a thread needs for the first and the second of its two."""
    x = gl.join(first, second).reshape([4, 8, 2]).permute((0, 2, 1)).reshape([BLOCK])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _of_head(exponents, tiles):
    """The head's part of its rows' powers (`scores_rows.Rows`), for whoever reads them after this kernel as well: all
    programs of the head write the same. Each warp takes it for itself."""
    IN_A_WARP: gl.constexpr = gl.DistributedLinearLayout(
        [[32], [64], [128], [256]], [[1], [2], [4], [8], [16]], [[0], [0]], [], [MOST_TILES]
    )
    at = gl.arange(0, MOST_TILES, IN_A_WARP)
    of_v = gl.max(gl.load(exponents + (at * 2 + 1), mask=at < tiles, other=-126), 0)  # the least there is
    of_k = gl.max(gl.load(exponents + (at * 2 + 2), mask=at < tiles, other=-126), 0)
    of_head = of_v + of_k
    gl.store(exponents, of_head)
    return of_head


@gluon.jit
def _power(of_row, of_head):
    return (gl.minimum(gl.maximum(of_row - of_head, LEAST), MOST) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _powers(ring, stage, of_head, LAYOUT: gl.constexpr):
    """By what a tile's rows of dQ are multiplied to be added up: the rows' parts are two in each word."""
    both = _half(ring, stage, 4, gl.int32)
    return _of_rows(_power(both & 0xFFFF, of_head), _power(both >> 16, of_head), LAYOUT)


@gluon.jit
def _q_scale(ring, stage, LAYOUT: gl.constexpr):
    """Q's scale of a tile for each row of a product."""
    scale = _half(ring, stage, 5, gl.float32)
    return _of_rows(scale, scale, LAYOUT)


@gluon.constexpr_function
def _by_fours():
    """Of 64 numbers one after the other those that a thread needs of its columns of a product, 16 bytes at a time."""
    return gl.DistributedLinearLayout([[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [64])


@gluon.jit
def _of_columns(ring, stage, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """[64] of a stage, for a product's columns: lse2 (0) or delta (1) of its queries. 8 bytes at a time they would take
    shared memory twice as long."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = ring.index(stage)._reinterpret(gl.float32, [4, BLOCK], FLAT).index(WHICH).load(_by_fours())
    x = x.reshape([4, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([BLOCK])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _write(desc, shared, b, head, col, values, D: gl.constexpr):
    """Rows col .. col + 63 of a head's [N, D]; rows past N are left out."""
    shared.reshape([BLOCK, D]).store(values.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [b, head, col, 0], shared)
    tma.store_wait(0)


@gluon.jit
def _step(
    state, row, tiles, rings, exchange, factor, col, m, n,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Adds query tile `count` to dK and dV and hands its dS on. state: s, dv, dk, count; s is 0 unless AHEAD.

    The products of a warpgroup one after the other, each wait followed by what it makes possible: S; dP; dV and dK.
    AHEAD: dP under the exponentials; dV, dK and S of the next tile.
    """
    s, dv, dk, count = state
    keys, values = tiles
    q_ring, q16_ring, do_ring, numbers_ring, full, empty = rings
    ds_ring, ds_full, ds_empty = exchange
    AHEAD: gl.constexpr = _ahead(D)
    SHIFT: gl.constexpr = 1 if STAGES == 2 else 2  # stages are 2 or 4
    stage = count & (STAGES - 1)
    phase = (count >> SHIFT) & 1
    slot = count & 1
    slot_phase = ((count >> 1) & 1) ^ 1  # of the use before, two tiles ago; the first use waits for none
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    FLOAT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLS: gl.constexpr = gl.SliceLayout(0, INT)
    next_stage = (count + 1) & (STAGES - 1)
    next_phase = ((count + 1) >> SHIFT) & 1
    if AHEAD:
        dp = start_dp(values, do_ring, stage, D)
        s_now = s
    else:
        mbarrier.wait(full.index(stage), phase)
        s_now = start_s(keys, q_ring, stage)
    lse2 = _of_columns(numbers_ring, stage, 0, COLS)
    row_factor = factor * _q_scale(numbers_ring, stage, gl.SliceLayout(1, INT))
    if not AHEAD:
        s_now = warpgroup_mma_wait(0, [s_now])
    p = power_of_two(s_now.to(gl.float32) * row_factor[:, None] - lse2[None, :])
    if MASKED:
        rows = row + gl.arange(0, BLOCK, COLS)
        cols = col + gl.arange(0, BLOCK, gl.SliceLayout(1, INT))
        p = gl.where(seen(rows[None, :], cols[:, None], m, n, CAUSAL), p, 0.0)
    if not AHEAD:
        dp = start_dp(values, do_ring, stage, D)
    dp = warpgroup_mma_wait(0, [dp])
    delta = _of_columns(numbers_ring, stage, 1, COLS)
    ds = p * (gl.convert_layout(dp, INT, assert_trivial=True) - delta[None, :])
    ds16 = left_16_bit(ds, WIDE, do_ring.dtype)
    grads = do_ring.index(stage).reshape([BLOCK, D])
    dv = warpgroup_mma(left_16_bit(p, WIDE, do_ring.dtype), grads, dv, is_async=True)
    mbarrier.wait(ds_empty.index(slot), slot_phase)
    ds_ring.index(slot * 2 + GROUP).store(gl.convert_layout(ds16, FLOAT, assert_trivial=True))
    fence_async_shared()
    hand_on(ds_full, slot)
    dk = warpgroup_mma(ds16, q16_ring.index(stage).reshape([BLOCK, D]), dk, is_async=True)
    if AHEAD:
        mbarrier.wait(full.index(next_stage), next_phase)
        s = start_s(keys, q_ring, next_stage)
        dv, dk = warpgroup_mma_wait(1, [dv, dk])
        release(empty, stage)
        s = warpgroup_mma_wait(0, [s])
    else:
        dv, dk = warpgroup_mma_wait(0, [dv, dk])
        release(empty, stage)
    return s, dv, dk, count + 1


@gluon.jit
def _main(
    shared, exchange, tensors, numbers, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dK and dV of the GROUP-th 64 keys of the program."""
    k_tile, _, v_tile, rings, once, k16_there = shared
    q_ring, _, _, _, full, _ = rings
    k_scale, dk_desc, dv_desc = tensors
    b, kv_head, col, lo, steps, group, m, n, softmax_scale, factor = numbers
    AHEAD: gl.constexpr = _ahead(D)
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    FLOAT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    col += GROUP * BLOCK
    factor *= gl.load(k_scale + gl.minimum(col, n - 1) // BLOCK)  # a tile may begin past the last key
    dv = gl.zeros([BLOCK, D], gl.float32, WIDE)
    dk = gl.zeros([BLOCK, D], gl.float32, WIDE)
    mbarrier.wait(once, 0)
    if steps > 0:
        keys = k_tile.index(GROUP)
        values = v_tile.index(GROUP).reshape([BLOCK, D])
        if D == 64:  # in registers, of which D = 128 has none left: products read that much less of shared memory
            keys = keys.load(gl.DotOperandLayout(0, INT, 4))
            values = values.load(gl.DotOperandLayout(0, FLOAT, 2))
        tiles = (keys, values)
        s = 0
        if AHEAD:
            mbarrier.wait(full.index(0), 0)
            s = warpgroup_mma_wait(0, [start_s(keys, q_ring, 0)])
        state = (s, dv, dk, 0)
        masked = 0
        if CAUSAL:  # the queries before the first one that sees every key of this group
            masked = gl.minimum(steps, gl.cdiv(gl.maximum(0, col + BLOCK - 1 + m - n - lo), BLOCK))
        masked = gl.where(col + BLOCK > n, steps, masked)
        for _head in range(group):
            for u in range(masked):
                state = _step(
                    state, lo + u * BLOCK, tiles, rings, exchange, factor, col, m, n, CAUSAL, True, D, STAGES, GROUP,
                )  # fmt: skip
            for u in range(masked, steps):
                state = _step(
                    state, lo + u * BLOCK, tiles, rings, exchange, factor, col, m, n, CAUSAL, False, D, STAGES, GROUP,
                )  # fmt: skip
        dv = state[1]
        dk = state[2]
    mbarrier.wait(k16_there, 0)  # dK is written where K is read
    _write(dv_desc, v_tile.index(GROUP), b, kv_head, col, dv, D)
    _write(dk_desc, v_tile.index(GROUP), b, kv_head, col, dk * softmax_scale, D)


@gluon.jit(do_not_specialize=["heads", "group", "m", "n", "key_tiles", "kv_total", "section"])
def hopper_backward_scores(
    k_desc, v_desc, q_desc, q16_desc, do_desc, numbers_desc, dk_desc, dv_desc, sums_desc, k_scale, exponents,
    heads, group, m, n, m_pad, n_pad, softmax_scale, factor, key_tiles, kv_total, section,
    CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MAIN: gl.constexpr, THIRD: gl.constexpr,
):  # fmt: skip
    """dk_desc: on entry it holds the smoothed K, which a program reads where it will write.

    kv_total: key/value heads of all batches. Of `section` of them at a time come first the programs of the first keys,
    which with a causal mask have the most queries: in the end no multiprocessor has a long one left.
    """
    pid = gl.program_id(0)
    begun = pid // (section * key_tiles) * section
    place = pid - begun * key_tiles
    here = gl.minimum(section, kv_total - begun)
    kv = begun + place % here
    col = place // here * (2 * BLOCK)
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
    exponents += kv.to(gl.int64) * (1 + n_pad // BLOCK * 2)

    k_tile = gl.allocate_shared_memory(gl.int8, [2, BLOCK, D], k_desc.layout)
    k16_tile = gl.allocate_shared_memory(dk_desc.dtype, [2, 1, 1, BLOCK, D], dk_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, BLOCK, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], q_desc.layout)
    q16_ring = gl.allocate_shared_memory(q16_desc.dtype, [STAGES, 1, 1, BLOCK, D], q16_desc.layout)
    do_ring = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, BLOCK, D], do_desc.layout)
    numbers_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BLOCK], numbers_desc.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_ring = gl.allocate_shared_memory(do_desc.dtype, [2 * SLOTS, BLOCK, BLOCK], DS)
    stagings = gl.allocate_shared_memory(
        sums_desc.dtype, [D // WIDTH, BLOCK * WIDTH // SUMS_ROW, SUMS_ROW], sums_desc.layout
    )
    once = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k16_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(once, count=1)
    mbarrier.init(k16_there, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=1)

    descs = (k_desc, dk_desc, v_desc, q_desc, q16_desc, do_desc, numbers_desc)
    rings = (q_ring, q16_ring, do_ring, numbers_ring, full, empty)
    shared = (k_tile, k16_tile, v_tile, rings, once, k16_there)
    exchange = (ds_ring, ds_full, ds_empty)
    tensors = (k_scale, dk_desc, dv_desc)
    numbers = (b, kv_head, col, lo, steps, group, m, n, softmax_scale, factor)
    where = (b, kv, kv_head, group, col, n_pad, m_pad, lo, steps)
    gl.warp_specialize(
        [
            (_main, (shared, exchange, tensors, numbers, 0, D, CAUSAL, STAGES)),
            (_main, (shared, exchange, tensors, numbers, 1, D, CAUSAL, STAGES)),
            (_third, (descs, where, shared, exchange, sums_desc, stagings, exponents, tile, blocks, D, STAGES)),
        ],
        [4, 4], [MAIN, THIRD],
    )  # fmt: skip


def _section(heads: int, key_tiles: int) -> int:
    """How many of `heads` go together: sections of about TOGETHER programs, and no short one at the end."""
    return triton.cdiv(heads, max(1, heads * key_tiles // TOGETHER))


def backward(
    q: Tensor, k: Tensor, k_mean: Tensor | None, do: Tensor, o: Tensor, lse2: Tensor, v: Tensor, dk: Tensor, dv: Tensor,
    *, causal: bool, softmax_scale: float,
) -> Rows:  # fmt: skip
    """Writes dk and dv [B, K, N, D] of a call that `scores.backward_refusal` lets pass; returns the sums of dQ, for
    `scores_rows.round_dq`.

    q, do and o [B, H, M, D], k and v as they came, k_mean of `mean.key_mean`; lse2 [B H, M'] fp32 of the forward. dk at
    first gets the smoothed K, which is overwritten: the sums take as much memory as a tensor or two, and K none of its
    own.
    """
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    tune = tuning.hopper_scores_backward(dim)
    q8, k8, rows = prepare(q, k, k_mean, v, do, o, lse2, dk)
    block = BLOCK.value
    key_tiles = triton.cdiv(n, 2 * block)
    launch(
        hopper_backward_scores, b * kv_heads * key_tiles,
        (
            whole_rows(k8.rows, block), tokens(v, block), whole_rows(q8.rows, block), tokens(q, block),
            tokens(do, block), vector(rows.numbers, 4 * block), tokens(dk, block), tokens(dv, block),
            plain_rows(rows.sums, SUMS_ROW.value, block * WIDTH.value // SUMS_ROW.value), k8.scale,
            rows.exponents,
        ),
        (
            h, h // kv_heads, m, n, q8.rows.shape[1], k8.rows.shape[1], softmax_scale, softmax_scale * tuning.LOG2E,
            key_tiles, b * kv_heads, _section(b * kv_heads, key_tiles) if causal else 1,
        ),
        CAUSAL=causal, D=dim, STAGES=tune.stages, MAIN=tune.main, THIRD=tune.third, num_warps=4,
    )  # fmt: skip
    return rows
