"""A probe's picture: the error by layer, of each tensor under two rules and of four tensors under every rule."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sagebwd.compare.plot import COLOURS, FAINT, INK
from sagebwd.probe import report
from sagebwd.probe.findings import Findings

TENSORS = {
    "dS rounded": (COLOURS[1], "-"),
    "dS": (COLOURS[1], ":"),
    "P rounded": (COLOURS[0], "-"),
    "P": (COLOURS[0], ":"),
    "delta": (COLOURS[2], "-"),
    "O": ("#7A7A7A", "-"),
    "dQ": (COLOURS[3], "-"),
    "dK": (COLOURS[4], "-"),
    "dV": (COLOURS[5], "-"),
}
"""Colour and line of each tensor; dP, which is not rounded, has an error of FP32's size and would flatten the rest."""

RULES = {
    report.PAPER: (COLOURS[1], "-"),
    "tile, matched": (COLOURS[1], ":"),
    report.DEFAULT: (COLOURS[0], "-"),
    "row, matched": (COLOURS[0], ":"),
    "row, stale, blocks of 128": (COLOURS[2], "-"),
    "row, stale, K not smoothed": (COLOURS[3], "-"),
    report.OWN: (INK, "--"),
}


def draw(path: Path, findings: Findings) -> None:
    """Write the picture as a PNG, 1650 pixels wide."""
    figure = Figure(figsize=(11, 8.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 4, left=0.06, right=0.99, top=0.83, bottom=0.13, hspace=0.42, wspace=0.28)
    figure.text(
        0.06, 0.955, "Error of attention's tensors in a trained model", fontsize=15, fontweight="bold", color=INK
    )
    seen = f"{report.title(findings)} · {findings.tokens:,} validation tokens · FP64 as truth · {findings.device}"
    figure.text(0.06, 0.93, seen, fontsize=10, color=FAINT)

    above = [figure.add_subplot(grid[0, :2]), figure.add_subplot(grid[0, 2:])]
    for axis, rule in zip(above, (report.PAPER, report.DEFAULT), strict=True):
        for tensor, (colour, line) in TENSORS.items():
            _curve(axis, [layer[rule][tensor].rel_l2 for layer in findings.errors], tensor, colour, line)
        _style(axis, rule)
    shown = [rule for rule in RULES if rule in findings.errors[0]]
    below = [figure.add_subplot(grid[1, column]) for column in range(4)]
    for axis, tensor in zip(below, ("dS rounded", "dQ", "dK", "dV"), strict=True):
        for rule in shown:
            _curve(axis, [layer[rule][tensor].rel_l2 for layer in findings.errors], rule, *RULES[rule])
        _style(axis, tensor)
        axis.set_xlabel("layer", color=FAINT, fontsize=9.5)
    for group in (above, below):  # one scale, so that panels can be compared by eye
        top = max(axis.get_ylim()[1] for axis in group)
        for axis in group:
            axis.set_ylim(0, top)
    for axis, place in ((above[0], 0.9), (below[0], 0.055)):
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="center left", bbox_to_anchor=(0.055, place), ncols=len(labels), frameon=False,
            fontsize=8.5, labelcolor=INK, handlelength=1.6, columnspacing=1.4,
        )  # fmt: skip
    figure.savefig(path)


def _curve(axis: Axes, values: list[float], label: str, colour: str, line: str) -> None:
    axis.plot(range(len(values)), values, line, color=colour, label=label, lw=1.8, marker="o", markersize=3.5)


def _style(axis: Axes, heading: str) -> None:
    axis.set_title(heading, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axis.set_title("Rel-L2", loc="right", fontsize=9, color=FAINT, pad=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#BBBBBB")
    axis.grid(axis="y", color="#E6E6E6", lw=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=FAINT, length=0, labelsize=9.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
