"""The two attentions of an experiment behind Megatron-core's core-attention contract.

Query [tokens, batch, heads / TP, dim], key and value [tokens, batch, kv_heads / TP, dim] after QK-norm and RoPE; the
value is a strided view of the fused QKV projection. Output [tokens, batch, heads / TP * dim]. Packed documents
(packed_seq_params, Megatron's "thd") come and go without the batch dimension, and none sees another. With context
parallelism the tokens are this rank's, in zigzag order (`sagebwd.attention.zigzag`). Neither module copies its inputs,
expands grouped keys and values, or has parameters. What they do not honour they refuse, by ValueError with the reason.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from sagebwd.attention import QuantConfig, checks, context, sage_attention, sage_attention_packed
from sagebwd.attention.zigzag import Zigzag
from sagebwd.megatron.context_sdpa import CPU, GPU, context_sdpa

logger = logging.getLogger(__name__)

# The best full-precision kernels at hand, best first: a comparison against the math fallback would flatter SageBwd.
SDPA_PREFERENCE = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
CPU_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


class _CoreAttention(torch.nn.Module, ABC):
    """What both share: the refusals, and the layout of the output.

    backend: what computed the last call, for logs and meta.json; None before the first. No result depends on it.
    """

    backend: str | None = None

    def __init__(
        self,
        *,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        """Megatron's keywords. cp_comm_type and pg_collection (its `cp`) matter to context parallelism only."""
        super().__init__()
        window = config.window_size
        refused = (
            (attention_type != "self", f"attention_type={attention_type!r}: self-attention only"),
            (config.attention_dropout > 0, f"attention_dropout={config.attention_dropout}: set it to 0"),
            (window is not None, f"window_size={window}: set it to None"),
            (config.softmax_type != "vanilla", f"softmax_type={config.softmax_type!r}: only 'vanilla'"),
            (config.apply_query_key_layer_scaling, "apply_query_key_layer_scaling: set it to False"),
            (cp_comm_type not in (None, "all_gather"), f"cp_comm_type={cp_comm_type!r}: set it to 'all_gather'"),
        )
        for bad, reason in refused:
            if bad:
                raise ValueError(f"{type(self).__name__} does not support {reason}")
        self.zigzag = Zigzag.of(pg_collection.cp) if config.context_parallel_size > 1 else None
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of one layer. With a causal mask type the mask is not read: it says the same thing at more cost.

        packed_seq_params: cu_seqlens may be on the CPU (pinned, for a GPU), so that nobody who reads them waits for it.
        """
        name = type(self).__name__
        kind = attn_mask_type or self.attn_mask_type
        if attention_bias is not None:
            raise ValueError(f"{name} does not support attention_bias: pass None")
        if kind not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ValueError(f"{name} does not support attn_mask_type={kind.name}: use causal or no_mask")
        if kind is AttnMaskType.no_mask and attention_mask is not None:
            raise ValueError(f"{name} does not support an arbitrary attention_mask: pass None, or use the causal type")
        causal = kind is AttnMaskType.causal
        if self.zigzag:
            if packed_seq_params is not None or not causal:
                what = "packed documents" if packed_seq_params is not None else f"attn_mask_type={kind.name}"
                raise ValueError(
                    f"{name} does not support {what} with context parallelism: set context_parallel_size to 1"
                )
            return self.attend_context(query, key, value, self.zigzag).flatten(2)
        if packed_seq_params is None:
            return self.attend(query, key, value, causal=causal).flatten(2)
        packed = packed_seq_params
        if packed.qkv_format != "thd":
            raise ValueError(f"{name} does not support packed documents in qkv_format={packed.qkv_format!r}: use 'thd'")
        if packed.cu_seqlens_q_padded is not None or packed.cu_seqlens_kv_padded is not None:
            raise ValueError(
                f"{name} does not support padding between packed documents: leave cu_seqlens_q_padded and "
                "cu_seqlens_kv_padded None"
            )
        return self.attend_packed(query, key, value, packed, causal=causal).flatten(1)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """[tokens, batch, heads, dim] in the query's dtype."""

    @abstractmethod
    def attend_context(self, query: Tensor, key: Tensor, value: Tensor, zigzag: Zigzag) -> Tensor:
        """`attend` under a causal mask, of the tokens that this rank holds of sequences spread over several."""

    @abstractmethod
    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, *, causal: bool
    ) -> Tensor:
        """[tokens, heads, dim] in the query's dtype, each document by itself."""


class SageBwdCoreAttention(_CoreAttention):
    """SageBwd: INT8 attention with an INT8 backward (see sagebwd.attention)."""

    def __init__(self, *, quant: QuantConfig, **megatron: Any) -> None:
        super().__init__(**megatron)
        why_not = context.refusal(quant) if self.zigzag else None
        if why_not:
            raise ValueError(why_not)
        self.quant = quant

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        self.backend = checks.backend_for(query)
        return sage_attention(
            query, key, value, causal=causal, softmax_scale=self.softmax_scale, config=self.quant, layout="nbhd"
        )

    def attend_context(self, query: Tensor, key: Tensor, value: Tensor, zigzag: Zigzag) -> Tensor:
        self.backend = checks.backend_for(query)
        options = {"softmax_scale": self.softmax_scale, "config": self.quant}
        return context.sage_attention_context(query, key, value, zigzag=zigzag, **options)

    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, *, causal: bool
    ) -> Tensor:
        self.backend = checks.backend_for(query)
        return sage_attention_packed(
            query,
            key,
            value,
            cu_seqlens_q=packed.cu_seqlens_q.to(query.device, non_blocking=True),
            cu_seqlens_k=packed.cu_seqlens_kv.to(query.device, non_blocking=True),
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_k=packed.max_seqlen_kv,
            causal=causal,
            softmax_scale=self.softmax_scale,
            config=self.quant,
        )


