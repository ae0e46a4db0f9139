"""What becomes of the FP32 sums of dQ that `backward_fused` leaves in memory."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "m"])
def round_dq(sums, dq, dq_b, dq_h, dq_m, dq_d, heads, m, blocks, softmax_scale, D: tl.constexpr):
    """The FP32 sums of 64 queries, in the order in which `backward_fused` leaves them, as 16-bit dQ."""
    bh = tl.program_id(0) // blocks
    tile = tl.program_id(0) % blocks
    x = tl.load(sums + tl.program_id(0).to(tl.int64) * (64 * D) + tl.arange(0, 64 * D))
    x = tl.reshape(x, (2, D // 32, 2, 4, 8, 4, 2, 2))  # half, h, i, w, g, t, b, e
    x = tl.reshape(tl.permute(x, (3, 2, 4, 0, 1, 6, 5, 7)), (64, D))
    rows = tile * 64 + tl.arange(0, 64)
    at = dq + (bh // heads).to(tl.int64) * dq_b + (bh % heads).to(tl.int64) * dq_h
    at = at + rows.to(tl.int64)[:, None] * dq_m + tl.arange(0, D).to(tl.int64)[None, :] * dq_d
    tl.store(at, (x * softmax_scale).to(dq.dtype.element_ty), mask=(rows < m)[:, None])
