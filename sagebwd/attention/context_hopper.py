"""Context parallelism on Hopper's kernels, which take no tables: a chunk of queries or of keys at a time.

The functions are those of `context_triton`, which says when these run instead of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.attention.config import QuantConfig
from sagebwd.attention.zigzag import Zigzag
from sagebwd.kernels.hopper import backward as backward_kernels
from sagebwd.kernels.hopper import forward as forward_kernels
from sagebwd.kernels.quantise import Quantised

Pair = tuple[Tensor, Tensor]


def attend(
    queries: Pair, keys: Pair, values: Pair, q: Tensor, k: Tensor,
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> Pair:  # fmt: skip
    o, logsums = torch.empty_like(q), []
    k8, v8 = Quantised(keys[0], None, keys[1], None), Quantised(None, values[0], values[1], None)
    length = q.shape[2] // 2
    for place, chunk in enumerate(zigzag.chunks):
        seen = torch.empty((*k.shape[:2], (chunk + 1) * length, k.shape[3]), device="meta")  # a shape
        logsums.append(
            forward_kernels.forward(
                _chunk(queries, place), k8, v8, seen, o[:, :, _rows(place, length)],
                causal=True, softmax_scale=softmax_scale, config=config,
            )
        )  # fmt: skip
    return o, torch.cat(logsums, 1)


def query_gradient(
    do: Tensor, o: Tensor, queries: Pair, k8: Quantised, v: Tensor, found: Tensor, zigzag: Zigzag, softmax_scale: float
) -> Tensor:
    dq, length = torch.empty_like(o), do.shape[2] // 2
    for place, chunk in enumerate(zigzag.chunks):
        rows = _rows(place, length)
        lse2, delta = (x[:, rows].contiguous() for x in found.unbind(-1))
        backward_kernels.query_side(
            _chunk(queries, place), k8, lse2, delta, do[:, :, rows], v[:, :, : (chunk + 1) * length], dq[:, :, rows],
            causal=True, softmax_scale=softmax_scale,
        )  # fmt: skip
    return dq


def key_gradients(
    do: Tensor, v: Tensor, q8: Quantised, keys: Pair, do8: Quantised, found: Tensor,
    zigzag: Zigzag, softmax_scale: float,
) -> Pair:  # fmt: skip
    dk, dv, length = torch.empty_like(v), torch.empty_like(v), v.shape[2] // 2
    lse2, delta = (x.contiguous() for x in found.unbind(-1))
    for place, chunk in enumerate(zigzag.chunks):
        cols = _rows(place, length)
        backward_kernels.key_side(
            q8, _chunk(keys, place), do8, lse2, delta, do, v[:, :, cols], dk[:, :, cols], dv[:, :, cols],
            causal=True, softmax_scale=softmax_scale, shift=-chunk * length,
        )  # fmt: skip
    return dk, dv


def _rows(place: int, length: int) -> slice:
    return slice(place * length, (place + 1) * length)


def _chunk(pair: Pair, place: int) -> Quantised:
    """Rows and scales of one of a rank's two chunks: a copy, since a workspace is contiguous."""
    rows, scale = (x.unflatten(1, (2, -1))[:, place].contiguous() for x in pair)
    return Quantised(rows, None, scale, None)
