"""The operators as PyTorch sees them: opcheck, torch.compile, recompute, autocast, modes of autograd, memory."""

import functools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sagebwd.attention import QuantConfig, op, sage_attention, sage_attention_packed
from tests.attention.helpers import inputs, run
from tests.attention.memory import saved_bytes
from tests.attention.test_function import BACKENDS, fused_projection
from tests.conftest import HAS_GPU

OPS = torch.ops.sagebwd
INTERPRETER = "triton-interpreter"
SMALL = QuantConfig(block_q=64, block_k=32)
CONFIGS = {
    "default": QuantConfig(),
    "smooth-q": QuantConfig(block_k=32, smooth_q=True),
    "smooth-q-alone": QuantConfig(granularity="tile", delta="matched", smooth_k=False, smooth_q=True),
    "scores": QuantConfig(products="scores"),
}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == INTERPRETER:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


@pytest.fixture(autouse=True)
def _no_compiled_code():
    torch._dynamo.reset()


def skip_on_interpreter(backend, keep):
    if backend == INTERPRETER and not keep:
        pytest.skip("the interpreter is slow: it runs one case of this")


def tensors(m=20, n=33, dim=16, dtype=torch.float16):
    """q contiguous, k and v strided views, all requiring gradients."""
    q, k, v, _ = inputs(m, n, dim, 2, 1, batch=2, dtype=dtype)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return [x.requires_grad_() for x in (q, k, v)]


def documents():
    """Packed views [1, heads, tokens, dim], and the arguments that say where documents lie."""
    q, k, v = (torch.randn(20, heads, 16).half().transpose(0, 1)[None] for heads in (2, 1, 1))
    cu = torch.tensor([0, 3, 3, 19], dtype=torch.int32)
    return [x.requires_grad_() for x in (q, k, v)], (cu, cu, 16, 16)


def backward_arguments(forward, config, packed):
    """What autograd hands to attention_backward."""
    q, k, v = forward[:3]
    called = OPS.attention_forward_packed if packed else OPS.attention_forward
    o, lse2, q_rows, q_scale, q_mean, k_rows, k_scale, k_mean = (x.detach() for x in called(*forward))
    q, k, v = (x.detach() for x in (q, k, v))
    if config.products == "all":
        q = None
        if not config.smooth_q:
            q_mean = k = k_mean = None
    where = packed or (None, None, 0, 0)
    kept = (v, o, lse2, q_rows, q_scale, q_mean, k_rows, k_scale, q, k, k_mean)
    return torch.randn_like(o), *kept, *where, *forward[-4:]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["plain", "window", "packed"])
def test_opcheck(backend, config, kind):
    skip_on_interpreter(backend, (kind, config) in (("plain", "default"), ("packed", "smooth-q"), ("packed", "scores")))
    options = (True, 0.25, 5 if kind == "window" else None, op.settings(backend, CONFIGS[config]))
    qkv, packed = documents() if kind == "packed" else (tensors(), ())
    forward = (*qkv, *packed, *options)
    torch.library.opcheck(OPS.attention_forward_packed.default if packed else OPS.attention_forward.default, forward)
    torch.library.opcheck(OPS.attention_backward.default, backward_arguments(forward, CONFIGS[config], packed))


@pytest.mark.parametrize("config", CONFIGS)
def test_opcheck_where_nothing_is_copied(config):
    """FP32 and whole tiles: the reference's results must not be its inputs."""
    q, k, v = (x.contiguous().detach().requires_grad_() for x in tensors(64, 64, dtype=torch.float32))
    settings = op.settings("reference", CONFIGS[config])
    torch.library.opcheck(OPS.attention_forward.default, (q, k, v, False, 0.25, None, settings))
    results = OPS.attention_forward.default(q, k, v, False, 0.25, None, settings)
    storages = [x.untyped_storage().data_ptr() for x in (q, k, v, *results) if x.numel()]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize(("batch", "m", "n"), [(0, 8, 8), (2, 0, 8), (2, 8, 0)])
