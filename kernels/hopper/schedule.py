"""Which query tiles a persistent program computes, and which keys each of them sees."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def items(row_tiles, heads, CAUSAL: gl.constexpr):
    """How many items this program has."""
    units = row_tiles * heads
    if CAUSAL:
        units = (row_tiles + 1) // 2 * heads
    mine = (units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    if CAUSAL:
        mine *= 2
    return mine


@gluon.jit
def item(i, row_tiles, CAUSAL: gl.constexpr):
    """Query tile and head of this program's i-th item, and whether it is one.

    Causal: a head's longest tile goes with its shortest, the next with the next, so that every pair costs the same. Of
    an odd number of tiles, the middle one is a pair by itself. Programs that run at a time share heads: L2 serves them.
    """
    if CAUSAL:
        pairs = (row_tiles + 1) // 2
        at = gl.program_id(0) + i // 2 * gl.num_programs(0)
        head = at // pairs
        short = at % pairs
        long = row_tiles - 1 - short
        tile = gl.where(i % 2 == 0, long, short)
        valid = (i % 2 == 0) | (long != short)
    else:
        at = gl.program_id(0) + i * gl.num_programs(0)
        head = at // row_tiles
        tile = at % row_tiles
        valid = at >= 0
    return tile, head, valid


@gluon.jit
def key_tiles(tile, m, n, CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """How many tiles of BN keys query tile `tile` sees whole, and how many it sees any of."""
    hi = n
    whole = n // BN
    if CAUSAL:
        hi = gl.minimum(n, gl.maximum(0, (tile + 1) * BM + n - m))
        whole = gl.minimum(whole, gl.maximum(0, tile * BM + 1 + n - m) // BN)
    return whole, (hi + BN - 1) // BN
