"""The torch.library operators: what torch.compile, activation recompute, opcheck and exported graphs see.

attention_forward(q, k, v) -> (o, lse2, q_rows, q_scale, q_mean, k_rows, k_scale, k_mean): o with q's shape, dtype and
    memory order, and what the backend keeps for its backward. Kept beside these: v, o; k with Q-smoothing; q and k in
    place of their INT8 forms with products="scores". What a config does not need has no elements: an operator's result
    cannot be None.
attention_forward_packed: the same on packed documents, [1, heads, tokens, dim].
attention_backward(do, ...) -> (dq, dk, dv): dq in the memory order of o, dk and dv in that of v.

An eager call that nothing watches runs the same code without them (`attend`).

All tensors are views [batch, heads, tokens, dim] of any strides. A window of None is no window; `settings` holds
the backend and the QuantConfig. Few arguments: autograd's wrapper of an operator takes time quadratic in them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from functools import cache, wraps
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import Parameter

from sagebwd.attention import reference_backend
from sagebwd.attention.checks import (
    check_document_lengths,
    check_documents,
    check_gpu,
    check_tensors,
)
from sagebwd.attention.config import QuantConfig
from sagebwd.kernels.packing import ROW_PADDING, Packed

log = logging.getLogger("sagebwd")

_lib = torch.library.Library("sagebwd", "DEF")
_OPTIONS = "bool causal, float softmax_scale, int? window, str settings"
_KEPT = ("lse2", "q_rows", "q_scale", "q_mean", "k_rows", "k_scale", "k_mean")
_RESULTS = f"(Tensor o, {', '.join(f'Tensor {name}' for name in _KEPT)})"
_PACKED = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
# Raise it when a tensor that is kept for backward changes its shape, dtype or meaning.
_LAYOUT = "layout-2"
_FIELDS = tuple((field.name, type(field.default)) for field in fields(QuantConfig))


def _define(schema: str) -> None:
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


_define(f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> {_RESULTS}")
_define(f"attention_forward_packed(Tensor q, Tensor k, Tensor v, {_PACKED}, {_OPTIONS}) -> {_RESULTS}")
_define(
    "attention_backward(Tensor do, Tensor v, Tensor o, Tensor lse2, Tensor q_rows, Tensor q_scale, Tensor? q_mean, "
    "Tensor k_rows, Tensor k_scale, Tensor? q, Tensor? k, Tensor? k_mean, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def settings(backend: str, config: QuantConfig) -> str:
    """An operator's `settings`; traceable. Compiled graphs are cached on disk by what the operators are given: all that
    the shapes of the results depend on is in here."""
    return " ".join([backend, _LAYOUT, *[f"{name}={getattr(config, name)}" for name, _ in _FIELDS]])


@cache
def _parsed(text: str) -> tuple[str, QuantConfig]:
    backend, _, *pairs = text.split()
    values = [pair.split("=")[1] for pair in pairs]
    return backend, QuantConfig(
        *(text == "True" if kind is bool else kind(text) for (_, kind), text in zip(_FIELDS, values, strict=True))
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float, window: int | None, settings: str):
    return _filled(q, *_run_forward(q, k, v, causal, softmax_scale, window, settings, None))


def _forward_packed(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool, softmax_scale: float, window: int | None, settings: str,
):  # fmt: skip
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _filled(q, *_run_forward(q, k, v, causal, softmax_scale, window, settings, packed))


def _filled(q: Tensor, *results: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0, dtype=torch.float32) if x is None else x for x in results)


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float, window: int | None, settings: str,
    packed: Packed | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    _check(q, k, v, packed)
    backend, config = _parsed(settings)
    if q.is_cuda:
        check_gpu(q.device.index, q.shape[-1], config)
    elif packed is not None:
        check_document_lengths("cu_seqlens_q", packed.cu_seqlens_q, q.shape[-2], packed.max_seqlen_q)
        check_document_lengths("cu_seqlens_k", packed.cu_seqlens_k, k.shape[-2], packed.max_seqlen_k)
    announce(q, settings, backend, config, window, packed)
    if q.numel() == 0 or k.numel() == 0:
        o, *kept = _allocate(q, k, backend, config, packed)
        return o.zero_(), *kept
    options = {"causal": causal, "softmax_scale": softmax_scale, "config": config, "window": window, "packed": packed}
    with as_given(q):
        o, saved = _module(backend).forward(q, k, v, **options)
    _, _, *kept, _, _, k_mean = saved
    return o, *kept, k_mean


def _backward(
    do: Tensor, v: Tensor, o: Tensor,
    lse2: Tensor, q_rows: Tensor, q_scale: Tensor, q_mean: Tensor | None, k_rows: Tensor, k_scale: Tensor,
    q: Tensor | None, k: Tensor | None, k_mean: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool, softmax_scale: float, window: int | None, settings: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if o.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(o), torch.zeros_like(v), torch.zeros_like(v)
    packed = None
    if cu_seqlens_q is not None:
        packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if k_mean is not None and k_mean.numel() == 0:
        k_mean = None
    backend, config = _parsed(settings)
    options = {"causal": causal, "softmax_scale": softmax_scale, "config": config, "window": window, "packed": packed}
    saved = (v, o, lse2, q_rows, q_scale, q_mean, k_rows, k_scale, q, k, k_mean)
    with as_given(do):
        return _module(backend).backward(do, saved, **options)


def _module(backend: str) -> ModuleType:
    if backend == "reference":
        return reference_backend
    from sagebwd.attention import triton_backend  # importing Triton takes seconds, and a CPU run needs none

    return triton_backend


def _check(q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> None:
    check_tensors(q, k, v)
    if packed is not None:
        check_documents("cu_seqlens_q", packed.cu_seqlens_q, q.shape[-2], q.device)
        check_documents("cu_seqlens_k", packed.cu_seqlens_k, k.shape[-2], q.device)
        if packed.cu_seqlens_q.shape != packed.cu_seqlens_k.shape:
            raise ValueError(
                f"cu_seqlens_q counts {packed.cu_seqlens_q.shape[0] - 1} documents, cu_seqlens_k "
                f"{packed.cu_seqlens_k.shape[0] - 1}: give both one entry a document, and a last one"
            )


def as_given(x: Tensor) -> AbstractContextManager:
    """On x's device, since Triton launches on the current one; without autocast, which would round the reference's FP32
    products to 16 bit."""
    if torch.is_autocast_enabled(x.device.type):
        stack = ExitStack()
        stack.enter_context(torch.autocast(x.device.type, enabled=False))
        stack.enter_context(torch.cuda.device_of(x))
        return stack
    return torch.cuda.device_of(x)


_announced: set[tuple] = set()


def announce(
    x: Tensor, settings: str, backend: str, config: QuantConfig, window: int | None, packed: Packed | None
) -> None:
    """Once for each kind of call: which backend runs, and on a GPU with which kernels."""
    kind = (x.device.type, x.dtype, x.shape[-1], settings, window is None, packed is None)
    if kind not in _announced:
        _announced.add(kind)
        which = f"{backend} backend"
        if backend == "triton":
            which += f", {_module(backend).forward_kernel(x, config, window=window, packed=packed)}"
        log.info("SageBwd runs on %s: %s, %s, head dim %d (%s)", kind[0], which, *kind[1:3], config.summary())


# What tracing sees: shapes, memory order and dtypes, from shapes alone.


def _allocate(q: Tensor, k: Tensor, backend: str, config: QuantConfig, packed: Packed | None) -> tuple[Tensor, ...]:
    """Uninitialised tensors as `attention_forward` returns them."""
    if backend == "reference":
        saved = reference_backend.kept_like(q, k, config, packed)
        kept = (saved.lse2, *saved[:6])
        return torch.empty_like(q), *(q.new_empty(0, dtype=torch.float32) if x is None else x for x in kept)
    (batch, heads, m, dim), (_, kv_heads, n, _) = q.shape, k.shape

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    from sagebwd.kernels.common import padded_dim

    dp, m_pad, n_pad = padded_dim(int(dim)), _rows(m, packed), _rows(n, packed)
    means = 1 if packed is None else n_pad // ROW_PADDING
    q_heads, k_heads = batch * heads, batch * kv_heads
    scores = config.products == "scores"

    def only(needed: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return new(*shape, dtype=dtype) if needed else new(0)

    return (
        torch.empty_like(q),
        new(q_heads, m_pad),
        only(not scores, q_heads, m_pad, dp, dtype=torch.int8),
        only(not scores, q_heads, m_pad // config.block_q),
        only(config.smooth_q, q_heads, m_pad // config.block_q, dp),
        only(not scores, k_heads, n_pad, dp, dtype=torch.int8),
        only(not scores, k_heads, n_pad // config.block_k),
        only(config.smooth_k and (scores or config.smooth_q), k_heads, means, dp),
    )


def _rows(tokens: int, packed: Packed | None) -> int:
    """Rows of the kernels' workspaces: whole slots, and a document begins one."""
    spare = ROW_PADDING - 1 if packed is None else (ROW_PADDING - 1) * (packed.cu_seqlens_q.shape[0] - 1)
    return (tokens + spare) // ROW_PADDING * ROW_PADDING


