"""What users call: which backend runs, layouts, empty inputs, and every refusal with its remedy."""

import logging
import subprocess
import sys

import pytest
import torch

from sagebwd.attention import QuantConfig, checks, op, reference, sage_attention, sage_attention_packed
from tests.attention import cases
from tests.attention.helpers import NAMES, inputs, run, truth
from tests.conftest import HAS_GPU

CONFIG = QuantConfig(block_q=16, block_k=32)
SCORES = QuantConfig(block_q=16, block_k=32, products="scores")
MASKS = {
    "reference": [
        {"causal": False},
        {"causal": True},
        {"causal": True, "window": 9},
        {"causal": True, "config": SCORES},
    ],
    "triton-interpreter": [{"causal": True, "window": 9}],  # it is slow; tests/kernels has the others
}
BACKENDS = [
    "reference",
    pytest.param("triton-interpreter", marks=pytest.mark.skipif(HAS_GPU, reason="Triton compiles for the GPU here")),
]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == "triton-interpreter":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


def packed(q, k, v, q_ends, k_ends, *, max_q=None, max_k=None, **kwargs):
    cu = [torch.tensor(ends, dtype=torch.int32, device=q.device) for ends in (q_ends, k_ends)]
    longest = [int(x.diff().max()) for x in cu]
    return sage_attention_packed(
        q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1],
        max_seqlen_q=max_q or longest[0], max_seqlen_k=max_k or longest[1], **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, SCORES])
def test_a_cpu_runs_the_reference(config):
    q, k, v, do = inputs(40, 50, 16, 4, 2, dtype=torch.bfloat16)
    expected = cases.by_reference(q, k, v, do, causal=True, config=config)
    assert all(torch.equal(a, e) for a, e in zip(run(q, k, v, do, causal=True, config=config), expected, strict=True))


@pytest.mark.skipif(HAS_GPU, reason="Triton compiles for the GPU here")
def test_triton_interpret_runs_the_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(reference, "forward", None)
    monkeypatch.setattr(reference, "backward", None)
    q, k, v, do = inputs(20, 20, 16, 1, 1, dtype=torch.float16)
    assert run(q, k, v, do, causal=True, config=CONFIG)[0].any()


def test_the_backend_is_logged_once(backend, caplog):
    op._announced.clear()
    q, k, v, _ = inputs(4, 4, 16, 1, 1, dtype=torch.float16)
    with caplog.at_level(logging.INFO, "sagebwd"):
        for _ in range(3):
            sage_attention(q, k, v, causal=True, config=CONFIG)
    lines = [r.getMessage() for r in caplog.records if r.name == "sagebwd"]
    assert lines == [f"SageBwd runs on cpu: {backend} backend, torch.float16, head dim 16 ({CONFIG.summary()})"]


def test_importing_the_package_imports_no_torch():
    code = "import sys, sagebwd.attention; assert 'torch' not in sys.modules; sagebwd.attention.sage_attention_packed"
    subprocess.run([sys.executable, "-c", code], check=True)


def fused_projection(n, batch, heads, kv_heads, dim):
    """q, k, v as views of one projection [tokens, batch, ...], as Megatron has them."""
    fused = torch.randn(n, batch, (heads + 2 * kv_heads) * dim).half()
    q, k, v = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    return [x.unflatten(-1, (-1, dim)) for x in (q, k, v)]


def test_layouts_and_memory_order(backend):
    q, k, v = fused_projection(24, 2, 2, 1, 16)
    do = torch.randn(q.shape).half()
    results = {}
    for layout, order in (("nbhd", (0, 1, 2, 3)), ("bhnd", (1, 2, 0, 3))):
        tensors = [x.permute(order) for x in (q, k, v, do)]
        o, *grads = run(*tensors, causal=True, config=CONFIG, layout=layout)
        for result, like in zip((o, *grads), (tensors[0], tensors[0], tensors[2], tensors[2]), strict=True):
            assert result.shape == like.shape
            assert result.stride() == torch.empty_like(like).stride()
        results[layout] = (o, *grads)
    for a, b in zip(*results.values(), strict=True):
        assert torch.equal(a.permute(1, 2, 0, 3), b)


