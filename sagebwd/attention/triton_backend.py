"""The Triton backend: quantise, forward, preprocess and backward on a GPU (or in Triton's interpreter)."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.attention.checks import backend_for
from sagebwd.attention.config import QuantConfig
from sagebwd.kernels import backward as backward_kernels
from sagebwd.kernels import forward as forward_kernels
from sagebwd.kernels import hopper, scores, tuning
from sagebwd.kernels.hopper import backward_scores as hopper_backward_scores
from sagebwd.kernels.hopper import forward as hopper_forward
from sagebwd.kernels.hopper import forward_scores as hopper_forward_scores
from sagebwd.kernels.hopper import scores as hopper_scores
from sagebwd.kernels.hopper.backward import backward_refusal
from sagebwd.kernels.hopper.scores_operands import quantise_k, quantise_q
from sagebwd.kernels.hopper.scores_rows import round_dq
from sagebwd.kernels.mean import key_mean, mean_of
from sagebwd.kernels.packing import Packed, Tables, tables
from sagebwd.kernels.quantise import Quantised, quantise, transpose

Saved = tuple[Tensor | None, ...]


def refused_by_hopper(
    x: Tensor, config: QuantConfig, *, window: int | None, packed: Packed | None, v: Tensor | None = None
) -> str | None:
    """Why a forward of queries x [B, H, M, D] takes the portable kernel; None: it takes Hopper's. v [B, K, N, D]: read
    as it is with products="scores"; None: any that TMA can read."""
    if backend_for(x) == "triton-interpreter":
        return "Triton's interpreter does not run them"
    capability, mask = tuning.capability(x.device), {"window": window is not None, "packed": packed is not None}
    if config.products == "scores":
        return hopper_scores.refusal(capability, x.shape[-1], config, **mask, tensors={} if v is None else {"V": v})
    return hopper.refusal(capability, x.shape[-1], config, **mask)


def takes_hopper(
    x: Tensor, config: QuantConfig, *, queries: int, keys: int,
    causal: bool = True, window: int | None = None, packed: Packed | None = None, v: Tensor | None = None,
) -> bool:  # fmt: skip
    """Whether Hopper's forward serves queries x [B, H, M, D] of a sequence of `queries` and `keys`."""
    if refused_by_hopper(x, config, window=window, packed=packed, v=v) is not None:
        return False
    return hopper.slower(tuning.HOPPER_FROM[config.products][0], queries, keys, causal) is None


def kernels(x: Tensor, config: QuantConfig, *, window: int | None, packed: Packed | None) -> str:
    """For people: which kernels such a call takes on a GPU, forward and backward, and why not the faster ones."""
    capability, mask = tuning.capability(x.device), {"window": window is not None, "packed": packed is not None}
    refusal = hopper_scores.backward_refusal if config.products == "scores" else backward_refusal
    why_not = refusal(capability, x.shape[-1], config, **mask)
    forward = forward_kernel(x, config, window=window, packed=packed)
    return f"{forward}; {_in_words('backward', why_not, tuning.HOPPER_FROM[config.products][1])}"


def forward_kernel(x: Tensor, config: QuantConfig, *, window: int | None, packed: Packed | None) -> str:
    """For people: which forward kernel such a call takes, and why it is not the faster one."""
    why_not = refused_by_hopper(x, config, window=window, packed=packed)
    return _in_words("forward", why_not, tuning.HOPPER_FROM[config.products][0])


def _in_words(part: str, why_not: str | None, least: float) -> str:
    """why_not, least: why Hopper's kernels refuse a call, and how many keys a query must have for them (`tuning`)."""
    why_not = why_not or hopper.slower(least, 0, 1 << 30, False)
    if why_not:
        return f"portable {part} (not Hopper's kernels: {why_not})"
    short = hopper.slower(least, 0, 0, False)
    return f"Hopper's {part}" + (f" (portable for short sequences: {short})" if short else "")


