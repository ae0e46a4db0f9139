"""A sweep's picture: the gap to full precision against tokens per step, with its 95% intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from sagebwd.compare import plot
from sagebwd.compare.grid import Point
from sagebwd.training.sweep import short

WIDTH = 10.0  # inches
APART = 0.11  # of the step from one tokens per step to the next: so far arms stand beside each other


def draw(path: Path, points: list[Point], margin: float, colours: dict[str, str], title: str, subtitle: str) -> None:
    """Write the picture as a PNG, one panel with QK-norm and one without where both were run. colours: of every arm."""
    points = [point for point in points if point.verdict is not None]
    colours = {variant: colours[variant] for variant in colours if any(point.variant == variant for point in points)}
    panels = list(dict.fromkeys(point.qk_norm for point in points))
    height = 1.6 + 3.2 * len(panels)
    figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(len(variant) for variant in colours)
    right = 1 - (0.04 + longest * 0.66 * plot.LABEL_POINTS / 72 / WIDTH)
    figure.subplots_adjust(left=0.08, right=right, top=1 - 1.15 / height, bottom=0.65 / height, hspace=0.3)
    plot.headings(figure, title, subtitle)
    at = {size: place for place, size in enumerate(sorted({point.tokens_per_step for point in points}))}
    for axis, qk_norm in zip(axes, panels, strict=True):
        _panel(axis, [point for point in points if point.qk_norm is qk_norm], colours, at, margin)
        heading = "Gap to full precision, nats per token" if len(panels) == 1 else f"Gap, nats, {_named(qk_norm)}"
        plot.style(axis, heading, f"points: one seed each · bars: mean, 95% interval · band: ±{margin:g}")
    axes[-1].set_xlabel("tokens per step", color=plot.FAINT, fontsize=10)
    figure.savefig(path)


def _named(qk_norm: bool) -> str:
    return "with QK-norm" if qk_norm else "without QK-norm"


def _panel(axis: Axes, points: list[Point], colours: dict[str, str], at: dict[int, int], margin: float) -> None:
    """at: tokens per step -> place on the axis."""
    axis.axhspan(-margin, margin, color="#EDEDED", zorder=0)
    axis.axhline(0, color=plot.REFERENCE, lw=1.5, zorder=1)
    for number, (variant, colour) in enumerate(colours.items()):
        shift = APART * (number - (len(colours) - 1) / 2)
        mine = [point for point in points if point.variant == variant]
        line = [(at[p.tokens_per_step] + shift, p.gap.mean) for p in mine if p.gap is not None]
        if line:
            axis.plot(*zip(*line, strict=True), color=colour, lw=1, alpha=0.4)
        for point in mine:
            _mark(axis, point, at[point.tokens_per_step] + shift, colour)
    inner = [value for point in points if point.gap is not None for value in _extent(point)]
    low, high = min([*inner, -margin]), max([*inner, margin])
    axis.set_ylim(low - 0.12 * (high - low), high + 0.12 * (high - low))
    for number, (variant, colour) in enumerate(colours.items()):
        axis.annotate(
            variant, (1.02, 0.95 - 0.09 * number), xycoords="axes fraction", color=colour, va="top",
            fontsize=plot.LABEL_POINTS, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axis.set_xlim(-0.5, len(at) - 0.5)
    axis.xaxis.set_major_locator(FixedLocator(list(at.values())))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda place, _: short(list(at)[round(place)])))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda gap, _: f"{gap:+.3g}" if abs(gap) > 1e-9 else "0"))


def _mark(axis: Axes, point: Point, x: float, colour: str) -> None:
    gap = point.gap
    if gap is None:
        axis.annotate("diverged" if point.diverged else "no pair", (x, 0), rotation=90, color=colour, fontsize=9)
        return
    axis.plot(np.full(gap.seeds, x), gap.values, "o", color=colour, markersize=4, alpha=0.5, mew=0)
    half = 0.0 if gap.low is None else gap.mean - gap.low
    axis.errorbar(x, gap.mean, yerr=half, fmt="_", color=colour, markersize=14, mew=2.2, lw=2, capsize=4)


def _extent(point: Point) -> list[float]:
    """What must be seen: the mean and every seed; the interval, unless two seeds make it hopelessly wide."""
    gap = point.gap
    return [*gap.values, *((gap.low, gap.high) if gap.seeds > 2 else ())]
