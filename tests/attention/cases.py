"""What kernels must do, for the interpreter on a CPU and for a GPU alike: each function is a test's body."""

import itertools
import os
from contextlib import contextmanager
from itertools import pairwise

import torch

from sagebwd.attention import QuantConfig, reference, triton_backend
from sagebwd.kernels import hopper
from sagebwd.kernels.hopper.scores_operands import quantise_k, quantise_q
from sagebwd.kernels.hopper.scores_rows import prepare
from sagebwd.kernels.mean import key_mean, key_sums
from sagebwd.kernels.packing import Packed, tables
from sagebwd.kernels.quantise import quantise
from tests.attention.helpers import assert_close, inputs, run, truth

# Kernels differ from the reference by the order of sums and the last bits of exp2: rarely, a value that lies between
# two integers rounds the other way. Quantisation itself errs by 2e-2.
TIGHT = 5e-3
LENGTHS = [(1, 1), (63, 63), (64, 64), (100, 100), (257, 257), (64, 130), (1, 70), (130, 64)]
CONFIGS = {
    "row": QuantConfig(),
    "tile": QuantConfig(granularity="tile"),
    "matched": QuantConfig(delta="matched", block_q=32),
    "smooth-q": QuantConfig(smooth_q=True, block_k=32),
    "scores": QuantConfig(products="scores", block_q=32),
    "no-smoothing": QuantConfig(smooth_k=False, granularity="tile", delta="matched", block_q=128, block_k=128),
}
PROJECTED = {
    "project": QuantConfig(project=True, block_q=32),
    "project-tile": QuantConfig(project=True, granularity="tile", smooth_k=False, smooth_q=True, block_k=32),
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


def portable():
    """The portable kernels on every GPU: they agree bitwise among themselves alone."""
    return hopper.switched("0")


def kernels(*args, device: str, **kwargs):
    with interpreter(device):
        return run(*args, **kwargs)


def by_reference(q, k, v, do, *, packed=None, **args):
    args = {"softmax_scale": q.shape[-1] ** -0.5, **args}
    if packed is None:
        o, saved = reference.forward(q, k, v, **args)
        grads = reference.backward(do, v, o, saved, n=k.shape[-2], **args)
    else:
        o, saved = reference.forward_packed(q, k, v, packed=packed, **args)
        grads = reference.backward_packed(do, v, o, saved, packed=packed, **args)
    return (o, *(g.to(q.dtype) for g in grads))


def launched(q, k, v, do, **args):
    """The kernels as the backend launches them (in the interpreter on a CPU)."""
    args = {"softmax_scale": q.shape[-1] ** -0.5, **args}
    with interpreter(q.device.type):
        o, saved = triton_backend.forward(q, k, v, **args)
        return (o, *triton_backend.backward(do, saved, **args))


# Queries and keys of documents: one token, no queries, more keys, more queries, no keys, nothing.
DOCUMENTS = ((1, 1), (0, 5), (20, 90), (70, 33), (3, 0), (0, 0), (66, 66))
LONG_DOCUMENTS = ((700, 1000), (0, 5), (1, 1), (3, 0), (130, 64), (2000, 2000), (5, 300))
FEW_DOCUMENTS = ((1, 1), (0, 5), (3, 0), (40, 70))
WINDOW = 40


def packed_inputs(documents, dim, heads, kv_heads, *, spare=0, **kwargs):
    """q, k, v, do as [1, heads, tokens, dim] views of Megatron's [tokens, heads, dim], and `Packed`."""
    lengths = torch.tensor(documents).T
    m, n = (lengths.sum(1) + spare).tolist()
    tensors = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(m, n, dim, heads, kv_heads, **kwargs))
    cu = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int().to(kwargs["device"])
    return *tensors, Packed(*cu, *lengths.amax(1).tolist())


def masked_inputs(mask, dim, heads, kv_heads, *, m=70, n=100, **kwargs):
    """Tensors, and what the kernels take besides a config, for one of three masks."""
    if mask == "packed":
        *tensors, packed = packed_inputs(FEW_DOCUMENTS, dim, heads, kv_heads, **kwargs)
        return tensors, {"causal": True, "window": WINDOW, "packed": packed}
    return inputs(m, n, dim, heads, kv_heads, **kwargs), {
        "causal": True,
        "window": WINDOW if mask == "window" else None,
    }


MASKS = {
    "causal": CONFIGS,
    "window": {"row": CONFIGS["row"]},
    "packed": {"matched": CONFIGS["matched"], "scores": CONFIGS["scores"], "project-tile": PROJECTED["project-tile"]},
}


