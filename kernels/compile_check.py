"""Compile every kernel for each generation of GPU, with no GPU: it compiles, spills little, fits in shared memory.

    python -m sagebwd.kernels.compile_check [--arch 90 ...] [--full]     (or: make compile-check TRITON=3.6.0 FULL=1)

Without --full, a few configurations that cover every value of every option, and every one by some GPU generation.
Exit code 1 where a kernel does not compile or breaks a limit.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton

from sagebwd.attention import QuantConfig, triton_backend
from sagebwd.kernels import hopper, tuning
from sagebwd.kernels.compile_only import compile_only
from sagebwd.kernels.every_kernel import launch_context
from sagebwd.kernels.hopper.scores_rows import MOST_KEYS
from sagebwd.kernels.packing import Packed

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
TENSOR_MEMORY = 512  # columns

# Bytes a thread may keep in local memory because registers ran out, by kind of configuration (`kind`): about a quarter
# more than was seen with Triton 3.6.0 and 3.7.1. Spills cost time, not correctness.
SPILL_LIMIT = {
    "plain": 440,
    "project": 1000,
    "smooth_q": 1000,
    "blocks of 128": 2400,
    "dim over 128": 1600,
    "dim over 128, blocks of 128": 4800,
}
# Of the kernels for Hopper. With context parallelism the one for dV at D = 128 keeps two numbers there, which it stores
# before its loop and loads once after it.
HOPPER_SPILL_LIMIT, HOPPER_CONTEXT_SPILL_LIMIT = 0, 8
# The backward with products="scores" holds dK and dV of 64 keys at once: numbers that stay the same through its loops
# are kept there. As seen with Triton 3.6.0 and 3.7.1, 40 bytes at D = 128, two or three of these numbers loaded a tile,
# and 32 at D = 64, none loaded in the loops.
HOPPER_SCORES_SPILL_LIMIT = 80
# Its forward: the address of shared memory and a number of an item, 16 bytes as seen, not loaded in the loop without a
# mask.
HOPPER_SCORES_FORWARD_SPILL_LIMIT = 24


class Job(NamedTuple):
    arch: int
    dim: int
    dtype: torch.dtype
    mask: str  # full, causal or window
    config: QuantConfig
    packed: bool = False
    context: bool = False  # one of two context-parallel ranks
    tokens: int = 256

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        form = " packed" * self.packed + " context" * self.context + f" {self.tokens} tokens" * (self.tokens != 256)
        return f"sm_{self.arch} D={self.dim} {dtype} {self.mask}{form} ({self.config.summary()})"


class Outcome(NamedTuple):
    job: Job
    kernels: list[tuple[str, int, int, int, int, int]]  # name, warps, stages, registers, bytes spilled, bytes shared
    problems: list[str]
    seconds: float


def kind(job: Job) -> str:
    big = "blocks of 128" if 128 in (job.config.block_q, job.config.block_k) else ""
    wide = "dim over 128" if job.dim > 128 else ""
    rule = "project" if job.config.project else "smooth_q" if job.config.smooth_q else "plain"
    return ", ".join(filter(None, (wide, big))) or rule


def subset(arch: int) -> list[Job]:
    """The default at D = 128, and every third of the others: which ones, differs by architecture and Triton version. On
    sm_90 also each form of the kernels that are for it alone."""
    bf16, fp16 = torch.bfloat16, torch.float16
    others = [
        Job(arch, 64, bf16, "full", QuantConfig()),
        Job(arch, 128, fp16, "full", QuantConfig(granularity="tile", delta="matched", smooth_k=False)),
        Job(arch, 64, fp16, "window", QuantConfig(granularity="tile"), packed=True),
        Job(arch, 72, bf16, "causal", QuantConfig(block_q=128, block_k=32, delta="matched")),
        Job(arch, 64, bf16, "causal", QuantConfig(smooth_q=True), packed=True),
        Job(arch, 128, bf16, "window", QuantConfig(block_q=32, block_k=128)),
        Job(arch, 256, bf16, "causal", QuantConfig()),
        Job(arch, 64, bf16, "causal", QuantConfig(project=True)),
        Job(arch, 128, bf16, "causal", QuantConfig(delta="matched"), context=True),
        Job(arch, 128, bf16, "causal", QuantConfig(products="scores")),
    ]
    turn = ARCHITECTURES.index(arch) + int(triton.__version__.split(".")[1])
    hopper = [
        Job(90, dim, bf16, mask, QuantConfig(block_k=k))
        for dim, mask, k in ((128, "full", 64), (64, "causal", 64), (128, "causal", 128), (64, "full", 128))
    ]
    hopper += [Job(90, dim, bf16, "causal", QuantConfig(), context=True) for dim in (64, 128)]
    hopper += [
        Job(90, dim, dtype, mask, QuantConfig(products="scores"))
        for dim, dtype, mask in ((128, bf16, "full"), (128, fp16, "causal"), (64, bf16, "causal"), (64, fp16, "full"))
    ]
    hopper.append(Job(90, 128, bf16, "causal", QuantConfig(products="scores"), tokens=MOST_KEYS + 1))  # FP32 sums of dQ
    return [Job(arch, 128, bf16, "causal", QuantConfig()), *others[turn % 3 :: 3], *(hopper if arch == 90 else ())]


def full(arch: int) -> Iterator[Job]:
    """Every value of every option with every other's at the default blocks; and every pair of blocks."""
    options = ((64, 72, 128, 256), (torch.bfloat16, torch.float16), ("full", "causal", "window"), (False, True))
    for dim, dtype, mask, packed in itertools.product(*options):
        for rules in itertools.product(("row", "tile"), ("stale", "matched"), (True, False), (True, False)):
            names = ("granularity", "delta", "smooth_k", "smooth_q")
            yield Job(arch, dim, dtype, mask, QuantConfig(**dict(zip(names, rules, strict=True))), packed)
        yield Job(arch, dim, dtype, mask, QuantConfig(products="scores"), packed)
    for dim, mask, granularity in itertools.product((64, 128, 256), ("full", "causal", "window"), ("row", "tile")):
        yield Job(arch, dim, torch.bfloat16, mask, QuantConfig(granularity=granularity, project=True))
    rules = ({}, {"smooth_q": True}, {"products": "scores"})
    for dim, q, k, rule in itertools.product((64, 128, 256), (32, 64, 128), (32, 64, 128), rules):
        yield Job(arch, dim, torch.bfloat16, "causal", QuantConfig(block_q=q, block_k=k, **rule))
    for dim, dtype, granularity, delta in itertools.product(*options[:2], ("row", "tile"), ("stale", "matched")):
        yield Job(arch, dim, dtype, "causal", QuantConfig(granularity=granularity, delta=delta), context=True)


