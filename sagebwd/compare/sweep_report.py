"""A sweep in words and tables: report.md for the reader, gaps.csv and runs.csv for programs."""

from __future__ import annotations

import csv
import io
from typing import Any

from sagebwd.compare import report
from sagebwd.compare.grid import Point
from sagebwd.compare.runs import Run
from sagebwd.compare.seeds import Estimate
from sagebwd.compare.statistics import RISE, Result
from sagebwd.training.health import WINDOW
from sagebwd.training.sweep import short

PICTURE, GAPS, RUNS = "gaps.png", "gaps.csv", "runs.csv"
HEADER = (
    "tokens a step", "QK-norm", "arm", "seeds", "final loss", "bits/byte", "gap to FPA", "95% interval", "verdict",
    "spikes", "diverged", "tokens/s", "MFU", "GiB",
)  # fmt: skip
LEGEND = """\
*final loss*: validation loss at the end, in nats per token, mean ± standard deviation from seed to seed. *gap to FPA*:
its mean difference to full precision at the same seed, so on the same samples in the same order from the same initial
weights; *95% interval* of that mean by Student's t over the seeds. *verdict*: **matches** if the whole interval lies
within ±{margin:g} nats; **worse** or **better** if it lies on one side of 0 and not within that margin; **undecided**
otherwise, and always with fewer than three seeds; **worse** if more of its seeds diverged than of full precision's.
*spikes*: a training loss `health.spike_nats` above the median of the {steps} steps before, over all seeds. *diverged*:
a loss that is not finite, or a validation loss that rises {rise:g} nat above its best; such runs and unfinished ones
are in no mean. *bits/byte*: final loss over the validation text's bytes a token. *tokens/s*, *MFU*: median over the
steps after the first tenth, mean over the seeds; *GiB*: the first rank's peak memory, likewise. Several arms are tested
at several sizes and nothing is corrected for that: one interval in twenty misses its mean, and more than one where
seeds were added after a look at fewer.
"""


def table(points: list[Point]) -> list[tuple[str, ...]]:
    """A row for every arm at every point of the grid, HEADER first, as text."""
    return [HEADER, *(_row(point) for point in points)]


def title(points: list[Point]) -> str:
    """The verdicts in one line: "sagebwd matches at 32k, 128k; sagebwd-paper worse at 32k"."""
    judged = [point for point in points if point.verdict is not None]
    if len({point.variant for point in judged}) > 1 and len({point.verdict.word for point in judged}) == 1:
        return f"every arm {judged[0].verdict.word} wherever it was run"
    both = len({point.qk_norm for point in points}) > 1
    said: dict[str, dict[str, list[str]]] = {}
    for point in judged:
        norm = f" {'with' if point.qk_norm else 'without'} QK-norm" if both else ""
        place = short(point.tokens_per_step) + norm
        said.setdefault(point.variant, {}).setdefault(point.verdict.word, []).append(place)
    parts = [
        f"{variant} {', '.join(f'{word} at {_joined(places)}' for word, places in words.items())}"
        for variant, words in said.items()
    ]
    return "; ".join(parts) or "no arm is paired with full precision"


def verdict_lines(points: list[Point]) -> list[str]:
    """One line a verdict, with its reason."""
    return [
        f"{point.variant} at {point.tokens_per_step:,} tokens a step{'' if point.qk_norm else ' without QK-norm'}: "
        f"{point.verdict.word} ({point.verdict.reason})"
        for point in points
        if point.verdict is not None
    ]


def markdown(
    experiment: dict[str, Any],
    runs: list[Run],
    results: list[Result],
    points: list[Point],
    margin: float,
    notes: list[str],
    curves: dict[str, str],
) -> str:
    """report.md. curves: file -> what it shows."""
    name = runs[0].recipe.name
    rows = table(points)
    legend = LEGEND.format(margin=margin, steps=WINDOW, rise=RISE)
    lines = [f"# Recipe {name}", "", f"**{title(points)}** (margin {margin:g} nats)", ""]
    lines += [f"![Gap to full precision against tokens per step, recipe {name}]({PICTURE})", ""]
    lines += [f"| {' | '.join(rows[0])} |", f"|{'---:|---|---|' + '---:|' * 5 + '---|' + '---:|' * 5}"]
    lines += [f"| {' | '.join(row)} |" for row in rows[1:]]
    lines += ["", *(f"- {line}" for line in verdict_lines(points)), ""]
    lines += [*(f"{note}\n" for note in notes), legend]
    for file, shows in curves.items():
        lines += [f"![{shows}]({file})", ""]
    lines += ["## The runs", "", *_runs_table(runs, results), ""]
    facts = report.setup(experiment, runs, leave_out=("steps", "seed", "wall time"))
    lines += ["## How it was made", "", *facts, "", "## The recipe", "", "The arms of the first cell:", ""]
    lines += [*report.recipe([run for run in runs if run.cell == runs[0].cell]), "", *_swept(runs)]
    return "\n".join(lines) + "\n"


