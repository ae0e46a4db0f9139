"""Context parallelism on the reference backend: `reference`, a chunk of queries or of keys at a time.

What each function takes and returns is said in `context_triton`; here the tensors have the reference's own shapes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sagebwd.attention import reference
from sagebwd.attention.config import QuantConfig
from sagebwd.attention.reference import Operands, Saved, key_sums
from sagebwd.attention.zigzag import Zigzag

__all__ = ["attend", "key_gradients", "key_sums", "query_gradient", "round_operands", "statistics"]

SLOT_DIM = 2
QUERY_DIMS = (3, 3)  # [B, K, G, M, D], [B, K, G, T]
KEY_DIMS = VALUE_DIMS = (2, 2)  # [B, K, N, D], [B, K, U]
STATISTICS_DIMS = (3, 3)  # lse2 and delta, [B, K, G, M]

Pair = tuple[Tensor, Tensor]


def round_operands(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, tokens: int, config: QuantConfig
) -> tuple[Pair, Pair, Pair]:
    k_mean = reference.key_mean(sums, tokens) if config.smooth_k else None
    saved, v_hat, v_scale = reference.operands(q, k, v, config=config, k_mean=k_mean)
    q_hat, k_hat, v_hat = (x.to(torch.int8) for x in (saved.q_hat, saved.k_hat, v_hat))
    return (q_hat, saved.q_scale), (k_hat, saved.k_scale), (v_hat, v_scale)


def attend(
    queries: Pair, keys: Pair, values: Pair, q: Tensor, k: Tensor,
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> Pair:  # fmt: skip
    outs, logsums = [], []
    for rows, end in _chunks(zigzag, q.shape[2]):
        mine, seen = _part(queries, 3, rows.start, rows.stop), _part(keys, 2, 0, end)
        v_hat, v_scale = _part(values, 2, 0, end)
        rounded = Operands(_saved(mine, seen), v_hat.float(), v_scale)
        mask = {"m": rows.stop - rows.start, "n": end, "causal": True}
        out, saved = reference.attend(rounded, softmax_scale=softmax_scale, config=config, **mask)
        outs.append(out)
        logsums.append(saved.lse2)
    return torch.empty_like(q).copy_(torch.cat(outs, 2)), torch.cat(logsums, -1)


def statistics(
    do: Tensor, o: Tensor, lse2: Tensor, queries: Pair, keys: Pair, v: Tensor,
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> Pair:  # fmt: skip
    deltas = []
    for rows, end in _chunks(zigzag, do.shape[2]):
        saved = _saved(_part(queries, 3, rows.start, rows.stop), _part(keys, 2, 0, end), lse2[..., rows])
        args = {"causal": True, "softmax_scale": softmax_scale, "config": config}
        deltas.append(reference.delta_of(do[:, :, rows], v[:, :, :end], o[:, :, rows], saved, n=end, **args))
    return lse2, torch.cat(deltas, -1)


def query_gradient(
    do: Tensor, o: Tensor, queries: Pair, keys: Pair, v: Tensor, found: Pair,
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> Tensor:  # fmt: skip
    parts = []
    for rows, end in _chunks(zigzag, do.shape[2]):
        lse2, delta = (x[..., rows] for x in found)
        saved = _saved(_part(queries, 3, rows.start, rows.stop), _part(keys, 2, 0, end), lse2)
        parts.append(_backward(do[:, :, rows], v[:, :, :end], saved, delta, end, softmax_scale, config)[0])
    return torch.empty_like(o).copy_(torch.cat(parts, 2))


def key_gradients(
    do: Tensor, v: Tensor, queries: Pair, keys: Pair, found: Pair,
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> Pair:  # fmt: skip
    tokens, length = do.shape[2], v.shape[2] // 2
    dk, dv = torch.empty_like(v), torch.empty_like(v)
    for place, chunk in enumerate(zigzag.chunks):
        cols, first = slice(place * length, (place + 1) * length), chunk * length
        lse2, delta = (x[..., first:] for x in found)
        saved = _saved(_part(queries, 3, first, tokens), _part(keys, 2, cols.start, cols.stop), lse2)
        # As many keys as queries, of which the chunk is the beginning: that aligns its first key with the first query.
        given = (do[:, :, first:], v[:, :, cols], saved, delta, tokens - first)
        _, dk[:, :, cols], dv[:, :, cols] = _backward(*given, softmax_scale, config)
    return dk, dv


def _chunks(zigzag: Zigzag, tokens: int) -> Iterator[tuple[slice, int]]:
    """Of a rank's `tokens`: the rows of each chunk of queries, and how many keys of the sequence its last one sees."""
    length = tokens // 2
    for place, chunk in enumerate(zigzag.chunks):
        yield slice(place * length, (place + 1) * length), (chunk + 1) * length


def _backward(
    do: Tensor, v: Tensor, saved: Saved, delta: Tensor, n: int, softmax_scale: float, config: QuantConfig
) -> tuple[Tensor, Tensor, Tensor]:
    args = {"causal": True, "softmax_scale": softmax_scale, "config": config, "delta": delta}
    return reference.backward(do, v, None, saved, n=n, **args)


def _saved(queries: Pair, keys: Pair, lse2: Tensor | None = None) -> Saved:
    q_hat, q_scale, k_hat, k_scale = *queries, *keys
    lse2 = q_scale.new_empty(0) if lse2 is None else lse2
    return Saved(q_hat.float(), q_scale, None, k_hat.float(), k_scale, None, lse2)


def _part(pair: Pair, dim: int, start: int, stop: int) -> Pair:
    """Tokens [start, stop) of the integers, which `dim` counts, and their blocks of the scales."""
    integers, scale = pair
    block = integers.shape[dim] // scale.shape[dim]
    return integers.narrow(dim, start, stop - start), scale.narrow(dim, start // block, (stop - start) // block)
