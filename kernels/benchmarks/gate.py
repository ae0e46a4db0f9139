"""Correctness before speed: every attention that will be measured, on shapes small enough for the truth in FP64."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.attention import QuantConfig, reference
from sagebwd.kernels.benchmarks.peers import attentions
from sagebwd.kernels.benchmarks.shapes import Shape

LENGTHS = (512, 1024)  # for one batch entry; with these, every kernel that is timed later is compiled here
NAMES = ("o", "dq", "dk", "dv")
# Rel-L2. SageBwd differs from its reference by the order of sums; the reference differs from the truth by
# quantisation, and SageBwd may by a tenth more. A 16-bit attention errs by 3e-3 or so.
AGAINST_REFERENCE, SLACK, FULL_PRECISION = 5e-3, 1.1, 1e-2


class Result(NamedTuple):
    shape: Shape
    attention: str
    against_truth: dict[str, float]  # Rel-L2 of o, dq, dk, dv
    against_reference: dict[str, float] | None  # ours only
    failure: str  # empty: passed
    unavailable: str  # why a peer does not run this kind of shape; empty: it runs


def gate(kinds: list[Shape], config: QuantConfig) -> list[Result]:
    """Checks each attention on each kind of shape (the length is the gate's own), several processes at a time: they
    leave what Triton compiles in its cache, which the measurement then reads."""
    jobs = [kind._replace(length=length) for kind in kinds for length in LENGTHS]
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1, 8)) as pool:
        return [result for results in pool.imap(partial(check, config=config), jobs, chunksize=1) for result in results]


def check(shape: Shape, config: QuantConfig) -> list[Result]:
    torch.set_num_threads(1)
    q, k, v, do = shape.tensors(batch=1)
    truth = _truth(q, k, v, do, shape.causal)
    specified = _specified(q, k, v, do, shape.causal, config)
    limits = {name: SLACK * error for name, error in _errors(specified, truth).items()}
    results = []
    for attention in attentions(config)[0]:
        try:
            with attention.as_checked():
                o = attention.run(q, k, v, shape.causal)
                actual = (o.detach(), *torch.autograd.grad(o, (q, k, v), do))
        except Exception as error:
            if attention.ours:
                raise
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            results.append(Result(shape, attention.name, {}, None, "", reason))
            continue
        errors = _errors(actual, truth)
        if not attention.ours:
            failure = _over(errors, dict.fromkeys(NAMES, FULL_PRECISION), "the truth in FP64")
            results.append(Result(shape, attention.name, errors, None, failure, ""))
            continue
        distance = _errors(actual, specified)
        failure = _over(distance, dict.fromkeys(NAMES, AGAINST_REFERENCE), "the reference")
        failure = failure or _over(errors, limits, "the truth in FP64")
        results.append(Result(shape, attention.name, errors, distance, failure, ""))
    return results


def _over(errors: dict[str, float], limits: dict[str, float], what: str) -> str:
    bad = [f"{name} {e:.2e} (at most {limits[name]:.2e})" for name, e in errors.items() if not e <= limits[name]]
    return f"Rel-L2 to {what}: {', '.join(bad)}" if bad else ""


def _errors(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> dict[str, float]:
    pairs = zip(NAMES, actual, expected, strict=True)
    return {name: ((a.double() - e.double()).norm() / e.double().norm()).item() for name, a, e in pairs}


def _specified(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, config: QuantConfig) -> tuple[Tensor, ...]:
    args = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5, "config": config}
    with torch.no_grad():
        o, saved = reference.forward(q, k, v, **args)
        grads = reference.backward(do, v, o, saved, n=k.shape[-2], **args)
    return (o, *(grad.to(q.dtype) for grad in grads))


def _truth(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """FP64 through autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    o = s.softmax(-1) @ v.repeat_interleave(group, 1)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), do.double()))
