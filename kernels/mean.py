"""The mean of K over a document's tokens, in one pass over K and always in the same order of sums.

The order depends on the document alone, not on what lies beside it: slots of ROW_PADDING tokens first, then the slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.common import SLOT, document, padded_dim, padded_rows
from sagebwd.kernels.launch import launch
from sagebwd.kernels.packing import ROW_PADDING

SUMMED = 32  # tokens at a time


@triton.jit
def sum_slot(
    x, sums, documents, x_b, x_h, x_l, x_d, pid, heads, length, slots,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sums of slot `pid` of all heads' x."""
    bh = (pid // slots).to(tl.int64)
    slot = pid % slots
    start = slot * SLOT
    x += (bh // heads) * x_b + (bh % heads) * x_h
    if documents is not None:
        first, length, row, _, _, _ = document(documents, start)
        start -= row
        x += first * x_l
    d = tl.arange(0, DP)
    total = tl.zeros((ROWS, DP), tl.float32)
    for step in tl.static_range(0, SLOT, ROWS):
        l = start + step + tl.arange(0, ROWS)
        at = x + l.to(tl.int64)[:, None] * x_l + d.to(tl.int64)[None, :] * x_d
        total += tl.load(at, mask=(l < length)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    tl.store(sums + (bh * slots + slot) * DP + d, tl.sum(total, 0))


@triton.jit(do_not_specialize=["heads", "length", "slots"])
def _slot_sums(
    x, sums, documents, x_b, x_h, x_l, x_d, heads, length, slots,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sum_slot(x, sums, documents, x_b, x_h, x_l, x_d, tl.program_id(0), heads, length, slots, D, DP, ROWS)


@triton.jit(do_not_specialize=["length", "slots"])
def _slot_means(sums, means, documents, length, slots, DP: tl.constexpr, ROWS: tl.constexpr):
    pid = tl.program_id(0)
    if documents is not None:  # the program of a document's first slot sums them all
        at = pid % slots * SLOT
        _, length, row, _, _, _ = document(documents, at)
        sums += pid.to(tl.int64) * DP
        count = tl.where(at == row, tl.cdiv(length, SLOT), 0)
    else:
        sums += pid.to(tl.int64) * slots * DP
        count = slots
    d = tl.arange(0, DP)
    total = tl.zeros((ROWS, DP), tl.float32)
    for start in range(0, count, ROWS):
        l = start + tl.arange(0, ROWS)
        total += tl.load(sums + l[:, None] * DP + d[None, :], mask=(l < count)[:, None], other=0.0)
    total = tl.sum(total, 0)
    mean = tl.div_rn(total, tl.maximum(length, 1) + tl.zeros_like(total))
    tl.store(means + pid.to(tl.int64) * DP + d, mean)


def key_mean(x: Tensor, documents: Tensor | None) -> Tensor:
    """Mean of x [B, H, L, D] (any strides) over L: [B H, 1, D'] fp32.

    documents, a table of packing.Tables: over each document's tokens. [B H, slots, D'], a document's at its first slot.
    """
    return mean_of(key_sums(x, documents), x.shape[2], documents)


def key_sums(x: Tensor, documents: Tensor | None = None) -> Tensor:
    """Sums of x [B, H, L, D] over slots of ROW_PADDING tokens: [B H, slots, D'] fp32."""
    h, length, dim = x.shape[1:]
    sums = new_sums(x, documents)
    heads, slots, dp = sums.shape
    tensors, numbers = (x, sums, documents), (*x.stride(), h, length, slots)
    launch(_slot_sums, heads * slots, tensors, numbers, D=dim, DP=dp, ROWS=SUMMED, num_warps=4)
    return sums


def new_sums(x: Tensor, documents: Tensor | None = None) -> Tensor:
    """For `key_sums` of x."""
    b, h, length, dim = x.shape
    slots = padded_rows(length) // ROW_PADDING if documents is None else documents.shape[0]
    return x.new_empty((b * h, slots, padded_dim(dim)), dtype=torch.float32)


def mean_of(sums: Tensor, length: int, documents: Tensor | None = None) -> Tensor:
    """`key_mean` of `length` tokens from their `key_sums`."""
    bh, slots, dp = sums.shape
    means = sums.new_empty((bh, 1 if documents is None else slots, dp))
    programs = means.shape[0] * means.shape[1]
    launch(_slot_means, programs, (sums, means, documents), (length, slots), DP=dp, ROWS=32, num_warps=4)
    return means
