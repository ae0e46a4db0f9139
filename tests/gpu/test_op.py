"""The operators on a GPU: opcheck, torch.compile, CUDA graphs, streams, devices, recompute, and memory against SDPA."""

import functools
import gc

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sagebwd.attention import QuantConfig, op, sage_attention, sage_attention_packed
from tests.attention.helpers import inputs
from tests.attention.memory import saved_bytes
from tests.attention.test_op import CONFIGS, OPS, RECOMPUTE, assert_same, backward_arguments, outcome

pytestmark = pytest.mark.gpu
GPU = "cuda"
# opcheck differentiates a sum: dO is one number, expanded, in its eager call, and TMA cannot read that; in its traced
# call it is a tensor in memory. So on a Hopper GPU one dQ of products="scores" has FP32 sums, the other FP16. Where the
# parts of 128 and of 72 keys nearly cancel they differ by up to 1.1e-4 more than 1.6% (simulated, 40 seeds; rms 0.18).
FP16_SUMS = {"rtol": 1.6e-2, "atol": 2e-4}  # bf16's relative tolerance as elsewhere


@pytest.fixture(autouse=True)
def _no_compiled_code():
    torch._dynamo.reset()


def tensors(m=200, n=200, dim=64, heads=4, kv_heads=2, batch=2, device=GPU, dtype=torch.bfloat16):
    """q contiguous, k and v strided views, all requiring gradients."""
    q, k, v, _ = inputs(m, n, dim, heads, kv_heads, batch=batch, dtype=dtype, device=device)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return [x.requires_grad_() for x in (q, k, v)]


def documents():
    cu = torch.tensor([0, 30, 30, 190], dtype=torch.int32, device=GPU)
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 160, "max_seqlen_k": 160}


def plain(q, k, v):
    return sage_attention(q * 1.5, k, v, causal=True)


def windowed(q, k, v):
    return sage_attention(q * 1.5, k, v, causal=True, window=50, config=QuantConfig(smooth_q=True))


def megatron(q, k, v):
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    return sage_attention(q, k, v, causal=True, layout="nbhd")


CALLS = {"plain": plain, "windowed": windowed, "megatron": megatron, "packed": None}


@pytest.fixture(params=CALLS)
def call(request):
    """A function of the three `tensors`. Where documents lie is made outside: a copy from the CPU would wait."""
    if request.param != "packed":
        return CALLS[request.param]
    where = documents()

    def packed(q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return sage_attention_packed(q, k, v, **where, causal=True)

    return packed


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["plain", "window", "packed"])
def test_opcheck(config, kind):
    options = (True, 0.125, 50 if kind == "window" else None, op.settings("triton", CONFIGS[config]))
    qkv, packed = tensors(), ()
    if kind == "packed":
        qkv = [x.detach()[:1].requires_grad_() for x in qkv]
        packed = tuple(documents().values())
    forward = (*qkv, *packed, *options)
    limits = FP16_SUMS if (kind, config) == ("plain", "scores") else {}
    operator = OPS.attention_forward_packed if packed else OPS.attention_forward
    torch.library.opcheck(operator.default, forward, **limits)
    torch.library.opcheck(OPS.attention_backward.default, backward_arguments(forward, CONFIGS[config], packed))


@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}, {"dynamic": True}], ids=str)
def test_compile_without_a_graph_break(call, options):
    qkv = tensors()
    expected = outcome(call, qkv)
    compiled = torch.compile(call, fullgraph=True, **options)
    for _ in range(3):  # CUDA graphs are recorded in the second call
        torch.compiler.cudagraph_mark_step_begin()
        assert_same([x.clone() for x in outcome(compiled, qkv)], expected)


def test_cuda_graph(call):
    """Captured once, forward and backward, and replayed on other values."""
    static, other = tensors(), tensors()
    do = torch.randn_like(call(*static))

    def step():
        o = call(*static)
        return o, *torch.autograd.grad(o, static, do)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for x, values in zip(static, other, strict=True):
            x.copy_(values)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


def test_nothing_waits_for_the_gpu(call):
    qkv = tensors()
    expected = outcome(call, qkv)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = outcome(call, qkv)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(actual, expected)


def test_a_stream_of_its_own(call):
    qkv = tensors()
    expected = outcome(call, qkv)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # whatever ran on another stream would read before this has passed
        late = [x.detach().mul(1).requires_grad_() for x in qkv]
        actual = outcome(call, late)
    stream.synchronize()
    assert_same([x.contiguous() for x in actual], [x.contiguous() for x in expected])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_the_current_one():
    qkv = tensors()
    elsewhere = [x.detach().to("cuda:1").requires_grad_() for x in qkv]
    assert torch.cuda.current_device() == 0
    for a, b in zip(outcome(plain, elsewhere), outcome(plain, qkv), strict=True):
        assert a.device == torch.device("cuda:1")
        assert torch.equal(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("how", RECOMPUTE)
def test_recompute_gives_the_same_gradients(call, how):
    qkv = tensors()
    again = functools.partial(torch.utils.checkpoint.checkpoint, call, **RECOMPUTE[how])
    for a, b in zip(outcome(again, qkv), outcome(call, qkv), strict=True):  # the reentrant mode may lay out anew
        assert torch.equal(a, b)


def test_modes_without_gradients(call):
    qkv = tensors()
    expected = call(*qkv)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(call(*qkv), expected)


def test_autocast_casts_as_sdpa_does():
    qkv = tensors(dtype=torch.float32)
    expected = outcome(lambda q, k, v: sage(q.bfloat16(), k.bfloat16(), v.bfloat16()), qkv)
    with torch.autocast("cuda", torch.bfloat16):
        actual = outcome(sage, qkv)
        assert scaled_dot_product_attention(*qkv, enable_gqa=True).dtype == actual[0].dtype
    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [(torch.float32, "float32 is not supported on a GPU .*: cast"), (torch.float64, "float64 is not supported: cast")],
)
def test_wide_dtypes_are_refused(dtype, message):
    with pytest.raises(ValueError, match=message):
        sage_attention(*tensors(dtype=dtype), causal=True)


def test_two_devices_are_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="move them to one device"):
        sage_attention(q, k.cpu(), v, causal=True)


def long_tensors(dim, group):
    return tensors(8192, 8192, dim, heads=8, kv_heads=8 // group, batch=1)


def flash(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def sage(q, k, v):
    return sage_attention(q, k, v, causal=True)


def scores(q, k, v):
    return sage_attention(q, k, v, causal=True, config=QuantConfig(products="scores"))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_no_more_is_saved_than_sdpa_saves(dim, group):
    q, k, v = long_tensors(dim, group)
    sdpa = saved_bytes(lambda: flash(q, k, v))
    assert saved_bytes(lambda: sage(q, k, v)) < 0.76 * sdpa
    assert saved_bytes(lambda: scores(q, k, v)) < 1.01 * sdpa  # the mean of K


def peak_bytes(attend, leaves):
    """Of forward and backward, beside the leaves; q, k and v are activations, as in a network."""
    do = torch.randn_like(leaves[0])
    for _ in range(2):  # the first call compiles, and allocates what stays
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(attend(*(x * 1 for x in leaves)), leaves, do)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_peak_memory_is_sdpa_s_at_most(dim, group):
    leaves = long_tensors(dim, group)
    flash_peak = peak_bytes(flash, leaves)
    for attend in (sage, scores):
        peak = peak_bytes(attend, leaves)
        assert peak <= 1.1 * flash_peak, f"{peak / 2**20:.1f} MiB against SDPA's {flash_peak / 2**20:.1f}"
