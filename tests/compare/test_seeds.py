"""The arithmetic of the verdict, against scipy; and the verdict itself."""

import numpy as np
import pytest
from scipy import stats

from sagebwd.compare.seeds import estimate, seeds_to_decide, t_cumulative, t_quantile, verdict


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 101])
def test_students_t_is_scipys(freedom: int) -> None:
    for t in (0.0, 0.3, 1.0, 2.5, 12.7, 80.0):
        assert t_cumulative(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=1e-13)
    for probability in (0.6, 0.9, 0.975, 0.9995):
        assert t_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-10)


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_the_interval_is_scipys(seeds: int) -> None:
    values = np.random.default_rng(seeds).normal(0.01, 0.02, seeds)
    found = estimate(values.tolist())
    low, high = stats.t.interval(0.95, seeds - 1, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-10)
    assert (found.mean, found.spread) == pytest.approx((values.mean(), values.std(ddof=1)), rel=1e-12)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(0.3, 2.0, (4000, 3))
    covered = sum(found.low <= 0.3 <= found.high for found in (estimate(row.tolist()) for row in draws))
    assert stats.binomtest(covered, 4000, 0.95).pvalue > 1e-3


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ([0.001, 0.002, 0.0015], "matches"),
        ([-0.001, -0.002, -0.0015], "matches"),
        ([0.004, 0.005, 0.0045], "matches"),  # surely above 0, and surely within the margin
        ([0.020, 0.024, 0.022], "worse"),
        ([0.008, 0.012, 0.010], "worse"),  # surely above 0, perhaps by less than the margin: not rounded to a match
        ([-0.020, -0.024, -0.022], "better"),
        ([-0.02, 0.02, 0.01], "undecided"),
        ([0.0, 0.0], "undecided"),  # never a match with fewer than 3 seeds
        ([0.5, 0.5], "undecided"),
        ([0.0], "undecided"),
    ],
)
def test_verdicts(gaps: list[float], word: str) -> None:
    assert verdict(estimate(gaps), 0.01).word == word


def test_the_margin_is_the_callers() -> None:
    gaps = estimate([0.020, 0.024, 0.022])
    assert [verdict(gaps, margin).word for margin in (0.01, 0.03)] == ["worse", "matches"]


@pytest.mark.parametrize(("mean", "spread"), [(0.001, 0.02), (0.0, 0.01), (0.02, 0.05), (-0.004, 0.01)])
def test_as_many_seeds_as_it_asks_for_would_decide(mean: float, spread: float) -> None:
    seeds = seeds_to_decide(mean, spread, 0.01)

    def decided(n: int) -> bool:
        half = stats.t.ppf(0.975, n - 1) * spread / n**0.5
        return abs(mean) + half <= 0.01 or half <= abs(mean)

    assert decided(seeds)
    assert not decided(seeds - 1)
    told = verdict(estimate([mean - spread, mean, mean + spread]), 0.01)
    assert (told.word, told.seeds) == ("undecided", seeds)
    assert f"about {seeds} seeds" in told.reason


def test_too_few_seeds_ask_for_three() -> None:
    told = verdict(estimate([0.1]), 0.01)
    assert (told.seeds, told.reason) == (3, "1 seed, and at least 3 are needed")
    assert seeds_to_decide(0.005, 10.0, 0.01) is None