def forward(
    q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, softmax_scale: float, config: QuantConfig, window: int | None = None, packed: Packed | None = None,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """As `reference.forward` (`forward_packed`): o [B, H, M, D] with q's dtype and memory order, and the tensors saved
    for backward. With `packed` B is 1."""
    mask = {"causal": causal, "window": window, "packed": packed}
    on_hopper = takes_hopper(q, config, queries=q.shape[-2], keys=k.shape[-2], v=v, **mask)
    options = {"causal": causal, "softmax_scale": softmax_scale, "config": config}
    if on_hopper and config.products == "scores":
        q8, sums = quantise_q(q, k if config.smooth_k else None)
        k_mean = None if sums is None else mean_of(sums, k.shape[2])
        k8 = quantise_k(k, k_mean)
        o = torch.empty_like(q)
        lse2 = hopper_forward_scores.forward(q8, k8, v, o, causal=causal, softmax_scale=softmax_scale)
        return o, (v, o, lse2, None, None, None, None, None, q, k, k_mean)
    documents, window = _tables(packed, q, k), _clipped(window, k)
    q_documents, k_documents = (None, None) if documents is None else documents
    k_mean = key_mean(k, k_documents) if config.smooth_k else None
    q8, _ = quantise(q, config.block_q, rows=True, columns=False, tile_mean=config.smooth_q, documents=q_documents)
    k8, _ = quantise(k, config.block_k, rows=True, columns=False, mean=k_mean, documents=k_documents)
    o = _result_like(q, packed)
    if config.products == "scores":
        lse2 = scores.forward(q8, k8, v, o, window=window, documents=q_documents, **options)
        return o, (v, o, lse2, None, None, None, None, None, q, k, k_mean)
    v8, _ = quantise(v, config.block_k, rows=False, columns=True, documents=k_documents)
    if on_hopper:
        lse2 = hopper_forward.forward(q8, k8, v8, k, o, **options)
    else:
        options |= {"window": window, "documents": q_documents}
        lse2 = forward_kernels.forward(q8, k8, v8, k, k_mean, o, **options)
    k_source, k_mean = (k, k_mean) if config.smooth_q else (None, None)
    return o, (v, o, lse2, q8.rows, q8.scale, q8.tile_mean, k8.rows, k8.scale, None, k_source, k_mean)


def backward(
    do: Tensor, saved: Saved,
    *, causal: bool, softmax_scale: float, config: QuantConfig, window: int | None = None, packed: Packed | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dq, dk, dv): dq in the dtype and memory order of o, dk and dv in those of v."""
    if config.products == "scores":
        return _backward_of_scores(do, saved, causal, softmax_scale, config, window, packed)
    v, o, lse2, q_rows, q_scale, q_mean, k_rows, k_scale, _, k, k_mean = saved
    documents, window = _tables(packed, o, v), _clipped(window, v)
    of_q = None if documents is None else documents.q
    options = {"causal": causal, "softmax_scale": softmax_scale, "config": config}
    options |= {"window": window, "documents": documents}
    do8, statistics = quantise(
        do, config.block_q, rows=False, columns=True, lse2=lse2,
        other=o if config.delta == "stale" else None, documents=of_q,
    )  # fmt: skip
    dq, dk, dv = (_result_like(x, packed) for x in (o, v, v))
    q8 = Quantised(q_rows, transpose(q_rows), q_scale, q_mean)
    k8 = Quantised(k_rows, transpose(k_rows), k_scale, None)
    backward_kernels.backward(
        q8, k8, do8, statistics, do, v, v if k is None else k, k_mean, dq, dk, dv, **options
    )  # fmt: skip
    return dq, dk, dv


def _backward_of_scores(
    do: Tensor, saved: Saved, causal: bool, softmax_scale: float, config: QuantConfig,
    window: int | None, packed: Packed | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Q and K are rounded again: their INT8 forms beside them would be a quarter more to keep."""
    v, o, lse2, *_, q, k, k_mean = saved
    dk, dv = (_result_like(v, packed) for _ in range(2))
    sizes = {"queries": do.shape[-2], "keys": v.shape[-2], "causal": causal, "window": window}
    tensors = {"Q": q, "dK": dk, "dV": dv}
    if backward_kernels.on_hopper(do, v, config, **sizes, packed=packed is not None, **tensors):
        options = {"causal": causal, "softmax_scale": softmax_scale}
        rows = hopper_backward_scores.backward(q, k, k_mean, do, o, lse2, v, dk, dv, **options)
        dq = torch.empty_like(o)  # when INT8 Q and K are gone, so that the peak is no higher than SDPA's
        round_dq(rows, dq, softmax_scale)
        return dq, dk, dv
    documents, window = _tables(packed, o, v), _clipped(window, v)
    of_q, of_k = (None, None) if documents is None else documents
    q8, _ = quantise(q, config.block_q, rows=True, columns=False, documents=of_q)
    _, statistics = quantise(do, config.block_q, rows=False, columns=False, lse2=lse2, other=o, documents=of_q)
    k8, _ = quantise(k, config.block_k, rows=True, columns=False, mean=k_mean, smoothed=True, documents=of_k)
    dq = _result_like(o, packed)
    options = {"causal": causal, "softmax_scale": softmax_scale, "config": config}
    options |= {"window": window, "documents": documents}
    scores.backward(q8, k8, statistics, q, do, v, dq, dk, dv, **options)
    return dq, dk, dv


def _tables(packed: Packed | None, q: Tensor, k: Tensor) -> Tables | None:
    return None if packed is None else tables(packed, q.shape[-2], k.shape[-2])


def _clipped(window: int | None, k: Tensor) -> int | None:
    """A window wider than all keys, cut to them: kernels add it to positions in 32 bits."""
    return None if window is None else min(window, k.shape[-2])


def _result_like(x: Tensor, packed: Packed | None) -> Tensor:
    """Kernels write every token, but for those that are in no document: zeros."""
    return torch.empty_like(x) if packed is None else torch.zeros_like(x)
