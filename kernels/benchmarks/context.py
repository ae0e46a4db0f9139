"""What context parallelism costs and gains: attention over the tokens of several GPUs against one, and what it gathers.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m sagebwd.kernels.benchmarks.context [--out DIR]

Correctness first, then times: medians between CUDA events, of the slowest rank. Writes context.csv and context.md.
Exit code: 0; 1 when the correctness check fails (then nothing is measured); 2 without an NVIDIA GPU for each rank.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sagebwd import machine
from sagebwd.attention import QuantConfig, context_triton, sage_attention
from sagebwd.attention.context import sage_attention_context
from sagebwd.attention.zigzag import Zigzag
from sagebwd.megatron.context_sdpa import GPU, context_sdpa

RESULTS = Path(__file__).parent / "results"
DIM, HEADS = 128, 16
KV_HEADS, LENGTHS = (16, 4), (32768, 65536, 131072)
CHECKED = 8192  # tokens of the correctness check: SageBwd takes the kernels that long sequences take
REPEATS = 5
EXPOSED = 1 + 3 / 2  # gatherings that no work hides, by their bytes: the forward's 2 D a key, the backward's 3 D for dQ
SAGE = "SageBwd"
FULL_PRECISION = {"SDPA cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA flash": SDPBackend.FLASH_ATTENTION}  # the best first
LIMIT = 0.01  # Rel-L2 of several GPUs from one; SageBwd's is to be 0
FIELDS = ("attention", "kv_heads", "tokens", "gpus", "forward_ms", "backward_ms", "peak_bytes", "gather_ms", "gathered")


class Row(NamedTuple):
    """gather_ms: of the forward's K and V alone, gathered: bytes of these that arrive at a GPU; None on one GPU."""

    attention: str
    kv_heads: int
    tokens: int
    gpus: int
    forward_ms: float
    backward_ms: float
    peak_bytes: int
    gather_ms: float | None = None
    gathered: int | None = None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go [kernels/benchmarks/results/...]")
    parser.add_argument("--commit", help="the commit that is measured, where the code is no git checkout")
    options = parser.parse_args(argv)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if ranks < 2 or torch.cuda.device_count() < ranks:
        print(
            f"error: {ranks} rank(s) and {torch.cuda.device_count()} NVIDIA GPU(s): start two ranks or more with a GPU "
            "each (torch.distributed.run --nproc-per-node 2)",
            file=sys.stderr,
        )
        return 2
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        return _measure_all(Zigzag.of(distributed.group.WORLD), options.out, options.commit or machine.commit())
    finally:
        distributed.destroy_process_group()


def _measure_all(zigzag: Zigzag, out: Path | None, commit: str | None) -> int:
    start = time.monotonic()
    say = partial(print, flush=True) if zigzag.rank == 0 else lambda *_: None
    wrong = _wrong(SAGE, zigzag, LIMIT)
    if wrong:
        say(f"error: {wrong}. Nothing is measured")
        return 1
    inexact = _wrong(SAGE, zigzag, 0.0)
    measured, took = [SAGE], f"{SAGE} to rounding, NOT bitwise ({inexact})" if inexact else f"{SAGE} bitwise"
    for name in FULL_PRECISION:
        wrong = _wrong(name, zigzag, LIMIT)
        if not wrong:
            measured, took = [name, SAGE], f"{took}, {name} to rounding"
            break
        say(f"without {name}: {wrong}")
    say(f"{zigzag.size} GPUs compute what one does: {took} ({time.monotonic() - start:.0f} s)")
    rows: list[Row] = []
    for kv_heads in KV_HEADS:
        for tokens in LENGTHS:
            for row in _rows(measured, kv_heads, tokens, zigzag):
                rows.append(row)
                say(_line(row))
    if zigzag.rank == 0:
        gpu = torch.cuda.get_device_name()
        folder = out or RESULTS / f"context-{gpu.lower().replace(' ', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        facts = {
            "GPUs": f"{zigzag.size} x {gpu}",
            "versions": ", ".join(f"{name} {number}" for name, number in machine.versions().items() if number),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "several GPUs against one": took,
            "commit": commit or "not known",
            "wall time": f"{time.monotonic() - start:.0f} s",
        }
        _write(folder, rows, facts)
        say(f"Report: {folder / 'context.md'}")
    return 0


