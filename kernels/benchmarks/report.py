"""The benchmark in words and files: results.csv with every number, report.md with the tables a reader wants."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sagebwd.kernels.benchmarks.gate import NAMES, Result
from sagebwd.kernels.benchmarks.measure import Measurement
from sagebwd.kernels.benchmarks.peers import OURS, PORTABLE, SAGE
from sagebwd.kernels.benchmarks.shapes import Shape

CSV, PICTURE, REPORT = "results.csv", "speedup.png", "report.md"
BACKWARD = 2.5  # the backward's operations, in forwards
NEVER = "not reached"
METHOD = """\
bf16 inputs, the same tensors for all, one process; 16,384 tokens in all (batch 1 beyond), 2,048 / D query heads. Times
are medians between CUDA events with a cold L2 cache, of all in turn. Everything a call does is inside: smoothing,
quantisation, transposes, launches, allocation. *Speed-up*: the peer's time over SageBwd's, so above 1 SageBwd is
faster. *TFLOP/s* by the usual count, 4 B H N^2 D for the forward (half if causal) and 2.5 times that for the backward.
*Peak*: what forward and backward allocate on top of q, k, v and dO. *Saved*: what is kept from forward to backward, q,
k, v and o included.\
"""
PORTABLE_ALONE = """\
SageBwd above takes the kernels for Hopper GPUs (kernels/hopper) where these are faster; here are the portable ones, as
every other GPU has them, on the same tensors.\
"""
BREAK_EVEN = "The smallest measured length from which on SageBwd is at least as fast in forward + backward:"


@dataclass(frozen=True)
class Table:
    """What was measured; a shape that an attention does not run is absent."""

    measurements: list[Measurement]

    def __post_init__(self) -> None:
        found = {(m.attention, m.shape): m for m in self.measurements}
        object.__setattr__(self, "_found", found)

    def get(self, attention: str, shape: Shape) -> Measurement | None:
        return self._found.get((attention, shape))

    def shapes(self) -> list[Shape]:
        return list(dict.fromkeys(m.shape for m in self.measurements))

    def kinds(self) -> dict[str, list[Shape]]:
        """Shapes by all but their length, which ascends."""
        kinds: dict[str, list[Shape]] = {}
        for shape in sorted(self.shapes()):
            kinds.setdefault(shape.kind, []).append(shape)
        return kinds

    def peers(self) -> list[str]:
        return [name for name in dict.fromkeys(m.attention for m in self.measurements) if name not in OURS]

    def speedup(self, peer: str, shape: Shape, ms: Callable[[Measurement], float], path: str = SAGE) -> float | None:
        """path: which of SageBwd's."""
        ours, theirs = self.get(path, shape), self.get(peer, shape)
        return ms(theirs) / ms(ours) if ours and theirs else None

    def break_even(self, peer: str, kind: list[Shape], path: str = SAGE) -> str:
        """The smallest measured length from which on a path of SageBwd is at least as fast in forward + backward."""
        speedups = {shape.length: self.speedup(peer, shape, both, path) for shape in kind}
        known = {length: s for length, s in sorted(speedups.items()) if s is not None}
        if not known:
            return "n/a"
        slower = [length for length, s in known.items() if s < 1]
        good = [length for length in known if length > max(slower, default=0)]
        return f"{good[0]:,}" if good else NEVER


def forward(m: Measurement) -> float:
    return m.forward_ms


def backward(m: Measurement) -> float:
    return m.backward_ms


def both(m: Measurement) -> float:
    return m.both_ms


def write_csv(path: Path, table: Table) -> None:
    rows = [_record(m) for m in table.measurements]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _record(m: Measurement) -> dict[str, object]:
    shape = m.shape
    return {
        "dim": shape.dim,
        "causal": int(shape.causal),
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "length": shape.length,
        "attention": m.attention,
        "forward_ms": f"{m.forward_ms:.4f}",
        "backward_ms": f"{m.backward_ms:.4f}",
        "both_ms": f"{m.both_ms:.4f}",
        "forward_tflops": f"{_tflops(m, 1, forward):.1f}",
        "both_tflops": f"{_tflops(m, 1 + BACKWARD, both):.1f}",
        "peak_bytes": m.peak_bytes,
        "saved_bytes_per_token": f"{m.saved_bytes / (shape.batch * shape.length):.1f}",
    }


def _tflops(m: Measurement, forwards: float, ms: Callable[[Measurement], float]) -> float:
    return forwards * m.shape.flops() / ms(m) / 1e9


