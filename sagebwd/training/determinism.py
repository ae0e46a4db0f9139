"""The switch train.deterministic: the same bits in every run on the same GPUs, each setting with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from sagebwd.training import environment


@contextlib.contextmanager
def active(deterministic: bool) -> Iterator[None]:
    """Before CUDA and NCCL are first used. Does nothing if `deterministic` is false."""
    if not deterministic:
        yield
        return
    environment.provide(environment.DETERMINISTIC)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    try:
        # An operation without a deterministic kernel raises. SDPA then leaves cuDNN out: its backward has none.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what was not written
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
