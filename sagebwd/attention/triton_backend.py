"""The Triton backend: quantise, forward, preprocess and backward on a GPU (or in Triton's interpreter)."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels import backward as backward_kernels
from sagebwd.kernels import forward as forward_kernels
from sagebwd.kernels.quantise import Quantised, quantise, transpose

Saved = tuple[Tensor | None, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, config: QuantConfig):
    """As `reference.forward`: o [B, H, M, D] with q's dtype and memory order, and the tensors saved for backward."""
    k_mean = k.mean(-2, keepdim=True, dtype=torch.float32) if config.smooth_k else None
    q8, _ = quantise(q, config.block_q, rows=True, columns=False, tile_mean=config.smooth_q)
    k8, _ = quantise(k, config.block_k, rows=True, columns=False, mean=k_mean)
    v8, _ = quantise(v, config.block_k, rows=False, columns=True)
    o = torch.empty_like(q)
    lse2 = forward_kernels.forward(q8, k8, v8, k, k_mean, o, causal=causal, softmax_scale=softmax_scale, config=config)
    k_source, k_mean = (k, k_mean) if config.smooth_q else (None, None)
    return o, (v, o, lse2, q8.rows, q8.scale, q8.tile_mean, k8.rows, k8.scale, k_source, k_mean)


def backward(do: Tensor, saved: Saved, *, causal: bool, softmax_scale: float, config: QuantConfig):
    """Gradients (dq, dk, dv): dq in the dtype and memory order of o, dk and dv in those of v."""
    v, o, lse2, q_rows, q_scale, q_mean, k_rows, k_scale, k_source, k_mean = saved
    q8 = Quantised(q_rows, transpose(q_rows), q_scale, q_mean)
    k8 = Quantised(k_rows, transpose(k_rows), k_scale, None)
    stale = config.delta == "stale"
    do8, delta = quantise(do, config.block_q, rows=False, columns=True, other=o if stale else None)
    dq, dk, dv = torch.empty_like(o), torch.empty_like(v), torch.empty_like(v)
    backward_kernels.backward(
        q8, k8, do8, lse2, delta, do, v, v if k_source is None else k_source, k_mean, dq, dk, dv,
        causal=causal, softmax_scale=softmax_scale, config=config,
    )  # fmt: skip
    return dq, dk, dv
