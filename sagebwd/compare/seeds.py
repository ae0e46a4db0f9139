"""From runs to a claim: the mean over seeds, its 95% interval, and whether an arm matches full precision.

The gaps of an arm (its final validation loss minus full precision's at the same seed, so on the same samples from the
same initial weights) are taken as independent draws from a normal distribution: Student's t gives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
LEAST_SEEDS = 3  # for any verdict but on divergence
MOST_SEEDS = 1000  # beyond which "more seeds" is no advice

Word = Literal["matches", "worse", "better", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. spread: the standard deviation from seed to seed, and low, high: the interval of the mean,
    None for one seed."""

    values: tuple[float, ...]
    mean: float
    spread: float | None
    low: float | None
    high: float | None

    @property
    def seeds(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Verdict:
    """word: as `verdict` defines it. reason: in a few words. seeds: about how many would decide, if undecided."""

    word: Word
    reason: str
    seeds: int | None = None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, spread and 95% t-interval of at least one finite value."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Estimate(tuple(values), mean, None, None, None)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * spread / math.sqrt(n)
    return Estimate(tuple(values), mean, spread, mean - half, mean + half)


def verdict(gap: Estimate, margin: float) -> Verdict:
    """Whether gaps to full precision, in nats per token, say that an arm matches it.

    matches: the whole interval lies within +-margin. worse, better: it lies above, below 0, and not within the margin.
    undecided: anything else, and always with fewer than 3 seeds.
    """
    if gap.seeds < LEAST_SEEDS:
        return Verdict("undecided", f"{gap.seeds} seed{'s' * (gap.seeds > 1)}, and at least 3 are needed", LEAST_SEEDS)
    interval = f"95% interval {gap.low:+.4f} to {gap.high:+.4f}"
    if -margin <= gap.low and gap.high <= margin:
        return Verdict("matches", f"{interval}, within {margin:g} of full precision")
    if gap.low > 0:
        return Verdict("worse", f"{interval}, above 0")
    if gap.high < 0:
        return Verdict("better", f"{interval}, below 0")
    seeds = seeds_to_decide(gap.mean, gap.spread, margin)
    more = f"about {seeds} seeds would decide" if seeds else f"more than {MOST_SEEDS} seeds would be needed"
    return Verdict("undecided", f"{interval} holds 0 and passes {margin:g}; {more}, if mean and spread stay", seeds)


def seeds_to_decide(mean: float, spread: float, margin: float) -> int | None:
    """The fewest seeds with which these would be no longer undecided: the interval's half is down to the distance from
    the mean to the far margin, or to 0, whichever is more. None: more than MOST_SEEDS."""
    room = max(margin - abs(mean), abs(mean))
    for seeds in range(LEAST_SEEDS, MOST_SEEDS + 1):
        if t_quantile(0.5 + CONFIDENCE / 2, seeds - 1) * spread / math.sqrt(seeds) <= room:
            return seeds
    return None


def t_quantile(probability: float, freedom: int) -> float:
    """The t below which Student's distribution with `freedom` degrees has `probability` (above 0.5), by bisection."""
    low, high = 0.0, 1.0
    while t_cumulative(high, freedom) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_cumulative(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def t_cumulative(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0 and whole degrees of freedom: the finite series of Abramowitz and Stegun, 26.7.3 and .4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    if odd:
        return 0.5 + (angle + sine * total) / math.pi
    return 0.5 + sine * total / 2