def gaps_csv(points: list[Point]) -> str:
    """A row for every arm at every point of the grid, numbers unrounded, an empty field where there is none."""
    rows = []
    for point in points:
        loss, gap = point.loss, point.gap
        rows.append({
            "arm": point.variant,
            "kind": point.kind,
            "tokens_per_step": point.tokens_per_step,
            "qk_norm": point.qk_norm,
            "seeds": len(point.results),
            "loss_mean": loss and loss.mean,
            "loss_spread": loss and loss.spread,
            "bits_per_byte": point.bits_per_byte,
            "pairs": gap and gap.seeds,
            "gap_mean": gap and gap.mean,
            "gap_spread": gap and gap.spread,
            "gap_low": gap and gap.low,
            "gap_high": gap and gap.high,
            "verdict": point.verdict and point.verdict.word,
            "seeds_to_decide": point.verdict and point.verdict.seeds,
            "spikes": point.spikes,
            "diverged": point.diverged,
            "unfinished": point.unfinished,
        })  # fmt: skip
    return _csv(rows)


def runs_csv(runs: list[Run], results: list[Result]) -> str:
    """A row for every run."""
    rows = [
        {
            "run": run.name,
            "arm": run.variant,
            "tokens_per_step": run.cell.tokens_per_step,
            "qk_norm": run.cell.qk_norm,
            "seed": run.cell.seed,
            "lr": run.recipe.optimizer.lr,
            "steps": result.steps,
            "status": result.status,
            "final": result.final,
            "best": result.best,
            "bits_per_byte": result.bits_per_byte,
            "gap": result.gap,
            "spikes": result.spikes,
            "diverged": result.diverged,
            "tokens_per_second": result.tokens_per_second,
            "mfu": result.mfu,
            "memory_gib": result.memory_gib,
            "wall_seconds": run.meta.get("wall_seconds"),
        }
        for run, result in zip(runs, results, strict=True)
    ]
    return _csv(rows)


def _row(point: Point) -> tuple[str, ...]:
    loss, gap = point.loss, point.gap
    seeds = str(len(point.results)) + (f" ({point.unfinished} unfinished)" if point.unfinished else "")
    return (
        f"{point.tokens_per_step:,}",
        "yes" if point.qk_norm else "no",
        point.variant,
        seeds,
        "" if loss is None else _with_spread(loss),
        "" if point.bits_per_byte is None else f"{point.bits_per_byte:.4f}",
        "" if gap is None else f"{gap.mean:+.4f}",
        "" if gap is None or gap.low is None else f"{gap.low:+.4f} to {gap.high:+.4f}",
        "" if point.verdict is None else point.verdict.word,
        str(point.spikes),
        str(point.diverged),
        _mean([result.tokens_per_second for result in point.results], "{:,.0f}"),
        _mean([result.mfu for result in point.results], "{:.1%}"),
        _mean([result.memory_gib for result in point.results], "{:.1f}"),
    )


def _with_spread(loss: Estimate) -> str:
    return f"{loss.mean:.4f}" + ("" if loss.spread is None else f" ± {loss.spread:.4f}")


def _mean(values: list[float | None], pattern: str) -> str:
    known = [value for value in values if value is not None]
    return pattern.format(sum(known) / len(known)) if known else ""


def _joined(places: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(places[:-1]), places[-1])))


def _runs_table(runs: list[Run], results: list[Result]) -> list[str]:
    lines = ["| run | learning rate | steps | final loss | gap to FPA | wall time, s | diverged |"]
    lines += ["|---|---:|---:|---:|---:|---:|---|"]
    for run, result in zip(runs, results, strict=True):
        gap = "" if result.gap is None else f"{result.gap:+.4f}"
        seconds = f"{run.meta['wall_seconds']:,.0f}" if "wall_seconds" in run.meta else ""
        state = "no" if result.status == "done" else "unfinished"
        lines.append(
            f"| {run.name} | {run.recipe.optimizer.lr:g} | {result.steps:,} | {result.final:.4f} | {gap} | "
            f"{seconds} | {result.diverged or state} |"
        )
    return lines


def _swept(runs: list[Run]) -> list[str]:
    """What the cells differ by, besides the seed."""
    sizes = {
        run.cell.tokens_per_step: f"{run.cell.tokens_per_step:,} tokens a step: learning rate "
        f"{run.recipe.optimizer.lr:g}, {run.recipe.train.total_tokens // run.cell.tokens_per_step:,} steps"
        for run in runs
    }
    seeds = sorted({run.cell.seed for run in runs})
    norms = {True: "with", False: "without"}
    return [
        "The grid:",
        "",
        *(f"- {sizes[size]}" for size in sorted(sizes)),
        f"- seeds {', '.join(map(str, seeds))}; "
        f"{' and '.join(dict.fromkeys(norms[run.cell.qk_norm] for run in runs))} QK-norm",
    ]


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
