"""What is measured against what: SageBwd's paths and the full-precision attentions of this machine, behind one call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sagebwd.attention import QuantConfig, sage_attention
from sagebwd.kernels import hopper, tuning

SAGE, PORTABLE, FLASH, CUDNN, FA4 = "SageBwd", "SageBwd portable", "SDPA flash", "SDPA cuDNN", "flash-attn-4"
OURS = (SAGE, PORTABLE)


class Attention(NamedTuple):
    """run(q, k, v, causal) -> o, all [batch, heads, tokens, dim], K and V with fewer heads for GQA; differentiable.

    Its backward too must be called inside `as_timed`, or `as_checked`, which choose SageBwd's kernels.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, bool], Tensor]

    @property
    def ours(self) -> bool:
        return self.name in OURS

    def as_timed(self) -> AbstractContextManager[None]:
        """As users have it: SageBwd with the kernels that are faster at a length, or with the portable ones alone."""
        return hopper.switched("0" if self.name == PORTABLE else None)

    def as_checked(self) -> AbstractContextManager[None]:
        """Short shapes on the kernels that are timed on long ones."""
        return hopper.switched("0" if self.name == PORTABLE else "1")


def attentions(config: QuantConfig) -> tuple[list[Attention], dict[str, str]]:
    """Those that can be imported here, ours first, and why others cannot. That one computes right, `gate` says.

    config: of SageBwd.
    """

    def sage(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return sage_attention(q, k, v, causal=causal, config=config)

    found = [
        Attention(SAGE, sage),
        *([Attention(PORTABLE, sage)] if tuning.capability(torch.device("cuda")) == 90 else []),
        Attention(FLASH, _sdpa(SDPBackend.FLASH_ATTENTION)),
        Attention(CUDNN, _sdpa(SDPBackend.CUDNN_ATTENTION)),
    ]
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        return found, {FA4: f"not installed ({error})"}

    def fa4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """It takes [batch, tokens, heads, dim], by strides."""
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return [*found, Attention(FA4, fa4)], {}


def _sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return run
