"""Which calls with products="scores" Hopper's kernels for that take: `forward_scores` and `backward_scores`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels.hopper.descriptors import unreadable

BLOCK = 64  # the one quantisation block that these kernels know
DIMS = (64, 128)


def refusal(
    capability: int, dim: int, config: QuantConfig, *, window: bool, packed: bool, tensors: Mapping[str, Tensor] = {}
) -> str | None:
    """Why the portable kernels serve such a call, forward or backward, instead of these; None: these do.

    capability: 10 x major + minor. tensors: what the kernels read or write as it is, by name, [batch, heads, tokens,
    dim] of any strides; without them the answer is for ones that TMA takes.
    """
    why = _refusal(capability, dim, config, window, packed)
    if why is None:
        for name, x in tensors.items():
            if unreadable(x):
                return f"TMA takes rows that begin at multiples of 16 bytes, and {name} has strides {x.stride()}"
    return why


@cache  # asked at every call
def _refusal(capability: int, dim: int, config: QuantConfig, window: bool, packed: bool) -> str | None:
    if capability != 90:
        return f"they need compute capability 9.0, and the GPU has {capability / 10:.1f}"
    if dim not in DIMS:
        return f"they know head dims {' and '.join(map(str, DIMS))}"
    if packed or window:
        return "they take no packed documents" if packed else "they take no window"
    for name in ("block_q", "block_k"):
        if getattr(config, name) != BLOCK:
            return f"they know {name}={BLOCK}, not {getattr(config, name)}"
    return None


def backward_refusal(
    capability: int, dim: int, config: QuantConfig, *, window: bool, packed: bool, tensors: Mapping[str, Tensor] = {}
) -> str | None:
    """`refusal`, of a backward."""
    if torch.are_deterministic_algorithms_enabled():
        return "they add up dQ in any order, and torch.use_deterministic_algorithms asks for the same bits in every run"
    return refusal(capability, dim, config, window=window, packed=packed, tensors=tensors)
