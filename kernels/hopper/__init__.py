"""Kernels for Hopper (sm_90a) in Gluon: warp-specialised, with TMA and asynchronous INT8 `wgmma`. NOTES.md is the log.

They compute what the portable kernels beside them compute; `refusal` says which calls they leave to those, and `scores`
which ones with products="scores".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels.common import padded_dim

SWITCH = "SAGEBWD_HOPPER"


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
    if config.products != "all":
        return "they compute P V in INT8"
    if window:
        return "they take no window"
    if packed:
        return "they take no packed documents"
    return None


def slower(least: float, queries: int, keys: int, causal: bool) -> str | None:
    """Why such a call is left to the portable kernels though these could take it; None: it is not.

    least: the keys that a query has on average from which on these kernels are the faster ones (`tuning`). queries,
    keys: tokens of a head. SAGEBWD_HOPPER=1 takes them for all they can do, 0 for nothing.
    """
    asked = os.environ.get(SWITCH)
    if asked == "0":
        return f"{SWITCH}=0 asks for that"
    if asked != "1" and (keys - queries / 2 if causal else keys) < least:
        return f"they are slower where a query has fewer than {least:,} keys on average"
    return None


@contextmanager
def switched(choice: str | None) -> Iterator[None]:
    """Inside, SAGEBWD_HOPPER is "1" (wherever these kernels can), "0" (nowhere), or None: not set, as users have it."""
    before = os.environ.pop(SWITCH, None)
    try:
        if choice is not None:
            os.environ[SWITCH] = choice
        yield
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before
