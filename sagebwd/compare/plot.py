"""The comparison's picture: loss curves above, the gap to full precision below, on one axis of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sagebwd.compare.runs import TRAIN, VALIDATION, Run, Series
from sagebwd.compare.statistics import Result, difference, smooth

# Okabe and Ito's palette: told apart with every common colour blindness, and in print by lightness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
REFERENCE, INK, FAINT = "#7A7A7A", "#222222", "#6B6B6B"
WIDTH = 10.0  # inches
LABEL_POINTS, LABEL_GAP = 10.5, 15.0  # size of an arm's name, least distance of two


@dataclass(frozen=True)
class _Arm:
    run: Run
    result: Result
    colour: str
    wide: bool  # the reference: a broad band beneath, so that a curve on top of it is still seen


@dataclass(frozen=True)
class _Label:
    text: str
    colour: str
    x: float
    y: float


def palette(names: list[str]) -> dict[str, str]:
    """A colour for each name, in their order; over again where there are more names than colours."""
    return dict(zip(names, COLOURS * len(names), strict=False))


def draw(
    path: Path, runs: list[Run], results: list[Result], reference: Run | None, colours: dict[str, str],
    title: str, subtitle: str,
) -> None:  # fmt: skip
    """Write the picture as a PNG, 1500 pixels wide. colours: by a run's name; the reference has its own."""
    arms = []
    for run, result in zip(runs, results, strict=True):
        wide = run is reference
        arms.append(_Arm(run, result, REFERENCE if wide else colours[run.name], wide))
    arms.sort(key=lambda arm: not arm.wide)
    window = max(3, max(len(run.get(TRAIN).steps) for run in runs) // 20) | 1
    with_gaps = reference is not None and len(runs) > 1

    height = 7.0 if with_gaps else 4.8
    figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    rows = (2, 1) if with_gaps else (1, 1)
    axes = figure.subplots(*rows, sharex=True, squeeze=False, height_ratios=[3, 2][: rows[0]])[:, 0]
    longest = max(len(arm.run.name) for arm in arms) + len("  diverged")
    right = 1 - (0.03 + longest * 0.62 * LABEL_POINTS / 72 / WIDTH)
    figure.subplots_adjust(left=0.07, right=right, top=1 - 1.1 / height, bottom=0.6 / height, hspace=0.27)
    headings(figure, title, subtitle)

    axes[-1].set_xlabel("training tokens", color=FAINT, fontsize=10)
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: count(tokens)))
    ends = [_tokens(run, run.get(tag))[-1:] for run in runs for tag in (TRAIN, VALIDATION)]
    axes[-1].set_xlim(0, max(np.concatenate(ends).max(), 1.0))
    _losses(axes[0], arms, window)
    if with_gaps:
        _gaps(axes[1], arms, reference, window)
    figure.savefig(path)


def headings(figure: Figure, title: str, subtitle: str) -> None:
    """Title and subtitle above everything, smaller where they would not fit the width."""
    height = figure.get_figheight()
    heading = figure.text(0.07, 1 - 0.3 / height, title, fontsize=15, fontweight="bold", color=INK, va="center")
    below = figure.text(0.07, 1 - 0.57 / height, subtitle, fontsize=10, color=FAINT, va="center")
    for text in (heading, below):
        room = 0.9 * WIDTH * figure.dpi / text.get_window_extent().width
        text.set_fontsize(text.get_fontsize() * min(1.0, room))


