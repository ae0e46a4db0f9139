"""Pieces that every kernel shares: rounding to INT8, workspace padding, and the checks of a launch."""

import triton
import triton.language as tl

# Rows of every workspace are padded to a multiple of this: the largest quantisation block and the largest kernel tile.
ROW_PADDING = 128

LOG2_127 = tl.constexpr(6.988684686772166)
TINY = tl.constexpr(1e-30)  # as in the reference: below it a tile is all zero


@triton.jit
def to_int8(x):
    """Round |x| <= 127 to the nearest integer, ties to even: adding 1.5 * 2^23 leaves it in the low byte."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantise_left(x, PER_ROW: tl.constexpr):
    """x^ and its scale for a left operand x [R, C] of a product over C: one scale a row [R, 1], or one a tile [1, 1]."""
    largest = tl.max(tl.abs(x), 1, keep_dims=True)
    if not PER_ROW:
        largest = tl.max(largest, 0, keep_dims=True)
    inverse = tl.where(largest < TINY, 0.0, 127.0 / tl.maximum(largest, TINY, propagate_nan=tl.PropagateNan.ALL))
    return to_int8(x * inverse), tl.where(largest < TINY, 0.0, largest / 127.0)


def padded_rows(rows: int) -> int:
    """Rows of a workspace for `rows` tokens."""
    return -(-rows // ROW_PADDING) * ROW_PADDING


def padded_dim(dim: int) -> int:
    """Columns of a workspace for a head of `dim`: a power of two, and 32 at least, the depth of an INT8 product."""
    return max(32, triton.next_power_of_2(dim))
