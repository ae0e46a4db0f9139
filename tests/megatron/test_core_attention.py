"""Megatron's core-attention contract: shapes, strides and groups as Megatron hands them over, and what is refused."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from sagebwd.attention import QuantConfig, sage_attention
from sagebwd.megatron.core_attention import SageBwdCoreAttention, SDPACoreAttention, backend_that_ran
from sagebwd.training.world import World

TOKENS, BATCH, HEADS, GROUPS, DIM = 48, 2, 4, 2, 16
QUANT = QuantConfig(granularity="tile", block_q=32)  # not the default; 32 is the least on a GPU
ENDS = [0, 1, 20, 20, TOKENS]  # of packed documents: a token, 19, none, and the rest


def build(kind: str, config: dict[str, Any] | None = None, **keywords: Any) -> torch.nn.Module:
    settings = {"num_layers": 1, "hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    megatron = {
        "config": TransformerConfig(**settings | {"attention_dropout": 0.0} | (config or {})),
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "cp_comm_type": None,
        "softmax_scale": None,
        "pg_collection": None,
    } | keywords
    return SDPACoreAttention(**megatron) if kind == "fpa" else SageBwdCoreAttention(quant=QUANT, **megatron)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    """Query and key contiguous as after RoPE; the value a view of the fused projection, as Megatron passes it."""
    per_group = HEADS // GROUPS
    fused = torch.randn(TOKENS, BATCH, GROUPS, (per_group + 2) * DIM)
    q, k, v = fused.split([per_group * DIM, DIM, DIM], -1)
    assert not v.is_contiguous()
    return q.reshape(TOKENS, BATCH, HEADS, DIM).contiguous(), k.contiguous(), v


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention in FP64, written out; [tokens, batch, heads * dim]."""
    k, v = (x.double().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("mbhd,nbhd->bhmn", q.double(), k) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhmn,nbhd->mbhd", s.softmax(-1), v).flatten(2)


@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize(("kind", "error"), [("fpa", 1e-6), ("sagebwd", 0.03)])
def test_grouped_heads_and_a_strided_value(kind: str, error: float, mask_type: AttnMaskType) -> None:
    q, k, v = qkv()
    core = build(kind, attn_mask_type=mask_type)
    out = core(q, k, v, None, attn_mask_type=mask_type, attention_bias=None, packed_seq_params=None)
    expected = exact(q, k, v, causal=mask_type is AttnMaskType.causal, scale=DIM**-0.5)
    assert out.shape == (TOKENS, BATCH, HEADS * DIM)
    assert (out - expected).norm() < error * expected.norm()


def documents(ends: list[int] = ENDS, **change: Any) -> PackedSeqParams:
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    fields = {"qkv_format": "thd", "max_seqlen_q": ends[-1], "max_seqlen_kv": ends[-1]}
    return PackedSeqParams(**fields | {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens} | change)


@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
def test_packed_documents_equal_each_by_itself(kind: str, mask_type: AttnMaskType) -> None:
    """Bitwise, forward and backward."""
    core = build(kind, attn_mask_type=mask_type)
    packed = [x[:, 0].detach().requires_grad_() for x in qkv()]  # [tokens, heads, dim], the value strided
    alone = [x.detach().requires_grad_() for x in packed]
    out = core(*packed, None, packed_seq_params=documents())
    parts = [core(*(x[start:end, None] for x in alone), None)[:, 0] for start, end in pairwise(ENDS) if end > start]
    assert out.shape == (TOKENS, HEADS * DIM)
    assert torch.equal(out, torch.cat(parts))
    do = torch.randn_like(out)
    out.backward(do)
    torch.cat(parts).backward(do)
    for ours, theirs in zip(packed, alone, strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
def test_the_causal_type_does_not_read_the_mask(kind: str) -> None:
    q, k, v = qkv()
    core = build(kind)
    hides_all = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    assert torch.equal(core(q, k, v, hides_all), core(q, k, v, None))


def test_sagebwd_passes_its_quantconfig_and_scale_on() -> None:
    q, k, v = qkv()
    out = build("sagebwd", softmax_scale=0.5)(q, k, v, None)
    direct = sage_attention(q, k, v, causal=True, softmax_scale=0.5, config=QUANT, layout="nbhd")
    assert torch.equal(out, direct.flatten(2))
    assert not torch.equal(out, sage_attention(q, k, v, causal=True, config=QUANT, layout="nbhd").flatten(2))


def test_sdpa_takes_the_scale() -> None:
    q, k, v = qkv()
    out = build("fpa", softmax_scale=0.5)(q, k, v, None)
    torch.testing.assert_close(out.double(), exact(q, k, v, causal=True, scale=0.5), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
def test_heads_do_not_see_each_other(kind: str, pack: bool) -> None:
    """Bitwise, forward and backward: so tensor parallelism, which shards the heads, changes nothing."""
    q, k, v = qkv()
    do = torch.randn(TOKENS, BATCH, HEADS, DIM)

    def run(half: slice) -> list[Tensor]:
        group = slice(half.start * GROUPS // HEADS, half.stop * GROUPS // HEADS)
        parts = [x.clone().requires_grad_() for x in (q[:, :, half], k[:, :, group], v[:, :, group])]
        if pack:
            packed = (x.flatten(0, 1) for x in parts)
            out = build(kind)(*packed, None, packed_seq_params=documents([0, 20, TOKENS * BATCH]))
        else:
            out = build(kind)(*parts, None).flatten(0, 1)
        out.backward(do[:, :, half].reshape(out.shape))
        return [out.view(TOKENS, BATCH, -1, DIM), *(x.grad for x in parts)]

    whole, first, second = run(slice(0, HEADS)), run(slice(0, HEADS // 2)), run(slice(HEADS // 2, HEADS))
    for all_heads, a, b in zip(whole, first, second, strict=True):
        assert torch.equal(all_heads, torch.cat([a, b], 2))


@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
@pytest.mark.parametrize(
    ("config", "keywords", "names"),
    [
        ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1"),
        ({"window_size": (16, 0)}, {}, "window_size"),
        ({"softmax_type": "off-by-one"}, {}, "softmax_type"),
        ({"apply_query_key_layer_scaling": True}, {}, "apply_query_key_layer_scaling"),
        ({"context_parallel_size": 2}, {"cp_comm_type": "p2p"}, "cp_comm_type='p2p'"),
        ({}, {"attention_type": "cross"}, "attention_type='cross'"),
    ],
)
def test_options_that_are_not_honoured_are_refused(kind: str, config: dict, keywords: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        build(kind, config, **keywords)


@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
@pytest.mark.parametrize(
    ("mask", "keywords", "names"),
    [
        (None, {"attention_bias": torch.zeros(1)}, "attention_bias"),
        (None, {"packed_seq_params": documents(qkv_format="sbhd")}, "qkv_format='sbhd'"),
        (None, {"packed_seq_params": documents(cu_seqlens_q_padded=torch.tensor(ENDS))}, "cu_seqlens_q_padded"),
        (None, {"attn_mask_type": AttnMaskType.padding}, "attn_mask_type=padding"),
        (torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool), {"attn_mask_type": AttnMaskType.no_mask}, "arbitrary"),
    ],
)
def test_calls_that_are_not_honoured_are_refused(kind: str, mask: Tensor | None, keywords: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        build(kind)(*qkv(), mask, **keywords)


@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
@pytest.mark.parametrize(
    ("keywords", "names"),
    [
        ({"packed_seq_params": documents()}, "packed documents with context parallelism"),
        ({"attn_mask_type": AttnMaskType.no_mask}, "attn_mask_type=no_mask with context parallelism"),
    ],
)
def test_calls_that_context_parallelism_does_not_honour_are_refused(
    alone: World, kind: str, keywords: dict, names: str
) -> None:
    groups = ProcessGroupCollection(cp=parallel_state.get_context_parallel_group())
    core = build(kind, {"context_parallel_size": 2}, pg_collection=groups)
    with pytest.raises(ValueError, match=names):
        core(*qkv(), None, **keywords)


def test_sdpa_refuses_a_causal_mask_that_it_would_align_top_left() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="32 queries and 48 keys"):
        build("fpa")(q[:32], k, v, None)


@pytest.mark.parametrize(
    ("packed", "names"),
    [
        (documents(ENDS[:-1]), "all 48 tokens"),
        (documents([0, 30, 20, TOKENS]), "rise from 0"),
        (documents(cu_seqlens_kv=torch.tensor([0, TOKENS])), "other keys than queries"),
    ],
)
def test_sdpa_refuses_documents_that_its_kernel_would_not_compute(packed: PackedSeqParams, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        build("fpa")(*(x[:, 0] for x in qkv()), None, packed_seq_params=packed)


def test_the_backend_that_ran_is_known() -> None:
    core = build("sagebwd")
    assert backend_that_ran(core) is None
    core(*qkv(), None)
    assert backend_that_ran(core) == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float16)])
def test_sdpa_uses_a_fused_kernel_on_a_gpu(batch: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(256, batch, heads, 64, device="cuda", dtype=dtype) for heads in (HEADS, GROUPS, GROUPS))
    core = build("fpa")
    out = core(q, k, v, None)
    assert core.backend in ("SDPA CUDNN_ATTENTION", "SDPA FLASH_ATTENTION")
    expected = exact(q.cpu(), k.cpu(), v.cpu(), causal=True, scale=64**-0.5)
    assert (out.cpu() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "error"), [("fpa", 0.01), ("sagebwd", 0.05)])
def test_packed_documents_on_a_gpu_and_no_waiting_for_it(kind: str, error: float) -> None:
    shapes = [(TOKENS, heads, 64) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    do = torch.randn(TOKENS, HEADS * 64, device="cuda", dtype=torch.bfloat16)
    core = build(kind)
    pinned = documents().cu_seqlens_q.pin_memory()

    def run() -> tuple[Tensor, ...]:
        out = core(q, k, v, None, packed_seq_params=documents(cu_seqlens_q=pinned, cu_seqlens_kv=pinned))
        return out.detach(), *torch.autograd.grad(out, (q, k, v), do)

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exactly = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    parts = [
        exact(*(x[start:end, None] for x in exactly), causal=True, scale=64**-0.5)[:, 0]
        for start, end in pairwise(ENDS)
        if end > start
    ]
    out = torch.cat(parts)
    expected = out.detach(), *torch.autograd.grad(out, exactly, do.cpu().double())
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours.cpu() - theirs).norm() < error * theirs.norm()


@pytest.mark.gpu
def test_sdpa_never_falls_back_to_math_on_a_gpu() -> None:
    q, k, v = (torch.randn(64, 1, heads, 64, device="cuda") for heads in (HEADS, GROUPS, GROUPS))
    with pytest.raises(ValueError, match="bf16"):
        build("fpa")(q, k, v, None)
    with pytest.raises(ValueError, match=r"FlashAttention, which does not take torch\.float32"):
        build("fpa")(q[:TOKENS, 0], k[:TOKENS, 0], v[:TOKENS, 0], None, packed_seq_params=documents())
