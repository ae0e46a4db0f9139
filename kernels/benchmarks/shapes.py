"""The shapes that are measured: 16,384 tokens and 2,048 channels in all, as a training step of one model has them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

TOKENS, WIDTH = 16384, 2048
DIMS, GROUPS = (64, 128), (1, 4)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS, QUICK_GROUPS = (1024, 4096, 16384), (1,)


class Shape(NamedTuple):
    dim: int
    causal: bool
    group: int  # query heads a key/value head
    length: int

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.length)

    @property
    def heads(self) -> int:
        return WIDTH // self.dim

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group

    @property
    def kind(self) -> str:
        """All but the length, in words."""
        mask = "causal" if self.causal else "full"
        return f"D={self.dim}, {mask}" + (f", GQA {self.group}" if self.group > 1 else "")

    def flops(self) -> float:
        """Of the forward, by the usual count, half if causal; the backward's are 2.5 times that."""
        return 4.0 * self.batch * self.heads * self.length**2 * self.dim / (2 if self.causal else 1)

    def tensors(self, batch: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (which require gradients) and do, bf16 [batch, heads, tokens, dim]; keys have a common offset."""
        generator = torch.Generator("cuda").manual_seed(0)

        def new(heads: int) -> Tensor:
            shape = (batch or self.batch, heads, self.length, self.dim)
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        q, k, v, do = new(self.heads), new(self.kv_heads), new(self.kv_heads), new(self.heads)
        k += new(self.kv_heads)[:1, :, :1]
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def shapes(quick: bool) -> list[Shape]:
    lengths, groups = (QUICK_LENGTHS, QUICK_GROUPS) if quick else (LENGTHS, GROUPS)
    grid = itertools.product(DIMS, (True, False), groups, lengths)
    return [Shape(dim, causal, group, length) for dim, causal, group, length in grid]
