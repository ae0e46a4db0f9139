"""The comparison's numbers of one run: losses, paired gaps to full precision, speed, spikes, divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sagebwd.compare.runs import MEMORY, MFU, TOKENS_PER_SECOND, TRAIN, VALIDATION, Run, Series
from sagebwd.training.health import WINDOW

RISE = 1.0  # nats above its best at which a validation loss counts as diverged


@dataclass(frozen=True)
class Paired:
    """Training loss minus the reference's, step by step on the same samples, in nats per token. spread: its sd."""

    mean: float
    spread: float
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Result:
    """One arm's numbers. Losses in nats per token; None where there is nothing to tell.

    start, final, best: validation loss. gap: final minus the reference's at the last step that both validated
    (gap_step). bits_per_byte: final as bits per byte of text. tokens_per_second, mfu: medians over the steps after the
    first tenth. memory_gib: the first rank's peak. spikes: how many. diverged: how, for a person.
    """

    name: str
    kind: str
    status: str
    steps: int
    start: float
    final: float
    best: float
    gap: float | None
    gap_step: int | None
    paired: Paired | None
    tokens_per_second: float | None
    mfu: float | None
    memory_gib: float | None
    bits_per_byte: float | None
    spikes: int
    diverged: str | None

    @property
    def fall(self) -> float:
        """How far the validation loss fell from the first validation to the last."""
        return self.start - self.final


def reference(runs: list[Run]) -> tuple[Run | None, str | None]:
    """The run with full-precision attention, and if there is not exactly one, why no gaps are given."""
    full = [run for run in runs if run.recipe.attention.kind == "fpa"]
    if len(full) == 1:
        return full[0], None
    if not full:
        return None, "No arm has full-precision attention (attention.kind fpa), so no gaps are given."
    names = ", ".join(run.name for run in full)
    return None, f"Several arms have full-precision attention ({names}), so no gaps are given: keep one."


def evaluate(run: Run, against: Run | None) -> Result:
    """The numbers of one run, with gaps to `against` unless it is None or the run itself."""
    validation = run.get(VALIDATION)
    gap = paired = None
    if against is not None and against is not run:
        gap = difference(validation, against.get(VALIDATION))
        paired = paired_gap(run.get(TRAIN), against.get(TRAIN))
    some = gap is not None and len(gap.steps) > 0
    finite = validation.values[np.isfinite(validation.values)]
    return Result(
        name=run.name,
        kind=run.recipe.attention.kind,
        status=run.meta.get("status", "running"),
        steps=int(run.get(TRAIN).steps[-1]) if len(run.get(TRAIN).steps) else 0,
        start=float(validation.values[0]),
        final=float(validation.values[-1]),
        best=float(finite.min()) if len(finite) else float("nan"),
        gap=float(gap.values[-1]) if some else None,
        gap_step=int(gap.steps[-1]) if some else None,
        paired=paired,
        tokens_per_second=steady_median(run.get(TOKENS_PER_SECOND)),
        mfu=steady_median(run.get(MFU)),
        memory_gib=float(run.get(MEMORY).values.max()) if len(run.get(MEMORY).steps) else None,
        bits_per_byte=bits_per_byte(float(validation.values[-1]), run.meta.get("bytes_per_token")),
        spikes=spikes(run.get(TRAIN), run.recipe.health.spike_nats),
        diverged=divergence(run),
    )


def difference(left: Series, right: Series) -> Series:
    """left - right at the steps that both have."""
    steps, at_left, at_right = np.intersect1d(left.steps, right.steps, assume_unique=True, return_indices=True)
    return Series(steps, left.values[at_left] - right.values[at_right])


def paired_gap(run: Series, against: Series) -> Paired | None:
    """Mean and spread of the training loss's difference over the last half of the common steps.

    None for less than two steps, and where a loss is not finite.
    """
    gap = difference(run, against)
    half = gap.steps > gap.steps[-1] / 2 if len(gap.steps) else np.empty(0, bool)
    steps, values = gap.steps[half], gap.values[half]
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    return Paired(float(values.mean()), float(values.std(ddof=1)), int(steps[0]), int(steps[-1]))


def steady_median(series: Series) -> float | None:
    """The median after the first tenth of the steps and the first three: compiling and warming up are no speed."""
    if not len(series.steps):
        return None
    skip = min(max(3, len(series.steps) // 10), len(series.steps) - 1)
    return float(np.median(series.values[skip:]))


def divergence(run: Run) -> str | None:
    """How the run diverged, or None: a loss not finite, a validation loss RISE above its best, or its own word."""
    for tag in (TRAIN, VALIDATION):
        series = run.get(tag)
        bad = ~np.isfinite(series.values)
        if bad.any():
            first = int(np.argmax(bad))
            return f"{tag} is {series.values[first]:.0f} at step {series.steps[first]}"
    validation = run.get(VALIDATION)
    rise = validation.values - np.minimum.accumulate(validation.values)
    if (rise > RISE).any():
        first = int(np.argmax(rise > RISE))
        return f"{VALIDATION} is {rise[first]:.2f} above its best at step {validation.steps[first]}"
    return "the run says so" if run.meta.get("status") == "diverged" else None


def bits_per_byte(nats_per_token: float, bytes_per_token: float | None) -> float | None:
    """A loss that does not depend on the tokenizer. None: the run did not write its bytes per token."""
    return None if bytes_per_token is None else nats_per_token / math.log(2) / bytes_per_token


def spikes(train: Series, nats: float) -> int:
    """How often the training loss jumps `nats` above the median of the WINDOW steps before; neighbours are one."""
    if len(train.values) <= WINDOW:
        return 0
    before = np.median(np.lib.stride_tricks.sliding_window_view(train.values[:-1], WINDOW), axis=1)
    high = train.values[WINDOW:] > before + nats
    return int(high[0]) + int((high[1:] & ~high[:-1]).sum())


def smooth(series: Series, window: int) -> Series:
    """Running mean over `window` (odd) points, at the middle one's step; not finite where any of them is not."""
    if len(series.steps) < window:
        return Series(series.steps[:0], series.values[:0])
    reach = window // 2
    means = np.convolve(series.values, np.full(window, 1 / window), mode="valid")
    return Series(series.steps[reach : len(series.steps) - reach], means)
