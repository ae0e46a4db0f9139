"""Kernels are compiled before the first step, so that no step's time holds a compiler's."""

from __future__ import annotations

import time

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import distributed

from sagebwd.training.engine import Batch, Engine


def compile_kernels(engine: Engine, batch: Batch) -> float:
    """One forward and backward, its gradients thrown away. Returns the seconds until all ranks are done.

    batch: a micro-batch of a training step's shape. Called on every rank, before the first step of a process. It leaves
    no trace in weights, gradients or random states: a run with it and one without are the same bitwise.
    """
    begin = time.monotonic()
    cuda = torch.cuda.is_available()
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None, get_cuda_rng_tracker().get_states()
    engine.rehearse(batch)
    torch.set_rng_state(before[0])
    if cuda:
        torch.cuda.set_rng_state(before[1])
    get_cuda_rng_tracker().set_states(before[2])
    distributed.barrier()  # the slowest rank's compiler must not count as a step's hang
    if cuda:
        torch.cuda.synchronize()
    return time.monotonic() - begin