def _tensors(kv_heads: int, tokens: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and do [tokens, 1, heads, dim] in bf16, the same on every rank; keys have a common offset."""
    generator = torch.Generator("cuda").manual_seed(0)

    def new(heads: int, length: int = tokens) -> Tensor:
        return torch.randn(length, 1, heads, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)

    return [new(HEADS), new(kv_heads).add_(new(kv_heads, 1)), new(kv_heads)], new(HEADS)


def _first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _one(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if name == SAGE:
        return sage_attention(q, k, v, causal=True, layout="nbhd")
    with sdpa_kernel(FULL_PRECISION[name]):
        o = scaled_dot_product_attention(*map(_first, (q, k, v)), is_causal=True, enable_gqa=q.shape[2] != k.shape[2])
    return o.permute(2, 0, 1, 3)


def _several(name: str, zigzag: Zigzag, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if name == SAGE:
        return sage_attention_context(q, k, v, zigzag=zigzag)
    return context_sdpa(*map(_first, (q, k, v)), zigzag, GPU[FULL_PRECISION[name]], None).permute(2, 0, 1, 3)


def _wrong(name: str, zigzag: Zigzag, limit: float) -> str | None:
    """What has a Rel-L2 from one GPU above `limit`, on any rank; None: nothing."""
    problem = None
    try:
        problem = next((text for kv_heads in KV_HEADS for text in _differences(name, kv_heads, zigzag, limit)), None)
    except RuntimeError as error:  # a kernel that this version of torch does not have as it is called here
        problem = f"{name}: {str(error).splitlines()[0]}"
    of_all: list[str | None] = [None] * zigzag.size
    distributed.all_gather_object(of_all, problem)
    return next(filter(None, of_all), None)


def _differences(name: str, kv_heads: int, zigzag: Zigzag, limit: float) -> Iterator[str]:
    qkv, do = _tensors(kv_heads, CHECKED)
    whole = [x.clone().requires_grad_() for x in qkv]
    o = _one(name, *whole)
    expected = [zigzag.cut(x, 0) for x in (o.detach(), *torch.autograd.grad(o, whole, do))]
    mine = [zigzag.cut(x, 0).requires_grad_() for x in qkv]
    o = _several(name, zigzag, *mine)
    actual = [o.detach(), *torch.autograd.grad(o, mine, zigzag.cut(do, 0))]
    for tensor, a, e in zip(("O", "dQ", "dK", "dV"), actual, expected, strict=True):
        distance = ((a.float() - e.float()).norm() / e.float().norm()).item()
        if not distance <= limit:  # NaN is not
            yield f"{name}, {kv_heads} KV heads, {tensor} on rank {zigzag.rank}: Rel-L2 {distance:.2e} from one GPU"


def _rows(names: list[str], kv_heads: int, tokens: int, zigzag: Zigzag) -> Iterator[Row]:
    qkv, do = _tensors(kv_heads, tokens)
    mine = [zigzag.cut(x, 0) for x in qkv]
    for name in names:
        yield Row(name, kv_heads, tokens, 1, *_times(partial(_one, name), qkv, do))
        gather = _gather(name, mine, zigzag)
        arriving = (zigzag.size - 1) * sum(x.numel() * x.element_size() for x, _ in gather)
        ms = _slowest(_median(lambda gather=gather: zigzag.gather(*gather)))
        times = _times(partial(_several, name, zigzag), mine, zigzag.cut(do, 0))
        yield Row(name, kv_heads, tokens, zigzag.size, *times, ms, arriving)


def _gather(name: str, mine: list[Tensor], zigzag: Zigzag) -> list[tuple[Tensor, int]]:
    """What the forward gathers of K and V, and the dimension of its tokens."""
    q, k, v = map(_first, mine)
    if name != SAGE:
        return [(k, 2), (v, 2)]
    dims = context_triton.KEY_DIMS + context_triton.VALUE_DIMS
    (sums,) = zigzag.gather((context_triton.key_sums(k), context_triton.SLOT_DIM))
    _, keys, values = context_triton.round_operands(q, k, v, sums, k.shape[2] * zigzag.size, QuantConfig())
    return list(zip((*keys, *values), dims, strict=True))


def _times(run: Callable[..., Tensor], tensors: list[Tensor], do: Tensor) -> tuple[float, float, int]:
    """Milliseconds of forward and of backward, and bytes that both allocate; of the slowest and the largest rank."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    forward = _median(lambda: run(*leaves))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = run(*leaves)
    torch.autograd.grad(o, leaves, do, retain_graph=True)
    peak = torch.cuda.max_memory_allocated() - before
    backward = _median(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))
    return _slowest(forward), _slowest(backward), int(_slowest(float(peak)))


