"""Kernels for Hopper (sm_90a) in Gluon: warp-specialised, with TMA and asynchronous INT8 `wgmma`. NOTES.md is the log.

They compute what the portable kernels beside them compute; `refusal` says which calls they leave to those.
"""

from __future__ import annotations

import os

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels.common import padded_dim


def refusal(capability: int, dim: int, config: QuantConfig, *, window: bool, packed: bool) -> str | None:
    """Why these kernels do not run such a call; None: they do.

    capability: 10 x major + minor. window, packed: whether the call has a window, or packed documents.
    """
    if capability != 90:
        return f"they need compute capability 9.0, and the GPU has {capability / 10:.1f}"
    if padded_dim(dim) not in (64, 128):
        return "they take head dims from 40 to 128"
    if config.block_k not in (64, 128):
        return "they take block_k=64 or 128"
    if config.smooth_q:
        return "they do not smooth Q"
    if window:
        return "they take no window"
    if packed:
        return "they take no packed documents"
    return None


def not_asked_for() -> str | None:
    """Why the environment leaves calls to the portable kernels: until these have passed tests/gpu, they must be asked
    for."""
    if os.environ.get("SAGEBWD_HOPPER") == "1":
        return None
    return "their tests on a GPU are due, and SAGEBWD_HOPPER=1 asks for them"