def integers_are_the_reference_s(device, dtype):
    """Operands' integers and scales, bit for bit. In 16 bit x 127 / max|x| often lies right between two integers."""
    x = (torch.randn(1, 2, 300, 64, device=device) * 3).to(dtype)
    x[:, 0] = x[:, 0].sign() * (1 + torch.randint(0, 128, x[:, 0].shape, device=device).to(dtype)) / 127 * 63.5
    with interpreter(device):
        actual, _ = quantise(x, 64, rows=True, columns=True)
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, 384 - 300)).unflatten(-2, (-1, 64))
    hat, scale = reference.quantise(padded, (-2, -1))
    assert torch.equal(actual.rows.float(), hat[0].flatten(1, 2))
    pairs = hat[0].flatten(1, 2).mT.unflatten(-1, (-1, 2, 4, 2))  # of tokens, as a matrix unit's thread holds them
    assert torch.equal(actual.columns.float(), pairs.transpose(-2, -3).flatten(-4))
    assert torch.equal(actual.scale, scale[0, ..., 0, 0])


def q_and_k_are_quantised_as_one_by_one(device, dim, smooth, dtype):
    """Bit for bit, from views of any strides, by the forward's launches and by the backward's; a NaN in a tile is its
    scale."""
    q, k, _, _ = inputs(100, 260, dim, 4, 2, batch=2, dtype=dtype, device=device)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    k[0, 1, 70, 3] = torch.nan
    with interpreter(device):
        k_mean = key_mean(k.nan_to_num(), None) if smooth else None
        smoothed = torch.full_like(k, -1)
        q8, sums = quantise_q(q, k if smooth else None)
        both = q8, quantise_k(k, k_mean)
        if smooth:
            assert torch.equal(sums.nan_to_num(), key_sums(k).nan_to_num())
        *of_backward, _ = prepare(q, k, k_mean, k, q, q, q.new_zeros(8, 128, dtype=torch.float32), smoothed)
        expected_q, _ = quantise(q, 64, rows=True, columns=False)
        expected_k, _ = quantise(k, 64, rows=True, columns=False, mean=k_mean, smoothed=True)
    for q8, k8 in (both, of_backward):
        assert torch.equal(q8.rows, expected_q.rows)
        assert torch.equal(q8.scale, expected_q.scale)
        assert k8.scale.isnan().nonzero().tolist() == [[1, 1]]
        assert torch.equal(k8.scale.nan_to_num(), expected_k.scale.nan_to_num())
        sound = ~k8.scale.isnan().repeat_interleave(64, 1)  # what NaN becomes as an integer does not matter
        assert torch.equal(k8.rows[sound], expected_k.rows[sound])
    for x8 in both:
        largest = x8.rows.double().norm(dim=2).unflatten(1, (-1, 64)).amax(2) * x8.scale
        assert x8.norm.isnan().equal(x8.scale.isnan())
        assert (x8.norm.double() / largest).nan_to_num(1.0).sub(1).abs().max() < 1e-6
    apart = expected_k.smoothed.unflatten(0, (2, 2))[:, :, :260]
    assert torch.equal(smoothed.nan_to_num(), apart.nan_to_num())


def key_mean_is_the_mean(device, dtype):
    """Of a whole sequence and, bitwise the same, of that sequence among other documents."""
    lengths = (5, 0, 4300, 1)
    x = torch.randn(1, 2, sum(lengths), 16, device=device).to(dtype) + 1
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    table = tables(Packed(cu, cu, 0, 0), x.shape[-2], x.shape[-2]).k
    with interpreter(device):
        means = key_mean(x, table)
    for start, length in zip(cu.tolist(), lengths, strict=False):
        if length:
            document = x[:, :, start : start + length]
            with interpreter(device):
                alone = key_mean(document, None)[:, 0]
            slot = next(i for i, row in enumerate(table.tolist()) if row[:2] == [start, length])
            assert torch.equal(means[:, slot], alone)
            assert (alone[:, :16].double() - document[0].double().mean(1)).abs().max() < 1e-6


def agrees_with_reference(m, n, dim, group, causal, config, device, dtype=torch.float16, batch=1):
    q, k, v, do = inputs(m, n, dim, group, 1, batch=batch, dtype=dtype, device=device)
    actual = kernels(q, k, v, do, device=device, causal=causal, config=config)
    assert all(a.dtype == dtype for a in actual)
    assert_close(actual, by_reference(q, k, v, do, causal=causal, config=config), TIGHT)


def agrees_with_reference_in_a_window(m, n, window, group, config, device, dtype=torch.float16):
    q, k, v, do = inputs(m, n, 64, group, 1, dtype=dtype, device=device)
    args = {"causal": True, "config": config, "window": window}
    assert_close(launched(q, k, v, do, **args), by_reference(q, k, v, do, **args), TIGHT)