def test_opcheck_of_empty_inputs(backend, batch, m, n):
    q, k, v, _ = inputs(m, n, 16, 4, 2, batch=batch, dtype=torch.float16)
    settings = op.settings(backend, CONFIGS["smooth-q"])
    qkv = [x.requires_grad_() for x in (q, k, v)]
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.attention_forward.default, (*qkv, True, 0.25, None, settings), test_utils=utils)


def plain(q, k, v, **options):
    return sage_attention(q * 1.5, k, v, config=SMALL, **options) * 2


def packed(q, k, v, **options):
    cu = torch.tensor([0, 4, 20], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 16, "max_seqlen_k": 16}
    return sage_attention_packed(q * 1.5, k, v, **lengths, config=SMALL, **options) * 2


CALLS = {
    "plain": (plain, {"causal": True}),
    "window": (plain, {"causal": True, "window": 5, "softmax_scale": 0.3}),
    "nbhd": (plain, {"causal": False, "layout": "nbhd"}),
    "packed": (packed, {"causal": True}),
}


def call_and_inputs(name):
    function, options = CALLS[name]
    qkv = fused_projection(20, 2, 2, 1, 16) if name == "nbhd" else tensors(20, 20)
    if name == "packed":
        qkv = [x.detach()[0].transpose(0, 1) for x in qkv]
    return functools.partial(function, **options), [x.detach().requires_grad_() for x in qkv]


def outcome(function, qkv):
    """The output, and the gradients as they come back, before they are added to .grad."""
    grads = {}
    hooks = [x.register_hook(functools.partial(grads.__setitem__, i)) for i, x in enumerate(qkv)]
    o = function(*qkv)
    o.backward(torch.ones_like(o) / 8)
    for hook in hooks:
        hook.remove()
    return o, *(grads[i] for i in range(len(qkv)))


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())
        assert torch.equal(a, e)


@pytest.mark.parametrize("name", CALLS)
def test_compile_without_a_graph_break(backend, name):
    skip_on_interpreter(backend, name in ("nbhd", "packed"))
    call, qkv = call_and_inputs(name)
    assert_same(outcome(torch.compile(call, fullgraph=True, backend="aot_eager"), qkv), outcome(call, qkv))


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_inductor(backend, name):
    skip_on_interpreter(backend, name == "plain")
    call, qkv = call_and_inputs(name)
    assert_same(outcome(torch.compile(call, fullgraph=True), qkv), outcome(call, qkv))


def test_one_graph_for_all_lengths():
    """Of two tiles or more: PyTorch always compiles sizes of 1 by themselves."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(functools.partial(plain, causal=True), fullgraph=True, backend=counter, dynamic=True)
    for length in (70, 100, 129, 200):
        qkv = tensors(length, length)
        assert_same(outcome(compiled, qkv), outcome(functools.partial(plain, causal=True), qkv))
    assert counter.frame_count == 1


def test_compiled_code_runs_backward_inside():
    """A graph break round the backward: PyTorch must not trace into the operators' own code."""

    def step(q, k, v):
        o = sage_attention(q, k, v, causal=True, config=SMALL)
        torch._dynamo.graph_break()
        o.sum().backward()
        return o.detach()

    eager, compiled = tensors(), tensors()
    compiled = [x.detach().clone().requires_grad_() for x in eager]
    assert torch.equal(step(*eager), torch.compile(step, backend="aot_eager")(*compiled))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(eager, compiled, strict=True))


