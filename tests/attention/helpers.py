"""Attention inputs, the truth in FP64, and the distance between tensors."""

import math

import torch
from torch import Tensor

from sagebwd.attention import QuantConfig, sage_attention


def inputs(m, n, dim, heads, kv_heads, *, batch=1, dtype=torch.float32, device="cpu", key_shift=1.0):
    """q, k, v, do; keys with a common offset, as trained keys have."""

    def new(h, length):
        return torch.randn(batch, h, length, dim, dtype=torch.float32, device=device).to(dtype)

    k = new(kv_heads, n)
    offset = torch.randn(1, kv_heads, 1, dim, device=device) * key_shift
    return new(heads, m), (k.float() + offset).to(dtype), new(kv_heads, n), new(heads, m)


def truth(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float | None = None, window: int | None = None
) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv) in FP64 through autograd; a query that sees no key gets zeros."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    m, n = s.shape[-2:]
    if causal:
        s = s.masked_fill(torch.ones(m, n, dtype=torch.bool, device=q.device).triu(n - m + 1), -math.inf)
    if window is not None:
        s = s.masked_fill(torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m - window - 1), -math.inf)
    o = s.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), do.double()))


def run(q, k, v, do, *, causal: bool, config: QuantConfig, **kwargs) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv) of sage_attention."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = sage_attention(q, k, v, causal=causal, config=config, **kwargs)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), do))


def rel_l2(x: Tensor, true: Tensor) -> float:
    """||x - true|| / ||true||; where the truth cancels to nothing (one key: dS = 0), the distance in hundredths."""
    return ((x.double() - true.double()).norm() / true.double().norm().clamp_min(1e-2)).item()


NAMES = ("o", "dq", "dk", "dv")


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], limit: float) -> None:
    errors = {name: rel_l2(a, e) for name, a, e in zip(NAMES, actual, expected, strict=True)}
    assert all(e <= limit for e in errors.values()), f"Rel-L2 over {limit}: {errors}"