def _losses(axis: Axes, arms: list[_Arm], window: int) -> None:
    labels, lowest = [], []
    for arm in arms:
        validation, train = arm.run.get(VALIDATION), smooth(arm.run.get(TRAIN), window)
        lowest += [arm.result.best, np.nanmin(train.values, initial=np.inf)]
        _thin(axis, arm, train)
        _dotted(axis, arm, validation)
        labels.append(_label(arm, validation, f"{arm.result.final:.3f}"))
    start = max(arm.result.start for arm in arms)
    low = min(lowest)
    axis.set_ylim(low - 0.07 * (start - low), start + 0.04 * (start - low))
    entropy = next((arm.run.meta["unigram_entropy"] for arm in arms if "unigram_entropy" in arm.run.meta), None)
    if entropy is not None and low < entropy < start:
        axis.axhline(entropy, color=FAINT, lw=1, ls=(0, (1, 3)))
        axis.annotate(
            f"unigram entropy of the text {entropy:.2f}",
            (1, entropy),
            (-4, 3),
            xycoords=axis.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            color=FAINT,
            fontsize=9,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
    style(axis, "Loss, nats per token", f"dots: validation · thin lines: training, mean of {window} steps")
    _end_labels(axis, labels)


def _gaps(axis: Axes, arms: list[_Arm], reference: Run, window: int) -> None:
    band = next(arm for arm in arms if arm.wide)
    axis.axhline(0, color=band.colour, lw=4, alpha=0.6, zorder=1)
    labels, seen, calm = [_Label(reference.name, band.colour, np.nan, 0.0)], [], []
    for arm in arms:
        if arm.wide:
            continue
        train = smooth(difference(arm.run.get(TRAIN), reference.get(TRAIN)), window)
        validation = difference(arm.run.get(VALIDATION), reference.get(VALIDATION))
        _thin(axis, arm, train)
        _dotted(axis, arm, validation)
        end = validation.values[-1] if len(validation.values) else np.nan
        labels.append(_label(arm, validation, f"{end:+.3f}"))
        seen += [train.values, validation.values]
        if not arm.result.diverged:
            calm += [train.values, validation.values]
    # A diverged arm, or the first wild steps, leave the frame rather than flatten all the rest.
    values = np.concatenate(calm or seen)
    values = values[np.isfinite(values)]
    low, high = np.percentile(np.append(values, 0.0), [2, 98])
    low, high = min(low, 0.0), max(high, 0.0)
    room = 0.2 * max(high - low, 0.02)
    axis.set_ylim(low - room, high + room)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda gap, _: f"{gap:+.3g}" if abs(gap) > 1e-9 else "0"))
    style(
        axis,
        f"Gap to {reference.name}, nats per token",
        "on the same samples · below 0: lower loss than full precision",
    )
    _end_labels(axis, labels)


def _thin(axis: Axes, arm: _Arm, series: Series) -> None:
    axis.plot(_tokens(arm.run, series), series.values, color=arm.colour, lw=2.5 if arm.wide else 1, alpha=0.45)


def _dotted(axis: Axes, arm: _Arm, series: Series) -> None:
    width, dot = (5, 7.5) if arm.wide else (1.8, 4)
    style = {"color": arm.colour, "lw": width, "marker": "o", "markersize": dot, "alpha": 0.6 if arm.wide else 1}
    axis.plot(_tokens(arm.run, series), series.values, zorder=2 if arm.wide else 3, clip_on=True, **style)


def _label(arm: _Arm, series: Series, number: str) -> _Label:
    text = f"{arm.run.name}  {'diverged' if arm.result.diverged else number}"
    good = np.flatnonzero(np.isfinite(series.values))
    if not len(good):
        return _Label(text, arm.colour, np.nan, np.inf)
    return _Label(text, arm.colour, _tokens(arm.run, series)[good[-1]], series.values[good[-1]])


def _end_labels(axis: Axes, labels: list[_Label]) -> None:
    """Name each curve at the right edge, in its colour, moved apart where names would overlap."""
    point = axis.figure.dpi / 72
    low, high = axis.get_ylim()
    size = axis.bbox.height / point
    labels = sorted(labels, key=lambda label: label.y)
    heights = [size * (float(np.clip(label.y, low, high)) - low) / (high - low) for label in labels]
    for label, height in zip(labels, _spread(heights, LABEL_GAP), strict=True):
        inside = np.isfinite(label.x) and low <= label.y <= high
        line = {"arrowstyle": "-", "color": label.colour, "lw": 0.8, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 4}
        axis.annotate(
            label.text,
            (label.x, label.y) if inside else (1, height / size),
            (1.025, height / size),
            xycoords="data" if inside else "axes fraction",
            textcoords="axes fraction",
            color=label.colour,
            fontsize=LABEL_POINTS,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops=line if inside else None,
        )


def _spread(heights: list[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as needed to be `gap` apart: those that collide spread about their mean."""

    def bottom(group: list[float]) -> float:
        return sum(group) / len(group) - gap * (len(group) - 1) / 2

    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and bottom(groups[-1]) - bottom(groups[-2]) < gap * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return [bottom(group) + number * gap for group in groups for number in range(len(group))]


def style(axis: Axes, heading: str, note: str) -> None:
    """Heading at the left, note at the right, light grid, no frame."""
    axis.set_title(heading, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axis.set_title(note, loc="right", fontsize=9, color=FAINT, pad=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#BBBBBB")
    axis.grid(axis="y", color="#E6E6E6", lw=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=FAINT, length=0, labelsize=9.5)
    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def _tokens(run: Run, series: Series) -> np.ndarray:
    return series.steps * float(run.recipe.train.tokens_per_step)


def count(number: float) -> str:
    """1234567 -> "1.23M": a number as axes and tables show it."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.3g}{suffix}"
    return f"{number:.3g}"
