"""RMSNorm for Megatron-core layers, without Transformer Engine or Apex."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), statistics in FP32.

    x, y: [..., hidden_size], any float dtype; weight: [hidden_size]. Takes the keywords by which Megatron-core builds
    its norms. Unlike Megatron's WrappedTorchNorm it can be used with sequence parallelism: each rank then normalises a
    part of the tokens, and the mark on the weight makes Megatron sum its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"RMSNorm stands for normalization='RMSNorm' with a gain around one, not for "
                f"{config.normalization!r} with layernorm_zero_centered_gamma={config.layernorm_zero_centered_gamma}"
            )
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        # torch computes the mean square in FP32 whatever the input's dtype; on a GPU it is one fused kernel
        return rms_norm(x, self.weight.shape, self.weight, self.eps)