def a_window_as_wide_as_the_keys_is_the_causal_mask(device):
    q, k, v, do = inputs(100, 130, 64, 2, 1, dtype=torch.float16, device=device)
    args = {"causal": True, "config": QuantConfig(block_q=32, block_k=32)}
    whole = launched(q, k, v, do, **args)
    for window in (129, 2**31 - 1):
        assert all(torch.equal(a, b) for a, b in zip(launched(q, k, v, do, window=window, **args), whole, strict=True))


def keys_left_of_the_window_are_not_read(device):
    """Not even where they are NaN: the tiles of keys and of queries that no window joins are skipped."""
    q, k, v, do = inputs(200, 200, 64, 1, 1, dtype=torch.float16, device=device)
    config = QuantConfig(smooth_k=False, block_q=32, block_k=32)
    clean = launched(q, k, v, do, causal=True, config=config, window=40)
    for broken in (k, v):
        broken[:, :, :32] = torch.nan
    o, dq, dk, dv = launched(q, k, v, do, causal=True, config=config, window=40)
    # From 128 on, where the first tile of queries ends, however high it is.
    assert all(torch.equal(a[:, :, 128:], b[:, :, 128:]) for a, b in zip((o, dq, dk, dv), clean, strict=True))
    assert o[:, :, 32:72].isnan().any()