def test_packed_documents_equal_single_calls(backend):
    q_ends, k_ends = [0, 5, 5, 45, 60], [0, 7, 10, 50, 50]  # one without queries, one without keys, and tokens in none
    tokens = 64
    q, k, v = (torch.randn(tokens, heads, 16).half().requires_grad_() for heads in (2, 1, 1))
    do = torch.randn(tokens, 2, 16).half()
    for options in MASKS[backend]:
        options = {"config": QuantConfig(block_q=16, block_k=16, smooth_q=True)} | options
        o = packed(q, k, v, q_ends, k_ends, **options)
        whole = (o, *torch.autograd.grad(o, (q, k, v), do))
        alone = [torch.zeros_like(x) for x in whole]
        for i in range(4):
            rows, cols = slice(*q_ends[i : i + 2]), slice(*k_ends[i : i + 2])
            if rows.start == rows.stop or cols.start == cols.stop:
                continue
            one = [x[s].transpose(0, 1)[None] for x, s in zip((q, k, v, do), (rows, cols, cols, rows), strict=True)]
            for x, s, result in zip(alone, (rows, rows, cols, cols), run(*one, **options), strict=True):
                x[s] = result[0].transpose(0, 1)
        for name, a, b in zip(NAMES, whole, alone, strict=True):
            assert torch.equal(a, b), (name, options)


def test_a_window_as_wide_as_the_keys_is_no_window(backend):
    q, k, v, do = inputs(40, 40, 16, 2, 1, dtype=torch.float16)
    expected = run(q, k, v, do, causal=True, config=CONFIG)
    for window in (39, 10**12):
        actual = run(q, k, v, do, causal=True, config=CONFIG, window=window)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    narrow = run(q, k, v, do, causal=True, config=CONFIG, window=38)
    assert not torch.equal(narrow[0], expected[0])


@pytest.mark.parametrize(("batch", "m", "n"), [(0, 8, 8), (2, 0, 8), (2, 8, 0), (2, 0, 0)])
def test_empty_inputs_give_empty_results_and_zeros(backend, batch, m, n):
    q, k, v, do = inputs(m, n, 16, 4, 2, batch=batch, dtype=torch.float16)
    for layout in ("bhnd", "nbhd"):
        tensors = [x if layout == "bhnd" else x.permute(2, 0, 1, 3) for x in (q, k, v, do)]
        for config in (QuantConfig(), QuantConfig(smooth_q=True)):
            o, *grads = run(*tensors, causal=True, config=config, layout=layout)
            assert [x.shape for x in (o, *grads)] == [tensors[i].shape for i in (0, 0, 1, 2)]
            assert not any(x.any() for x in (o, *grads))