class SDPACoreAttention(_CoreAttention):
    """FPA, full-precision attention: torch's SDPA; on a GPU cuDNN or FlashAttention, and never the math fallback.

    Packed documents: FlashAttention on a GPU (torch opens no cuDNN kernel for them), one SDPA a document on a CPU.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        if causal and query.shape[0] != key.shape[0]:
            # SDPA aligns its causal mask top left, Megatron's contract bottom right
            raise ValueError(
                f"SDPACoreAttention does not support a causal mask over {query.shape[0]} queries and "
                f"{key.shape[0]} keys: give it as many of each"
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [batch, heads, tokens, dim], strided
        options: dict[str, Any] = {
            "is_causal": causal,
            "scale": self.softmax_scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        kernels = [choose_sdpa_backend(q, k, v, causal=causal)] if q.is_cuda else list(CPU_KERNELS)
        self._announce(f"SDPA {kernels[0].name}" if q.is_cuda else "SDPA on the CPU", q)
        with sdpa_kernel(kernels):
            return scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)

    def attend_context(self, query: Tensor, key: Tensor, value: Tensor, zigzag: Zigzag) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        chosen = choose_sdpa_backend(q, k, v, causal=True) if q.is_cuda else None
        self._announce(f"SDPA {chosen.name}" if chosen else "SDPA on the CPU", q)
        return context_sdpa(q, k, v, zigzag, GPU[chosen] if chosen else CPU, self.softmax_scale).permute(2, 0, 1, 3)

    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, *, causal: bool
    ) -> Tensor:
        ends, of_keys = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_kv.tolist()
        if ends != of_keys:
            raise ValueError(
                f"SDPACoreAttention does not support documents of other keys than queries: cu_seqlens_q is {ends}, "
                f"cu_seqlens_kv {of_keys}; give both the same"
            )
        documents = list(pairwise(ends))
        tokens = query.shape[0]
        if (ends[0], ends[-1]) != (0, tokens) or any(end < start for start, end in documents):
            # FlashAttention would leave what is in no document uninitialised
            raise ValueError(f"SDPACoreAttention: cu_seqlens_q is {ends}: let it rise from 0 to all {tokens} tokens")
        if query.is_cuda:
            longest = max(end - start for start, end in documents)
            cu_seqlens = packed.cu_seqlens_q.to(query.device, non_blocking=True)
            out = flash_packed(query, key, value, cu_seqlens, longest, causal=causal, scale=self.softmax_scale)
            self._announce("varlen_attn FLASH_ATTENTION", query)
            return out
        parts = [
            self.attend(*(x[start:end, None] for x in (query, key, value)), causal=causal)
            for start, end in documents
            if end > start
        ]
        return torch.cat(parts)[:, 0]

    def _announce(self, backend: str, q: Tensor) -> None:
        """Say once a run, in the first layer, what runs."""
        if self.backend is None and self.layer_number == 1:
            logger.info("FPA runs on %s: %s, %s, head dim %d", q.device, backend, q.dtype, q.shape[-1])
        self.backend = backend


def choose_sdpa_backend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> SDPBackend:
    """The first of SDPA_PREFERENCE that takes CUDA tensors such as these, [batch, heads, tokens, dim].

    Raises ValueError if none does.
    """
    cuda = torch.backends.cuda
    params = _sdpa_params(q, k, v, causal)
    usable = {
        SDPBackend.CUDNN_ATTENTION: cuda.can_use_cudnn_attention,
        SDPBackend.FLASH_ATTENTION: cuda.can_use_flash_attention,
    }
    for backend in SDPA_PREFERENCE:
        if usable[backend](params, False):
            return backend
    raise ValueError(f"neither cuDNN nor FlashAttention takes {_call(q)}")


def flash_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, *, causal: bool, scale: float | None
) -> Tensor:
    """FlashAttention of packed documents on a GPU: q [tokens, heads, dim], k and v [tokens, kv_heads, dim].

    cu_seqlens: [documents + 1] int32 on the GPU, from 0 to all tokens; longest: the tokens of the longest document.
    Raises ValueError if it does not take such tensors.
    """
    if not torch.backends.cuda.can_use_flash_attention(
        _sdpa_params(*(x.transpose(0, 1)[None] for x in (q, k, v)), causal), False
    ):
        raise ValueError(f"packed documents need FlashAttention, which does not take {_call(q)}")
    known = signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in known:  # torch 2.11
        options |= {"scale": scale, "window_size": (-1, 0 if causal else -1)}
    elif scale is None:
        options["is_causal"] = causal
    else:
        raise ValueError(f"torch {torch.__version__} takes no softmax_scale with packed documents: install torch 2.11")
    if "enable_gqa" in known:  # torch 2.12; the kernel takes grouped heads in all of them
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def _sdpa_params(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> torch.backends.cuda.SDPAParams:
    return torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])


def _call(q: Tensor) -> str:
    """Of a call that is refused: what it is, and the remedy."""
    return (
        f"{q.dtype} attention with head dim {q.shape[-1]} on {torch.cuda.get_device_name(q.device)}: "
        "train in bf16 with a head dim of at most 256"
    )


def backend_that_ran(model: torch.nn.Module) -> str | None:
    """The backend of a model's attention in its last forward; None before the first."""
    return next((m.backend for m in model.modules() if isinstance(m, _CoreAttention)), None)
