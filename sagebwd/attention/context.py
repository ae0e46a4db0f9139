"""SageBwd with the tokens of a sequence spread over several ranks: context parallelism, causal and in zigzag order.

Nothing is approximated, and no sum is split: each rank computes whole rows of O and dQ for its own queries, and whole
rows of dK and dV for its own keys. What it needs of the others it gathers:

    forward    sums of K over slots of 128 tokens (FP32), then K^ and V^ with their scales (INT8)
    backward   K^ (INT8) and V (as it came, for dP) for dQ; Q^ (INT8), dO (as it came), lse and delta for dK and dV

So every rank smooths K by the same mean, summed in the same order as on one rank; quantisation blocks and the order of
every sum are those of one rank too. The kernels' results are bitwise those of one rank. Gathered tensors are not kept:
from forward to backward a rank holds what it would hold of its own tokens alone. docs/context-parallel.md tells more.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from sagebwd.attention.checks import backend_for, check_gpu, check_tensors
from sagebwd.attention.config import CONTEXT_CHUNK, NOT_WITH_CONTEXT, QuantConfig
from sagebwd.attention.op import announce, as_given, settings
from sagebwd.attention.zigzag import Zigzag, check_chunks
from sagebwd.kernels.packing import ROW_PADDING

assert CONTEXT_CHUNK % ROW_PADDING == 0  # K's slots, and the kernels' workspaces, begin where chunks do


def refusal(config: QuantConfig) -> str | None:
    """Why a config cannot be computed with context parallelism, with the remedy; None: it can."""
    for name, value in NOT_WITH_CONTEXT.items():
        if getattr(config, name) == value:
            default = getattr(QuantConfig, name)
            return f"QuantConfig.{name}={value!r} is not supported with context parallelism: set it to {default!r}"
    return None


def sage_attention_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    zigzag: Zigzag,
    softmax_scale: float | None = None,
    config: QuantConfig = QuantConfig(),  # noqa: B008 (frozen)
) -> Tensor:
    """`sage_attention(causal=True)` of a sequence whose tokens lie on the ranks of `zigzag`. Differentiable once.

    q: [tokens, batch, heads, dim] (Megatron's order), k and v the same with heads / g heads: this rank's two chunks,
        one after the other; any strides. Every rank of the group calls it at the same time.
    Returns o with q's shape, dtype and memory order. Raises ValueError for what is not supported, naming the remedy.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    check_tensors(q, k, v)
    if q.shape != (*q.shape[:2], *k.shape[2:]):
        raise ValueError(f"q has {q.shape[2]} tokens, k and v {k.shape[2]}: with context parallelism give as many")
    check_chunks(q.shape[2] * zigzag.size, zigzag.size, CONTEXT_CHUNK)
    why_not = refusal(config)
    if why_not:
        raise ValueError(why_not)
    if q.is_cuda:
        check_gpu(q.device.index, q.shape[-1], config)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not (0 < scale < math.inf):
        raise ValueError(f"softmax_scale is {softmax_scale}: it must be finite and above 0")
    backend = backend_for(q)
    announce(q, settings(backend, config), backend, config, None, None)
    with as_given(q):
        return _ContextAttention.apply(q, k, v, zigzag, scale, config).permute(2, 0, 1, 3)


def _module(backend: str) -> ModuleType:
    if backend == "reference":
        from sagebwd.attention import context_reference

        return context_reference
    from sagebwd.attention import context_triton

    return context_triton


class _ContextAttention(torch.autograd.Function):
    """q, k, v [batch, heads, tokens, dim]. What a backend does is said in `context_triton`."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, zigzag: Zigzag, softmax_scale: float, config: QuantConfig
    ) -> Tensor:
        backend = _module(backend_for(q))
        sums = None
        if config.smooth_k:
            (sums,) = zigzag.gather((backend.key_sums(k), backend.SLOT_DIM))
        queries, keys, values = backend.round_operands(q, k, v, sums, k.shape[2] * zigzag.size, config)
        all_keys = zigzag.gather(*zip((*keys, *values), backend.KEY_DIMS + backend.VALUE_DIMS, strict=True))
        o, lse2 = backend.attend(queries, all_keys[:2], all_keys[2:], q, k, zigzag, softmax_scale, config)
        ctx.save_for_backward(v, o, lse2, *queries, *keys)
        ctx.options = (zigzag, softmax_scale, config)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        with as_given(do):
            return *_gradients(do, ctx.saved_tensors, *ctx.options), None, None, None


def _gradients(
    do: Tensor, saved: tuple[Tensor, ...], zigzag: Zigzag, softmax_scale: float, config: QuantConfig
) -> tuple[Tensor, Tensor, Tensor]:
    v, o, lse2, *operands = saved
    queries, keys = operands[:2], operands[2:]
    backend, options = _module(backend_for(do)), (zigzag, softmax_scale, config)
    *all_keys, all_v = zigzag.gather(*zip(keys, backend.KEY_DIMS, strict=True), (v, 2))
    of_queries = backend.statistics(do, o, lse2, queries, all_keys, all_v, *options)
    # While dQ is computed, what dK and dV need is under way.
    dims = (*backend.QUERY_DIMS, *backend.STATISTICS_DIMS, 2)
    arrive = zigzag.start(*zip((*queries, *of_queries, do), dims, strict=True))
    dq = backend.query_gradient(do, o, queries, all_keys, all_v, of_queries, *options)
    del all_keys, all_v
    *everything, all_do = arrive()
    dk, dv = backend.key_gradients(all_do, v, everything[:2], keys, everything[2:], *options)
    return dq, dk, dv