def test_no_packed_tokens(backend):
    q, k, v = (torch.zeros(0, heads, 16, dtype=torch.float16, requires_grad=True) for heads in (4, 2, 2))
    o = packed(q, k, v, [0, 0], [0, 0], causal=True)
    assert o.shape == q.shape
    assert [g.shape for g in torch.autograd.grad(o.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_every_option_has_a_backward(backend):
    q, k, v, do = inputs(40, 40, 16, 2, 1, dtype=torch.float16)
    for config in cases.CONFIGS.values():
        for window in (None, 7):
            grads = run(q, k, v, do, causal=True, config=config, window=window)[1:]
            assert all(g.any() for g in grads)


def qkv(heads=2, kv_heads=2, m=8, n=8, dim=16, dtype=torch.float32, device="cpu"):
    return [torch.randn(1, h, l, dim, device=device).to(dtype) for h, l in ((heads, m), (kv_heads, n), (kv_heads, n))]


def meta(dtype=torch.bfloat16):
    """Tensors of a GPU that is not there: the shapes and dtypes are what is checked."""
    return qkv(dtype=dtype, device="meta")


REFUSED = {
    "layout": (lambda: sage_attention(*qkv(), causal=True, layout="bnhd"), "layout is 'bnhd': choose 'bhnd'"),
    "dimensions": (lambda: sage_attention(*(x[0] for x in qkv()), causal=True), "3, 3 and 3 dimensions: give each 4"),
    "k and v": (
        lambda: sage_attention(*qkv()[:2], qkv(n=9)[2], causal=True), "k and v differ in shape .*: they must be alike"
    ),
    "a dim of v's own": (
        lambda: sage_attention(*qkv()[:2], qkv(dim=24)[2], causal=True),
        "k and v differ in head dim .*: pad the narrower with zeros",
    ),
    "config": (lambda: sage_attention(*qkv(), causal=True, config="row"), "config is 'row': give a QuantConfig"),
    "sparse": (
        lambda: sage_attention(qkv()[0].to_sparse(), *qkv()[1:], causal=True), "torch.sparse_coo, .*: make them dense"
    ),
    "q and k": (lambda: sage_attention(qkv(dim=8)[0], *qkv()[1:], causal=True), "q and k differ in batch or dim"),
    "heads": (
        lambda: sage_attention(*qkv(3, 2), causal=True),
        "3 query heads do not divide into 2 key/value heads .*: give each key/value head the same number",
    ),
    "no key heads": (lambda: sage_attention(*qkv(2, 0), causal=True), "do not divide into 0 key/value heads"),
    "dim 20": (lambda: sage_attention(*qkv(dim=20), causal=True), "head dim 20 .*: use a multiple of 8 up to 256"),
    "dim 264": (lambda: sage_attention(*qkv(dim=264), causal=True), "head dim 264 .*: use a multiple of 8 up to 256"),
    "dim 0": (lambda: sage_attention(*qkv(dim=0), causal=True, softmax_scale=1.0), "head dim 0 is not supported"),
    "dtypes": (
        lambda: sage_attention(*qkv()[:2], qkv(dtype=torch.float16)[2], causal=True),
        "torch.float32, torch.float32 and torch.float16: cast them to one dtype",
    ),
    "float64": (
        lambda: sage_attention(*qkv(dtype=torch.float64), causal=True),
        "dtype torch.float64 is not supported: cast q, k and v to bfloat16 or float16",
    ),
    "int8": (lambda: sage_attention(*qkv(dtype=torch.int8), causal=True), "dtype torch.int8 is not supported: cast"),
    "devices": (
        lambda: sage_attention(qkv()[0], *meta(torch.float32)[1:], causal=True),
        "q, k and v are on cpu, meta and meta: move them to one device",
    ),
    "scale 0": (lambda: sage_attention(*qkv(), causal=True, softmax_scale=0.0), "softmax_scale is 0.0: .* above 0"),
    "scale nan": (
        lambda: sage_attention(*qkv(), causal=True, softmax_scale=float("nan")), "softmax_scale is nan: .* finite"
    ),
    "window without causal": (
        lambda: sage_attention(*qkv(), causal=False, window=4), "window=4 with causal=False .*: pass causal=True"
    ),
    "negative window": (lambda: sage_attention(*qkv(), causal=True, window=-1), "window is -1: .* an int of 0 or more"),
    "window pair": (lambda: sage_attention(*qkv(), causal=True, window=(4, 0)), r"window is \(4, 0\): .* an int"),
    "mask as causal": (
        lambda: sage_attention(*qkv(), causal=torch.ones(8, 8)), "give True or False; other masks are not supported"
    ),
    "vmap": (
        lambda: torch.func.vmap(lambda q: sage_attention(q, q, q, causal=True))(torch.randn(2, 1, 1, 8, 16)),
        "does not support torch.func .*: use torch.autograd",
    ),
    "grad transform": (
        lambda: torch.func.grad(lambda q: sage_attention(q, q, q, causal=True).sum())(qkv()[0]),
        "does not support torch.func .*: use torch.autograd",
    ),
    "packed dimensions": (
        lambda: packed(*qkv(), [0, 8], [0, 8], causal=True), "4, 4 and 4 dimensions: give each 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def documents(change=None, **keywords):
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5} | keywords
    return sage_attention_packed(q, k, v, causal=True, **given)


def ends(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"cu_seqlens_q": ends(0, 3, 8, dtype=torch.int64)}, "cu_seqlens_q is torch.int64: cast it to int32"),
        ({"cu_seqlens_k": ends(0, 3, 8, device="meta")}, "cu_seqlens_k is on meta, q, k and v on cpu: move it there"),
        ({"cu_seqlens_q": ends(0)}, r"cu_seqlens_q has shape \(1,\): it is \[documents \+ 1\]"),
        ({"cu_seqlens_q": ends(0, 3, 8)[None]}, r"cu_seqlens_q has shape \(1, 3\): it is \[documents \+ 1\]"),
        ({"cu_seqlens_q": ends(0, 9, 3, 9, 8)[::2]}, r"cu_seqlens_q has stride \(2,\): call contiguous\(\)"),
        ({"cu_seqlens_k": ends(0, 8)}, "cu_seqlens_q counts 2 documents, cu_seqlens_k 1: give both one entry"),
        (
            {"cu_seqlens_q": ends(1, 3, 8)},
            r"cu_seqlens_q is \[1, 3, 8\]: let it rise from 0 to the number of tokens, 8",
        ),
        (
            {"cu_seqlens_k": ends(0, 3, 9)},
            r"cu_seqlens_k is \[0, 3, 9\]: let it rise from 0 to the number of tokens, 8",
        ),
        ({"cu_seqlens_k": ends(0, 6, 3)}, r"cu_seqlens_k is \[0, 6, 3\]: let it rise from 0"),
        ({"max_seqlen_q": 4}, "a document of cu_seqlens_q has 5 tokens: raise max_seqlen_q, now 4"),
        ({"max_seqlen_k": 4}, "a document of cu_seqlens_k has 5 tokens: raise max_seqlen_k, now 4"),
        ({"max_seqlen_q": -1}, "max_seqlen_q is -1: give the tokens of the longest document, an int"),
        ({"max_seqlen_k": torch.tensor(5)}, r"max_seqlen_k is tensor\(5\): give the tokens .*, an int"),
        ({"window": -2}, "window is -2"),
        ({"cu_seqlens_q": [0, 8]}, r"cu_seqlens_q is \[0, 8\]: give an int32 tensor"),
    ],
)
def test_packed_refused(keywords, message):
    assert documents().shape == (8, 2, 16)
    with pytest.raises(ValueError, match=message):
        documents(**keywords)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("dropout_p", "attention dropout is not supported: leave it out, or use torch.nn.functional.scaled"),
        ("attn_mask", "masks are causal=True, .* sage_attention_packed"),
        ("is_causal", "pass causal"),
        ("scale", "pass softmax_scale"),
        ("enable_gqa", "leave it out"),
        ("window_size", "pass window"),
        ("no_such_thing", "leave it out"),
    ],
)
def test_other_arguments_are_refused_with_a_remedy(name, remedy):
    message = f"sage_attention takes no {name}: {remedy}"
    with pytest.raises(TypeError, match=message):
        sage_attention(*qkv(), causal=True, **{name: 0.1})
    with pytest.raises(TypeError, match=message):
        documents(**{name: 0.1})


