"""Context parallelism on the Triton backend: the same kernels as without it, told by a table which tokens see which.

Two chunks of queries lie in one tensor, and each sees a beginning of all keys; two chunks of keys, each seen by the end
of all queries. These are "documents" to the kernels (`kernels.packing`), which may share what they look at. Hopper's
kernels run where they would on one rank, with as many tokens: `context_hopper`.

Operands, here and in `context_reference`: queries (Q^, scale), keys (K^, scale) and values (V^, scale), as `KEY_DIMS`
and its like say which dimension of each counts tokens, or blocks of them. statistics: lse and delta.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sagebwd.attention.config import QuantConfig
from sagebwd.attention.triton_backend import takes_hopper
from sagebwd.attention.zigzag import Zigzag
from sagebwd.kernels import backward as backward_kernels
from sagebwd.kernels import forward as forward_kernels
from sagebwd.kernels.mean import key_sums, mean_of
from sagebwd.kernels.packing import ROW_PADDING
from sagebwd.kernels.quantise import Quantised, quantise, transpose

__all__ = ["attend", "key_gradients", "key_sums", "query_gradient", "round_operands", "statistics"]

SLOT_DIM = 1
QUERY_DIMS = KEY_DIMS = (1, 1)
VALUE_DIMS = (2, 1)
STATISTICS_DIMS = (1,)

Pair = tuple[Tensor, Tensor]


def round_operands(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, tokens: int, config: QuantConfig
) -> tuple[Pair, Pair, Pair]:
    """This rank's queries, keys and values. sums: `key_sums` of all `tokens` keys, with smooth_k."""
    k_mean = mean_of(sums, tokens) if config.smooth_k else None
    q8, _ = quantise(q, config.block_q, rows=True, columns=False)
    k8, _ = quantise(k, config.block_k, rows=True, columns=False, mean=k_mean)
    v8, _ = quantise(v, config.block_k, rows=False, columns=True)
    return (q8.rows, q8.scale), (k8.rows, k8.scale), (v8.columns, v8.scale)


def attend(
    queries: Pair, keys: Pair, values: Pair, q: Tensor, k: Tensor,
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> Pair:  # fmt: skip
    """o like q [B, H, M, D], and lse2, of this rank's queries over all keys and values. q and k: for their shapes."""
    if takes_hopper(q, config, queries=zigzag.size * q.shape[2], keys=zigzag.size * k.shape[2]):
        from sagebwd.attention import context_hopper

        return context_hopper.attend(queries, keys, values, q, k, zigzag, softmax_scale, config)
    o = torch.empty_like(q)
    (rows, scale), (k_rows, k_scale), (v_columns, v_scale) = queries, keys, values
    q8 = Quantised(rows, None, scale, None)
    k8, v8 = Quantised(k_rows, None, k_scale, None), Quantised(None, v_columns, v_scale, None)
    lse2 = forward_kernels.forward(
        q8, k8, v8, k, None, o, causal=True, softmax_scale=softmax_scale, config=config, window=None,
        documents=query_table(zigzag, q.shape[2], q.device),
    )  # fmt: skip
    return o, lse2


def statistics(
    do: Tensor, o: Tensor, lse2: Tensor, queries: Pair, keys: Pair, v: Tensor,
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> tuple[Tensor]:  # fmt: skip
    """lse2 and delta of this rank's queries, [B H, M, 2]. keys and v [B, K, N, D]: all of them."""
    other = o if config.delta == "stale" else None
    # Columns, though nobody reads them here: without them Triton adds up delta in another order than on one rank.
    _, found = quantise(do, config.block_q, rows=False, columns=True, lse2=lse2, other=other)
    if config.delta == "matched":
        k8 = Quantised(keys[0], None, keys[1], None)
        _query_side(do, o, queries, k8, v, found, zigzag, softmax_scale, config, only="delta")
    return (found,)


def query_gradient(
    do: Tensor, o: Tensor, queries: Pair, keys: Pair, v: Tensor, found: tuple[Tensor],
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> Tensor:  # fmt: skip
    """dq in the memory order of o. keys and v: all of them; found: this rank's statistics."""
    k8 = Quantised(keys[0], transpose(keys[0]), keys[1], None)
    if backward_kernels.on_hopper(do, v, config, queries=v.shape[2], keys=v.shape[2]):
        from sagebwd.attention import context_hopper

        return context_hopper.query_gradient(do, o, queries, k8, v, found[0], zigzag, softmax_scale)
    dq = torch.empty_like(o)
    _query_side(do, dq, queries, k8, v, found[0], zigzag, softmax_scale, config)
    return dq


def key_gradients(
    do: Tensor, v: Tensor, queries: Pair, keys: Pair, found: tuple[Tensor],
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig,
) -> Pair:  # fmt: skip
    """dk and dv in the memory order of v. do, queries and found (statistics): all of them; keys and v: this rank's."""
    do8, _ = quantise(do, config.block_q, rows=False, columns=True)
    q8 = Quantised(queries[0], transpose(queries[0]), queries[1], None)
    if backward_kernels.on_hopper(do, v, config, queries=do.shape[2], keys=do.shape[2]):
        from sagebwd.attention import context_hopper

        return context_hopper.key_gradients(do, v, q8, keys, do8, found[0], zigzag, softmax_scale)
    k8 = Quantised(keys[0], None, keys[1], None)
    dk, dv = torch.empty_like(v), torch.empty_like(v)
    backward_kernels.key_side(
        q8, k8, do8, found[0], do, v, dk, dv, causal=True, softmax_scale=softmax_scale, config=config,
        documents=key_table(zigzag, v.shape[2], v.device),
    )  # fmt: skip
    return dk, dv


def _query_side(
    do: Tensor, dq: Tensor, queries: Pair, k8: Quantised, v: Tensor, found: Tensor,
    zigzag: Zigzag, softmax_scale: float, config: QuantConfig, only: str | None = None,
) -> None:  # fmt: skip
    backward_kernels.query_side(
        Quantised(queries[0], None, queries[1], None), k8, found, do, v, dq, causal=True, softmax_scale=softmax_scale,
        config=config, documents=query_table(zigzag, do.shape[2], do.device), only=only,
    )  # fmt: skip


def query_table(zigzag: Zigzag, tokens: int, device: torch.device) -> Tensor:
    """A table as `packing.Tables.q`, of this rank's `tokens` queries: a chunk sees all keys up to its own end."""
    return _table(zigzag.chunks, zigzag.size, tokens, device, True)


def key_table(zigzag: Zigzag, tokens: int, device: torch.device) -> Tensor:
    """A table as `packing.Tables.k`, of this rank's `tokens` keys: a chunk is seen by all queries from its start on.

    The kernels align a document's last query with its last key, so that the document has as many keys as queries; of
    these keys the chunk is the beginning, and the rest lies in nobody's slots.
    """
    return _table(zigzag.chunks, zigzag.size, tokens, device, False)


@cache
def _table(chunks: tuple[int, int], size: int, tokens: int, device: torch.device, of_queries: bool) -> Tensor:
    length = tokens // 2
    rows = []
    for place, chunk in enumerate(chunks):
        start = place * length
        if of_queries:
            row = [start, length, start, 0, (chunk + 1) * length, 0]
        else:
            seen_by = (2 * size - chunk) * length
            row = [start, seen_by, start, chunk * length, seen_by, chunk * length]
        rows += [row] * (length // ROW_PADDING)
    return torch.tensor(rows, dtype=torch.int32, device=device)
