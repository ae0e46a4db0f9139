"""Sweep launch parameters and quantisation blocks on the GPU at hand: the figures behind `tuning.py`'s pins.

    python -m sagebwd.kernels.benchmarks.sweep --dims 64 128 --length 8192

Each kernel alone, on random bf16 inputs, median of CUDA-event times. What compiles is compiled first, on every core.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator

import torch

from sagebwd.attention import QuantConfig, triton_backend
from sagebwd.kernels import tuning
from sagebwd.kernels.benchmarks.shapes import TOKENS, WIDTH
from sagebwd.kernels.tuning import KeyLaunch, Launch

# The key kernel for dK and dV at once, for dK, and for dV.
PARTS = {"backward_kv": (True, True), "backward_k": (True, False), "backward_v": (False, True)}
KERNELS = ("forward", *PARTS, "backward_q")
PINS = {name: getattr(tuning, name) for name in ("forward", "backward_kv", "backward_q")}


def candidates(kernel: str) -> Iterator[tuple[QuantConfig, Launch]]:
    for block_q, block_k, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4)):
        config = QuantConfig(block_q=block_q, block_k=block_k)
        own = block_k if kernel in PARTS else block_q
        for rows in {own, 128}:
            yield config, Launch(rows, warps, stages)


def stage(kernel: str, tensors: list[torch.Tensor], config: QuantConfig, causal: bool) -> Callable[[], object]:
    q, k, v, do = tensors
    args = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5, "config": config}
    if kernel == "forward":
        return lambda: triton_backend.forward(q, k, v, **args)
    _, saved = triton_backend.forward(q, k, v, **args)
    return lambda: triton_backend.backward(do, saved, **args)


def pin(kernel: str, launch: Launch | None) -> None:
    """Launch `kernel` so, and the others as pinned; None: all as pinned. A part of the key kernel is launched alone."""
    for name, pinned in PINS.items():
        setattr(tuning, name, pinned)
    if launch is not None and kernel in PARTS:
        tuning.backward_kv = lambda *_: (KeyLaunch(launch, *PARTS[kernel]),)
    elif launch is not None:
        setattr(tuning, kernel, lambda *_: launch)


def compiled_name(kernel: str) -> str:
    return "_backward_kv" if kernel in PARTS else f"_{kernel}"


def compile_job(job: tuple[str, int, int, bool, QuantConfig, Launch, int]) -> str:
    from sagebwd.kernels.compile_only import compile_only

    kernel, dim, length, causal, config, launch, capability = job
    torch.set_num_threads(1)
    tensors = [torch.zeros(TOKENS // length, WIDTH // dim, length, dim, dtype=torch.bfloat16) for _ in range(4)]
    pin(kernel, launch)
    try:
        with compile_only(capability) as compiled:
            stage(kernel, tensors, config, causal)()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return next(f"{c.registers} regs, {c.spilled} spilled" for c in compiled if c.name == compiled_name(kernel))


def kernel_times(run: Callable[[], object], repeats: int = 12) -> dict[str, float]:
    """Median milliseconds of each kernel that `run` launches, by the profiler."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        times.setdefault(event.name, []).append(event.device_time_total / 1e3)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--causal", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    for dim, causal, kernel in itertools.product(options.dims, options.causal, options.kernels):
        jobs = [(kernel, dim, options.length, bool(causal), c, l, capability) for c, l in candidates(kernel)]
        with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
            notes = pool.map(compile_job, jobs, chunksize=1)
        shape = (TOKENS // options.length, WIDTH // dim, options.length, dim)
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        rows = []
        for job, note in zip(jobs, notes, strict=True):
            if "Error" in note:
                continue
            pin(kernel, job[5])
            try:
                ms = kernel_times(stage(kernel, tensors, job[4], bool(causal)))[compiled_name(kernel)]
            except Exception as error:
                note = str(error).splitlines()[0][:60]
                ms = float("inf")
            rows.append((ms, job[4].block_q, job[4].block_k, *job[5], note))
        pin(kernel, None)
        print(f"\n{torch.cuda.get_device_name()} D={dim} N={options.length} causal={causal} {kernel}")
        print("ms, block_q, block_k, rows, warps, stages, resources")
        for row in sorted(rows)[:10]:
            print(f"{row[0]:.3f}", *row[1:], sep=", ", flush=True)


if __name__ == "__main__":
    main()