def test_the_interpreter_refuses_bfloat16(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="use float16 or float32 there"):
        sage_attention(*qkv(dtype=torch.bfloat16), causal=True)


def test_other_devices_are_refused():
    class Elsewhere:
        device = torch.device("xpu")

    with pytest.raises(ValueError, match="device xpu is not supported: move q, k and v to a CUDA GPU or to the CPU"):
        checks.backend_for(Elsewhere())


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "Tesla T4")
    with pytest.raises(ValueError, match=r"GPU Tesla T4 has compute capability 7.5: the kernels need 8.0 or newer"):
        checks.check_gpu.__wrapped__(0, 64, QuantConfig())


def test_meta_tensors_give_shapes_alone():
    o = sage_attention(*meta(), causal=True)
    assert (o.device.type, o.shape, o.dtype) == ("meta", (1, 2, 8, 16), torch.bfloat16)


def test_queries_beyond_the_keys_see_nothing(backend):
    q, k, v, do = inputs(9, 4, 16, 1, 1, dtype=torch.float16)
    o, dq, *_ = run(q, k, v, do, causal=True, config=CONFIG)
    assert not o[..., :5, :].any()
    assert not dq[..., :5, :].any()
    torch.testing.assert_close(o.double(), truth(q, k, v, do, True)[0], atol=0.05, rtol=0.05)
