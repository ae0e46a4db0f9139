"""Benchmark SageBwd against full-precision attention: correctness first, then speed and memory.

    python -m sagebwd.kernels.benchmarks.bench [--quick] [--products scores] [--out FOLDER]  (or: make bench)

Writes results.csv, report.md and speedup.png. Exit code: 0; 1 when the correctness check fails (then no figure is
printed); 2 where there is no NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from sagebwd import machine
from sagebwd.attention.config import Products, QuantConfig

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer lengths, no GQA: well under a minute")
    parser.add_argument("--products", choices=get_args(Products), default="all", help="SageBwd's in INT8 [all]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go [kernels/benchmarks/results/GPU]")
    parser.add_argument("--commit", help="the commit that is measured, where the code is no git checkout")
    options = parser.parse_args(argv)
    gpus = machine.gpus()
    if not gpus:
        print("error: the benchmark needs an NVIDIA GPU, and torch sees none here", file=sys.stderr)
        return 2
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0].name.lower()).strip("-")
    name += "-scores" if options.products == "scores" else ""
    folder = options.out or RESULTS / (name + ("-quick" if options.quick else ""))
    command = shlex.join(["python", "-m", "sagebwd.kernels.benchmarks.bench", *(argv or sys.argv[1:])])
    return _bench(options.quick, options.products, folder, gpus[0].name, options.commit or machine.commit(), command)


def _bench(quick: bool, products: Products, folder: Path, gpu: str, commit: str | None, command: str) -> int:
    import torch
    from tqdm import tqdm

    from sagebwd.kernels.benchmarks import gate, peers, plot, report
    from sagebwd.kernels.benchmarks.measure import FLUSH, measure
    from sagebwd.kernels.benchmarks.shapes import shapes

    start = time.monotonic()
    config = QuantConfig(products=products)
    grid = shapes(quick)
    attentions, missing = peers.attentions(config)
    kinds = list({shape.kind: shape for shape in grid}.values())
    print(f"{gpu}: checking {', '.join(a.name for a in attentions)} on {len(kinds)} kinds of shape", flush=True)
    for peer, reason in missing.items():
        print(f"  without {peer}: {reason}")
    gates = gate.gate(kinds, config)
    red = [result for result in gates if result.failure]
    for result in red:
        print(f"error: {result.attention}, {result.shape.kind}, N={result.shape.length}: {result.failure}")
    if red:
        print("The correctness check failed: nothing is measured.", file=sys.stderr)
        return 1
    absent = {(result.attention, result.shape.kind): result.unavailable for result in gates if result.unavailable}
    missing |= {f"{attention} on {kind}": reason for (attention, kind), reason in absent.items()}
    print(f"  all correct, {time.monotonic() - start:.0f} s", flush=True)

    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")
    rows = []
    for shape in tqdm(grid, desc="measuring", unit=" shapes", mininterval=1 if sys.stderr.isatty() else 15):
        rows += measure([a for a in attentions if (a.name, shape.kind) not in absent], shape, flush)
    table = report.Table(rows)
    wall = time.monotonic() - start
    facts = {
        "GPU": gpu,
        "SageBwd": config.summary(),
        "driver": f"{machine.driver()}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "versions": ", ".join(f"{name} {number}" for name, number in machine.versions().items() if number),
        "commit": commit or "not known",
        "command": f"`{command}`",
        "wall time": f"{wall:.0f} s",
    }
    folder.mkdir(parents=True, exist_ok=True)
    report.write_csv(folder / report.CSV, table)
    (folder / report.REPORT).write_text(report.markdown(table, gates, facts, missing), encoding="utf-8")
    which = " with INT8 in Q K^T alone" if products == "scores" else ""
    subtitle = f"{gpu} · bf16 · 16,384 tokens, 2,048 / D heads · quantisation and smoothing inside"
    plot.draw(folder / report.PICTURE, table, f"Speed-up of SageBwd{which} over full-precision attention", subtitle)
    for kind, of_kind in table.kinds().items():
        even = ", ".join(f"{peer} {table.break_even(peer, of_kind)}" for peer in table.peers())
        print(f"  {kind}: at least as fast, forward + backward, from N = {even}")
    print(f"{report.headline(table)}\nReport: {folder / report.REPORT}   ({wall:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
