"""Time and memory of attentions on one shape, everything inside: quantisation, smoothing, launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from sagebwd.kernels.benchmarks.peers import Attention
from sagebwd.kernels.benchmarks.shapes import Shape

FLUSH = 256 << 20  # bytes written before each run: more than any L2 cache holds
BUDGET_MS, ROUNDS = 40.0, (5, 30)  # of each figure


Events = tuple[torch.cuda.Event, torch.cuda.Event]


class Measurement(NamedTuple):
    shape: Shape
    attention: str
    forward_ms: float
    backward_ms: float
    both_ms: float
    peak_bytes: int  # forward + backward, on top of q, k, v and do
    saved_bytes: int  # kept from forward to backward, q, k, v and o included, each storage once


def measure(attentions: Sequence[Attention], shape: Shape, flush: torch.Tensor) -> list[Measurement]:
    """All of them on the same tensors and in turn: a GPU at the limit of its power lowers its clocks within
    milliseconds, and whoever is timed after others would be slower by that."""
    q, k, v, do = shape.tensors()
    forwards = [partial(attention.run, q, k, v, shape.causal) for attention in attentions]

    def gradients(o: torch.Tensor, *, again: bool = False) -> object:
        return torch.autograd.grad(o, (q, k, v), do, retain_graph=again)

    memory, outputs = [], []
    for attention, forward in zip(attentions, forwards, strict=True):
        with attention.as_timed():
            memory.append(_memory(forward, gradients))
            outputs.append(forward())
    times = (
        medians_ms(list(zip(attentions, runs, strict=True)), flush)
        for runs in (
            forwards,
            [partial(gradients, o, again=True) for o in outputs],
            [lambda forward=forward: gradients(forward()) for forward in forwards],
        )
    )
    return [
        Measurement(shape, attention.name, *of_each, *bytes_)
        for attention, bytes_, *of_each in zip(attentions, memory, *times, strict=True)
    ]


def medians_ms(runs: Sequence[tuple[Attention, Callable[[], object]]], flush: torch.Tensor) -> list[float]:
    """Of each the median time between CUDA events, the L2 cache cold; one after the other, every second round from the
    last to the first."""
    _round(runs, flush)
    first = _milliseconds([_round(runs, flush)])
    rounds = int(min(max(BUDGET_MS / statistics.mean(x[0] for x in first), ROUNDS[0]), ROUNDS[1]))
    turns = [_round(runs[:: -1 if i % 2 else 1], flush) for i in range(rounds)]
    return [statistics.median(x) for x in _milliseconds([t[:: -1 if i % 2 else 1] for i, t in enumerate(turns)])]


def _round(runs: Sequence[tuple[Attention, Callable[[], object]]], flush: torch.Tensor) -> list[Events]:
    return [_timed(attention, run, flush) for attention, run in runs]


def _milliseconds(rounds: Sequence[Sequence[Events]]) -> list[list[float]]:
    """Of each run those of all rounds."""
    torch.cuda.synchronize()
    return [[begin.elapsed_time(end) for begin, end in of_one] for of_one in zip(*rounds, strict=True)]


def _timed(attention: Attention, run: Callable[[], object], flush: torch.Tensor) -> Events:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with attention.as_timed():
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
