"""Device functions that the Hopper backward kernels share.

A consumer is a warpgroup that owns 64 rows of the result. For each tile of 64 tokens that streams by, it holds 64 x 64
of S and of dP in registers, makes the rounded left operand of a product out of them, and adds that product.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

BLOCK = tl.constexpr(64)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7, 3.6
TINY = tl.constexpr(1e-30)  # as in the reference: below it a row is all zero


@gluon.jit
def power_of_two(x):
    """2^x in one instruction; results below 2^-126 are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def hidden_zero(x):
    """0, as a value of each thread's own: what is loaded from an address that it is added to needs no move to a uniform
    register, which would wait for the load where it stands."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, %lanemask_eq; popc.b32 a, a; add.s32 $0, a, -1; }", "=r,r", [x],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def seen(rows, cols, m, n, CAUSAL: gl.constexpr):
    """Whether a query sees a key; `rows` and `cols` broadcast."""
    inside = cols < n
    if CAUSAL:  # aligned bottom right: the last query sees every key
        inside = inside & (cols <= rows + (n - m))
    return inside


@gluon.jit
def operand(x):
    """[64, C] int8 in an accumulator's layout as the left operand of a product over C.

    No data moves: position 16h + 4t + 2b + e of each 32 holds what column 16h + 8b + 2t + e held, and the right operand
    is stored in that order.
    """
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32]), 4)
    x = x.reshape([R, C // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)).reshape([R, C])
    return gl.convert_layout(x, LEFT, assert_trivial=True)


@gluon.jit
def quantise_rows(x, largest):
    """x^ as a left operand, and its scale a row, from the rows' largest magnitudes."""
    inverse = 127.0 * reciprocal(gl.maximum(largest, TINY))
    hat = (x * inverse[:, None] + 12582912.0).to(gl.int32, bitcast=True).to(gl.int8)
    return operand(hat), gl.where(largest < TINY, 0.0, largest * (1.0 / 127.0))


@gluon.jit
def start_s(left, ring, stage):
    """S of 64 rows and the 64 tokens of a stage."""
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    nothing = gl.zeros([BLOCK, BLOCK], gl.int32, INT)
    return warpgroup_mma(left, ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def start_dp(left, ring, stage, D: gl.constexpr):
    FLOAT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    nothing = gl.zeros([BLOCK, BLOCK], gl.float32, FLOAT)
    right = ring.index(stage).reshape([BLOCK, D]).permute((1, 0))
    return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon.jit
def start_part(left, ring, stage, HALF: gl.constexpr):
    """`left` by 64 columns of what a stage holds transposed."""
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    right = ring.index(stage).slice(HALF * BLOCK, BLOCK, dim=0).permute((1, 0))
    return warpgroup_mma(left, right, gl.zeros([BLOCK, BLOCK], gl.int32, INT), use_acc=False, is_async=True)


@gluon.jit
def add_part(total, part, scale):
    return total + part.to(gl.float32) * scale[:, None]


@gluon.jit
def release(empty, stage):
    """Hands a stage back. One thread arrives for the warpgroup: a product that one of its warps has waited for is done
    for all four. (mbarrier.arrive would first synchronise the warps.)"""
    mbarrier.expect(empty.index(stage), 0)


@gluon.jit
def hand_on(full, slot):
    """Tells who waits for a slot that the warpgroup's stores to it are there, which each thread has fenced: by one
    barrier of the warpgroup. (mbarrier.arrive takes a second one after it.)"""
    barrier()
    mbarrier.expect(full.index(slot), 0)


@gluon.jit
def store_half(out, rows, stride, d_stride, values, valid, HALF: gl.constexpr):
    """Writes [64, 64] at columns 64 HALF of `out`."""
    d = HALF * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, values.type.layout))
    at = out + rows.to(gl.int64)[:, None] * stride + d.to(gl.int64)[None, :] * d_stride
    gl.store(at, values.to(out.dtype.element_ty), mask=valid[:, None])