class Seen(TorchDispatchMode):
    """Which operators are called."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_an_eager_call_computes_what_the_operators_compute(name):
    """Nobody watches: it goes without them. A mode of dispatch watches: it sees them, forward and backward."""
    call, qkv = call_and_inputs(name)
    eager = outcome(call, qkv)
    with Seen() as seen:
        assert_same(outcome(call, qkv), eager)
    forward = OPS.attention_forward_packed if name == "packed" else OPS.attention_forward
    assert [x for x in seen.operators if x.namespace == "sagebwd"] == [forward.default, OPS.attention_backward.default]
    o = sage_attention(*tensors(), causal=True)
    assert o.grad_fn.name() == "_EagerBackward"


def test_compiled_autograd_takes_the_backward_of_an_eager_call():
    call, qkv = call_and_inputs("plain")
    expected = outcome(call, qkv)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        assert_same(outcome(call, qkv), expected)


def test_compiling_a_refused_call_says_why():
    call = torch.compile(functools.partial(sage_attention, causal=True), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="head dim 20 is not supported: use a multiple of 8"):
        call(*tensors(dim=20))


def save_attention(ctx, operator, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE if operator is OPS.attention_forward.default else CheckpointPolicy.PREFER_RECOMPUTE
    )


RECOMPUTE = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_attention),
    },
}


@pytest.mark.parametrize("how", RECOMPUTE)
@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_gives_the_same_gradients(backend, how, compiled):
    skip_on_interpreter(backend, how == "non-reentrant" and not compiled)
    if compiled and how == "reentrant":
        pytest.skip("torch.compile takes the other mode only")
    call, qkv = call_and_inputs("plain")
    expected = outcome(call, qkv)
    again = functools.partial(checkpoint, call, **RECOMPUTE[how])
    assert_same(outcome(torch.compile(again, backend="aot_eager") if compiled else again, qkv), expected)


def test_selective_recompute_runs_the_forward_once(monkeypatch):
    call, qkv = call_and_inputs("plain")
    calls = []
    forward = op.reference_backend.forward
    monkeypatch.setattr(op.reference_backend, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    for how, times in (("selective", 1), ("non-reentrant", 2)):
        calls.clear()
        outcome(functools.partial(checkpoint, call, **RECOMPUTE[how]), qkv)
        assert len(calls) == times


def test_modes_without_gradients(backend):
    call, qkv = call_and_inputs("plain")
    expected = call(*qkv)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o = call(*qkv)
        assert not o.requires_grad
        assert torch.equal(o, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_sdpa_does(compiled):
    q, k, v = tensors(dtype=torch.float32)
    k = k.detach().half().requires_grad_()

    def attend(q, k, v):
        return sage_attention(q, k, v, causal=True, config=SMALL)

    def cast(q, k, v):
        return attend(q.bfloat16(), k.bfloat16(), v.bfloat16())

    expected = outcome(cast, (q, k, v))
    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    with torch.autocast("cpu", torch.bfloat16):  # backward inside as well: the reference's own sums stay in FP32
        actual = outcome(call, (q, k, v))
        assert scaled_dot_product_attention(q, k.float(), v, enable_gqa=True).dtype == actual[0].dtype
    assert_same(actual, expected)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"are torch\.float64, torch\.bfloat16"):
        attend(q.double(), k, v)


def test_a_second_derivative_is_refused():
    q, k, v = tensors()
    o = sage_attention(q, k, v, causal=True, config=SMALL)
    grads = torch.autograd.grad(o.sum(), (q, k, v), create_graph=True)
    first = torch.autograd.grad(sage_attention(q, k, v, causal=True, config=SMALL).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(grads, first, strict=True))
    with pytest.raises(RuntimeError, match=r"has no second derivative .*: do not differentiate its gradients"):
        grads[0].float().square().sum().backward()


def test_forward_mode_is_refused():
    q, k, v = tensors()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"),
    ):
        sage_attention(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v, causal=True)


def test_a_tensor_changed_before_backward_is_an_error():
    q, k, v = tensors()
    o = sage_attention(q, k, v, causal=True, config=SMALL)
    with torch.no_grad():
        v.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_gradients_of_some_inputs():
    q, k, v = tensors()
    whole = run(q, k, v, torch.ones_like(q), causal=True, config=SMALL)
    for i, wanted in enumerate((q, k, v)):
        part = [x if x is wanted else x.detach() for x in (q, k, v)]
        o = sage_attention(*part, causal=True, config=SMALL)
        assert torch.equal(torch.autograd.grad(o, wanted, torch.ones_like(o))[0], whole[i + 1])


@pytest.mark.skipif(HAS_GPU, reason="tests/gpu measures it on the GPU here")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_no_more_is_saved_than_sdpa_saves(monkeypatch, dim, group):
    """SDPA: q, k, v, o in 16 bit and lse in FP32, as measured. Here: INT8 q and k, v, o, lse2, and scales."""
    n, heads = 256, 4
    q, k, v, _ = (x.requires_grad_() for x in inputs(n, n, dim, heads, heads // group, dtype=torch.float16))
    expanded = [x.repeat_interleave(group, 1).detach().requires_grad_() for x in (k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        sdpa = saved_bytes(lambda: scaled_dot_product_attention(q, *expanded, is_causal=True)) / n
    queries, keys = heads, heads // group
    assert sdpa == heads * (8 * dim + 4)
    # Those that SDPA's GPU kernels, which take groups as they are, save.
    sdpa = queries * (2 * dim + 2 * dim + 4) + keys * (2 * dim + 2 * dim)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sage = saved_bytes(lambda: sage_attention(q, k, v, causal=True)) / n
    scales = (queries + keys) * 4 / 64
    assert sage == queries * (dim + 2 * dim + 4) + keys * (dim + 2 * dim) + scales
    assert sage < 0.76 * sdpa


@pytest.mark.skipif(HAS_GPU, reason="tests/gpu measures it on the GPU here")
@pytest.mark.parametrize("smooth_k", [True, False])
def test_with_scores_alone_as_much_is_saved_as_sdpa_saves(monkeypatch, smooth_k):
    """q, k, v, o in 16 bit and lse in FP32; and the mean of the keys."""
    n, heads, keys, dim = 256, 4, 2, 64
    q, k, v, _ = (x.requires_grad_() for x in inputs(n, n, dim, heads, keys, dtype=torch.float16))
    config = QuantConfig(products="scores", smooth_k=smooth_k)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sage = saved_bytes(lambda: sage_attention(q, k, v, causal=True, config=config))
    assert sage == n * (heads * (2 * dim + 2 * dim + 4) + keys * (2 * dim + 2 * dim)) + smooth_k * keys * 4 * dim


DIMS = {32: 196, 64: 388, 72: 548, 80: 580, 96: 644, 112: 708, 128: 772, 192: 1284, 256: 1540}  # docs/numerics.md


def kept_of_shapes(call, *, n=1024, heads=8, kv_heads=2, dim=64):
    """Bytes a token of tensors of a GPU that is not there; a number of rows of its own tells each from the others."""
    q, k, v = (torch.empty(n, h, dim, dtype=torch.bfloat16, device="meta") for h in (heads, kv_heads, kv_heads))
    return saved_bytes(lambda: call(*(x.requires_grad_() for x in (q, k, v)))) / n


@pytest.mark.parametrize("dim", DIMS)
def test_what_is_saved_at_every_head_dim(dim):
    """SDPA saves 4 D + 4 bytes a query head and 4 D a key/value head."""

    def call(q, k, v):
        return sage_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), causal=True)

    padded = (DIMS[dim] - 4 * dim - 4) // 2
    assert padded >= dim
    sage = kept_of_shapes(call, dim=dim)
    assert sage == 8 * (padded + 2 * dim + 4) + 2 * (padded + 2 * dim) + 10 * 4 / 64
    assert sage < 8 * (4 * dim + 4) + 2 * 4 * dim


@pytest.mark.parametrize(
    ("dim", "tokens"), [(32, 140), (64, 140), (128, 140), (112, 180), (96, 270), (192, 270), (80, 530), (72, 1100)]
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_what_is_saved_of_packed_documents(kv_heads, dim, tokens):
    """Less than SDPA saves from so many tokens a document on, and more with half as many."""

    def kept(tokens):
        cu = torch.arange(0, 20 * tokens + 1, tokens, dtype=torch.int32).to("meta")
        where = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": tokens, "max_seqlen_k": tokens}
        call = functools.partial(sage_attention_packed, **where, causal=True)
        return kept_of_shapes(call, n=20 * tokens, heads=4, kv_heads=kv_heads, dim=dim)

    sdpa = 4 * (4 * dim + 4) + kv_heads * 4 * dim
    assert kept(tokens // 2) > sdpa > kept(tokens)
