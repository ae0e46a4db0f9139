"""The reference as a backend: what its forward keeps is laid out in tensors whose shapes follow from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sagebwd.attention import reference
from sagebwd.attention.config import QuantConfig
from sagebwd.kernels.packing import Packed

# The axis of each field of reference.Saved that counts tokens or tiles. The integers are kept as INT8, losing nothing.
_AXIS = reference.Saved(q_hat=-2, q_scale=-1, q_mean=-2, k_hat=-2, k_scale=-1, k_smooth=-2, lse2=-1, q=-2)


def kept_like(q: Tensor, k: Tensor, config: QuantConfig, packed: Packed | None) -> reference.Saved:
    """Uninitialised `Saved` of q [B, H, M, D] and k [B, K, N, D], its integers as INT8.

    Of packed documents: one after another, in whole tiles; there is room for as many as there can be. With
    products="scores" lse2 alone: q and k are kept as they came, and rounded again.
    """
    (batch, heads, m, dim), (_, kv_heads, n, _) = q.shape, k.shape
    documents = 1 if packed is None else packed.cu_seqlens_q.shape[0] - 1
    q_tiles = (m + documents * (config.block_q - 1)) // config.block_q
    k_tiles = (n + documents * (config.block_k - 1)) // config.block_k
    q_heads, k_heads = (batch, kv_heads, heads // kv_heads), (batch, kv_heads)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    lse2 = new(*q_heads, q_tiles * config.block_q)
    if config.products == "scores":
        return _of_lse2(lse2)
    return reference.Saved(
        q_hat=new(*q_heads, q_tiles * config.block_q, dim, dtype=torch.int8),
        q_scale=new(*q_heads, q_tiles),
        q_mean=new(*q_heads, q_tiles, dim) if config.smooth_q else None,
        k_hat=new(*k_heads, k_tiles * config.block_k, dim, dtype=torch.int8),
        k_scale=new(*k_heads, k_tiles),
        k_smooth=new(*k_heads, k_tiles * config.block_k, dim) if config.smooth_q else None,
        lse2=lse2,
    )


def _of_lse2(lse2: Tensor) -> reference.Saved:
    return reference.Saved(None, None, None, None, None, None, lse2)


def forward(q: Tensor, k: Tensor, v: Tensor, *, config: QuantConfig, packed: Packed | None = None, **args):
    """As `triton_backend.forward`: o, and v, o, lse2, q_hat, q_scale, q_mean, k_hat, k_scale, q, k, k_smooth."""
    scores = config.products == "scores"
    if packed is None:
        o, saved = reference.forward(q, k, v, config=config, **args)
        if scores:
            saved = _of_lse2(saved.lse2)
        else:
            saved = saved._replace(q_hat=saved.q_hat.to(torch.int8), k_hat=saved.k_hat.to(torch.int8))
    else:
        o, documents = reference.forward_packed(q, k, v, config=config, packed=packed, **args)
        saved = reference.Saved(*(None if x is None else x.zero_() for x in kept_like(q, k, config, packed)))
        for part, document in zip(_split(saved, config, packed), documents, strict=True):
            for kept, values in zip(part, document, strict=True):
                if kept is not None:
                    kept.copy_(values)
    o = _in_order_of(q, o)
    return o, (v, o, saved.lse2, *saved[:5], *((q, k) if scores else (None, None)), saved.k_smooth)


def backward(do: Tensor, kept: tuple, *, config: QuantConfig, packed: Packed | None = None, **args):
    """As `triton_backend.backward`."""
    v, o, lse2, *operands, q, k, k_smooth = kept
    saved = _of_lse2(lse2) if config.products == "scores" else reference.Saved(*operands, k_smooth, lse2)
    if packed is None:
        saved = _unpacked(saved, q, k, config)
        grads = reference.backward(do, v, o, saved, n=v.shape[-2], config=config, **args)
    else:
        documents = []
        for part, (rows, cols) in zip(_split(saved, config, packed), reference.documents(packed), strict=True):
            of_part = (None, None) if q is None else (q[..., rows, :], k[..., cols, :])
            documents.append(_unpacked(part, *of_part, config))
        grads = reference.backward_packed(do, v, o, documents, config=config, packed=packed, **args)
    return tuple(_in_order_of(x, grad.to(x.dtype)) for x, grad in zip((o, v, v), grads, strict=True))


def _split(saved: reference.Saved, config: QuantConfig, packed: Packed) -> Iterator[reference.Saved]:
    """Views of each document that has both queries and keys."""
    q_lengths, k_lengths = packed.cu_seqlens_q.diff().tolist(), packed.cu_seqlens_k.diff().tolist()
    q_tile = k_tile = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        if q_length == 0 or k_length == 0:
            continue
        q_tiles, k_tiles = -(-q_length // config.block_q), -(-k_length // config.block_k)
        q, k = (q_tile, q_tiles, config.block_q), (k_tile, k_tiles, config.block_k)
        q_tile, k_tile = q_tile + q_tiles, k_tile + k_tiles
        # Per field: which tiles, and how many of its rows one is.
        spans = reference.Saved(
            q_hat=q, q_scale=(*q[:2], 1), q_mean=(*q[:2], 1), k_hat=k, k_scale=(*k[:2], 1), k_smooth=k, lse2=q, q=q
        )
        yield reference.Saved(
            *(
                None if x is None else x.narrow(axis, first * rows, tiles * rows)
                for x, axis, (first, tiles, rows) in zip(saved, _AXIS, spans, strict=True)
            )
        )


def _unpacked(saved: reference.Saved, q: Tensor | None, k: Tensor | None, config: QuantConfig) -> reference.Saved:
    """What the reference's backward takes, of a document's INT8 or, with products="scores", of its q and k."""
    if q is None:
        return saved._replace(q_hat=saved.q_hat.float(), k_hat=saved.k_hat.float())
    k_mean = reference.key_mean(reference.key_sums(k), k.shape[-2]) if config.smooth_k else None
    return reference.queries_and_keys(q, k, config=config, k_mean=k_mean)._replace(lse2=saved.lse2)


def _in_order_of(other: Tensor, x: Tensor) -> Tensor:
    """x in the memory order that empty_like gives `other`."""
    out = torch.empty_like(other)
    return x if x.stride() == out.stride() else out.copy_(x)
