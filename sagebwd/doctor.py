"""`sagebwd doctor`: what is installed, which backend a call gets here and why, do the kernels compute right."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from sagebwd import machine
from sagebwd.attention import QuantConfig, sage_attention
from sagebwd.attention.checks import backend_for
from sagebwd.errors import UserError
from sagebwd.terminal import GRACE_SECONDS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = (32, 64, 72, 80, 96, 112, 128, 192, 256)
MASKS = {"full": (False, None), "causal": (True, None), "window": (True, 128)}  # causal, window
PACKAGES = (*machine.PACKAGES, "sentencepiece", "tensorboard", "flash-attn-4")
INTERPRETED = "TRITON_INTERPRET=1 asks for the kernels, interpreted"
SELF_TEST_SECONDS = 300  # it takes some ten; a machine that compiles for minutes has another trouble


class Answer(NamedTuple):
    backend: str  # empty: refused
    reason: str  # why it is refused, or why it is not a faster one; on a GPU, which kernels


def run() -> int:
    """Print the findings. 0: all is well; 1: the self-test failed."""
    gpus = machine.gpus()
    _section("Versions", _versions())
    _section("GPUs", _gpus(gpus))
    devices = [torch.device("cuda", gpu.index) for gpu in gpus] or [torch.device("cpu")]
    _section("SageBwd runs on", itertools.chain.from_iterable(map(_dispatch, devices)))
    _section("Full precision (torch SDPA) runs on", itertools.chain.from_iterable(map(_sdpa, devices)))
    _section("Training", _training())
    failed = []
    _section("Self-test: the kernels against the reference", _self_test(failed))
    print("\nNot well: the kernels do not agree with the reference." if failed else "\nAll is well.")
    return 1 if failed else 0


def _section(title: str, lines: Iterable[str]) -> None:
    print(f"\n{title}", flush=True)
    for line in lines:
        print(f"  {line}", flush=True)


def _versions() -> Iterator[str]:
    found = machine.versions(PACKAGES)
    yield ", ".join(f"{name} {number}" for name, number in found.items() if number)
    missing = [name for name, number in found.items() if not number]
    if missing:
        yield f"not installed: {', '.join(missing)}"
    yield f"driver {machine.driver() or 'none'}, CUDA {torch.version.cuda or 'none'}, commit {machine.commit()}"


def _gpus(gpus: list[machine.Gpu]) -> Iterator[str]:
    if not gpus:
        yield f"none: {_why_no_gpu()}"
    for gpu in gpus:
        yield (
            f"{gpu.index}: {gpu.name}, sm_{gpu.capability}, {gpu.memory / 2**30:.0f} GiB, "
            f"{gpu.shared >> 10} KiB of shared memory a block"
        )


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        build = f"torch {torch.__version__} is a build without CUDA"
        return f"{build}: run `make setup` anew" if machine.driver() else f"no NVIDIA driver here, and {build}"
    return "torch sees no NVIDIA GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"


def _dispatch(device: torch.device) -> Iterator[str]:
    """Which backend each (dtype, dim, mask) gets: calls alike in their answer on one line."""
    answers: dict[Answer, dict[str, dict[int, list[str]]]] = {}
    for dtype, dim, mask in itertools.product(DTYPES, DIMS, MASKS):
        by_dtype = answers.setdefault(answer(device, dtype, dim, mask), {})
        by_dtype.setdefault(str(dtype).removeprefix("torch."), {}).setdefault(dim, []).append(mask)
    for found, by_dtype in answers.items():
        calls: dict[str, list[str]] = {}
        for dtype, by_dim in by_dtype.items():
            calls.setdefault(_dims_and_masks(by_dim), []).append(dtype)
        for which, dtypes in calls.items():
            yield f"{device}, {', '.join(dtypes)}, {which}: {found.backend or 'refused'}"
        for part in found.reason.split("; "):
            yield f"  {part}"


def answer(device: torch.device, dtype: torch.dtype, dim: int, mask: str) -> Answer:
    """What the operator itself says of such a call: of no tokens, so that nothing is computed."""
    causal, window = MASKS[mask]
    x = torch.empty(1, 1, 0, dim, device=device, dtype=dtype)
    log = logging.getLogger("sagebwd")
    level = log.level
    log.setLevel(logging.WARNING)  # the operator announces each kind of call
    try:
        sage_attention(x, x, x, causal=causal, window=window)
        backend = backend_for(x)
    except ValueError as error:
        return Answer("", str(error))
    finally:
        log.setLevel(level)
    if backend == "triton":
        return Answer(backend, _kernels(x, window))
    return Answer(backend, INTERPRETED if backend == "triton-interpreter" else f"not the kernels: {_why_no_gpu()}")


def _kernels(x: torch.Tensor, window: int | None) -> str:
    """By default, and with products: scores, which has kernels of its own."""
    from sagebwd.attention import triton_backend  # brings Triton along

    default, scores = (
        triton_backend.kernels(x, QuantConfig(products=products), window=window, packed=None).split("; ")
        for products in ("all", "scores")
    )
    if [part.split(" (")[0] for part in default] == [part.split(" (")[0] for part in scores]:
        return "; ".join([*default, "with products: scores as well"])
    return "; ".join([*default, *(f"with products: scores {part}" for part in scores)])


def _dims_and_masks(by_dim: dict[int, list[str]]) -> str:
    """{32: [full, causal], 64: [full, causal]} -> "head dims 32, 64, full and causal"."""
    by_masks: dict[str, list[int]] = {}
    for dim, masks in by_dim.items():
        by_masks.setdefault("any mask" if len(masks) == len(MASKS) else " and ".join(masks), []).append(dim)
    parts = []
    for masks, dims in by_masks.items():
        which = f"{dims[0]} to {dims[-1]}" if dims == list(DIMS) else ", ".join(map(str, dims))
        parts.append(f"head dim {which}, {masks}")
    return "; ".join(parts)


def _sdpa(device: torch.device) -> Iterator[str]:
    """The backend that torch itself picks for training without SageBwd."""
    dtypes = DTYPES if device.type == "cpu" else DTYPES[:2]
    picked: dict[str, list[str]] = {}
    for dtype, dim in itertools.product(dtypes, (64, 128, 256)):
        x = torch.empty(1, 1, 128, dim, device=device, dtype=dtype, requires_grad=True)
        choice = SDPBackend(torch._fused_sdp_choice(x, x, x, is_causal=True)).name.lower().replace("_", " ")
        picked.setdefault(choice, []).append(f"{str(dtype).removeprefix('torch.')} {dim}")
    for choice, calls in picked.items():
        yield f"{device}: {choice}" + (f" for {', '.join(calls)}" if len(picked) > 1 else "")


def _training() -> Iterator[str]:
    """What a recipe needs besides the operator; each with its remedy."""
    for module, package in (
        ("megatron.core", "megatron-core"),
        ("deepspeed", "deepspeed"),
        ("sentencepiece", "sentencepiece"),
    ):
        yield f"{module}: {'there' if _importable(module) else f'missing; `make setup`, or `pip install {package}`'}"
    if not _importable("sentencepiece"):
        return  # the corpora are part of the tokenizer's package
    from sagebwd.tokenizer.corpora import content_digest
    from sagebwd.training.recipe import Data

    try:
        yield f"corpus sotu: there, SHA-256 {content_digest(Data(), Path())[:12]} as it should be"
    except UserError as error:
        yield f"corpus sotu: {error}"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _self_test(failed: list[str]) -> Iterator[str]:
    """In a process of its own: a kernel that crashes takes it along, and the interpreter is chosen at import."""
    gpu = torch.cuda.is_available()
    yield "on the GPU" if gpu else "in Triton's interpreter, on the CPU (not on a GPU: there is none)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if not gpu:
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    command = [sys.executable, "-m", "sagebwd.selftest"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, err = child.communicate(timeout=SELF_TEST_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate(timeout=GRACE_SECONDS)
        failed.append("timeout")
        yield f"FAILED: no answer in {SELF_TEST_SECONDS} s"
        return
    for line in out.splitlines():
        if not line.startswith("{"):
            continue
        case = json.loads(line)
        worst, name = max((error, name) for name, error in case["errors"].items())
        yield f"{'ok    ' if case['passed'] else 'FAILED'} {case['case']}: worst Rel-L2 {worst:.1e} ({name})"
        if not case["passed"]:
            failed.append(case["case"])
    if child.returncode and not failed:
        failed.append("crash")
        last = err.strip().splitlines()[-1:] or ["no message"]
        yield f"FAILED: the self-test ended with exit code {child.returncode}: {last[0]}"
    yield f"{time.monotonic() - start:.0f} s"
