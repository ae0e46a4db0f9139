"""The benchmark's picture: SageBwd's speed-up over each peer by sequence length, a facet for each head dim and mask."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from sagebwd.kernels.benchmarks.report import Table, both, forward
from sagebwd.kernels.benchmarks.shapes import DIMS, Shape

# Okabe and Ito's palette: told apart with every common colour blindness, and in print by lightness.
COLOURS = ("#0072B2", "#D55E00", "#009E73")
INK, FAINT = "#222222", "#6B6B6B"
LEFT, RIGHT, LABEL_GAP = 0.055, 0.86, 0.06  # of the figure; of a facet's height


def draw(path: Path, table: Table, title: str, subtitle: str) -> None:
    """Write the PNG, 1800 pixels wide."""
    figure = Figure(figsize=(12, 8), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    figure.subplots_adjust(left=LEFT, right=RIGHT, top=0.83, bottom=0.08, hspace=0.22, wspace=0.52)
    figure.text(LEFT, 0.955, title, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(LEFT, 0.92, subtitle, fontsize=10, color=FAINT, va="center")
    note = "thick: forward + backward · thin: forward alone · above 1, SageBwd is faster"
    figure.text(LEFT, 0.892, note, fontsize=10, color=FAINT, va="center")

    highest, lengths = 1.0, sorted({shape.length for shape in table.shapes()})
    facets = {(column, row): _facet(table, dim, not row) for column, dim in enumerate(DIMS) for row in (0, 1)}
    for shapes in facets.values():
        for peer in table.peers():
            for ms in (both, forward):
                highest = max([highest, *(s for shape in shapes if (s := table.speedup(peer, shape, ms)))])
    for (column, row), shapes in facets.items():
        axis = axes[row][column]
        axis.set_ylim(0, 1.12 * highest)
        _lines(axis, table, shapes)
        _style(axis, f"D = {DIMS[column]}, {'full' if row else 'causal'}", lengths)
    for axis in axes[1]:
        axis.set_xlabel("sequence length, tokens", color=FAINT, fontsize=10)
    figure.savefig(path)


def _facet(table: Table, dim: int, causal: bool) -> list[Shape]:
    return sorted(s for s in table.shapes() if (s.dim, s.causal, s.group) == (dim, causal, 1))


def _lines(axis: Axes, table: Table, shapes: list[Shape]) -> None:
    axis.axhline(1, color="#999999", lw=1.2, ls=(0, (4, 3)), zorder=1)
    style = {"color": FAINT, "fontsize": 9, "va": "bottom", "transform": axis.get_yaxis_transform()}
    axis.text(0.005, 1.01, "as fast", **style)
    ends = []
    for peer, colour in zip(table.peers(), COLOURS, strict=False):
        for ms, style in ((forward, {"lw": 1.1, "alpha": 0.6}), (both, {"lw": 2.6, "marker": "o", "markersize": 4.5})):
            points = [(s.length, speedup) for s in shapes if (speedup := table.speedup(peer, s, ms))]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, **style)
        if points:
            ends.append((points[-1][1], f"{points[-1][1]:.2f}x {peer}", colour))
    _end_labels(axis, ends)


def _end_labels(axis: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Each peer's name at the right edge, moved up where it would cover the one below."""
    top, below = axis.get_ylim()[1], -1.0
    for value, text, colour in sorted(ends):
        height = max(value / top, below + LABEL_GAP)
        below = height
        style = {"color": colour, "fontsize": 10, "fontweight": "bold", "va": "center"}
        axis.text(1.02, height, text, transform=axis.transAxes, **style)


def _style(axis: Axes, heading: str, lengths: list[int]) -> None:
    axis.set_title(heading, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}K" if n >= 1024 else f"{n:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda speedup, _: f"{speedup:g}x"))
    axis.tick_params(colors=FAINT, length=0, labelsize=9.5, labelbottom=True, labelleft=True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#BBBBBB")
    axis.grid(axis="y", color="#E6E6E6", lw=0.8)
    axis.set_axisbelow(True)
