"""Element-wise chains that torch.compile turns into one kernel each: norms, RoPE, cross-entropy.

Without Transformer Engine and Apex, Megatron runs each of their operations as a kernel of its own, and a training step
of a model of some hundred million parameters is then mostly reads and writes of activations. SwiGLU is Megatron's own
fusion (bias_activation_fusion). What is compiled rounds once where the separate kernels round after every operation:
a result may differ in the last bit, so whether to fuse is in the recipe (train.fusion).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm

from sagebwd.megatron.norm import RMSNorm

BACKEND = "inductor"
SHAPES = 64  # of one function: hidden states, queries, keys; with and without gradients; the last validation batch


class FusedRMSNorm(RMSNorm):
    """RMSNorm in one kernel forward, and with its reductions in as few as they allow backward."""

    def forward(self, x: Tensor) -> Tensor:
        return compiled(_norm)(x, self.weight, self.eps)


@contextlib.contextmanager
def fused_rope() -> Iterator[None]:
    """Megatron's RoPE compiled, for forward passes inside. It has no switch of its own without Transformer Engine."""
    original = rope_utils._apply_rotary_pos_emb_bshd

    def rotate(t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, **options: Any) -> Tensor:
        unusual = rotary_interleaved or freqs.shape[-1] != t.shape[-1] or options.pop("mscale", 1.0) != 1.0
        if unusual or any(options.values()):
            raise ValueError("fused RoPE is plain RoPE over the whole head: set train.fusion to off")
        # Outside: a cosine for every element of every head would cost more than its memory traffic
        return compiled(_rotate)(t, torch.cos(freqs).to(t.dtype), torch.sin(freqs).to(t.dtype))

    rope_utils._apply_rotary_pos_emb_bshd = rotate
    try:
        yield
    finally:
        rope_utils._apply_rotary_pos_emb_bshd = original


def fused_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token, [tokens, batch] FP32, of logits [tokens, batch, vocabulary] of any float dtype.

    Neither direction writes an FP32 copy of the logits, and the backward keeps no softmax: it recomputes it.
    """
    return compiled(_cross_entropy)(logits, labels)


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled for each shape it meets, whole or not at all: it never falls back to separate kernels by itself."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    return torch.compile(function, backend=BACKEND, dynamic=False, fullgraph=True)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight.shape, weight, eps)


def _rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = t.chunk(2, dim=-1)
    return t * cos + torch.cat((-second, first), dim=-1) * sin


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.flatten(0, -2).float()
    return cross_entropy(rows, labels.flatten(), reduction="none").view_as(labels)
