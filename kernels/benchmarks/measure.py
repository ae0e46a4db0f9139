"""Time and memory of one attention on one shape, everything inside: quantisation, smoothing, launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from sagebwd.kernels.benchmarks.peers import Attention
from sagebwd.kernels.benchmarks.shapes import Shape

FLUSH = 256 << 20  # bytes written before each run: more than any L2 cache holds
BUDGET_MS, REPEATS = 40.0, (4, 30)  # of each figure


class Measurement(NamedTuple):
    shape: Shape
    attention: str
    forward_ms: float
    backward_ms: float
    both_ms: float
    peak_bytes: int  # forward + backward, on top of q, k, v and do
    saved_bytes: int  # kept from forward to backward, q, k, v and o included, each storage once


def measure(attention: Attention, shape: Shape, flush: torch.Tensor) -> Measurement:
    with attention.as_timed():
        return _measure(attention, shape, flush)


def _measure(attention: Attention, shape: Shape, flush: torch.Tensor) -> Measurement:
    q, k, v, do = shape.tensors()

    def forward() -> torch.Tensor:
        return attention.run(q, k, v, shape.causal)

    def both() -> object:
        return torch.autograd.grad(forward(), (q, k, v), do)

    peak, saved = _memory(forward, lambda o: torch.autograd.grad(o, (q, k, v), do))
    o = forward()
    times = (
        median_ms(run, flush)
        for run in (forward, lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), both)
    )
    return Measurement(shape, attention.name, *times, peak, saved)


def median_ms(run: Callable[[], object], flush: torch.Tensor) -> float:
    """Median time between CUDA events around `run`, the L2 cache cold."""
    run()
    first = _timed(run, flush)
    torch.cuda.synchronize()
    once = max(first[0].elapsed_time(first[1]), 1e-3)
    repeats = int(min(max(BUDGET_MS / once, REPEATS[0]), REPEATS[1]))
    pairs = [_timed(run, flush) for _ in range(repeats)]
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def _timed(run: Callable[[], object], flush: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    begin.record()
    run()
    end.record()
    return begin, end


def _memory(forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]) -> tuple[int, int]:
    storages: dict[int, int] = {}

    def count(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    forward()  # what a first call allocates for good is not the shape's
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        o = forward()
    backward(o)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, sum(storages.values())
