"""`sage_attention` and `sage_attention_packed`: what users call. They bring the arguments into the operators' form."""

from __future__ import annotations

import math
from typing import Literal, Never

import torch
from torch import Tensor

from sagebwd.attention.checks import backend_for
from sagebwd.attention.config import QuantConfig
from sagebwd.attention.op import attend, settings

Layout = Literal["bhnd", "nbhd"]

# Arguments of torch's SDPA and of FlashAttention that are called otherwise here, or cannot be had.
INSTEAD = {
    "attn_mask": "masks are causal=True, with or without window, and causal=False; for padding and documents there is "
    "sage_attention_packed",
    "dropout_p": "attention dropout is not supported: leave it out, or use "
    "torch.nn.functional.scaled_dot_product_attention",
    "is_causal": "pass causal",
    "scale": "pass softmax_scale",
    "enable_gqa": "leave it out, key/value heads may always be fewer",
    "window_size": "pass window, the keys to the left, with causal=True",
}


def sage_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    config: QuantConfig = QuantConfig(),  # noqa: B008 (frozen)
    layout: Layout = "bhnd",
    window: int | None = None,
    **others: Never,
) -> Tensor:
    """INT8 attention with an INT8 backward (SageBwd, arXiv 2603.02170). Differentiable in q, k and v, once.

    q: [batch, heads, tokens, dim], or Megatron's [tokens, batch, heads, dim] with layout="nbhd". Any strides; no copy
        is made. bf16 or fp16 on a GPU; fp32 as well on a CPU. Under autocast all three are cast to autocast's dtype, as
        torch's SDPA does.
    k, v: the same with their own number of tokens, and with heads / g heads for GQA (not expanded).
    causal: a query sees the keys up to its own position, aligned bottom right: the last query sees every key.
    softmax_scale: factor of Q K^T; None: 1 / sqrt(dim).
    config: the numerics. The backward's rules (granularity, delta) are those given here.
    window: how many keys to the left of its own position a query sees besides its own (FlashAttention's
        window_size[0]); causal only. None: all.
    Returns o with q's shape, dtype and memory order; the gradients of k and v have those of k and v. A query that sees
    no key gets zeros; so does every query where there are no keys.
    others: refused, with what SDPA's arguments are called here.
    Raises ValueError for what is not supported, TypeError for another argument, naming the remedy.
    """
    _refuse(others)
    if layout != "bhnd" and layout != "nbhd":
        raise ValueError(f"layout is {layout!r}: choose 'bhnd' [batch, heads, tokens, dim] or 'nbhd'")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions: give each 4, in the order of "
            f"layout={layout!r} (packed documents go to sage_attention_packed)"
        )
    scale = _check(q, k, v, causal, softmax_scale, window, config)
    q, k, v = _autocast(q, k, v)
    if layout == "nbhd":
        q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
    o = attend(q, k, v, causal, scale, window, _settings(q, config))
    return o.permute(2, 0, 1, 3) if layout == "nbhd" else o


def sage_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None = None,
    config: QuantConfig = QuantConfig(),  # noqa: B008 (frozen)
    window: int | None = None,
    **others: Never,
) -> Tensor:
    """`sage_attention` on documents that lie one after another (Megatron's "thd"): none sees another.

    q: [tokens, heads, dim]; k, v: [their tokens, kv_heads, dim]. Any strides.
    cu_seqlens_q, cu_seqlens_k: [documents + 1] int32 on q's device: where each document begins and where the last one
        ends. Tokens past it belong to none: they get zeros. On a GPU the contents are not checked, since reading them
        would wait for it.
    max_seqlen_q, max_seqlen_k: the tokens of the longest document, or more.
    Everything that is by token or by tile (the mask, the window, the mean of the keys, quantisation blocks) is by
    document. Returns o [tokens, heads, dim]; the rest is as in `sage_attention`.
    """
    _refuse(others)
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ValueError(
            f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions: give each 3, [tokens, heads, dim]"
        )
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(length, int) or length < 0:
            raise ValueError(f"{name} is {length!r}: give the tokens of the longest document, an int")
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(ends, Tensor):
            raise ValueError(f"{name} is {ends!r}: give an int32 tensor on q's device")
    scale = _check(q, k, v, causal, softmax_scale, window, config)
    q, k, v = (x.transpose(0, 1)[None] for x in _autocast(q, k, v))
    o = attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale, window, _settings(q, config)
    )
    return o[0].transpose(0, 1)


def _refuse(others: dict[str, object]) -> None:
    for name in others:
        raise TypeError(f"sage_attention takes no {name}: {INSTEAD.get(name, 'leave it out')}")


def _check(
    q: Tensor, k: Tensor, v: Tensor,
    causal: bool, softmax_scale: float | None, window: int | None, config: QuantConfig,
) -> float:  # fmt: skip
    """What the operators cannot say as well; returns the scale. What they check themselves is in `checks`."""
    if not q.layout == k.layout == v.layout == torch.strided:
        raise ValueError(
            f"q, k and v are laid out as {q.layout}, {k.layout} and {v.layout}: make them dense; documents of "
            "different lengths go to sage_attention_packed"
        )
    if not isinstance(config, QuantConfig):
        raise ValueError(f"config is {config!r}: give a QuantConfig")
    if torch._C._are_functorch_transforms_active():
        raise ValueError("sage_attention does not support torch.func (vmap, grad, jvp): use torch.autograd, or batches")
    if not isinstance(causal, bool):
        raise ValueError(f"causal is of {type(causal)}: give True or False; other masks are not supported")
    if window is not None:
        if not isinstance(window, int) or isinstance(window, bool) or window < 0:
            raise ValueError(f"window is {window!r}: give how many keys to the left a query sees, an int of 0 or more")
        if not causal:
            raise ValueError(f"window={window} with causal=False is not supported: pass causal=True or window=None")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not (0 < scale < math.inf):
        raise ValueError(f"softmax_scale is {softmax_scale}: it must be finite and above 0")
    return scale


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, q, k and v in its dtype; float64 stays, as in torch's own casts."""
    kind = q.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):  # others have no autocast, or no backend
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))


_texts: dict[tuple[str, QuantConfig], str] = {}


def _settings(q: Tensor, config: QuantConfig) -> str:
    backend = backend_for(q)
    if torch.compiler.is_compiling():  # a trace keeps no cache of ours
        return settings(backend, config)
    text = _texts.get((backend, config))
    if text is None:
        text = _texts[backend, config] = settings(backend, config)
    return text