def _fake_forward(q, k, v, causal, softmax_scale, window, settings):
    _check(q, k, v, None)
    return _allocate(q, k, *_parsed(settings), None)


def _fake_forward_packed(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window, settings
):
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check(q, k, v, packed)
    return _allocate(q, k, *_parsed(settings), packed)


def _fake_backward(do, v, o, *_):
    return torch.empty_like(o), torch.empty_like(v), torch.empty_like(v)


# Autograd keeps INT8 q and k with their scales, v, o and lse2; with Q-smoothing also k and the means. With
# products="scores" q, k, v, o, lse2 and the mean of the keys.


def _save(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    _keep(ctx, inputs, output)


def _keep(ctx, inputs, output):
    q, k, v, *packed, causal, softmax_scale, window, settings = inputs
    o, lse2, q_rows, q_scale, q_mean, k_rows, k_scale, k_mean = output
    ctx.set_materialize_grads(False)
    config = _parsed(settings)[1]
    given = (None, None, None, None)
    if config.smooth_q:
        given = (q_mean, None, k, k_mean)
    elif config.products == "scores":
        given = (None, q, k, k_mean)
    documents, longest = (packed[:2], packed[2:]) if packed else ((None, None), (0, 0))
    ctx.save_for_backward(v, o, lse2, q_rows, q_scale, k_rows, k_scale, *given, *documents)
    ctx.options = (*longest, causal, softmax_scale, window, settings)
    ctx.inputs = len(inputs)


def _differentiate(ctx, do, *_, of=None):
    """of: what computes it; None: the operator."""
    nothing = (None,) * (ctx.inputs - 3)
    if do is None:
        return None, None, None, *nothing
    v, o, lse2, q_rows, q_scale, k_rows, k_scale, q_mean, q, k, k_mean, *documents = ctx.saved_tensors
    if of is None:
        of = torch.ops.sagebwd.attention_backward.default
        q_rows, q_scale, k_rows, k_scale = _filled(o, q_rows, q_scale, k_rows, k_scale)
    saved = (lse2, q_rows, q_scale, q_mean, k_rows, k_scale, q, k, k_mean)
    return *of(do, v, o, *saved, *documents, *ctx.options), *nothing


def _refuse(ctx, *_):
    raise RuntimeError(
        "sage_attention has no second derivative (its backward is quantised): do not differentiate its gradients, or "
        "use torch.nn.functional.scaled_dot_product_attention where a gradient penalty needs them"
    )


for _name, _implementation, _fake in (
    ("attention_forward", _forward, _fake_forward),
    ("attention_forward_packed", _forward_packed, _fake_forward_packed),
    ("attention_backward", _backward, _fake_backward),
):
    _lib.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sagebwd::{_name}", _fake, lib=_lib)
for _name in ("attention_forward", "attention_forward_packed"):
    torch.library.register_autograd(f"sagebwd::{_name}", _differentiate, setup_context=_save, lib=_lib)
torch.library.register_autograd("sagebwd::attention_backward", _refuse, lib=_lib)


def _uncompiled(function: Callable) -> Callable:
    """`function`, into which torch.compile does not trace: a backward may run inside compiled code, after a graph
    break. What says so imports the compiler, which takes seconds and which a run without it never needs."""
    disabled = torch._disable_dynamo(function)

    @wraps(function)
    def call(*arguments):
        if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
            return disabled(*arguments)
        return function(*arguments)

    return call


class _Eager(torch.autograd.Function):
    """The operators for a caller whom nothing watches: without the dispatcher and autograd's wrapper of an operator,
    which cost the host as much as the launches. Same code, same tensors kept."""

    @staticmethod
    @_uncompiled
    def forward(ctx, q, k, v, *others):
        packed = Packed(*others[:4]) if len(others) > 4 else None
        output = _run_forward(q, k, v, *others[-4:], packed)
        _keep(ctx, (q, k, v, *others), output)
        return output[0]

    @staticmethod
    @_uncompiled
    def backward(ctx, do):
        if torch.is_grad_enabled() or not _unwatched(do):  # the operator says that there is no second derivative
            return _differentiate(ctx, do)
        return _differentiate(ctx, do, of=_backward)


def attend(q: Tensor, k: Tensor, v: Tensor, *others: object) -> Tensor:
    """o of attention_forward, or with the arguments of packed documents of attention_forward_packed."""
    if _unwatched(q, k, v):
        return _Eager.apply(q, k, v, *others)
    operators = torch.ops.sagebwd
    operator = operators.attention_forward if len(others) == 4 else operators.attention_forward_packed
    return operator.default(q, k, v, *others)[0]


def _unwatched(*tensors: Tensor | None) -> bool:
    """Whether nobody is to see an operator: no tracing or compilation, no mode of dispatch (selective recompute, counts
    of operations, fake tensors), no subclass of Tensor, and a device whose backend is ours."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and all(x is None or (type(x) in (Tensor, Parameter) and x.device.type in ("cuda", "cpu")) for x in tensors)
        and not torch.jit.is_tracing()
    )
