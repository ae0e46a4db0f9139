"""What kernels must do, for the interpreter on a CPU and for a GPU alike: each function is a test's body."""

import itertools
import os
from contextlib import contextmanager

import torch

from sagebwd.attention import QuantConfig, reference
from tests.attention.helpers import assert_close, inputs, rel_l2, run, truth

# Kernels differ from the reference by the order of sums and the last bits of exp2: rarely, a value that lies between
# two integers rounds the other way. Quantisation itself errs by 2e-2.
TIGHT = 5e-3
LENGTHS = [(1, 1), (63, 63), (64, 64), (100, 100), (257, 257), (64, 130), (1, 70), (130, 64)]
CONFIGS = {
    "row": QuantConfig(),
    "tile": QuantConfig(granularity="tile"),
    "matched": QuantConfig(delta="matched", block_q=32),
    "smooth-q": QuantConfig(smooth_q=True, block_k=32),
    "no-smoothing": QuantConfig(smooth_k=False, granularity="tile", delta="matched", block_q=128, block_k=128),
}


@contextmanager
def interpreter(device: str):
    """On a CPU: the kernels, in the interpreter, in place of the reference."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET", None)


def kernels(*args, device: str, **kwargs):
    with interpreter(device):
        return run(*args, **kwargs)


def by_reference(q, k, v, do, *, causal, config):
    args = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5, "config": config}
    o, saved = reference.forward(q, k, v, **args)
    return (o, *(g.to(q.dtype) for g in reference.backward(do, v, o, saved, n=k.shape[-2], **args)))


def agrees_with_reference(m, n, dim, group, causal, config, device, dtype=torch.float16, batch=1):
    q, k, v, do = inputs(m, n, dim, group, 1, batch=batch, dtype=dtype, device=device)
    actual = kernels(q, k, v, do, device=device, causal=causal, config=config)
    assert all(a.dtype == dtype for a in actual)
    assert_close(actual, by_reference(q, k, v, do, causal=causal, config=config), TIGHT)


def strided_views_are_taken_as_they_are(device, dtype):
    """Megatron's [tokens, batch, heads, dim], with v a view of a fused QKV, equals [batch, heads, tokens, dim]."""
    n, batch, heads, dim = 100, 2, 2, 64
    fused = torch.randn(n, batch, heads, 4 * dim, device=device).to(dtype)
    q, k = fused[..., :dim], fused[..., dim : 2 * dim]
    v = fused[..., 2 * dim : 3 * dim]
    do = torch.randn(n, batch, heads, dim, device=device).to(dtype)
    strided = kernels(q, k, v, do, device=device, causal=True, config=QuantConfig(), layout="nbhd")
    plain = kernels(
        *(x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v, do)), device=device, causal=True, config=QuantConfig()
    )
    for a, b in zip(strided, plain, strict=True):
        assert a.is_contiguous()
        assert torch.equal(a.permute(1, 2, 0, 3), b)


def poisoned_buffers_do_not_show(device, monkeypatch):
    """Every workspace starts as NaN or 127: what no kernel writes, no kernel may read."""
    q, k, v, do = inputs(70, 100, 40, 2, 1, dtype=torch.float16, device=device)
    for config in CONFIGS.values():
        clean = kernels(q, k, v, do, device=device, causal=True, config=config)
        with monkeypatch.context() as patch:
            for name in ("empty", "empty_like"):
                patch.setattr(torch, name, _poisoned(getattr(torch, name)))
            poisoned = kernels(q, k, v, do, device=device, causal=True, config=config)
        assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def _poisoned(make):
    def poisoned(*args, **kwargs):
        x = make(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else 127)

    return poisoned


def all_zero_tiles_give_zeros(device):
    q, k, v, do = inputs(128, 128, 64, 1, 1, dtype=torch.float16, device=device)
    config = QuantConfig(smooth_k=False)
    o, dq, dk, dv = kernels(q, torch.zeros_like(k), torch.zeros_like(v), do, device=device, causal=True, config=config)
    assert not o.any()
    assert not dq.any()
    assert not dk.any()
    assert dv.isfinite().all()
    assert dv.any()
    for grad in kernels(q, k, v, torch.zeros_like(do), device=device, causal=True, config=config)[1:]:
        assert not grad.any()


def extreme_values_stay_finite(device):
    for config in CONFIGS.values():
        for size in (1e-6, 6e4):
            q, k, v, do = inputs(100, 100, 64, 1, 1, dtype=torch.float32, device=device)
            peak = max(x.abs().max() for x in (q, k, v)).item()
            q, k, v = ((x / peak * size).half() for x in (q, k, v))
            actual = kernels(q, k, v, do.half() / 100, device=device, causal=True, config=config, softmax_scale=1e-9)
            assert all(a.isfinite().all() for a in actual)


def a_query_that_sees_no_key_gets_zeros(device):
    q, k, v, do = inputs(100, 30, 64, 1, 1, dtype=torch.float16, device=device)
    o, dq, *_ = kernels(q, k, v, do, device=device, causal=True, config=QuantConfig())
    assert not o[:, :, :70].any()
    assert not dq[:, :, :70].any()
    assert_close(kernels(q, k, v, do, device=device, causal=True, config=QuantConfig()), truth(q, k, v, do, True), 0.06)


def nan_reaches_the_output(device):
    q, k, v, do = inputs(64, 64, 32, 1, 1, dtype=torch.float16, device=device)
    for broken in (q, k, v):
        keep = broken[0, 0, 5, 5].item()
        broken[0, 0, 5, 5] = torch.nan
        assert kernels(q, k, v, do, device=device, causal=False, config=QuantConfig())[0].isnan().any()
        broken[0, 0, 5, 5] = keep
    do[0, 0, 5, 5] = torch.nan
    assert kernels(q, k, v, do, device=device, causal=False, config=QuantConfig())[3].isnan().any()


def two_runs_are_bitwise_equal(device):
    q, k, v, do = inputs(100, 100, 64, 2, 1, dtype=torch.float16, device=device)
    for config in CONFIGS.values():
        first, second = (kernels(q, k, v, do, device=device, causal=True, config=config) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def heads_do_not_meet(device, dtype):
    """A head's result does not depend on which heads are computed beside it: what tensor parallelism relies on."""
    q, k, v, do = inputs(100, 100, 64, 4, 2, batch=2, dtype=dtype, device=device)
    whole = kernels(q, k, v, do, device=device, causal=True, config=QuantConfig())
    part = kernels(q[:, 2:], k[:, 1:], v[:, 1:], do[:, 2:], device=device, causal=True, config=QuantConfig())
    for a, b, half in zip(whole, part, (2, 2, 1, 1), strict=True):
        assert torch.equal(a[:, half:], b)


def inputs_are_left_alone(device):
    tensors = inputs(70, 70, 64, 2, 1, dtype=torch.float16, device=device)
    copies = [x.clone() for x in tensors]
    for config in CONFIGS.values():
        kernels(*tensors, device=device, causal=True, config=config)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def pairs():
    """Lengths x masks x configurations, groups in turn."""
    grid = itertools.product(LENGTHS, (True, False), CONFIGS)
    return [(m, n, (1, 2, 4)[i % 3], causal, name) for i, ((m, n), causal, name) in enumerate(grid)]


def error_against_float64(m, dim, sigma, config, device, dtype):
    q, k, v, do = inputs(m, m, dim, 4, 4, dtype=dtype, device=device)
    q, k = q * sigma, k * sigma
    actual = kernels(q, k, v, do, device=device, causal=True, config=config)
    return [rel_l2(a, t) for a, t in zip(actual, truth(q, k, v, do, True), strict=True)]