def check(job: Job) -> Outcome:
    """Compiles all that forward and backward launch. A configuration that `tuning` refuses there is none."""
    start = time.monotonic()
    if tuning.refusal(job.arch, job.dim, job.config):
        return Outcome(job, [], [], 0.0)
    torch.set_num_threads(1)
    try:
        with compile_only(job.arch) as compiled:
            for choice in ("0", "1") if job.arch == 90 else ("0",):  # all that can be launched there
                with hopper.switched(choice):
                    _launch(job)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        return Outcome(job, [], [f"does not compile: {reason}"], time.monotonic() - start)
    problems, limit, spill = [], tuning.SHARED_LIMIT.get(job.arch, tuning.SMALL), SPILL_LIMIT[kind(job)]
    for c in compiled:
        if c.shared > limit:
            problems.append(f"{c.name} needs {c.shared:,} bytes of shared memory of {limit:,}")
        if c.tensor > TENSOR_MEMORY:
            problems.append(f"{c.name} needs {c.tensor} columns of tensor memory of {TENSOR_MEMORY}")
        if c.added_waits > 0 and "hopper" in c.name:
            problems.append(f"{c.name}: ptxas added {c.added_waits} waits, so that no product overlaps anything")
        if c.unwritten:
            registers = ", ".join(c.unwritten)
            problems.append(f"{c.name}: reads {registers} where nothing has written them: a mistake of ptxas")
        allowed = spill
        if "hopper" in c.name:
            allowed = HOPPER_CONTEXT_SPILL_LIMIT if job.context else HOPPER_SPILL_LIMIT
            if c.name == "hopper_backward_scores":
                allowed = HOPPER_SCORES_SPILL_LIMIT
            elif c.name == "hopper_forward_scores":
                allowed = HOPPER_SCORES_FORWARD_SPILL_LIMIT
        if c.spilled > allowed:
            problems.append(f"{c.name} spills {c.spilled:,} bytes a thread, and {kind(job)!r} may spill {allowed:,}")
    kernels = [(c.name.lstrip("_"), c.warps, c.stages, c.registers, c.spilled, c.shared) for c in compiled]
    return Outcome(job, kernels, problems, time.monotonic() - start)