def markdown(table: Table, gates: list[Result], facts: dict[str, str], missing: dict[str, str]) -> str:
    """report.md. facts: how it was made; missing: why a peer is not in it."""
    lines = [f"# SageBwd's speed on {facts['GPU']}", "", facts["SageBwd"], "", f"**{headline(table)}**", "", METHOD, ""]
    lines += [f"![Speed-up of SageBwd by sequence length]({PICTURE})", ""]
    lines += [f"- {peer}: {reason}." for peer, reason in missing.items()]
    lines += ["", "## Break-even", "", BREAK_EVEN, ""]
    lines += [*_break_even(table), "", "## Times", ""]
    for kind, shapes in table.kinds().items():
        lines += [f"### {kind}", "", *_times(table, shapes), ""]
    if any(m.attention == PORTABLE for m in table.measurements):
        lines += ["## The portable kernels alone", "", PORTABLE_ALONE, ""]
        lines += [BREAK_EVEN, "", *_break_even(table, PORTABLE), ""]
        for kind, shapes in table.kinds().items():
            lines += [f"### {kind}, portable", "", *_times(table, shapes, PORTABLE), ""]
    lines += ["## Memory", "", *_memory(table), "", "## Correctness, checked first", ""]
    lines += ["The largest Rel-L2 over the shapes checked, against FP64; for SageBwd also against its reference.", ""]
    lines += [*_gate(gates), "", "## How it was made", ""]
    lines += ["| | |", "|---|---|", *(f"| {fact} | {text} |" for fact, text in facts.items())]
    return "\n".join(lines) + "\n"


def headline(table: Table) -> str:
    """The finding in one line: the longest length's speed-ups, forward + backward."""
    parts = []
    for peer in table.peers():
        longest = [shapes[-1] for shapes in table.kinds().values()]
        speedups = [s for s in (table.speedup(peer, shape, both) for shape in longest) if s]
        if speedups:
            parts.append(f"{min(speedups):.2f}-{max(speedups):.2f} times {peer}'s")
    length = max(shape.length for shape in table.shapes())
    return f"Speed in forward + backward at N = {length:,}: {', '.join(parts)}"


def _break_even(table: Table, path: str = SAGE) -> list[str]:
    rows = [
        (kind, *(table.break_even(peer, shapes, path) for peer in table.peers()))
        for kind, shapes in table.kinds().items()
    ]
    return _table(("", *table.peers()), rows)


def _times(table: Table, shapes: list[Shape], path: str = SAGE) -> list[str]:
    peers = table.peers()
    header = ["N", f"{path} fwd / bwd / both, ms", "TFLOP/s"]
    header += [column for peer in peers for column in (f"{peer}, ms", "speed-up")]
    rows = []
    for shape in shapes:
        ours = table.get(path, shape)
        row = [f"{shape.length:,}", _three(ours), f"{_tflops(ours, 1 + BACKWARD, both):.0f}"]
        for peer in peers:
            row.append(_three(m) if (m := table.get(peer, shape)) else "n/a")
            speedups = [table.speedup(peer, shape, ms, path) for ms in (forward, backward, both)]
            row.append(" / ".join(f"{s:.2f}" for s in speedups) if all(speedups) else "n/a")
        rows.append(tuple(row))
    return _table(tuple(header), rows)


def _three(m: Measurement) -> str:
    return f"{m.forward_ms:.3f} / {m.backward_ms:.3f} / {m.both_ms:.3f}"


def _memory(table: Table) -> list[str]:
    """One row a kind of shape, at its longest length: peak in MiB, saved in bytes a token."""
    names = list(dict.fromkeys(m.attention for m in table.measurements))
    rows = []
    for kind, shapes in table.kinds().items():
        shape = shapes[-1]
        found = [table.get(name, shape) for name in names]
        row = [f"{kind}, N={shape.length:,}"]
        row += [f"{m.peak_bytes / 2**20:,.0f}" if m else "n/a" for m in found]
        row += [f"{m.saved_bytes / (shape.batch * shape.length):,.0f}" if m else "n/a" for m in found]
        rows.append(tuple(row))
    return _table(("", *(f"peak {name}, MiB" for name in names), *(f"saved {name}, B a token" for name in names)), rows)


def _gate(gates: list[Result]) -> list[str]:
    rows = []
    for name in dict.fromkeys(result.attention for result in gates):
        mine = [result for result in gates if result.attention == name and result.against_truth]
        if not mine:
            continue
        row = [f"{name}, FP64", *(f"{max(r.against_truth[n] for r in mine):.1e}" for n in NAMES)]
        rows.append(tuple(row))
        distances = [r.against_reference for r in mine if r.against_reference]
        if distances:
            rows.append((f"{name}, reference", *(f"{max(d[n] for d in distances):.1e}" for n in NAMES)))
    return _table(("against", *NAMES), rows)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]
