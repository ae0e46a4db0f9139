"""FPA with the tokens of a sequence spread over several ranks: torch's SDPA kernels over gathered keys and values.

Keys and values travel in their own dtype, forward and again in backward (they are not kept). A chunk of queries sees
the chunks before its own whole, and its own under the causal mask: two calls of a kernel, put together by their
log-sum-exp, as no kernel that torch offers but FlashAttention aligns a mask to the last key. The gradients of a rank's
keys and values come from all ranks, each rounded to the tensors' dtype once, and are summed in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from sagebwd.attention.zigzag import Zigzag

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """One of torch's kernels. forward(q, k, v, causal, scale) -> o, log-sum-exp [B, H, M, ...], and what else its
    backward takes: backward(do, q, k, v, o, log-sum-exp, rest, causal, scale) -> dq, dk, dv."""

    forward: Callable[..., tuple[Tensor, Tensor, tuple[Any, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    o, lse, *rest, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return o, lse, tuple(rest)


def _cudnn_backward(do, q, k, v, o, lse, rest, causal, scale):
    *lengths, seed, offset = rest
    return aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, None, *lengths, 0.0, causal, scale=scale
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    o, lse, *rest, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return o, lse, tuple(rest)


def _flash_backward(do, q, k, v, o, lse, rest, causal, scale):
    *lengths, seed, offset = rest
    return aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, *lengths, 0.0, causal, seed, offset, scale=scale
    )


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale), ()


def _cpu_backward(do, q, k, v, o, lse, rest, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)


CPU = Kernel(_cpu, _cpu_backward)
GPU = {
    SDPBackend.CUDNN_ATTENTION: Kernel(_cudnn, _cudnn_backward),
    SDPBackend.FLASH_ATTENTION: Kernel(_flash, _flash_backward),
}


def context_sdpa(q: Tensor, k: Tensor, v: Tensor, zigzag: Zigzag, kernel: Kernel, scale: float | None) -> Tensor:
    """Causal attention of this rank's queries over all ranks' keys and values.

    q [batch, heads, tokens, dim], k and v [batch, kv_heads, tokens, dim]: this rank's two chunks, one after the other.
    Every rank calls it at the same time. Returns o with q's shape and dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _ContextSDPA.apply(q, k, v, zigzag, kernel, scale)


class _ContextSDPA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, zigzag: Zigzag, kernel: Kernel, scale: float) -> Tensor:
        all_k, all_v = zigzag.gather((k, 2), (v, 2))
        o, logsums, kept = torch.empty_like(q), [], []
        for rows, parts in _calls(zigzag, q.shape[2]):
            done = [kernel.forward(q[:, :, rows], all_k[:, :, c], all_v[:, :, c], *of, scale) for c, *of in parts]
            outs, lses, rest = zip(*done, strict=True)
            lse = _merge(o[:, :, rows], outs, lses)
            logsums.append(lse)
            kept.append(rest)
        ctx.save_for_backward(q, k, v, o, *logsums)
        ctx.options, ctx.kept = (zigzag, kernel, scale), kept
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, *logsums = ctx.saved_tensors
        zigzag, kernel, scale = ctx.options
        all_k, all_v = zigzag.gather((k, 2), (v, 2))
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (all_k, all_v))
        for (rows, parts), lse, kept in zip(_calls(zigzag, q.shape[2]), logsums, ctx.kept, strict=True):
            mine, total = (q[:, :, rows], o[:, :, rows], do[:, :, rows]), 0.0
            for (cols, causal), rest in zip(parts, kept, strict=True):
                of_q, of_k, of_v = kernel.backward(
                    mine[2], mine[0], all_k[:, :, cols], all_v[:, :, cols], mine[1], lse, rest, causal, scale
                )
                total = total + of_q.float()
                dk[:, :, cols] += of_k
                dv[:, :, cols] += of_v
            dq[:, :, rows] = total
        dk, dv = zigzag.add((dk.to(k.dtype), 2), (dv.to(v.dtype), 2))
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _calls(zigzag: Zigzag, tokens: int) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Of each chunk: its queries among this rank's `tokens`, and the keys that they see, whole or under the mask."""
    length = tokens // 2
    for place, chunk in enumerate(zigzag.chunks):
        before = [(slice(0, chunk * length), False)] if chunk else []
        yield (
            slice(place * length, (place + 1) * length),
            [*before, (slice(chunk * length, (chunk + 1) * length), True)],
        )


def _merge(o: Tensor, outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Tensor:
    """Write into o what the parts' outputs come to together, and return their log-sum-exp in the kernel's shape."""
    if len(outs) == 1:
        o.copy_(outs[0])
        return lses[0]
    lse = torch.logaddexp(*lses)
    weights = ((part - lse).exp().reshape(o.shape[:3]).unsqueeze(-1) for part in lses)
    o.copy_(sum(out.float() * weight for out, weight in zip(outs, weights, strict=True)))
    return lse