def _launch(job: Job) -> None:
    """All kernels of a forward and a backward."""
    tokens = 512 if job.context else job.tokens
    q, do = (torch.zeros(1, 2, tokens, job.dim, dtype=job.dtype) for _ in range(2))
    k, v = (torch.zeros(1, 1, tokens, job.dim, dtype=job.dtype) for _ in range(2))
    if job.context:
        launch_context(q, k, v, do, job.config)
        return
    args: dict = {"causal": job.mask != "full", "softmax_scale": 0.125, "config": job.config}
    args["window"] = 100 if job.mask == "window" else None
    if job.packed:
        documents = torch.tensor([0, 128, 256], dtype=torch.int32)
        args["packed"] = Packed(documents, documents, 128, 128)
    _, saved = triton_backend.forward(q, k, v, **args)
    triton_backend.backward(do, saved, **args)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compile_check", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--full", action="store_true", help="every configuration: some two hours on 2 cores")
    options = parser.parse_args(argv)
    jobs = [job for arch in options.arch for job in (full(arch) if options.full else subset(arch))]
    workers = min(len(jobs), os.cpu_count() or 1)
    print(f"Triton {triton.__version__}: {len(jobs)} configurations on {workers} cores", flush=True)
    start = time.monotonic()
    outcomes = []
    # fork: the workers have torch and Triton already; the parent holds no GPU and no threads
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for outcome in pool.imap_unordered(check, jobs, chunksize=1):
            outcomes.append(outcome)
            for problem in outcome.problems:
                print(f"error: {outcome.job}: {problem}", flush=True)
            if options.full and len(outcomes) % 50 == 0:
                print(f"  {len(outcomes)} of {len(jobs)}, {time.monotonic() - start:.0f} s", flush=True)
    _print_worst(outcomes)
    broken = sum(bool(outcome.problems) for outcome in outcomes)
    refused = sum(not outcome.kernels and not outcome.problems for outcome in outcomes)
    print(f"{len(jobs) - broken - refused} good, {refused} refused before launch, {broken} broken, ", end="")
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if broken else 0


def _print_worst(outcomes: list[Outcome]) -> None:
    """The worst of each kernel by architecture and kind of configuration."""
    worst: dict[tuple[int, str, str], list[int]] = {}
    for outcome in outcomes:
        for name, _, _, *needs in outcome.kernels:
            key = (outcome.job.arch, kind(outcome.job), name)
            worst[key] = [max(pair) for pair in zip(worst.get(key, (0, 0, 0)), needs, strict=True)]
    print("arch    configuration                kernel             registers  spilled, B   shared, B    of")
    for (arch, of_kind, name), (registers, spilled, shared) in sorted(worst.items()):
        if spilled or shared > 16 << 10:  # the rest is of no interest
            limit = tuning.SHARED_LIMIT.get(arch, tuning.SMALL)
            print(f"sm_{arch:<4} {of_kind:<28} {name:<18} {registers:>9} {spilled:>11,} {shared:>11,} {limit:>9,}")


if __name__ == "__main__":
    sys.exit(main())
