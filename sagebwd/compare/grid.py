"""A sweep's numbers: each arm at each point of the grid, over its seeds, paired with full precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagebwd.compare import seeds, statistics
from sagebwd.compare.runs import Run
from sagebwd.compare.seeds import Estimate, Verdict
from sagebwd.compare.statistics import Result


@dataclass(frozen=True)
class Point:
    """One arm of the recipe at one point of the grid: its runs over seeds, and what they say.

    loss: final validation loss of the runs that are done and did not diverge, in nats per token; None: there is none.
    gap: loss minus full precision's at the same seed; None for full precision itself and without a pair.
    diverged, reference_diverged, unfinished: runs of this arm, of full precision, and of this arm not yet done.
    """

    variant: str
    kind: str
    tokens_per_step: int
    qk_norm: bool
    results: tuple[Result, ...]
    loss: Estimate | None
    bits_per_byte: float | None
    gap: Estimate | None
    verdict: Verdict | None
    diverged: int
    reference_diverged: int
    unfinished: int

    @property
    def spikes(self) -> int:
        return sum(result.spikes for result in self.results)


def references(runs: list[Run]) -> tuple[dict[str, Run], list[str]]:
    """Run -> full precision's run in its cell; and for each cell without exactly one, why it has no gaps."""
    cells: dict[tuple, list[Run]] = {}
    for run in runs:
        cells.setdefault(run.cell, []).append(run)
    found, problems = {}, []
    for cell, members in cells.items():
        full, problem = statistics.reference(members)
        if full is None:
            problems.append(f"{cell.tokens_per_step:,} tokens a step, seed {cell.seed}: {problem}")
        else:
            found |= {run.name: full for run in members}
    return found, problems


def points(
    runs: list[Run], results: list[Result], against: dict[str, Run], margin: float, arms: list[str]
) -> list[Point]:
    """Every arm at every point of the grid, by QK-norm and tokens per step, then in the order of `arms`."""
    by_name = {result.name: result for result in results}
    grouped: dict[tuple, list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.cell.qk_norm, run.cell.tokens_per_step, run.variant), []).append(run)
    keys = sorted(grouped, key=lambda key: (not key[0], key[1], arms.index(key[2])))
    return [_point(grouped[key], by_name, against, margin) for key in keys]


def _point(runs: list[Run], by_name: dict[str, Result], against: dict[str, Run], margin: float) -> Point:
    runs = sorted(runs, key=lambda run: run.cell.seed)
    results = tuple(by_name[run.name] for run in runs)
    good = [result for result in results if _counts(result)]
    gaps, pairs_diverged = [], 0
    for run, result in zip(runs, results, strict=True):
        reference = against.get(run.name)
        if reference is None or reference is run:
            continue
        of_reference = by_name[reference.name]
        pairs_diverged += bool(of_reference.diverged)
        if _counts(result) and _counts(of_reference):
            gaps.append(result.final - of_reference.final)
    is_reference = all(against.get(run.name) is run for run in runs)
    diverged = sum(bool(result.diverged) for result in results)
    gap = seeds.estimate(gaps) if gaps else None
    bits = [result.bits_per_byte for result in good if result.bits_per_byte is not None]
    return Point(
        variant=runs[0].variant,
        kind=results[0].kind,
        tokens_per_step=runs[0].cell.tokens_per_step,
        qk_norm=runs[0].cell.qk_norm,
        results=results,
        loss=seeds.estimate([result.final for result in good]) if good else None,
        bits_per_byte=math.fsum(bits) / len(bits) if bits else None,
        gap=gap,
        verdict=None if is_reference else _verdict(gap, len(runs), diverged, pairs_diverged, margin),
        diverged=diverged,
        reference_diverged=pairs_diverged,
        unfinished=sum(not _counts(result) and not result.diverged for result in results),
    )


def _counts(result: Result) -> bool:
    """Whether its final loss is one: the run is done and did not diverge."""
    return result.status == "done" and not result.diverged


def _verdict(gap: Estimate | None, runs: int, diverged: int, reference_diverged: int, margin: float) -> Verdict:
    """`seeds.verdict` of the gap; before it, what divergence says: a mean of the runs that survive would flatter."""
    if diverged > reference_diverged:
        return Verdict(
            "worse", f"{diverged} of {runs} seeds diverged, of full precision {reference_diverged or 'none'}"
        )
    if diverged or reference_diverged:
        return Verdict("undecided", f"{diverged} of {runs} seeds diverged, of full precision {reference_diverged}")
    if gap is None:
        return Verdict("undecided", "no pair with full precision is done", seeds.LEAST_SEEDS)
    return seeds.verdict(gap, margin)
