"""Pieces that every kernel shares: rounding to INT8, the tiles that a mask leaves, and workspace padding.

Kernels name the sizes that vary from call to call in `do_not_specialize`: Triton would compile one kernel for lengths
that 16 divides and another for the rest. Strides and paddings stay specialised, since wide loads depend on them.
"""

import triton
import triton.language as tl

from sagebwd.kernels.packing import ROW_PADDING

SLOT = tl.constexpr(ROW_PADDING)
LOG2_127 = tl.constexpr(6.988684686772166)
TINY = tl.constexpr(1e-30)  # as in the reference: below it a tile is all zero


@triton.jit
def to_int8(x):
    """Round |x| <= 127 to the nearest integer, ties to even: adding 1.5 * 2^23 leaves it in the low byte."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def fragment_order(x):
    """x [R, C] with its columns in the order in which `columns` workspaces hold tokens.

    A thread of a matrix unit holds an accumulator's columns in pairs (2 of every 8), and wants an 8-bit left operand's
    in fours. Where column 16 h + 8 b + 2 t + e of a product's right operand is stored at 16 h + 4 t + 2 b + e, the
    accumulator that was rounded is the operand, with no exchange between threads.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, (R, C // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (R, C))


@triton.jit
def quantise_left(x, PER_ROW: tl.constexpr):
    """x^ and its scale for a left operand x [R, C] of a product over C: a scale a row [R, 1], or one a tile [1, 1]."""
    largest = tl.max(tl.abs(x), 1, keep_dims=True)
    if not PER_ROW:
        largest = tl.max(largest, 0, keep_dims=True)
    inverse = tl.where(largest < TINY, 0.0, 127.0 / tl.maximum(largest, TINY, propagate_nan=tl.PropagateNan.ALL))
    return to_int8(x * inverse), tl.where(largest < TINY, 0.0, largest / 127.0)


@triton.jit
def document(table, row):
    """Of the document that holds row `row` of the padded workspaces (see packing.Tables): first token (int64), tokens
    and first row, and the same on its other side."""
    at = table + row // SLOT * 6
    return (
        tl.load(at).to(tl.int64), tl.load(at + 1), tl.multiple_of(tl.load(at + 2), SLOT),
        tl.load(at + 3).to(tl.int64), tl.load(at + 4), tl.multiple_of(tl.load(at + 5), SLOT),
    )  # fmt: skip


@triton.jit
def key_range(tile, m, n, window, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The keys [lo, hi) that query tile `tile` sees some of; the key tiles of [inner, full) it sees whole: no mask."""
    lo = 0
    inner = 0
    hi = n
    full = n // BN * BN
    if CAUSAL:
        hi = tl.minimum(n, tl.maximum(0, (tile + 1) * BM + n - m))
        full = tl.minimum(full, tl.maximum(0, tile * BM + 1 + n - m) // BN * BN)
    if window is not None:
        lo = tl.maximum(0, tile * BM + n - m - window) // BN * BN
        inner = tl.minimum(hi, tl.cdiv(tl.maximum(0, (tile + 1) * BM - 1 + n - m - window), BN) * BN)
        full = tl.maximum(inner, full)
    return lo, inner, full, hi


@triton.jit
def query_range(tile, m, n, window, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The queries [lo, hi) of which some see key tile `tile`; the query tiles of [inner, full) see it whole: no mask.

    All are whole tiles: what a padded query adds is 0, by its lse and its dO.
    """
    hi = tl.cdiv(m, BM) * BM
    lo = 0
    inner = 0
    if window is not None:
        hi = tl.minimum(hi, tl.cdiv(tl.maximum(0, (tile + 1) * BN + window - (n - m)), BM) * BM)
    if CAUSAL:
        lo = tl.minimum(hi, tl.maximum(0, tile * BN - (n - m)) // BM * BM)
        inner = tl.minimum(hi, tl.cdiv(tl.maximum(0, (tile + 1) * BN - 1 - (n - m)), BM) * BM)
    if (tile + 1) * BN > n:
        inner = hi
    full = hi
    if window is not None:
        full = tl.maximum(inner, tl.minimum(hi, tl.maximum(0, tile * BN + window + 1 - (n - m)) // BM * BM))
    return lo, inner, full, hi


@triton.jit
def visible(rows, cols, m, n, window, CAUSAL: tl.constexpr):
    """Whether a query sees a key; `rows` and `cols` broadcast."""
    seen = cols < n
    if CAUSAL:  # aligned bottom right: the last query sees every key
        seen = seen & (cols <= rows + (n - m))
    if window is not None:
        seen = seen & (cols >= rows + (n - m) - window)
    return seen


def padded_rows(rows: int) -> int:
    """Rows of a workspace for `rows` tokens."""
    return -(-rows // ROW_PADDING) * ROW_PADDING


def padded_dim(dim: int) -> int:
    """Columns of a workspace for a head of `dim`: a power of two, and 32 at least, the depth of an INT8 product."""
    return max(32, 1 << (dim - 1).bit_length())
