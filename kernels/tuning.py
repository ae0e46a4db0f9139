"""Launch parameters: what cannot change a result. Pinned for a GPU model, never tuned at run time.

`rows` is the height of a kernel's tile on the axis that its programs divide. It may span several quantisation blocks
where every scale that the kernel makes is a row's own; otherwise it is the block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sagebwd.attention.config import QuantConfig

LOG2E = math.log2(math.e)


class Launch(NamedTuple):
    rows: int
    warps: int
    stages: int


def forward(device: torch.device, dp: int, config: QuantConfig) -> Launch:
    """The forward's P has a scale a row in every config; only Q-smoothing ties its tile to the block."""
    return Launch(config.block_q, 8 if dp > 128 else 4, 2)


def backward_kv(device: torch.device, dp: int, config: QuantConfig) -> Launch:
    return Launch(config.block_k, 8 if dp > 64 else 4, 2)


def backward_q(device: torch.device, dp: int, config: QuantConfig) -> Launch:
    return Launch(config.block_q, 8 if dp > 64 else 4, 2)