def _median(run: Callable[[], object]) -> float:
    """Ranks begin each time together."""
    run()
    pairs = []
    for _ in range(REPEATS):
        distributed.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        pairs.append(begin.elapsed_time(end))
    return statistics.median(pairs)


def _slowest(value: float) -> float:
    of_all = torch.tensor(value, dtype=torch.float64, device="cuda")
    distributed.all_reduce(of_all, distributed.ReduceOp.MAX)
    return of_all.item()


def _line(row: Row) -> str:
    line = (
        f"{row.attention}, {row.kv_heads} KV heads, N={row.tokens}, {row.gpus} GPU(s): forward {row.forward_ms:.2f}, "
    )
    line += f"backward {row.backward_ms:.2f} ms, {row.peak_bytes / 2**30:.2f} GiB"
    if row.gather_ms is not None:
        line += f", gather of K and V {row.gather_ms:.2f} ms, {row.gathered / 1e6:.0f} MB"
    return line


def _write(folder: Path, rows: list[Row], facts: dict[str, str]) -> None:
    with (folder / "context.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(FIELDS)
        table.writerows(rows)
    lines = ["# Context parallelism: attention over the tokens of several GPUs", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [
        "",
        f"Causal, batch 1, {HEADS} heads of {DIM}, bf16. Everything a call does is inside its time: quantisation,",
    ]
    lines += ["gathering, putting in order. *Gather*: of the forward's K and V alone, and its share of the forward."]
    lines += ["*Peak*: what forward and backward allocate on a GPU, beside q, k, v and dO.", ""]
    lines += [
        "| attention | KV heads | N | GPUs | forward, ms | backward, ms | speed-up | peak, GiB | gather, ms | MB |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    alone = {(r.attention, r.kv_heads, r.tokens): r for r in rows if r.gpus == 1}
    for row in rows:
        one = alone[row.attention, row.kv_heads, row.tokens]
        speedup = (one.forward_ms + one.backward_ms) / (row.forward_ms + row.backward_ms)
        share, size = "", ""
        if row.gather_ms is not None:
            share, size = f"{row.gather_ms:.2f} ({row.gather_ms / row.forward_ms:.0%})", f"{row.gathered / 1e6:.0f}"
        cells = (
            row.attention, row.kv_heads, f"{row.tokens:,}", row.gpus, f"{row.forward_ms:.2f}", f"{row.backward_ms:.2f}",
            f"{speedup:.2f}", f"{row.peak_bytes / 2**30:.2f}", share, size,
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += _ring_or_gather(rows)
    (folder / "context.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _ring_or_gather(rows: list[Row]) -> list[str]:
    """What INT8 saves of the gathering, and what a ring in its place could save at most."""
    gathered = {(row.attention, row.kv_heads, row.tokens): row for row in rows if row.gather_ms is not None}
    lines = [
        "",
        "## INT8 or bf16, ring or all-gather",
        "",
        "A ring would send K and V on while it computes with those that it has. It could hide no more than the",
        "gatherings that nothing hides here: the forward's, and for dQ K in INT8 and V in bf16, half as much again.",
        f"So it would save at most {EXPOSED:g} times the forward's, here as a share of forward and backward together.",
        "",
        "| KV heads | N | K and V in INT8, ms | in bf16, ms | saved, ms | a ring would save at most |",
        "|---|---|---|---|---|---|",
    ]
    for (attention, kv_heads, tokens), row in gathered.items():
        if attention != SAGE:
            continue
        wide = next(filter(None, (gathered.get((name, kv_heads, tokens)) for name in FULL_PRECISION)), None)
        bf16, saved = ("", "") if wide is None else (f"{wide.gather_ms:.2f}", f"{wide.gather_ms - row.gather_ms:.2f}")
        share = EXPOSED * row.gather_ms / (row.forward_ms + row.backward_ms)
        lines.append(f"| {kv_heads} | {tokens:,} | {row.gather_ms:.2f} | {bf16} | {saved} | {share:.1%} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
