"""`sage_attention`: checks its arguments, picks the backend, and ties forward and backward together for autograd."""

from __future__ import annotations

import logging
import math
import os
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from sagebwd.attention import reference
from sagebwd.attention.config import QuantConfig

log = logging.getLogger("sagebwd")
MAX_DIM = 256
Layout = Literal["bhnd", "nbhd"]


def sage_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    config: QuantConfig = QuantConfig(),  # noqa: B008 (frozen)
    layout: Layout = "bhnd",
) -> Tensor:
    """INT8 attention with an INT8 backward (SageBwd, arXiv 2603.02170). Differentiable in q, k and v.

    q: [batch, heads, tokens, dim], or Megatron's [tokens, batch, heads, dim] with layout="nbhd". Any strides; no copy
        is made. bf16 or fp16 on a GPU; fp32 as well on a CPU.
    k, v: the same with their own number of tokens, and with heads / g heads for GQA (not expanded).
    causal: a query sees the keys up to its own position, aligned bottom right: the last query sees every key.
    softmax_scale: factor of Q K^T; None: 1 / sqrt(dim).
    config: the numerics. The backward's rules (granularity, delta) are those given here.
    Returns o with q's shape and dtype. A query that sees no key gets zeros.
    Raises ValueError for what is not supported, naming the remedy.
    """
    if layout not in ("bhnd", "nbhd"):
        raise ValueError(f"layout is {layout!r}: choose 'bhnd' [batch, heads, tokens, dim] or 'nbhd'")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} has {x.dim()} dimensions: sage_attention takes 4, in the order of layout={layout!r}"
            )
    if layout == "nbhd":
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"softmax_scale is {softmax_scale}: it must be finite and above 0")
    backend = _backend(q)
    _announce(backend, q.device.type, q.dtype, q.shape[-1], config)
    o = _SageAttention.apply(q, k, v, causal, scale, config, backend)
    return o.permute(2, 0, 1, 3) if layout == "nbhd" else o


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as [batch, heads, tokens, dim]"
    if k.shape != v.shape:
        raise ValueError(f"k and v differ in shape ({shapes}): they must be alike")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in batch or dim ({shapes}): they must be alike")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} key/value heads ({shapes})")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"a dimension is empty ({shapes}): skip the call for an empty batch")
    if q.shape[-1] % 8 or q.shape[-1] > MAX_DIM:
        raise ValueError(f"head dim {q.shape[-1]} is not supported: use a multiple of 8 up to {MAX_DIM}")
    if len({q.device, k.device, v.device}) > 1:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}: move them to one device")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cast them to one dtype")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype {q.dtype} is not supported: cast q, k and v to bfloat16 or float16")


def _backend(q: Tensor) -> str:
    """CUDA -> Triton; CPU -> the reference, or Triton's interpreter where TRITON_INTERPRET=1 asks for it."""
    if q.is_cuda:
        if q.dtype == torch.float32:
            raise ValueError("float32 is not supported on a GPU (dP is a 16-bit product): cast to bfloat16 or float16")
        capability = _capability(q.device.index)
        if capability < (8, 0):
            raise ValueError(
                f"GPU {torch.cuda.get_device_name(q.device)} has compute capability {capability[0]}.{capability[1]}: "
                "the kernels need 8.0 or newer; use layout-compatible torch SDPA there"
            )
        return "triton"
    if q.device.type != "cpu":
        raise ValueError(f"device {q.device} is not supported: move q, k and v to a CUDA GPU or to the CPU")
    if os.environ.get("TRITON_INTERPRET") == "1":
        if q.dtype == torch.bfloat16:
            raise ValueError("Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 there")
        return "triton-interpreter"
    return "reference"


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def _announce(backend: str, device: str, dtype: torch.dtype, dim: int, config: QuantConfig) -> None:
    """Once for each kind of call: which backend runs."""
    log.info("SageBwd runs on %s: %s backend, %s, head dim %d (%s)", device, backend, dtype, dim, config.summary())


class _SageAttention(torch.autograd.Function):
    """Works on [B, H, N, D] views; gradients come back in the same."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, config, backend):
        ctx.args = {"causal": causal, "softmax_scale": scale, "config": config}
        ctx.backend = backend
        if backend == "reference":
            o, saved = reference.forward(q, k, v, **ctx.args)
            ctx.save_for_backward(v, o, *saved)
        else:
            from sagebwd.attention import triton_backend  # importing Triton takes seconds, and a CPU run needs none

            with _on(q):
                o, saved = triton_backend.forward(q, k, v, **ctx.args)
            ctx.save_for_backward(*saved)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        if ctx.backend == "reference":
            v, o, *saved = ctx.saved_tensors
            grads = reference.backward(do, v, o, reference.Saved(*saved), n=v.shape[-2], **ctx.args)
            grads = tuple(g.to(do.dtype) for g in grads)
        else:
            from sagebwd.attention import triton_backend

            with _on(do):
                grads = triton_backend.backward(do, ctx.saved_tensors, **ctx.args)
        return (*grads, None, None, None, None)


def _on(x: Tensor):
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device_of(x)
