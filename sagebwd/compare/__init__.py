"""Compares the arms of a recipe: what was read, the numbers, pictures, a report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from sagebwd.compare import gap_events, gaps, grid, plot, report, runs, statistics, sweep_report
from sagebwd.compare.runs import Run
from sagebwd.table import aligned

REPORT = "report"
MARGIN = 0.01  # nats per token; a sweep may state another


def compare(folder: Path) -> Path:
    """Compare the runs in `folder`: print the table and write the report into the folder report/ beside the arms, which
    is returned: report.md, summary.json, pictures, TensorBoard events of the gaps; of a sweep gaps.csv and runs.csv.

    Raises UserError: no runs there, or runs that did not see the same samples.
    """
    found = runs.load(folder)
    experiment = runs.experiment(folder)
    target = folder / REPORT
    target.mkdir(exist_ok=True)
    picture = _sweep(target, experiment, found) if experiment.get("variants") else _arms(target, experiment, found)
    print(f"Report: {target / 'report.md'}   Picture: {target / picture}", flush=True)
    return target


def _arms(target: Path, experiment: dict, found: list[Run]) -> str:
    """One cell: every arm beside full precision."""
    reference, problem = statistics.reference(found)
    results = [statistics.evaluate(run, reference) for run in found]
    notes = [note for note in (problem, report.unigram_line(found, results)) if note]
    title, subtitle = report.title(results, reference), report.subtitle(found[0].recipe.name, found)
    colours = plot.palette([run.name for run in found if run is not reference])
    plot.draw(target / report.PICTURE, found, results, reference, colours, title, subtitle)
    gap_events.write(target, found, {} if reference is None else {run.name: reference for run in found})
    text = report.markdown(experiment, found, results, reference, notes)
    (target / "report.md").write_text(text, encoding="utf-8")
    _write_json(target / "summary.json", report.summary(experiment, found, results, notes))
    _say(report.table(results), notes)
    return report.PICTURE


def _sweep(target: Path, experiment: dict, found: list[Run]) -> str:
    """A grid: every arm at every point over its seeds, and the curves of one seed a point."""
    margin = experiment.get("margin", MARGIN)
    against, notes = grid.references(found)
    results = [statistics.evaluate(run, against.get(run.name)) for run in found]
    # The recipe's arms, and what else was found.
    arms = list(dict.fromkeys([*experiment["variants"].values(), *(run.variant for run in found)]))
    points = grid.points(found, results, against, margin, arms)
    # An arm has one colour in all pictures, also where another is missing.
    references = {run.variant for run in against.values()}
    colours = plot.palette(sorted(arms, key=lambda arm: arm in references))
    curves = {}
    of_run = {result.name: result for result in results}
    for name, members in _first_seeds(found).items():
        # Named by their arm alone: the subtitle says of which cell they are.
        of_cell = [replace(of_run[run.name], name=run.variant) for run in members]
        cell = [replace(run, name=run.variant) for run in members]
        reference, _ = statistics.reference(cell)
        title, subtitle = report.title(of_cell, reference), report.subtitle(cell[0].recipe.name, cell)
        plot.draw(target / f"curves-{name}.png", cell, of_cell, reference, colours, title, subtitle)
        curves[f"curves-{name}.png"] = f"Loss curves at {name}, seed {cell[0].cell.seed}"
    if any(point.verdict is not None for point in points):
        subtitle = report.subtitle(found[0].recipe.name, found, sweep=True)
        gaps.draw(target / sweep_report.PICTURE, points, margin, colours, sweep_report.title(points), subtitle)
    gap_events.write(target, found, against)
    text = sweep_report.markdown(experiment, found, results, points, margin, notes, curves)
    (target / "report.md").write_text(text, encoding="utf-8")
    (target / sweep_report.GAPS).write_text(sweep_report.gaps_csv(points), encoding="utf-8")
    (target / sweep_report.RUNS).write_text(sweep_report.runs_csv(found, results), encoding="utf-8")
    _write_json(target / "summary.json", report.summary(experiment, found, results, notes))
    _say(sweep_report.table(points), [*sweep_report.verdict_lines(points), *notes])
    return sweep_report.PICTURE


def _first_seeds(found: list[Run]) -> dict[str, list[Run]]:
    """Point of the grid, as a file's name -> its runs with the smallest seed."""
    chosen: dict[str, list[Run]] = {}
    for run in sorted(found, key=lambda run: run.cell.seed):
        size = f"{run.cell.tokens_per_step}{'' if run.cell.qk_norm else '-noqk'}"
        members = chosen.setdefault(size, [])
        if not members or members[0].cell.seed == run.cell.seed:
            members.append(run)
    return chosen


def _write_json(path: Path, facts: dict) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _say(rows: list[tuple[str, ...]], notes: list[str]) -> None:
    print(f"\n{aligned(rows)}\n")
    for note in notes:
        print(note)
