"""The two attentions of an experiment behind Megatron-core's core-attention contract.

Query [tokens, batch, heads / TP, dim], key and value [tokens, batch, kv_heads / TP, dim] after QK-norm and RoPE; the
value is a strided view of the fused QKV projection. Output [tokens, batch, heads / TP * dim]. Neither module copies its
inputs, expands grouped keys and values, or has parameters. What they do not honour they refuse, by ValueError with the
reason.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sagebwd.attention import QuantConfig, function, sage_attention

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
        """Megatron's keywords. cp_comm_type and pg_collection matter to context parallelism only."""
        super().__init__()
        window = config.window_size
        refused = (
            (attention_type != "self", f"attention_type={attention_type!r}: self-attention only"),
            (config.attention_dropout > 0, f"attention_dropout={config.attention_dropout}: set it to 0"),
            (window is not None, f"window_size={window}: set it to None"),
            (config.softmax_type != "vanilla", f"softmax_type={config.softmax_type!r}: only 'vanilla'"),
            (config.apply_query_key_layer_scaling, "apply_query_key_layer_scaling: set it to False"),
            (config.context_parallel_size > 1, f"context_parallel_size={config.context_parallel_size}: set it to 1"),
        )
        for bad, reason in refused:
            if bad:
                raise ValueError(f"{type(self).__name__} does not support {reason}")
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
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of one layer. With a causal mask type the mask is not read: it says the same thing at more cost."""
        name = type(self).__name__
        kind = attn_mask_type or self.attn_mask_type
        if attention_bias is not None:
            raise ValueError(f"{name} does not support attention_bias: pass None")
        if packed_seq_params is not None:
            raise ValueError(f"{name} does not support packed sequences: pass packed_seq_params=None")
        if kind not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ValueError(f"{name} does not support attn_mask_type={kind.name}: use causal or no_mask")
        if kind is AttnMaskType.no_mask and attention_mask is not None:
            raise ValueError(f"{name} does not support an arbitrary attention_mask: pass None, or use the causal type")
        return self.attend(query, key, value, causal=kind is AttnMaskType.causal).flatten(2)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """[tokens, batch, heads, dim] in the query's dtype."""


class SageBwdCoreAttention(_CoreAttention):
    """SageBwd: INT8 attention with an INT8 backward (see sagebwd.attention)."""

    def __init__(self, *, quant: QuantConfig, **megatron: Any) -> None:
        super().__init__(**megatron)
        self.quant = quant

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        self.backend = function._backend(query)
        return sage_attention(
            query, key, value, causal=causal, softmax_scale=self.softmax_scale, config=self.quant, layout="nbhd"
        )


class SDPACoreAttention(_CoreAttention):
    """FPA, full-precision attention: torch's SDPA; on a GPU cuDNN or FlashAttention, and never the math fallback."""

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
    params = cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    usable = {
        SDPBackend.CUDNN_ATTENTION: cuda.can_use_cudnn_attention,
        SDPBackend.FLASH_ATTENTION: cuda.can_use_flash_attention,
    }
    for backend in SDPA_PREFERENCE:
        if usable[backend](params, False):
            return backend
    raise ValueError(
        f"neither cuDNN nor FlashAttention takes {q.dtype} attention with head dim {q.shape[-1]} on "
        f"{torch.cuda.get_device_name(q.device)}: train in bf16 with a head dim of at most 256"
    )


def backend_that_ran(model: torch.nn.Module) -> str | None:
    """The backend of a model's attention in its last forward; None before the first."""
    return next((m.backend for m in model.modules() if isinstance(m, _CoreAttention)), None)