def packed_equals_the_documents_one_by_one(documents, config, causal, window, device, dtype, dim=64):
    """Bitwise. Tokens past the last document, and documents that lack queries or keys, get zeros."""
    q, k, v, do, packed = packed_inputs(documents, dim, 2, 1, spare=4, dtype=dtype, device=device)
    args = {"causal": causal, "window": window, "config": config}
    actual = launched(q, k, v, do, packed=packed, **args)
    assert_close(actual, by_reference(q, k, v, do, packed=packed, **args), TIGHT)
    ends = (pairwise(x.tolist()) for x in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    for (a, b), (c, d) in zip(*ends, strict=True):
        rows, cols = (..., slice(a, b), slice(None)), (..., slice(c, d), slice(None))
        here = [x[at] for x, at in zip(actual, (rows, rows, cols, cols), strict=True)]
        if a == b or c == d:
            assert not any(x.any() for x in here)
        else:
            with portable():
                alone = launched(q[rows], k[cols], v[cols], do[rows], **args)
            assert all(torch.equal(x, y) for x, y in zip(here, alone, strict=True))
    for x, tokens in zip(actual, (packed.cu_seqlens_q, packed.cu_seqlens_q, *[packed.cu_seqlens_k] * 2), strict=True):
        assert not x[..., tokens[-1] :, :].any()


def documents_do_not_meet(device):
    q, k, v, do, packed = packed_inputs(((40, 40), (70, 100), (40, 40)), 32, 2, 1, dtype=torch.float16, device=device)
    args = {"causal": False, "config": QuantConfig(smooth_q=True, delta="matched"), "packed": packed}
    clean = launched(q, k, v, do, **args)
    sides = (packed.cu_seqlens_q, packed.cu_seqlens_k, packed.cu_seqlens_k, packed.cu_seqlens_q)
    for broken, ends in zip((q, k, v, do), sides, strict=True):
        broken[..., ends[1] : ends[2], :] = torch.nan
    for x, y, ends in zip(launched(q, k, v, do, **args), clean, (sides[0], *sides[:3]), strict=True):
        inside = torch.zeros(x.shape[-2], dtype=torch.bool, device=device)
        inside[ends[1] : ends[2]] = True
        assert x[..., inside, :].isnan().all()
        assert torch.equal(x[..., ~inside, :], y[..., ~inside, :])


def cu_seqlens_that_lie_touch_no_other_memory(device):
    """Kernels cannot refuse them (nobody waits for the device): results are worthless, but every address is inside."""
    liar = torch.tensor([0, 90, 20, -5, 1000], dtype=torch.int32, device=device)
    for table, tokens in zip(tables(Packed(liar, liar.flip(0), 0, 0), 100, 60), (100, 60), strict=True):
        other = 160 - tokens
        for at, limit in ((0, tokens), (3, other)):
            first, length, row = table[:, at : at + 3].long().unbind(1)
            assert (first >= 0).all()
            assert (length >= 0).all()
            assert (first + length <= limit).all()
            assert (row + length <= (limit + 4 * 127) // 128 * 128).all()


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


def poisoned_buffers_do_not_show(device, monkeypatch, mask):
    """Every workspace starts as NaN or 127: what no kernel writes, no kernel may read."""
    tensors, args = masked_inputs(mask, 40, 2, 1, dtype=torch.float16, device=device)
    for config in MASKS[mask].values():
        clean = launched(*tensors, config=config, **args)
        with monkeypatch.context() as patch:
            poison(patch)
            poisoned = launched(*tensors, config=config, **args)
        assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def poison(patch):
    """From here on new memory is not whatever it holds, but NaN or 127."""

    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(torch.nan if x.is_floating_point() else 127)

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, poisoned(getattr(owner, name)))


def all_zero_tiles_give_zeros(device, mask):
    (q, k, v, do), args = masked_inputs(mask, 64, 1, 1, m=128, n=128, dtype=torch.float16, device=device)
    args["config"] = QuantConfig(smooth_k=False)
    o, dq, dk, dv = launched(q, torch.zeros_like(k), torch.zeros_like(v), do, **args)
    assert not o.any()
    assert not dq.any()
    assert not dk.any()
    assert dv.isfinite().all()
    assert dv.any()
    for grad in launched(q, k, v, torch.zeros_like(do), **args)[1:]:
        assert not grad.any()


def extreme_values_stay_finite(device, mask):
    for config in MASKS[mask].values():
        for size in (1e-6, 6e4):
            (q, k, v, do), args = masked_inputs(mask, 64, 1, 1, m=100, dtype=torch.float32, device=device)
            peak = max(x.abs().max() for x in (q, k, v)).item()
            q, k, v = ((x / peak * size).half() for x in (q, k, v))
            actual = launched(q, k, v, do.half() / 100, config=config, softmax_scale=1e-9, **args)
            assert all(a.isfinite().all() for a in actual)


def a_query_that_sees_no_key_gets_zeros(device):
    q, k, v, do = inputs(100, 30, 64, 1, 1, dtype=torch.float16, device=device)
    o, dq, *_ = kernels(q, k, v, do, device=device, causal=True, config=QuantConfig())
    assert not o[:, :, :70].any()
    assert not dq[:, :, :70].any()
    assert_close(kernels(q, k, v, do, device=device, causal=True, config=QuantConfig()), truth(q, k, v, do, True), 0.06)


def nan_reaches_the_output(device, mask):
    (q, k, v, do), args = masked_inputs(mask, 32, 1, 1, m=64, n=64, dtype=torch.float16, device=device)
    args["config"] = QuantConfig()
    at = (0, 0, -1, 5)
    for broken in (q, k, v):
        keep = broken[at].item()
        broken[at] = torch.nan
        assert launched(q, k, v, do, **args)[0].isnan().any()
        broken[at] = keep
    do[at] = torch.nan
    assert launched(q, k, v, do, **args)[3].isnan().any()


def two_runs_are_bitwise_equal(device, mask):
    tensors, args = masked_inputs(mask, 64, 2, 1, dtype=torch.float16, device=device)
    for config in MASKS[mask].values():
        first, second = (launched(*tensors, config=config, **args) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def offsets_past_32_bits(device, heads, length, **args):
    """The last head equals itself alone, where offsets within a tensor and within a head's rows pass 2^31 elements."""
    shape = (1, length, heads, 128)
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(4)]
    whole = launched(*tensors, **args)
    for a, b in zip(whole, launched(*(x[:, -1:] for x in tensors), **args), strict=True):
        assert torch.equal(a[:, -1:], b)


def many_heads(device, dtype, batch):
    """More than a grid's second axis could count."""
    tensors = inputs(40, 40, 64, 2, 1, batch=batch, dtype=dtype, device=device)
    whole = launched(*tensors, causal=True, config=QuantConfig())
    for a, b in zip(whole, launched(*(x[-2:] for x in tensors), causal=True, config=QuantConfig()), strict=True):
        assert torch.equal(a[-2:], b)


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


def windows():
    """Lengths x windows (none but its own key, a few, over a tile) x configurations, groups in turn."""
    grid = itertools.product([(100, 100), (257, 257), (64, 130), (130, 64), (1, 70)], (0, 20, 100), CONFIGS)
    return [(m, n, window, (1, 2)[_turn(i) % 2], name) for i, ((m, n), window, name) in enumerate(grid)]


def pairs():
    """Lengths x masks x configurations, groups in turn."""
    grid = itertools.product(LENGTHS, (True, False), CONFIGS)
    return [(m, n, (1, 2, 4)[_turn(i) % 3], causal, name) for i, ((m, n), causal, name) in enumerate(grid)]


def _turn(i):
    """Of case i of a grid whose last axis is CONFIGS: so that each config takes its turn with every group."""
    return i + i // len(CONFIGS)
